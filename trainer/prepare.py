"""python -m trainer.prepare: turn conversations into tokenised completions.

The input is JSON lines or parquet (trainer/conversations.py has the shapes). Each conversation is rendered
with the model's own chat template, and a token is supervised if an assistant's turn added it
(trainer/chat.py). With --regenerate the target writes the answers itself (trainer/regenerate.py), which is
what a drafter should learn from. Nothing is ever in memory as a whole, and the data directory appears when it
is complete, or not at all.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from trainer import device
from trainer.chat import Chat, show
from trainer.completions import Writer
from trainer.config import DEVICE, Kind, integer, number
from trainer.conversations import input_files, rows
from trainer.errors import InputError, to_the_end
from trainer.journal import PERIOD, forget
from trainer.modeldir import check_weights, read_config, tokenizer_digest
from trainer.ordered import available, ordered
from trainer.report import Report, visible
from trainer.tokenise import Rules, chunks, tokenise

# As in trainer/__main__.py: idle OpenMP threads sleep instead of spinning; set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

MOST_WORKERS = 16  # by default
AGREEMENT_TOKENS = 20_000  # labels that --measure-agreement looks at by default
# What the answers are written with, by default: flags that mean nothing without --regenerate.
ANSWERS: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 1024, "batch_size": 32, "seed": 0}
THINKING = {"auto": None, "on": True, "off": False}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message.replace("the following arguments are required", "missing"))


class _Help(argparse.HelpFormatter):
    """Shows defaults, where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        none = any(action.default is value for value in (None, False, argparse.SUPPRESS))
        return (action.help or "") + ("" if none else " (default: %(default)s)")


def _kind(kind: Kind) -> Any:
    """A flag's type for argparse, which names the flag and says what it must be."""

    def read(text: str) -> Any:
        try:
            return kind.read(text)
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f"{text!r} must be {kind.what}") from None

    return read


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="python -m trainer.prepare",
        description="Turns conversations into tokenised completions, which a drafter is trained on.",
        allow_abbrev=False,
        formatter_class=_Help,
    )
    flag = made.add_argument
    flag("--target-model", required=True, metavar="DIR", help="whose tokenizer and template to use")
    flag("--input", nargs="+", metavar="PATH", help="conversations: .jsonl or .parquet files, or directories")
    flag("--data-dir", required=True, metavar="DIR", help="where to write; must not exist")
    flag("--max-seq-len", type=_kind(integer(16)), default=3072, metavar="N", help="longer documents are cut")
    flag(
        "--min-supervised",
        type=_kind(integer(1)),
        default=32,
        metavar="N",
        help="documents with fewer supervised tokens are dropped; two blocks are 32",
    )
    flag(
        "--thinking",
        choices=tuple(THINKING),
        default="auto",
        help="the template's enable_thinking; auto: what the template does by itself",
    )
    flag(
        "--split-turns",
        action="store_true",
        help="answers that the template shows otherwise in later turns get documents of their own",
    )
    flag("--skip-bad", action="store_true", help="count lines that are not valid JSON instead of ending")
    flag(
        "--workers",
        type=_kind(integer(1, 1024)),
        metavar="N",
        help=f"processes that tokenise (default: one for each processor, at most {MOST_WORKERS})",
    )
    flag(
        "--measure-agreement",
        nargs="?",
        type=_kind(integer(1)),
        const=AGREEMENT_TOKENS,
        metavar="N",
        help="measure on N labels how many are what the target would write; without --input of data that is "
        f"there (N: {AGREEMENT_TOKENS})",
    )
    flag("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the target")
    flag(
        "--device",
        type=_kind(DEVICE),
        default="auto",
        metavar="NAME",
        help="of the target: cpu, cuda or cuda:N; auto: a GPU if there is one",
    )
    more = made.add_argument_group("answers by the target").add_argument
    more("--regenerate", action="store_true", help="let the target write the answers anew")
    for name, kind, metavar, text in (
        ("temperature", number(0), "T", "0: always the likeliest token"),
        ("max_new_tokens", integer(1), "N", "longest answer"),
        ("batch_size", integer(1), "N", "answers side by side"),
        ("seed", integer(0), "N", "of the samples"),
    ):
        text += f" (default: {ANSWERS[name]})"
        more("--" + name.replace("_", "-"), type=_kind(kind), metavar=metavar, help=text)
    return made


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    given = parser().parse_args(argv)
    for name, default in ANSWERS.items():
        if getattr(given, name) is None:
            setattr(given, name, default)
        elif not given.regenerate:
            option = "--" + name.replace("_", "-")
            raise InputError(f"{option} means nothing without --regenerate: add that, or leave it out")
    if not given.data_dir:
        raise InputError("--data-dir is empty: name the directory to write")
    return given


