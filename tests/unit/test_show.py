"""What people see of runs: one line each, of this run only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from samples import LOCALHOST, NOW, facts, run

from deploy import onhost, overview, settings, show
from deploy.host import Local
from deploy.settings import Project
from deploy.sizes import age, size
from deploy.target import Target


def target(path: Path = Path("/none")) -> Target:
    return Target(Project(path, {}), LOCALHOST, Local())


def shown(*runs: dict[str, Any], name: str | None = None, run_id: str | None = None) -> str:
    return show.status(overview.rows(target(), facts(runs=list(runs)), name, run_id))


def test_a_run_that_trains_is_one_line_with_its_figures() -> None:
    line = shown(run()).splitlines()[0]
    assert line.startswith("localhost  0007-demo  training  step 120/600, 18,432 tok/s, loss 3.4")
    assert line.endswith("  mem 812 MB")
    assert line.count("step 120") == 1


def test_figures_that_the_evidence_leaves_out_stand_beside_it() -> None:
    row = overview.Row(
        "localhost", "0007-demo", "demo", "stalled", "waits in futex", None, 120, 600, 3.4, 18432.0, 300.0
    )
    assert show.status([row]) == (
        "localhost  0007-demo  stalled  step 120/600  18,432 tok/s  last step 5 min ago  waits in futex"
    )


def test_the_link_of_an_earlier_run_never_passes_for_this_ones() -> None:
    link = {"wandb": "https://wandb.ai/x/runs/old"}
    old = run(
        "0006-demo", alive=False, heartbeats={"0": {"links": link}}, exit={"reason": "stopped", "code": 0}
    )
    new = run("0007-demo")
    assert "wandb" not in shown(old, new)
    new["heartbeats"]["0"]["links"] = {"wandb": "https://wandb.ai/x/runs/new"}
    assert "    wandb: https://wandb.ai/x/runs/new" in shown(old, new)
    assert "runs/old" not in shown(old, new)
    assert "runs/old" in shown(old, new, run_id="0006-demo")


def in_progress(words: dict[str, Any] | None, **fields: Any) -> str:
    found = run(path="/state/runs/0007-demo", **fields)
    return overview.rows(target(), facts(runs=[found], switch={"demo": words}), None)[0].reason


def test_who_stops_a_run_or_replaces_it_is_told_while_that_is_under_way() -> None:
    words = {"what": "stop", "by": "ada@desk\x1b", "since": NOW - 12, "run_path": "/state/runs/0007-demo"}
    said = "; a stop by ada@desk, begun 12 s ago, is under way"
    assert in_progress(words).endswith(said)
    assert said not in in_progress(words, launch={"attempt": 1, "pid": 11, "stopping": "ada@desk"})
    words |= {"what": "switch", "run_path": "/state/runs/0008-demo"}
    assert in_progress(words).endswith("; a switch by ada@desk, begun 12 s ago, to 0008-demo is under way")
    assert "under way" not in in_progress({**words, "run_path": "/state/runs/0007-demo"})  # it is the new one
    assert "under way" not in in_progress(None)
    assert "a stop by somebody, begun at an unknown time, is under way" in in_progress({"what": "stop"})


def test_a_name_that_lost_the_link_to_its_release_says_so_and_what_mends_it() -> None:
    names = {"demo": {"current": None, "releases": ["aaaaaaaaaaaa"]}}
    found = run(launch={"attempt": 1, "pid": 11})
    (lost,) = overview.rows(target(), facts(runs=[found], names=names), None)
    said = "; demo has no current release, as the link names/demo/current is not there"
    assert lost.reason.endswith(f"{said} (fab deploy --name demo puts it right)")
    busy = facts(runs=[found], names=names, locks={"demo": {"what": "deploy"}})
    for told in (busy, facts(runs=[found], names={"demo": {**names["demo"], "current": "aaaaaaaaaaaa"}})):
        assert "current" not in overview.rows(target(), told, None)[0].reason


def test_what_was_set_for_a_run_in_progress_is_told_since_a_deploy_would_undo_it() -> None:
    changes = {"environment.LEVEL": "three", "environment.HF_TOKEN": "hunter2", "trainer.lr": "3e-4"}
    lines = shown(run(run={"changes": changes})).splitlines()
    assert lines[1] == (
        "    set: environment.LEVEL=three, environment.HF_TOKEN=***, trainer.lr=3e-4 (a fab deploy or "
        "restart without it undoes that)"
    )
    answer = overview.Answer(
        target(), rows=tuple(overview.rows(target(), facts(runs=[run(run={"changes": changes})]), None))
    )
    assert overview.as_json([answer])[0]["changes"] == {**changes, "environment.HF_TOKEN": "***"}
    over = run(alive=False, run={"changes": changes}, exit={"reason": "stopped", "code": 0})
    assert "set:" not in shown(over)
    assert "set:" not in shown(run())
    assert "set:" not in shown(run(run={"changes": ["strange"]}))


def test_a_run_without_a_heartbeat_yet_has_no_figures_of_another() -> None:
    new = {**run("0008-demo"), "heartbeats": {}}
    text = shown(run("0007-demo", alive=False), new)
    assert "0008-demo" in text
    assert "step" not in text
    assert "mem" not in text


def test_every_name_has_its_newest_run_and_one_name_can_be_picked() -> None:
    runs = [run("0001-demo", alive=False), run("0002-exp"), run("0003-demo")]
    rows = overview.rows(target(), facts(runs=runs), None)
    assert sorted(row.run_id for row in rows) == ["0002-exp", "0003-demo"]
    assert [row.run_id for row in overview.rows(target(), facts(runs=runs), "exp")] == ["0002-exp"]
    assert (
        overview.nothing(target(), facts(runs=runs), "dem")
        == "localhost  dem  absent  no run of this name on this host; did you mean demo?\n"
        "    next: fab deploy --name dem"
    )


def test_what_lets_a_halted_run_go_on_is_proposed_for_the_machine_it_is_on() -> None:
    halted = run(processes=[{"pid": 10, "state": "S", "cmdline": ["l"]}, {"pid": 11, "state": "T"}])
    assert "    next: kill -CONT 11" in shown(halted)
    box = settings.HostSettings(name="box", address="ada@10.0.0.7")
    far = Target(Project(Path("/none"), {}), box, Local())
    (row,) = overview.rows(far, facts(runs=[halted]), None)
    assert row.next_command == "ssh ada@10.0.0.7 kill -CONT 11"


def test_what_a_deploy_that_was_killed_left_hides_no_run_and_is_none_that_starts() -> None:
    over = run("0007-demo", alive=False, exit={"reason": "stopped", "code": 0})
    left = {**run("0008-demo", alive=False, launch=None), "heartbeats": {}, "launch": None}
    left["run"]["created"] = NOW - 5
    assert shown(over, left).splitlines()[0].startswith("localhost  0007-demo  stopped")
    assert "was prepared 5 s ago and never started" in shown(over, left, run_id="0008-demo")
    deploying = facts(runs=[over, left], locks={"demo": {"by": "ada@desk"}})
    assert "not started yet" in show.status(overview.rows(target(), deploying, None))


def test_a_run_in_progress_is_not_hidden_by_a_newer_one_that_never_began() -> None:
    switch = {"outcome": "failed", "reason": "x"}
    never = run("0008-demo", alive=False, launch=None, heartbeats={}, switch=switch)
    text = shown(run(), never)
    assert "0007-demo  training" in text
    assert "0008-demo  failed" in text


@pytest.mark.parametrize(
    "values",
    [
        {"memory": "no"},
        {"memory": {"now": "z"}},
        {"last_step_time": "y"},
        {"step": [], "total": {}, "loss": "low"},
        {"tokens_per_second": 7},
        {"links": ["a"]},
        {"links": {"wandb": 7}},
    ],
)
def test_a_heartbeat_with_foreign_values_breaks_nothing(values: dict[str, Any]) -> None:
    strange = run()
    strange["heartbeats"]["0"].update(values)
    assert "0007-demo" in shown(strange)
    strange["heartbeats"]["0"] = ["no heartbeat"]
    assert "0007-demo" in shown(strange)


def test_steps_beyond_a_million_are_written_out() -> None:
    long = run()
    long["heartbeats"]["0"].update(step=1_234_567, total=2_000_000)
    assert "step 1234567/2000000," in shown(long)
    assert shown(long).count("1234567") == 1


def test_a_run_that_is_over_uses_no_memory() -> None:
    over = run(alive=False, exit={"reason": "stopped", "code": 0})
    assert " mem " not in shown(over)
    assert " mem " in shown(run())


@pytest.mark.parametrize(
    ("file", "more"),
    [
        ("runs/demo.yaml", ""),
        ("runs/other.yaml", " --run other"),
        ("/a b/brk.yaml", " --run '/a b/brk.yaml'"),
        (None, ""),
    ],
)
def test_the_next_deploy_takes_the_file_that_the_run_was_made_from(file: str | None, more: str) -> None:
    over = run("0001-brk", alive=False, launch=None)  # (it never began)
    over["run"]["run_file"] = file
    assert f"    next: fab deploy --name brk{more}" in shown(over).splitlines()


def test_memory_is_that_of_all_ranks() -> None:
    one = run(heartbeats={"1": {"memory": {"now": 188_000_000}}})
    assert overview.rows(target(), facts(runs=[one]), None)[0].memory == 1_000_000_000


def test_drift_stands_under_the_run_that_has_it() -> None:
    row = overview.Row(
        "localhost",
        "0007-demo",
        "demo",
        "training",
        "step 1",
        drift=("trainer.lr: 1 → 2", "x: new"),
        applied_by="fab restart --name demo",
    )
    assert show.status([row]).splitlines()[1:] == [
        "    drift: the run differs from what is rendered now; fab restart --name demo applies it",
        "      trainer.lr: 1 → 2",
        "      x: new",
    ]
    assert "drift" not in show.status(
        [overview.Row("localhost", "0007-demo", "demo", "training", "step 1", drift=())]
    )


def test_drift_is_not_guessed_for_a_run_that_was_deployed_from_another_place() -> None:
    gone = run(run={"run_file": "runs/gone.yaml"})
    assert overview.rows(target(), facts(runs=[gone]), None)[0].drift is None
    assert overview.rows(target(), facts(runs=[run()]), None)[0].drift is None


def test_a_run_file_that_was_broken_since_is_said_where_the_drift_would_stand(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo.yaml").write_text("command: [a")
    rows = overview.rows(target(tmp_path), facts(runs=[run(run={"run_file": "runs/demo.yaml"})]), None)
    assert rows[0].drift is not None
    assert rows[0].drift[0].startswith("runs/demo.yaml:1 is not valid YAML: ")


def test_what_ends_the_drift_is_a_command_for_that_run_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "exp.yaml").write_text("command: [a")
    wanted = {"name": "exp-2", "run_file": "runs/exp.yaml"}
    mine = run("0001-exp-2", run=wanted)
    assert overview.rows(target(tmp_path), facts(runs=[mine]), None)[0].applied_by == (
        "fab restart --name exp-2 --run exp"
    )


def test_the_host_is_asked_about_all_runs_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    runs = []
    for number, name in enumerate("abc", 1):
        # The data have to be looked for on the host, and none of the releases is there.
        text = f"data: {tmp_path}\ncommand: [sleep, '{number}']\n"
        (tmp_path / "runs" / f"{name}.yaml").write_text(text)
        words = {"name": name, "run_file": f"runs/{name}.yaml", "release": {"id": 12 * "0"}}
        runs.append(run(f"000{number}-{name}", run=words))
    asked = []
    real = onhost.ask
    monkeypatch.setattr(onhost, "ask", lambda *words, **more: asked.append(words[1]) or real(*words, **more))
    rows = overview.rows(target(tmp_path), facts(runs=runs), None)
    assert asked == ["deploy.lookup:look_each", "deploy.release_store:read_each"]
    assert [len(row.drift or ()) for row in rows] == [1, 1, 1]


def test_runs_are_a_table_newest_first() -> None:
    ended = run("0001-demo", alive=False, exit={"reason": "failed", "code": 137}, run={"created": None})
    changed = run(
        "0002-demo", run={"changes": {"trainer.lr": "3e-4"}, "who": "ann@desk", "created": NOW - 300}
    )
    lines = show.runs([ended, changed], NOW).splitlines()
    assert [line.split()[0] for line in lines] == ["RUN", "0002-demo", "0001-demo"]
    assert "running for 5 min  000000000000  trainer.lr=3e-4  ann@desk" in lines[1]
    assert "failed (137)" in lines[2]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"exit": {"reason": "finished", "code": 0}}, "finished"),
        ({"exit": {"reason": "stopped", "code": 143}}, "stopped (143)"),
        ({}, "ended without a word"),
    ],
)
def test_the_end_of_a_run_is_a_word_and_its_code(changes: dict, said: str) -> None:
    assert show.ending(run(alive=False, **changes), NOW) == said
    assert show.ending({**run(alive=False), "launch": None}, NOW) == "never began"


def test_steps_of_a_switch_are_told_when_they_have_ended() -> None:
    step = {"name": "stop", "outcome": "running", "started": NOW, "ended": None, "detail": ""}
    assert show.step(step) is None
    done = {**step, "outcome": "ok", "ended": NOW + 1.25, "detail": "SIGTERM"}
    assert show.step(done) == "  ✓ stop (1.2 s): SIGTERM"
    assert show.step({**done, "outcome": "failed", "detail": ""}) == "  ✗ stop (1.2 s)"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (9949, "9.9 kB"), (12_345, "12 kB"), (999_400, "999 kB"),
     (999_600, "1.0 MB"), (812_000_000, "812 MB"), (3_200_000_000, "3.2 GB"), (5e15, "5000 TB")],
)  # fmt: skip
def test_sizes_are_short_and_in_powers_of_ten(count: float, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 s"), (0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "119 min"), (7200, "2 h 00 min"),
     (11100, "3 h 05 min"), (187_200, "2 d 04 h")],
)  # fmt: skip
def test_ages_have_two_parts_at_most(seconds: float, text: str) -> None:
    assert age(seconds) == text
