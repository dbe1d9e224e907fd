"""Conversations to documents: what is written of a conversation, and why not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from trainer.conversations import Malformed, Row, Unusable, conversation
from trainer.report import Report

if TYPE_CHECKING:
    import numpy as np

    from trainer.chat import Chat

CHUNK = 128  # rows that a process tokenises at a time


@dataclass(frozen=True)
class Rules:
    """What becomes of a conversation."""

    max_seq_len: int  # documents are cut here
    min_supervised: int  # with fewer supervised tokens they are dropped
    split_turns: bool = False
    skip_bad: bool = False


def take(ids: np.ndarray, mask: np.ndarray, rules: Rules, report: Report, place: str) -> Any:
    """(input_ids, loss_mask) as they are written, cut and counted; None if they are dropped, and counted."""
    if len(ids) > rules.max_seq_len:
        report.truncated += 1
        report.cut_tokens += len(ids) - rules.max_seq_len
        ids, mask = ids[: rules.max_seq_len], mask[: rules.max_seq_len]
    supervised = int(mask.sum())
    if supervised < rules.min_supervised:
        what = (
            "nothing supervised is left"
            if not supervised
            else (f"fewer than {rules.min_supervised} supervised tokens (--min-supervised)")
        )
        report.drop(what, place)
        return None
    report.written += 1
    report.tokens += len(ids)
    report.supervised += supervised
    return ids, mask


def tokenise(part: Sequence[Row], chat: Chat, rules: Rules) -> tuple[list[Any], Report]:
    """The documents of some rows, and what became of the rows. Raises Malformed."""
    report = Report()
    found = []
    for row in part:
        report.read += 1
        try:
            given = conversation(row)
            if not any(message["role"] == "assistant" for message in given.messages):
                raise Unusable("no assistant's answer")
            documents, left_out = chat.documents(given, rules.split_turns)
        except Malformed as error:
            if not rules.skip_bad:
                raise
            report.drop(f"{str(error).split(': ', 1)[1].split(';')[0]}", row.place)
            continue
        except Unusable as error:
            report.drop(str(error), row.place)
            continue
        what = "answers left unsupervised: the chat template shows them otherwise in later turns"
        report.note(what if rules.split_turns else f"{what}; --split-turns keeps them", left_out, row.place)
        if not documents:
            report.drop("nothing supervised is left", row.place)
        for ids, mask in documents:
            if (kept := take(ids, mask, rules, report, row.place)) is not None:
                found.append(kept)
    return found, report


def chunks(stream: Iterable[Row]) -> Iterator[list[Row]]:
    """`CHUNK` rows at a time."""
    stream = iter(stream)
    while part := list(islice(stream, CHUNK)):
        yield part
