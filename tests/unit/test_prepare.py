"""Conversations become completions: what the assistant wrote is supervised, nothing else."""

from __future__ import annotations

import gzip
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import chats
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer import completions, ordered, tokenise
from trainer.chat import Chat, answers, loss_mask, show
from trainer.completions import Completions, Writer
from trainer.conversations import Row, Unusable, conversation
from trainer.errors import InputError
from trainer.prepare import main

TALK = [
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "It is four."},
    {"role": "user", "content": "Thanks!"},
    {"role": "assistant", "content": "You are welcome."},
]
LINE = json.dumps({"messages": TALK})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chats.chat_model(tmp_path_factory.mktemp("m") / "target")


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chats.chat_model(tmp_path_factory.mktemp("m") / "thinking", chats.THINKING)


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chats.chat_model(tmp_path_factory.mktemp("m") / "strict", chats.STRICT)


def flags(target: Path, tmp_path: Path, *more: str) -> list[str]:
    given = ["--target-model", str(target), "--input", str(tmp_path / "in.jsonl")]
    return [*given, "--data-dir", str(tmp_path / "d"), "--min-supervised", "1", "--workers", "1", *more]


def run(target: Path, tmp_path: Path, lines: list[str], *more: str) -> int:
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    return main(flags(target, tmp_path, *more))


def shown(target: Path, data: Completions) -> list[str]:
    """Each document as text, its supervised parts in brackets."""
    chat = Chat(str(target))
    return [show(*data.document(i), chat.decode) for i in range(len(data))]


# -- the whole way -----------------------------------------------------------------------------------------


def test_what_the_assistant_wrote_is_supervised_to_the_end_of_its_turn(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(target, tmp_path, [LINE]) == 0
    out = capsys.readouterr().out
    assert "1 conversations read, 1 documents written" in out
    assert (
        "<|im_start|>user\nWhat is two and two?<|im_end|>\n<|im_start|>assistant\n⟦It is four.<|im_end|>⟧\n"
        "<|im_start|>user\nThanks!<|im_end|>\n<|im_start|>assistant\n⟦You are welcome.<|im_end|>⟧\n"
    ) in out
    found = Completions.open(tmp_path / "d")
    assert len(found) == 1
    assert found.meta["target"] == "target"
    assert found.meta["source"] == ["in.jsonl"]
    assert len(found.meta["template"]) == 16
    assert found.meta["thinking"] is None
    assert found.meta["report"]["read"] == 1


def test_what_cannot_be_used_is_counted_by_reason_with_its_place(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        LINE,
        "{broken",
        "",
        json.dumps({"messages": []}),
        json.dumps({"text": "x"}),
        json.dumps({"messages": TALK[:1]}),
        json.dumps({"messages": [{"role": "assistant", "content": None}]}),
        json.dumps({"messages": [{"role": "user", "content": "long " * 100}, TALK[1]]}),
        json.dumps({"messages": [TALK[0], {"role": "assistant", "content": "4"}]}),
        '["a list"]',
    ]
    assert run(target, tmp_path, lines, "--max-seq-len", "90", "--skip-bad", "--min-supervised", "5") == 0
    out = capsys.readouterr().out
    place = tmp_path / "in.jsonl"
    for text in (
        f"1 dropped: the line is not valid JSON ({place}:2)",
        f"1 dropped: 'messages' is empty ({place}:4)",
        f"1 dropped: neither 'messages' nor 'conversations' nor a prompt with its response ({place}:5)",
        f"1 dropped: no assistant's answer ({place}:6)",
        f"1 dropped: a message without text in 'role' and 'content' ({place}:7)",
        f"1 dropped: nothing supervised is left ({place}:8)",
        f"1 dropped: fewer than 5 supervised tokens (--min-supervised) ({place}:9)",
        f"1 dropped: the line is no JSON object ({place}:10)",
        "2 cut at --max-seq-len",
    ):
        assert text in out
    assert Completions.open(tmp_path / "d").lengths.tolist() == [90]


def test_what_the_text_would_do_to_a_terminal_is_shown_instead(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = json.dumps({"prompt": "q", "response": "clear \x1b[2J\tthe\nscreen"})
    assert run(target, tmp_path, [line]) == 0
    assert "⟦clear \\x1b[2J\tthe\nscreen<|im_end|>⟧" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"messages": [', "in.jsonl:2: the line is not valid JSON; --skip-bad passes it over"),
        (b'"text"', "in.jsonl:2: the line is no JSON object"),
        (b'{"a": "\xff"}', "in.jsonl:2: the line is not UTF-8 text"),
    ],
)
def test_a_malformed_line_ends_it_by_file_and_line_and_leaves_nothing(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes, says: str
) -> None:
    (tmp_path / "in.jsonl").write_bytes(LINE.encode() + b"\n" + line)
    assert main(flags(target, tmp_path)) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_nothing_usable_is_an_error_and_writes_nothing(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(target, tmp_path, ["{}"]) == 2
    assert "not one document" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def bare(path: Path, how: str) -> Path:
    if how == "no template":
        return chats.chat_model(path / "m", None)
    (path / "array.jsonl").write_text('[{"messages": []}]')
    (path / "p.parquet").write_bytes(b"PAR1 not")
    pq.write_table(pa.table({"a": [1]}), path / "columns.parquet")
    (path / "empty").mkdir()
    return path


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            ["--temperature", "0.0"],
            "--temperature means nothing without --regenerate: add that",
        ),
        (["--batch-size", "32"], "--batch-size means nothing without --regenerate"),
        (["--data-dir", ""], "--data-dir is empty: name the directory to write"),
        (["--max-seq-len", "3"], "--max-seq-len: '3' must be a whole number from 16"),
        (["--what"], "unrecognized arguments: --what"),
        (["--input", "/nowhere.jsonl"], "--input /nowhere.jsonl: No such file or directory"),
        (["--input", "{}/empty"], "there is no .jsonl and no .parquet file in it"),
        (["--input", "{}/array.jsonl"], "it is one JSON array"),
        (["--input", "{}/p.parquet"], "it is no parquet file, or damaged"),
        (["--input", "{}/columns.parquet"], "of its columns (a) none is messages"),
        (["--target-model", "/nowhere"], "--target-model /nowhere"),
        (["--thinking", "on"], "--thinking on: the chat template of"),
        (["--min-supervised", "5000"], "--min-supervised 5000 is more than --max-seq-len 3072"),
        (["--data-dir", "{}"], "exists already"),
    ],
)
def test_wrong_flags_are_one_sentence(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], says: str
) -> None:
    bare(tmp_path, "files")
    assert run(target, tmp_path, ["{}"], *(word.format(tmp_path) for word in more)) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert not (tmp_path / "d").exists()


