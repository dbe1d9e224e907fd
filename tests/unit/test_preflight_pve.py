"""What keeps a Proxmox host from a deploy, each with the one line that mends it."""

# ruff: noqa: E501  (whole sentences, as people read them)

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pve_samples import GIB, NODES, host, proxmox
from samples import recipe, survey

from deploy import preflight_adopted, preflight_pve
from deploy.devices import Devices
from deploy.runtimes import compose
from deploy.settings import HostSettings
from deploy.weights import Weights

TEXT = "name: exp\ncommand: [python3, x.py]\nimage: {use: 'local:vztmpl/a.tar.zst'}\n"
OURS = "name: exp\nweights: /m\ntrainer: {}\n"
MODEL = Weights("/m", "present", "/dev/shm/drafthouse/m@1", "m", "1", 60 * GIB, "/dev/shm/drafthouse")
SPACE = {name: {"active": True, "total": 10**12, "used": 0, "free": 10**12} for name in ("local", "zfs")}
STORAGES = {"space": SPACE, "template": True, "links": []}
USED = compose.Used("local:vztmpl/a.tar.zst")


def failures(
    tmp_path: Path,
    known: dict[str, Any] | None = None,
    text: str = TEXT,
    pct: dict | None = None,
    gpus: tuple[str, ...] = (),
    **changes: Any,
) -> list[str]:
    more = {"storages": STORAGES, "image": USED, "weights": None, "data": None, **changes}
    taken = survey(known or proxmox(), name="exp", **more)
    found = preflight_pve.made(taken, host(**(pct or {})), recipe(text, tmp_path).settings, Devices(gpus))
    return [check.sentence for check in found if not check.ok]


def test_a_host_that_has_what_it_needs_passes(tmp_path: Path) -> None:
    assert failures(tmp_path) == []
    assert failures(tmp_path, gpus=("0", "1"), text=OURS, weights=MODEL) == []
    assert failures(tmp_path, proxmox(version=None)) == []


def storages(**changes: Any) -> list[dict[str, Any]]:
    return [{**one, **changes} if one["name"] == "zfs" else one for one in proxmox()["pve"]["storages"]]


def gpus(**changes: Any) -> dict[str, Any]:
    known = proxmox()
    return {**known, "gpus": {**known["gpus"], **changes}}


