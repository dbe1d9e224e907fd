"""Tests that this machine cannot run are left out, and named at the end with the reason.

With DRAFTHOUSE_NOTHING_LEFT_OUT=1 (as in CI) leaving something out is a failure: a part that is missing there
would otherwise pass for a tested one.

With several workers (pytest-xdist) each of them collects; what it leaves out reaches the summary through its
`workeroutput`. What there is only one of for a session, such as the engine, is used by one worker alone.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from . import needs

SETUP_SECONDS = 1800  # for the first test that needs the image: a base system, an image with torch
GIVES_WAY = 5  # niceness of what may run on any worker
ONE_FOR_ALL = {"engine", "toy_cache"}  # fixtures whose tests go to one worker
REASONS = {
    "root": needs.why_no_root,
    "engine": needs.why_no_engine,
    "sshd": needs.why_no_sshd,
    "boot": needs.why_no_boot,
    "bare": needs.why_no_bare,
    "pve": needs.why_no_pve,
}


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Selection(), "drafthouse-selection")


class Selection:
    """One session's tests that were not run, by reason."""

    def __init__(self) -> None:
        self.strict = os.environ.get("DRAFTHOUSE_NOTHING_LEFT_OUT", "") not in ("", "0")
        self.left_out: dict[str, list[str]] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        if ONE_FOR_ALL & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group("testbed"))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """What one worker has to run, test after test, is what the others would wait for at the end."""
        if hasattr(item.config, "workerinput") and os.geteuid() == 0:
            first = ONE_FOR_ALL & set(getattr(item, "fixturenames", ()))
            os.setpriority(os.PRIO_PROCESS, 0, 0 if first else GIVES_WAY)

    @pytest.hookimpl(trylast=True)  # after -m and -k: what nobody asked for is not left out
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        lacking = {marker: reason for marker, why in REASONS.items() if (reason := why())}
        dropped = []
        for item in list(items):
            if item.get_closest_marker("engine") and not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(SETUP_SECONDS))
            reason = next((lacking[mark.name] for mark in item.iter_markers() if mark.name in lacking), None)
            for mark in item.iter_markers("program"):
                reason = reason or needs.why_no_program(mark.args)
            if reason is not None:
                items.remove(item)
                dropped.append(item)
                self.leave_out(reason, item.nodeid)
        if dropped:
            config.hook.pytest_deselected(items=dropped)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):  # a skip leaves a test out just the same
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self.leave_out(reason, report.nodeid)

    def leave_out(self, reason: str, test: str) -> None:
        tests = self.left_out.setdefault(reason, [])
        if test not in tests:
            tests.append(test)

    @pytest.hookimpl(optionalhook=True)  # in the process that has the workers
    def pytest_testnodedown(self, node: Any) -> None:
        for reason, tests in getattr(node, "workeroutput", {}).get("left_out", {}).items():
            for test in tests:
                self.leave_out(reason, test)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["left_out"] = self.left_out
            return
        if not self.left_out:
            return
        if self.strict and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        elif session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK  # all that was asked for needs more than this machine has

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.left_out:
            return
        count = sum(len(tests) for tests in self.left_out.values())
        verdict = " (a failure: here nothing may be)" if self.strict else ""
        terminalreporter.section(f"left out: {count}{verdict}", yellow=True)
        for reason, tests in self.left_out.items():
            terminalreporter.write_line(f"{len(tests)} because {reason}:")
            for test in tests:
                terminalreporter.write_line(f"  {test}")
