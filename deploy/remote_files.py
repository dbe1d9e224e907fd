"""Files of a host on which we can only run commands: written, read and made to appear by Python there."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy import files as on_files
from deploy.host import SCRIPT_FLAGS, Host, HostError, NoPython, Result

log = logging.getLogger(__name__)

TIMEOUT = 300.0  # seconds for a file or a tree of them


class RemoteFiles(ABC):
    """The part of a Host that acts on files, made from its `run`."""

    name: str
    python: str

    @abstractmethod
    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        env: Mapping[str, str] | None = None,
        input: bytes | None = None,
        check: bool = True,
    ) -> Result:
        """As `Host.run`."""

    def write(self, path: str, data: bytes, *, mode: int = 0o644, parents: bool = False) -> None:
        log.debug("%s: write %s (%d bytes, mode %o)", self.name, path, len(data), mode)
        request = on_files.request("write", path, {"": data}, mode=mode, parents=parents)
        self._ask(request, f"cannot write {path}")

    def write_tree(self, path: str, files: Mapping[str, bytes], *, mode: int = 0o644) -> bool:
        on_files.check_names(path, files)
        log.debug("%s: write %s/ (%d files)", self.name, path, len(files))
        said, _ = self._ask(on_files.request("write_tree", path, files, mode=mode), f"cannot write {path}")
        return bool(said["ok"])

    def read(self, path: str) -> bytes | None:
        said, data = self._ask(on_files.request("read", path, {}), f"cannot read {path}")
        return data if said["ok"] else None

    def _ask(self, request: bytes, what: str) -> tuple[dict[str, Any], bytes]:
        program = Path(on_files.__file__).read_bytes() + b"\nanswer()\n"
        argv = [self.python, *SCRIPT_FLAGS, "-c", _FROM_STDIN, str(len(program))]
        result = self.run(argv, timeout=TIMEOUT, input=program + request)
        head, _, data = result.out.partition(b"\n")
        try:
            said = json.loads(head)
        except ValueError:
            raise HostError(f"{self.name}: {what}: the answer there was {result.out[:200]!r}") from None
        if "error" in said:
            raise HostError(f"{self.name}: {what}: {said['error']}")
        return said, data


_FROM_STDIN = "import sys; exec(compile(sys.stdin.buffer.read(int(sys.argv[1])), 'files', 'exec'))"


def no_python(host: Host) -> NoPython:
    """The error for a host on which there is no such Python as our scripts need."""
    return NoPython(
        f"{host.name}: there is no {host.python} there, which Drafthouse needs (3.9 or later); "
        f"fab bootstrap --host {host.name} installs it"
    )
