"""Ctrl-C while `fab` starts and ends. Imports next to nothing: it is what fabfile.py does first."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

CODE = 130  # the exit code of what Ctrl-C has ended
ITSELF = Path(sys.argv[0]).stem == "fab" and threading.current_thread() is threading.main_thread()


def ends_at_once() -> None:
    """Until a task begins, and after its end, Ctrl-C ends the command without a word. (Invoke would exit with
    1; an exception, while modules are imported, would be a traceback.)"""
    if ITSELF:
        signal.signal(signal.SIGINT, lambda *_: os._exit(CODE))
