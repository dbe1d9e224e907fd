"""What the trainer writes its stdout and stderr into, and how launch takes the bytes from there.

A pipe, or with ``tty: true`` a pseudo-terminal in raw mode: a C library that finds a terminal writes each
line at its end, where it would hold back 4 KiB and more for a pipe. Raw means that the kernel adds nothing
to the bytes and answers nothing to them (no echo, no ``\\r`` before ``\\n``, no ``^C``).

Standard library only and Python >= 3.9; Linux.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import termios
import tty

from trainer.starting import USAGE, CannotStart

CHUNK_BYTES = 256 << 10
PIPE_BYTES = 1 << 20  # asked for, so that a trainer hardly ever waits for launch
ROWS, COLUMNS = 24, 120  # what a program is told that asks how wide its terminal is


def make(terminal: bool) -> tuple[int, int]:
    """(launch's end, which never blocks, the trainer's end). Raises CannotStart without terminals."""
    if not terminal:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.fcntl(writing, getattr(fcntl, "F_SETPIPE_SZ", 1031), PIPE_BYTES)
    else:
        try:
            reading, writing = os.openpty()  # neither end becomes launch's controlling terminal
            tty.setraw(writing)
            fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        except (OSError, termios.error) as error:
            why = error.args[-1]
            sentence = (
                f"tty: true needs a pseudo-terminal, and there is none ({why}); mount devpts or remove it"
            )
            raise CannotStart(USAGE, sentence) from None
    os.set_blocking(reading, False)
    return reading, writing


def take(reading: int) -> bytes | None:
    """The next bytes; none at the end, None if there are none yet.

    A pipe ends with its last writer. A terminal says EIO then, after all that was written into it.
    """
    try:
        return os.read(reading, CHUNK_BYTES)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return b""
