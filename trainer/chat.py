"""A model's own tokenizer and chat template: conversations become text and tokens, as they do when it serves.

Where an answer begins and ends is found by rendering the conversation up to there and comparing prefixes,
which needs no knowledge of the template: what the template writes before the answer is a prompt, what follows
the end-of-turn token is not an answer. A substitute template would do neither.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.conversations import Conversation, Message, Unusable
from trainer.errors import InputError
from trainer.modeldir import stop_tokens

Span = tuple[int, int]
Text = tuple[str, list[Span]]  # a rendered conversation, and where what is learnt stands in it
Render = Callable[[list[Message], bool], str]  # messages, whether an answer is about to begin

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")  # besides what the config names


class Chat:
    """The tokenizer of a model directory. Raises InputError if it is not fast or has no chat template.

    `thinking` is handed to the template as `enable_thinking`; None leaves it to the template.
    """

    def __init__(self, directory: str, thinking: bool | None = None) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork
        from transformers import AutoTokenizer  # late: it takes seconds

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except Exception as error:  # besides OSError and ValueError, what a damaged file makes of it
            raise InputError(
                f"--target-model {directory}: no tokenizer can be loaded ({_short(error, 200)})"
            ) from None
        if not self.tokenizer.chat_template:
            raise InputError(
                f"--target-model {directory}: its tokenizer has no chat template, so nobody knows how it is "
                "talked to; take the directory of the instruction-tuned model"
            )
        if not self.tokenizer.is_fast:
            raise InputError(
                f"--target-model {directory}: its tokenizer cannot tell where a token comes from (not fast)"
            )
        self.directory = directory
        self.name = Path(directory).name
        self.thinking = thinking
        self.template = json.dumps(self.tokenizer.chat_template, sort_keys=True)
        if thinking is not None and "enable_thinking" not in self.template:
            raise InputError(
                f"--thinking {'on' if thinking else 'off'}: the chat template of {directory} has no such "
                "switch (enable_thinking); leave the flag out"
            )
        named = [self.tokenizer.convert_tokens_to_ids(token) for token in END_OF_TURN]
        self.stops = frozenset(stop_tokens(directory)) | {self.tokenizer.eos_token_id} - {None}
        self.ends = np.array(sorted(self.stops | set(named) - {None, self.tokenizer.unk_token_id}), np.int64)

    @property
    def facts(self) -> dict[str, Any]:
        """What data.json keeps of it, so that it can be seen whether a server talks to the target alike."""
        return {
            "template": hashlib.sha256(self.template.encode()).hexdigest()[:16],
            "thinking": self.thinking,
        }

    def render(self, messages: list[Message], begin_answer: bool, tools: list[Any] | None = None) -> str:
        """Raises Unusable if the template refuses it."""
        more = {} if self.thinking is None else {"enable_thinking": self.thinking}
        if tools:
            more["tools"] = tools  # type: ignore[assignment]
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=begin_answer, **more
            )
        except Exception as error:  # a template is a program of its own and raises what it likes
            raise Unusable(f"the chat template refuses it ({_short(error, 100)})") from None

    def encode(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Token ids [n] int32, and where in the text each comes from, [n, 2]."""
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = np.array(found["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return np.array(found["input_ids"], dtype=np.int32), offsets

    def decode(self, ids: Sequence[int] | np.ndarray, *, special: bool = True) -> str:
        return self.tokenizer.decode(
            [int(i) for i in ids], skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )

    def documents(
        self, given: Conversation, split_turns: bool = False
    ) -> tuple[list[tuple[np.ndarray, np.ndarray]], int]:
        """(input_ids, loss_mask) of a conversation, and how many answers had to be left out: see `answers`.
        Raises Unusable if the template refuses it.
        """
        texts, left_out = answers(
            given.messages, lambda m, begin: self.render(m, begin, given.tools), split_turns
        )
        found = []
        for text, spans in texts:
            ids, offsets = self.encode(text)
            found.append((ids, loss_mask(ids, offsets, spans, self.ends)))
        return found, left_out


def _short(error: Exception, length: int) -> str:
    return " ".join(str(error).split())[:length] or type(error).__name__


def answers(messages: list[Message], render: Render, split_turns: bool = False) -> tuple[list[Text], int]:
    """The rendered conversation with the places of its answers, and how many answers had to be left out.

    An answer is left out if the text rendered up to it is no prefix of the whole: some templates remove, say,
    the reasoning of earlier turns, and then what stands there is not what the target had produced. With
    `split_turns` such an answer gets a text of its own, which ends with it.
    """
    whole = render(messages, False)
    borders: dict[int, tuple[str, str]] = {}
    left_out = 0
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            try:
                borders[i] = render(messages[:i], True), render(messages[: i + 1], False)
            except Unusable:  # the whole can be rendered, and not this much of it
                left_out += 1
    texts = [(whole, _spans(whole, borders))]
    while split_turns and borders:
        last = max(borders)
        text = borders[last][1]
        spans = _spans(text, borders)
        if last in borders:  # not even a prefix of its own text
            del borders[last]
            left_out += 1
        if spans:
            texts.append((text, spans))
    return [(text, spans) for text, spans in texts if spans], left_out + len(borders)


def _spans(text: str, borders: dict[int, tuple[str, str]]) -> list[Span]:
    """Where in `text` answers stand unchanged; these are taken out of `borders`."""
    found = []
    for i, (before, after) in sorted(borders.items()):
        if len(before) < len(after) and text.startswith(before) and text.startswith(after):
            found.append((len(before), len(after)))
            del borders[i]
    return found


def loss_mask(
    ids: np.ndarray, offsets: np.ndarray, spans: Sequence[Span], ends: Sequence[int] | np.ndarray
) -> np.ndarray:
    """[n] uint8: 1 for every token that lies within a span, up to the span's last end-of-turn token if it has
    one. ids [n]; offsets [n, 2], where each token comes from.
    """
    mask = np.zeros(len(ids), dtype=np.uint8)
    starts, stops = offsets[:, 0], offsets[:, 1]
    ending = np.isin(ids, ends)
    for start, stop in spans:
        inside = (start <= starts) & (stops <= stop) & (starts < stops)
        closing = np.flatnonzero(inside & ending)
        if len(closing):
            inside[closing[-1] + 1 :] = False
        mask[inside] = 1
    return mask


def show(ids: np.ndarray, mask: np.ndarray, decode: Callable[[np.ndarray], str]) -> str:
    """A document as text, its supervised parts between ⟦ and ⟧."""
    borders = np.flatnonzero(np.diff(mask)) + 1
    parts = []
    for part, marks in zip(np.split(ids, borders), np.split(mask, borders), strict=True):
        parts.append(f"⟦{decode(part)}⟧" if marks[0] else decode(part))
    return "".join(parts)
