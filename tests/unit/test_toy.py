"""The toy's choice of text, its place in shared memory, and the parts of its making."""

from __future__ import annotations

import dataclasses
import os
import random
import string
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainer import staging, toy, toy_target
from trainer.errors import InputError
from trainer.staging import stage

TINY = toy.RECIPES["tiny"]


def library(path: Path, sizes: dict[str, int]) -> Path:
    path.mkdir()
    for name, size in sizes.items():
        (path / name).write_text("".join(random.Random(name).choices(string.printable, k=size)))
    return path


# -- the text ----------------------------------------------------------------------------------------------


def test_the_text_is_the_same_each_time_and_known_and_held_out_files_are_different_ones() -> None:
    first, second = toy.read_text(TINY), toy.read_text(TINY)
    assert first == second
    assert 0 < sum(len(text.encode()) for text in first.known) <= TINY.known_bytes
    assert len(first.held_out) == TINY.held_out_files
    assert not set(first.known) & set(first.held_out)


def test_the_demo_finds_enough_text_in_this_python() -> None:
    text = toy.read_text(toy.RECIPES["demo"])
    assert sum(len(part.encode()) for part in text.known) > 0.8 * toy.RECIPES["demo"].known_bytes


def test_the_choice_of_files_does_not_depend_on_what_else_is_there(tmp_path: Path) -> None:
    files = {f"m{i}.py": 3600 for i in range(12)}
    few = toy.read_text(TINY, library(tmp_path / "few", files))
    more = toy.read_text(TINY, library(tmp_path / "more", {**files, "small.py": 60, "large.py": 90_000}))
    assert few == more


def test_files_that_repeat_themselves_are_left_out(tmp_path: Path) -> None:
    place = library(tmp_path / "lib", {f"m{i}.py": 3600 for i in range(12)})
    before = toy.read_text(TINY, place)
    (place / "table.py").write_text("def_op('NOP', 9)\n" * 300)
    assert toy.read_text(TINY, place) == before


def test_a_python_without_sources_is_told_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has too few \.py files; install a complete Python"):
        toy.read_text(TINY, library(tmp_path / "lib", {"a.py": 4000}))


def test_the_key_changes_with_the_recipe_and_with_the_text() -> None:
    text = toy.read_text(TINY)
    keys = {
        toy._key(TINY, text),
        toy._key(toy.RECIPES["demo"], text),
        toy._key(TINY, toy.Text([*text.known, "more"], text.held_out)),
        toy._key(TINY, toy.Text(text.known, [*text.held_out, "more"])),
    }
    assert len(keys) == 4


