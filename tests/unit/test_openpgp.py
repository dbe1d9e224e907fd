"""deploy/openpgp.py, on packets as RFC 4880 has them. What gpg makes is in test_bare_bootstrap.py."""

from __future__ import annotations

import base64
import hashlib

import pytest

from deploy import openpgp

BODY = b"\x04" + bytes(range(250)) * 3
OWN = hashlib.sha1(b"\x99" + len(BODY).to_bytes(2, "big") + BODY).hexdigest().upper()
KEY = b"\x99" + len(BODY).to_bytes(2, "big") + BODY  # tag 6, a length of two bytes
USER = b"\xb4\x04name"
SUBKEY = b"\xb9\x00\x03\x04xy"


def armored(raw: bytes, head: bytes = b"") -> bytes:
    text = base64.b64encode(raw)
    lines = b"\n".join(text[at : at + 64] for at in range(0, len(text), 64))
    return (
        b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n" + head + b"\n" + lines + b"\n=AbCd\n"
        b"-----END PGP PUBLIC KEY BLOCK-----\n"
    )


NEW = [
    b"\xc6" + bytes([((len(BODY) - 192) >> 8) + 192, (len(BODY) - 192) & 255]) + BODY,
    b"\xc6\xff" + len(BODY).to_bytes(4, "big") + BODY,
    b"\x9a" + len(BODY).to_bytes(4, "big") + BODY,
]


@pytest.mark.parametrize(
    "key",
    [KEY, KEY + USER + SUBKEY, armored(KEY + USER), armored(KEY, b"Version: GnuPG v1\nComment: x\n"),
     armored(KEY).replace(b"\n", b"\r\n"), *NEW],
)  # fmt: skip
def test_the_fingerprint_of_a_key_however_it_is_written(key: bytes) -> None:
    assert openpgp.fingerprint(key) == OWN


@pytest.mark.parametrize(
    "key",
    [b"", b"<html>", KEY + KEY, armored(KEY) + armored(KEY), KEY[:-1], KEY + b"\x99", armored(b"!"), USER,
     armored(KEY).replace(b"A", b"*"), b"\x99\x00\x04\x03abc", b"\x9b" + BODY, b"\xc6\xe1" + BODY, b"\xc6"],
)  # fmt: skip
def test_whatever_is_not_one_key_has_none(key: bytes) -> None:
    assert openpgp.fingerprint(key) == ""


def test_people_compare_it_in_groups() -> None:
    assert openpgp.grouped("9DC858229FC7") == "9DC8 5822 9FC7"
