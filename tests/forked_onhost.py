"""Our scripts on this machine, without the start of their Python: each is a fork of one that is there.

`deploy.onhost` starts a Python for each question to a host, and reading the standard library takes it most of
its time. `use()` has those for this machine forked off one that has read it, and nothing of ours: the program
arrives, is unpacked and runs as ever, in a process of its own with its own environment, session and pipes,
and what it does to itself is seen by nobody else. Everything but the start of an interpreter stays tested;
that is what the tests of `onhost`, of SSH and of engines have, and `fab` where it is started as a program.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from forked import Popen, Python

from deploy import onhost
from deploy.host import SCRIPT_FLAGS, Local

# What our scripts import of the standard library.
PRELOADED = (
    "argparse", "array", "bz2", "collections", "concurrent.futures.thread", "contextlib", "ctypes",
    "dataclasses", "datetime", "difflib", "errno", "fcntl", "fnmatch", "functools", "glob", "grp", "hashlib",
    "importlib.machinery", "inspect", "io", "json", "logging", "lzma", "marshal", "mmap", "pathlib", "pwd",
    "queue", "re", "select", "selectors", "shlex", "shutil", "signal", "socket", "stat", "statistics",
    "struct", "subprocess", "tarfile", "tempfile", "threading", "traceback", "typing", "urllib.parse",
    "warnings", "zlib",
)  # fmt: skip
REAL = Local._start
PREFIX = [sys.executable, *SCRIPT_FLAGS, "-c", onhost._LOADER]


def linker(env: Mapping[str, str]) -> dict[str, str]:
    """What tells the dynamic linker what to load; it has done so before a fork."""
    return {name: value for name, value in env.items() if name.startswith("LD_")}


LINKED = linker(os.environ)


def use() -> Callable[[], None]:
    """From now on, in this process and in what is forked off it. Returns what ends that."""
    python = Python(PRELOADED, Path("/"), flags=SCRIPT_FLAGS)

    def start(
        self: Local, argv: Sequence[str], env: Mapping[str, str] | None, stdin: int
    ) -> subprocess.Popen[bytes]:
        whole = {**os.environ, **(env or {})}
        if list(argv[: len(PREFIX)]) != PREFIX or linker(whole) != LINKED:
            return REAL(self, argv, env, stdin)
        pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        words = argv[1 + len(SCRIPT_FLAGS) :]
        return Popen(python, words, os.getcwd(), whole, **pipes, start_new_session=True)

    Local._start = start  # type: ignore[method-assign]

    def end() -> None:
        Local._start = REAL  # type: ignore[method-assign]
        python.close()

    return end