def test_a_tokenizer_without_a_template_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(bare(tmp_path, "no template"), tmp_path, [LINE]) == 2
    assert "its tokenizer has no chat template" in capsys.readouterr().err


def test_files_of_all_kinds_and_directories_are_read_in_order(target: Path, tmp_path: Path) -> None:
    def talk(word: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": "?"}, {"role": "assistant", "content": word}]

    place = tmp_path / "many"
    place.mkdir()
    with gzip.open(place / "a.jsonl.gz", "wt") as file:
        file.write(json.dumps({"messages": talk("one")}) + "\n")
    more = {"messages": [talk("two"), talk("three")], "score": [float("nan")] * 2}
    pq.write_table(pa.table(more), place / "b.parquet")
    (place / "notes.txt").write_text("not an input")
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "?", "response": "four"}))
    inputs = ["--input", str(place), str(tmp_path / "in.jsonl")]
    assert main(flags(target, tmp_path, *inputs)) == 0
    texts = shown(target, Completions.open(tmp_path / "d"))
    assert [text.split("⟦")[1].split("<")[0] for text in texts] == ["one", "two", "three", "four"]


def test_several_processes_write_what_one_writes(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tokenise, "CHUNK", 3)
    lines = [json.dumps({"prompt": f"say {i}", "response": f"number {i}"}) for i in range(40)]
    lines[20] = "{}"
    digests = []
    for workers in ("1", "3"):
        place = ["--data-dir", str(tmp_path / workers), "--workers", workers]
        assert run(target, tmp_path, lines, *place) == 0
        digests.append(Completions.open(tmp_path / workers).digest)
    assert digests[0] == digests[1]
    lines[25] = "{broken"
    assert run(target, tmp_path, lines, "--workers", "3") == 2
    assert "in.jsonl:26: the line is not valid JSON" in capsys.readouterr().err
    assert not list(tmp_path.glob(".*"))


