"""One process per device: starts the ranks of a run, passes their output on, and ends them together.

One thread and one event loop: the ranks' output, their progress, signals and a stdout that takes more are
waited for together, and, of a run on several machines, what the other launchers say (trainer/link.py): there
node 0 decides. The ranks stay in our session, so that whoever ends that (launch's guard, a terminal)
ends them too; should we be killed alone, the kernel ends them with us.

Standard library only; Linux.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trainer import ending, output
from trainer.asked import Dump
from trainer.errors import NO_READER, InputError, to_the_end
from trainer.forward import RECORD_BYTES, Forward
from trainer.link import RETRY_SECONDS, Link
from trainer.processes import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    Process,
    Signals,
    all_processes,
    descendants,
    describe,
    prctl,
    read_process,
    send,
)
from trainer.roles import Rank
from trainer.status import (
    LOST_VARIABLE,
    PROGRESS_VARIABLE,
    RANK_VARIABLE,
    STALLED,
    STORE_VARIABLE,
    Heartbeat,
    Request,
)

if TYPE_CHECKING:
    from trainer.nodes import Meeting

THREADS_VARIABLE = "OMP_NUM_THREADS"
SETTLE_SECONDS = 0.2  # an unfinished line that is left alone for so long is passed on as it is
MOMENT = 3.0  # seconds that ranks have to notice that another one failed, and to say what they think of it
KILL_SECONDS = 10.0  # a process that is there so long after its KILL cannot be killed
DUMP_SECONDS = 0.05  # between two looks while stacks are printed
LONGEST_TURN = 1.0  # s
PAUSED = 5.0  # a turn that took longer: we were halted ourselves, and the ranks with us
HOLD_BYTES = 1 << 20  # so much that stdout has not taken lets the ranks wait ...
HOLD_SECONDS = 10.0  # ... until it has taken nothing for so long; then what it cannot take is dropped
STDOUT_SECONDS = (1.0, 10.0)  # at the end, wait so long for a stdout that takes nothing; for any
BUSY = ("loading", "compiling", "evaluating", "checkpointing")  # phases that have no steps

_TROUBLE = (b"Traceback ", b"error: ")  # how the last words of a rank begin


class Lines:
    """Cuts one rank's output into records that end with a newline or, in a progress bar, a carriage return.

    A line that stays unfinished for a moment becomes a record as it is. A record without a byte ends a line
    that has been passed on before.
    """

    def __init__(self) -> None:
        self._pending = b""
        self._latest = 0.0  # when its newest byte came
        self._bar = False  # the line in progress was overwritten before
        self._shown = False  # some of the line in progress was passed on

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Take bytes that came at `now` (monotonic, s); the records that they complete."""
        records: list[bytes] = []
        pieces = data.splitlines(keepends=True)
        pieces[0] = self._pending + pieces[0]
        self._pending = b"" if pieces[-1].endswith((b"\n", b"\r")) else pieces.pop()
        self._latest = now
        for record in pieces:
            if record == b"\r":  # where nothing was overwritten there is nothing to show
                self._bar = True
            elif record.endswith(b"\n"):
                records.append(b"" if self._shown and record in (b"\n", b"\r\n") else record)
                self._bar = self._shown = False
            else:
                records.append(record)
                self._bar = self._shown = True
        return records + (self.end() if len(self._pending) > RECORD_BYTES else [])

    def due(self) -> float | None:
        """When the unfinished line is passed on (monotonic, s)."""
        return self._latest + SETTLE_SECONDS if self._pending else None

    def end(self) -> list[bytes]:
        """The unfinished line, as a record."""
        if not self._pending:
            return []
        record, self._pending, self._shown = self._pending, b"", True
        return [record + (b"\r" if self._bar else b"\n")]


@dataclass(eq=False)
class Member:
    """A rank that was started."""

    rank: Rank
    popen: subprocess.Popen[bytes]
    process: Process
    output: int  # where its stdout and stderr are read
    progress: int  # where what it does is read
    lost: int = -1  # where it is told that another machine is lost
    lines: Lines = field(default_factory=Lines)
    phase: str = "starting"
    since: float = 0.0  # when its phase began (monotonic, s)
    told: bytes = b""  # of its progress: the line that is not complete
    failed: float | None = None  # when it failed, by its last words or, without any, by its end (monotonic)
    last: bytes = b""  # the last line that is not empty
    code: int | None = None  # once it has ended; -N: by signal N
    killed: float | None = None  # when it was sent a KILL by us

    @property
    def how(self) -> str:
        code, number = ending.from_wait_status(self.code or 0)
        return ending.how(ending.End(code, number))


