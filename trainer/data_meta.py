"""data.json of a data directory, read without torch or Arrow, so that a check is quick."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.errors import InputError

SCHEMA = 1
FOREIGN = 0.8  # with a smaller share of labels that are the target's likeliest it hardly wrote the data


def foreign_files(directory: str | Path) -> list[str]:
    """The Arrow files of a directory without data.json, else its parquet files, in order: see foreign.py."""
    directory = Path(directory)
    try:
        names = sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))
    except OSError:
        return []
    if "data.json" in names:
        return []
    arrow = [name for name in names if name.endswith(".arrow")]
    return arrow or [name for name in names if name.endswith(".parquet")]


def read_meta(directory: str | Path) -> dict[str, Any]:
    """data.json of a data directory. Raises InputError if it is missing or not ours."""
    path = Path(directory) / "data.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            f"--data-dir {directory}: it has no data.json, so it holds no tokenised completions; "
            "make them with python -m trainer.prepare"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"--data-dir {directory}: data.json cannot be read ({error})") from None
    if not isinstance(meta, dict) or meta.get("schema") != SCHEMA:
        raise InputError(f"--data-dir {directory}: data.json has not the schema {SCHEMA} of this version")
    missing = [key for key in ("tokenizer", "documents", "largest_id", "shards") if key not in meta]
    if missing:
        raise InputError(f"--data-dir {directory}: data.json lacks the key '{missing[0]}'")
    return meta


def known_meta(directory: str | Path) -> dict[str, Any]:
    """`read_meta`, or the little that is known of another trainer's directory before it is read through."""
    if files := foreign_files(directory):
        return {"schema": SCHEMA, "tokenizer": None, "documents": None, "largest_id": -1, "shards": files}
    return read_meta(directory)


def agreement_warning(directory: str | Path, meta: dict[str, Any]) -> str | None:
    """What to say at the start of a training on data that was measured and is hardly the target's own."""
    share = (meta.get("agreement") or {}).get("share", 1.0)
    if share >= FOREIGN or (meta.get("regenerated") or {}).get("temperature"):
        return None
    return (
        f"warning: data {directory}: only {share:.0%} of its labels are what the target would write, so the "
        "drafter learns to foresee somebody else; python -m trainer.prepare --regenerate makes better data"
    )


def template_warning(directory: str | Path, meta: dict[str, Any], template: str | None) -> str | None:
    """What to say if the target's chat template (`modeldir.template_digest`) is not the one that the data was
    prepared with; nothing where one of them is not known.
    """
    if not template or not meta.get("template") or meta["template"] == template:
        return None
    return (
        f"warning: data {directory}: it was prepared with another chat template than the target has now "
        f"({meta['template']}, now {template}), so a server talks to the target in another way than the "
        "data; prepare it again, or put the template back"
    )


def check_length(directory: str | Path, longest: int | None, block_size: int) -> None:
    """Raises InputError if no document, of which the longest has `longest` tokens, can fill a block."""
    if longest is not None and longest < block_size:
        raise InputError(
            f"--block-size {block_size} is more than the {longest} tokens of the longest document in "
            f"--data-dir {directory}, so no block can be filled; give at most {longest}, or longer data"
        )


def check_meta(directory: str | Path, meta: dict[str, Any], tokenizer: str, vocab_size: int) -> None:
    """Raises InputError if these ids were made with another tokenizer than the target's, as far as the data
    says with which.
    """
    if meta["tokenizer"] is not None and meta["tokenizer"] != tokenizer:
        raise InputError(
            f"--data-dir {directory}: it was tokenised with another tokenizer than the target's "
            f"({meta['tokenizer']}, for {meta.get('target', 'an unnamed target')}; "
            f"the target has {tokenizer}); prepare it again"
        )
    if meta["largest_id"] >= vocab_size:
        raise InputError(
            f"--data-dir {directory}: it holds the token {meta['largest_id']}, "
            f"beyond the target's vocabulary of {vocab_size}"
        )
