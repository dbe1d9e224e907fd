"""What the real one does in a worker: it has a session of its own, and outlives the client.

RESTEnvironment.pm fork_worker: INT, QUIT, PIPE and TERM that reach us do not end it; its stdout and stderr
arrive as our stdout; how it failed is said on stderr, and the exit code is then 255.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable

from .errors import Died


def task(work: Callable[[], None]) -> None:
    """Run `work` in a worker, and wait for it. Raises Died if it died."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    output, said = os.pipe(), os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(output[0])
        os.dup2(output[1], 1)
        os.dup2(output[1], 2)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        os._exit(_worker(work, said[1]))
    os.close(output[1])
    os.close(said[1])
    while block := os.read(output[0], 1 << 16):
        with contextlib.suppress(OSError):  # nobody may be listening any more
            os.write(1, block)
    with open(said[0], "rb") as pipe:
        sentence = pipe.read().decode()
    os.waitpid(pid, 0)
    if sentence:
        raise Died(sentence)


def _worker(work: Callable[[], None], said: int) -> int:
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):  # what it starts must not ignore them
        signal.signal(number, _interrupted)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        work()
        return 0
    except Died as died:
        sentence = str(died).replace("\n", " ")
    except BaseException:  # a fault of the stand-in's own
        import traceback

        sentence = traceback.format_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os.write(said, sentence.encode())
    return 255


def _interrupted(*_: object) -> None:
    raise Died("received interrupt")
