"""Conversations as they come: JSON lines and parquet, in the shapes that are in use, one at a time.

Known shapes of a row:

* ``messages``: ``[{"role": …, "content": …}, …]``, content a text or a list of text parts
* ``conversations`` (ShareGPT): ``[{"from": "human" | "gpt" | …, "value": …}, …]``
* a prompt and a response in two columns (`PAIRS`), either of them also as a list of messages, and ``system``

``tools`` beside any of them is handed to the chat template. What comes out is always a list of messages.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import InputError

Message = dict[str, Any]

TEXT_ENDINGS = (".jsonl", ".jsonl.gz", ".ndjson", ".json", ".json.gz")
PAIRS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "response"),
    ("instruction", "output"),
    ("question", "answer"),
    ("query", "response"),
    ("problem", "solution"),
)
PROMPTS = tuple(dict.fromkeys(prompt for prompt, _ in PAIRS))
COLUMNS = (
    "messages",
    "conversations",
    "tools",
    "system",
    "input",
    *dict.fromkeys(n for p in PAIRS for n in p),
)
SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
ROWS = 256  # of a parquet file, read at a time


@dataclass(frozen=True)
class Conversation:
    messages: list[Message]
    tools: list[Any] | None = None


class Unusable(ValueError):
    """Why a row cannot be used; the same words for all rows of the kind, so that they can be counted."""


@dataclass(frozen=True)
class Row:
    """A row of the input that nobody has looked into: text of a JSON line, or a mapping from parquet."""

    file: str
    number: int  # of the line or row, from 1
    value: bytes | dict[str, Any]

    @property
    def place(self) -> str:
        return f"{self.file}:{self.number}"


# -- files -------------------------------------------------------------------------------------------------


def input_files(given: Sequence[str]) -> list[Path]:
    """The files that `given` names, those of a directory in order of their names. Raises InputError."""
    found: list[Path] = []
    for name in given:
        path = Path(name).expanduser()
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.name.endswith((*TEXT_ENDINGS, ".parquet")))
            if not inside:
                raise InputError(f"--input {name}: there is no .jsonl and no .parquet file in it")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise InputError(f"--input {name}: No such file or directory")
    return found


def rows(files: Sequence[Path]) -> Iterator[Row]:
    """All rows in order; blank lines are left out. Never more than a few hundred are in memory.

    Raises InputError, naming the file, if one cannot be read.
    """
    for path in files:
        try:
            yield from _parquet(path) if path.suffix == ".parquet" else _lines(path)
        except (OSError, EOFError) as error:
            raise InputError(f"--input {path}: {getattr(error, 'strerror', None) or error}") from None


def count(files: Sequence[Path]) -> int:
    """How many rows there are, about: blank lines count."""
    import pyarrow.parquet as pq

    total = 0
    for path in files:
        if path.suffix == ".parquet":
            total += _open_parquet(path, pq).metadata.num_rows
        else:
            with _open(path) as file:
                block = b"\n"
                while more := file.read(1 << 20):
                    block = more
                    total += block.count(b"\n")
                total += not block.endswith(b"\n")  # a last line that nothing ends
    return total


def _open(path: Path) -> Any:
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


def _lines(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if number == 1 and line.lstrip()[:1] == b"[":
                raise InputError(
                    f"--input {path}: it is one JSON array, which would have to be read whole; write one "
                    "object a line (jq -c '.[]')"
                )
            if line.strip():
                yield Row(str(path), number, line)


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = _open_parquet(path, pq)
    columns = [name for name in file.schema_arrow.names if name in COLUMNS]
    if not {"messages", "conversations", *PROMPTS} & set(columns):
        raise InputError(
            f"--input {path}: of its columns ({', '.join(file.schema_arrow.names)}) none is messages, "
            f"conversations, {' or '.join(PROMPTS)}"
        )
    number = 0
    try:
        for batch in file.iter_batches(ROWS, columns=columns):
            for value in batch.to_pylist():
                number += 1
                yield Row(str(path), number, value)
    except pa.ArrowException as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"--input {path}: it is damaged behind row {number} ({reason})") from None
    finally:
        file.close()


def _open_parquet(path: Path, pq: Any) -> Any:
    import pyarrow as pa

    try:
        return pq.ParquetFile(path)
    except pa.ArrowException as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"--input {path}: it is no parquet file, or damaged ({reason})") from None


# -- rows --------------------------------------------------------------------------------------------------


class Malformed(InputError):
    """A line that is no JSON object: the file is damaged, rather than the row of another kind."""


def conversation(row: Row) -> Conversation:
    """What a row says. Raises Malformed if it is no JSON object, Unusable if it is no conversation."""
    value = row.value
    if isinstance(value, bytes):
        try:
            value = json.loads(value.decode("utf-8"))
        except UnicodeDecodeError:
            raise Malformed(
                f"--input {row.place}: the line is not UTF-8 text; --skip-bad passes it over"
            ) from None
        except (ValueError, RecursionError):
            raise Malformed(
                f"--input {row.place}: the line is not valid JSON; --skip-bad passes it over"
            ) from None
        if not isinstance(value, dict):
            raise Malformed(f"--input {row.place}: the line is no JSON object; --skip-bad passes it over")
    messages = _messages(value)
    if not messages:
        for key in ("messages", "conversations"):
            if value.get(key) is not None:
                raise Unusable(f"'{key}' is {'empty' if value[key] == [] else 'no list of messages'}")
        raise Unusable("neither 'messages' nor 'conversations' nor a prompt with its response")
    tools = value.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            raise Unusable("'tools' is not valid JSON") from None
    system = value.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return Conversation(messages, tools or None)


def _messages(value: dict[str, Any]) -> list[Message]:
    if isinstance(given := value.get("messages"), list) and given:
        return [_message(item) for item in given]
    if isinstance(given := value.get("conversations"), list) and given:
        return [
            _sharegpt(item) if isinstance(item, dict) and "from" in item else _message(item) for item in given
        ]
    for prompt, response in PAIRS:
        if value.get(prompt) and value.get(response):
            asked = _side(value[prompt], "user", value.get("input"))
            return [*asked, *_side(value[response], "assistant")]
    for prompt in PROMPTS:  # a prompt alone: --regenerate answers it
        if value.get(prompt):
            return _side(value[prompt], "user", value.get("input"))
    return []


def _side(value: Any, role: str, more: Any = None) -> list[Message]:
    """A prompt or a response: a text, or messages."""
    if isinstance(value, list):
        return [_message(item) for item in value]
    if not isinstance(value, str):
        raise Unusable("a prompt or response that is no text")
    if isinstance(more, str) and more.strip():
        value = f"{value}\n\n{more}"
    return [{"role": role, "content": value}]


def _message(item: Any) -> Message:
    """One message with what templates read of it; empty fields, which parquet fills in, are left out."""
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        raise Unusable("a message without text in 'role' and 'content'")
    found: Message = {key: value for key, value in item.items() if value is not None}
    content = item.get("content")
    if isinstance(content, list):
        texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise Unusable("a message with something else than text")
        content = "".join(texts)
    if content is None and found.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise Unusable("a message without text in 'role' and 'content'")
    return {**found, "content": content}


def _sharegpt(item: Any) -> Message:
    if not isinstance(item, dict) or not isinstance(item.get("value"), str):
        raise Unusable("a message without text in 'from' and 'value'")
    role = SHAREGPT.get(str(item.get("from")).lower())
    if role is None:
        raise Unusable(f"a message from '{str(item.get('from'))[:40]}', which is no known role")
    return {"role": role, "content": item["value"]}