@dataclass(frozen=True)
class First:
    """The first failure of a run, as all of its launchers tell it."""

    sentence: str  # ``rank 3 (…) failed first, by SIGKILL``
    last: str = ""  # its last line
    code: int = 1  # of the run
    number: int | None = None  # the signal that ended it
    lost: bool = False  # a machine, from which nothing more comes


@dataclass(frozen=True)
class Failure:
    """One that may have been the first."""

    first: First
    when: float  # monotonic, s
    certain: bool


def own(ranks: Sequence[Rank], environment: Mapping[str, str] = os.environ) -> Rank | None:
    """The rank that this process was started as; None if it was not started as one. Raises InputError."""
    text = environment.get(RANK_VARIABLE)
    if text is None:
        return None
    for rank in ranks:
        if text == str(rank.number):
            return rank
    raise InputError(
        f"{RANK_VARIABLE}={text}: there are {len(ranks)} ranks here, from 0; unset it, since only the "
        "process that starts the ranks is to set it"
    )


def apart(check: Callable[[], None]) -> int:
    """Run `check` in a process of its own; the exit code that it asks for by an InputError, else 0."""

    def code() -> int:
        try:
            check()
        except InputError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return error.code
        return 0

    ours = os.getpid()
    pid = os.fork()
    if pid == 0:
        found = 1
        try:
            _end_with(ours)
            found = to_the_end(code)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(found)
    return ending.from_wait_status(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))[0]


def _end_with(parent: int) -> None:
    """Have the kernel end this process with its `parent`."""
    with contextlib.suppress(OSError):
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(128 + signal.SIGKILL)


def leave(command: Callable[[], int]) -> NoReturn:
    """End this process, a rank, with the exit code of `command`; a traceback is 1.

    At once: a thread that waits inside torch.distributed cannot be ended, and where Python ends as it usually
    does such a thread makes it abort.
    """
    code = 1
    try:
        code = to_the_end(command)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else code
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def launch(
    command: Sequence[str],
    ranks: Sequence[Rank],
    *,
    stall_timeout: float,
    environment: Mapping[str, str] | None = None,
    threads: bool = False,
    meeting: Meeting | None = None,
) -> int:
    """Run `command` once for each rank, to the end of all; returns the exit code.

    `stall_timeout`: seconds without a step of any rank after which they are taken for hanging, 0: never.
    `threads`: whether the ranks set their threads themselves. `meeting`: of several machines, whose other
    ranks are started there. Raises InputError if one cannot be started, or the machines do not fit together.
    """
    given = dict(os.environ if environment is None else environment)
    if not threads and all(rank.device.startswith("cpu") for rank in ranks):
        share = len(os.sched_getaffinity(0)) // len(ranks)
        given.setdefault(THREADS_VARIABLE, str(max(1, share)))
    with tempfile.TemporaryDirectory(prefix="drafthouse-ranks-") as place:
        given[STORE_VARIABLE] = meeting.store if meeting else str(Path(place, "store"))
        if meeting:
            given |= meeting.environment
        launcher = Launcher(stall_timeout)
        try:
            if meeting and (code := launcher.meet(meeting)):
                return code
            for rank in ranks:
                launcher.start(rank, command, given)
            return launcher.keep()
        except InputError as error:
            launcher.give_up(error)
            raise
        finally:
            launcher.close()


