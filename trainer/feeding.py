"""A rank that runs the target: it computes what the drafters learn from, and decodes when they are evaluated.

Rank 0 says what comes next (`Order`): to serve micro-batches from one number on, to evaluate, or that it is
over. Of several targets the first one evaluates.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from trainer.channel import Outgoing, with_last
from trainer.config import Settings
from trainer.drafter import Drafter
from trainer.evaluation import Row
from trainer.features import Features
from trainer.loading import Loaded
from trainer.monitor import Monitor, say
from trainer.prefetch import Prefetch
from trainer.world import World
from trainer.worst import described, refused, worst_batches


@dataclass(frozen=True)
class Order:
    """What all targets do next."""

    what: Literal["serve", "evaluate", "end"]
    first: int = 0  # micro-batches to serve, from this number …
    end: int = 0  # … to the one before this
    code: int = 0  # with which the run ends


class Ended(Exception):
    """Rank 0 wants no more of an evaluation."""


class Feeder:
    """What such a rank does from its loading to the end of the run."""

    def __init__(self, settings: Settings, monitor: Monitor, world: World, loaded: Loaded) -> None:
        device = loaded.target.device
        self._monitor = monitor
        self._world = world
        self._loaded = loaded
        self._device = device
        self._soft = settings.soft_labels[0] > 0
        self._ahead = Prefetch(loaded.reader, device, stride=len(world.targets))
        self._features = Features(
            loaded.target, loaded.reader, keep=settings.cache_features, keep_last=self._soft
        )
        self._outgoing = Outgoing(world, device)
        self._evaluations = loaded.evaluations(settings)
        self._served = 0

    def run(self) -> int:
        """Returns the run's exit code."""
        self._try_out()
        for number in (signal.SIGTERM, signal.SIGINT):  # rank 0 says when it is over
            signal.signal(number, signal.SIG_IGN)
        try:
            while (order := self._world.order()).what != "end":
                if order.what == "serve":
                    self._serve(order)
                elif self._world.rank == self._world.targets[0]:
                    self._evaluate()
            return order.code
        finally:
            self._ahead.close()

    def _try_out(self) -> None:
        """What does not fit into memory shows now."""
        for batch in worst_batches(self._loaded.reader):
            with refused(batch, self._device, self._monitor):
                self._features(batch.to(self._device))
                tried = described(batch)
        say(f"the largest micro-batch fits: {tried}, {self._monitor.memory()['peak'] / 1e9:,.1f} GB at most")

    def _serve(self, order: Order) -> None:
        self._monitor.phase("training")
        self._outgoing.serve(order.first, order.end, self._compute)

    def _compute(self, number: int) -> tuple[Tensor, Tensor | None]:
        began = time.perf_counter()
        batch = self._ahead.batch(number).to(self._device)
        taps, last = self._features(batch)
        wanted = with_last(number, len(self._world.team), always=self._soft)
        if wanted and last is None:
            last = self._features.last(batch)
        self._served += 1
        self._monitor.step_done(self._served, time.perf_counter() - began, batch.tokens)
        return taps[:, : batch.blocks.context_length], last if wanted else None

    def _evaluate(self) -> None:
        main = self._world.ranks[0]
        self._monitor.phase("evaluating")
        drafter = Drafter(self._loaded.config).to(self._device)
        self._world.receive_tensors(drafter.parameters(), main)

        def report(text: str) -> None:
            self._world.send(text, main)
            if not self._world.receive(main):
                raise Ended

        try:
            self._world.send(self._evaluations.measure(drafter, report), main)
        except Ended:
            return


def measured_elsewhere(world: World, drafter: Drafter, report: Callable[[str], None]) -> list[Row]:
    """On rank 0: the rows that the first target measures with `drafter`. What `report` raises ends that."""
    evaluator = world.targets[0]
    world.send_tensors(drafter.parameters(), evaluator)
    while isinstance(said := world.receive(evaluator), str):
        try:
            report(said)
        except BaseException:
            world.send(False, evaluator)
            raise
        world.send(True, evaluator)
    return said
