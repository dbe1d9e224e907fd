"""deploy/terminal.py: what a log may do to a terminal."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.terminal import Neutraliser


def shown(data: bytes) -> str:
    return Neutraliser().feed(data, final=True).decode()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"plain\n\ttab\rback\n", "plain\n\ttab\rback\n"),
        ("τ 1.62 · loss 3.4\n".encode(), "τ 1.62 · loss 3.4\n"),
        (b"\x1b[1;31mred\x1b[0m", "\x1b[1;31mred\x1b[0m"),  # colours stay
        (b"\x1b[38:2:1:2:3mrgb", "\x1b[38:2:1:2:3mrgb"),
        (b"\x1b]0;title\x07", "^[]0;title^G"),  # a window title
        (b"\x1b[2J\x1b[H", "^[[2J^[[H"),  # clear the screen
        (b"\x1b[6n", "^[[6n"),  # an answer-back request types into the shell
        (b"\x1bP1000p\x1b\\", "^[P1000p^[\\"),
        (b"\xc2\x9b31m", "<9B>31m"),  # the one-character form of ESC [
        (b"\x00\x08\x0b\x7f", "^@^H^K^?"),
        (b"\xff\xfe", "\ufffd\ufffd"),
    ],
)
def test_colours_stay_and_every_other_control_becomes_visible(data, text):
    assert shown(data) == text


def test_what_a_terminal_lacks_becomes_a_question_mark_and_never_a_control_of_its_own() -> None:
    """The second byte of a τ, and of many signs, is a control where each byte is a sign."""
    data = "τ \u0431\u041b é\n".encode()
    assert Neutraliser("iso8859-1").feed(data) == b"? ?? \xe9\n"
    assert Neutraliser("ascii").feed(data) == b"? ?? ?\n"
    assert Neutraliser("no such encoding").feed(data) == b"? ?? ?\n"


def test_signs_that_turn_the_direction_of_writing_become_visible() -> None:
    assert shown("a\u202eb\u2066c".encode()) == "a<U+202E>b<U+2066>c"


def test_colours_that_were_left_on_can_be_ended() -> None:
    neutraliser = Neutraliser()
    neutraliser.feed(b"\x1b[31mred")
    assert neutraliser.plain() == b"\x1b[0m"
    assert neutraliser.plain() == b""
    neutraliser.feed(b"\x1b[31mred\x1b[m plain")
    assert neutraliser.plain() == b""


PIECES = [
    b"\x1b[1;38m",
    b"\x1b[0m",
    b"\x1b",
    b"[",
    b"]",
    b"1",
    b"m",
    b"J",
    b"\xc2\x9b",
    b"\xcf\x84",
    b"\x07",
    b"a\n",
]
STREAMS = st.lists(st.sampled_from(PIECES), max_size=60).map(b"".join) | st.binary(max_size=200)


@given(STREAMS, st.lists(st.integers(1, 20), max_size=40))
def test_how_the_stream_is_cut_makes_no_difference(data, cuts):
    whole = shown(data)
    parts, rest, neutraliser = b"", data, Neutraliser()
    for cut in cuts:
        parts += neutraliser.feed(rest[:cut])
        rest = rest[cut:]
    assert parts + neutraliser.feed(rest, final=True) == whole.encode()


@given(STREAMS)
def test_no_escape_but_a_colour_ever_gets_through(data):
    text = shown(data)
    rest = re.sub(r"\x1b\[[0-9;:]*m", "", text)
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", rest)


def test_an_endless_escape_sequence_is_not_held_back_for_ever():
    neutraliser = Neutraliser()
    out = b"".join(neutraliser.feed(b"\x1b[" + b"1;" * 1000) for _ in range(3))
    assert len(out) > 2000
