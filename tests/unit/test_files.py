"""deploy/files.py: a lock, and the words of whoever holds it."""

from __future__ import annotations

import os

import pytest

from deploy import files


def test_the_holder_of_a_lock_is_known_by_its_words_and_looking_takes_nothing(tmp_path):
    path = tmp_path / "deploy.lock"
    assert files.holder(path) is None  # no such file
    lock = os.open(path, os.O_RDWR | os.O_CREAT)
    assert files.holder(path) is None
    assert files.take(lock)
    assert files.holder(path) == {}  # it has not said who it is
    files.say(lock, {"by": "ada@desk", "what": "deploy", "since": 1.5})
    files.say(lock, {"by": "ada@desk"})  # shorter words leave nothing of longer ones
    assert files.holder(path) == files.holder(path) == {"by": "ada@desk"}
    os.close(lock)
    assert files.holder(path) is None


def test_a_disk_that_takes_no_words_is_no_obstacle_to_a_lock():
    full = os.open("/dev/full", os.O_RDWR)
    with pytest.raises(OSError, match="No space left"):
        os.pwrite(full, b"words", 0)
    files.say(full, {"by": "ada@desk"})
    os.close(full)


def test_words_that_are_no_object_count_as_none(tmp_path):
    path = tmp_path / "switch.lock"
    path.write_bytes(b"[1, \xff")
    lock = os.open(path, os.O_RDWR)
    assert files.take(lock)
    assert files.holder(path) == {}
    os.close(lock)
