"""What containers are made of: a Debian as people have it, kept in the work directory between sessions.

It is the tests' minimal Debian with Python, procps, systemd and tini, but without cron. A new container is an
overlay over it (for an unprivileged one with its ids shifted, see `shifted`), and is made in no time.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from pathlib import Path

from .. import base_image
from ..place import run, work_directory

PACKAGES = ("python3", "procps", "systemd", "systemd-sysv", "tini", "rsync")
# Nobody logs in there, and each of them takes a tenth of a second of a boot.
MASKED = (
    "console-getty.service",
    "getty@.service",
    "systemd-logind.service",
    "systemd-journal-flush.service",
    "sys-kernel-debug.mount",
    "e2scrub_reap.service",
    "modprobe@.service",
)
MAKE = r"""
set -eu
mkdir "$2"
tar -xf "$1" -C "$2" --numeric-owner --exclude='./dev/*'
mount --bind /dev "$2/dev"
mount -t proc proc "$2/proc"
cp /etc/resolv.conf "$2/etc/resolv.conf"
printf 'path-exclude=/usr/share/%s/*\n' man locale doc >"$2/etc/dpkg/dpkg.cfg.d/testbed"
echo force-unsafe-io >>"$2/etc/dpkg/dpkg.cfg.d/testbed"
printf '#!/bin/sh\nexit 101\n' >"$2/usr/sbin/policy-rc.d"
chmod 755 "$2/usr/sbin/policy-rc.d"
install() { chroot "$2" apt-get install -y -q --no-install-recommends $3; }
# This machine's lists of packages will do if it is a Debian of the same release: a quarter of all the work.
for list in /var/lib/apt/lists/*_dists_bookworm*; do
  name=${list##*/}
  case $name in *_debian-security_*) name=security.debian.org${name#*.org};; esac
  [ ! -f "$list" ] || cp "$list" "$2/var/lib/apt/lists/$name"
done
install "$@" || { chroot "$2" apt-get update -q -o Acquire::Languages=none; install "$@"; }
rm -rf "$2"/var/lib/apt/lists/* "$2"/var/cache/apt/*.bin "$2"/var/cache/apt/archives/*.deb \
  "$2/usr/sbin/policy-rc.d" "$2/etc/resolv.conf" "$2/etc/dpkg/dpkg.cfg.d/testbed"
: >"$2/etc/machine-id"
for unit in $4; do ln -s /dev/null "$2/etc/systemd/system/$unit"; done
"""
# An init that is none: for containers whose owner wants nothing but a place. It ends when it is asked to.
PLAIN_INIT = """#!/bin/sh
mkdir -p /dev/shm && mount -t tmpfs -o mode=1777 shm /dev/shm
exec /usr/bin/tini -s -- sleep infinity
"""


def provide() -> Path:
    """The directory of the whole file system, with a privileged container's ids; made if it is not there."""
    digest = hashlib.sha256("\0".join((MAKE, PLAIN_INIT, *PACKAGES, *MASKED)).encode()).hexdigest()[:12]
    place = work_directory() / f"pct-{digest}"
    work_directory().mkdir(parents=True, exist_ok=True)
    with open(place.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be at it
        if not place.exists():
            _make(place)
    return place


def _make(place: Path) -> None:
    partial = place.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    within = ["unshare", "--mount", "sh", "-c", MAKE, "sh", base_image.debian_tarball(), partial]
    words = [" ".join(PACKAGES), " ".join(MASKED)]
    run([*within, *words], timeout=900, env={"DEBIAN_FRONTEND": "noninteractive"})
    init = partial / "usr/local/sbin/plain-init"
    init.write_text(PLAIN_INIT)
    init.chmod(0o755)
    partial.rename(place)
