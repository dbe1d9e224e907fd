"""What the tasks of `fab` have in common as a command line: flags and their help, errors, Ctrl-C, exit codes.

fabfile.py makes its menu with `task`; what a task does once its flags are read is in `deploy.conduct`.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fabric import Connection
from fabric import task as fabric_task
from invoke import Collection, Context, Exit

from deploy import early, interrupt, output
from deploy.errors import USAGE, DeployError

# What is imported lives as long as we do: looking through it again and again is a tenth of a short command.
gc.set_threshold(100_000)

HELP = {
    "host": "a host of fabric.yaml or of the SSH configuration (default: localhost)",
    "name": "the experiment (default: the run file's name)",
    "run": "a file in runs/, or a path (default: run: of the host, else demo)",
    "run-id": "one run, like 0007-demo (default: the newest of the name)",
    "set": "KEY=VALUE for this run, like lr=3e-4; may be given several times",
    "dry-run": "print the plan and end",
    "json": "answer in JSON, for scripts",
    "no-follow": "do not follow the log",
    "lines": "how many lines of the past to show (default 20); with --grep, how many matches",
    "since": "show what was written since then: 2m, 1h30m, 14:05, 2026-07-01T14:05",
    "grep": "show only lines that match this regular expression, and launch's own",
    "lock-wait": "seconds to wait for another deploy of the name (default 0; stop: 600)",
    "no-checkpoint": "do not ask for a checkpoint first: what was learnt since the last one may be lost",
    "no-install": "do not install tini, even if it is missing and we are root",
    "same": "start the deployed release again, whatever the files say now",
    "debug": "log every command that is run",
    "out": "a directory to write to",
    "accept-new-host-key": "trust a host that SSH does not know yet (a changed key is never trusted)",
    "rollback-on-failure": "if the new run dies before its first step, start the release before it again",
    "build": "where the image is built: host (default) or local, then only what the host lacks travels",
    "for": "engine, or pct: one file that a Proxmox host takes (default: as the host's runtime has it)",
    "form": "with --for pct: oci (Proxmox 9.1 and later) or template (default: by the host's version)",
    "release": "a release of the name, instead of the previous one",
    "what": "checkpoint (default), events, log or run",
    "keep": "how many releases and runs of each name stay",
    "yes": "do not ask",
    "pid": "one process of the host, whoever started it (default: every Python process of the run)",
    "flush": "ask the process to write it (Python 3.14 and later)",
    "verbose": "the evidence behind each verdict",
    "watch": "refresh in place until Ctrl-C; without a terminal, print once per interval",
    "before": "a run, like 0007-demo, or a name (its newest run); of another host HOST:RUN",
    "after": "the run to compare with it",
    "of": "a run, like 0007-demo, or a name (its newest run); of another host HOST:RUN",
    "last": "how many of the newest logged records count (default 50)",
    "plot": "write a picture to this PNG file",
    "clear": "take the reference of the name away",
    "interval": "with --watch, seconds between two refreshes (default 2)",
    "directory": "a directory of this machine (push), or of the host (stage)",
    "rsync": "by rsync, as to hosts without Python (slower; keeps no copy on the disk there)",
    "streams": "how many connections side by side (default: by cores and distance)",
    "evict-first": "if old and new weights do not fit together, the old ones go first (deploy: once stopped)",
    "as-trainer": "write trainer: with our trainer's flags, in place of command:",
    "force": "replace a file that is there",
    "copy": "a name, NAME@DIGEST or a path, as fab weights.list shows them",
}
EVERYWHERE = {  # of tasks that show all there is, if nothing else is said
    "host": "one host (default: localhost and every host of fabric.yaml)",
    "name": "one name (default: every name)",
    "run-id": "one run, like 0007-demo (default: the newest of each name, and all in progress)",
}
EVERY_NAME = {"name": EVERYWHERE["name"]}


def task(
    root: Path, said: Mapping[str, str] | None = None, **flags: Any
) -> Callable[[Callable[..., int | None]], Any]:
    """A task of the menu: no short flags (`-h` would be `--host`), one sentence for an error, exit codes.

    `root` is the project's directory. `said` is what HELP says of its flags, where that is not true of it.
    """

    def wrap(body: Callable[..., int | None]) -> Any:
        @functools.wraps(body)
        def run(context: Context, *args: Any, **kwargs: Any) -> None:
            code: int | None
            try:
                if threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                kwargs["host"] = one_host(context, kwargs.get("host"))
                if kwargs.get("debug"):
                    import logging

                    logging.basicConfig(
                        level=logging.DEBUG, format="%(name)s: %(message)s", stream=sys.stderr
                    )
                    logging.getLogger("paramiko").setLevel(logging.WARNING)
                early.begin(kwargs["host"], root, bool(kwargs.get("accept_new_host_key")))
                code = body(context, *args, **kwargs)
                sys.stdout.flush()
            except DeployError as error:
                raise Exit(here(str(error)), code=error.code) from None
            except KeyboardInterrupt:
                text = here("interrupted; fab status shows what is in progress")
                raise Exit(text, code=interrupt.CODE) from None
            except BrokenPipeError:  # | head: what only shows something has done enough
                code = 1 if "dry_run" in body.__annotations__ else 0
            except output.Unwritable as error:
                raise Exit(str(output.sentence(error)), code=1) from None
            finally:
                if threading.current_thread() is threading.main_thread():
                    interrupt.ends_at_once()
            if code:
                raise Exit(code=code)

        # (A word of Python's, like for, has an underscore behind it there.)
        names = {key.rstrip("_").replace("_", "-") for key in body.__annotations__}
        words = {key: text for key, text in {**HELP, **(said or {})}.items() if key in names}
        return fabric_task(auto_shortflags=False, help=words, **flags)(run)

    return wrap


def part(root: Path, of: Collection, name: str, **flags: Any) -> Callable[[Callable[..., int | None]], Any]:
    """A task in a part of the menu: ``push`` in ``weights`` is ``fab weights.push``."""

    def wrap(body: Callable[..., int | None]) -> Any:
        of.add_task(task(root, name=name, **flags)(body))
        return body  # no task: else the menu would have it a second time, outside its part

    return wrap


def one_host(context: Context, host: str | None) -> str | None:
    """The host of `--host` after the task, or of `-H` before it. (deploy.executor refuses both at once.)"""
    return context.original_host if isinstance(context, Connection) else host


def whole(flag: str, text: str, most: int | None = None) -> int:
    """A count given on the command line. (Invoke's own numbers answer a mistake with a traceback.)"""
    if most is not None and not (text.isdecimal() and len(text) <= 9 and 1 <= int(text) <= most):
        raise DeployError(f"{flag} {text[:40]} must be a whole number from 1 to {most}", code=USAGE)
    if not text.isdecimal():
        raise DeployError(f"{flag} {text} must be a whole number, like {flag} 60", code=USAGE)
    if len(text) > 9:  # beyond what clocks and Python's own reading of numbers take
        raise DeployError(f"{flag} is {text[:9]}…, but must have at most 9 digits", code=USAGE)
    return int(text)


def one_process(pid: str | None, of_a_run: str | None) -> int | None:
    """--pid as a number, which excludes what names a run."""
    if pid is not None and of_a_run:
        raise DeployError("--pid names a process; give no --run, --name or --run-id beside it", code=USAGE)
    return None if pid is None else whole("--pid", pid)


def one_run(name: str | None, run_id: str | None) -> None:
    """--run-id beside --name must be a run of that name."""
    from trainer import status

    if name is None or run_id is None:
        return
    try:
        of = status.split_run_id(run_id)[1]
    except ValueError:
        return  # whoever looks for it says that there is none
    if of != name:
        raise DeployError(f"--run-id {run_id} is a run of {of}, not of {name}; give one of them", code=USAGE)


def waits(lock_wait: str) -> Any:
    """--lock-wait as one deadline, for planning and for the lock."""
    from deploy import lock

    return lock.Patience(whole("--lock-wait", lock_wait))


def here(text: str) -> str:
    """`text` with its hints as they can be typed: who comes by `make` has no `fab` on the PATH."""
    if shutil.which("fab"):
        return text
    return re.sub(r"\bfab (?=[a-z])", f"{os.path.relpath(sys.argv[0])} ", text)


def say(text: str) -> None:
    """Progress: beside the result, never in it."""
    print(here(text), file=sys.stderr, flush=True)
    if output.broken(sys.stderr):
        raise BrokenPipeError


def show(value: Any) -> int:
    """The answer for a script."""
    import json

    print(json.dumps(value, indent=1, ensure_ascii=False, default=str), flush=True)
    return 0
