"""The figures beside a verdict: GPUs, time left, reference, evidence; several hosts; what a screen shows."""

from __future__ import annotations

import dataclasses
import io
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from samples import LOCALHOST, NOW, facts, run

from deploy import details, overview, refresh, show, watching
from deploy.host import HostError, Local
from deploy.newest import Heard
from deploy.settings import Project
from deploy.target import Target

GB = 10**9
GPU = {"index": 3, "uuid": "GPU-3", "utilization": [90, 100], "memory_used": 61 * GB, "memory_total": 80 * GB}


@dataclasses.dataclass(frozen=True)
class Told(Target):
    """A host whose probe has said `said` already, or raises it; it waits for `gate` before."""

    said: Any = None
    gate: threading.Event | None = None

    def facts(self, sample: float = 0.0) -> dict[str, Any]:
        if self.gate is not None:
            assert self.gate.wait(60)
        if isinstance(self.said, Exception):
            raise self.said
        found: dict[str, Any] = self.said
        return found


def told(name: str, said: Any, gate: threading.Event | None = None) -> Told:
    host = LOCALHOST.model_copy(update={"name": name})
    return Told(Project(Path("/none"), {}), host, Local(), said, gate)


def row(found: dict[str, Any], **more: Any) -> overview.Row:
    return overview.rows(told("localhost", None), facts(runs=[found], **more), None)[0]


def test_the_time_left_is_that_of_the_steps_left() -> None:
    moving = run(heartbeats={"0": {"phase_seconds": {"data": 0.25, "target": 0.5, "odd": "x"}}})
    assert row(moving).eta == 360
    assert "  ETA 6 min" in show.status([row(moving)])
    assert row({**moving, "pace": {"steps": 100, "seconds": 150.0}}).eta == 720  # half of it goes into saving
    assert row({**moving, "pace": {"steps": 100, "seconds": 20.0}}).eta == 360  # it has become slower
    assert row(run()).eta is None
    moving["heartbeats"]["0"]["step"] = 600
    assert row(moving).eta is None
    stalled = run(
        heartbeats={"0": {"phase_seconds": {"data": 0.1}, "last_step_time": NOW - 900, "phase_since": 0}}
    )
    assert row(stalled).verdict in ("silent", "stalled")
    assert row(stalled).eta is None


def test_the_speed_is_shown_as_a_share_of_the_references() -> None:
    names = {"demo": {"reference": {"run_id": "0003-demo", "tokens_per_second": 20480.0}}}
    found = row(run(), names=names)
    assert found.reference == {"run_id": "0003-demo", "tokens_per_second": 20480.0, "share": 0.9}
    assert "  90 % of 0003-demo" in show.status([found])
    for strange in (None, [], {"tokens_per_second": "x"}, {"tokens_per_second": 0}):
        assert row(run(), names={"demo": {"reference": strange}}).reference is None


def test_the_gpus_of_a_run_are_those_that_its_processes_compute_on() -> None:
    mine = {**GPU, "processes": [{"pid": 11, "memory": 60 * GB}, {"pid": 99, "memory": GB}]}
    other = {**GPU, "index": 4, "processes": [{"pid": 99, "memory": GB}]}
    found = row(run(processes=[{"pid": 11}]), gpus={"nvml": [mine, other]})
    assert [(gpu["index"], gpu["utilization"], gpu["own"]) for gpu in found.gpus] == [(3, 95, 60 * GB)]
    assert "  GPU 3 95 %, 61 GB of 80 GB" in show.status([found])
    assert "    GPU 3: 95 % busy, 61 GB of 80 GB in use, 60 GB by this run" in show.status(
        [found], verbose=True
    )


def test_a_run_that_computes_on_none_yet_has_those_that_it_was_given() -> None:
    both = [{**GPU, "processes": []}, {**GPU, "index": 4, "utilization": [10], "processes": []}]
    given = run(run={"devices": ["3", "4"]})
    assert [gpu["index"] for gpu in row(given, gpus={"nvml": both}).gpus] == [3, 4]
    assert "2 GPUs 10–95 %, 61 GB of 80 GB" in show.status([row(given, gpus={"nvml": both})])
    assert row(run(), gpus={"nvml": both}).gpus == ()


@pytest.mark.parametrize("nvml", [None, 7, [7, {}, {"processes": 7, "utilization": "x"}]])
def test_devices_of_which_nothing_is_told_are_passed_over(nvml: Any) -> None:
    found = row(run(processes=[{"pid": 11}]), gpus={"nvml": nvml})
    assert found.gpus == ()
    assert "GPU" not in show.status([found], verbose=True)


