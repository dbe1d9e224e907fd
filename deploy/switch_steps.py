"""What a switch does, step by step: ask, stop, point to the release, start, and see the new run live.

Runs ON the host as a part of `deploy.switch_job`. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploy import adopt_process, adopted_stop, contained, contained_pct, files, gpus, procfs
from deploy.sizes import age
from trainer import status

KILL_MARGIN = 10.0  # seconds that launch gets beyond the run's grace to kill the trainer and write exit.json
GONE_TIMEOUT = 10.0  # seconds after a KILL
START_TIMEOUT = 60.0  # seconds until launch holds the run's lock; an image may come from a cold disk
FIRST_STEP_TIMEOUT = 3600.0  # seconds; loading and compiling a large target takes many minutes
DEVICES_TIMEOUT = 60.0  # seconds until those who have this name's devices open have closed them
LOOK_AT_DEVICES = 0.25  # seconds between two looks through all processes
SETTLED = 10.0  # seconds that a command without heartbeats must live where something is rolled back otherwise
PAUSE = 0.05  # seconds between two looks


class Failed(Exception):
    """A step that must succeed did not."""

    def __init__(self, reason: str, last_lines: list[str] | None = None, exit: Any = None) -> None:
        super().__init__(reason)
        self.last_lines = last_lines or []
        self.exit = exit


class Switch:
    """The steps of one switch. Each returns (outcome, detail) or raises Failed."""

    def __init__(self, spec: dict[str, Any], started: Callable[[], None]) -> None:
        """`started` is called once the new run is alive: from there on the switch only looks."""
        self.spec = spec
        self.started = started
        self.name = Path(spec["state_root"]) / "names" / spec["name"]
        self.old = status.RunDir(spec["old_run_path"]) if spec["old_run_path"] else None
        self.new = status.RunDir(spec["run_path"]) if spec["start"] else None
        self.process: subprocess.Popen[bytes] | None = None
        self.container: contained.Container | contained_pct.PctContainer | None = None  # of the new run
        self.begun = False  # whether anything of the new run may have been started
        self.links: tuple[str | None, str | None] = (None, None)  # current and previous, before
        self.restores: tuple[str | None, str | None] | None = None  # ... of the switch that this one undoes

    def steps(self) -> list[tuple[str, Callable[[], tuple[str, str]]]]:
        stop = [("checkpoint-request", self.request_checkpoint), ("stop", self.stop)]
        if not self.new:
            return stop
        start = [
            ("release", self.point_to_release),
            ("start", self.start),
            ("first-line", self.first_line),
            ("first-heartbeat", self.first_heartbeat),
        ]
        if self.spec["start"].get("devices"):
            start.insert(0, ("devices", self.wait_for_devices))
        if self.spec.get("wait_first_step") or self.spec.get("rollback"):
            start.append(("first-step", self.first_step))
        elif self.spec.get("settle_seconds") and not self.spec.get("heartbeats", True):
            start.append(("settled", self.settle))
        return stop + start

    def request_checkpoint(self) -> tuple[str, str]:
        """Ask before any signal: frameworks below the trainer may give it only seconds after TERM."""
        old = self.old
        if old is None or not old.alive():
            return "skipped", "no run is in progress"
        beats = heartbeats(old)
        if not beats:
            return "skipped", "this run sends no heartbeats, so it cannot be asked"
        if not any(beat.step for beat in beats if beat.trains):
            return "skipped", "no step was taken yet: there is nothing to save"
        seconds = self.spec["checkpoint_timeout_seconds"]
        if not seconds:
            return "skipped", "not wanted"
        began = time.monotonic()
        try:
            request = old.ask("checkpoint", self.spec["by"])
        except OSError as error:  # a full disk, on which it could not save either
            raise Failed(self.unsaved(f"not be asked to save: {error.strerror}")) from None

        def answer() -> Any:
            for beat in heartbeats(old):
                if beat.answered and beat.answered.get("id") == request.id:
                    return beat.answered
            return None if old.alive() else {"outcome": "done", "ended": True}

        answered = wait(answer, seconds)
        if answered is None:
            return "failed", f"no answer within {seconds:g} s; going on with SIGTERM"
        if answered.get("ended"):
            return "ok", "the run ended meanwhile"
        if answered.get("outcome") != "done":
            raise Failed(self.unsaved(f"not save: {answered.get('outcome')}"))
        return "ok", f"saved after {time.monotonic() - began:.1f} s"

    def unsaved(self, why: str) -> str:
        assert self.old is not None
        return (
            f"run {self.old.path.name} goes on, because it could {why}; put that right and try again, or "
            "give up what it has learnt since: fab stop --no-checkpoint"
        )

    def stop(self) -> tuple[str, str]:
        old = self.old
        if old is None:
            return "skipped", "no run is in progress"
        if not old.alive():
            self.clear_left_behind(old)
            return "skipped", "no run is in progress"
        known = adopt_process.adopted(old)
        if known:
            return self.stop_adopted(old, known)
        began = time.monotonic()
        try:
            old.ask("stop", self.spec["by"])
            asked = True
        except OSError:  # a full disk must not keep a run from being stopped
            asked = False
        words = self.signal_run(old, signal.SIGTERM)
        patience = self.spec["grace_seconds"] + KILL_MARGIN
        if not wait(lambda: not old.alive(), patience):
            words += f", still there after {patience:g} s, {self.signal_run(old, signal.SIGKILL)}"
            if not wait(lambda: not old.alive(), GONE_TIMEOUT):
                raise Failed(f"run {old.path.name} is still there {GONE_TIMEOUT:g} s after SIGKILL")
        self.clear_left_behind(old)
        exit = old.exit()
        if exit is None:  # launch was killed; its last word is written for it, so that the run has an end
            message = f"did not end within {patience:g} s and was killed"
            exit = status.Exit("stopped", 137, signal=9, asked_by=self.spec["by"], message=message)
            with contextlib.suppress(OSError):
                old.write_exit(exit)
        elif not asked and exit.asked_by == signal.SIGTERM.name:  # it could not know whose signal it was
            exit.message = exit.message.replace(
                f"stopped by {exit.asked_by}", f"stopped by {self.spec['by']}"
            )
            exit.asked_by = self.spec["by"]
            with contextlib.suppress(OSError):  # there is room: launch has let go of what it kept for its end
                old.write_exit(exit)
        return "ok", f"{words}; ended after {time.monotonic() - began:.1f} s with exit code {exit.code}"

    def stop_adopted(self, old: status.RunDir, known: dict[str, Any]) -> tuple[str, str]:
        """End a process that was started by hand, and what it has started: these, and no others."""
        try:
            how, code = adopted_stop.stop(known, self.spec["grace_seconds"])
        except adopted_stop.Stays as error:
            raise Failed(str(error)) from None
        message = f"process {known['pid']}, which was adopted, was stopped by {self.spec['by']}"
        exit = status.Exit("stopped", code, signal=code - 128, asked_by=self.spec["by"], message=message)
        with contextlib.suppress(OSError):
            old.write_exit(exit)
        return "ok", how

    def signal_run(self, run: status.RunDir, number: signal.Signals) -> str:
        """Signal a run, through its container if it has one; what was sent, in words."""
        container = contained.of(run)
        if container is None:
            self.signal_launch(run, number)
            return number.name
        try:
            return container.signal(number)
        except ProcessLookupError:
            return number.name
        except OSError as error:
            raise Failed(f"run {run.path.name} cannot be stopped: {error.strerror}") from None

    def signal_launch(self, run: status.RunDir, number: signal.Signals) -> None:
        """Signal the run's launch. Its pid counts only if that process holds the run's lock file open.

        In a container that nobody could note, launch knows itself by another number; then the lock tells it.
        """

        def launch_pid() -> int | None:
            launch = run.launch()
            if launch and procfs.has_open(launch.pid, str(run.lock)):
                return launch.pid
            return procfs.holding(str(run.lock), procfs.processes()) if launch else None

        pid = wait(lambda: launch_pid() or not run.alive(), START_TIMEOUT)  # it may only just begin
        if pid is True:
            return
        if pid is None:
            raise Failed(
                f"run {run.path.name} is in progress, but its process cannot be told for certain: "
                "stop it as the user who started it"
            )
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        except PermissionError:
            raise Failed(
                f"process {pid} of run {run.path.name} belongs to another user: stop it as that user"
            ) from None

    def clear_left_behind(self, run: status.RunDir) -> None:
        """Nothing of the run's session may outlive it: it would hold the devices of the next one."""
        container = contained.of(run)
        if container:
            self.clear_container(run, container)
            return
        launch = run.launch()
        session = (launch.trainer_pid if launch else None) or 0

        def left() -> list[int]:
            return procfs.left_behind(str(run.path), session, procfs.processes())

        if wait(lambda: not left(), GONE_TIMEOUT if left() else 0):
            return
        for pid in left():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not wait(lambda: not left(), GONE_TIMEOUT):
            pids = ", ".join(str(pid) for pid in left())
            raise Failed(f"process {pids} of run {run.path.name} cannot be ended")

    def clear_container(
        self, run: status.RunDir, container: contained.Container | contained_pct.PctContainer
    ) -> None:
        """The same for a container: all in it ends with its first process.

        It is kept until the next one takes its place, so that its last lines can be read.
        """
        if wait(lambda: not container.running(), GONE_TIMEOUT):
            return  # (or the engine does not say; then the run's lock has said it)
        with contextlib.suppress(OSError):
            container.signal(signal.SIGKILL)
        if not wait(lambda: not container.running(), GONE_TIMEOUT):
            raise Failed(f"{container.words()} of run {run.path.name} cannot be ended")

    def wait_for_devices(self) -> tuple[str, str]:
        """A process that outlives its run may hold memory of a device that no tool lists."""
        devices = gpus.chosen(self.spec["start"]["devices"])
        if not devices:
            return "skipped", "no device file of this run is there yet; the engine makes them at the start"
        by_path = {device["path"]: device["index"] for device in devices}
        daemons: set[str] = set()

        def held() -> list[tuple[int, dict[str, Any]]]:
            found = [(by_path[path], one) for path, those in gpus.holders(by_path).items() for one in those]
            daemons.update(
                os.path.basename(one["command"].split(" ")[0]) for _, one in found if one["daemon"]
            )
            return [(index, one) for index, one in found if not one["daemon"]]

        seconds = self.spec.get("devices_timeout_seconds", DEVICES_TIMEOUT)
        began = time.monotonic()
        free = wait(lambda: not held(), seconds, LOOK_AT_DEVICES)
        if not free:
            who = "; ".join(
                f"device {index} is held by pid {one['pid']} ({cut(one['command'])}), "
                f"which is {'of unknown age' if one['age'] is None else age(one['age']) + ' old'}"
                for index, one in held()[:4]
            )
            raise Failed(
                f"{who or 'the devices were held'}, {seconds:g} s after the stop, so nothing was started"
                f"{self.saved()}; end that process, then deploy again"
            )
        indices = ", ".join(str(index) for index in sorted(by_path.values()))
        also = f" ({', '.join(sorted(daemons))} may stay)" if daemons else ""
        waited = time.monotonic() - began
        return "ok", f"{indices} free{f' after {waited:.1f} s' if waited > 0.5 else ''}{also}"

    def saved(self) -> str:
        """What is left of the old run, for a sentence that says what went wrong after its end."""
        with contextlib.suppress(ValueError, OSError):
            exit = self.old.exit() if self.old else None
            step = (exit.last_checkpoint or {}).get("step") if exit else None
            if step is not None:
                return f"; the checkpoint of step {step} of run {self.old.path.name} is safe"  # type: ignore[union-attr]
        return ""

    def point_to_release(self) -> tuple[str, str]:
        self.links = (read_link(self.name / "current"), read_link(self.name / "previous"))
        wanted = f"releases/{self.spec['release_id']}"
        current = read_link(self.name / "current")
        if self.restores is not None and self.restores[0] == wanted:
            return self.restore_links(wanted)
        if current == wanted:
            return "skipped", f"{self.spec['release_id']} is current already"
        before_that = self.links[1]
        if current and (before_that in (None, wanted) or self.lived(os.path.basename(current))):
            files.replace_link(self.name / "previous", current)
        files.replace_link(self.name / "current", wanted)
        before = f", before {os.path.basename(current)}" if current else ""
        return "ok", f"current is {self.spec['release_id']}{before}"

    def lived(self, release_id: str) -> bool:
        """Whether any run of a release came so far as to start; true if there are none to tell.

        One that never did is nothing to go back to, and must not take the place of one that is.
        """
        found = []
        for run in status.list_runs(Path(self.spec["state_root"]) / "runs", self.spec["name"]):
            with contextlib.suppress(ValueError, OSError):
                made = run.run()
                if made and (made.release or {}).get("id") == release_id:
                    found.append(run)
        return not found or any((run.path / "launch.json").exists() for run in found)

    def restore_links(self, wanted: str) -> tuple[str, str]:
        """As they were: the release that failed is nothing to go back to."""
        assert self.restores is not None
        files.replace_link(self.name / "current", wanted)
        if self.restores[1]:
            files.replace_link(self.name / "previous", self.restores[1])
        elif (self.name / "previous").is_symlink():
            os.unlink(self.name / "previous")
        return "ok", f"current is {self.spec['release_id']} again"

    def died(self) -> bool:
        """Whether the new run was begun and is over although nobody asked for that."""
        if self.new is None or not self.begun or self.new.alive():
            return False
        with contextlib.suppress(ValueError, OSError):
            exit = self.new.exit()
            return exit is None or exit.reason == "failed"
        return True

    def start(self) -> tuple[str, str]:
        new, start = self.run(), self.spec["start"]
        self.begun = True
        if start.get("container"):
            return self.start_container()
        with open(new.path / "launch.err", "ab") as errors:
            try:
                process = procfs.begin(start, errors)
            except OSError as error:
                raise Failed(f"{start['argv'][0]} cannot be started: {error.strerror}") from None
        self.process = process
        self.wait_for_launch()
        return "ok", f"process {process.pid}"

    def start_container(self) -> tuple[str, str]:
        """Let the name's links, which the container mounts, lead to this run, and make the container."""
        new = self.run()
        files.replace_link(self.name / "run", os.path.relpath(new.path, self.name))
        made = new.run()
        secrets = made.secrets_file if made else None
        if secrets:
            files.replace_link(self.name / "secrets", os.path.relpath(secrets, self.name))
        elif (self.name / "secrets").is_symlink():
            os.unlink(self.name / "secrets")
        self.container, problem, said = contained.up(new, self.spec["start"])
        if problem:
            raise Failed(problem, said[-5:])
        assert self.container is not None
        self.wait_for_launch()
        return "ok", self.container.words()

    def wait_for_launch(self) -> None:
        """Until launch holds the run's lock. Raises Failed if it ends before."""
        new = self.run()
        seconds = self.spec.get("start_timeout_seconds", START_TIMEOUT)
        began = wait(lambda: new.alive() or self.end_of_run(), seconds)
        if not began:
            words = self.last_words()
            self.give_up()
            raise Failed(f"run {new.path.name} did not begin within {seconds:g} s and was ended", words)
        if began is not True and not new.exit():
            raise Failed(began, self.last_words())
        self.started()

    def give_up(self) -> None:
        """End what was started, so that it does not begin after all while something else runs."""
        with contextlib.suppress(OSError):
            if self.container:
                self.container.signal(signal.SIGKILL)
            elif self.process:
                os.killpg(self.process.pid, signal.SIGKILL)

    def first_line(self) -> tuple[str, str]:
        return "ok", self.wait_for(lambda: "".join(first_lines(self.run(), 1)), "line of output")

    def first_heartbeat(self) -> tuple[str, str]:
        if not self.spec.get("heartbeats", True):
            return self.first_output()

        def beating() -> str:
            return next((beat.phase for beat in heartbeats(self.run())), "")

        return "ok", self.wait_for(beating, "heartbeat")

    def first_step(self) -> tuple[str, str]:
        """The first step of training itself: until then loading or compiling may still fail."""
        seconds = self.spec.get("first_step_timeout_seconds", FIRST_STEP_TIMEOUT)
        if not self.spec.get("heartbeats", True):
            return self.settle(max(SETTLED, self.spec.get("settle_seconds") or 0), seconds)

        def step() -> str:
            beats = [beat for beat in heartbeats(self.run()) if beat.last_step_time and beat.trains]
            return f"step {max(beat.step for beat in beats)}" if beats else ""

        return "ok", self.wait_for(step, "step", seconds)

    def settle(self, seconds: float = 0, timeout: float = FIRST_STEP_TIMEOUT) -> tuple[str, str]:
        """A command of one's own tells no steps; but what dies at once did not take one.

        One attempt of it has to live for so long (default: settle_seconds): launch may start several, for
        which there is `timeout` besides.
        """
        seconds = seconds or self.spec["settle_seconds"]
        began: float | None = None  # the attempt that we see, by the time of its start
        since = 0.0

        def lives() -> str:
            nonlocal began, since
            launch = self.run().launch()
            found = launch.trainer_started if launch and launch.trainer_pid else None
            if found is None or found != began:
                began, since = found, time.monotonic()
            long = began is not None and time.monotonic() - since >= seconds and self.run().alive()
            return f"alive for {seconds:g} s (a command of your own tells no steps)" if long else ""

        return "ok", self.wait_for(lives, "sign of life", seconds + timeout)

    def first_output(self) -> tuple[str, str]:
        """Of a command without heartbeats: its first output (the line after the banner), or that it lives."""
        since = time.monotonic()

        def sign() -> str:
            if len(first_lines(self.run(), 2)) > 1:
                return "the first output is there"
            return f"alive for {SETTLED:g} s" if time.monotonic() - since > SETTLED else ""

        return "ok", self.wait_for(sign, "sign of life") + " (a command of your own sends no heartbeats)"

    # -- helpers of the steps ------------------------------------------------------------------------------

    def run(self) -> status.RunDir:
        assert self.new is not None
        return self.new

    def wait_for(self, sign: Callable[[], str], what: str, seconds: float | None = None) -> str:
        """Wait for a `sign` of the new run. Raises Failed if it ends before, or gives none in time."""
        seconds = self.spec["first_heartbeat_timeout_seconds"] if seconds is None else seconds
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            ended = self.end_of_run()  # looked at first: what it left before its end still counts
            found = sign()
            if found:
                return found
            if ended:
                exit = self.run().exit()
                if exit and exit.reason == "finished":
                    return "finished"
                raise Failed(ended, self.last_words(), vars(exit) if exit else None)
            time.sleep(PAUSE)
        raise Failed(f"no {what} within {seconds:g} s; the run is still in progress", self.last_words())

    def end_of_run(self) -> str:
        """How the new run ended, as a sentence; empty while it has not."""
        new = self.run()
        code = self.process.poll() if self.process else None
        # The engine is asked before the files are read: what an ended container has left is all there then.
        words = self.container.end_words() if self.container and not new.alive() else ""
        if code is None and not words and (new.alive() or not new.exit()):
            return ""
        exit = new.exit()
        if exit:
            said = f": {exit.message}" if exit.message else ""
            return f"run {new.path.name} {exit.reason} with exit code {exit.code}{said}"
        if words and new.launch():
            return f"run {new.path.name} was ended with its container: {words}"
        how = f"container: {words}" if words else f"launch: exit code {code}"
        return f"run {new.path.name} ended before it began ({how})"

    def last_words(self) -> list[str]:
        """The last lines of the run, or what launch itself complained about."""
        exit = self.run().exit()
        if exit and exit.last_lines:
            return [str(line) for line in exit.last_lines]
        printed = last_lines(self.run(), 20)
        if printed:
            return printed
        if self.container:
            return self.container.last_lines()
        with contextlib.suppress(OSError):
            text = (self.run().path / "launch.err").read_text(encoding="utf-8", errors="replace")
            return text.splitlines()[-20:]
        return []


