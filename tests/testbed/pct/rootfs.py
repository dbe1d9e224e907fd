"""What containers are made of: a Debian as people have it, kept in the work directory between sessions.

It is the tests' minimal Debian with Python, procps, systemd and tini, but without cron. It lies there twice,
with the ids of a privileged and of an unprivileged container: a new container is an overlay, made in no time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
from pathlib import Path

from .. import base_image
from ..place import run, work_directory
from .standin.lxcconfig import SHIFT

PACKAGES = ("python3", "procps", "systemd", "systemd-sysv", "iproute2", "tini")
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
printf 'force-unsafe-io\npath-exclude=/usr/share/man/*\npath-exclude=/usr/share/locale/*\n' \
  >"$2/etc/dpkg/dpkg.cfg.d/testbed"
printf '#!/bin/sh\nexit 101\n' >"$2/usr/sbin/policy-rc.d"
chmod 755 "$2/usr/sbin/policy-rc.d"
chroot "$2" apt-get update -q -o Acquire::Languages=none
chroot "$2" apt-get install -y -q --no-install-recommends $3
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


def provide(*, unprivileged: bool = False) -> Path:
    """The directory of the whole file system, with a container's ids; made if it is not there yet."""
    digest = hashlib.sha256("\0".join((MAKE, PLAIN_INIT, *PACKAGES, *MASKED)).encode()).hexdigest()[:12]
    place = work_directory() / f"pct-{digest}"
    work_directory().mkdir(parents=True, exist_ok=True)
    with open(place.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be at it
        if not place.exists():
            _make(place)
    return place / ("shifted" if unprivileged else "plain")


def _make(place: Path) -> None:
    partial = place.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    plain = partial / "plain"
    within = ["unshare", "--mount", "sh", "-c", MAKE, "sh", base_image.debian_tarball(), plain]
    run(
        [*within, " ".join(PACKAGES), " ".join(MASKED)],
        timeout=900,
        env={"DEBIAN_FRONTEND": "noninteractive"},
    )
    init = plain / "usr/local/sbin/plain-init"
    init.write_text(PLAIN_INIT)
    init.chmod(0o755)
    run(["cp", "-a", plain, partial / "shifted"], timeout=300)
    shift(partial / "shifted")
    partial.rename(place)


def shift(top: Path) -> None:
    """Give everything below `top` to the ids that an unprivileged container's have outside."""
    for folder, _, names in os.walk(top):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            _shift(path)
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_symlink() and entry.is_dir():
                    _shift(entry.path)


def _shift(path: str) -> None:
    known = os.lstat(path)
    os.lchown(path, known.st_uid + SHIFT, known.st_gid + SHIFT)
    if not stat.S_ISLNK(known.st_mode) and known.st_mode & 0o6000:
        os.chmod(path, stat.S_IMODE(known.st_mode))  # a change of owner takes these bits away
