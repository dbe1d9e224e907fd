"""The newest that each of several hosts has said of its runs, for screens that stay open.

Every host has a thread and a stream of its own (`deploy.live` there), so that a slow one holds up no other. A
link that is lost is made again for as long as the screen is open; meanwhile a note stands beside the last
answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy import bootunit, overview, stream
from deploy.errors import DeployError
from deploy.target import Target

AGAIN = 3.0  # seconds until a host that could not be reached at all is tried again


@dataclass(frozen=True)
class Heard:
    """What one host said last."""

    goal: Target
    rows: tuple[overview.Row, ...] = ()
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    curves: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # by run id; see deploy.live
    logs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    at: float | None = None  # time.monotonic() of the answer; None: it has not answered yet
    note: str = ""  # why there is nothing newer, one sentence


class Newest:
    """Listens to `goals` from its creation on, until `close` or the end of the process."""

    def __init__(
        self,
        goals: Sequence[Target],
        name: str | None,
        run_id: str | None,
        interval: float,
        *,
        points: int = 0,
        lines: int = 0,
    ) -> None:
        self._wanted = (name, run_id)
        self._more = (interval, overview.SAMPLE, points, lines)
        self._heard = [Heard(goal) for goal in goals]
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._closed = threading.Event()
        self.news = threading.Event()  # set whenever there is something new; whoever shows it clears it
        for place in range(len(goals)):
            threading.Thread(target=self._listen, args=(place,), daemon=True).start()

    def heard(self) -> list[Heard]:
        """The newest of each host, in the order of the hosts. Raises what a thread died of: our mistake."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            return list(self._heard)

    def close(self) -> None:
        """Listen no more. The streams end within a second or so, by themselves."""
        self._closed.set()

    def _listen(self, place: int) -> None:
        goal = self._heard[place].goal
        where = (goal.settings.state, goal.settings.shm)
        try:
            while not self._closed.is_set():
                try:
                    said = stream.values(
                        goal.host,
                        "deploy.live:stream",
                        *where,
                        *self._more,
                        note=lambda text: self._set(place, note=text.removeprefix("── ")),
                    )
                    with contextlib.closing(said):
                        for value in said:
                            if self._closed.is_set():
                                return
                            if value:
                                self._take(place, value)
                except DeployError as error:
                    self._set(place, note=str(error))
                    goal.host.close()
                self._closed.wait(AGAIN)
        except BaseException as error:
            with self._lock:
                self._failure = error
            self.news.set()

    def _take(self, place: int, value: Mapping[str, Any]) -> None:
        facts = {**value["facts"], "client_time": time.time(), "boot_unit": bootunit.wanted()}
        rows = tuple(overview.rows(self._heard[place].goal, facts, *self._wanted))
        self._set(
            place,
            rows=rows,
            facts=facts,
            curves=value["curves"],
            logs=value["logs"],
            at=time.monotonic(),
            note="",
        )

    def _set(self, place: int, **changes: Any) -> None:
        with self._lock:
            self._heard[place] = dataclasses.replace(self._heard[place], **changes)
        self.news.set()
