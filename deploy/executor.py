"""Several hosts side by side: ``fab -H a,b deploy``.

Fabric runs a task for one host after the other and stops at the first failure. Here the hosts of one task run
at once, every line says which host it comes from, a failure on one leaves the others alone, and at the end
each host's result is listed. fabric.yaml: ``tasks: {executor_class: deploy.executor.Parallel}``.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import traceback
from typing import Any

from fabric.executor import Executor
from fabric.tasks import ConnectionCall
from invoke import Exit

from deploy import interrupt
from deploy.errors import USAGE, DeployError
from deploy.prefixed import Prefixed

_COLOURS = ("36", "35", "33", "34", "32", "96", "95", "93")  # of hosts, in their order


class Parallel(Executor):
    """Fabric's executor, with the calls of one task for several hosts made at once."""

    def execute(self, *tasks: Any) -> dict[Any, Any]:
        hosts = self.core[0].args.hosts
        if hosts.value is not None:
            hosts.value = ",".join(hosts_of(hosts.value))
        calls = self.expand_calls(self.normalize(tasks))
        for call in calls:  # before any host is touched: one sentence, not one for each
            if isinstance(call, ConnectionCall) and call.kwargs.get("host"):
                given = self.core[0].args.hosts.value
                both = f"-H {given} and --host {call.kwargs['host']} both name hosts"
                raise Exit(f"{both}: use --host for one, or -H for several", code=USAGE)
        results: dict[Any, Any] = {}
        for _, group in itertools.groupby(calls, key=_same_task):
            together = list(group)
            if len(together) == 1:
                results[together[0].task] = self._call(together[0], self.config)
            else:
                self._side_by_side(together)
        return results

    def _call(self, call: Any, config: Any) -> Any:
        config.load_collection(self.collection.configuration(call.called_as))
        config.load_shell_env()
        return call.task(call.make_context(config), *call.args, **call.kwargs)

    def _side_by_side(self, calls: list[Any]) -> None:
        names = [call.init_kwargs["host"] for call in calls]
        ends: dict[str, str] = {}
        codes: dict[str, int] = {}
        width = max(len(name) for name in names)
        out, err = Prefixed(sys.stdout), Prefixed(sys.stderr, quiet=True)

        def work(call: Any, name: str) -> None:
            for stream in (out, err):
                stream.begin(paint(f"{name:{width}} │ ", _COLOURS[names.index(name) % len(_COLOURS)], stream))
            try:
                self._call(call, self.config.clone())
                codes[name], ends[name] = 0, "ok"
            except BaseException as error:
                codes[name], ends[name] = outcome(error)
            finally:
                for stream in (out, err):
                    stream.end()

        # Daemons, so that Ctrl-C ends the command at once: what is under way on a host goes on there.
        threads = [
            threading.Thread(target=work, args=pair, daemon=True) for pair in zip(calls, names, strict=True)
        ]
        if threading.current_thread() is threading.main_thread():  # the tasks, which are elsewhere, do not
            signal.signal(signal.SIGINT, lambda *_: sys.exit(interrupt.CODE))
        stdout, stderr = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = out, err
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C; the streams stay, since the threads go on until the very end
            out.silence()
            err.silence()
            raise
        sys.stdout, sys.stderr = stdout, stderr
        show_results({name: (codes[name], ends[name]) for name in names})
        failed = [name for name in names if codes[name]]
        if failed:
            raise Exit(f"failed on {', '.join(failed)}", code=max(codes[name] for name in failed))


def hosts_of(text: str) -> list[str]:
    """The hosts of -H, each once: two deploys of one name to one host would only meet at its lock."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise Exit(f"-H {text!r} names an empty host; give it like -H gpu-box,other-box", code=USAGE)
    return list(dict.fromkeys(names))


def show_results(results: dict[str, tuple[int, str]]) -> None:
    """A line for each host: how it ended there. Quiet if nobody reads it any more (``| head``)."""
    width = max(len(name) for name in results)
    try:
        for name, (code, end) in results.items():
            print(f"{name:{width}}   {paint(end, '31' if code else '32', sys.stdout)}")
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still in the buffer would be tried once more, and complained about, at the exit.
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


def paint(text: str, colour: str, stream: Any) -> str:
    """`text` in a colour, where that helps (no-color.org)."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{colour}m{text}\x1b[0m"


def outcome(error: BaseException) -> tuple[int, str]:
    """(exit code, words) of how a task ended on one host. Prints the traceback of a programming error."""
    if isinstance(error, DeployError):
        return error.code, str(error)
    if isinstance(error, Exit):
        return error.code, error.message or f"exit code {error.code}" if error.code else "ok"
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return code, f"exit code {code}" if code else "ok"
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    traceback.print_exception(error, file=sys.stderr)
    return 1, f"{type(error).__name__}: {error}"


def _same_task(call: Any) -> Any:
    """Calls of one task with the same arguments, for different hosts, belong together."""
    if not isinstance(call, ConnectionCall):
        return id(call)
    return (call.task, call.called_as, repr(call.args), repr(call.kwargs))
