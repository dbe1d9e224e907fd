"""Batches are made ready ahead: the same ones, no more than may wait, and errors come with their sentence."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from trainer.errors import InputError
from trainer.prefetch import Prefetch


class Numbers:
    """Hands out numbers instead of batches, and counts."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.asked: list[int] = []
        self.fails_at = fails_at
        self.enough = threading.Semaphore(0)

    def batch(self, number: int) -> Any:
        if number == self.fails_at:
            raise InputError(f"batch {number} is damaged")
        self.asked.append(number)
        self.enough.release()
        return number


def test_batches_come_by_number_wherever_one_begins() -> None:
    source = Numbers()
    ahead = Prefetch(source)
    assert [ahead.batch(i) for i in (5, 6, 7, 2, 3, 3, 4)] == [5, 6, 7, 2, 3, 3, 4]
    ahead.close()


def test_no_more_are_made_ready_than_may_wait() -> None:
    source = Numbers()
    ahead = Prefetch(source, depth=2)
    assert ahead.batch(0) == 0
    for _ in range(4):  # 0, two in waiting, and the one for which there is no room yet
        assert source.enough.acquire(timeout=30)
    assert not source.enough.acquire(timeout=0.05)
    ahead.close()
    assert source.asked == [0, 1, 2, 3]


def test_an_error_comes_where_it_happened_with_its_sentence() -> None:
    ahead = Prefetch(Numbers(fails_at=3))
    assert [ahead.batch(i) for i in range(3)] == [0, 1, 2]
    with pytest.raises(InputError, match="batch 3 is damaged"):
        ahead.batch(3)
    assert ahead.batch(4) == 4
    ahead.close()


def test_closing_ends_the_thread_whatever_it_does() -> None:
    before = threading.active_count()
    ahead = Prefetch(Numbers())
    ahead.batch(0)
    assert threading.active_count() == before + 1
    ahead.close()
    ahead.close()
    assert threading.active_count() == before
