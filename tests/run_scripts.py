"""Scripts as people write them to start a training, and a bash that runs them with a Python that tells."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import time
from pathlib import Path

# Each starts one program, and everything that this program gets can be known. case.sh is the script of the
# mission, as the run behind it was started.
SCRIPTS = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "scripts").glob("*.sh"))}


class Bash:
    """A directory that stands for a host's root, with a venv and a Python that tells how it was called."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "root"
        self.out = root / "told"
        for place in (self.home / "venv" / "bin", root / "workspace", root / "stub", self.out):
            place.mkdir(parents=True)
        stub = (
            f"#!/bin/sh\ncat /proc/$$/cmdline > {self.out}/argv; cat /proc/$$/environ > {self.out}/environ\n"
        )
        stub += (
            f"readlink /proc/$$/cwd > {self.out}/cwd; ulimit -n > {self.out}/nofile; echo > {self.out}/done\n"
        )
        for place, names in (
            (root / "stub", ("accelerate", "torchrun", "deepspeed", "python3")),
            (self.home / "venv" / "bin", ("python3",)),
        ):
            for name in names:
                (place / name).write_text(stub)
                (place / name).chmod(0o755)
        (self.home / "env.sh").write_text('export LEVEL=${1:-none}\nOWN="a b"\n')
        text = (Path(sysconfig.get_path("stdlib")) / "venv/scripts/common/activate").read_text()
        for key, value in {
            "VENV_DIR": self.home / "venv",
            "VENV_BIN_NAME": "bin",
            "VENV_PROMPT": "(venv) ",
        }.items():
            text = text.replace(f"__{key}__", str(value))
        (self.home / "venv" / "bin" / "activate").write_text(text)
        self.login = {"HOME": str(self.home), "PATH": f"{root}/stub:/usr/bin:/bin", "LANG": "C.UTF-8"}

    def placed(self, script: str) -> str:
        """`script` with its places below our root, so that it touches nothing else."""
        for place in ("/root", "/workspace", "/tmp/torchinductor", "/dev/shm"):
            script = script.replace(place, f"{self.root}{place}")
        return script

    def run(self, script: str) -> tuple[list[str], dict[str, str], str, str]:
        """(argv, environment, working directory, limit of open files) of the one Python that it starts."""
        path = self.home / "run.sh"
        path.write_text(self.placed(script))
        subprocess.run(
            ["bash", str(path)], cwd=self.home, env=self.login, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False, timeout=60,
        )  # fmt: skip
        deadline = time.monotonic() + 20
        while not (self.out / "done").exists():  # it may be in the background
            assert time.monotonic() < deadline, script
            time.sleep(0.005)
        argv = os.fsdecode((self.out / "argv").read_bytes()).split("\0")[1:-1]
        variables = os.fsdecode((self.out / "environ").read_bytes()).split("\0")[:-1]
        environment = dict(one.partition("=")[::2] for one in variables)
        told = [(self.out / name).read_text().strip() for name in ("cwd", "nofile")]
        return argv, environment, told[0], told[1]
