"""deploy/since.py: moments that people type."""

from __future__ import annotations

import datetime

import pytest

from deploy.errors import USAGE, DeployError
from deploy.since import moment

NOW = datetime.datetime(2026, 7, 1, 14, 30, 15, 500_000)


def ago(text: str) -> float:
    return NOW.timestamp() - moment("--since", text, NOW)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0s", 0),
        ("90s", 90),
        ("2m", 120),
        ("1h30m", 5400),
        ("2d1h", 176_400),
        (" 5m ", 300),
        ("14:05", 25 * 60 + 15.5),
        ("14:30", 15.5),
        ("14:30:15", 0.5),
        ("9:00", 5.5 * 3600 + 15.5),
        ("14:31", 86_400 - 44.5),  # yesterday's
        ("2026-07-01T14:30", 15.5),
        ("2026-07-01 14:30:15", 0.5),
        ("2026-07-01", 14.5 * 3600 + 15.5),
    ],
)
def test_spans_times_and_dates(text: str, seconds: float) -> None:
    assert ago(text) == pytest.approx(seconds)


def test_a_time_with_its_zone_is_that_moment_everywhere() -> None:
    expected = datetime.datetime(2026, 6, 1, 12, tzinfo=datetime.UTC).timestamp()
    assert moment("--since", "2026-06-01T12:00Z", NOW) == expected
    assert moment("--since", "2026-06-01T14:00+02:00", NOW) == expected


@pytest.mark.parametrize(
    "text",
    ["", "90", "2x", "m", "1m2h", "25:00", "14:60", "yesterday", "2026-13-01", "-5m", "1.5h", "9" * 400],
)
def test_what_is_no_moment_is_one_sentence(text: str) -> None:
    with pytest.raises(DeployError, match=r"--since .* is no time; give a span like 90s") as caught:
        moment("--since", text, NOW)
    assert caught.value.code == USAGE
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


def test_the_future_is_refused() -> None:
    with pytest.raises(DeployError, match="is in the future"):
        moment("--since", "2026-07-01T15:00", NOW)


def test_a_span_may_be_longer_than_clocks_reach() -> None:
    assert ago("999999999999d") > 1e15
