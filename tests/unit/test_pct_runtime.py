"""The pct runtime: the configuration of a release's container, which Proxmox has to take as it is."""

# ruff: noqa: E501  (files and sentences, as they are)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pve_samples import GIB, NODES, host, proxmox
from samples import STATE, recipe

from deploy import pct_conf, render
from deploy.errors import DeployError
from deploy.release import Layout
from deploy.runtimes import pct
from deploy.settings import HostSettings, RunSettings
from tests.testbed.pct.standin import config as standin
from tests.testbed.pct.standin.properties import Formats
from tests.testbed.pct.standin.world import World

LAYOUT = Layout(STATE, "/dev/shm/drafthouse", "exp_1")
OURS = "name: exp_1\nweights: /m\ntrainer: {}\ngrace_seconds: 30"
FOREIGN = "name: exp_1\ncommand: [python3, x.py]\nimage: {use: 'local:vztmpl/a.tar.zst'}\nsecrets: {T: env}\ngpus: 0"
WEIGHTS = "/dev/shm/drafthouse/m@1"


def run(text: str, tmp_path: Path) -> RunSettings:
    return recipe(text, tmp_path).settings


def conf(
    settings: RunSettings,
    made: HostSettings,
    known: dict[str, Any],
    gpus: int = 0,
    files: tuple[str, ...] = (),
) -> str:
    container = pct.describe(
        made, settings, LAYOUT, known, weights=WEIGHTS, weights_bytes=60 * GIB, data="/data/x", gpus=gpus, device_files=files
    )  # fmt: skip
    text = pct.conf_file(container)
    mark = pct_conf.Mark("exp_1", "0123456789ab", STATE)
    return pct_conf.complete(
        text, run=f"{STATE}/runs/0007-exp_1", secrets="/s/secrets-0007", mark=mark, rootfs="zfs:x,size=24G"
    )


@pytest.mark.parametrize("version", ["8.1", "8.4", "9.1", "9.2"])
@pytest.mark.parametrize("text", [OURS, FOREIGN])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"unprivileged": False, "cores": 8, "nesting": True, "order": 3, "memory": "64g", "swap": "1g"},
        {"bridge": "vmbr0", "ip": "10.0.0.5/24", "gateway": "10.0.0.1"},
    ],
)
def test_proxmox_takes_every_line_of_it(
    version: str, text: str, settings: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "world").write_text(json.dumps({"version": version, "node": "pve", "other_nodes": []}))
    world = World(str(tmp_path / "world"))
    formats = Formats(world)
    files = pct.device_files(pct.Devices(("0", "1")), proxmox())
    rendered = conf(run(text, tmp_path), host(**settings), proxmox(version=f"{version}.1"), 2, files)
    standin.parse(formats, "900", rendered)
    assert capsys.readouterr().err == ""
    assert "${" not in rendered


def test_ours_mounts_what_a_run_needs_and_starts_launch_without_rights(tmp_path: Path) -> None:
    made = host()
    files = pct.device_files(pct.Devices(("1",)), proxmox())
    found = pct_conf.parse(conf(run(OURS, tmp_path), made, proxmox(), 1, files))
    values, raw = found.values, [f"{key}: {value}" for key, value in found.lxc]
    home = f"{STATE}/names/exp_1"
    assert [values[f"mp{n}"] for n in range(4)] == [
        f"{STATE}/runs/0007-exp_1,mp=/run/drafthouse",
        f"{home}/checkpoints,mp={home}/checkpoints",
        f"{home}/cache,mp={home}/cache",
        "/data/x,mp=/data/x,ro=1",
    ]
    assert f"lxc.mount.entry: {WEIGHTS} {WEIGHTS.lstrip('/')} none bind,ro,create=dir 0 0" in raw
    assert (
        "lxc.mount.entry: shm dev/shm tmpfs rw,nosuid,nodev,mode=1777,size=1610612736,create=dir 0 0" in raw
    )
    assert raw.index(next(line for line in raw if " tmpfs " in line)) < raw.index(
        next(line for line in raw if WEIGHTS in line)
    )
    library = "/usr/lib/x86_64-linux-gnu/libcuda.so"
    assert f"lxc.mount.entry: {library}.550.1 {library[1:]}.1 none bind,ro,create=file 0 0" in raw
    init = next(line for line in raw if line.startswith("lxc.init.cmd"))
    assert init.startswith(
        "lxc.init.cmd: tini -- setpriv --reuid=10001 --regid=10001 --clear-groups --no-new-privs"
    )
    assert init.endswith("-- python -u -m trainer.launch --run-dir /run/drafthouse")
    assert "lxc.signal.halt: SIGTERM" in raw
    assert "lxc.environment: PYTHONUNBUFFERED=1" in raw
    devices = [values[f"dev{n}"] for n in range(5)]
    assert devices == [f"/dev/{name},mode=0666" for name in ("nvidia1", *NODES[:4])]
    assert (values["onboot"], values["startup"], values["unprivileged"]) == ("0", "down=40", "1")
    assert values["hostname"] == pct.hostname("exp_1")