def prepare(argv: Sequence[str] | None) -> None:
    given = _arguments(argv)
    read_config(given.target_model)
    if not given.input:
        if given.measure_agreement is None:
            raise InputError("--input is missing: give files with conversations (.jsonl or .parquet)")
        check_weights(given.target_model)
        _measure(given, _load(given))
        return
    if given.min_supervised > given.max_seq_len:
        raise InputError(
            f"--min-supervised {given.min_supervised} is more than --max-seq-len {given.max_seq_len} leaves"
        )
    if Path(given.data_dir).exists():
        raise InputError(
            f"--data-dir {given.data_dir} exists already: choose another directory, or remove it first"
        )
    files = input_files(given.input)
    model = None
    if given.regenerate or given.measure_agreement is not None:
        check_weights(given.target_model)  # before an hour is spent on tokenising
        device.check(given.device)
    chat = Chat(given.target_model, THINKING[given.thinking])
    if given.regenerate:
        model = _load(given)
    report = Report()
    try:
        sample = _write(given, files, chat, model, report)
        forget(Path(given.data_dir))
    except OSError as error:
        raise InputError(
            f"--data-dir {error.filename or given.data_dir}: {error.strerror or error}"
        ) from None
    except InputError:
        if report.read:  # else nothing is known yet that could explain it
            _tell(report)
        raise
    except (KeyboardInterrupt, SystemExit) as end:
        if Path(given.data_dir).exists():
            raise
        raise _Stopped(given.regenerate, end) from None
    _tell(report)
    say("One of them, with what is learnt from between ⟦ and ⟧:")
    say(sample)
    if given.regenerate or given.measure_agreement is not None:
        _measure(given, model or _load(given))


class _Stopped(Exception):
    """The work was stopped before there was anything to keep but answers; `code` is the exit code."""

    def __init__(self, regenerate: bool, by: KeyboardInterrupt | SystemExit) -> None:
        more = "; the same command goes on behind the last batch of answers" if regenerate else ""
        super().__init__(f"stopped: no data was written{more}")
        self.code = by.code if isinstance(by, SystemExit) and isinstance(by.code, int) else 130


def _tell(report: Report) -> None:
    for line in report.lines():
        say(line)


def _write(given: argparse.Namespace, files: list[Path], chat: Chat, model: Any, report: Report) -> str:
    """Write the data directory; `report` is added to. Returns one document to look at."""
    rules = Rules(given.max_seq_len, given.min_supervised, given.split_turns, given.skip_bad)
    meta = {
        "tokenizer": tokenizer_digest(given.target_model),
        "target": chat.name,
        "source": [path.name for path in files],
        **chat.facts,
        "max_seq_len": rules.max_seq_len,
        "min_supervised": rules.min_supervised,
    }
    sample = ""
    said = time.monotonic()
    with Writer(given.data_dir, meta) as writer, contextlib.ExitStack() as stack:
        if model is None:
            workers = given.workers or min(available(), MOST_WORKERS)
            parts = ordered(partial(tokenise, chat=chat, rules=rules), chunks(rows(files)), workers)
        else:
            from trainer.regenerate import Generation, regenerated

            how = Generation(
                given.temperature, given.max_new_tokens, given.batch_size, given.seed, given.dtype
            )
            parts = regenerated(model, chat, files, how, rules, Path(given.data_dir), say)
            writer.meta["regenerated"] = how.to_json()
        stack.callback(parts.close)  # its processes end before we do
        for documents, counts in parts:
            report.add(counts)
            for ids, mask in documents:
                sample = sample or show(ids, mask, chat.decode)
                writer.add(ids, mask)
            if model is None and time.monotonic() - said >= PERIOD:
                said = time.monotonic()
                say(f"{report.read:,} conversations, {report.tokens:,} tokens so far")
        writer.meta["report"] = report.to_json()
        writer.finish()
    return sample


def say(text: str) -> None:
    """A line on stdout; if nobody reads it any more, or its disk is full, the work goes on without."""
    try:
        print(visible(text), flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _load(given: argparse.Namespace) -> Any:
    import torch

    from trainer.target import Target
    from trainer.train import choose_device

    return Target.load(given.target_model, getattr(torch, given.dtype), choose_device(given.device))


def _measure(given: argparse.Namespace, target: Any) -> None:
    """Measure the agreement of data that is there, say it and keep it in data.json."""
    from trainer import agreement
    from trainer.completions import Completions

    completions = Completions.open(given.data_dir)
    completions.check_target(tokenizer_digest(given.target_model), target.config.vocab_size)
    found = agreement.measure(target, completions, given.measure_agreement or AGREEMENT_TOKENS)
    agreement.keep(completions, found, Path(given.target_model).name)
    say(found.sentence(given.data_dir, (completions.meta.get("regenerated") or {}).get("temperature")))


def main(argv: Sequence[str] | None = None) -> int:
    try:
        prepare(argv)
    except InputError as error:
        print(f"error: {visible(str(error))}", file=sys.stderr)
        return error.code
    except _Stopped as stopped:
        print(stopped, file=sys.stderr)
        return stopped.code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing half written is left behind
    sys.exit(to_the_end(main))
