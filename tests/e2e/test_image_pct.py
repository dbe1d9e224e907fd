"""The image in both forms that a Proxmox host takes: built by a real engine, booted by real LXC, trained in.

A real image with PyTorch is 1.8 GB, and to pack, bring and unpack it twice would take minutes. So PyTorch
and the other packages are not in this one: whatever container starts on this host, they are mounted to where
its venv has them. All else is as the host's owner has it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from elsewhere import Settings, small_checkout
from fabbed import FAB, of_checkout
from forked import Popen
from testbed.base_image import SMALL
from testbed.docker import Docker
from testbed.gpubox import ALIAS
from testbed.pct.box import PveBox
from testbed.place import CHECKOUT

from deploy import image_tasks, zstd
from deploy.pct_form import Archive, Form

pytestmark = [
    *(pytest.mark.engine, pytest.mark.pve, pytest.mark.sshd, pytest.mark.slow),
    pytest.mark.timeout(900),
]

# What LXC reads for every container there; a directory of the box's.
EVERY = "/usr/share/lxc/config/common.conf.d"
PACKAGES = "opt/venv/lib/python3.11/site-packages"
COMPILED = "opt/compiled"  # where Python looks for what was compiled of them, if that is kept elsewhere
MOUNTED = "lxc.mount.entry = {source} {target} none bind,ro,create=dir 0 0\n"
SHM = "lxc.mount.entry: shm dev/shm tmpfs rw,nosuid,nodev,mode=1777,size=1073741824,create=dir 0 0"

# Init's own child: says what it has, and how it ended.
WORK = """\
import os, signal, sys, time
place = "/var/lib/drafthouse"
def end(number, frame):
    open(f"{place}/ended", "w").write(signal.Signals(number).name)
    sys.exit(0)
for number in (signal.SIGTERM, signal.SIGPWR, signal.SIGINT):
    signal.signal(number, end)
open(f"{place}/began", "w").write(f"{os.getuid()}:{os.getgid()} {os.getcwd()} {sys.stdout.write_through}")
while True:
    time.sleep(60)
