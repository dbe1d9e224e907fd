"""Prompts from a file: JSON, JSON lines or plain text, gzipped or not. Needs no torch."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.errors import InputError

KEYS = (
    "prompt",
    "messages",
    "input_ids",
    "text",
    "question",
    "instruction",
)  # of an object, in this order

Groups = dict[str, list[list[int]]]


def read_prompts(
    path: Path,
    target: Path,
    vocabulary: int,
    *,
    chat: bool = False,
    most: int | None = None,
    flag: str = "--prompts",
) -> Groups:
    """Named lists of prompts as token ids, by the target's tokenizer.

    The file holds a JSON list; or ``{"name": [prompt, …], …}``; or JSON lines, a prompt each; or text, a
    prompt a line. A prompt is text, token ids, or an object with one of `KEYS` (HumanEval's `prompt`;
    `messages` are rendered with the chat template up to the last one that is not an answer). With `chat`,
    text is a user's message, too. `most`: so many of each list, its first. Raises InputError naming file and
    prompt.
    """
    where = f"{flag} {path}"
    groups = _groups(_text(path, where), path, where)
    tokens = _Tokens(target, chat)
    found: Groups = {}
    for name, group in groups.items():
        found[name] = []
        for number, prompt in enumerate(group[:most]):
            try:
                ids = tokens.of(prompt)
            except ValueError as error:
                raise InputError(f"{where}: prompt {number} of '{name}' {error}") from None
            valid = isinstance(ids, list) and all(type(i) is int and 0 <= i < vocabulary for i in ids)
            if not valid or not ids:
                raise InputError(
                    f"{where}: prompt {number} of '{name}' must be text that is not empty, or "
                    f"token ids from 0 to {vocabulary - 1}"
                )
            found[name].append(ids)
    if not any(found.values()):
        raise InputError(f"{where}: holds no prompt")
    return found


def _text(path: Path, where: str) -> str:
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        return content.decode("utf-8")
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InputError(f"{where}: is a damaged gzip file; copy it again") from None
    except UnicodeDecodeError:
        raise InputError(f"{where}: is not UTF-8 text") from None
    except OSError as error:
        raise InputError(f"{where}: cannot be read ({error.strerror})") from None


def _groups(text: str, path: Path, where: str) -> dict[str, list[Any]]:
    names = path.name.removesuffix(".gz").rsplit(".", 1)
    suffix = names[1].lower() if len(names) > 1 else ""
    if not text.strip():
        return {}
    if suffix == "txt" or (text.lstrip()[0] not in '{["' and suffix not in ("json", "jsonl")):
        return {names[0]: [line for line in text.splitlines() if line.strip()]}
    try:
        value = json.loads(text)
    except ValueError as error:
        if suffix == "json":
            raise InputError(f"{where}: is not valid JSON ({error})") from None
        return {names[0]: _lines(text, where)}
    if isinstance(value, dict) and any(key in value for key in KEYS):
        value = [value]  # JSON lines of one line
    elif suffix != "json" and (isinstance(value, str) or _is_ids(value)):
        value = [value]  # the same
    if isinstance(value, dict) and not any(isinstance(group, list) for group in value.values()):
        raise InputError(
            f"{where}: must hold prompts, and its object has none of the keys {', '.join(KEYS)}, nor is it "
            '{"name": [prompt, …], …}'
        )
    groups = {names[0]: value} if isinstance(value, list) else value
    if not isinstance(groups, dict) or not all(isinstance(group, list) for group in groups.values()):
        raise InputError(f'{where}: must hold a list of prompts, or {{"name": [prompt, …], …}}')
    return groups


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _lines(text: str, where: str) -> list[Any]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                found.append(json.loads(line))
            except ValueError as error:
                raise InputError(f"{where}: line {number} is not valid JSON ({error})") from None
    return found


class _Tokens:
    """The target's tokenizer, loaded when the first text comes."""

    def __init__(self, target: Path, chat: bool) -> None:
        self.target = target
        self.chat = chat
        self._text: Any = None
        self._chat: Any = None

    def of(self, prompt: Any) -> Any:
        """The token ids of a prompt. Raises ValueError, saying why, if there are none."""
        if isinstance(prompt, dict):
            key = next((key for key in KEYS if key in prompt), None)
            if key is None:
                raise ValueError(f"has none of the keys {', '.join(KEYS)}")
            return self._messages(prompt[key]) if key == "messages" else self.of(prompt[key])
        if not isinstance(prompt, str):
            return prompt
        if not prompt.strip():
            return []
        return self._messages([{"role": "user", "content": prompt}]) if self.chat else self._encode(prompt)

    def _encode(self, text: str) -> list[int]:
        if self._text is None:
            from tokenizers import Tokenizer

            try:
                self._text = Tokenizer.from_file(str(self.target / "tokenizer.json"))
            except Exception as error:  # the library raises Exception itself for a missing or broken file
                raise InputError(
                    f"--target-model {self.target}: tokenizer.json cannot be used ({error})"
                ) from None
        return list(self._text.encode(text).ids)

    def _messages(self, messages: Any) -> list[int]:
        from trainer.chat import Chat
        from trainer.conversations import Unusable

        self._chat = self._chat or Chat(str(self.target))
        asked = _asked(messages)
        try:
            text = self._chat.render(asked, True)
        except Unusable as error:
            raise ValueError(f"cannot be rendered: {error}") from None
        return [int(i) for i in self._chat.encode(text)[0]]


def _asked(messages: Any) -> Sequence[dict[str, Any]]:
    """The conversation up to its last message that is not an answer."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError("has messages that are no list of objects with 'role' and 'content'")
    end = max((i for i, message in enumerate(messages, 1) if message["role"] != "assistant"), default=0)
    if not end:
        raise ValueError("has no message to answer")
    return messages[:end]
