"""Compressing with Zstandard, and reading what was compressed, on the machine that runs fab.

Several threads compress, and their number does not change the result: the input is cut into jobs by the
level alone. The version of libzstd could, so it comes with a pinned package instead of this machine's `zstd`.
"""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any

from deploy.errors import DeployError

if TYPE_CHECKING:
    import zstandard

# The demo's image (1.87 GB of layers) on two busy cores, MB and seconds of CPU: level 1: 707 in 7, 2: 661 in
# 9, 3: 629 in 15, 4: 623 in 18, 6: 596 in 35, 9: 576 in 55. On a line of 1 Gbit/s (118 MB/s) the step from 2
# to 3 saves 0.3 s and costs 6 of CPU; on one of 100 Mbit/s they are even.
LEVEL = 2
BLOCK = 1 << 20


def compressor() -> zstandard.ZstdCompressor:
    """One for one stream; every core works on it. Raises DeployError without the package."""
    # -1: as many threads as there are cores. Never 0, whose result is another one.
    return _library().ZstdCompressor(level=LEVEL, threads=-1, write_checksum=True)


def reader(file: IO[bytes]) -> IO[bytes]:
    """What a compressed file holds, as a stream that cannot be sought. Raises DeployError as `compressor`."""
    found: Any = _library().ZstdDecompressor(max_window_size=1 << 27)
    stream: IO[bytes] = found.stream_reader(file, read_across_frames=True, closefd=False, read_size=BLOCK)
    return stream


def errors() -> type[Exception]:
    """What `reader` raises while it is read, for a stream that is damaged."""
    found: type[Exception] = _library().ZstdError
    return found


def _library() -> Any:
    try:
        import zstandard
    except ImportError:
        raise DeployError(
            "this machine lacks the Python package zstandard, which compresses images for Proxmox: "
            "pip install -c constraints.txt '.[deploy]' in the checkout brings it"
        ) from None
    return zstandard
