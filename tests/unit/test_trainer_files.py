"""trainer/files.py: what is on the disk, and what it is called by content."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer import files


def test_a_file_and_a_directory_are_flushed_and_one_that_is_missing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    (tmp_path / "file").write_bytes(b"abc")
    for path in (tmp_path / "file", tmp_path):
        files.flush(path)
    assert flushed == [str(tmp_path / "file"), str(tmp_path)]
    with pytest.raises(FileNotFoundError):
        files.flush(tmp_path / "nothing")


def test_a_file_is_named_by_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")  # the example of FIPS 180-2
    assert files.sha256(tmp_path / "file") == (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