def test_a_process_that_is_killed_is_told_and_its_work_is_not_lost_silently() -> None:
    def work(item: int) -> int:
        if item == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    with pytest.raises(InputError, match="one of the 2 processes was killed"):
        list(ordered.ordered(work, range(10), 2))


# -- a writer that is killed -------------------------------------------------------------------------------


def test_what_a_killed_writer_left_is_no_data_and_does_not_stop_the_next(tmp_path: Path) -> None:
    meta = {"tokenizer": "x", "target": "y"}
    reading, writing = os.pipe()
    if not (child := os.fork()):
        completions.SHARD_BYTES = 1
        with Writer(tmp_path / "d", meta) as writer:
            for _ in range(2):  # two files
                writer.add([1, 2, 3], [0, 1, 1])
                writer._flush()
            os.write(writing, b"x")
            time.sleep(60)
        os._exit(0)
    os.read(reading, 1)
    try:
        with pytest.raises(InputError, match="another process is writing it"):
            Writer(tmp_path / "d", meta)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert [path.name for path in tmp_path.iterdir()] == [".d.partial"]
    completions.write_completions(tmp_path / "d", [([4, 5], [0, 1])], meta)
    assert Completions.open(tmp_path / "d").document(0)[0].tolist() == [4, 5]
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["00000.arrow", "data.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_directory_that_appeared_meanwhile_is_left_as_it_is(tmp_path: Path) -> None:
    with Writer(tmp_path / "d", {"tokenizer": "x", "target": "y"}) as writer:
        writer.add([1, 2], [0, 1])
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "mine").write_text("x")
        with pytest.raises(InputError, match="made it meanwhile"):
            writer.finish()
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["mine"]
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


# -- templates ---------------------------------------------------------------------------------------------

REASONED = [
    {"role": "user", "content": "a?"},
    {"role": "assistant", "content": "<think>why</think>b"},
    {"role": "user", "content": "c?"},
    {"role": "assistant", "content": "<think>how</think>d"},
]


