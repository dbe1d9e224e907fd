"""The target writes the answers: what it would say, in batches, and the same after a kill."""

from __future__ import annotations

import functools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import chats
import pytest
import tiny
import torch

from trainer import generate as generation
from trainer import prepare, regenerate
from trainer.agreement import measure
from trainer.chat import Chat
from trainer.completions import Completions, write_completions
from trainer.generate import generate
from trainer.prepare import main
from trainer.target import Target

STOP = 257  # <|im_end|>


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chats.chat_model(tmp_path_factory.mktemp("m") / "target")


@pytest.fixture(scope="module")
def target(home: Path) -> Target:
    return Target.load(home)


@pytest.fixture(autouse=True)
def _loaded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    """The model is loaded once, not by every command, but in the first test of a whole one."""
    if request.function is not test_every_label_is_what_the_target_would_say:
        monkeypatch.setattr(prepare, "_load", lambda given: target)


def conversations(count: int = 9) -> list[dict[str, Any]]:
    found = []
    for i in range(count):
        talk = [{"role": "user", "content": f"tell {'me ' * i}of {i}"}, {"role": "assistant", "content": "?"}]
        found.append({"messages": talk * (1 + i % 3)})
    return found


def flags(home: Path, place: Path, name: str, **changes: object) -> list[str]:
    chosen = {
        "target-model": home,
        "input": place / "in.jsonl",
        "data-dir": place / name,
        "min-supervised": 1,
        "max-new-tokens": 12,
        "batch-size": 3,
        **changes,
    }
    return ["--regenerate", *(str(x) for key, value in chosen.items() for x in (f"--{key}", value))]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, conversations())))
    return tmp_path


def content(directory: Path) -> list[tuple[list[int], list[int]]]:
    data = Completions.open(directory)
    return [tuple(column.tolist() for column in data.document(i)) for i in range(len(data))]  # type: ignore[misc]


# -- generation --------------------------------------------------------------------------------------------


