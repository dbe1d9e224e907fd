"""When a moment was that a person typed: ``2m``, ``1h30m``, ``14:05``, ``2026-07-01T12:00``."""

from __future__ import annotations

import datetime
import re

from deploy.errors import USAGE, DeployError

_SPAN = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?")
_UNITS = (86400, 3600, 60, 1)
_FORMS = "give a span like 90s, 2m, 1h30m or 2d, a time like 14:05, or a date and time like 2026-07-01T14:05"


def moment(flag: str, text: str, now: datetime.datetime) -> float:
    """The Unix time that `text` means at `now` (local time, without a zone; `text` is local time, too).

    A time of day is the latest one that is past. Raises DeployError, naming `flag`, for anything else.
    """
    text = text.strip()
    span = _SPAN.fullmatch(text)
    if span and text:
        counts = [int(found[:12]) for found in span.groups("0")]
        return now.timestamp() - sum(count * unit for count, unit in zip(counts, _UNITS, strict=True))
    clock = _CLOCK.fullmatch(text)
    try:
        if clock:
            hour, minute, second = (int(found) for found in clock.groups("0"))
            when = now.replace(hour=hour, minute=minute, second=second, microsecond=0)
            if when > now:
                when -= datetime.timedelta(days=1)
        else:
            when = datetime.datetime.fromisoformat(text)
        found = when.timestamp()
    except (ValueError, OverflowError, OSError):
        raise DeployError(f"{flag} {text[:60]!r} is no time; {_FORMS}", code=USAGE) from None
    if found > now.timestamp():
        raise DeployError(f"{flag} {text} is in the future; {_FORMS}", code=USAGE)
    return found