class Launcher:
    """Keeps the ranks of one run, from their start to the end of the last."""

    def __init__(self, stall_timeout: float) -> None:
        self.members: list[Member] = []
        self._timeout = stall_timeout
        hang_up = signal.getsignal(signal.SIGHUP)
        self._signals = Signals()
        signal.signal(signal.SIGHUP, hang_up)  # a terminal that is closed ends us, and the ranks with us
        with contextlib.suppress(OSError):
            prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._forward = Forward(1, kept="")
        self._read = not self._forward.closed  # whether anybody reads it
        self._overwritten: Member | None = None  # whose progress bar is the last that was printed
        self._bytes = 0  # of output
        self._waiting, self._taken = 0, 0.0  # bytes for stdout; when it last took some
        self._holding = self._watching = False
        now = time.monotonic()
        self._news = self._looked = now  # the last progress of any rank; the last turn
        self._stepped = False  # whether any has taken a step
        self._stops: list[int] = []  # the signals that asked us to stop
        self._failed = 0.0  # when the first rank failed
        self._failures: list[Failure] = []
        self._first: First | None = None  # of them
        self._link: Link | None = None  # to the launchers of the other machines
        self._asked: dict[int, int] = {}  # how often each node was asked to stop
        self._busy: set[int] = set()  # nodes that are at what has no steps
        self._over: set[int] = set()  # nodes whose ranks have all ended
        self._dump: Dump | None = None  # what is printed of a hang
        self._stalled = False
        self._selector = selectors.DefaultSelector()
        self._watch(self._signals.descriptor, self._on_signals)

    def meet(self, meeting: Meeting) -> int:
        """Wait for the launchers of all machines; the exit code if we are to stop meanwhile, else 0.

        Raises InputError if they do not fit together, or do not come.
        """
        self._link = link = Link(meeting.own, meeting.address, self._selector, self._say)
        link.turn(self._beat)
        while not link.ready:
            self._turn(RETRY_SECONDS)
            if self._stops and not link.ready:
                sentence = _stopped(self._stops[0], early=True)
                link.refuse(sentence, 128 + self._stops[0])
                self._say(sentence)
                return 128 + self._stops[0]
        return 0

    def give_up(self, error: InputError) -> None:
        """Have the other machines know that we end by it."""
        if self._link and self._link.ready and not self._link.closed:
            self._failed = time.monotonic()
            first = First(f"{self._link.own} failed first: {error}", code=error.code)
            self._report(Failure(first, self._failed, certain=True))
            if self._link.leads:
                self._decide(first)
                self._link.tell({"end": True})

    def start(self, rank: Rank, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Raises InputError."""
        ours = os.getpid()
        reading, writing = output.make(terminal=False)
        progress, telling = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        own = {RANK_VARIABLE: str(rank.number), PROGRESS_VARIABLE: str(telling)}
        theirs, lost = [telling], -1
        if self._link:
            listening, lost = os.pipe2(os.O_CLOEXEC)
            theirs.append(listening)
            own[LOST_VARIABLE] = str(listening)
        try:
            popen = subprocess.Popen(
                list(command),
                env={**environment, **own},
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                pass_fds=theirs,
                preexec_fn=lambda: _end_with(ours),
            )
        except OSError as error:
            os.close(reading)
            os.close(progress)
            raise InputError(f"{rank} cannot be started: {error.strerror}", code=1) from None
        finally:
            os.close(writing)
            for descriptor in theirs:
                os.close(descriptor)
        process = read_process(popen.pid)
        assert process is not None  # it is ours and was not waited for
        member = Member(rank, popen, process, reading, progress, lost, since=time.monotonic())
        self.members.append(member)
        self._watch_output(member)
        self._watch(progress, lambda: self._on_progress(member))

    def keep(self) -> int:
        """Until all have ended, on all machines; the exit code."""
        while (living := self._living()) or (self._link and not self._link.closed):
            now = time.monotonic()
            if living and all(m.killed is not None and now - m.killed > KILL_SECONDS for m in living):
                break
            self._turn()
        self._clear_up()
        if self._stalled:
            self._say(
                f"error: no step of any rank for {self._timeout:g} s (--stall-timeout) while training: "
                "all were ended, and the stacks of each are above"
            )
            return STALLED
        asked = self._first is not None and self._first.number in self._stops
        if self._unread and (self._first is None or asked):
            return NO_READER
        if self._first is None:
            return 0
        if asked:
            self._say(_stopped(self._first.number, early=not self._stepped))
            return self._first.code
        words = self._first.last
        last = f"; its last line: {words}" if words and self._first.number is None else ""
        self._say(f"error: {self._first.sentence}{last}")
        return self._first.code

    def close(self) -> None:
        """End what lives, pass on what is left, let go of all."""
        for member in self._living():
            send(member.process, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.popen.wait(KILL_SECONDS)
        if self._link and not self._link.closed:
            self._link.close()
        self._forward.flush(*STDOUT_SECONDS)
        self._selector.close()
        self._forward.close()
        for member in self.members:
            for descriptor in (member.output, member.progress, member.lost):
                if descriptor >= 0:
                    os.close(descriptor)
            member.output = member.progress = member.lost = -1

    # -- the loop ------------------------------------------------------------------------------------------

    def _turn(self, longest: float = LONGEST_TURN) -> None:
        """Wait for what comes next, and do it."""
        now = time.monotonic()
        due = [now + longest, *(member.lines.due() for member in self.members)]
        if self._dump:
            due.append(now + DUMP_SECONDS)
        if self._failed or self._holding:
            due.append(now + SETTLE_SECONDS)
        timeout = min(moment for moment in due if moment is not None) - now
        for key, _ in self._selector.select(max(timeout, 0)):
            key.data()
        now = time.monotonic()
        for member in self.members:
            moment = member.lines.due()
            if moment is not None and now >= moment:
                self._show(member, member.lines.end())
        if now - self._looked > PAUSED:
            self._news += now - self._looked
        self._looked = now
        if self._link:
            self._attend(self._link)
        self._look(now)
        self._hold_back(now)

    def _watch_output(self, member: Member) -> None:
        self._watch(member.output, lambda: self._on_output(member))

    def _watch(self, descriptor: int, act: Callable[[], object], events: int = selectors.EVENT_READ) -> None:
        self._selector.register(descriptor, events, act)

    def _living(self) -> list[Member]:
        return [member for member in self.members if member.code is None]

    # -- what the ranks print ------------------------------------------------------------------------------

    def _on_output(self, member: Member) -> bool:
        """Take one chunk; whether there may be more."""
        if member.output < 0:  # its end was noticed in the same turn
            return False
        data = output.take(member.output)
        if data is None:
            return False
        if not data:
            self._close_output(member)
            return False
        now = time.monotonic()
        self._bytes += len(data)
        self._show(member, member.lines.feed(data, now))
        return True

    def _close_output(self, member: Member) -> None:
        if member.output < 0:
            return
        self._show(member, member.lines.end())
        if not self._holding:
            self._selector.unregister(member.output)
        os.close(member.output)
        member.output = -1

    def _show(self, member: Member, records: Sequence[bytes]) -> None:
        """Records of one rank, each with its number before it."""
        block, prefix = bytearray(), b"[%d] " % member.rank.number
        for record in records:
            if self._overwritten is not None and self._overwritten is not member:
                block += b"\n"
            if record:
                block += prefix + record
            elif self._overwritten is member:
                block += b"\n"
            self._overwritten = member if record.endswith(b"\r") else None
            if words := record.strip():
                if words.startswith(_TROUBLE):
                    member.failed = time.monotonic()
                member.last = words
        if block:
            self._forward.put(bytes(block), max(len(records), 1))

    def _say(self, text: str) -> None:
        """A line of our own."""
        before = b"\n" if self._overwritten is not None else b""
        self._overwritten = None
        self._forward.put(before + text.encode("utf-8", "backslashreplace") + b"\n", 1)

    def _hold_back(self, now: float) -> None:
        """Wait for a slow stdout, and let the ranks wait, but not for ever."""
        waiting = self._forward.size
        if waiting <= HOLD_BYTES or waiting < self._waiting:
            self._taken = now
        self._waiting = waiting
        hold = waiting > HOLD_BYTES and now - self._taken < HOLD_SECONDS
        for member in self.members:
            if hold != self._holding and member.output >= 0:
                if hold:
                    self._selector.unregister(member.output)
                else:
                    self._watch_output(member)
        self._holding = hold
        watch = bool(waiting) and self._forward.pollable and not self._forward.closed
        if watch and not self._watching:
            self._watch(self._forward.descriptor, self._forward.pump, selectors.EVENT_WRITE)
        elif self._watching and not watch:
            self._selector.unregister(self._forward.descriptor)
        self._watching = watch
        if self._unread and not self._stops:
            self._stop(signal.SIGTERM)

    @property
    def _unread(self) -> bool:
        """Whether the reader of stdout has left."""
        return self._read and self._forward.closed

    # -- what they do --------------------------------------------------------------------------------------

    def _on_progress(self, member: Member) -> None:
        """``phase training`` and ``step 17``, a line each (trainer/monitor.py)."""
        data = output.take(member.progress) if member.progress >= 0 else None
        if not data:
            if data is not None:
                self._selector.unregister(member.progress)
                os.close(member.progress)
                member.progress = -1
            return
        now = time.monotonic()
        *lines, member.told = (member.told + data).split(b"\n")
        for line in lines:
            word, _, value = line.decode("utf-8", "replace").partition(" ")
            if word == "phase":
                member.phase, member.since = value, now
            self._stepped = self._stepped or word == "step"
        self._news = now

    def _on_signals(self) -> None:
        for number in self._signals.read():
            if number in (signal.SIGTERM, signal.SIGINT):
                self._stop(number)
        self._reap()

    def _stop(self, number: int) -> None:
        if self._link and self._link.ready and not self._link.leads and not self._link.closed:
            self._link.tell({"stop": number})
            if not self._stops:
                self._stops.append(number)
        else:
            self._stop_all(number, self._link.own.number if self._link else 0)

    def _stop_all(self, number: int, node: int) -> None:
        """Asked for on `node`. The first goes to rank 0 alone, which agrees with the others on a step; what
        follows on the same node to all: who stops all machines has not asked twice.
        """
        self._asked[node] = self._asked.get(node, 0) + 1
        if self._stops and self._asked[node] == 1:
            return
        again = bool(self._stops)
        self._stops.append(number)
        if not self.members:
            return
        again = again or self.members[0].code is not None
        if self._link and self._link.leads:
            self._link.tell({"stop": number, "again": again})
        for member in self._living() if again else self.members[:1]:
            send(member.process, number)

    def _reap(self) -> None:
        """Wait for every child that has ended: ranks, and orphans of theirs that came to us."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                for member in self.members:
                    if member.process.pid == pid:
                        self._ended(member, os.waitstatus_to_exitcode(status))

    def _ended(self, member: Member, code: int) -> None:
        """What it has printed comes before what is said of its end."""
        member.code = member.popen.returncode = code
        for _ in range(2 * output.PIPE_BYTES // 4096):  # a process of its own may go on to print
            if member.output < 0 or not self._on_output(member):
                break
        self._close_output(member)
        now = time.monotonic()
        self._news = now  # what it was at has ended
        member.failed = member.failed or now
        if code == 0 or member.killed is not None or self._stalled:
            return
        self._failed = self._failed or now
        asked = -code in self._stops
        if not asked and self._first is None and not _decisive(member):
            self._say(f"{member.rank} ended {member.how}")
        exit_code, number = ending.from_wait_status(code)
        host = f" on {self._link.own.host}" if self._link else ""
        words = member.last[:500].decode("utf-8", "replace")
        first = First(f"{member.rank}{host} failed first, {member.how}", words, exit_code, number)
        self._report(Failure(first, member.failed, certain=asked or _decisive(member)))
        if asked and self._first is None and self._decides:
            self._decide(first)

    # -- what becomes of it --------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        if self._dump:
            if self._dump.go_on(now, self._say, lambda: self._bytes):
                self._dump = None
                self._kill(self._living(), now, "")
        elif self._failed:
            self._end_others(now)
        elif not self._stalled and self._hangs(now):
            if self._link:
                self._link.tell({"stalled": True})
            self._on_stall()

    def _on_stall(self) -> None:
        self._stalled = True
        self._say(f"no step of any rank for {self._timeout:g} s (--stall-timeout) while training")
        beats = {m.rank.number: Heartbeat(pid=m.process.pid) for m in self.members}
        living = [member.process for member in self._living()]
        request = Request(id="", action="dump-stacks", by="--stall-timeout")
        self._dump = Dump(request, living, beats, Heartbeat.attempt)

    @property
    def _decides(self) -> bool:
        """Whether it is ours to say who failed first and who hangs: node 0's, while it is there."""
        return self._link is None or self._link.leads or self._link.closed

    @property
    def _awaited(self) -> bool:
        """Whether ranks of other machines have not ended."""
        return self._link is not None and bool(self._link.peers.keys() - self._over)

    def _report(self, failure: Failure) -> None:
        self._failures.append(failure)
        if self._link and not self._link.leads:
            ago = time.monotonic() - failure.when
            told = {**asdict(failure.first), "ago": ago, "certain": failure.certain}
            self._link.tell({"failed": told})

    def _decide(self, first: First) -> None:
        """This was the first failure."""
        self._first = first
        if self._link and self._link.leads:
            self._link.tell({"first": asdict(first), "stepped": self._stepped})
        if first.number in self._stops:
            for member in self._living():  # nothing is saved that they could be needed for
                send(member.process, first.number)
        else:
            others = ": the others are ended" if self._living() else ""
            self._say(f"{first.sentence}{others}")
        if first.lost:
            self._wake()

    # -- other machines --------------------------------------------------------------------------------------

    def _attend(self, link: Link) -> None:
        """Tell the others how we are, and do what they say."""
        link.turn(self._beat)
        while link.told:
            self._on_told(link, *link.told.popleft())
        if link.closed or not link.ready or not self.members or self._living():
            return
        if not link.leads:
            if link.own.number not in self._over:
                self._over.add(link.own.number)
                link.tell({"over": True})
        elif not self._awaited and (self._first or not self._failures):
            link.tell({"end": True})
            link.close()

    def _beat(self) -> dict[str, Any]:
        busy = any(member.phase in BUSY for member in self._living())
        return {"busy": busy, "ago": time.monotonic() - self._news, "stepped": self._stepped}

    def _on_told(self, link: Link, node: int, message: dict[str, Any]) -> None:
        now = time.monotonic()
        if beat := message.get("beat"):
            self._news = max(self._news, now - beat["ago"])
            self._stepped = self._stepped or beat["stepped"]
            (self._busy.add if beat["busy"] else self._busy.discard)(node)
        elif "stop" in message:
            number = message["stop"]
            if link.leads:
                self._stop_all(number, node)
                return
            self._stops.append(number)
            for member in self._living() if message["again"] else []:
                send(member.process, number)
        elif told := message.get("failed"):
            self._failed = self._failed or now
            when, certain = now - told.pop("ago"), told.pop("certain")
            self._failures.append(Failure(First(**told), when, certain))
        elif told := message.get("first"):
            self._failed, self._stepped = self._failed or now, message["stepped"]
            self._decide(First(**told))
        elif "stalled" in message:
            self._on_stall()
        elif "over" in message:
            self._over.add(node)
        elif "end" in message:
            link.close()
        elif why := message.get("lost"):
            self._on_lost(link, node, why)

    def _on_lost(self, link: Link, node: int, why: str) -> None:
        """Another machine is gone. Without node 0 each of the others ends by itself."""
        self._over.add(node)
        if not link.leads:
            link.close()
        if self._first is None and not self._stalled:
            self._failed = self._failed or time.monotonic()
            self._decide(First(f"{link.name(node)} failed first, {why}", lost=True))

    def _wake(self) -> None:
        """Have our ranks not wait for a machine that says nothing."""
        for member in self._living():
            if member.lost >= 0:
                with contextlib.suppress(OSError):
                    os.write(member.lost, b"!")

    def _end_others(self, now: float) -> None:
        """After one has failed: who is still there has a moment, who saves a checkpoint has longer."""
        living = self._living()
        certain = next((failure for failure in self._failures if failure.certain), None)
        over = not living and not self._awaited
        if self._first is None and self._decides and (certain or over or now - self._failed >= MOMENT):
            # Who notices that another failed may have ended before it: whose trouble came first tells.
            self._decide((certain or min(self._failures, key=lambda failure: failure.when)).first)
        late = [
            member
            for member in living
            if now - max(self._failed, member.since) >= MOMENT
            and not (member.phase == "checkpointing" and self._patient(now))
        ]
        self._kill([member for member in late if member.killed is None], now, "did not end by itself")

    def _patient(self, now: float) -> bool:
        return not self._timeout or now - self._failed < self._timeout

    def _kill(self, members: Sequence[Member], now: float, why: str) -> None:
        for member in members:
            if why:
                self._say(f"{member.rank} {why}: KILL")
            member.killed = now
            send(member.process, signal.SIGKILL)

    def _hangs(self, now: float) -> bool:
        """Whether nobody has taken a step for too long, although steps are what they are at."""
        if not self._timeout or now - self._news < self._timeout:
            return False
        if not self._decides or self._busy - self._over:
            return False
        first = self.members[0]
        return (first.code is not None or first.phase == "training") and not any(
            member.phase in BUSY for member in self._living()
        )

    def _clear_up(self) -> None:
        """End what outlived the ranks; it has a moment to go by itself."""
        began = time.monotonic()
        told = False
        while found := descendants(all_processes(), os.getpid()):
            now = time.monotonic()
            if now - began > KILL_SECONDS:
                self._say(f"{describe(found)} cannot be killed and may hold devices")
                return
            if now - began > 1.0:
                if not told:
                    self._say(f"KILL to {describe(found)}: left behind by the ranks")
                told = True
                for process in found:
                    send(process, signal.SIGKILL)
            self._turn(0.05)


def _stopped(number: int | None, *, early: bool) -> str:
    more = " before the first step: nothing was to be saved" if early else ""
    return f"ended by {ending.signal_name(number or 0)}{more}"


def _decisive(member: Member) -> bool:
    """Whether it ended by a signal that does not come of another rank's end, as an abort may."""
    return member.code is not None and member.code < 0 and member.code != -signal.SIGABRT