def test_an_unknown_toy_is_named_with_the_nearest_one(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("DRAFTHOUSE_TOY", "tinny")
    with pytest.raises(InputError, match=r"DRAFTHOUSE_TOY=tinny: there is no such toy.*did you mean 'tiny'"):
        toy.ensure(tmp_path / "cache", tmp_path / "shm", print)


# -- shared memory -----------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(os.urandom(5000))
    return path


def test_weights_appear_under_their_digest_with_a_link_that_leads_there(tmp_path: Path, model: Path) -> None:
    said: list[str] = []
    shm = tmp_path / "shm"
    place = stage(model, "abc", shm, said.append)
    assert place == shm / "toy@abc"
    assert os.readlink(shm / "toy") == "toy@abc"
    assert (shm / "toy/model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert len(said) == 1
    assert stage(model, "abc", shm, said.append) == place
    assert len(said) == 1, "nothing was copied the second time"
    assert sorted(p.name for p in shm.iterdir()) == ["toy", "toy@abc"]


def test_a_new_version_moves_the_link_and_leaves_the_old_weights_alone(tmp_path: Path, model: Path) -> None:
    shm = tmp_path / "shm"
    stage(model, "one", shm, print)
    stage(model, "two", shm, print)
    assert os.readlink(shm / "toy") == "toy@two"
    assert (shm / "toy@one/config.json").exists()


def test_weights_that_were_cut_off_or_lost_are_staged_again(tmp_path: Path, model: Path) -> None:
    shm = tmp_path / "shm"
    place = stage(model, "abc", shm, print)
    (place / "model.safetensors").write_bytes(b"short")
    stage(model, "abc", shm, print)
    assert (place / "model.safetensors").stat().st_size == 5000
    (place / "config.json").unlink()
    stage(model, "abc", shm, print)
    assert (place / "config.json").exists()
    assert sorted(p.name for p in shm.iterdir()) == ["toy", "toy@abc"]


def test_no_room_is_one_sentence_and_nothing_is_written(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=3, f_frsize=real(path).f_frsize))
    with pytest.raises(
        InputError, match=r"shm: no room for the toy's weights: 1\.1 MB are needed, 0\.0 MB free"
    ):
        stage(model, "abc", tmp_path / "shm", print)
    assert list((tmp_path / "shm").iterdir()) == []


def test_room_that_vanishes_while_copying_leaves_nothing_half_made(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, goal: Path) -> None:
        goal.mkdir()
        (goal / "config.json").write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(staging.shutil, "copytree", full)
    with pytest.raises(InputError, match="no room for the toy's weights"):
        stage(model, "abc", tmp_path / "shm", print)
    assert list((tmp_path / "shm").iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, model: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/shm: the toy's weights cannot be put there.*DRAFTHOUSE_SHM"):
        stage(model, "abc", tmp_path / "file/shm", print)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--cache-dir .*/file/cache: the toy target cannot be kept there"):
        toy.ensure(tmp_path / "file/cache", tmp_path / "shm", print, recipe=TINY)


# -- the parts ---------------------------------------------------------------------------------------------


def test_the_tokenizer_ends_texts_with_its_first_token_and_keeps_its_last_for_the_mask() -> None:
    texts = toy.read_text(TINY).known
    tokenizer = toy_target.make_tokenizer(texts, TINY.vocab_size)
    assert tokenizer.get_vocab_size() == TINY.vocab_size
    assert tokenizer.token_to_id("<eos>") == 0
    assert tokenizer.token_to_id("<|mask|>") == TINY.vocab_size - 1
    ids = tokenizer.encode("héllo, wörld\n\tx = 1").ids
    assert tokenizer.decode(ids) == "héllo, wörld\n\tx = 1"
    assert TINY.vocab_size - 1 not in ids


def test_windows_stay_inside_one_file_and_come_in_an_order_that_the_seed_decides() -> None:
    streams = [[1] * 10, [2] * 7, [3] * 3]
    joined = [token for part in streams for token in part]
    found = toy_target.starts(streams, 5, torch.Generator().manual_seed(1))
    assert sorted(found) == [0, 1, 2, 3, 4, 10, 11]
    assert all(len(set(joined[i : i + 5])) == 1 for i in found)
    assert found == toy_target.starts(streams, 5, torch.Generator().manual_seed(1))
    assert found != toy_target.starts(streams, 5, torch.Generator().manual_seed(2))


def test_training_ends_with_its_time_on_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 3))  # every look at the clock is three seconds later
    monkeypatch.setattr(toy_target.time, "monotonic", lambda: float(next(clock)))
    said: list[str] = []
    model = toy_target.new_model(TINY, TINY.vocab_size)
    slow = dataclasses.replace(TINY, steps=1000, seconds=60)
    _, steps = toy_target.train(model, torch.arange(300) % 100 + 1, slow, said.append)
    assert 1 < steps < 30
    assert any(text.startswith("toy target ") and " s of " in text and "loss" in text for text in said)


# -- the demo's file ---------------------------------------------------------------------------------------


def test_the_demo_is_a_file_that_the_trainer_takes_as_it_is() -> None:
    from trainer import config

    path = Path(toy.__file__).parent.parent / "runs/demo.yaml"
    settings = config.parse(["--config", str(path)]).settings
    recipe = toy.RECIPES["demo"]
    assert settings.target_model == "toy"
    assert settings.data_dir is None, "the toy brings its own"
    assert settings.max_steps, "it ends by itself"
    assert settings.max_seq_len >= recipe.prompt + recipe.completion, "no completion is cut"
    assert settings.target_layer_ids
    assert max(settings.target_layer_ids) < recipe.layers - 1, "the last layer is never tapped"
    assert recipe.evaluation_prompts >= settings.eval_prompts
    steps_of_an_epoch = -(-recipe.documents // settings.max_batch_size)
    assert settings.epochs * steps_of_an_epoch >= settings.max_steps


def test_weights_and_data_of_a_runs_file_are_the_trainers_target_and_data(tmp_path: Path) -> None:
    from trainer import config

    file = tmp_path / "run.yaml"
    file.write_text("name: x\nweights: /models/a\ndata: /data/b\ntrainer: {lr: 0.1}\n")
    settings = config.parse(["--config", str(file)]).settings
    assert (settings.target_model, settings.data_dir, settings.lr) == ("/models/a", "/data/b", 0.1)
    assert config.parse(["--config", str(file), "--target-model", "toy"]).settings.target_model == "toy"
