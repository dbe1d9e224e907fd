"""A directory once more, with every id shifted as an unprivileged container has it: an idmapped mount.

`python shifted.py SOURCE TARGET`, in the namespaces where it is wanted. Linux 5.19 (for the overlay over it).
"""

from __future__ import annotations

import ctypes
import os
import sys

SHIFT, COUNT = 100000, 65536
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442  # the same on every architecture
CLONE_NEWUSER = 0x10000000
CLONE_TREE, EMPTY_PATH, FROM_EMPTY_PATH, IDMAP = 1, 0x1000, 4, 0x100000
HERE = -100  # AT_FDCWD


class Attributes(ctypes.Structure):
    """struct mount_attr"""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns"))


libc = ctypes.CDLL(None, use_errno=True)


def call(what: str, *arguments: object) -> int:
    result = getattr(libc, what)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what} {arguments}: {os.strerror(number)}")
    return int(result)


def mount(source: str, target: str) -> None:
    tree = call("syscall", OPEN_TREE, HERE, source.encode(), CLONE_TREE)
    attributes = Attributes(IDMAP, 0, 0, _users())
    size = ctypes.sizeof(attributes)
    call("syscall", MOUNT_SETATTR, tree, b"", EMPTY_PATH, ctypes.byref(attributes), size)
    call("syscall", MOVE_MOUNT, tree, b"", HERE, target.encode(), FROM_EMPTY_PATH)


def _users() -> int:
    """A descriptor of a user namespace with the shift; a process must be in it while its map is written."""
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        call("unshare", CLONE_NEWUSER)
        os.write(ready[1], b".")
        os.close(go[1])
        os.read(go[0], 1)
        os._exit(0)
    os.close(ready[1])
    os.read(ready[0], 1)
    for kind in ("uid", "gid"):
        with open(f"/proc/{pid}/{kind}_map", "w") as file:
            file.write(f"0 {SHIFT} {COUNT}\n")
    users = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
    os.close(go[1])
    os.waitpid(pid, 0)
    return users


if __name__ == "__main__":
    mount(*sys.argv[1:])