def test_answers_that_a_thinking_template_shows_otherwise_later_are_left_out_and_told(
    thinking: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(thinking, tmp_path, [json.dumps({"messages": REASONED})]) == 0
    out = capsys.readouterr().out
    assert (
        "1 answers left unsupervised: the chat template shows them otherwise in later turns; "
        f"--split-turns keeps them ({tmp_path / 'in.jsonl'}:1)"
    ) in out
    texts = shown(thinking, Completions.open(tmp_path / "d"))
    assert len(texts) == 1
    assert "assistant\nb<|im_end|>" in texts[0]
    assert texts[0].endswith("assistant\n⟦<think>\nhow\n</think>\n\nd<|im_end|>⟧\n")


def test_with_split_turns_each_of_them_gets_a_document(
    thinking: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(thinking, tmp_path, [json.dumps({"messages": REASONED})], "--split-turns") == 0
    assert "left unsupervised" not in capsys.readouterr().out
    texts = shown(thinking, Completions.open(tmp_path / "d"))
    assert len(texts) == 2
    assert texts[1].endswith("a?<|im_end|>\n<|im_start|>assistant\n⟦<think>\nwhy\n</think>\n\nb<|im_end|>⟧\n")


def test_the_think_flag_reaches_the_template_and_is_kept(thinking: Path, tmp_path: Path) -> None:
    line = json.dumps({"messages": TALK[:2]})
    assert run(thinking, tmp_path, [line], "--thinking", "off") == 0
    data = Completions.open(tmp_path / "d")
    assert data.meta["thinking"] is False
    assert shown(thinking, data)[0].endswith("<think>\n\n</think>\n\n⟦It is four.<|im_end|>⟧\n")


def test_system_prompts_and_tools_are_a_part_of_the_prompt(target: Path, strict: Path) -> None:
    chat = Chat(str(target))
    talk = [{"role": "system", "content": "Be short."}, *TALK[:2], {"role": "tool", "content": "42"}, TALK[3]]
    ((ids, mask),), left_out = chat.documents(conversation(row({"messages": talk})))
    supervised = chat.decode(ids[mask == 1])
    assert (supervised, left_out) == ("It is four.<|im_end|>You are welcome.<|im_end|>", 0)
    tools = json.dumps([{"name": "add"}])
    ((ids, _),), _ = Chat(str(strict)).documents(conversation(row({"messages": TALK[:2], "tools": tools})))
    assert 'tools: [{"name": "add"}]' in chat.decode(ids)


def test_a_template_that_refuses_a_role_is_told(
    strict: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    system = json.dumps({"messages": [{"role": "system", "content": "x"}, *TALK]})
    assert run(strict, tmp_path, [system, LINE]) == 0
    assert "1 dropped: the chat template refuses it (System role not supported)" in capsys.readouterr().out


def test_a_turn_whose_beginning_the_template_refuses_is_left_out() -> None:
    def render(messages: list[dict[str, Any]], begin: bool) -> str:
        if len(messages) < 2 and not begin:
            raise Unusable("too short")
        return "".join(f"[{m['content']}]" for m in messages) + ("[" if begin else "")

    talk = [{"role": "assistant", "content": "hello"}, *TALK[:2]]
    ((text, spans),), left_out = answers(talk, render)
    assert left_out == 1
    assert [text[a:b] for a, b in spans] == ["It is four.]"]


def test_tokens_across_the_border_of_an_answer_are_not_supervised() -> None:
    ids = np.array([1, 2, 3, 9, 4])
    offsets = np.array([(0, 2), (2, 5), (5, 6), (6, 7), (7, 8)])
    assert loss_mask(ids, offsets, [(3, 8)], []).tolist() == [0, 0, 1, 1, 1]
    assert loss_mask(ids, offsets, [(3, 8)], [9]).tolist() == [0, 0, 1, 1, 0]
    assert loss_mask(ids, offsets, [], [9]).tolist() == [0] * 5


# -- shapes of rows ----------------------------------------------------------------------------------------


def row(value: Any) -> Row:
    return Row("x", 1, value if isinstance(value, dict) else value.encode())


ASKED = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("value", "messages"),
    [
        ({"messages": ASKED}, ASKED),
        ({"messages": [{**ASKED[0], "name": None}, ASKED[1]]}, ASKED),  # parquet fills in what is missing
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, ASKED),
        ({"conversations": ASKED}, ASKED),
        ({"prompt": "q", "response": "a"}, ASKED),
        ({"prompt": "q", "completion": "a"}, ASKED),
        ({"prompt": ASKED[:1], "completion": ASKED[1:]}, ASKED),
        ({"question": "q", "answer": "a"}, ASKED),
        ({"instruction": "q", "input": "", "output": "a"}, ASKED),
        (
            {"instruction": "q", "input": "x", "output": "a"},
            [{"role": "user", "content": "q\n\nx"}, ASKED[1]],
        ),
        ({"system": "s", "prompt": "q", "response": "a"}, [{"role": "system", "content": "s"}, *ASKED]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, ASKED[1]]}, ASKED),
        ({"prompt": "q"}, ASKED[:1]),
    ],
)
def test_the_shapes_that_are_in_use_are_read(value: dict[str, Any], messages: list[Any]) -> None:
    assert conversation(row(value)).messages == messages
    assert conversation(row(json.dumps(value))).messages == messages


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"messages": "x"}, "'messages' is no list of messages"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": [{"role": "user", "content": float("nan")}]}, "without text in 'role' and 'content'"),
        ({"messages": ["x"]}, "without text in 'role' and 'content'"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "from 'alien', which is no known role"),
        ({"conversations": [{"from": "gpt", "value": None}]}, "without text in 'from' and 'value'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "something else than text"),
        ({"prompt": 5, "response": "x"}, "no text"),
        ({"messages": ASKED, "tools": "{"}, "'tools' is not valid JSON"),
    ],
)
def test_what_is_no_conversation_says_why(value: dict[str, Any], says: str) -> None:
    with pytest.raises(Unusable, match=says):
        conversation(row(value))
