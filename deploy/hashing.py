"""Which hash weights and data are verified with, on either side.

XXH3 with 128 bits hashes at 9 to 14 GB/s on one thread, so that reading back is nearly free. Python does not
come with it, but Debian and Ubuntu install libxxhash with apt, and rsync brings it elsewhere: the standard
library's ctypes finds it there, and no package is needed on either side. Else SHA-256, cut to 128 bits: 1.2
to 1.5 GB/s where the CPU has instructions for it (every EPYC, Xeons since 2021), when BLAKE2b does 0.4 to 0.7
and CRC-32, which proves less, 2.4. The manifest names which one it was.

All of them let other threads go on meanwhile. Runs on both sides. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from deploy.errors import DeployError

XXH3, SHA = "xxh3-128", "sha256-128"
BYTES = 16  # of each of them
_STABLE = 800  # the version of libxxhash from which XXH3 gives the values that it gives today

New = Callable[[], Any]  # an object with update(writable buffer) and digest(), as those of hashlib


@functools.cache
def known() -> dict[str, New]:
    """What this Python can compute, the fastest first."""
    found: dict[str, New] = {}
    xxh3 = _library()
    if xxh3:
        found[XXH3] = xxh3
    return {**found, SHA: _Sha}


def names() -> list[str]:
    return list(known())


def function(name: str) -> New:
    """Raises DeployError for a hash that this machine cannot compute."""
    found = known().get(name)
    if found is None:
        raise DeployError(
            f"this copy was verified with {name}, which needs libxxhash here; "
            "install it (Debian and Ubuntu: libxxhash0)"
        )
    return found


def common(others: Sequence[str]) -> str:
    """The fastest hash that we and the other side have. Each side has SHA-256."""
    return next((name for name in known() if name in others), SHA)


class _Sha:
    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.update = self._hash.update

    def digest(self) -> bytes:
        return self._hash.digest()[:BYTES]


def _library() -> New | None:
    try:
        import ctypes

        library = ctypes.CDLL("libxxhash.dylib" if sys.platform == "darwin" else "libxxhash.so.0")
        if library.XXH_versionNumber() < _STABLE:
            return None
        pointer, size = ctypes.c_void_p, ctypes.c_size_t

        class Hash(ctypes.Structure):
            _fields_ = (("low", ctypes.c_uint64), ("high", ctypes.c_uint64))

        create, free, reset = library.XXH3_createState, library.XXH3_freeState, library.XXH3_128bits_reset
        update, digest = library.XXH3_128bits_update, library.XXH3_128bits_digest
        create.restype, create.argtypes = pointer, ()
        free.argtypes = reset.argtypes = (pointer,)
        update.argtypes = (pointer, pointer, size)
        digest.restype, digest.argtypes = Hash, (pointer,)
    except (ImportError, OSError, AttributeError):
        return None

    class Xxh3:
        def __init__(self) -> None:
            self._state = create()
            reset(self._state)

        def __del__(self) -> None:
            free(self._state)

        def update(self, data: Any) -> None:
            view = memoryview(data)
            if view.nbytes:
                update(self._state, (ctypes.c_char * view.nbytes).from_buffer(view), view.nbytes)

        def digest(self) -> bytes:  # in XXH3's canonical form: the first byte is the highest
            found = digest(self._state)
            return bytes(found.high.to_bytes(8, "big") + found.low.to_bytes(8, "big"))

    return Xxh3
