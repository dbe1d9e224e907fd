"""The target writes the answers: its own text for every assistant's turn, in batches, resumable.

A conversation is written anew turn by turn: what was asked stays, each answer is the target's, after its own
answers before. The tokens of an answer are kept as they were chosen, never decoded and tokenised again, so
that a label is what the target says. Where the prompt of the next turn goes on from the tokens so far, the
turns make one document; where the template shows the earlier turns otherwise (without their reasoning, say),
each makes one of its own, as the target is served.

What a batch holds is a function of the input and the flags alone, and each finished batch is appended to
``.<data directory>.answers``: a run that was killed goes on behind the last one, to the same result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.conversations import (
    Conversation,
    Malformed,
    Message,
    Row,
    Unusable,
    conversation,
    count,
    rows,
)
from trainer.generate import generate
from trainer.journal import Journal, Progress, Say, journal_path
from trainer.modeldir import target_digest
from trainer.report import Report
from trainer.tokenise import Rules, take

if TYPE_CHECKING:
    from trainer.chat import Chat
    from trainer.target import Target

WINDOW = 16  # batches whose conversations are sorted by length together

Part = tuple[list[tuple[np.ndarray, np.ndarray]], Report]


@dataclass(frozen=True)
class Generation:
    """How answers are written."""

    temperature: float
    max_new_tokens: int
    batch_size: int
    seed: int
    dtype: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Talk:
    """A conversation while it is written anew."""

    place: str
    given: Conversation
    messages: list[Message] = field(default_factory=list)  # with the target's answers so far
    next: int = 0  # the first of the given messages that is not in `messages`
    over: bool = False
    documents: list[tuple[list[int], list[int]]] = field(default_factory=list)  # ids, mask
    ids: list[int] = field(default_factory=list)  # of the document that may go on
    mask: list[int] = field(default_factory=list)

    @property
    def turns(self) -> int:
        """How many answers it will have, if each comes to an end."""
        return max(1, sum(message["role"] == "assistant" for message in self.given.messages))

    def ask(self) -> bool:
        """Take in what is said before the next answer; whether there is one to write."""
        while self.next < len(self.given.messages):
            message = self.given.messages[self.next]
            self.next += 1
            if message["role"] == "assistant":
                return True
            self.messages.append(message)
        # A conversation that ends with a question gets its answer, once.
        return bool(self.messages) and self.messages[-1]["role"] != "assistant"

    def take(self, prompt: list[int], answer: list[int], text: str) -> None:
        """The target's answer to `prompt`."""
        if self.ids and prompt[: len(self.ids)] != self.ids:
            self.documents.append((self.ids, self.mask))
            self.ids, self.mask = [], []
        self.mask += [0] * (len(prompt) - len(self.ids)) + [1] * len(answer)
        self.ids = [*prompt, *answer]
        self.messages.append({"role": "assistant", "content": text})

    def end(self) -> None:
        self.over = True
        if self.ids:
            self.documents.append((self.ids, self.mask))
            self.ids, self.mask = [], []


def regenerated(
    target: Target, chat: Chat, files: Sequence[Path], how: Generation, rules: Rules, data_dir: Path, say: Say
) -> Generator[Part]:
    """Documents and counts of one window of conversations after another.

    Raises InputError for a line that is no JSON (unless `rules.skip_bad`), and if what an earlier run left
    was made with other settings or for another input.
    """
    total = count(files)
    size = how.batch_size * WINDOW
    with Journal(journal_path(data_dir), _settings(target, chat, files, how, rules)) as journal:
        if journal.kept:
            say(f"going on with what an earlier run left: {journal.kept:,} batches of answers")
        progress = Progress(total, say)
        stream = rows(files)
        while window := list(islice(stream, size)):
            report = Report(read=len(window))
            talks = _talks(window, rules.skip_bad, report)
            before = progress.conversations
            _write(target, chat, talks, how, rules.max_seq_len, journal, report, progress)
            progress.conversations = before + len(window)
            yield _documents(talks, rules, report), report
        progress.tell(last=True)


