"""What all tests share: the testbed's fixtures, and which tests this machine can run."""

import os

# As in trainer/__main__.py, before anything imports torch: tests run beside other work, and threads that spin
# while they wait made small models six times slower there.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

pytest_plugins = ["testbed.fixtures", "testbed.selection"]
