"""What became of the conversations of an input: counted by reason, with the places of the first ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

EXAMPLES = 3  # places told for each reason
REASONS = 24  # told apart; a template may put into its refusal what it refuses

# What could move the cursor, change colours or turn the direction of writing: the input is anybody's text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """`text` for a terminal: control characters as ``\\x1b``, but for line ends and tabs."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


@dataclass
class Report:
    """Counts of one input, or of a part of it: parts are added up with `add`."""

    read: int = 0  # conversations
    written: int = 0  # documents
    tokens: int = 0
    supervised: int = 0
    truncated: int = 0  # documents
    cut_tokens: int = 0
    notes: Counter[str] = field(default_factory=Counter)  # by what is said of them
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    examples: dict[str, list[str]] = field(default_factory=dict)  # places by note or reason

    def drop(self, reason: str, place: str) -> None:
        """One that is not written."""
        if reason not in self.dropped and len(self.dropped) >= REASONS:
            reason = "other reasons"
        self._count(self.dropped, reason, 1, place)

    def note(self, what: str, count: int, place: str) -> None:
        """Something to know of one that is written."""
        if count:
            self._count(self.notes, what, count, place)

    def _count(self, counter: Counter[str], what: str, count: int, place: str) -> None:
        counter[what] += count
        if len(self.examples.setdefault(what, [])) < EXAMPLES:
            self.examples[what].append(place)

    def add(self, other: Report) -> None:
        """Take in the counts of the part that follows."""
        for name in ("read", "written", "tokens", "supervised", "truncated", "cut_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.notes, other.notes), (self.dropped, other.dropped)):
            mine.update(theirs)
        for what, places in other.examples.items():
            self.examples[what] = [*self.examples.get(what, []), *places][:EXAMPLES]

    def lines(self) -> Iterator[str]:
        share = f"{self.supervised / self.tokens:.0%}" if self.tokens else "–"
        yield (
            f"{self.read:,} conversations read, {self.written:,} documents written: {self.tokens:,} tokens, "
            f"{share} supervised"
        )
        if self.truncated:
            yield f"{self.truncated:,} cut at --max-seq-len, {self.cut_tokens:,} tokens lost"
        for reason, count in self.dropped.most_common():
            yield f"{count:,} dropped: {reason} ({self._places(reason, count)})"
        for what, count in self.notes.most_common():
            yield f"{count:,} {what} ({self._places(what, count)})"

    def _places(self, what: str, count: int) -> str:
        places = self.examples.get(what, [])
        more = ", …" if count > len(places) else ""
        return ", ".join(places) + more

    def to_json(self) -> dict[str, Any]:
        """What data.json keeps."""
        return {
            "read": self.read,
            "truncated": self.truncated,
            "cut_tokens": self.cut_tokens,
            "dropped": dict(self.dropped),
            "notes": dict(self.notes),
        }
