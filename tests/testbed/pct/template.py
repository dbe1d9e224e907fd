"""A template that containers are made from in a moment: Python, a shell, tini, and little besides (30 MB)."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tarfile
from pathlib import Path

from ..place import work_directory
from . import rootfs

# Of the tests' Debian: by the beginning of a path below its root.
WANTED = (
    *("usr/bin/cat", "usr/bin/dash", "usr/bin/env", "usr/bin/id", "usr/bin/ls", "usr/bin/python3"),
    *("usr/bin/setpriv", "usr/bin/sh", "usr/bin/sleep", "usr/bin/tini", "usr/lib/locale/C.utf8"),
    *("usr/lib/python3.11/", "usr/lib64/ld-linux-x86-64", "usr/lib/x86_64-linux-gnu/ld-linux-x86-64"),
    *("etc/passwd", "etc/group", "etc/ld.so"),
)
LIBRARIES = re.compile(
    r"usr/lib/x86_64-linux-gnu/lib(c|m|z|dl|rt|pthread|util|expat|selinux|pcre2-8|cap-ng|crypto|ssl|ffi|lzma|bz2"
    r"|uuid|crypt|gcc_s)[-.]"
)
UNWANTED = re.compile(
    r"usr/lib/python3\.11/(test|idlelib|lib2to3|ensurepip|distutils|tkinter|pydoc_data|unittest|site-packages)/"
    r"|/__pycache__/"
)
DIRECTORIES = ("dev", "etc", "opt", "proc", "root", "run", "sys", "tmp", "usr", "var", "var/lib", "var/tmp")


def provide() -> Path:
    """The template, a plain .tar; made if it is not there yet."""
    lower = rootfs.provide()
    place = work_directory() / f"{lower.parent.name}-template.tar"
    with open(place.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be at it
        if not place.exists():
            partial = place.with_suffix(".partial")
            with tarfile.open(partial, "w") as archive:
                _fill(archive, lower)
            partial.rename(place)
    return place


def put(templates: Path, name: str = "small.tar") -> str:
    """Put it into a storage; its volume there."""
    shutil.copy(provide(), templates / name)
    return f"local:vztmpl/{name}"


def _fill(archive: tarfile.TarFile, root: Path) -> None:
    for name in DIRECTORIES:
        archive.add(root / name, f"./{name}", recursive=False)
    for name in ("bin", "lib", "lib64", "sbin"):  # links into usr
        archive.add(root / name, f"./{name}", recursive=False)
    for folder, folders, names in os.walk(root):
        for name in sorted((*names, *folders)):
            path = os.path.relpath(os.path.join(folder, name), root)
            if (path.startswith(WANTED) or LIBRARIES.match(path)) and not UNWANTED.search(f"{path}/"):
                archive.add(root / path, f"./{path}", recursive=False)
