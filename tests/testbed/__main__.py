"""The testbed by hand; see the package's docstring."""

from __future__ import annotations

import argparse
import signal
import sys

from . import base_image, engine, gpubox, leftovers, needs
from .docker import Compose, Docker
from .pct import box as pve
from .pct import rootfs
from .place import CHECKOUT, TestbedError, work_directory


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m tests.testbed", description="Real parts for the tests.")
    tasks = parser.add_subparsers(dest="task", required=True, metavar="TASK")
    for name, function in TASKS.items():
        tasks.add_parser(name, help=function.__doc__)
    try:
        return TASKS[parser.parse_args().task]()
    except TestbedError as error:
        print(error, file=sys.stderr)
        return 1


def install() -> int:
    """install by apt what the parts need (as root)"""
    packages = needs.install()
    print(f"installed: {' '.join(packages)}" if packages else "nothing to install")
    return 0


def doctor() -> int:
    """say what this machine can bring up"""
    parts = {
        "root": needs.why_no_root(),
        "engine": needs.why_no_engine(),
        "sshd": needs.why_no_sshd(),
        "boot": needs.why_no_boot(),
        "bare": needs.why_no_bare(),
        "pve": needs.why_no_pve(),
    }
    for part, why in parts.items():
        print(f"{part:8}{why or 'yes'}")
    return 0


def prepare() -> int:
    """make what tests begin with in the work directory: base images, the product's, a container's files"""
    work_directory().mkdir(parents=True, exist_ok=True)
    with engine.preparing(), engine.running() as docker:
        base_image.provide(docker.command)
        Compose(docker, CHECKOUT / "compose.yaml").run("build", timeout=1200)
    rootfs.provide()  # not before: the engine's tests are what takes long, and they wait for the images
    return 0


def up() -> int:
    """bring up the engine with its base images, until Ctrl-C"""
    work_directory().mkdir(parents=True, exist_ok=True)
    own = engine.Engine()
    own.start()
    try:
        docker = Docker(own.url)
        base_image.provide(docker.command)
        print("The engine is up; Ctrl-C ends it. To use it from another shell:")
        print("\n".join(f"export {key}={value}" for key, value in docker.environment.items()), flush=True)
        for number in (signal.SIGINT, signal.SIGTERM):  # a background job of a shell ignores SIGINT
            signal.signal(number, signal.default_int_handler)
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        own.stop()
    return 0


def down() -> int:
    """take away what an interrupted session left"""
    for number in gpubox.left():
        gpubox.remove_namespace(number)
        pve.remove_cgroups(f"drafthouse-box{number}")
    lock = engine.take_lock()
    engine.stop_leftovers()
    engine.LOCK.unlink(missing_ok=True)
    del lock  # released when this process ends
    return 0


def check() -> int:
    """fail if anything of a test session is still there"""
    lines = leftovers.found()
    for line in lines:
        print(f"left behind: {line}", file=sys.stderr)
    return 1 if lines else 0


TASKS = {"install": install, "doctor": doctor, "prepare": prepare, "up": up, "down": down, "check": check}

if __name__ == "__main__":
    sys.exit(main())
