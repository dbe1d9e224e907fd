"""deploy/log_filter.py: matching lines of a log, forwards and from its end."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy import log_filter
from deploy.errors import USAGE, DeployError
from deploy.log_filter import Filter, compiled, find_last_matches
from deploy.segments import Segments

TEXTS = st.lists(
    st.sampled_from(
        [b"loss 1", b"lo", b"ss", b"\n", b"\n", b"\r", b"\r\n", b"\xff", "τ".encode(), "── x".encode()]
    )
).map(b"".join)


def shown(data: bytes, expression: str, cuts: tuple[int, ...] | list[int] = ()) -> bytes:
    made = Filter(compiled(expression))
    out, rest = b"", data
    for cut in cuts:
        out += made.feed(rest[:cut])
        rest = rest[cut:]
    return out + made.feed(rest) + made.end()


def test_matching_lines_and_those_of_launch_are_shown() -> None:
    log = "── drafthouse run 0001-demo · attempt 1\nstep 1 loss 3\nnoise\nstep 2 Loss 2\n── KILL\nend loss"
    expected = "── drafthouse run 0001-demo · attempt 1\nstep 1 loss 3\n── KILL\nend loss\n"
    assert shown(log.encode(), "loss").decode() == expected
    assert b"step 2" in shown(log.encode(), "(?i)LOSS")


@pytest.mark.parametrize(
    ("data", "expression", "expected"),
    [
        (b"a1\nb1\na2", "^a", b"a1\na2\n"),  # a line is all that the expression sees
        (b"a1\nb1\n", r"1$", b"a1\nb1\n"),
        (b"a\nb\n", r"a\s+b", b""),
        (b"\r10% x\r20% x\r30% y\ndone\n", "x", b"10% x\n20% x\n"),  # states of a progress bar
        (b"one\r\ntwo\r\n", "o", b"one\ntwo\n"),
        (b"a\n\nb\n", ".*", b"a\nb\n"),  # empty lines match nothing
        ("Verlust \u00e4\n".encode(), "[äö]$", "Verlust \u00e4\n".encode()),  # signs, not bytes
        (b"\xff loss \xfe\n", "loss", b"\xff loss \xfe\n"),  # what is no text stays as it is
    ],
)
def test_what_a_line_is(data: bytes, expression: str, expected: bytes) -> None:
    assert shown(data, expression) == expected


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("loss 9", "loss 9"), ("^step 1$", "step 1"), (r"loss 2\.70", "loss 2.70"), (r"f\(x\)", "f(x)"),
        ("a.b.longer", "longer"), ("ab*c", "a"), ("a?bc", "bc"), ("ab+", "ab"), ("ab+?c", "ab"), ("τ", "τ"),
        # nothing is certain, or it is not looked for
        ("a|b", ""), ("(?i)a", ""), ("(a)b", ""), ("[ab]c", ""), ("a{0}b", ""), (r"\bfoo", ""), (".*", ""),
    ],
)  # fmt: skip
def test_what_every_match_has_in_it_is_known(expression: str, text: str) -> None:
    assert log_filter.certain(expression) == text.encode()


EXPRESSIONS = st.text(st.sampled_from("los 1.*+?^$\\|()"), max_size=8)


@settings(max_examples=300)
@given(TEXTS, EXPRESSIONS, st.integers(1, 3))
def test_lines_that_are_passed_over_do_not_match(data: bytes, expression: str, few: int) -> None:
    try:
        found = compiled(expression)
    except DeployError:
        return
    lines = [line for line in log_filter.split(data) if line]
    expected = [line for line in lines if found.search(line) or line.startswith(log_filter.OURS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_filter, "FEW", few)
        assert shown(data, expression) == log_filter.encoded("".join(f"{line}\n" for line in expected))


@given(TEXTS, st.lists(st.integers(0, 9), max_size=30))
def test_how_the_stream_is_cut_makes_no_difference(data: bytes, cuts: list[int]) -> None:
    assert shown(data, "loss", cuts) == shown(data, "loss")


@given(TEXTS, st.integers(0, 60))
def test_whoever_begins_again_with_what_was_held_misses_and_repeats_nothing(data: bytes, cut: int) -> None:
    first = Filter(compiled("loss"))
    out = first.feed(data[:cut])
    goes_on = len(data[:cut]) - first.held
    assert out + shown(data[goes_on:], "loss") == shown(data, "loss")


def test_an_endless_line_is_not_kept_in_memory() -> None:
    made = Filter(compiled("x"))
    for _ in range(100):
        made.feed(b"x" * 65_536)
        assert made.held <= log_filter.LONGEST


@settings(max_examples=150)
@given(TEXTS, st.integers(0, 6), st.randoms())
def test_the_last_matches_are_those_of_the_whole_text(
    tmp_path_factory, data: bytes, count: int, random_
) -> None:
    directory = tmp_path_factory.mktemp("log")
    cuts = sorted(random_.sample(range(len(data) + 1), min(3, len(data) + 1)))
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        if end > start:
            (directory / f"{start:020d}.log").write_bytes(data[start:end])
    search = find_last_matches(Segments(directory), re.compile("loss"), count)
    offset = run(search)
    wanted = [line for line in log_filter.split(data) if "loss" in line]
    found = [line for line in log_filter.split(data[offset:]) if "loss" in line]
    assert found == wanted[len(wanted) - min(count, len(wanted)) :]


def test_matches_far_from_the_end_are_found_over_blocks_and_segments(tmp_path: Path) -> None:
    chance = random.Random(3)
    lines = [
        b"%06d %s%s\n" % (n, b"." * chance.randrange(80), b" hit" * (n % 5000 == 7)) for n in range(60_000)
    ]
    data = b"".join(lines)
    half = len(b"".join(lines[:30_000]))
    for start, part in ((0, data[:half]), (half, data[half:])):
        (tmp_path / f"{start:020d}.log").write_bytes(part)
    offset = run(find_last_matches(Segments(tmp_path), re.compile("hit$"), 8))
    assert data[offset:].startswith(b"020007 ")


def run(search) -> int:
    while True:
        try:
            next(search)
        except StopIteration as found:
            return found.value


@pytest.mark.parametrize(
    "expression", ["(", "a**", "[z-a]", "(?P<n>", "a{99999999999999999999}", "\\", "(" * 5000]
)
def test_what_is_no_expression_is_one_sentence(expression: str) -> None:
    with pytest.raises(DeployError, match=r"^--grep .* is no regular expression: ") as caught:
        compiled(expression)
    assert caught.value.code == USAGE
    assert len(str(caught.value)) < 250
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("error")
def test_an_expression_that_python_warns_of_is_taken_without_a_word() -> None:
    assert compiled("[[a]").search("[")
