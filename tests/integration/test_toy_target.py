"""The tiny toy from nothing to a data directory: the demo's code, in seconds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from deployed import CHECKOUT
from trainings import python

from trainer import toy
from trainer.completions import Completions
from trainer.errors import InputError
from trainer.modeldir import default_mask_token, tokenizer_digest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("trainings"),
]  # one process has imported torch for them
TINY = toy.RECIPES["tiny"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with a tiny toy in it."""
    place = tmp_path_factory.mktemp("toy") / "cache"
    toy.ensure(place, place.parent / "shm", print, recipe=TINY)
    return place


class Maker:
    """Another process that makes or waits for the tiny toy, and prints what it is told and what it got."""

    def __init__(self, cache: Path, shm: Path) -> None:
        code = (
            "import sys; from pathlib import Path; from trainer import toy\n"
            "made = toy.ensure(Path(sys.argv[1]), Path(sys.argv[2]), lambda t: print(t, flush=True))\n"
            "print('RESULT', made.made, made.digest, flush=True)"
        )
        environment = {**os.environ, "DRAFTHOUSE_TOY": "tiny"}
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the test
        fds = (self._out.fileno(), sys.stderr.fileno())
        self.process = python().start(["-c", code, str(cache), str(shm)], CHECKOUT, environment, *fds)

    def end(self, seconds: float = 240) -> tuple[int, str]:
        """Returns the exit code and what was printed."""
        code = self.process.wait(seconds)
        self._out.seek(0)
        return code, self._out.read()


def only(pattern: str, cache: Path) -> Path:
    (found,) = cache.glob(pattern)
    return found


def test_a_toy_is_a_model_directory_with_data_and_prompts(cache: Path, tmp_path: Path) -> None:
    said: list[str] = []
    made = toy.ensure(cache, tmp_path / "shm", said.append, recipe=TINY)
    assert made.target_dir == tmp_path / "shm" / f"toy@{made.digest}"

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(made.target_dir)
    tokenizer = AutoTokenizer.from_pretrained(made.target_dir)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert tokenizer.decode(tokenizer("def f(x):\n    return x")["input_ids"]) == "def f(x):\n    return x"
    assert tokenizer.eos_token_id == 0
    assert default_mask_token(made.target_dir, model.config.vocab_size) == TINY.vocab_size - 1
    for name, value in vars(TINY.shape).items():
        assert getattr(model.config, name) == value, name

    data = Completions.open(made.data_dir)
    data.check_target(tokenizer_digest(made.target_dir), model.config.vocab_size)
    assert len(data) == TINY.documents
    _, mask = data.document(0)
    assert list(mask[: TINY.prompt + 1]) == [0] * TINY.prompt + [1]
    assert data.meta["largest_id"] < TINY.vocab_size - 1, "the mask token never occurs"

    known, unseen = made.prompts["known"], made.prompts["held_out"]
    assert {len(prompt) for prompt in known + unseen} == {TINY.prompt}
    assert (len(known), len(unseen)) == (TINY.evaluation_prompts, TINY.evaluation_prompts)
    beginnings = {tuple(data.document(i)[0][: TINY.prompt].tolist()) for i in range(len(data))}
    assert not beginnings & {tuple(prompt) for prompt in known}, "fresh cuts"


def test_the_completions_are_the_targets_own_greedy_text(cache: Path, tmp_path: Path) -> None:
    from trainer.speculative import plain
    from trainer.target import Target

    made = toy.ensure(cache, tmp_path / "shm", print, recipe=TINY)
    target, data = Target.load(made.target_dir), Completions.open(made.data_dir)
    for number in (0, len(data) - 1):
        ids, mask = data.document(number)
        text = plain(target, [ids[: TINY.prompt].tolist()], int(mask.sum()), stop=(0,))[0][0]
        assert text.tokens == ids.tolist()


def test_the_second_call_finds_it_and_stages_it_again_after_a_reboot(cache: Path, tmp_path: Path) -> None:
    shm = tmp_path / "shm"
    said: list[str] = []
    first = toy.ensure(cache, shm, said.append, recipe=TINY)
    assert not first.made
    assert [text for text in said if "training" in text or "completions" in text] == []
    said.clear()
    toy.ensure(cache, shm, said.append, recipe=TINY)
    assert said == [], "everything was there"
    shutil.rmtree(shm)
    again = toy.ensure(cache, shm, said.append, recipe=TINY)
    assert len(said) == 1
    assert "its weights are in" in said[0]
    assert (again.target_dir / "model.safetensors").exists()
    assert again.digest == first.digest


@pytest.mark.parametrize(
    "damage",
    ["target/model.safetensors", "target/config.json", "data/data.json", "data/00000.arrow", "prompts.json"],
)
def test_a_damaged_cache_is_never_used(cache: Path, tmp_path: Path, damage: str) -> None:
    copy = tmp_path / "cache"
    shutil.copytree(cache, copy)
    place = only("toy-*", copy)
    assert toy._what_is_wrong(place) is None
    (place / damage).unlink()
    assert toy._what_is_wrong(place) is not None