def test_why_the_gpus_are_unknown_is_evidence() -> None:
    found = row(run(), gpus={"nvml": {"unknown": "because the driver hangs"}})
    assert "    GPUs: unknown, because the driver hangs" in show.status([found], verbose=True)
    assert "unknown" not in show.status([found])


def test_memory_is_told_from_least_to_most() -> None:
    beat = {"0": {"memory": {"min": 700_000_000, "now": 812_000_000, "peak": 1_200_000_000}}}
    assert (
        show.status([row(run(heartbeats=beat))])
        .splitlines()[0]
        .endswith("  mem 812 MB (min 700 MB, peak 1.2 GB)")
    )


def test_memory_now_is_never_above_its_peak() -> None:
    """As an older trainer may say it: the kernel notes a new peak later than it happens."""
    beat = {"0": {"memory": {"min": 397_000_000, "now": 411_000_000, "peak": 410_000_000}}}
    line = show.status([row(run(heartbeats=beat))]).splitlines()[0]
    assert line.endswith("  mem 411 MB (min 397 MB, peak 411 MB)")


def test_the_evidence_is_shown_on_demand_masked_and_clean() -> None:
    process = {
        "pid": 11, "state": "S", "wchan": "futex_wait", "rss": 10**9, "cpu_ticks": [100, 140],
        "wanted": 900_000_000,
        "cmdline": ["python", "--api-key", "hunter2", "\x1b[2J"],
    }  # fmt: skip
    found = run(processes=[process], log={"tail": ["\x1b]0;title\x07line"]})
    found["heartbeats"]["0"]["phase_seconds"] = {"data": 0.01}
    shown = row(found, sample_seconds=0.4)
    lines = show.status([shown], verbose=True).splitlines()
    assert (
        "    process 11: state S, in futex_wait, 1.00 CPUs of 2.25 wanted, 1.0 GB: python --api-key ***  [2J"
        in lines
    )
    assert (
        "    rank 0: training for 50 s, step 120, last step 0 s ago, heartbeat 0 s ago, data 10 ms" in lines
    )
    assert "    log: 4,096 bytes, the newest 1 s ago" in lines
    assert "    free: disk 1.0 TB of 1.0 TB, shared memory 100 GB of 100 GB, memory 1.0 TB of 1.0 TB" in lines
    assert "\x1b" not in "\n".join(lines)
    assert "hunter2" not in json.dumps(dataclasses.asdict(shown))
    assert "process 11" not in show.status([shown])


# -- several hosts -----------------------------------------------------------------------------------------


def test_a_host_that_does_not_answer_is_one_line_and_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "PATIENCE", 0.3)
    gate = threading.Event()
    goals = [
        told("slow", facts(runs=[run()]), gate),
        told("gone", HostError("gone: cannot be reached")),
        told("box", facts(runs=[run("0002-exp")])),
    ]
    batches = overview.everywhere(goals, None, None)
    first = next(batches)
    assert [answer.goal.settings.name for answer in first] == ["gone", "box"]
    assert first[0].error == "gone: cannot be reached"
    assert [found.run_id for found in first[1].rows] == ["0002-exp"]
    gate.set()
    rest = list(batches)
    assert [[answer.goal.settings.name for answer in batch] for batch in rest] == [["slow"]]
    told_all = overview.as_json([*first, *rest[0]])
    assert [(entry["host"], entry.get("error")) for entry in told_all] == [
        ("gone", "gone: cannot be reached"), ("box", None), ("slow", None),
    ]  # fmt: skip


def test_hosts_that_all_answer_are_one_table_in_their_order() -> None:
    goals = [told(name, facts(runs=[run()])) for name in ("c", "a", "b")]
    (batch,) = overview.everywhere(goals, None, None)
    assert [answer.goal.settings.name for answer in batch] == ["c", "a", "b"]


def test_a_mistake_of_ours_ends_the_question_instead_of_waiting_for_ever() -> None:
    with pytest.raises(KeyError):
        list(overview.everywhere([told("a", {}), told("b", facts())], None, None))


def test_the_round_trip_is_that_of_a_byte() -> None:
    measured = details.round_trip(Local())
    assert measured is not None
    assert 0 < measured < details.PING_PATIENCE


# -- screens -----------------------------------------------------------------------------------------------


def heard(*found: dict[str, Any], note: str = "", **more: Any) -> Heard:
    goal = told("localhost", None)
    known = facts(runs=list(found))
    rows = tuple(overview.rows(goal, known, None))
    return Heard(goal, rows, known, at=time.monotonic(), note=note, **more)


