"""The beginning of each program: it is root's, and how it failed is said in one way."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from .errors import Died
from .world import World


def main(name: str, settings: str) -> None:
    started_with = Path("/proc/self/environ").read_bytes().split(b"\0")
    if not any(variable.startswith(b"LC_CTYPE=") for variable in started_with):
        os.environ.pop("LC_CTYPE", None)  # Python's own idea, in the C locale
    os.environ["PATH"] = "/sbin:/bin:/usr/sbin:/usr/bin"  # CLIHandler.pm run_cli_handler
    try:
        if name != "pveversion" and os.geteuid() != 0:
            raise Died("please run as root")  # RESTEnvironment.pm: it acts as root@pam, so it must be root
        importlib.import_module(f"{__package__}.{name}").main(World(settings), sys.argv[1:])
    except Died as died:
        sys.stdout.flush()
        print(died, file=sys.stderr)
        sys.exit(died.code)
    except BrokenPipeError:
        os._exit(141)
