"""A Proxmox VE host, as far as a deployment needs one: `pct` over real LXC, behind a real sshd.

`standin/` has the programs, which run in the box; `rootfs` what containers are made of; `box` the host
itself; `container` one of its containers.
"""
