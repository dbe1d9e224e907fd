"""python -m trainer.prepare: turn conversations into tokenised completions.

The input is JSON lines, each a conversation: ``{"messages": [{"role": "user", "content": "…"}, …]}``. It is
rendered with the model's own chat template, and a token is supervised if an assistant's turn added it. Where
a turn begins and ends is found by rendering the conversation up to there and comparing prefixes, which needs
no knowledge of the template: what the template writes before the answer is a prompt, what follows the
end-of-turn token is not an answer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from trainer.errors import InputError
from trainer.modeldir import read_config, tokenizer_digest

Message = dict[str, str]
Render = Callable[[list[Message], bool], str]  # messages, whether an answer is about to begin
Span = tuple[int, int]


@dataclass
class Report:
    """What became of the conversations."""

    written: int = 0
    tokens: int = 0
    supervised: int = 0
    truncated: int = 0
    unsupervised_turns: int = 0  # the template rewrote them later in the conversation
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    example: dict[str, int] = field(default_factory=dict)  # line of the first one dropped for each reason

    def drop(self, reason: str, line: int) -> None:
        self.dropped[reason] += 1
        self.example.setdefault(reason, line)

    def lines(self) -> list[str]:
        share = f"{self.supervised / self.tokens:.0%}" if self.tokens else "–"
        found = [
            f"{self.written:,} conversations, {self.tokens:,} tokens, {share} supervised, "
            f"{self.truncated:,} cut at the longest allowed"
        ]
        for reason, count in self.dropped.most_common():
            found.append(f"{count:,} dropped: {reason} (first in line {self.example[reason]})")
        if count := self.unsupervised_turns:
            found.append(
                f"{count:,} answers left unsupervised: the chat template changes them in later turns"
            )
        return found


def messages_of(line: str) -> list[Message]:
    """The messages of one line. Raises ValueError, saying why, if it is no conversation."""
    try:
        value = json.loads(line)
    except ValueError:
        raise ValueError("not valid JSON") from None
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError("no 'messages'")
    for message in messages:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise ValueError("a message without text in 'role' and 'content'")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("no assistant's answer")
    return messages


def answers(messages: list[Message], render: Render) -> tuple[str, list[Span], int]:
    """The rendered conversation, where its answers stand in it, and how many answers had to be left out.

    An answer is left out if the text rendered up to it is no prefix of the whole: some templates remove, say,
    the reasoning of earlier turns, and then what stands there is not what the target had produced.
    """
    text = render(messages, False)
    spans = []
    left_out = 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = render(messages[:i], True), render(messages[: i + 1], False)
        if text.startswith(before) and text.startswith(after) and len(before) < len(after):
            spans.append((len(before), len(after)))
        else:
            left_out += 1
    return text, spans, left_out


def loss_mask(
    ids: Sequence[int], offsets: Sequence[Span], spans: Sequence[Span], ends: set[int]
) -> list[int]:
    """1 for every token that lies within a span, up to the span's last end-of-turn token if it has one."""
    mask = [0] * len(ids)
    for start, stop in spans:
        inside = [i for i, (a, b) in enumerate(offsets) if start <= a and b <= stop and a < b]
        closing = [i for i in inside if ids[i] in ends]
        if closing:
            inside = [i for i in inside if i <= closing[-1]]
        for i in inside:
            mask[i] = 1
    return mask


def tokenise(
    lines: Iterator[str],
    render: Render,
    encode: Callable[[str], Any],
    ends: set[int],
    longest: int,
    report: Report,
) -> Iterator[tuple[list[int], list[int]]]:
    """(input_ids, loss_mask) of every conversation that has something to learn from; the rest is counted."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text, spans, left_out = answers(messages_of(line), render)
        except ValueError as error:
            report.drop(str(error), number)
            continue
        report.unsupervised_turns += left_out
        encoded = encode(text)
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        mask = loss_mask(ids, offsets, spans, ends)
        if len(ids) > longest:
            report.truncated += 1
            ids, mask = ids[:longest], mask[:longest]
        if not any(mask):
            report.drop("nothing supervised is left", number)
            continue
        report.written += 1
        report.tokens += len(ids)
        report.supervised += sum(mask)
        yield ids, mask


def load_tokenizer(directory: str) -> Any:
    """Raises InputError if the model has no fast tokenizer with a chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError(
            f"--target-model {directory}: no tokenizer can be loaded ({' '.join(str(error).split())[:200]})"
        ) from None
    if not tokenizer.chat_template:
        raise InputError(f"--target-model {directory}: its tokenizer has no chat template")
    if not tokenizer.is_fast:
        raise InputError(
            f"--target-model {directory}: its tokenizer cannot tell where a token comes from (not fast)"
        )
    return tokenizer


def show(ids: Sequence[int], mask: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
    """A document as text, its supervised parts between ⟦ and ⟧."""
    parts: list[str] = []
    start = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or mask[i] != mask[start]:
            text = decode(ids[start:i])
            parts.append(f"⟦{text}⟧" if mask[start] else text)
            start = i
    return "".join(parts)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def prepare(argv: Sequence[str] | None) -> None:
    parser = _Parser(
        prog="python -m trainer.prepare", description=(__doc__ or "").split("\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "--target-model", required=True, metavar="DIR", help="whose tokenizer and template to use"
    )
    parser.add_argument("--input", required=True, metavar="FILE", help="conversations, one JSON a line")
    parser.add_argument("--data-dir", required=True, metavar="DIR", help="where to write; must not exist")
    parser.add_argument(
        "--max-seq-len", type=int, default=3072, metavar="N", help="longer ones are cut (default: 3072)"
    )
    given = parser.parse_args(argv)
    if given.max_seq_len < 16:
        raise InputError(f"--max-seq-len {given.max_seq_len} must be a whole number of at least 16")
    if Path(given.data_dir).exists():
        raise InputError(
            f"--data-dir {given.data_dir} exists already: choose another directory, or remove it first"
        )
    read_config(given.target_model)
    tokenizer = load_tokenizer(given.target_model)
    ends = {
        i for i in (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")) if i is not None
    }
    report = Report()
    sample: list[str] = []

    def render(messages: list[Message], begin_answer: bool) -> str:
        try:
            return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=begin_answer)
        except Exception as error:  # a template is a program of its own and raises what it likes
            raise ValueError(f"the chat template refuses it ({' '.join(str(error).split())[:100]})") from None

    def encode(text: str) -> Any:
        return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)

    def documents(lines: Iterator[str]) -> Iterator[tuple[list[int], list[int]]]:
        for ids, mask in tokenise(lines, render, encode, ends, given.max_seq_len, report):
            if not sample:
                sample.append(show(ids, mask, tokenizer.decode))
            yield ids, mask

    from trainer.data import write_completions

    meta = {
        "tokenizer": tokenizer_digest(given.target_model),
        "target": Path(given.target_model).name,
        "source": Path(given.input).name,
    }
    try:
        with open(given.input, encoding="utf-8") as file:
            write_completions(given.data_dir, documents(iter(file)), meta)
    except OSError as error:
        where = "--input" if error.filename == given.input else "--data-dir"
        raise InputError(f"{where} {error.filename or given.data_dir}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"--input {given.input}: is not UTF-8 text") from None
    finally:
        for line in report.lines():
            print(line)
    print("One of them, with what is learnt from between ⟦ and ⟧:")
    print(sample[0])


def main(argv: Sequence[str] | None = None) -> int:
    try:
        prepare(argv)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
