"""The image in both forms that a Proxmox host takes, built by a real engine and booted by real LXC."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator

import pytest
from elsewhere import Settings, small_checkout
from testbed.docker import Docker
from testbed.pct.box import PveBox

from deploy import image_tasks, zstd
from deploy.pct_form import Archive, Form

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
def pack(
    base_images: Docker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Form], Archive]]:
    """The archive of a small checkout, made by this machine's engine."""
    checkout = small_checkout(tmp_path_factory.mktemp("checkout"))
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zstd, "LEVEL", -5)  # of use to nobody but who has little time
        for key, value in {**base_images.environment, "XDG_CACHE_HOME": str(cache)}.items():
            patch.setenv(key, value)
        yield lambda form: image_tasks.of_checkout(checkout, Settings(), "cpu", form, None, print)
        shutil.rmtree(cache)


@pytest.mark.parametrize(("form", "version"), [("oci", "9.1"), ("template", "8.4")])
def test_both_forms_boot_with_tini_and_end_with_term(pack, pve_box: PveBox, form: Form, version: str) -> None:
    """As pct.conf will have it: the environment as lxc.environment, the rest as raw keys."""
    made = pack(form)
    assert pack(form) == made
    pve_box.version = version
    shutil.copy(made.path, pve_box.templates)
    try:
        told = pve_box.pct(
            "create", "301", f"local:vztmpl/{made.name}", "--ostype", "unmanaged", "--unprivileged", "1",
            "--rootfs", "local-zfs:8", "--memory", "512", timeout=300,
        )  # fmt: skip
        assert ("Detected OCI archive" in told) == (form == "oci")
        said = pve_box.conf(301).read_text()
        _configure(pve_box, made)
        _check(pve_box, made)
    finally:
        pve_box.remove(301)
        pve_box.version = "9.1"
        (pve_box.templates / made.name).unlink()
    if form == "oci":
        assert "lxc.signal.halt: SIGTERM" in said
        assert "lxc.init.cwd: /var/lib/drafthouse" in said
        assert "entrypoint: tini -- python -u -m trainer --help" in said
        assert "PYTHONUNBUFFERED=1" in said


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
