"""deploy/prefixed.py: lines of several hosts on one stdout."""

from __future__ import annotations

import contextlib
import os
import pty
import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.prefixed import LONGEST, Lines, Prefixed


@given(
    st.lists(st.sampled_from([b"a", b"\n", b"\xff", "é".encode()])).map(b"".join),
    st.lists(st.integers(0, 5), max_size=20),
)
def test_lines_are_those_of_the_whole_however_it_was_cut(data: bytes, cuts: list[int]) -> None:
    lines, found, rest = Lines(), [], data
    for cut in cuts:
        found += lines.feed(rest[:cut], 0.0)
        rest = rest[cut:]
    found += lines.feed(rest, 0.0) + lines.end()
    assert b"".join(line + b"\n" for line in found) == (
        data if data.endswith(b"\n") or not data else data + b"\n"
    )


def test_an_unfinished_line_is_shown_once_it_is_left_alone_and_its_newline_adds_nothing() -> None:
    lines = Lines()
    assert lines.feed(b"loading ...", 10.0) == []
    assert lines.settled(10.5) == []
    assert lines.settled(11.1) == [b"loading ..."]
    assert lines.settled(20.0) == []
    assert lines.feed(b"\n", 21.0) == []
    assert lines.feed(b"\nnext\n", 22.0) == [b"", b"next"]


def test_a_progress_bar_is_shown_every_few_seconds_and_its_last_state_always() -> None:
    lines, shown = Lines(), []
    for tenth in range(120):
        shown += lines.feed(b"\r%d%%" % tenth, tenth / 10)
        shown += lines.settled(tenth / 10)
    shown += lines.feed(b"\r100%\n", 12.1)
    assert 3 <= len(shown) <= 5
    assert shown[-1] == b"100%"
    assert all(line.endswith(b"%") and b"\r" not in line for line in shown)


def test_an_endless_line_is_shown_in_pieces() -> None:
    lines, size = Lines(), 0
    for _ in range(40):
        size += sum(map(len, lines.feed(b"x" * 65_536, 0.0)))
    assert size >= 40 * 65_536 - LONGEST
    bar = Lines()
    for number in range(40):
        assert bar.feed(b"\r%d" % number + b"." * 65_536, 0.0) == []
    assert len(bar._rest) <= 2 * LONGEST


def both(write: int, talk) -> None:
    """Two threads that talk to one stream, each with a prefix of its own."""
    with open(write, "w", encoding="utf-8") as stream:
        prefixed = Prefixed(stream)

        def work(name: str) -> None:
            prefixed.begin(f"{name} │ ")
            talk(prefixed, name)
            prefixed.end()

        threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def collect(descriptor: int, into: bytearray) -> threading.Thread:
    def read() -> None:
        while True:
            try:
                data = os.read(descriptor, 65_536)
            except OSError:
                return
            if not data:
                return
            into.extend(data)

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def test_bytes_of_two_hosts_pass_unharmed_and_unmixed() -> None:
    read, write = os.pipe()
    got = bytearray()
    thread = collect(read, got)
    lines = {
        name: [b"%s %d \xff\xc3\xa9 \x1b[31m" % (name.encode(), n) for n in range(3000)] for name in "ab"
    }

    def talk(stream: Prefixed, name: str) -> None:
        chance, data = random.Random(name), b"".join(line + b"\n" for line in lines[name])
        while data:
            cut = chance.randrange(1, 5000)
            stream.buffer.write(data[:cut])
            stream.buffer.flush()
            data = data[cut:]

    both(write, talk)
    thread.join()
    os.close(read)
    for name in "ab":
        prefix = f"{name} │ ".encode()
        mine = [line[len(prefix) :] for line in bytes(got).splitlines() if line.startswith(prefix)]
        assert mine == lines[name]
    assert len(got.splitlines()) == 6000


def test_on_a_terminal_no_colour_reaches_the_next_line() -> None:
    ours, theirs = pty.openpty()
    got = bytearray()
    thread = collect(ours, got)
    both(theirs, lambda stream, name: stream.write(f"\x1b[31mred {name}\nplain\n"))
    thread.join()
    os.close(ours)
    for line in bytes(got).splitlines():
        assert line.count(b"\x1b[31m") == line.count(b"\x1b[0m")


def test_when_nobody_reads_any_more_every_thread_hears_of_it() -> None:
    """``fab -H a,b tail | head``: the one that writes next is told, and so is one that has nothing to say."""
    read, write = os.pipe()
    os.close(read)
    ends: list[str] = []
    broken = threading.Event()

    def talk(stream: Prefixed, name: str) -> None:
        if name == "b":
            broken.wait(30)
        with pytest.raises(BrokenPipeError):
            stream.write("line\n") if name == "a" else stream.flush()
        ends.append(name)
        broken.set()

    both(write, talk)
    assert sorted(ends) == ["a", "b"]


def test_after_silence_threads_say_nothing_and_nobody_waits_for_one_that_is_stuck() -> None:
    """Ctrl-C while ``| less`` takes no more: the command still ends, with its own last words."""
    read, write = os.pipe()
    stuck = threading.Event()
    with open(write, "w") as stream:
        prefixed = Prefixed(stream)

        def work() -> None:
            prefixed.begin("a │ ")
            stuck.set()
            prefixed.buffer.write(b"x" * 65_000 + b"\n" + b"y" * 65_000 + b"\n")  # more than the pipe takes
            prefixed.buffer.write(b"late\n")

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        stuck.wait(30)
        thread.join(0.2)
        assert thread.is_alive()
        prefixed.silence()
        os.set_blocking(write, False)
        with contextlib.suppress(BlockingIOError):
            prefixed.write("last words")
            prefixed.flush()
        os.set_blocking(write, True)
        got = bytearray()
        while thread.is_alive() or b"last words" not in got:
            got += os.read(read, 65_536)
            stream.flush()
            thread.join(0.01)
    assert b"late" not in got
    os.close(read)


def test_signs_that_the_terminal_lacks_become_others() -> None:
    read, write = os.pipe()
    with open(write, "w", encoding="ascii") as stream:
        prefixed = Prefixed(stream)
        prefixed.begin("a │ ")
        prefixed.write("τ\n")
    assert os.read(read, 100) == b"a ? ?\n"
    os.close(read)
