"""What a training command prints, made safe for a terminal.

A log may hold anything: a title change, a cursor movement, an answer-back request. On a terminal, colours
stay and every other control becomes visible, also those that turn the direction of writing. What the
terminal's encoding lacks becomes a question mark: sent as UTF-8, its bytes could be controls there. Pipes and
files get the bytes untouched.
"""

from __future__ import annotations

import codecs
import re

# Colours and weights (SGR) pass; they change how text looks, nothing else.
_COLOUR = re.compile(r"\x1b\[[0-9;:]{0,64}m")
_CONTROL = re.compile(r"\x1b\[[0-9;:]{0,64}m|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_PLAIN = re.compile(r"\x1b\[[0;]*m")
_UNFINISHED = re.compile(r"\x1b(\[[0-9;:]{0,64})?$")


class Neutraliser:
    """Turns a stream of chunks into text for a terminal; sequences and characters may be split anywhere."""

    def __init__(self, encoding: str = "utf-8") -> None:
        """`encoding` is the terminal's; one that Python does not know is taken for ASCII."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._coloured = False
        try:
            self._encoding = codecs.lookup(encoding).name
        except LookupError:
            self._encoding = "ascii"

    def feed(self, data: bytes, final: bool = False) -> bytes:
        """The printable form of the next `data`; an unfinished sequence waits for its rest."""
        text = self._held + self._decoder.decode(data, final)
        self._held = ""
        if not final and (match := _UNFINISHED.search(text)):
            self._held = text[match.start() :]
            text = text[: match.start()]
        if "\x1b" in text and (colours := _COLOUR.findall(text)):
            self._coloured = not _PLAIN.fullmatch(colours[-1])
        return _CONTROL.sub(_visible, text).encode(self._encoding, "replace")

    def plain(self) -> bytes:
        """What ends the colours that the log has left on."""
        was, self._coloured = self._coloured, False
        return b"\x1b[0m" if was else b""


def _visible(match: re.Match[str]) -> str:
    found = match[0]
    if _COLOUR.fullmatch(found):
        return found
    code = ord(found)
    return "^" + chr(code ^ 0x40) if code < 0x80 else f"<{code:02X}>" if code < 0x100 else f"<U+{code:04X}>"