"""
ASK = "import os, sys; print(os.environ['PYTHONUNBUFFERED'], sys.stdout.write_through, sys.prefix)"


class Owner:
    """A checkout of somebody's who has a Proxmox host called pve, and `fab` in it."""

    def __init__(self, box: PveBox, engine: Docker, root: Path) -> None:
        self.box, self.root = box, small_checkout(root)
        for name in ("deploy", "templates"):
            shutil.copytree(CHECKOUT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(CHECKOUT / "fabfile.py", root)
        top = {"drafthouse": {"hosts": {"pve": {"address": ALIAS}}}}
        (root / "fabric.yaml").write_text(yaml.safe_dump(top))
        recipe = yaml.safe_load((root / "runs" / "demo.yaml").read_text())
        recipe |= {"image": {"base": SMALL}, "settle_seconds": 0}
        recipe["environment"] = {"DRAFTHOUSE_TOY": "tiny", "PYTHONPYCACHEPREFIX": f"/{COMPILED}"}
        recipe["trainer"] |= {"target-layer-ids": [0, 1], "log-interval": 0.5, "threads": 1}
        recipe["trainer"] |= {"eval-prompts": 0, "max-steps": 200000, "epochs": 200000}
        (root / "runs" / "demo.yaml").write_text(yaml.safe_dump(recipe))
        self.environment = {
            **os.environ,
            **engine.environment,
            **box.environment,
            "PYTHONPATH": str(root),
            "HOME": str(root),
            "DRAFTHOUSE_BOOT": "no",
            "XDG_CACHE_HOME": str(root / "cache"),
        }
        self.python = of_checkout(root)

    def ok(self, *words: str) -> str:
        done = self.python.run([*FAB, *words, "--host", "pve"], self.root, self.environment, 600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def follow(self, *words: str) -> str:
        """What a command that follows the log shows, to its first line of a step; then it is killed."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        argv = [*FAB, *words, "--host", "pve"]
        shown = ""
        with Popen(self.python, argv, self.root, self.environment, **pipes) as following:
            for line in following.stdout:
                shown += line
                if line.startswith("step "):
                    following.kill()
                    return shown
        raise AssertionError(shown)

    def pack(self, form: Form) -> Archive:
        """The image as `fab image.build --for pct` packs it, but quickly."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(zstd, "LEVEL", -5)  # of use to nobody but who has little time
            for key in ("DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_BUILDKIT", "XDG_CACHE_HOME"):
                patch.setenv(key, self.environment[key])
            return image_tasks.of_checkout(self.root, Settings(), "cpu", form, "amd64", print)


@pytest.fixture(scope="module")
def owner(base_images: Docker, pve_box: PveBox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    here, rules = sysconfig.get_path("purelib"), "/run/every-container"
    places = {here: PACKAGES}
    if sys.pycache_prefix:
        places[sys.pycache_prefix + here] = f"{COMPILED}/{PACKAGES}"
    entries = ""
    for number, (source, target) in enumerate(places.items()):
        entry = f"/run/packages-{number}"
        pve_box.call("mkdir", entry)
        pve_box.call("mount", "--bind", source, entry)
        entries += MOUNTED.format(source=entry, target=target)
    pve_box.call("mkdir", rules)
    pve_box.call("tee", f"{rules}/packages.conf", input=entries)
    pve_box.call("mount", "--bind", rules, EVERY)
    made = Owner(pve_box, base_images, tmp_path_factory.mktemp("owner"))
    try:
        yield made
    finally:
        made.python.close()
        shutil.rmtree(made.root)


@pytest.mark.parametrize(("form", "version"), [("oci", "9.1"), ("template", "8.4")])
def test_the_demo_trains_in_a_container_that_a_deploy_makes_and_either_kind_boots_with_tini(
    owner: Owner, pve_box: PveBox, form: Form, version: str
) -> None:
    made = owner.pack(form)
    assert owner.pack(form) == made
    pve_box.version = version
    try:
        _trains(owner, made)
        for unprivileged in (True, False):
            _boots(pve_box, made, unprivileged)
    finally:
        for conf in pve_box.conf(100).parent.glob("*.conf"):
            pve_box.remove(int(conf.stem))
        pve_box.version = "9.1"
        pve_box.call("sh", "-c", "rm -rf /var/lib/drafthouse/*")
        (pve_box.templates / made.name).unlink()


def _trains(owner: Owner, made: Archive) -> None:
    """From `fab deploy` to the first step and on, as it is seen here."""
    shown = owner.follow("deploy", "--run", "demo")
    assert f"pct: Proxmox VE {owner.box.version}.1 is there, and no engine" in shown
    assert f"{made.name} is there" in shown
    assert f"making container 100 from local:vztmpl/{made.name}" in shown
    assert "✓ start" in shown
    assert re.search(
        r"^── drafthouse run 0001-demo · attempt 1 .*PYTHONUNBUFFERED=1, -u;.* under tini", shown, re.M
    )
    assert re.search(r"^toy target trained: ", shown, re.M)
    assert re.search(r"^step 1/200000 · .* tok/s · loss \d", shown, re.M), shown
    assert "\nstep " in owner.follow("tail")
    [row] = json.loads(owner.ok("status", "--json"))
    assert (row["run_id"], row["verdict"], row["drift"]) == ("0001-demo", "training", []), row
    within = ["pct", "exec", "100", "--keep-env", "0", "--", "sh", "-c"]
    script = "cat /proc/1/comm; echo $PYTHONUNBUFFERED; stat -f -c '%T %b %S' /dev/shm"
    comm, unbuffered, kind, blocks, size = owner.box.call(*within, script).stdout.split()
    assert (comm, unbuffered, kind, int(blocks) * int(size)) == ("tini", "1", "tmpfs", 1 << 30)
    owner.box.remove(100)


def _boots(box: PveBox, made: Archive, unprivileged: bool) -> None:
    """By hand, with the environment as lxc.environment, the rest as raw keys."""
    told = box.pct(
        "create", "301", f"local:vztmpl/{made.name}", "--ostype", "unmanaged", "--unprivileged",
        str(int(unprivileged)), "--rootfs", "local-zfs:8", "--memory", "512", timeout=300,
    )  # fmt: skip
    said = box.conf(301).read_text()
    assert ("Detected OCI archive" in told) == (made.form == "oci")
    if made.form == "oci":
        assert "lxc.signal.halt: SIGTERM" in said
        assert "lxc.init.cwd: /var/lib/drafthouse" in said
        assert "entrypoint: tini -- python -u -m trainer --help" in said
        assert "PYTHONUNBUFFERED=1" in said
    _configure(box, made)
    _check(box, made)
    box.remove(301)


def _configure(box: PveBox, made: Archive) -> None:
    """Have the container started as the image says, but with WORK for its command."""
    start = made.start
    assert start["entrypoint"][:5] == ["tini", "--", "python", "-u", "-m"]
    assert start["stop_signal"] == "SIGTERM"
    box.call("chroot", _rootfs(box), "sh", "-c", "cat >/opt/work.py", input=WORK)
    uid, _, gid = start["user"].partition(":")
    kept = ("arch", "hostname", "memory", "ostype", "rootfs", "swap", "unprivileged")
    lines = [line for line in box.conf(301).read_text().splitlines() if line.partition(":")[0] in kept]
    lines += ["lxc.init.cmd: tini -- python -u /opt/work.py", f"lxc.init.cwd: {start['working_directory']}"]
    lines += [f"lxc.init.uid: {uid}", f"lxc.init.gid: {gid}", f"lxc.signal.halt: {start['stop_signal']}"]
    lines += [f"lxc.environment: {key}={value}" for key, value in start["environment"].items()]
    box.conf(301).write_text("\n".join([*lines, SHM]) + "\n")


def _check(box: PveBox, made: Archive) -> None:
    box.pct("start", "301")
    within = ["pct", "exec", "301", "--keep-env", "0", "--"]
    wait = "until [ -s /var/lib/drafthouse/began ]; do sleep 0.05; done; cat /var/lib/drafthouse/began"
    assert box.call(*within, "sh", "-c", wait).stdout == "10001:10001 /var/lib/drafthouse True"
    script = "cat /proc/1/comm; tr '\\0' '\\n' </proc/1/environ | grep PYTHON"
    first = box.call(*within, "sh", "-c", script).stdout.split()
    assert first[0] == "tini"
    assert "PYTHONUNBUFFERED=1" in first
    # What pct exec starts finds the image's Python, unbuffered; so do logins that have nothing of this.
    assert box.call(*within, "python", "-c", ASK).stdout.split() == ["1", "True", "/opt/venv"]
    bare = ["env", "-i", "bash", "-lc", f'python -c "{ASK}"']
    assert box.call(*within, *bare).stdout.split() == ["1", "True", "/opt/venv"]
    login = ["env", "-i", "/bin/su", "root", "-c", "echo $PYTHONUNBUFFERED"]
    assert box.call(*within, *login).stdout.split() == ["1"]
    assert box.call(*within, "stat", "-f", "-c", "%T %b", "/dev/shm").stdout.split() == ["tmpfs", "262144"]
    box.pct("shutdown", "301", "--timeout", "30")
    ended = box.call("cat", f"{_rootfs(box)}/var/lib/drafthouse/ended").stdout
    assert ended == "SIGTERM"
    if made.form == "template":
        inside = box.call("cat", f"{_rootfs(box)}/etc/drafthouse/image.json").stdout
        assert json.loads(inside) == made.start


def _rootfs(box: PveBox) -> str:
    found = box.call("sh", "-c", "ls -d /var/lib/rpool/data/*301*").stdout.split()
    assert len(found) == 1, found
    return found[0]
