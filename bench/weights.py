"""Weights to another machine's shared memory: python bench/weights.py [--rounds 7] [--gib 3] [--kills 30]

Ours (deploy.sender) against rsync -W --inplace, scp, tar | ssh, and plain TCP, tmpfs to tmpfs, interleaved
in one run, over a real sshd in a network namespace (the testbed's gpu-box), all with the same cipher. Ours
counts from before the first byte is hashed here until the host has read back the last one; the others verify
nothing. Then: an unchanged push against rsync and rsync -c; staging from a directory on the host against
cp -r; and clients that are killed at random moments, each followed by a push that has to be right.

Needs root, and what `make testbed` installs. Twice the size has to fit into /dev/shm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from testbed import needs  # noqa: E402
from testbed.gpubox import ALIAS, GpuBox  # noqa: E402

from bench._results import percentile, record  # noqa: E402
from deploy import manifest, sender, weights_store  # noqa: E402
from deploy.ssh import Ssh  # noqa: E402

CIPHER = "aes128-gcm@openssh.com"
FILES = 6
READING = 5e9  # bytes a second: what an unchanged push may read with

# What is killed: a client that pushes argv[1] to argv[2], and says the length of each chunk that it begins.
CLIENT = """\
import json, os, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from deploy import manifest, sender
from deploy.ssh import Ssh
wanted = json.loads(Path(sys.argv[3]).read_text())
host = Ssh({alias!r}, interactive=False)
pour = sender._pour
def poured(source, one, out):
    os.write(1, b"%d\\n" % one.length)
    pour(source, one, out)
sender._pour = poured
print("begin", flush=True)
sender.send(host, Path(sys.argv[1]), wanted, sys.argv[2], durable=False, link=False)
"""

# Takes a connection on argv[1]:0, says its port, and writes all that comes into the file argv[2].
SINK = """\
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
buffer = memoryview(bytearray(1 << 20))
with open(sys.argv[2], "wb", buffering=0) as file:
    while count := connection.recv_into(buffer):
        file.write(buffer[:count])