def wait(look: Callable[[], Any], seconds: float, pause: float = PAUSE) -> Any:
    """The first true value of `look`, which is asked at least once; None after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() >= deadline:
            return None
        time.sleep(pause)


def cut(text: str, length: int = 80) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def heartbeats(run: status.RunDir) -> list[status.Heartbeat]:
    """The heartbeats of the attempt in progress; none if a file is not ours."""
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        launch = run.launch()
        attempt = launch.attempt if launch else 1
        return [beat for beat in run.heartbeats().values() if beat.attempt >= attempt]
    return []


def first_lines(run: status.RunDir, count: int) -> list[str]:
    """Up to `count` complete lines from the beginning of the run's log."""
    with contextlib.suppress(OSError, IndexError):
        segment = sorted(entry for entry in os.listdir(run.log) if entry.endswith(".log"))[0]
        with open(run.log / segment, "rb") as file:
            lines = file.read(65536).splitlines(keepends=True)
        return [line.decode("utf-8", "replace").rstrip() for line in lines if line.endswith(b"\n")][:count]
    return []


def last_lines(run: status.RunDir, count: int) -> list[str]:
    """Up to `count` lines from the end of the run's log."""
    with contextlib.suppress(OSError, IndexError):
        segment = sorted(entry for entry in os.listdir(run.log) if entry.endswith(".log"))[-1]
        with open(run.log / segment, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            lines = file.read().decode("utf-8", "replace").splitlines()
        return [line.rstrip() for line in lines if line.strip()][-count:]
    return []


def read_link(path: Path) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None
