"""stdout and stderr of `fab` where nobody reads them any more, or where their disk is full.

Python itself would answer with a traceback, or with exit code 120 from its last flush. Here the first failure
is an error that whoever prints can answer, everything written after it goes nowhere, and what is noticed only
at the very end is said all the same.
"""

from __future__ import annotations

import atexit
import errno
import io
import os
import sys
from typing import Any, TextIO

from deploy.errors import DeployError

_ends_with: list[int] = []  # the exit code, if it is another than Python's


class Unwritable(OSError):
    """What was printed could not be written, for another reason than that nobody reads it."""


class _Raw(io.FileIO):
    """A file descriptor of which only the first failure is an error; `quiet`: not even that."""

    def __init__(self, descriptor: int, quiet: bool) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.failure: OSError | None = None
        self.told = quiet

    def write(self, data: Any) -> int:
        if self.failure is None:
            try:
                return super().write(data) or 0
            except OSError as error:
                self.failure = error
                if not self.told:
                    raise_for(error)
        return memoryview(data).nbytes


def raise_for(error: OSError) -> None:
    """Raise BrokenPipeError or Unwritable for a failed write."""
    if error.errno == errno.EPIPE:
        raise BrokenPipeError(*error.args) from None
    raise Unwritable(*error.args) from None


def guard() -> None:
    """Make sys.stdout and sys.stderr what is said above. One that the shell has closed (>&-) takes all."""
    for name, quiet in (("stdout", False), ("stderr", True)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.flush()
            raw = _Raw(stream.fileno(), quiet)
            guarded = io.TextIOWrapper(
                io.BufferedWriter(raw),
                encoding=stream.encoding,
                errors="replace",  # a terminal whose encoding lacks a sign gets another one
                line_buffering=True,  # before its end Python flushes once and swallows what fails
            )
            setattr(sys, name, guarded)
    sys.excepthook = _uncaught
    atexit.register(_last)


def broken(stream: TextIO) -> bool:
    """Whether nobody reads a guarded stream any more, as far as was noticed."""
    raw = _raw(stream)
    return raw is not None and raw.failure is not None and raw.failure.errno == errno.EPIPE


def sentence(error: OSError) -> DeployError:
    """The error for people."""
    return DeployError(
        f"the answer cannot be written to stdout: {error.strerror}; make room there, or write it elsewhere"
    )


def _raw(stream: Any) -> _Raw | None:
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return raw if isinstance(raw, _Raw) else None


def _uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """What was printed outside a task, by Fabric or for several hosts, fails like anything else."""
    if isinstance(error, Unwritable):
        print(sentence(error), file=sys.stderr)
    elif isinstance(error, BrokenPipeError):
        _ends_with.append(0)
    else:
        sys.__excepthook__(kind, error, trace)


def _last() -> None:
    """Python's last flush: without this, its failure would be exit code 120 with words of Python's own."""
    try:
        sys.stdout.flush()
    except Unwritable as error:
        print(sentence(error), file=sys.stderr, flush=True)
        _ends_with.append(1)
    except (OSError, ValueError):
        pass
    if _ends_with:  # Python lets nothing but this change its exit code now
        os._exit(_ends_with[0])
