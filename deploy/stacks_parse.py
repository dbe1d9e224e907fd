"""Python stacks as py-spy and faulthandler write them, in one form. Pure.

A thread is ``{"id", "name", "main", "active", "frames"}``: ``frames`` is a list of ``{"function", "file",
"line"}``, innermost call first; ``name`` may be empty, and ``active`` None, where the source does not tell.
The main thread comes first.

Runs ON the host too, so that only what is shown travels. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import json
import re
from typing import Any

# Python 3.14 adds the thread's name.
_THREAD = re.compile(
    r"^(?:Current thread|Thread) 0x([0-9a-fA-F]+)(?: \[(.*)\])? \(most recent call first\):\s*$"
)
_FRAME = re.compile(r'^  File (?:"(.*)"|\?\?\?), line (\d+|\?\?\?) in (.*)$')
_RANK = re.compile(r"^── stacks of rank (\d+) \(pid \d+\)$")
_END = re.compile(r"^── (?:end of the stacks|stacks asked for by )")
# The outermost call of a main thread: a module, or what runs one.
_MAIN = ("<module>", "_run_module_as_main")


def py_spy(text: str) -> list[dict[str, Any]]:
    """What ``py-spy dump --json`` prints. Raises ValueError for anything else."""
    value = json.loads(text)
    if not isinstance(value, list):
        raise ValueError("no list of threads")
    threads = []
    for item in value:
        try:
            frames = [_frame(one["name"], one["filename"], one["line"]) for one in item["frames"]]
            thread = {
                "id": int(item.get("os_thread_id") or item.get("thread_id") or 0),
                "name": str(item.get("thread_name") or ""),
                "main": item.get("thread_name") == "MainThread",
                "active": item.get("active") if isinstance(item.get("active"), bool) else None,
                "frames": frames,
            }
        except (KeyError, TypeError, AttributeError):
            raise ValueError("no threads as py-spy describes them") from None
        threads.append(thread)
    return _main_first(threads)


def faulthandler(text: str) -> list[dict[str, Any]]:
    """What faulthandler prints for all threads, and whatever else a log has between its lines."""
    threads: list[dict[str, Any]] = []
    frames: list[dict[str, Any]] | None = None
    for line in text.splitlines():
        head = _THREAD.match(line)
        if head:
            frames = []
            name = (head[2] or "").strip()
            threads.append(
                {"id": int(head[1], 16), "name": name, "main": False, "active": None, "frames": frames}
            )
        elif frames is not None and (found := _FRAME.match(line)):
            number = int(found[2]) if found[2].isdigit() else 0
            frames.append(_frame(_unescaped(found[3]), _unescaped(found[1] or "???"), number))
        elif line.startswith(("Current thread's C stack", "Extension modules:")):
            frames = None
    return _main_first(threads)


def sections(log: bytes) -> dict[int, str]:
    """What launch had printed of each rank, by rank, from the part of the log that has it."""
    found: dict[int, list[str]] = {}
    rank: int | None = None
    for line in log.decode("utf-8", "replace").splitlines():
        head = _RANK.match(line)
        if head:
            rank = int(head[1])
            found[rank] = []
        elif _END.match(line):
            rank = None
        elif rank is not None:
            found[rank].append(line.removeprefix(f"[{rank}] "))  # (so begin the lines of one of several)
    return {rank: "\n".join(lines) for rank, lines in found.items()}


def _frame(function: str, file: str, line: int) -> dict[str, Any]:
    return {"function": str(function), "file": str(file), "line": int(line or 0)}


def _unescaped(text: str) -> str:
    """faulthandler writes what is not ASCII as ``\\xe4``, ``\\u2265`` or ``\\U0001f600``."""

    def sign(match: re.Match[str]) -> str:
        code = int(match[1] or match[2] or match[3], 16)
        return chr(code) if code < 0x110000 else match[0]

    return re.sub(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})", sign, text)


def _main_first(threads: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The threads, the main one first: it is named so, or begins in a module; Python lists it last."""
    if threads and not any(thread["main"] for thread in threads):
        outermost = [thread["frames"][-1]["function"] if thread["frames"] else "" for thread in threads]
        main = next((i for i, name in enumerate(outermost) if name in _MAIN), len(threads) - 1)
        named = next((i for i, thread in enumerate(threads) if thread["name"] == "MainThread"), main)
        threads[named]["main"] = True
    return sorted(threads, key=lambda thread: not thread["main"])
