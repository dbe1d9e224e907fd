"""The evaluations of a run: before its first step, every M steps, and after its last one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from trainer import evaluation, evaluation_table
from trainer.completions import Completions
from trainer.config import Settings
from trainer.drafter import Drafter
from trainer.evaluation import Own, Prompts, Report, Row
from trainer.prompts import read_prompts
from trainer.target import Target


class Evaluations:
    """What is decoded, with which target, and what came of it.

    The target's own texts are decoded once: they do not change while the drafter learns.
    """

    def __init__(
        self,
        settings: Settings,
        target: Target,
        target_dir: str | Path,
        target_name: str,
        completions: Completions,
        toy_prompts: Prompts | None,
        stop: frozenset[int],
    ) -> None:
        """`target_name` names the target by content. Raises InputError if the prompts' file is wrong."""
        self.target = target
        self.interval = settings.eval_interval
        self.new_tokens = settings.eval_tokens
        self.stop = stop
        count = settings.eval_prompts
        if not count:
            self.cases: list[evaluation.Case] = []
        elif settings.eval_file:
            groups = read_prompts(
                Path(settings.eval_file),
                Path(target_dir),
                target.config.vocab_size,
                chat=settings.eval_chat,
                most=count,
                flag="--eval-file",
            )
            self.cases = evaluation.file_cases(groups)
        elif toy_prompts:
            self.cases = evaluation.toy_cases(toy_prompts, count)
        else:
            self.cases = evaluation.data_cases(completions, count)
        self.of: dict[str, Any] = {
            "target": target_name,
            "prompts": evaluation.digest(self.cases),
            "eval_prompts": count,
            "eval_tokens": self.new_tokens,
            "stop": sorted(stop),
        }
        self._texts: dict[str, Own] = {}

    @property
    def prompts(self) -> int:
        """How many texts are decoded."""
        return sum(len(case.prompts) for case in self.cases)

    def due(self, step: int) -> bool:
        """Whether there is one between `step` and the next."""
        return bool(self.cases and self.interval and step and step % self.interval == 0)

    def measure(self, drafter: Drafter, report: Report) -> list[Row]:
        """Decode, and leave no trace in what is trained: mode and random numbers are as they were, also for
        `report`, which may save a checkpoint.
        """
        with _untouched(drafter, self.target.device) as as_before:

            def told(text: str) -> None:
                as_before()
                report(text)

            return evaluation.evaluate(
                self.target, drafter, self.cases, self.new_tokens, told, self.stop, known=self._texts
            )

    def differing(self, earlier: dict[str, Any]) -> list[str]:
        """In what a kept result was measured otherwise than one of now would be."""
        return [name for name in self.of if earlier and earlier["of"].get(name) != self.of[name]]

    def lines(self, rows: list[Row], title: str, earlier: dict[str, Any]) -> list[str]:
        """The table for people, beside an `earlier` result that was kept, or an empty one."""
        differing = self.differing(earlier)
        before = None if differing else evaluation.from_json(earlier.get("rows", []))
        found = evaluation_table.table(rows, title, before)
        if differing:
            found.append(
                f"–: was measured with other {', '.join(differing)} before, so it cannot be compared"
            )
        return found


@contextlib.contextmanager
def _untouched(drafter: Drafter, device: torch.device) -> Iterator[Callable[[], None]]:
    """Gives what puts the random numbers back as they were at the start, as its end does."""
    training = drafter.training
    numbers = torch.get_rng_state()
    of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def as_before() -> None:
        torch.set_rng_state(numbers)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device, device)

    drafter.eval()
    try:
        yield as_before
    finally:
        drafter.train(training)
        as_before()
