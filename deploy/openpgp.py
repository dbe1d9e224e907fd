"""The fingerprint of an OpenPGP key, without a gpg (RFC 4880, sections 4.2, 6.2 and 12.2)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re

PUBLIC_KEY = 6  # the tag of a primary key's packet


def fingerprint(key: bytes) -> str:
    """Of the only primary key in `key`, armored or not: 40 upper-case hex digits; empty for anything else.

    Keys of version 4, which is what package archives are signed with. A file with a second primary key gives
    nothing, since apt would trust that one, too.
    """
    try:
        packets = list(_packets(_unarmored(key)))
    except (IndexError, ValueError, binascii.Error):
        return ""
    primary = [body for tag, body in packets if tag == PUBLIC_KEY]
    if len(primary) != 1 or primary[0][:1] != b"\x04":
        return ""
    framed = b"\x99" + len(primary[0]).to_bytes(2, "big") + primary[0]
    return hashlib.sha1(framed, usedforsecurity=False).hexdigest().upper()


def grouped(digits: str) -> str:
    """``9DC8 5822 …``, as people compare it."""
    return " ".join(digits[at : at + 4] for at in range(0, len(digits), 4))


def _unarmored(key: bytes) -> bytes:
    blocks = re.findall(
        rb"-----BEGIN PGP PUBLIC KEY BLOCK-----\r?\n(.*?)-----END PGP PUBLIC KEY BLOCK-----", key, re.S
    )
    if not blocks:
        return key
    raw = b""
    for block in blocks:
        # Headers, if there are any, end with an empty line; the line that begins with = is a checksum.
        _, empty, body = block.replace(b"\r\n", b"\n").partition(b"\n\n")
        lines = (body if empty else block).split()
        raw += base64.b64decode(b"".join(line for line in lines if not line.startswith(b"=")), validate=True)
    return raw


def _packets(raw: bytes) -> list[tuple[int, bytes]]:
    """Tag and body of each packet. Raises IndexError or ValueError where that is none."""
    found, at = [], 0
    while at < len(raw):
        head = raw[at]
        if not head & 0x80:
            raise ValueError("no OpenPGP packet")
        if head & 0x40:  # new format
            tag, first = head & 0x3F, raw[at + 1]
            if first < 192:
                size, at = first, at + 2
            elif first < 224:
                size, at = ((first - 192) << 8) + raw[at + 2] + 192, at + 3
            elif first == 255:
                size, at = int.from_bytes(raw[at + 2 : at + 6], "big"), at + 6
            else:
                raise ValueError("a key in pieces")
        else:
            tag, width = (head & 0x3C) >> 2, 1 << (head & 3)
            if width == 8:
                raise ValueError("a packet without an end")
            size, at = int.from_bytes(raw[at + 1 : at + 1 + width], "big"), at + 1 + width
        if at + size > len(raw):
            raise ValueError("cut off")
        found.append((tag, raw[at : at + size]))
        at += size
    return found
