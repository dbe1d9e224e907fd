"""One run, from the first attempt to its record: what `trainer.launch` does once it owns a run directory.

One thread and one event loop: the trainer's pipe, launch's signals and a stdout that takes more are waited
for together, so that a line goes from the pipe to the log and to stdout as soon as it comes, and nothing in
its way ever sleeps.

Standard library only and Python >= 3.9; Linux.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import sys
import time

from trainer import banner, ending, output
from trainer.asked import Dump, Requests
from trainer.ending import End
from trainer.forward import Forward, Records
from trainer.guard import Guard
from trainer.logfile import Log, Tail, note
from trainer.oom import count_kills, out_of_memory
from trainer.processes import (
    PR_SET_CHILD_SUBREAPER,
    Family,
    Signals,
    command_line,
    describe,
    prctl,
    read_process,
    send,
)
from trainer.starting import CannotStart, build_environment, given_environment, read_secrets, start
from trainer.status import LAUNCH_REQUEST, Exit, Heartbeat, Launch, Run, RunDir

POLL_SECONDS = 0.2  # between two looks at what is asked of the run
DUMP_SECONDS = 0.05  # ... while stacks are being printed
SETTLE_SECONDS = 1.0  # after the main process, its helpers may end by themselves for so long
TERM_SECONDS = 5.0  # ... and then have so long between TERM and KILL
LOOK_SECONDS = (3.0, 15.0, 60.0, 300.0)  # ages at which workers that hold their output back are looked for
STDOUT_SECONDS = (1.0, 10.0)  # at the end, wait so long for a stdout that takes nothing; for any
RESERVE_BYTES = 64 << 10  # kept aside on the disk, so that the end of a run can be recorded on a full one


class Keeper:
    """Runs one run: its attempts, its log, its end."""

    def __init__(self, directory: RunDir, run: Run, signals: Signals, lock: int) -> None:
        """`lock`: the descriptor of the run's lock. Raises OSError if the run directory cannot be written."""
        self.directory = directory
        self.run = run
        self.state = Launch(pid=os.getpid(), attempt=0, oom_kills=count_kills().machine)
        self.log = Log(directory.log, int(run.segment_bytes), int(run.segments))
        directory.write_launch(self.state)
        self._reserve = directory.path / ".reserve"
        with contextlib.suppress(OSError):
            self._reserve.write_bytes(os.urandom(RESERVE_BYTES))
        self._lock = lock
        self._signals = signals
        self._guard = Guard(keep=(lock,))
        self._forward = Forward(1)
        self._records = Records()
        self._tail = Tail()
        self._family = Family()
        self._family.not_ours.add(self._guard.pid)
        self._requests = Requests(directory)
        self._launch_requests = Requests(directory, LAUNCH_REQUEST)
        self._dump: Dump | None = None
        self._status: int | None = None  # the trainer's wait status, once it has ended
        self._pipe = -1
        self._unproven = False  # whether the banner met a wrapper that was about to become another program
        self._age_zero = 0.0
        self._looks: list[float] = []
        self._told: set[int] = set()
        self._term_count = 0
        self._kill_at: float | None = None
        self._poll_at = 0.0
        self._save_at = 0.0
        self._watching_stdout = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.descriptor, selectors.EVENT_READ, self._on_signals)
        with contextlib.suppress(OSError):
            prctl(PR_SET_CHILD_SUBREAPER, 1)

    # -- the run -------------------------------------------------------------------------------------------

    def keep(self) -> int:
        """Run it to its end and record that; the exit code for launch."""
        end = End(128 + signal.SIGTERM, signal.SIGTERM)
        crashes: list[float] = []
        self._turn(0)  # a stop may have been asked for already
        while not self.state.stopping:
            self.state.attempt += 1
            end = self._attempt()
            crashes.append(time.monotonic())
            delay = ending.next_attempt(end, crashes, self.run, self.state.stopping)
            if delay is None:
                break
            number = self.state.attempt
            how = f"{ending.how(end)} after {ending.duration(end.seconds)}"
            self.state.ended = {"attempt": number, "how": how}
            self.say(f"attempt {number} ended {how}; attempt {number + 1} starts in {delay:g} s")
            until = crashes[-1] + delay
            while not self.state.stopping and time.monotonic() < until:
                self._turn(until - time.monotonic())
        self._finish(end)
        return end.code

    def say(self, text: str) -> None:
        """A line of launch's own, in the log and on stdout."""
        self._note(text)
        self._save()  # (so that nobody takes it for the trainer's output)

    def _note(self, text: str) -> None:
        line = note(text)
        self.log.write_line(line)
        self._forward.put(line, 1)

    def _attempt(self) -> End:
        self._records, self._tail, self._status, self._told = Records(), Tail(), None, set()
        self.state.output, self.state.output_time = 0, None
        before, began = count_kills(), time.monotonic()
        given = given_environment(os.environb, self.run)
        ends: list[int] = []
        try:
            secrets = read_secrets(self.run)
            run_dir = str(self.directory.path.absolute())
            environment = build_environment(given, secrets, run_dir, self.state.attempt)
            ends += output.make(self.run.tty)
            popen = start(self.run, environment, ends[1])
        except CannotStart as error:
            for descriptor in ends:
                os.close(descriptor)
            self.say(self._banner(0, -1, banner.warnings(given)))
            return End(error.code, sentence=str(error))
        reading, writing = ends
        os.close(writing)
        trainer = read_process(popen.pid)
        assert trainer is not None  # it is ours and was not waited for
        self._family.begin(trainer)
        self._guard.watch(trainer)
        self._note(self._banner(popen.pid, reading, banner.warnings(given)))
        self.state.trainer_pid, self.state.trainer_started = popen.pid, time.time()
        self._save()
        self._pipe, self._age_zero, self._looks = reading, began, list(LOOK_SECONDS)
        self._selector.register(reading, selectors.EVENT_READ, self._on_output)
        while self._status is None:
            self._turn()
        seconds = time.monotonic() - began
        self._clear_up()
        self._drain()
        for block in self._records.end():
            self._forward.put(*block)
        self._look_for_request()
        popen.returncode = os.waitstatus_to_exitcode(self._status)
        self.state.trainer_pid = None
        code, number = ending.from_wait_status(popen.returncode)
        short = False
        if code and not self.state.stopping:
            short = out_of_memory(before, count_kills(), code == 128 + signal.SIGKILL)  # (or a rank's)
        return End(code, number, short, seconds=seconds)

    def _banner(self, pid: int, reading: int, warned: list[str]) -> str:
        self._unproven = bool(pid) and not banner.settled(pid, reading)
        buffering = (
            banner.prove(pid) if pid else banner.Buffering(None, "unknown: the trainer was not started")
        )
        if pid and self.run.tty:
            buffering = banner.on_terminal(pid, buffering)
        return banner.banner(
            self.run,
            self.state.attempt,
            buffering,
            pid=pid,
            python=banner.python_version(pid),
            init=banner.under_init(os.getppid()),
            warned=warned,
            now=time.time(),
        )

    # -- the loop ------------------------------------------------------------------------------------------

    def _turn(self, longest: float = POLL_SECONDS) -> None:
        """Wait for what comes next, at most `longest` s, and do it."""
        now = time.monotonic()
        due = [now + longest, self._poll_at, self._records.due(), self._kill_at]
        timeout = min(moment for moment in due if moment is not None) - now
        for key, _ in self._selector.select(max(timeout, 0)):
            key.data()
        now = time.monotonic()
        for block in self._records.tick(now):
            self._forward.put(*block)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = now + 1.0  # a process may have been forked meanwhile
            self._kill_all()
        if now >= self._poll_at:
            self._poll(now)
            self._poll_at = now + (DUMP_SECONDS if self._dump else POLL_SECONDS)
        self._watch_stdout()

    def _on_output(self) -> None:
        """Take one chunk from the trainer's pipe; it is read again as long as there is more."""
        data = output.take(self._pipe)
        if data is None:
            return
        if not data:
            self._close_pipe()
            return
        self.log.write(data)
        self.state.output += len(data)
        self.state.output_time = time.time()
        for block in self._records.feed(data, time.monotonic()):
            self._forward.put(*block)
        self._tail.feed(data)

    def _close_pipe(self) -> None:
        if self._pipe >= 0:
            self._selector.unregister(self._pipe)
            os.close(self._pipe)
            self._pipe = -1

    def _drain(self) -> None:
        """Take what is in the pipe and close it, also if a process that left the run holds its other end."""
        for _ in range(2 * output.PIPE_BYTES // 4096):
            if self._pipe < 0 or not select.select([self._pipe], [], [], 0)[0]:
                break
            self._on_output()
        self._close_pipe()

    def _watch_stdout(self) -> None:
        wanted = bool(self._forward.waiting) and self._forward.pollable and not self._forward.closed
        if wanted and not self._watching_stdout:
            self._selector.register(self._forward.descriptor, selectors.EVENT_WRITE, self._forward.pump)
        elif self._watching_stdout and not wanted:
            self._selector.unregister(self._forward.descriptor)
        self._watching_stdout = wanted

    def _poll(self, now: float) -> None:
        self._look_for_request()
        self._look_for_stacks(now)
        if self.log.losing:
            self.log.resume()
        if self._forward.waiting and not self._forward.pollable:
            self._forward.pump()
        counted = (self._forward.dropped, self.log.missing)
        if counted != (self.state.stdout_dropped, self.state.log_missing) and now >= self._save_at:
            self._save_at = now + 1.0
            self._save()
        if self._looks and self._status is None and now - self._age_zero >= self._looks[0]:
            self._looks.pop(0)
            self._look_for_buffered()

    def _save(self) -> None:
        self.state.stdout_dropped, self.state.log_missing = self._forward.dropped, self.log.missing
        self.state.offset = self.log.offset
        self.state.time = time.time()
        with contextlib.suppress(OSError):  # a full disk; the next change tries again
            self.directory.write_launch(self.state)

    # -- signals and processes -----------------------------------------------------------------------------

    def _on_signals(self) -> None:
        for number in self._signals.read():
            if number in (signal.SIGTERM, signal.SIGINT):
                self._stop(signal.Signals(number).name)
        self._reap()

    def _reap(self) -> None:
        """Wait for every child that has ended: the trainer, the guard, orphans that came to launch."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                trainer = self._family.trainer
                if trainer is not None and pid == trainer.pid:
                    self._status = status
                elif pid == self._guard.pid:
                    self._guard = Guard(keep=(self._lock,))
                    self._family.not_ours.add(self._guard.pid)
                    if trainer is not None:
                        self._guard.watch(trainer)

    def _stop(self, name: str) -> None:
        """The first time: TERM to the main process alone; the second: to all of the run; then KILL."""
        self._look_for_request()
        self._term_count += 1
        if self.state.stopping is None:
            self.state.stopping = name
        trainer = self._family.trainer if self._status is None else None
        if self._term_count == 1:
            self._kill_at = time.monotonic() + self.run.grace_seconds if trainer else None
            if trainer is not None:
                self.say(f"{name}: TERM to pid {trainer.pid}; KILL after {self.run.grace_seconds:g} s")
                send(trainer, signal.SIGTERM)
        elif self._term_count == 2 and trainer is not None:
            found = self._family.members()
            self.say(f"{name} again: TERM to all {len(found)} processes of the run")
            for process in found:
                send(process, signal.SIGTERM)
        self._save()

    def _kill_all(self) -> None:
        found = self._family.members()
        if found:
            self.say(f"KILL to {describe(found)}: the grace is over")
            for process in found:
                send(process, signal.SIGKILL)

    def _clear_up(self) -> None:
        """End what outlived the main process: it has a moment to go by itself, then TERM, then KILL."""
        self._kill_at = None
        for wait, number in (
            (SETTLE_SECONDS, 0),
            (TERM_SECONDS, signal.SIGTERM),
            (TERM_SECONDS, signal.SIGKILL),
        ):
            found = self._family.members()
            if number and found:
                verb = signal.Signals(number).name[3:]
                self.say(f"{verb} to {describe(found)}: left behind by the trainer")
                for process in found:
                    send(process, number)
            until = time.monotonic() + wait
            while found and time.monotonic() < until:
                self._turn(0.05)
                found = self._family.members()
            if not found:
                return
        self.say(f"{describe(found)} cannot be killed and may hold devices")

    def _look_for_buffered(self) -> None:
        if self.run.tty:
            return  # there they write each line at its end
        pipe = os.readlink(f"/proc/self/fd/{self._pipe}") if self._pipe >= 0 else ""
        main = self._family.trainer.pid if self._family.trainer else 0
        if self._unproven and not banner.wraps(main):
            self._unproven = False
            told = banner.stdout_words(banner.prove(main), main)
            self.say(f"pid {main} has become {banner.program_of(main)}: {told}")
        # The banner told of the main process.
        others = [p for p in self._family.members() if p.pid not in self._told | {main}]
        for pid, why in banner.buffered_writers(others, pipe):
            self._told.add(pid)
            self.say(f"pid {pid} ({command_line(pid)}) holds its output back: {why}")

    # -- requests ------------------------------------------------------------------------------------------

    def _look_for_request(self) -> None:
        try:
            request = self._requests.take()
        except ValueError as error:
            self.say(f"a request was ignored: {error}")
            return
        if request is None:
            return
        if request.action in ("checkpoint-and-stop", "stop") and self.state.stopping is None:
            # Carried out by the trainer itself, or by the signal that follows.
            self.state.stopping = request.by or "request"
            self._save()

    def _look_for_stacks(self, now: float) -> None:
        if self._dump is None:
            try:
                request = self._launch_requests.take()
            except ValueError as error:
                self.say(f"a request was ignored: {error}")
                return
            if request is None or request.action != "dump-stacks":
                return
            members = self._family.members() if self._status is None else []
            self._dump = Dump(request, members, self._heartbeats(), self.state.attempt)
        if self._dump.go_on(now, self.say, lambda: self.log.offset):
            self.state.answered = self._dump.answer(self.log.offset)
            self._dump = None
            self._save()

    def _heartbeats(self) -> dict[int, Heartbeat]:
        try:
            return self.directory.heartbeats()
        except (ValueError, OSError):
            return {}

    # -- the end -------------------------------------------------------------------------------------------

    def _finish(self, end: End) -> None:
        reason, message = ending.conclude(end, self.state.attempt, self.run, self.state.stopping)
        self.say(f"run {self.run.run_id} {message}")
        if end.sentence:
            print(f"trainer.launch: {end.sentence}", file=sys.stderr)
        self.log.close()
        if self._watching_stdout:
            self._selector.unregister(self._forward.descriptor)
        self._forward.flush(*STDOUT_SECONDS)
        self._forward.close()
        step, checkpoint = ending.newest(self._heartbeats().values())
        record = Exit(
            reason=reason,
            code=end.code,
            signal=end.signal,
            out_of_memory=end.out_of_memory,
            attempts=self.state.attempt,
            last_step=step,
            last_checkpoint=checkpoint,
            asked_by=self.state.stopping,
            last_lines=self._tail.lines() if reason == "failed" else [],
            message=message,
            log_bytes=self.log.offset,
            log_missing=self.log.missing,
            stdout_dropped=self._forward.dropped,
        )
        self._save()
        ending.write_exit(self.directory, record, self._reserve)
        self._guard.close()
