"""Files of prompts: what they may hold, and what is said of those that cannot be used."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest
import tiny

from trainer.errors import InputError
from trainer.prompts import read_prompts

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
WORDS = ("user", "assistant", "system", "hello", "there", "friend")  # ids 0, 1, …


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model") / "target"
    tiny.target_directory(place)
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "user"}
    (place / "tokenizer.json").write_text(
        json.dumps({"model": model, "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}})
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    return place


def read(target: Path, place: Path, name: str, content: str | bytes, **how: object) -> dict:
    file = place / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_prompts(file, target, 97, **how)  # type: ignore[arg-type]


LINES = '{"task_id": "HumanEval/0", "prompt": "hello there"}\n\n{"prompt": "friend", "test": "x"}\n'
CHAT = [{"role": "system", "content": "there"}, {"role": "user", "content": "hello"}]
ANSWERED = [*CHAT, {"role": "assistant", "content": "friend"}]


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.json", '["hello there", [5, 6], {"text": "friend"}]', {"a": [[3, 4], [5, 6], [5]]}),
        ("a.json", '{"x": ["hello"], "y": [[7]]}', {"x": [[3]], "y": [[7]]}),
        ("HumanEval.jsonl", LINES, {"HumanEval": [[3, 4], [5]]}),
        ("HumanEval.jsonl.gz", gzip.compress(LINES.encode(), mtime=0), {"HumanEval": [[3, 4], [5]]}),
        ("one.jsonl", '{"question": "hello"}\n', {"one": [[3]]}),
        ("one.jsonl", "[1, 2, 3]\n", {"one": [[1, 2, 3]]}),
        ("one.jsonl", '"hello there"', {"one": [[3, 4]]}),
        ("lines", '"hello"\n[1, 2]\n', {"lines": [[3], [1, 2]]}),
        ("a.txt", "hello there\n\n  friend\n", {"a": [[3, 4], [5]]}),
        ("prompts", "hello there\nfriend", {"prompts": [[3, 4], [5]]}),
        ("chat.jsonl", json.dumps({"messages": ANSWERED}), {"chat": [[2, 4, 0, 3, 1]]}),
    ],
)
def test_prompts_are_read_from_what_people_have(
    target: Path, tmp_path: Path, name: str, content: str | bytes, found: dict
) -> None:
    assert read(target, tmp_path, name, content) == found


def test_with_chat_a_text_is_a_users_message(target: Path, tmp_path: Path) -> None:
    found = read(target, tmp_path, "a.jsonl", '"hello"\n[7]\n' + json.dumps({"messages": CHAT}), chat=True)
    assert found == {"a": [[0, 3, 1], [7], [2, 4, 0, 3, 1]]}
    assert read(target, tmp_path, "a.json", '["hello", "there"]', most=1) == {"a": [[3]]}


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.json", "{", "is not valid JSON"),
        ("a.jsonl", '"hello"\n{"prompt": \n', "line 2 is not valid JSON"),
        ("a.json", '{"a": 3}', "its object has none of the keys prompt, messages"),
        ("a.json", '{"a": 3, "b": []}', "must hold a list of prompts"),
        ("a.json", "3", "must hold a list of prompts"),
        ("a.json", "[]", "holds no prompt"),
        ("a.txt", "\n \n", "holds no prompt"),
        ("a.json", "[[1, 97]]", "prompt 0 of 'a' must be text that is not empty, or token ids from 0 to 96"),
        ("a.json", "[[true]]", "token ids from 0 to 96"),
        ("a.json", '[[1], ""]', "prompt 1 of 'a' must be text that is not empty"),
        ("a.json", '[[1], {"solution": "x"}]', "prompt 1 of 'a' has none of the keys prompt, messages"),
        ("a.json", '[{"messages": [{"role": "assistant", "content": "x"}]}]', "has no message to answer"),
        ("a.json", '[{"messages": "hello"}]', "has messages that are no list of objects"),
        ("a.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)[:-9], "is a damaged gzip file"),
        ("a.txt", b"\xff\xfe", "is not UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(
    target: Path, tmp_path: Path, name: str, content: str | bytes, sentence: str
) -> None:
    with pytest.raises(InputError) as caught:
        read(target, tmp_path, name, content, flag="--eval-file")
    assert str(caught.value).startswith(f"--eval-file {tmp_path / name}: ")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_target_without_template_or_tokenizer_is_named(target: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(tmp_path / "no.json", target, 97)
    bare = tmp_path / "bare"
    shutil.copytree(target, bare)
    (bare / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(InputError, match="no chat template"):
        read(bare, tmp_path, "a.txt", "hello", chat=True)
    (bare / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(InputError, match="no tokenizer can be loaded"):
        read(bare, tmp_path, "a.txt", "hello", chat=True)
    (bare / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"tokenizer\.json cannot be used"):
        read(bare, tmp_path, "a.txt", "hello")
