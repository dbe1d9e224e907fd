"""The image in both forms that a Proxmox host takes, built by a real engine and booted by real LXC."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deployed import until
from elsewhere import Settings, small_checkout
from testbed.docker import Docker
from testbed.gpubox import ALIAS
from testbed.pct.box import PveBox

from deploy import image, image_tasks, new_run, pct_conf, pct_template, plan, zstd
from deploy.pct_form import Archive, Form
from deploy.release import Layout
from deploy.runtimes import pct
from deploy.settings import HostSettings, RunSettings
from deploy.ssh import Ssh
from trainer import status

pytestmark = [pytest.mark.engine, pytest.mark.pve, pytest.mark.slow, pytest.mark.timeout(900)]

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


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def pack(
    base_images: Docker, checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Form], Archive]]:
    """The archive of a small checkout, made by this machine's engine."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zstd, "LEVEL", -5)  # of use to nobody but who has little time
        for key, value in {**base_images.environment, "XDG_CACHE_HOME": str(cache)}.items():
            patch.setenv(key, value)
        yield lambda form: image_tasks.of_checkout(checkout, Settings(), "cpu", form, "amd64", print)
        shutil.rmtree(cache)


@pytest.mark.parametrize(("form", "version"), [("oci", "9.1"), ("template", "8.4")])
def test_both_forms_boot_with_tini_and_end_with_term(
    pack, checkout: Path, pve_box: PveBox, monkeypatch: pytest.MonkeyPatch, form: Form, version: str
) -> None:
    """With the environment as lxc.environment, the rest as raw keys; then as the release of a run has it."""
    made = pack(form)
    assert pack(form) == made
    pve_box.version = version
    volume = _bring(pve_box, checkout, monkeypatch)
    assert volume == f"local:vztmpl/{made.name}"
    try:
        told = pve_box.pct(
            "create", "301", volume, "--ostype", "unmanaged", "--unprivileged", "1",
            "--rootfs", "local-zfs:8", "--memory", "512", timeout=300,
        )  # fmt: skip
        assert ("Detected OCI archive" in told) == (form == "oci")
        said = pve_box.conf(301).read_text()
        _configure(pve_box, made)
        _check(pve_box, made)
        _launch(pve_box)
    finally:
        pve_box.remove(301)
        pve_box.version = "9.1"
        (pve_box.templates / made.name).unlink()
    if form == "oci":
        assert "lxc.signal.halt: SIGTERM" in said
        assert "lxc.init.cwd: /var/lib/drafthouse" in said
        assert "entrypoint: tini -- python -u -m trainer --help" in said
        assert "PYTHONUNBUFFERED=1" in said


def _bring(box: PveBox, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """As a deploy does that has to make a container; the template's volume."""
    for key, value in box.environment.items():
        monkeypatch.setenv(key, value)
    layout, known = (
        Layout(str(box.state), str(box.shm), "own"),
        {"version": f"{box.version}.1", "arch": "amd64"},
    )
    made = plan.Plan("deploy", "start", "pve", "own", layout, making={"template_storage": "local"})
    host = Ssh(ALIAS, interactive=False)
    try:
        wanted = image.describe(checkout, Settings(), "cpu")
        return pct_template.provide(made, host, {"pve": known}, wanted, print)
    finally:
        host.close()


def _launch(box: PveBox) -> None:
    """A run in it, configured as a deploy does. Without PyTorch in the image its trainer ends at once."""
    run = status.allocate_run(box.state / "runs", "own")
    command = ["python", "-u", "-m", "trainer", "--target-model", "toy"]
    run.write_run(status.Run(run.path.name, "own", command, runtime="pct", restart_attempts=0))
    new_run.hand_over(str(run.path), [110001, 110001])
    layout = Layout(str(box.state), str(box.shm), "own")
    for place in (layout.checkpoints, layout.cache):
        os.makedirs(place, exist_ok=True)
    host = HostSettings.model_validate({"name": "pve", "address": "pve", "runtime": "pct"})
    settings = RunSettings.model_validate({"name": "own", "trainer": {}, "weights": "toy", "gpus": 0})
    facts = {"pve": {"version": f"{box.version}.1", "arch": "amd64"}, "memory": {"total": 1 << 30}}
    places: dict[str, str] = {"weights": "toy", "data": "toy"}
    container = pct.describe(
        host, settings, layout, facts, weights_bytes=0, gpus=0, device_files=(), **places
    )
    conf = box.conf(301)
    text = pct_conf.complete(
        pct.conf_file(container),
        run=str(run.path),
        secrets=None,
        mark=pct_conf.Mark("own", "0123456789ab", str(box.state)),
        rootfs=pct_conf.parse(conf.read_text()).values["rootfs"],
    )
    conf.write_text(text)
    box.pct("start", "301")
    until(lambda: run.exit())
    log = "".join(path.read_text() for path in run.log.glob("*.log"))
    assert "stdout unbuffered (PYTHONUNBUFFERED=1, -u; from /proc/" in log
    assert "under tini" in log
    assert "No module named 'torch'" in log


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
    box.conf(301).write_text("\n".join(lines) + "\n")


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