CASES: list[tuple[str, dict[str, Any], str]] = [
    ("no proxmox", {"known": {**proxmox(), "pve": None}}, "pve has no pct command, so it is no Proxmox host; correct its address, or set runtime: compose or process for pve in fabric.yaml"),
    ("not root", {"known": proxmox(root=False)}, "root is not root on pve, but only root@pam may mount its directories and devices into containers; set address: root@… for pve in fabric.yaml"),
    ("not mounted", {"known": proxmox(mounted=False)}, "/etc/pve/lxc is not there on pve; run systemctl start pve-cluster there, and see journalctl -u pve-cluster"),
    ("old", {"known": proxmox(version="7.4.17")}, "pve has Proxmox VE 7.4.17, but 8.1 or later is needed; upgrade it, or deploy to a container that you have (container: in fabric.yaml), or set runtime: compose or process for pve in fabric.yaml"),
    ("no template", {"storages": {**STORAGES, "template": False}}, "there is no template local:vztmpl/a.tar.zst on pve; look with pveam list local there, or correct image: in the run's file"),
    ("plain", {"known": proxmox(version="9.0.3"), "text": TEXT.replace(".zst", "")}, "Proxmox VE 9.0.3 of pve takes no plain .tar like local:vztmpl/a.tar; run zstd on it there, and name a.tar.zst in image: in the run's file"),
    ("no storage", {"pct": {"storage": "fast"}}, "pve has no storage fast; set pct: storage in fabric.yaml to away or zfs"),
    ("wrong content", {"pct": {"storage": "local"}}, "the storage local of pve does not take rootdir; run pvesm set local --content vztmpl,rootdir there, or set pct: storage in fabric.yaml to away or zfs"),
    ("other node", {"pct": {"storage": "away"}}, "the storage away is not there on this node of pve; set pct: storage in fabric.yaml to away or zfs"),
    ("inactive", {"storages": {**STORAGES, "space": {**SPACE, "zfs": {**SPACE["zfs"], "active": False}}}}, "the storage zfs of pve is not active; see pvesm status there, or set pct: storage in fabric.yaml to away or zfs"),
    ("full", {"storages": {**STORAGES, "space": {**SPACE, "zfs": {**SPACE["zfs"], "free": 10**6}}}}, "the storage zfs of pve has 1.0 MB free, but a container takes about 1.0 GB; let fab prune remove old containers, or set pct: storage in fabric.yaml to away or zfs"),
    ("small root", {"pct": {"rootfs": "512m"}}, "pct: rootfs is 512m, but the image takes about 1.0 GB; set it to 5g or more in fabric.yaml"),
    ("ids", {"known": proxmox(ids=False)}, "root of pve may not map the ids of unprivileged containers; run: echo root:100000:65536 | tee -a /etc/subuid /etc/subgid"),
    ("large uid", {"text": TEXT + "user: 70000:1\n"}, "the run has user: 70000:1, but an unprivileged container has ids below 65536 only; give a smaller one, or set pct: {unprivileged: false} in fabric.yaml"),
    ("no id left", {"known": proxmox(guests={"900": {"node": "pve", "type": "lxc"}}), "pct": {"vmid": "900-900"}}, "every id from 900 to 900 is taken on pve; widen pct: vmid in fabric.yaml, or let fab prune remove old containers"),
    ("memory", {"text": OURS, "weights": MODEL, "pct": {"memory": "8g"}}, "memory is 8g, but weights and run need 66 GB: the container would be throttled, then killed; set pct: memory in fabric.yaml to 63g or more, or remove it"),
    ("too much", {"pct": {"memory": "400g"}}, "the container needs 429 GB of memory, but pve has 215 GB; lower memory:, or deploy to a larger machine"),
    ("shm", {"text": OURS + "shm_size: 64m\n", "weights": MODEL}, "shm_size is 64m, but PyTorch's loaders and NCCL may need 1024 MiB in the container's /dev/shm, and would end in a bus error; remove shm_size, or enlarge it"),
    ("node missing", {"known": proxmox(nodes=[{"path": f"/dev/{name}", "major": 195, "minor": 0} for name in NODES if name != "nvidia-uvm"]), "gpus": ("0",)}, "/dev/nvidia-uvm is not there on pve, and without it no process can use a GPU; run nvidia-modprobe -u -c0 there"),
    ("no device", {"known": proxmox(nodes=[{"path": f"/dev/{name}", "major": None, "minor": None} for name in NODES]), "gpus": ("0",)}, "/dev/nvidiactl on pve is no device; run rm /dev/nvidiactl; nvidia-modprobe -u -c0 there"),
    ("no library", {"known": proxmox(libraries=[]), "gpus": ("0",)}, "pve has the NVIDIA driver 550.1, but not its libcuda.so.1, which a container gets from it; install the libraries of the same driver there (the whole .run file of 550.1, or libcuda1)"),
    ("library", {"known": gpus(driver="550.2"), "gpus": ("0",)}, "the NVIDIA driver that pve has loaded is 550.2, but libcuda.so.1 is of 550.1: no CUDA call would work; reboot that machine, or install the libraries of the same driver"),
    ("bridge", {"pct": {"bridge": "vmbr7"}}, "pve has no bridge vmbr7; correct pct: bridge in fabric.yaml (it has vmbr0)"),
    ("dhcp", {"known": proxmox(version="8.4.1"), "pct": {"bridge": "vmbr0"}}, "Proxmox VE 8.4.1 asks no DHCP server for a container without a system in it; give it an address, like pct: {ip: 10.0.0.5/24, gateway: 10.0.0.1} in fabric.yaml"),
    ("link", {"storages": {**STORAGES, "links": ["/data/x"]}}, "/data/x on pve leads through a symbolic link, which Proxmox mounts into no container; give the real path (state:, cache: in fabric.yaml, data: in the run's file)"),
    ("blank", {"data": "/my data"}, "'/my data' has a blank, a comma or '=', which no mount of a Proxmox container can hold; choose another place for it"),
    ("foreign", {"known": proxmox(containers=[{"id": 205, "hostname": "drafthouse-exp", "ours": None}])}, "pve has a container 205 called drafthouse-exp, that Drafthouse did not make; run pct set 205 --hostname another-name there, or take another --name"),
    ("another state", {"known": proxmox(containers=[{"id": 205, "hostname": "drafthouse-exp", "ours": {"name": "exp", "release": "1", "state": "/other"}}])}, "pve has a container 205 called drafthouse-exp, of the state directory /other; run pct set 205 --hostname another-name there, or take another --name"),
    ("no image", {"text": "name: exp\ncommand: [a]\n", "image": None}, "the run has a command: of its own, but no image that has its program; name one that is on the host, like image: {use: my/image:1.4}, or set runtime: process"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "sentence"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_each_thing_that_is_wrong_is_one_sentence_with_its_remedy(
    what: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    assert failures(tmp_path, **what) == [sentence]


# -- containers that people have ---------------------------------------------------------------------------

OWN = {
    "id": 200,
    "hostname": "trainer",
    "running": True,
    "lock": None,
    "values": {"memory": "4096", "features": "nesting=1", "dev0": "/dev/nvidia0,mode=0666"},
    "lxc": [],
    "ours": None,
}


def adopted(vmid: int = 200, guests: dict | None = None, *, root: bool = True, **changes: Any) -> list[str]:
    wanted = {key: changes.pop(key) for key in ("need_bytes", "devices", "docker_inside") if key in changes}
    known = proxmox(containers=[{**OWN, **changes}], guests=guests or {}, root=root)["pve"]
    found = preflight_adopted.adopted(known, "pve", vmid, **wanted)
    return [check.sentence for check in found if not check.ok]


ADOPTED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("well", {"need_bytes": 4 * GIB, "devices": ["/dev/nvidia0"], "docker_inside": True}, []),
    ("none", {"vmid": 999}, ["there is no container 999 on pve; correct container: in fabric.yaml (pct list shows: 200)"]),
    ("elsewhere", {"vmid": 201, "guests": {"201": {"node": "pve2", "type": "lxc"}}}, ["container 201 is on the node pve2, not on pve; set address: to that of pve2 in fabric.yaml"]),
    ("machine", {"vmid": 201, "guests": {"201": {"node": "pve", "type": "qemu"}}}, ["201 on pve is a virtual machine, not a container; give it a host entry of its own, with its address"]),
    ("not root", {"root": False}, ["only root may enter containers of pve; set address: root@… for pve in fabric.yaml"]),
    ("stopped, locked", {"running": False, "lock": "backup"}, ["container 200 is locked (backup); wait for the end of that, or run pct unlock 200 if nothing is at work any more", "container 200 on pve is stopped; run pct start 200 there"]),
    ("small", {"need_bytes": 64 * GIB}, ["container 200 may have 4.3 GB of memory, but weights and run need 69 GB; run pct set 200 --memory 81920"]),
    ("usual memory", {"values": {}, "need_bytes": GIB}, ["container 200 may have 537 MB of memory, but weights and run need 1.1 GB; run pct set 200 --memory 3072"]),
    ("devices", {"devices": ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia-uvm"]}, ["container 200 has no /dev/nvidia1, /dev/nvidia-uvm; run pct set 200 --dev1 /dev/nvidia1,mode=0666 --dev2 /dev/nvidia-uvm,mode=0666, then pct reboot 200"]),
    ("raw lines", {"devices": ["/dev/nvidia1"], "lxc": [["lxc.mount.entry", "/dev/nvidia1 dev/nvidia1 none bind,optional,create=file"]]}, []),
    ("no module", {"devices": ["/dev/nvidia9"]}, ["/dev/nvidia9 is not there on the host of container 200; run nvidia-modprobe -u -c0 there"]),
    ("docker inside", {"values": {"memory": "4096"}, "docker_inside": True}, ["Docker runs in container 200, which may start no containers itself; run pct set 200 --features nesting=1,keyctl=1, then pct reboot 200"]),
    ("locked, running", {"lock": "backup"}, ["container 200 is locked (backup); wait for the end of that, or run pct unlock 200 if nothing is at work any more"]),
    ("ours", {"ours": {"name": "exp", "release": "1", "state": "/s"}}, ["container 200 on pve was made by Drafthouse for exp; deploy exp without container:, or choose another one"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "sentences"), [case[1:] for case in ADOPTED], ids=[case[0] for case in ADOPTED]
)
def test_a_container_that_people_have_is_looked_at_from_outside(
    what: dict[str, Any], sentences: list[str]
) -> None:
    assert adopted(**what) == sentences


def around(
    text: str, tmp_path: Path, weights: Weights | None = None, *, inside: bool = False, **changes: Any
) -> list[tuple[str, bool]]:
    """What a deploy into container 200 is told: (sentence, whether it only warns)."""
    known = proxmox(containers=[{**OWN, "values": {"memory": "4096"}, **changes}])
    seen = known if inside else {**known, "gpus": {"devices": [], "control": [], "driver": "550.1"}}
    taken = survey(seen, name="exp", weights=weights, around=known["pve"])
    train = HostSettings(name="train", address="pve", container=200)
    found = preflight_adopted.checks(taken, train, recipe(text, tmp_path).settings, "process")
    return [(check.sentence, check.warning) for check in found if not check.ok]


def test_a_deploy_into_a_container_is_told_what_the_container_lacks(tmp_path: Path) -> None:
    text = "name: exp\ncommand: [python3, x.py]\n"
    boot = (
        "container 200 is not started when its host starts, and so no run in it; run pct set 200 --onboot 1",
        True,
    )
    large = {"values": {"memory": "999999", "onboot": "1"}}
    assert around(text + "gpus: 0\n", tmp_path) == [boot]
    assert around(text + "gpus: 0\n", tmp_path, **large) == []
    assert around(text, tmp_path, inside=True, **large) == []
    [(unseen, warns)] = around(text, tmp_path, **large)
    assert unseen.startswith(
        "the host of container 200 has GPUs, but the container has none of them; run pct set 200 --dev0 /dev/nvidia"
    )
    assert warns
    [(missing, warns)] = around(text + "gpus: [1]\n", tmp_path, **large)
    assert missing.startswith("container 200 has no /dev/nvidia1, /dev/nvidiactl, ")
    assert not warns
    [(memory, warns), _] = around(OURS + "gpus: 0\n", tmp_path, MODEL)
    assert memory.startswith("container 200 may have 4.3 GB of memory, but weights and run need ")
    assert not warns
    assert around(text, tmp_path, lock="backup", **large)[0][1]  # one may deploy into it all the same


def test_a_container_of_whose_host_nothing_is_known_is_not_judged(tmp_path: Path) -> None:
    train = HostSettings(name="train", address="pve", container=200)
    settings = recipe(TEXT, tmp_path).settings
    assert preflight_adopted.checks(survey(proxmox(), name="exp"), train, settings, "process") == []