def _settings(
    target: Target, chat: Chat, files: Sequence[Path], how: Generation, rules: Rules
) -> dict[str, Any]:
    """All that decides what the batches are and what is answered."""
    return {
        "target": target_digest(chat.directory),
        **chat.facts,
        "input": [[path.name, path.stat().st_size] for path in files],
        **how.to_json(),
        "max_seq_len": rules.max_seq_len,
        "skip_bad": rules.skip_bad,
        "device": target.device.type,
    }


def _talks(window: Sequence[Row], skip_bad: bool, report: Report) -> list[Talk]:
    found = []
    for row in window:
        try:
            found.append(Talk(row.place, conversation(row)))
        except Malformed as error:
            if not skip_bad:
                raise
            report.drop(f"{str(error).split(': ', 1)[1].split(';')[0]}", row.place)
        except Unusable as error:
            report.drop(str(error), row.place)
    return found


@dataclass
class Asked:
    """An answer that is due."""

    talk: Talk
    prompt: list[int]
    limit: int  # tokens of the answer, at most


def _write(
    target: Target,
    chat: Chat,
    talks: Sequence[Talk],
    how: Generation,
    max_seq_len: int,
    journal: Journal,
    report: Report,
    progress: Progress,
) -> None:
    """All answers of a window, the first of every conversation, then the second of every conversation, …"""
    each = len(talks) / max(1, sum(talk.turns for talk in talks))  # of a conversation is an answer
    while True:
        due = [asked for talk in talks if (asked := _ask(talk, chat, how, max_seq_len, report))]
        if not due:
            return
        due.sort(key=lambda asked: len(asked.prompt))  # stable, so that it depends on the input alone
        for first in range(0, len(due), how.batch_size):
            batch = due[first : first + how.batch_size]
            asking = [(asked.prompt, asked.limit) for asked in batch]
            answers = journal.replay(asking)
            if answers is None:
                seed = [how.seed, journal.number]
                answers = generate(
                    target,
                    [prompt for prompt, _ in asking],
                    [limit for _, limit in asking],
                    chat.ends.tolist(),
                    temperature=how.temperature,
                    seed=int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:6], "big"),
                    tick=progress.tell,
                )
                journal.append(asking, answers)
                progress.tokens += sum(map(len, answers))
            progress.conversations += len(batch) * each
            for asked, answer in zip(batch, answers, strict=True):
                _take(asked, answer, chat, report)


def _ask(talk: Talk, chat: Chat, how: Generation, max_seq_len: int, report: Report) -> Asked | None:
    """The next answer of `talk`, unless it is over."""
    if talk.over:
        return None
    if not talk.ask():
        talk.end()
        if not talk.documents:
            report.drop("nothing to answer", talk.place)
        return None
    try:
        text = chat.render(talk.messages, True, talk.given.tools)
    except Unusable as error:
        talk.end()
        report.drop(str(error), talk.place)
        return None
    prompt = chat.encode(text)[0].tolist()
    room = max_seq_len - len(prompt)
    if room < 1 or not prompt:
        talk.end()
        if talk.documents:
            report.note(
                "conversations ended early: no room for another answer in --max-seq-len", 1, talk.place
            )
        else:
            report.drop("no room for an answer in --max-seq-len", talk.place)
        return None
    return Asked(talk, prompt, min(room, how.max_new_tokens))


def _take(asked: Asked, answer: list[int], chat: Chat, report: Report) -> None:
    ended = bool(answer) and answer[-1] in set(chat.ends.tolist())
    text = chat.decode(answer[:-1] if ended else answer, special=False)
    asked.talk.take(asked.prompt, answer, text)
    if not ended:  # nobody goes on talking after half an answer
        report.note("answers cut at --max-new-tokens or --max-seq-len", 1, asked.talk.place)
        asked.talk.end()


def _documents(talks: Sequence[Talk], rules: Rules, report: Report) -> list[tuple[np.ndarray, np.ndarray]]:
    found = []
    for talk in talks:
        split = len(talk.documents) - 1
        report.note("answers made documents of their own: the template shows earlier turns otherwise",
                    max(split, 0), talk.place)  # fmt: skip
        for ids, mask in talk.documents:
            row = np.array(ids, dtype=np.int32), np.array(mask, dtype=np.uint8)
            if (kept := take(*row, rules, report, talk.place)) is not None:
                found.append(kept)
    return found
