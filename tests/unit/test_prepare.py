"""Conversations become completions: what the assistant wrote is supervised, nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trainer.data import Completions
from trainer.prepare import answers, loss_mask, main, messages_of

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "It is four."},
    {"role": "user", "content": "Thanks!"},
    {"role": "assistant", "content": "You are welcome."},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny.target_directory(tmp_path_factory.mktemp("m") / "target")
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator([m["content"] for m in TALK], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(path)
    return path


def run(target: Path, tmp_path: Path, lines: list[str], *more: str) -> int:
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    given = [
        "--target-model",
        str(target),
        "--input",
        str(tmp_path / "in.jsonl"),
        "--data-dir",
        str(tmp_path / "d"),
    ]
    return main([*given, *more])


def test_what_the_assistant_wrote_is_supervised_to_the_end_of_its_turn(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(target, tmp_path, [json.dumps({"messages": TALK})]) == 0
    out = capsys.readouterr().out
    assert "1 conversations" in out
    assert (
        "<|im_start|>user\nWhat is two and two?<|im_end|>\n<|im_start|>assistant\n⟦It is four.<|im_end|>⟧\n"
        "<|im_start|>user\nThanks!<|im_end|>\n<|im_start|>assistant\n⟦You are welcome.<|im_end|>⟧\n"
    ) in out
    found = Completions.open(tmp_path / "d")
    assert len(found) == 1
    assert found.meta["target"] == "target"


def test_what_cannot_be_used_is_counted_by_reason_with_its_line(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        json.dumps({"messages": TALK}),
        "{broken",
        "",
        json.dumps({"messages": []}),
        json.dumps({"text": "x"}),
        json.dumps({"messages": TALK[:1]}),
        json.dumps({"messages": [{"role": "assistant", "content": None}]}),
        json.dumps({"messages": [{"role": "user", "content": "long " * 100}, TALK[1]]}),
    ]
    assert run(target, tmp_path, lines, "--max-seq-len", "40") == 0
    out = capsys.readouterr().out
    for text in (
        "1 dropped: not valid JSON (first in line 2)",
        "2 dropped: no 'messages' (first in line 4)",
        "1 dropped: no assistant's answer (first in line 6)",
        "1 dropped: a message without text in 'role' and 'content' (first in line 7)",
        "1 dropped: nothing supervised is left (first in line 8)",
        "2 cut at the longest allowed",
    ):
        assert text in out
    assert Completions.open(tmp_path / "d").lengths.tolist() == [40]


def test_nothing_usable_is_an_error_and_writes_nothing(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(target, tmp_path, ["{}"]) == 2
    assert "not one document" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--max-seq-len", "3"], "--max-seq-len 3"),
        (["--what"], "unrecognized arguments: --what"),
        (["--input", "/nowhere.jsonl"], "--input /nowhere.jsonl: No such file or directory"),
        (["--target-model", "/nowhere"], "--target-model /nowhere"),
    ],
)
def test_wrong_flags_are_one_sentence(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], says: str
) -> None:
    assert run(target, tmp_path, ["{}"], *more) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_an_answer_that_the_template_changes_later_is_left_out() -> None:
    def render(messages: list[dict[str, str]], begin: bool) -> str:
        shown = [
            m["content"].split("</think>")[-1]
            if m["role"] == "assistant" and i < len(messages) - 1
            else m["content"]
            for i, m in enumerate(messages)
        ]
        return "".join(f"[{text}]" for text in shown) + ("[" if begin else "")

    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "why</think>b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "how</think>d"},
    ]
    text, spans, left_out = answers(talk, render)
    assert left_out == 1
    assert [text[a:b] for a, b in spans] == ["how</think>d]"]


def test_tokens_across_the_border_of_an_answer_are_not_supervised() -> None:
    ids, offsets = [1, 2, 3, 9, 4], [(0, 2), (2, 5), (5, 6), (6, 7), (7, 8)]
    assert loss_mask(ids, offsets, [(3, 8)], set()) == [0, 0, 1, 1, 1]
    assert loss_mask(ids, offsets, [(3, 8)], {9}) == [0, 0, 1, 1, 0]
    assert loss_mask(ids, offsets, [], {9}) == [0] * 5


def test_a_line_that_is_a_conversation_is_read() -> None:
    assert messages_of(json.dumps({"messages": TALK})) == TALK
