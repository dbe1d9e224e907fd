"""Real parts for the tests, on a bare machine: a Docker engine, Compose, a base image, an SSH server.

Each part is brought up by the tests that need it, lives apart from what else is on the machine (own network
namespace, own directories, own ports), and is taken away again. By hand:

    python3 -m tests.testbed install     what the parts need, by apt (as root)
    python3 -m tests.testbed doctor      what this machine lacks
    python3 -m tests.testbed up          the engine, until `down`; prints how to use it
    python3 -m tests.testbed down        everything away, also what an interrupted session left
    python3 -m tests.testbed check       fails if anything of ours is still there

Standard library only, so that it runs before anything is installed. docs/testing.md has the rest.
"""
