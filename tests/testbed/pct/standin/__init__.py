"""A strict stand-in for Proxmox VE's command line, over real LXC. Standard library only; for a `pve_box`.

It takes what the real programs take and refuses what they refuse, with their exit codes and the sentences
that a client has to recognise. Beside a rule stands where it comes from: `pct.pm`, `LXC.pm`, `LXC/Config.pm`,
… are files of Proxmox's pve-container 6.1.10, `JSONSchema.pm`, `CLIHandler.pm` and `RESTEnvironment.pm` of
pve-common, `AbstractConfig.pm` of pve-guest-common, `Storage.pm` of pve-storage. Where it cannot be like the
real one it is stricter, or says "not simulated".
"""