def test_a_frame_covers_what_was_there_and_never_scrolls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    monkeypatch.setenv("LINES", "4")
    text = refresh.frame(["short\n" + "x" * 15])
    assert text == "\x1b[Hshort\x1b[K\n" + "x" * 10 + "\x1b[K\n" + "x" * 5 + "\x1b[K\x1b[J"
    monkeypatch.setenv("COLUMNS", "40")
    assert refresh.frame(["a\nb\nc\nd\ne"]) == "\x1b[Ha\x1b[K\nb\x1b[K\nc\x1b[K\n… 2 lines more\x1b[K\x1b[J"


def test_colours_take_no_room_when_a_line_is_folded() -> None:
    assert refresh.folded("\x1b[32mgreen\x1b[0m and more", 8) == ["\x1b[32mgreen\x1b[0m an", "d more"]
    assert refresh.folded("", 8) == [""]


def test_a_screen_keeps_the_last_answer_beside_the_note_of_a_lost_link() -> None:
    text = refresh.block(heard(run(), note="box: no data for 10 s, reconnecting"), None, False, False)
    assert "0007-demo  training" in text
    assert "box: no data for 10 s, reconnecting (what stands here is 0 s old)" in text
    assert refresh.block(Heard(told("box", None)), None, False, False) == "box: no answer yet"


def test_what_runs_is_seen_on_a_small_screen_whatever_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = {"alive": False, "exit": {"reason": "stopped", "code": 0}}
    old = [run(f"000{number}-n{number}", **ended) for number in range(1, 7)]
    hosts = [heard(*old), heard(*old[:2], run("0008-demo"))]
    whole = refresh.text(hosts, None, False, False)
    assert whole.count("next: ") == 9
    assert whole.index("0008-demo") < whole.rindex("0001-n1")
    brief = refresh.text(hosts, None, False, False, refresh.LITTLE)
    assert (brief.count("stopped"), brief.count("next: ")) == (8, 1)
    least = refresh.text(hosts, None, False, False, refresh.NONE)
    assert least.startswith("localhost  0008-demo  training")
    assert least.endswith("\n… and 8 runs that ended")
    assert "no runs" not in least
    monkeypatch.setenv("COLUMNS", "200")
    for height, shown in (("60", whole), ("14", brief), ("6", least)):
        monkeypatch.setenv("LINES", height)
        assert refresh.frame([whole, brief, least]).replace("\x1b[K", "")[3:-3] == shown


def drawn(*found: Heard, width: int = 100, height: int = 30, plain: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=False)
    console.print(watching.screen(found, width, height, plain))
    return out.getvalue()


def test_the_live_screen_shows_curves_memory_verdict_and_the_end_of_the_log() -> None:
    curve = [{"step": n, "loss": 8.0 - n, "tokens_per_second": 100.0 + n} for n in range(8)]
    one = heard(run(), curves={"0007-demo": curve}, logs={"0007-demo": ["older", "\x1b[2Jnewest"]})
    text = drawn(one)
    assert "training  step 120/600" in text
    assert "loss   █▇▆▅▄▃▂▁  1.000" in text
    assert "tok/s  ▁▂▃▄▅▆▇█  107" in text
    assert "1.0 TB" in text.split("memory ")[1].splitlines()[0]
    assert "newest" in text
    assert "\x1b[2J" not in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_a_run_on_gpus_has_a_bar_for_each() -> None:
    gpus = [{**GPU, "index": n, "processes": [{"pid": 11, "memory": 1}]} for n in range(2)]
    found = overview.rows(
        told("localhost", None), facts(runs=[run(processes=[{"pid": 11}])], gpus={"nvml": gpus}), None
    )
    lines = watching.memory(heard(), found[0], 60, True)
    assert [line.split()[:2] for line in lines] == [["GPU", "0"], ["GPU", "1"]]
    assert lines[0].endswith("  61 GB of 80 GB, 95 % busy")
    assert lines[0].count("#") / (lines[0].count("#") + lines[0].count(".")) == pytest.approx(
        61 / 80, abs=0.05
    )


def test_a_terminal_that_is_not_utf_8_and_one_that_is_small_are_served_too() -> None:
    curve = [{"loss": float(n)} for n in range(500)]
    many = heard(*(run(f"{n:04d}-exp{n}") for n in range(20)), curves={"0001-exp1": curve})
    text = drawn(many, width=40, height=12, plain=True)
    assert text.count("0001-exp1") == 1
    assert not set(text) & set(watching.FULL + watching.BLOCK + watching.ROOM + "╭╰│")
    assert watching.sparkline([1.0, 1.0], 10) == "▅▅"
    assert watching.sparkline(list(range(100)), 3) == "▁▅█"


def test_a_live_screen_needs_a_terminal() -> None:
    with pytest.raises(Exception, match=r"needs a terminal; fab status --watch prints without one$"):
        watching.check(io.StringIO())