def test_a_damaged_cache_is_made_anew_and_says_so(cache: Path, tmp_path: Path) -> None:
    copy = tmp_path / "cache"
    shutil.copytree(cache, copy)
    weights = only("toy-*", copy) / "target/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    said: list[str] = []
    made = toy.ensure(copy, tmp_path / "shm", said.append, recipe=TINY)
    assert made.made
    assert "is damaged (" in said[0]
    assert any(text.startswith("toy target trained: 30 steps") for text in said)
    assert toy._what_is_wrong(only("toy-*", copy)) is None


def test_of_two_processes_one_makes_it_and_the_other_waits_and_says_so(tmp_path: Path) -> None:
    both = [Maker(tmp_path / "cache", tmp_path / "shm") for _ in range(2)]
    codes, outputs = zip(*(maker.end() for maker in both), strict=True)
    assert codes == (0, 0)
    results = [text.splitlines()[-1].split() for text in outputs]
    assert sorted(result[1] for result in results) == ["False", "True"]
    assert results[0][2] == results[1][2]
    waited = next(text for text, result in zip(outputs, results, strict=True) if result[1] == "False")
    assert "another process is making it; waiting" in waited
    assert sum("toy target trained" in text for text in outputs) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])  # an exception, and an end without one
def test_a_process_that_is_stopped_while_making_it_leaves_no_half_result(
    tmp_path: Path, number: signal.Signals
) -> None:
    cache = tmp_path / "cache"
    stopped = Maker(cache, tmp_path / "shm")
    deadline = time.monotonic() + 120
    while not list(cache.glob(".toy-*.partial")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    stopped.process.send_signal(number)
    assert stopped.end(60)[0] != 0
    assert list(cache.glob("toy-*")) == []
    assert not (tmp_path / "shm").exists()
    if number == signal.SIGINT:
        assert list(cache.glob(".toy-*.partial")) == []
    # What a killed process left is swept by the next one, which is not held up by it.
    assert "RESULT True" in Maker(cache, tmp_path / "shm").end()[1]
    assert list(cache.glob(".toy-*.partial")) == []


@pytest.mark.root
def test_a_shared_memory_that_is_full_is_told_before_anything_is_written(cache: Path, tmp_path: Path) -> None:
    shm = tmp_path / "small"
    shm.mkdir()
    code = (
        "import sys; from pathlib import Path; from trainer import errors, toy\n"
        "cache, shm = map(Path, sys.argv[1:])\n"
        "try: toy.ensure(cache, shm, print)\n"
        "except errors.InputError as error: print(error)\n"
        "print(sorted(path.name for path in shm.iterdir()))"
    )
    script = 'mount -t tmpfs -o size=64k tmpfs "$3" && exec "$0" -c "$1" "$2" "$3"'
    ran = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, sys.executable, code, str(cache), str(shm)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "DRAFTHOUSE_TOY": "tiny"},
        cwd=Path(toy.__file__).parent.parent,
    )
    assert ran.returncode == 0, ran.stderr
    sentence, left = ran.stdout.splitlines()[-2:]
    assert "no room for the toy's weights" in sentence
    assert str(shm) in sentence
    assert left == "[]"


def test_a_disk_that_is_full_while_making_it_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer import toy_target

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(toy_target, "make", full)
    with pytest.raises(InputError, match=r"--cache-dir .*: the toy target cannot be kept there.*No space"):
        toy.ensure(tmp_path / "cache", tmp_path / "shm", print, recipe=TINY)
    assert [path.name for path in (tmp_path / "cache").iterdir() if "lock" not in path.name] == []


def test_how_it_was_made_is_kept_beside_it(cache: Path, tmp_path: Path) -> None:
    made = toy.ensure(cache, tmp_path / "shm", print, recipe=TINY)
    facts = json.loads((made.data_dir.parent / "toy.json").read_text())
    assert facts["steps"] == TINY.steps
    assert facts["recipe"]["vocab_size"] == TINY.vocab_size
    assert set(facts["seconds"]) == {"target", "completions"}
    json.dumps(facts)


def test_a_target_that_was_cut_short_is_told_each_time(cache: Path, tmp_path: Path) -> None:
    hasty = Path(shutil.copytree(cache, tmp_path / "cache"))
    place = only("toy-*", hasty)
    record = json.loads((place / "toy.json").read_text())
    (place / "toy.json").write_text(json.dumps({**record, "steps": TINY.steps // 2}))
    said: list[str] = []
    toy.ensure(hasty, tmp_path / "shm", said.append, recipe=TINY)
    assert any(f"{TINY.steps // 2} of {TINY.steps} steps" in text and str(place) in text for text in said)
    (place / "toy.json").write_text(json.dumps({**record, "steps": TINY.steps}))
    said.clear()
    toy.ensure(hasty, tmp_path / "shm", said.append, recipe=TINY)
    assert said == []