def test_a_text_does_not_depend_on_what_is_written_beside_it(target: Target) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 250, (n,), generator=generator).tolist() for n in (3, 17, 9, 30, 1)]
    limits = [20, 5, 12, 1, 9]
    alone = [generate(target, [p], [n], [])[0] for p, n in zip(prompts, limits, strict=True)]
    assert generate(target, prompts, limits, []) == alone
    assert [len(text) for text in alone] == limits
    plain = target.model.generate(
        torch.tensor([prompts[0]]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert alone[0] == plain[0, 3:].tolist()


def test_a_text_ends_with_its_stop_token_and_leaves_the_batch(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[1, 2, 3], [4, 5], [6] * 8, [7]]
    whole = generate(target, prompts, [16] * 4, [])
    stop = whole[0][4]
    widths: list[int] = []
    real = target.model.forward

    @functools.wraps(real)
    def forward(*args: Any, **more: Any) -> Any:
        widths.append(len(more["input_ids"]))
        return real(*args, **more)

    monkeypatch.setattr(target.model, "forward", forward)
    ended = generate(target, prompts, [16, 3, 3, 16], [stop], tick=None)
    for text, before, limit in zip(ended, whole, (16, 3, 3, 16), strict=True):
        end = before.index(stop) + 1 if stop in before[:limit] else limit
        assert text == before[:end]
    assert widths[0] == 4
    assert widths[-1] < 4


def test_samples_are_the_same_for_one_seed_and_follow_the_temperature(target: Target) -> None:
    prompts = [[1, 2, 3]] * 8
    some = [generate(target, prompts, [8] * 8, [], temperature=1.0, seed=s) for s in (0, 0, 1)]
    assert some[0] == some[1] != some[2]
    assert len({tuple(text) for text in some[0]}) > 1
    cold = generate(target, prompts, [8] * 8, [], temperature=1e-4)
    assert cold == generate(target, prompts, [8] * 8, [])


# -- the whole way -----------------------------------------------------------------------------------------


def test_every_label_is_what_the_target_would_say(
    home: Path, place: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(home, place, "d")) == 0
    out = capsys.readouterr().out
    assert "agreement: 100.0% of" in out
    assert "regenerating: 9 of" in out
    data = Completions.open(place / "d")
    assert measure(target, data, 10**6).share == 1
    assert data.meta["agreement"]["share"] == 1
    assert data.meta["regenerated"]["temperature"] == 0
    assert data.meta["template"]
    chat = Chat(str(home))
    ids, _ = content(place / "d")[1]
    assert chat.decode(ids).startswith("<|im_start|>user\ntell me of 1<|im_end|>\n<|im_start|>assistant\n")
    assert sorted(path.name for path in place.iterdir()) == ["d", "in.jsonl"]  # nothing is left behind


def test_all_turns_are_answered_in_order_and_make_one_document_where_they_can(
    home: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(target: Target, prompts: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        return [[ord(c) for c in f"answer to {len(p)}"] + [STOP] for p in prompts]

    chat = Chat(str(home))
    monkeypatch.setattr(
        regenerate, "generate", lambda t, prompts, *_, **__: [
            [*chat.encode(f"answer to {len(p)}")[0].tolist(), STOP] for p in prompts
        ]
    )  # fmt: skip
    assert main(flags(home, place, "d")) == 0
    found = content(place / "d")
    assert len(found) == 9
    ids, mask = found[2]  # three turns
    said = [i for i, m in zip(ids, mask, strict=True) if m]
    texts = chat.decode(said).split("<|im_end|>")[:-1]
    assert len(texts) == 3
    for text in texts:  # each was asked with everything before it
        before = chat.decode(ids).index(text)
        assert text == f"answer to {len(chat.encode(chat.decode(ids)[:before])[0])}"


def test_where_the_template_changes_earlier_turns_each_makes_a_document(
    tmp_path: Path, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = chats.chat_model(tmp_path / "thinking", chats.THINKING)
    chat = Chat(str(home))
    monkeypatch.setattr(
        regenerate, "generate", lambda t, prompts, *_, **__: [
            [*chat.encode("<think>\nhm\n</think>\n\nyes")[0].tolist(), STOP] for _ in prompts
        ]
    )  # fmt: skip
    assert main(flags(home, place, "d")) == 0
    assert "9 answers made documents of their own" in capsys.readouterr().out
    found = content(place / "d")
    assert len(found) == 18
    for ids, mask in found:
        said = chat.decode([i for i, m in zip(ids, mask, strict=True) if m])
        assert said == "<think>\nhm\n</think>\n\nyes<|im_end|>"
        assert chat.decode(ids).endswith(said)
    assert "assistant\nyes<|im_end|>" in chat.decode(found[-1][0])  # the earlier turn, without reasoning


class Killed(BaseException):
    """As from SIGKILL: nothing is tidied up."""


def test_a_run_that_was_killed_goes_on_to_the_same_result(
    home: Path, place: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    written: list[int] = []  # conversations of each batch
    deaths: list[int] = []

    def writes(*args: Any, **more: Any) -> list[list[int]]:
        if len(written) in deaths:
            deaths.remove(len(written))
            raise Killed
        written.append(len(args[1]))
        # This target never comes to an end by itself, and a conversation goes on only after one.
        return [[*answer[:-1], STOP] for answer in generation.generate(*args, **more)]

    monkeypatch.setattr(regenerate, "WINDOW", 2)
    monkeypatch.setattr(regenerate, "generate", writes)
    assert main(flags(home, place, "straight", temperature=1)) == 0
    assert sum(written) == sum(1 + i % 3 for i in range(9))
    straight_through = list(written)
    written.clear()
    deaths += [2, 4]
    kept = place / ".killed.answers"
    for _ in range(2):
        with pytest.raises(Killed):
            main(flags(home, place, "killed", temperature=1))
        assert not (place / "killed").exists()
        with open(kept, "ab") as file:
            file.write(b'{"asked": "half a li')  # the next batch broke off while it was written
    assert main(flags(home, place, "killed", temperature=1)) == 0
    assert "going on with what an earlier run left: 4 batches of answers" in capsys.readouterr().out
    assert content(place / "killed") == content(place / "straight")
    straight, killed = (Completions.open(place / name).meta for name in ("straight", "killed"))
    assert straight == killed
    assert written == straight_through  # no answer was written twice
    assert not kept.exists()


def test_a_stop_says_that_nothing_was_written(
    home: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise SystemExit(143)  # what SIGTERM makes of it

    monkeypatch.setattr(regenerate, "generate", stopped)
    assert main(flags(home, place, "stopped")) == 143
    told = capsys.readouterr()
    assert told.err == (
        "stopped: no data was written; the same command goes on behind the last batch of answers\n"
    )
    assert "documents written" not in told.out
    assert not (place / "stopped").exists()


def test_what_was_begun_with_other_settings_is_not_gone_on_with(
    home: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def dies(*_: Any, **__: Any) -> None:
        raise Killed

    monkeypatch.setattr(regenerate, "generate", dies)
    with pytest.raises(Killed):
        main(flags(home, place, "d"))
    assert main(flags(home, place, "d", **{"max-new-tokens": 5})) == 2
    err = capsys.readouterr().err
    assert "another max_new_tokens" in err
    assert err.count("\n") == 1
    assert (place / ".d.answers").exists()  # nothing is lost


def test_answers_that_do_not_end_or_do_not_fit_are_told(
    home: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(place / "in.jsonl", "a") as file:
        file.write("\n" + json.dumps({"prompt": "long " * 100}) + "\n" + json.dumps({"prompt": "short"}))
    assert main(flags(home, place, "d", **{"max-seq-len": 300})) == 0
    out = capsys.readouterr().out
    assert "answers cut at --max-new-tokens or --max-seq-len" in out
    assert f"1 dropped: no room for an answer in --max-seq-len ({place / 'in.jsonl'}:10)" in out
    assert len(content(place / "d")) == 10  # a prompt alone gets its answer


# -- agreement ---------------------------------------------------------------------------------------------


def test_data_that_the_target_did_not_write_is_warned_of(
    home: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"prompt": "q", "response": f"something else {i}"}) for i in range(5)]
    (place / "in.jsonl").write_text("\n".join(lines))
    common = ["--target-model", str(home), "--data-dir", str(place / "d")]
    given = [*common, "--input", str(place / "in.jsonl"), "--min-supervised", "1"]
    assert main(given) == 0
    before = Completions.open(place / "d").digest
    capsys.readouterr()
    assert main([*common, "--measure-agreement", "50"]) == 0
    out = capsys.readouterr().out
    assert "warning: only 0.0% of" in out
    assert "--regenerate" in out
    after = Completions.open(place / "d")
    assert after.meta["agreement"]["share"] == 0
    assert after.digest == before  # a measurement does not make it other data
    assert sorted(os.listdir(place / "d")) == ["00000.arrow", "data.json"]


def test_agreement_is_the_share_of_labels_that_are_the_targets_argmax(tmp_path: Path) -> None:
    target = Target(tiny.qwen3())
    prompt = [3, 1, 4, 1, 5]
    (answer,) = generate(target, [prompt], [20], [])
    spoilt = [answer[0], (answer[1] + 1) % 90, *answer[2:]]
    documents = [([*prompt, *answer], [0] * 5 + [1] * 20), ([*prompt, *spoilt[:2]], [0] * 5 + [1] * 2)]
    write_completions(tmp_path / "d", documents, {"tokenizer": "x", "target": "y"})
    found = measure(target, Completions.open(tmp_path / "d"), 1000)
    assert (found.equal, found.labels, found.documents) == (21, 22, 2)


def test_measuring_needs_data_that_is_there(home: Path, tmp_path: Path, capsys: Any) -> None:
    given = ["--target-model", str(home), "--data-dir", str(tmp_path / "no")]
    assert main([*given, "--measure-agreement"]) == 2
    assert "data.json" in capsys.readouterr().err
    assert main(given) == 2
    assert "--input is missing" in capsys.readouterr().err
    shutil.rmtree(tmp_path)
