"""What is known of a Proxmox host without asking its programs, which take half a second each."""

# ruff: noqa: E501  (sentences, as they are)

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from deploy import boot, gpus, pct_create, pct_host, pve
from deploy.errors import DeployError

STORAGES = """\
dir: local
\tpath /var/lib/vz
\tcontent iso,vztmpl,backup

lvmthin: local-lvm
\tthinpool data
\tcontent rootdir,images
\tnodes pve,pve3

nfs: nas
\tpath /mnt/pve/nas
\tcontent vztmpl
\tdisable
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(gpus.ROOT_VARIABLE, str(tmp_path))
    (tmp_path / "etc/pve/nodes/pve/lxc").mkdir(parents=True)
    (tmp_path / "etc/pve/nodes/pve2/qemu-server").mkdir(parents=True)
    (tmp_path / "etc/pve/local").symlink_to("nodes/pve")
    (tmp_path / "etc/pve/lxc").symlink_to("nodes/pve/lxc")
    (tmp_path / "etc/pve/storage.cfg").write_text(STORAGES)
    (tmp_path / "usr/share/perl5/PVE/CLI").mkdir(parents=True)
    return tmp_path


def conf(machine: Path, vmid: int, text: str) -> Path:
    path = machine / f"etc/pve/lxc/{vmid}.conf"
    path.write_text(text)
    return path


def test_storages_are_as_they_are_set_up(machine: Path) -> None:
    assert [(one["name"], one["content"], one["nodes"], one["disabled"]) for one in pve.storages()] == [
        ("local", ["iso", "vztmpl", "backup"], None, False),
        ("local-lvm", ["rootdir", "images"], ["pve", "pve3"], False),
        ("nas", ["vztmpl"], None, True),
    ]


def test_a_storage_takes_what_proxmox_lets_it_take_where_nothing_is_said(machine: Path) -> None:
    (machine / "etc/pve/storage.cfg").write_text("zfspool: tank\n\tpool tank\n\nlvm: thick\n\tvgname x\n")
    found = {one["name"]: one["content"] for one in pve.storages()}
    assert found["tank"] == ["images", "rootdir"]
    assert found["thick"] == ["images"]
    assert {"rootdir", "vztmpl"} <= set(found["local"])


def test_root_may_have_more_ids_than_a_container_needs(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pve.machine, "program", lambda name: f"/usr/bin/{name}")
    for text, enough in (
        ("root:100000:65536", True),
        ("x:100000:65536\nroot:1000:200000", True),
        ("root:100000:1000", False),
    ):
        for name in ("subuid", "subgid"):
            (machine / "etc" / name).write_text(f"{text}\n")
        assert pve.mapped_ids() is enough


def test_the_guests_of_all_nodes_are_known_with_and_without_the_clusters_list(machine: Path) -> None:
    conf(machine, 200, "memory: 1\n")
    (machine / "etc/pve/nodes/pve2/qemu-server/101.conf").write_text("")
    found = {"200": {"node": "pve", "type": "lxc"}, "101": {"node": "pve2", "type": "qemu"}}
    assert pve.guests() == found
    listed = {"version": 7, "ids": {"300": {"node": "pve3", "type": "lxc", "version": 1}}}
    (machine / "etc/pve/.vmlist").write_text(json.dumps(listed))
    assert pve.guests() == {"300": {"node": "pve3", "type": "lxc"}}
    assert (pve.node(), pve.ids()) == ("pve", [200])


def test_version_and_the_option_that_keeps_the_environment_out_are_read_from_files(machine: Path) -> None:
    perl = machine / "usr/share/perl5/PVE"
    (perl / "pvecfg.pm").write_text("    'version' => '8.2.4',\n    'release' => '8.2',\n")
    assert (pve.version(), pve.keep_env()) == ("8.2.4", True)
    (perl / "CLI/pct.pm").write_text("name => 'exec',\n")
    assert pve.keep_env() is False
    (perl / "CLI/pct.pm").write_text("'keep-env' => {\n")
    assert pve.keep_env() is True


def test_a_container_runs_if_its_command_socket_is_open(machine: Path) -> None:
    with socket.socket(socket.AF_UNIX) as command:
        command.bind(f"\0{machine}/lxc/4321/command")
        assert pve.active()[4321] == f"{machine}/lxc"
    assert 4321 not in pve.active()


def test_a_container_is_found_by_its_mark_once_it_is_whole(machine: Path) -> None:
    which = {"name": "exp", "release": "0123456789ab", "state": str(machine / "state")}
    mark = f"#{pct_host.mark_of(which)}\n"
    conf(machine, 200, "rootfs: a:b\n")
    conf(machine, 201, mark + "lock: create\nrootfs: a:b\n")
    conf(machine, 202, mark.replace("0123456789ab", "ba9876543210") + "rootfs: a:b\n")
    assert pct_host.find(which) is None
    conf(machine, 203, mark + "rootfs: a:b\n")
    assert pct_host.find(which) == 203
    listed = [(one["id"], one["release"]) for one in pct_host.listing(which["state"])]
    assert listed == [(201, "0123456789ab"), (202, "ba9876543210"), (203, "0123456789ab")]
    assert pct_host.listing(str(machine / "other")) == []
    assert pct_host.remove(200, which["state"]) == "it is not ours"
    home = machine / "state/names/exp"
    home.mkdir(parents=True)
    (home / "previous").symlink_to("releases/0123456789ab")
    assert pct_host.remove(203, which["state"]) == "its release is current or previous"


def test_an_id_is_taken_from_the_range_that_nobody_has(machine: Path) -> None:
    conf(machine, 900, "memory: 1\n")
    assert pct_create.free_id([900, 902], {901}) == 902
    with pytest.raises(DeployError, match="every id from 900 to 900 is taken; widen pct: vmid"):
        pct_create.free_id([900, 900], set())


def test_a_container_is_configured_only_if_it_is_the_one_that_is_meant(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.pct_conf.LOCKS", str(machine / "locks"))
    state = str(machine / "state")
    which = {"name": "exp", "release": "0123456789ab", "state": state, "conf": str(machine / "pct.conf")}
    (machine / "pct.conf").write_text(
        "#drafthouse name=exp release=${DRAFTHOUSE_RELEASE} state=${DRAFTHOUSE_STATE}\n"
        "mp0: ${DRAFTHOUSE_RUN},mp=/run/drafthouse\nrootfs: ${DRAFTHOUSE_ROOTFS}\n"
    )
    path = conf(machine, 203, f"#{pct_host.mark_of(which)}\nmemory: 1\nrootfs: zfs:x,size=2G\n")
    pct_host.configure(203, which, "/runs/0007-exp", None)
    assert path.read_text() == (
        f"#{pct_host.mark_of(which)}\nmp0: /runs/0007-exp,mp=/run/drafthouse\nrootfs: zfs:x,size=2G\n"
    )
    for text, said in (
        ("memory: 1\nrootfs: a\n", "container 203 is not the one of release 0123456789ab of exp"),
        (f"{path.read_text()}lock: backup\n", r"container 203 is locked \(backup\)"),
    ):
        conf(machine, 203, text)
        with pytest.raises(DeployError, match=said):
            pct_host.configure(203, which, "/runs/0008-exp", None)
        assert path.read_text() == text
    with pytest.raises(DeployError, match="container 204 is gone; fab deploy makes a new one"):
        pct_host.configure(204, which, "/runs/0008-exp", None)


def test_what_a_container_lacks_is_named_where_proxmox_does_not(machine: Path) -> None:
    there, gone = machine / "a b", machine / "gone"
    there.mkdir()
    mounted = (
        f"mp0: {machine},mp=/x\nlxc.mount.entry: {str(there).replace(' ', chr(92) + '040')} b none bind 0 0\n"
    )
    conf(machine, 200, f"{mounted}dev0: /dev/null,mode=0666\nlxc.mount.entry: shm dev/shm tmpfs rw 0 0\n")
    assert pct_host.why_not(200, "startup failed") == "startup failed"
    conf(machine, 201, f"{mounted}lxc.mount.entry: {gone} dev/x none bind 0 0\n")
    assert pct_host.why_not(201, "startup failed").startswith(
        f"{gone}, which it is given, is not there any more ("
    )


def test_a_boot_does_not_wait_for_a_container_that_is_gone(machine: Path) -> None:
    conf(machine, 200, "rootfs: a:b\n")
    boot.wait_for_proxmox({"container": {"vmid": 200}})
    with pytest.raises(DeployError, match=r"201\.conf any more: fab deploy makes the container anew"):
        boot.wait_for_proxmox({"container": {"vmid": 201}})


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            "tar: ./usr/x: Cannot write: No space left on device\ntar: Exiting with failure status\n"
            "unable to create CT 900 - command 'tar xpf - --totals' failed: exit code 2\n",
            "container 900 could not be made (tar: ./usr/x: Cannot write: No space left on device): free some of "
            "storage zfs (fab prune removes old containers), or lower pct: rootfs",
        ),
        (
            "unable to create CT 900 - command 'tar xpf - --totals' failed: exit code 2\n",
            "container 900 could not be made (unable to create CT 900 - tar failed: exit code 2): is local:vztmpl/a.tar "
            "a whole template? fab image.build --for pct makes one anew",
        ),
        (
            "unable to create CT 900 - command 'lxc-usernsexec -m u:0:1:2 -- tar xpf -' failed: exit code 2\n",
            "container 900 could not be made (unable to create CT 900 - lxc-usernsexec failed: exit code 2): is "
            "local:vztmpl/a.tar a whole template? fab image.build --for pct makes one anew",
        ),
        (
            "400 Parameter verification failed.\nmemory: value must have a minimum value of 16\nnet0: invalid format\n"
            "pct create <vmid> <ostemplate> [OPTIONS]\n",
            "container 900 could not be made (memory: value must have a minimum value of 16; net0: invalid format); "
            "nothing of it is left",
        ),
    ],
)  # fmt: skip
def test_why_a_container_could_not_be_made_is_one_sentence_with_what_mends_it(
    said: str, sentence: str
) -> None:
    make = {"template": "local:vztmpl/a.tar", "rootfs": "zfs:24"}
    assert pct_create._sentence(900, pve.cause(said), make) == sentence
