"""Whether a directory is a model that can be loaded: by names and headers only, before anything is sent.

Runs on both sides. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from deploy import typedpath
from deploy.errors import DeployError
from deploy.manifest import walk
from deploy.sizes import size

NO_FILE = "is no regular file"
_LARGEST_HEADER = 100 << 20  # what safetensors itself accepts


def check_model_dir(path: Path) -> list[str]:
    """What is wrong with a model directory, a sentence each; empty if it can be loaded.

    Reads headers only: every safetensors file must be exactly as long as its header says, and every file that
    the index names must be there. A copy that broke off, a Git LFS pointer and a half download all show here.
    """
    try:
        kind = typedpath.look(path, f"weights {path}")
        nothing = kind == typedpath.DIRECTORY and not any(path.iterdir())
    except DeployError as error:
        return [str(error)]
    except OSError as error:
        return [f"weights {path} cannot be read: {error.strerror}"]
    if not kind:
        return [f"weights {path} do not exist; correct weights: in the run's file"]
    if kind != typedpath.DIRECTORY:
        return [f"weights {path} are no directory; give the directory that holds config.json"]
    if nothing:
        return [f"weights {path} are empty; give the directory that holds config.json"]
    revisions = [one for one in path.glob("snapshots/*") if one.is_dir()]
    if revisions and not (path / "config.json").exists():
        newest = max(revisions, key=lambda one: one.stat().st_mtime)
        return [f"weights {path} are the cache of several revisions; give one of them: {newest}"]
    found = []
    config = _json(path / "config.json")
    if isinstance(config, str):
        found.append(f"weights {path}: {config}; copy the model again")
    tensors = sorted(path.glob("*.safetensors"))
    if not tensors:
        other = next(iter(sorted(path.glob("*.bin"))), None)
        what = f" ({other.name} is there: convert it)" if other else ""
        found.append(f"weights {path} hold no *.safetensors file{what}; copy the model again")
    if (path / "model.safetensors.index.json").exists():
        index = _json(path / "model.safetensors.index.json")
        named = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(named, dict):
            found.append(
                f"weights {path}: model.safetensors.index.json has no weight_map; copy the model again"
            )
        else:
            missing = sorted({str(name) for name in named.values()} - {file.name for file in tensors})
            if missing:
                more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                found.append(
                    f"weights {path} lack {missing[0]}{more}, which the index names; copy the model again"
                )
    for file in tensors:
        problem = safetensors_problem(file)
        if problem:
            found.append(f"weights {path}: {file.name} {problem}; copy it again")
    try:
        for relative, file in walk(path):
            if file not in (path / "config.json", *tensors) and not file.exists():
                found.append(
                    f"weights {path}: the link {relative} leads nowhere; remove it, or copy the model again"
                )
    except DeployError as error:
        found.append(str(error))
    return found


def safetensors_problem(path: Path) -> str | None:
    """Why a safetensors file cannot be whole; None if its header agrees with its size.

    The format: 8 bytes, little-endian, give the length of a JSON header, whose `data_offsets` count from the
    end of the header (github.com/huggingface/safetensors, README).
    """
    try:
        if not _is_file(path):
            return NO_FILE
        actual = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(8)
            if start == b"version ":
                return "is a Git LFS pointer, not the file itself"
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > _LARGEST_HEADER or 8 + length > actual:
                return f"is damaged: {size(actual)} cannot hold its header"
            header = json.loads(file.read(length))
        ends = [_end(item) for key, item in header.items() if key != "__metadata__"]
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "is damaged: its header is no valid JSON"
    expected = 8 + length + max(ends, default=0)
    if actual != expected:
        return f"is {actual:,} bytes long, but its header says {expected:,}"
    return None


def _is_file(path: Path) -> bool:
    """Not what waits for ever when it is opened, like a FIFO. Raises OSError."""
    return stat.S_ISREG(path.stat().st_mode)


def _end(tensor: Any) -> int:
    """Where a tensor of a header ends. Raises ValueError, KeyError or TypeError."""
    begin, end = tensor["data_offsets"]
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise ValueError("no offsets")
    return end


def _json(path: Path) -> dict[str, Any] | str:
    """The object in a file, or what is wrong with it."""
    try:
        if not _is_file(path):
            return f"{path.name} {NO_FILE}"
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    except (ValueError, RecursionError):
        return f"{path.name} is no valid JSON"
    return value if isinstance(value, dict) else f"{path.name} holds no JSON object"
