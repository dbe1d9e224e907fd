"""Configurations of Proxmox containers as texts: whose they are, what differs, what a run adds."""

# ruff: noqa: E501  (files and sentences, as they are)

from __future__ import annotations

from pathlib import Path

import pytest

from deploy import pct_conf
from deploy.pct_conf import Mark, parse

TEXT = """\
#somebody's: 100%25 sure
arch: amd64
memory: 4096
unprivileged: 1
lxc.environment: TOKEN=hunter2
lxc.idmap = u 0 100000 65536

[pve:pending]
memory: 8192
[before]
memory: 1
"""
MARK = Mark("exp.1", "0123456789ab", "/srv/a b:c%d")


def test_what_pct_reads_is_read() -> None:
    conf = parse(TEXT)
    assert dict(conf.values) == {"arch": "amd64", "memory": "4096", "unprivileged": "1"}
    assert conf.lxc == (("lxc.environment", "TOKEN=hunter2"), ("lxc.idmap", "u 0 100000 65536"))
    assert (conf.description, conf.pending, conf.mark) == (("somebody's: 100% sure",), True, None)
    assert "hunter2" not in str(pct_conf.facts(conf))


def test_a_mark_survives_how_proxmox_writes_descriptions_and_what_people_write_into_them() -> None:
    assert parse(pct_conf.comment(str(MARK))).mark == MARK
    template = f"#drafthouse name=exp.1 release={pct_conf.RELEASE} state={pct_conf.STATE}\nrootfs: {pct_conf.ROOTFS}\n"
    template += (
        f"lxc.environment: {pct_conf.VARIABLE}=name=exp.1 release={pct_conf.RELEASE} state={pct_conf.STATE}\n"
    )
    text = pct_conf.complete(template, run="/r", secrets=None, mark=MARK, rootfs="a:b,size=4G")
    assert parse(text).mark == MARK
    assert parse(text).values["rootfs"] == "a:b,size=4G"
    assert parse("#notes\n" + text.partition("\n")[2]).mark == MARK


@pytest.mark.parametrize(
    "line", ["", "drafthouse", "drafthouse name=a release=b", "about drafthouse name=a release=b state=/c"]
)
def test_nothing_else_is_taken_for_a_mark(line: str) -> None:
    assert parse(f"#{line}\nmemory: 1\n").mark is None


def test_differences_name_the_key_and_hide_what_others_have_put_into_the_environment() -> None:
    wanted = parse(
        "memory: 1\ncores: 2\nrootfs: a\nlxc.environment: A=1\nlxc.mount.entry: x\nlxc.mount.entry: y\n"
    )
    there = parse(
        "lock: backup\nmemory: 2\nrootfs: b\nlxc.environment: A=1\nlxc.environment: S=hunter2\nlxc.mount.entry: x\n"
    )
    assert pct_conf.differences(there, wanted) == [
        ("memory", "2", "1"),
        ("cores", None, "2"),
        ("lxc.mount.entry", "x", "x, y"),
        ("lxc.environment S", "set", None),
    ]
    assert pct_conf.differences(wanted, wanted) == []


def test_a_trial_has_no_network() -> None:
    text = "net0: name=eth0\nnameserver: 1.1.1.1\nlxc.net.0.flags: up\nmp0: /a,mp=/b\n"
    assert pct_conf.without(text, "net", "lxc.net") == "nameserver: 1.1.1.1\nmp0: /a,mp=/b\n"


def test_a_configuration_is_put_in_place_whole_while_its_lock_is_held(tmp_path: Path) -> None:
    path = tmp_path / "900.conf"
    with pct_conf.locked(900, str(tmp_path / "locks")):
        pct_conf.write(path, "memory: 1\n")
    assert path.read_text() == "memory: 1\n"
    assert (path.stat().st_mode & 0o777) == 0o640  # all that the cluster's file system permits
    assert sorted(one.name for one in tmp_path.iterdir()) == ["900.conf", "locks"]
    assert pct_conf.read(tmp_path / "901.conf") is None
