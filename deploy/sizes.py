"""Sizes and times for people."""

from __future__ import annotations

import re

_UNITS = "bkmgt"


def size(count: float) -> str:
    """``812 MB``, ``3.2 GB``: powers of ten, as disks and NVIDIA's tools are labelled."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if count >= 9.95 or unit == "B" else f"{count:.1f} {unit}"


def age(seconds: float) -> str:
    """``4 s``, ``12 min``, ``3 h 05 min``, ``2 d 04 h``: two parts at most."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    minutes = whole // 60
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24:02d} h"


_MOST = 2.0**63  # bytes: what a kernel counts


def parse(text: str) -> int | None:
    """Bytes of ``64g``, ``512 MiB`` or ``1073741824``, by powers of 1024 as Docker has it. None: no size."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([bkmgt])?(?:i?b)?\s*", text.lower())
    if not found:
        return None
    bytes_ = float(found[1]) * 1024 ** _UNITS.index(found[2] or "b")
    return int(bytes_) or None if bytes_ < _MOST else None


def printable(text: str) -> str:
    """Untrusted text in one line, without what a terminal would obey."""
    return "".join(char if char.isprintable() else " " for char in text)
