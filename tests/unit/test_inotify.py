"""deploy/inotify.py: woken by what is written, not by the clock."""

from __future__ import annotations

import os
import threading

from deploy.inotify import Watch

LONG = 60.0  # seconds that no test takes: a wait of this length was ended by a change


def test_a_change_ends_the_wait(tmp_path):
    file = tmp_path / "log"
    file.write_text("")
    watch = Watch(tmp_path)
    try:
        watch.begin()
        for change in (lambda: file.write_text("line\n"), lambda: (tmp_path / "next").touch(), file.unlink):
            writer = threading.Timer(0.05, change)
            writer.start()
            watch.wait(LONG)
            writer.join()
            watch.wait(0)  # what else came of it
    finally:
        watch.close()


def test_what_changed_before_the_wait_ends_it_and_counts_once(tmp_path):
    watch = Watch(tmp_path)
    watch.begin()
    (tmp_path / "log").write_text("line\n")
    assert watch.wait(LONG) == []
    reader, writer = os.pipe()
    os.write(writer, b".")
    assert watch.wait(LONG, [reader]) == [reader]
    for descriptor in (reader, writer):
        os.close(descriptor)
    watch.close()


def test_a_directory_may_come_later(tmp_path):
    watch = Watch(tmp_path / "log")
    watch.begin()
    assert watch.wait(0.01) == []  # nothing to watch: only the clock ends this
    (tmp_path / "log").mkdir()
    watch.begin()
    (tmp_path / "log" / "0.log").write_text("line\n")
    assert watch.wait(LONG) == []
    watch.close()
