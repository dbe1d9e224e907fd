"""How this process keeps its memory while it trains: every step needs again what the one before it freed."""

from __future__ import annotations

import ctypes
import gc

# Of malloc.h: so much free memory at the end of the heap is kept; larger blocks are mapped one by one.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 2**31 - 1


def settle() -> None:
    """Between the start and the first step, on a CPU: what is there now stays.

    Python's collector need not look through all modules ever imported again, which took a tenth of a small
    drafter's step. And memory that is freed stays with the process: by itself glibc gives every large block
    back to the kernel, and the next step gets it anew, page by page, each cleared, which took a fifth of a
    step over a long context.
    """
    gc.collect()
    gc.freeze()
    keep_freed_memory()


def keep_freed_memory() -> bool:
    """Whether the C library could be told so; another one than glibc cannot."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_TRIM_THRESHOLD, _LARGEST))
