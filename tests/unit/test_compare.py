"""Two runs side by side: which phase is named, what differs, and what it looks like."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from samples import LOCALHOST

from deploy import compare, plot, reference, reference_store
from deploy.errors import DeployError
from deploy.host import Local
from deploy.settings import Project
from deploy.target import Target

PHASES = {"data": 0.01, "target": 0.2, "forward": 0.1, "objective": 0.02, "backward": 0.1, "optimizer": 0.05}


def figures(run_id: str = "0001-demo", **changes: Any) -> dict[str, Any]:
    return {
        "run_id": run_id, "name": "demo", "records": 50, "used": 50, "last_step": 600, "total": 600,
        "seconds": 300.0, "tokens_per_second": 18_000.0, "step_seconds": 0.5, "tokens_per_step": 9_000.0,
        "phase_seconds": PHASES, "memory": {"now": 8e8, "peak": 9e8}, "loss": 2.0,
        "metrics": {"tau_hat": 3.0},
        "curves": [{"step": n, "loss": loss, "tokens_per_second": 18e3} for n, loss in ((10, 5), (600, 2))],
        "run": {}, "release_settings": "trainer: {lr: 0.1, seed: 1}\n", "learnt": {}, "problems": [],
        **changes,
    }  # fmt: skip


def compared(**changes: Any) -> compare.Comparison:
    return compare.compare(figures(), figures("0002-demo", **changes), ("0001-demo", "0002-demo"))


def test_the_phase_that_regressed_is_named_first_under_the_name_of_the_field() -> None:
    slower = {**PHASES, "target": 0.4, "optimizer": 0.06}
    made = compared(
        phase_seconds=slower, step_seconds=0.71, tokens_per_second=12_500.0, tokens_per_step=9_000.0
    )
    assert made.headline == (
        "0002-demo is 31 % slower than 0001-demo: target regressed most, 200 → 400 ms a step (+100 %), "
        "95 % of the time lost"
    )
    assert [phase.name for phase in made.phases][:2] == ["target", "optimiser"]
    names = [line.split(",")[0] for line in compare.text(made).splitlines() if ", ms a step" in line]
    assert names[:2] == ["target", "optimiser"]
    assert set(names[2:]) == {"rest", "data wait", "drafter", "loss", "backward"}


def test_time_outside_every_phase_is_one_too() -> None:
    made = compared(step_seconds=0.8, tokens_per_second=11_250.0, tokens_per_step=9_000.0)
    assert "38 % slower" in made.headline
    assert "rest regressed, 20 → 320 ms a step" in made.headline


def test_steps_of_another_size_are_compared_by_tokens() -> None:
    double = {key: 2 * value for key, value in PHASES.items()}
    made = compared(phase_seconds=double, step_seconds=1.0, tokens_per_step=18_000.0)
    assert made.headline == "0002-demo is as fast as 0001-demo (within 2 %); no phase regressed"
    assert made.unit == "per 1,000 tokens"
    assert "steps differ in size (9,000 and 18,000 tokens)" in compare.text(made)


def test_a_phase_that_regressed_is_named_even_in_a_run_that_became_faster() -> None:
    made = compared(
        phase_seconds={**PHASES, "target": 0.05, "data": 0.06},
        step_seconds=0.4, tokens_per_second=22_500.0, tokens_per_step=9_000.0,
    )  # fmt: skip
    assert made.headline == (
        "0002-demo is 25 % faster than 0001-demo: data wait regressed, 10 → 60 ms a step (+500 %), "
        "100 % of the time lost"
    )


def test_phases_of_a_trainer_to_come_have_their_own_names() -> None:
    more = {**PHASES, "communication": 0.1, "brew\x1b[2J": 0.01}
    text = compare.text(compared(phase_seconds=more, step_seconds=0.6))
    assert "communication, ms" in text
    assert "\x1b" not in text


def test_a_run_without_figures_is_said_to_have_none() -> None:
    bare = dict.fromkeys(
        ("tokens_per_second", "step_seconds", "tokens_per_step", "last_step", "seconds", "loss")
    )
    made = compared(**bare, records=0, used=0, phase_seconds={}, memory={"now": None}, metrics={}, curves=[])
    assert made.headline == (
        "0001-demo and 0002-demo cannot be compared in speed: 0002-demo has no figures, because it has "
        "written no metrics.jsonl (a command of your own, or no step was logged yet)"
    )
    assert "\n\n\n" not in compare.text(made)
    alone = {**made.b, "records": 0}
    both = compare.compare(alone, alone, ("0001-demo", "0002-demo"))
    assert "speed: neither has figures, because they have written no " in both.headline
    assert compare.text(both).split("\n")[:2] == [both.headline, ""]
    assert compare.text(both).count("\n\n") == 1


def test_settings_that_differ_are_listed_and_secrets_masked() -> None:
    made = compared(
        release_settings="trainer: {lr: 0.2, seed: 1}\nenvironment: {HF_TOKEN: hunter2}\n",
        learnt={"lr": 0.9, "block_size": 8},
        run={"image": "drafthouse:x"},
    )
    assert made.settings == (
        ("environment.HF_TOKEN", "–", "***"),
        ("image", "–", "drafthouse:x"),
        ("trainer.block-size", "–", "8"),
        ("trainer.lr", "0.1", "0.2"),
    )
    assert "hunter2" not in compare.text(made) + json.dumps(made.to_json())
    assert "settings: no difference" in compare.text(compared())
    bare = compared(release_settings=None)
    assert "settings: unknown, because a run has left none" in compare.text(bare)


def test_the_loss_is_compared_where_both_have_been() -> None:
    text = compare.text(compared(last_step=10))
    assert [line.split() for line in text.splitlines() if line.startswith("loss at")] == [
        ["loss", "at", "step", "10", "5.000", "5.000", "+0", "%"]
    ]


# -- the picture -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_picture_is_a_png_that_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    plot.check(path)
    plot.write(compared(phase_seconds={"$a$": 0.1}), path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert path.read_bytes().endswith(b"IEND\xaeB`\x82")
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.png"]


@pytest.mark.parametrize(
    ("name", "said"),
    [("x.jpg", "must end in .png"), ("none/x.png", "there is no directory")],
)
def test_a_place_where_no_picture_can_be_is_refused_before_any_host_is_asked(
    tmp_path: Path, name: str, said: str
) -> None:
    with pytest.raises(DeployError, match=said):
        plot.check(tmp_path / name)


def test_without_the_library_one_sentence_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def no_matplotlib(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(DeployError, match=r"needs matplotlib.*pip install .*\[deploy,plot\]"):
        plot.check(tmp_path / "x.png")


# -- the reference -----------------------------------------------------------------------------------------


def test_a_reference_holds_what_status_compares_with() -> None:
    value = reference.made(figures(), "localhost")
    assert value.pop("created") > 0
    assert value == {
        "schema": 1, "run_id": "0001-demo", "tokens_per_second": 18_000.0, "step_seconds": 0.5,
        "phase_seconds": PHASES, "memory_peak": 9e8,
    }  # fmt: skip


@pytest.mark.parametrize("changes", [{"used": 2}, {"tokens_per_second": None}])
def test_a_run_that_has_hardly_trained_is_no_reference(changes: dict[str, Any]) -> None:
    with pytest.raises(DeployError, match=r"0001-demo on box has logged its speed .* which is no reference"):
        reference.made(figures(**changes), "box")


def test_a_reference_is_written_whole_replaced_and_taken_away(tmp_path: Path) -> None:
    (tmp_path / "names" / "demo").mkdir(parents=True)
    host = LOCALHOST.model_copy(update={"state": str(tmp_path)})
    goal = Target(Project(tmp_path, {}), host, Local())
    for value in ({"tokens_per_second": 1.0}, {"tokens_per_second": 2.0}):
        path = reference.write(goal, "demo", value)
        assert json.loads(Path(path).read_text()) == value
    reference.write(goal, "demo", None)
    reference.write(goal, "demo", None)
    assert list((tmp_path / "names" / "demo").iterdir()) == []
    with pytest.raises(DeployError, match=r"there is no dem on localhost; did you mean demo\?"):
        reference.write(goal, "dem", {})
    with pytest.raises(DeployError, match="cannot be a name"):
        reference.write(goal, "../x", {})
    with pytest.raises(DeployError, match="fab status shows what there is"):
        reference_store.write(str(tmp_path / "none"), "demo", {}, "box")


@pytest.mark.parametrize("word", ["", ":", "box:", ":demo"])
def test_a_word_that_names_no_run_is_refused(word: str, tmp_path: Path) -> None:
    with pytest.raises(DeployError, match=r"names no run: write RUN or HOST:RUN"):
        reference.find(word, None, tmp_path)


def test_a_run_may_be_on_a_host_of_its_own(tmp_path: Path) -> None:
    goal, run = reference.find("localhost:0007-demo", "never-asked", tmp_path)
    assert (goal.settings.name, run) == ("localhost", "0007-demo")
    assert reference.name_of("0007-demo") == reference.name_of("demo") == "demo"