def test_a_template_of_ones_own_gets_launch_its_secrets_and_an_init(tmp_path: Path) -> None:
    settings = run(FOREIGN, tmp_path)
    found = pct_conf.parse(conf(settings, host(), proxmox()))
    raw = [f"{key}: {value}" for key, value in found.lxc]
    app = f"{STATE}/names/exp_1/releases/0123456789ab/app"
    assert f"{app},mp=/opt/drafthouse,ro=1" in found.values.values()
    assert "lxc.mount.entry: /s/secrets-0007 run/drafthouse-secrets none bind,ro,create=file 0 0" in raw
    assert "lxc.init.cmd: /bin/sh /opt/drafthouse/init.sh" in raw
    assert not any(key.startswith("dev") for key in found.values)


def test_memory_is_what_is_needed_and_a_margin_and_never_more_than_there_is(tmp_path: Path) -> None:
    ours, foreign = run(OURS, tmp_path), run(FOREIGN, tmp_path)
    need = pct.need(ours, 60 * GIB, 1)
    assert 60 * GIB < need < pct.memory(host(), ours, proxmox(), 60 * GIB, 1) < 90 * GIB
    assert pct.memory(host(), ours, proxmox(), 190 * GIB, 1) == 200 * GIB
    assert pct.memory(host(), foreign, proxmox(), 0, 0) == 200 * GIB  # nobody knows what a command needs
    assert pct.memory(host(memory="8g"), ours, proxmox(), 60 * GIB, 1) == 8 * GIB
    assert pct.memory(host(memory="8g"), run(OURS + "\nmemory: 70g", tmp_path), proxmox(), 0, 1) == 70 * GIB


def test_an_address_is_set_up_by_whoever_can(tmp_path: Path) -> None:
    made = host(bridge="vmbr0", ip="10.0.0.5/24", gateway="10.0.0.1")
    new = pct.network(made, "exp", proxmox()["pve"], True)
    assert new[0] is not None
    assert new[0].endswith(",ip=10.0.0.5/24,gw=10.0.0.1,host-managed=1")
    assert new[1] == ()
    old = pct.network(made, "exp", proxmox()["pve"], False)
    assert old[1] == ("ipv4.address: 10.0.0.5/24", "flags: up", "ipv4.gateway: 10.0.0.1")
    assert pct.network(made, "other", proxmox()["pve"], True) != new
    assert pct.network(host(), "exp", proxmox()["pve"], True) == (None, ())


def test_a_name_becomes_one_that_dns_permits() -> None:
    names = ["exp", "exp.1", "exp_1", "exp-1", "x" * 63]
    found = [pct.hostname(name) for name in names]
    assert found[0] == "drafthouse-exp"
    assert len(set(found)) == len(names)
    assert all(
        len(name) <= 63 and set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for name in found
    )


def test_who_it_is_here_depends_on_the_containers_kind(tmp_path: Path) -> None:
    settings = run(OURS, tmp_path)
    assert (pct.owner(settings, True), pct.owner(settings, False)) == ("110001:110001", "10001:10001")
    assert pct.owner(run(OURS + "\nuser: root", tmp_path), True) == "100000:100000"


def test_the_first_storage_of_this_node_that_takes_roots_is_taken() -> None:
    assert pct.making(host(vmid="900-909"), proxmox(), "local:vztmpl/a.tar") == {
        "template": "local:vztmpl/a.tar",
        "template_storage": "local",
        "rootfs": "zfs:24",
        "range": [900, 909],
    }
    assert pct.root_storage(host(storage="mine"), proxmox()) == "mine"


@pytest.mark.parametrize("path", ["/a b", "/a,b", "/a=b", "/a\nb"])
def test_a_path_that_no_entry_can_hold_is_refused(path: str) -> None:
    with pytest.raises(DeployError, match="no entry of a Proxmox container can hold; choose another place"):
        render.pct(path)
    if "\n" not in path:
        assert render.pct_path(path) == path.replace(" ", "\\040")
    else:
        with pytest.raises(DeployError, match="configuration can hold; choose another name"):
            render.pct_path(path)