"""


def make(place: Path, count: int) -> None:
    """A directory of incompressible files, `count` bytes in all."""
    place.mkdir(parents=True)
    for number in range(FILES):
        with open(place / f"model-{number}.safetensors", "wb") as file:
            left = count // FILES
            while left:
                left -= file.write(os.urandom(min(left, 16 << 20)))


def seconds(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def run(*argv: str | Path) -> None:
    subprocess.run([str(word) for word in argv], check=True, stdout=subprocess.DEVNULL, timeout=1800)


def tcp(box: GpuBox, source: Path, target: Path) -> None:
    """Every file over one plain connection, with sendfile here."""
    import socket

    sink = subprocess.Popen(
        [
            "ssh",
            "-F",
            str(box.ssh_config),
            ALIAS,
            "cat > /tmp/sink.py; exec python3 /tmp/sink.py " + f"{box.address} {target}",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert sink.stdin
    assert sink.stdout
    sink.stdin.write(SINK.encode())
    sink.stdin.close()
    port = int(sink.stdout.readline())
    with socket.create_connection((box.address, port)) as connection:
        for path in sorted(source.iterdir()):
            with open(path, "rb") as file:
                connection.sendfile(file)
    sink.wait(600)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="pushes in each way (default 7)")
    parser.add_argument("--gib", type=float, default=3.0, help="size of the model (default 3)")
    parser.add_argument("--kills", type=int, default=30, help="clients that are killed (default 30)")
    parser.add_argument("--streams", type=int, default=None, help="connections (default: as fab chooses)")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    lacking = needs.why_no_root() or needs.why_no_sshd()
    if lacking:
        print(f"bench/weights.py is left out: {lacking}")
        return 0
    count = int(options.gib * (1 << 30)) // FILES * FILES
    with contextlib.ExitStack() as stack:
        box = GpuBox()
        box.start()
        stack.callback(box.stop)
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        stack.callback(shutil.rmtree, box.shm, True)
        config = place / "ssh_config"
        config.write_text(f"Ciphers {CIPHER}\nInclude {box.ssh_config}\n")
        os.environ.update(box.environment, DRAFTHOUSE_SSH_CONFIG=str(config))
        host = Ssh(ALIAS, python="/usr/bin/python3", interactive=False)
        stack.callback(host.close)
        host.run(["true"], timeout=60)
        source = place / "model"
        make(source, count)
        bench = Bench(box, host, config, source, count, options.streams)
        if options.rounds:
            bench.push(options.rounds)
            bench.unchanged(options.rounds)
            bench.staging(options.rounds)
        if options.kills:
            bench.kills(options.kills)
    return 0


class Bench:
    def __init__(
        self, box: GpuBox, host: Ssh, config: Path, source: Path, count: int, streams: int | None
    ) -> None:
        self.box, self.host, self.config, self.source, self.count = box, host, config, source, count
        self.streams = streams
        self.ssh = f"ssh -F {config}"
        self.kind = f"{count / (1 << 30):.3g} GiB incompressible, tmpfs to tmpfs over ssh"

    def target(self, digest: str) -> str:
        return f"{self.box.shm}/model@{digest[:12]}"

    def ours(self) -> str:
        wanted = manifest.read(self.source)
        target = self.target(wanted["digest"])
        sent = sender.send(
            self.host, self.source, wanted, target, durable=False, link=True, streams=self.streams
        )
        self.sent = sent
        return target

    def fresh(self) -> None:
        shutil.rmtree(self.box.shm, ignore_errors=True)
        self.box.shm.mkdir(mode=0o755)

    def push(self, rounds: int) -> None:
        remote = f"{ALIAS}:{self.box.shm}/theirs"
        place = f"{self.box.shm}/theirs"
        unpack = f"'mkdir {place}; tar -C {place} -xf -'"
        tar = f"tar -C {self.source} -cf - . | {self.ssh} {ALIAS} {unpack}"
        ways: dict[str, Callable[[], object]] = {
            "ours": self.ours,
            "rsync -W --inplace": lambda: run(
                "rsync", "-a", "-W", "--inplace", "-e", self.ssh, f"{self.source}/", remote
            ),
            "scp": lambda: run("scp", "-q", "-r", "-F", self.config, self.source, remote),
            "tar | ssh tar": lambda: run("bash", "-c", f"set -o pipefail; {tar}"),
            "plain TCP": lambda: tcp(self.box, self.source, self.box.shm / "theirs"),
        }
        figures = self.measured(ways, rounds, self.fresh)
        for against in list(ways)[1:]:
            self.record(
                f"push and verify, {self.kind}, {CIPHER}, {self.sent.streams} streams", figures, against
            )

    def unchanged(self, rounds: int) -> None:
        self.fresh()
        self.ours()
        remote = f"{ALIAS}:{self.box.shm}/theirs"
        run("rsync", "-a", "-W", "--inplace", "-e", self.ssh, f"{self.source}/", remote)
        rsync = ("rsync", "-a", "-e", self.ssh)
        ways: dict[str, Callable[[], object]] = {
            "ours": self.ours,
            "rsync (size and time)": lambda: run(*rsync, f"{self.source}/", remote),
            "rsync -c": lambda: run(*rsync, "-c", f"{self.source}/", remote),
        }
        figures = self.measured(ways, rounds, lambda: None)
        assert self.sent.bytes == 0, "an unchanged push sent something"
        figures["reading at 5 GB/s, and 1 s"] = [self.count / READING + 1]
        for against in list(figures)[1:]:
            self.record(f"unchanged push (all of it read here), {self.kind}", figures, against)

    def staging(self, rounds: int) -> None:
        disk = Path(tempfile.mkdtemp(dir="/var/tmp"))
        try:
            shutil.copytree(self.source, disk / "model")
            digest = manifest.tree_digest(disk / "model")
            ways: dict[str, Callable[[], object]] = {
                "ours": lambda: weights_store.stage(str(disk / "model"), self.target(digest), digest),
                "cp -r": lambda: run("cp", "-r", disk / "model", self.box.shm / "theirs"),
            }
            figures = self.measured(ways, rounds, self.fresh)
            self.record(
                f"stage and verify, {self.kind.partition(',')[0]}, disk (cached) to tmpfs", figures, "cp -r"
            )
        finally:
            shutil.rmtree(disk)

    def kills(self, count: int) -> None:
        """Kill the client at a random moment of a push, then push again: what is sent twice, is it right?"""
        wanted = manifest.read(self.source)
        described = self.config.with_name("wanted.json")
        described.write_text(json.dumps(wanted))
        target = self.target(wanted["digest"])
        client = self.config.with_name("client.py")
        client.write_text(CLIENT.format(root=str(ROOT), alias=ALIAS))
        self.fresh()
        whole, worst, wrong = seconds(lambda: self.ours()), 0.0, 0
        for number in range(count):
            self.fresh()
            process = subprocess.Popen(
                [sys.executable, client, self.source, target, described],
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            assert process.stdout
            process.stdout.readline()
            time.sleep(random.uniform(0, whole))
            process.send_signal(random.choice([signal.SIGKILL, signal.SIGTERM]))
            begun = sum(int(line) for line in process.stdout.read().split())
            process.wait()
            again = sender.send(self.host, self.source, wanted, target, durable=False, link=False)
            twice = (again.bytes - (self.count - begun)) / max(1, self.sent.streams) / wanted["chunk"]
            worst = max(worst, twice)
            wrong += bool(manifest.verify(Path(target)))
            shown = f"{begun / 1e6:.0f} MB were begun, {again.bytes / 1e6:.0f} MB were missing"
            print(f"{number}: {shown}; worst {worst:.2f}", flush=True)
        print(f"{count} kills: at most {worst:.2f} chunks per stream sent again, {wrong} copies wrong")
        record(
            f"bytes sent again after a kill, per stream, {self.kind}, {count} kills",
            "one chunk",
            ours=worst,
            theirs=1.0,
            unit="chunks",
            n=count,
        )
        assert not wrong

    def measured(
        self, ways: dict[str, Callable[[], object]], rounds: int, before: Callable[[], None]
    ) -> dict[str, list[float]]:
        figures: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, work in ways.items():
                before()
                figures[way].append(seconds(work))
                rate = self.count / figures[way][-1] / 1e6
                print(f"{way:24} {figures[way][-1]:6.2f} s {rate:7.0f} MB/s", flush=True)
        return figures

    def record(self, claim: str, figures: dict[str, list[float]], against: str) -> None:
        ours, theirs = (percentile(figures[way], 50) for way in ("ours", against))
        record(claim, against, ours=ours, theirs=theirs, unit="s", n=len(figures["ours"]))


if __name__ == "__main__":
    sys.exit(main())
