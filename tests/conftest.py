"""What all tests share: the testbed's fixtures, and which tests this machine can run."""

import os
import signal
from collections.abc import Iterator

import forked_onhost
import hypothesis
import pytest

from deploy.host import Local

# As in trainer/__main__.py, before anything imports torch: tests run beside other work, and threads that spin
# while they wait made small models six times slower there.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# What tests deploy must not start when the developer's machine does. Tests of that take it away again.
os.environ["DRAFTHOUSE_BOOT"] = "no"

# A shell that starts us in the background has these ignored, and what is ignored stays so in every program
# that is started from here: then no Ctrl-C could be tested.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

# On a machine with other work to do, how long an example takes says nothing of it.
hypothesis.settings.register_profile("any-machine", deadline=None)
hypothesis.settings.load_profile("any-machine")

pytest_plugins = ["testbed.fixtures", "testbed.selection"]


@pytest.fixture(scope="session", autouse=True)
def _forks_for_this_machine() -> Iterator[None]:
    """Our scripts for this machine start quickly, in every test but those with `starts_python`."""
    end = forked_onhost.use()
    yield
    end()


@pytest.fixture
def starts_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our scripts for this machine have a Python started, as they have outside of tests."""
    monkeypatch.setattr(Local, "_start", forked_onhost.REAL)
