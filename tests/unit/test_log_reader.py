"""deploy/log_reader.py: events as a stream of bytes, and what may be in them."""

from __future__ import annotations

import os
import random

import pytest

from deploy.log_reader import HEADER, KINDS, Event, Parser, note


@pytest.mark.parametrize("seed", range(20))
def test_events_come_out_as_they_went_in_however_the_stream_was_cut(seed: int) -> None:
    chance = random.Random(seed)
    events = [
        Event(chance.choice(KINDS), chance.randrange(1 << 60), os.urandom(chance.choice((0, 1, 13, 70_000))))
        for _ in range(20)
    ]
    stream = b"".join(
        HEADER.pack(KINDS.index(event.kind), event.offset, len(event.data)) + event.data for event in events
    )
    parser, found = Parser(), []
    while stream:
        count = chance.choice((1, 5, 12, 13, 14, 65_536))
        found += list(parser.feed(stream[:count]))
        stream = stream[count:]
    assert found == events


def test_a_sentence_cannot_steer_a_terminal() -> None:
    assert note("── run x \x1b[2Jfailed\nwith äöü").data.decode() == "── run x \ufffd[2Jfailed\ufffdwith äöü"
