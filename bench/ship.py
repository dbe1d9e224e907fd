"""A changed trainer to another machine's engine: python bench/ship.py [--rounds 3] [--small]

Ours (deploy.image, `--build local`) against the usual way without a registry: build here, then `docker save |
ssh docker load`. Both begin with a changed file of trainer/ and end when the other engine has the image that
holds the change. Counted: seconds, and every byte that passes between the two machines. The other machine is
the testbed's gpu-box: a real sshd in a network namespace, with a second engine that reaches no network.

--small: an image with few packages instead of PyTorch. Needs root, and what `make testbed` installs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "e2e")]

from elsewhere import describe, small_checkout, tags, wire_bytes  # noqa: E402
from testbed import base_image, needs  # noqa: E402
from testbed.docker import Docker  # noqa: E402
from testbed.engine import running  # noqa: E402
from testbed.gpubox import ALIAS, GpuBox  # noqa: E402
from testbed.second import SecondEngine  # noqa: E402

from bench._results import percentile, record  # noqa: E402
from deploy import image  # noqa: E402
from deploy.ssh import Ssh  # noqa: E402

USUAL = "drafthouse-bench:usual"


@contextlib.contextmanager
def started(part: SecondEngine | GpuBox) -> Iterator[None]:
    part.start()
    try:
        yield
    finally:
        part.stop()


def measured(box: GpuBox, work: Callable[[], object]) -> tuple[float, int]:
    """(seconds, bytes on the wire) of `work`."""
    began, counted = time.monotonic(), wire_bytes(box.number)
    work()
    return time.monotonic() - began, wire_bytes(box.number) - counted


def usual(box: GpuBox, checkout: Path, base: Docker) -> None:
    """Build here, `docker save | ssh docker load`."""
    base.run("build", "--quiet", "--tag", USUAL, checkout, timeout=1800)
    save = shlex.join([*base.command, "save", USUAL])
    load = shlex.join(["ssh", "-F", str(box.ssh_config), ALIAS, "docker load"])
    script = f"set -o pipefail; {save} | {load}"
    subprocess.run(["bash", "-c", script], check=True, stdout=subprocess.DEVNULL, timeout=1800)


def change(checkout: Path, number: int) -> None:
    with open(checkout / "trainer" / "status.py", "a") as file:
        file.write(f"\nCHANGED = {number}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="changes shipped in each way (default 3)")
    parser.add_argument("--small", action="store_true", help="few packages instead of PyTorch")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    lacking = needs.why_no_root() or needs.why_no_engine() or needs.why_no_sshd()
    if lacking:
        print(f"bench/ship.py is left out: {lacking}")
        return 0
    figures: dict[str, list[tuple[float, int]]] = {"ours": [], "theirs": []}
    with contextlib.ExitStack() as stack:
        here = stack.enter_context(running())
        base_image.provide(here.command)
        second = SecondEngine()
        stack.enter_context(started(second))
        there = Docker(second.url)
        box = GpuBox({**there.environment, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
        stack.enter_context(started(box))
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ.update({**here.environment, **box.environment, "XDG_CACHE_HOME": str(place / "cache")})
        checkout = place / "checkout"
        checkout.mkdir()
        small_checkout(checkout) if options.small else whole_checkout(checkout)
        host = Ssh("gpu-box", python="/usr/bin/python3")
        stack.callback(host.close)
        state = str(box.state)

        def ours() -> None:
            image.ship(host, state, describe(checkout), lambda text: print(f"  {text}", flush=True))

        first = measured(box, ours)
        print(f"the first ship, packages too: {first[0]:.1f} s, {first[1] / 1e6:.1f} MB", flush=True)
        first = measured(box, lambda: usual(box, checkout, here))
        print(f"docker save | ssh docker load: {first[0]:.1f} s, {first[1] / 1e6:.1f} MB", flush=True)
        for number in range(options.rounds):
            change(checkout, number)
            figures["ours"].append(measured(box, ours))
            figures["theirs"].append(measured(box, lambda: usual(box, checkout, here)))
            for who, rows in figures.items():
                print(f"{who:6} {rows[-1][0]:6.1f} s {rows[-1][1] / 1e6:9.2f} MB", flush=True)
        there.run("run", "--rm", describe(checkout).reference, "python", "-c", "import trainer.status")
        size = int(there.run("image", "inspect", "--format", "{{.Size}}", describe(checkout).reference))
        for tag in tags(here) & {USUAL}:
            here.run("image", "rm", "--force", tag)
    kind = f"an image of {size / 1e9:.2f} GB"
    against = "docker build here, docker save | ssh docker load"
    for column, words, unit, scale in ((0, "time", "s", 1.0), (1, "bytes on the wire", "MB", 1e6)):
        medians = {
            who: percentile([row[column] / scale for row in rows], 50) for who, rows in figures.items()
        }
        record(
            f"{words} to ship a change of the trainer, {kind}",
            against,
            ours=medians["ours"],
            theirs=medians["theirs"],
            unit=unit,
            n=options.rounds,
        )
    return 0


def whole_checkout(directory: Path) -> None:
    """What the image is made from, as it is in this checkout."""
    for name in image.FILES:
        shutil.copy(ROOT / name, directory)
    for name in image.CODE:
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))


if __name__ == "__main__":
    sys.exit(main())
