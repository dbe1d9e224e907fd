"""What all tests share: the testbed's fixtures, and which tests this machine can run."""

pytest_plugins = ["testbed.fixtures", "testbed.selection"]
