"""The stand-in for Proxmox's programs: what it takes, and what it must refuse."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed import leftovers
from testbed.pct import archives, standin
from testbed.pct.box import PveBox
from testbed.pct.container import Container
from testbed.place import TestbedError, run

pytestmark = [pytest.mark.pve, pytest.mark.slow]

# Many commands by one Python, each in a fork of it. $1 is where the stand-in's package lies.
MANY = """
import json, os, sys, tempfile
sys.path.insert(0, os.path.dirname(sys.argv[1]))
from standin import create, inside, lifecycle, lxc, oci, pct, program, settings
file, commands = json.load(sys.stdin)
answers = []
for words in commands:
    with tempfile.TemporaryFile("w+") as errors:
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.dup2(errors.fileno(), 2)
            sys.argv = ["pct", *words]
            code = 70
            try:
                program.main("pct", file)
                code = 0
            except SystemExit as ended:
                code = ended.code
            finally:
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        errors.seek(0)
        answers.append((code, errors.read()))
print(json.dumps(answers))
"""
HERE = "nodes/pve/lxc"
# What nobody may be able to do: words for pct; the exit code; what stderr must say.
REFUSED = [
    ("status 999", 2, f"Configuration file '{HERE}/999.conf' does not exist"),
    ("exec 999 -- true", 2, f"Configuration file '{HERE}/999.conf' does not exist"),
    ("config 205", 2, f"Configuration file '{HERE}/205.conf' does not exist"),  # another node's
    ("start 205", 255, f"Configuration file '{HERE}/205.conf' does not exist"),
    (
        "create 205 local:vztmpl/small.tar.zst --storage local-zfs",
        255,
        "CT 205 already exists on node 'pve2'",
    ),
    ("stop 999", 255, "CT 999 not running"),
    ("exec 201 -- true", 255, "container '201' not running!"),
    ("push 201 /etc/hostname /tmp/x", 255, "can only push files to a running CT"),
    ("exec 200 ls -l", 255, "Unknown option: l"),
    ("exec 200", 255, "missing command"),
    ("start 200", 255, "CT 200 already running"),
    ("destroy 200", 255, "unable to destroy CT 200 - container is running"),
    ("destroy --purge 200", 255, "400 not enough arguments"),  # the option's value
    ("frobnicate 200", 255, "ERROR: unknown command 'pct frobnicate'"),
    ("status", 255, "400 not enough arguments"),
    ("status 200 201", 255, "400 too many arguments"),
    ("status 12", 255, "400 Parameter verification failed."),
    ("set 201", 255, "no options specified"),
    ("set 201 --foo 1", 255, "Unknown option: foo"),
    ("set 201 --lxc.mount.entry x", 255, "Unknown option: lxc.mount.entry"),
    ("set 201 --onboot maybe", 255, "400 unable to parse boolean option"),
    ("set 201 --memory 8", 255, "memory: value must have a minimum value of 16"),
    ("set 201 --memory 1G", 255, "memory: type check ('integer') failed - got '1G'"),
    ("set 201 --cmode pty", 255, "cmode: value 'pty' does not have a value in the enumeration"),
    ("set 201 --mp0 /srv", 255, "mp: property is missing and it is not optional"),
    ("set 201 --mp0 /srv,mp=/x,rw=1", 255, "invalid key in comma-separated list property: rw"),
    ("set 201 --mp0 /srv/../etc,mp=/x", 255, "contains illegal character sequences"),
    ("set 201 --mp256 /srv,mp=/x", 255, "Unknown option: mp256"),
    ("set 201 --dev0 /dev/nvidia9", 255, "Device /dev/nvidia9 does not exist"),
    ("set 201 --dev0 /etc/hostname", 255, "/etc/hostname is not a valid device path"),
    ("set 201 --dev0 /dev/null,mode=666", 255, "value does not match the regex pattern"),
    ("set 201 --hookscript local:snippets/none", 255, "script 'local:snippets/none' does not exist"),
    ("set 201 --unprivileged 0", 255, "unable to modify read-only option: 'unprivileged'"),
    ("set 201 --delete memory", 255, "unable to delete required option 'memory'"),
    ("set 201 --delete nothing", 255, "unknown option 'nothing'"),
    ("set 201 --digest 0", 255, "detected modified configuration"),
    ("set 202 --onboot 1", 255, "CT is locked (backup)"),
    ("start 202", 255, "CT is locked (backup)"),
    ("destroy 202", 255, "CT is locked (backup)"),
    ("start 203", 255, "startup for container '203' failed"),  # its mount's source is missing
    ("start 204", 255, "Device /dev/nvidia9 does not exist"),
    ("clone 200 300", 254, "does not simulate pct clone"),
    ("create 300 none:vztmpl/x.tar.zst", 255, "storage 'none' does not exist"),
    ("create 300 local:vztmpl/x.tgz --storage local-zfs", 255, "unable to parse directory volume name"),
    ("create 300 local:vztmpl/none.tar.zst --storage local-zfs", 255, "unable to create CT 300 - volume"),
    (
        "create 300 /none.tar --storage local-zfs",
        255,
        "unable to create CT 300 - can't find file '/none.tar'",
    ),
    ("create 300 local:vztmpl/small.tar.zst", 255, "storage 'local' does not support container directories"),
    ("create 300 local:vztmpl/small.tar.zst --storage small", 255, "unable to create CT 300 - "),  # full
    (
        "create 300 local:vztmpl/small.tar.zst --storage local-zfs --mp0 /srv,mp=/x",
        255,
        "mount points configured, but 'rootfs' not set - aborting",
    ),
    (
        "create 300 local:vztmpl/devices.tar.zst --storage local-zfs",
        255,
        "unable to create CT 300 - command 'lxc-usernsexec",
    ),
    (
        "create 300 local:vztmpl/small.tar.zst --storage local-zfs --net0 name=eth0,bridge=none --start 1",
        255,
        "bridge 'none' does not exist",
    ),
]


@pytest.fixture(scope="module")
def host(pve_box: PveBox) -> PveBox:
    """With a running container 200; 201 stopped; 202 locked; 203, 204 broken; 205 on another node."""
    archives.root_tarball(pve_box.templates / "small.tar.zst")
    node = tarfile.TarInfo("./usr/null")
    node.type, node.devmajor, node.devminor = tarfile.CHRTYPE, 1, 3
    archives.root_tarball(pve_box.templates / "devices.tar.zst", files=[node])
    pve_box.container(200, memory=300)
    pve_box.container(201, running=False)
    pve_box.container(202, running=False, lock="backup")
    pve_box.container(203, running=False, mp0="/none,mp=/x")
    pve_box.container(204, running=False, dev0="/dev/nvidia9")
    pve_box.conf(205, "pve2").write_text(pve_box.conf(201).read_text())
    return pve_box


@pytest.fixture
def release(host: PveBox) -> Iterator[PveBox]:
    """The host, whose release a test may change."""
    yield host
    host.version = "9.1"


def pct(box: PveBox, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return box.call("pct", *words)


def test_what_it_refuses_and_how_it_says_so(host: PveBox) -> None:
    before = {path: path.read_text() for path in host.pve.glob("nodes/*/lxc/*.conf")}
    commands = [words.split() for words, _, _ in REFUSED]
    python = [os.path.realpath(sys.executable), "-IS", "-c", MANY]
    said = host.call(*python, standin.__path__[0], input=json.dumps([str(host.settings_file), commands]))
    answers = json.loads(said.stdout)
    wrong = [
        f"pct {words}: {answer}"
        for (words, code, sentence), answer in zip(REFUSED, answers, strict=True)
        if answer[0] != code or sentence not in answer[1]
    ]
    assert not wrong
    assert host.conf(300).exists()  # the last one was made, but did not start
    host.remove(300)
    assert before == {path: path.read_text() for path in host.pve.glob("nodes/*/lxc/*.conf")}
    assert not list(Path(f"{host.root}/var/lib/rpool/data").glob("subvol-300*"))


def test_exec_passes_what_it_gets_but_for_the_environment_it_leaks(host: PveBox) -> None:
    show = ["sh", "-c", 'env; printf "%s|" "$@"; exit 7', "sh", "a b", "$(id)", "--", ""]
    environment = {"SECRET": "s3cret", "SSL_CERT_FILE": "/x", "LC_ALL": "C.UTF-8"}
    leaked = host.call("pct", "exec", "200", "--", *show, env=environment)
    clean = host.call("pct", "exec", "200", "--keep-env", "0", "--", *show, env=environment)
    assert (leaked.returncode, clean.returncode) == (7, 7)
    assert leaked.stdout.endswith("\na b|$(id)|--||")
    assert "SECRET=s3cret\n" in leaked.stdout
    assert "PATH=/sbin:/bin:/usr/sbin:/usr/bin\n" in leaked.stdout
    assert "\nSSL_CERT_FILE" not in leaked.stdout
    assert "SECRET" not in clean.stdout
    for locale, arrives in (("C.UTF-8", "ä"), ("C", "\ufffd\ufffd")):
        done = host.call("pct", "exec", "200", "--", "echo", "ä", env={"LC_ALL": locale})
        assert done.stdout == f"{arrives}\n"


def test_a_release_knows_only_what_it_has(release: PveBox, tmp_path: Path) -> None:
    archives.oci_archive(release.templates / "oci.tar")
    words = "create 300 local:vztmpl/oci.tar --storage local-zfs"
    release.version = "8.1"
    assert (
        "Unknown option: keep-env" in pct(release, *["exec", "200", "--keep-env", "0", "--", "true"]).stderr
    )
    assert pct(release, "exec", "200", "--", "true").returncode == 0
    assert "unable to parse directory volume name" in pct(release, *words.split()).stderr  # no plain .tar
    release.version = "9.0"
    assert pct(release, *["exec", "200", "--keep-env", "0", "--", "true"]).returncode == 0
    assert "Unknown option: entrypoint" in pct(release, *["set", "201", "--entrypoint", "/x"]).stderr
    taken = archives.oci_archive(release.directory / "vz" / "oci.tar")
    as_root = pct(release, "create", "300", f"/var/lib/vz/{taken.name}", "--storage", "local-zfs")
    assert as_root.returncode == 0
    assert "falling back to 'unmanaged'" in as_root.stdout  # blobs and index.json as its root directory
    release.remove(300)
    assert release.run("pveversion").startswith("pve-manager/9.0.10/")
    assert "pve-container: 6.0.13\n" in release.run("pveversion", "--verbose")


@pytest.mark.parametrize("spoilt", ["./", "compressed"])
def test_an_archive_with_other_names_is_no_oci_archive(host: PveBox, spoilt: str) -> None:
    archive = archives.oci_archive(host.templates / "spoilt.tar", prefix="./" if spoilt == "./" else "")
    if spoilt == "compressed":
        run(["zstd", "-q", "--rm", "-1", "-f", archive])
        archive = archive.with_suffix(".tar.zst")
    done = pct(host, "create", "300", f"local:vztmpl/{archive.name}", "--storage", "local-zfs")
    assert "Detected OCI archive" not in done.stdout
    host.remove(300)


@pytest.mark.parametrize("unprivileged", ["0", "1"])
def test_an_oci_image_becomes_a_container(release: PveBox, unprivileged: str) -> None:
    """Its environment reaches init only; it hears its stop signal; /dev/shm is one in the newest release."""
    release.version = "9.2" if unprivileged == "1" else "9.1"
    archive = archives.oci_archive(release.templates / "oci.tar", {"WorkingDir": "/tmp", "User": "nobody"})
    words = (
        f"create 300 local:vztmpl/{archive.name} --storage local-zfs --unprivileged {unprivileged} --start 1"
    )
    done = pct(release, *words.split(), "--dev0", "/dev/null,mode=0600,gid=5")
    assert (done.returncode, done.stdout) == (0, "Detected OCI archive\n"), done.stderr
    settings = release.pct("config", "300")
    assert "entrypoint: /usr/bin/tini -- sleep 1000000\n" in settings
    assert "memory: 512\n" in settings
    assert ("unprivileged: 1\n" in settings) == (unprivileged == "1")
    assert ("lxc.init.uid: 65534\n" in settings) == (release.version == "9.2")
    inside = "cat /proc/1/environ; echo; env; cat /proc/mounts; stat -c %u:%g:%a /dev/null /etc"
    said = release.call("pct", "exec", "300", "--keep-env", "0", "--", "sh", "-c", inside).stdout
    of_init, rest = said.split("\n", 1)
    assert "PYTHONUNBUFFERED=1" in of_init
    assert "PYTHONUNBUFFERED" not in rest
    assert (" /dev/shm tmpfs " in rest) == (release.version == "9.2")
    assert rest.endswith("0:5:600\n0:0:755\n")
    assert pct(release, *["shutdown", "300", "--timeout", "5"]).returncode == 0
    assert pct(release, *["destroy", "300", "--purge", "1"]).returncode == 0
    assert not release.conf(300).exists()


def test_shutdown_leaves_what_does_not_end_unless_told(host: PveBox) -> None:
    """A container from a root file system gets no TERM: its halt signal is PWR, unless it is set.

    And a line of its configuration that pct does not know is warned of, and lost when pct writes the file.
    """
    host.pct(*["create", "300", "local:vztmpl/small.tar.zst", "--storage", "local-zfs"])
    with open(host.conf(300), "a") as conf:
        conf.write("lxc.init.cmd: /usr/bin/tini -- sleep 99\nlxc.signal.halt: SIGCONT\nlxc.nonsense: 1\n")
    started = pct(host, "start", "300")
    assert started.returncode == 0
    assert "vm 300 - unable to parse config: lxc.nonsense: 1" in started.stdout
    left = pct(host, *["shutdown", "300", "--timeout", "1"])
    assert (left.returncode, "container did not stop" in left.stderr) == (255, True)
    assert pct(host, *["shutdown", "300", "--timeout", "1", "--forceStop", "1"]).returncode == 0
    assert host.pct("status", "300") == "status: stopped\n"
    host.pct("set", "300", "--onboot", "0")
    assert "lxc.nonsense" not in host.conf(300).read_text()
    assert "lxc.signal.halt: SIGCONT" in host.conf(300).read_text()
    host.remove(300)


def test_settings_of_a_running_container_wait_for_its_next_start(host: PveBox) -> None:
    host.pct(*["set", "200", "--mp1", "/var/lib/vz,mp=/vz,ro=1", "--description", "one", "--memory", "200"])
    text = host.conf(200).read_text()
    assert text.startswith("#one\n")
    assert "memory: 200\n" in text
    assert text.endswith("\n[pve:pending]\nmp1: /var/lib/vz,mp=/vz,ro=1\n")
    assert pct(host, *["exec", "200", "--", "ls", "/vz"]).returncode != 0
    host.pct("reboot", "200")
    assert "template" in host.pct(*["exec", "200", "--", "ls", "/vz"])
    assert "[pve:pending]" not in host.conf(200).read_text()
    assert pct(host, *["exec", "200", "--", "touch", "/vz/x"]).returncode == 1  # read-only
    host.pct(*["set", "200", "--delete", "mp1,description"])


def test_push_fills_a_file_where_it_lies(host: PveBox, tmp_path: Path) -> None:
    """So whoever has it open, or looks at the wrong moment, sees half of it."""
    seen = []
    for name, text in (("one", "1" * 10), ("two", "2" * 5)):
        (tmp_path / name).write_text(text)
        host.pct("push", "200", tmp_path / name, "/root/file", "--perms", "640", "--user", "nobody")
        seen.append(host.pct(*["exec", "200", "--", "stat", "-c", "%a:%u:%i", "/root/file"]))
    assert seen[0] == seen[1]
    assert seen[0].startswith("640:65534:")
    host.pct("pull", "200", "/root/file", tmp_path / "back")
    assert (tmp_path / "back").read_text() == "22222"
    missing = pct(host, "push", "200", "/none", "/root/file")
    assert (missing.returncode, missing.stderr) == (255, "failed to open /none for reading\n")


def test_storages_and_the_next_id_are_told(host: PveBox) -> None:
    shown = host.call("pvesm", "status", "--content", "rootdir").stdout.splitlines()
    assert [line.split()[:3] for line in shown[1:]] == [
        ["local-zfs", "zfspool", "active"],
        ["small", "dir", "active"],
    ]
    template = "local:vztmpl/small.tar.zst"
    assert host.call("pvesm", "path", template).stdout == "/var/lib/vz/template/cache/small.tar.zst\n"
    assert template in host.call("pvesm", "list", "local", "--content", "vztmpl").stdout
    made = host.call("pvesm", "alloc", "local-zfs", "301", "", "1G").stdout
    assert made == "successfully created 'local-zfs:subvol-301-disk-0'\n"
    assert host.call("pvesm", "free", "local-zfs:subvol-301-disk-0").returncode == 0
    assert host.call("pvesh", "get", "/cluster/nextid").stdout == "100\n"
    asked = ["pvesh", "get", "/cluster/resources", "--type", "vm", "--output-format", "json"]
    guests = {guest["vmid"]: guest["node"] for guest in json.loads(host.call(*asked).stdout)}
    assert (guests[200], guests[205]) == ("pve", "pve2")


def test_it_is_reached_by_ssh_and_acts_for_root_only(host: PveBox) -> None:
    listed = [line.split() for line in host.run("pct", "list").splitlines()]
    assert listed[0] == ["VMID", "Status", "Lock", "Name"]
    assert ["202", "stopped", "backup", "trainer"] in listed
    with pytest.raises(TestbedError, match="ended with 255:\nplease run as root"):
        host.run("/usr/sbin/pct", "list", user="ada")


@pytest.mark.parametrize("unprivileged", [False, True], ids=["privileged", "unprivileged"])
def test_systemd_runs_in_a_container(pve_box: PveBox, unprivileged: bool) -> None:
    """It starts units, and ends in order when the container is shut down."""
    container = Container(pve_box, 210, systemd=True, unprivileged=unprivileged)
    container.make()
    unit = "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/touch /root/began\n"
    unit += "ExecStop=/bin/touch /root/ended\n[Install]\nWantedBy=multi-user.target\n"
    container.write("etc/systemd/system/probe.service", unit)
    wants = container.write("etc/systemd/system/multi-user.target.wants/.keep", "").parent
    (wants / "probe.service").symlink_to("/etc/systemd/system/probe.service")
    container.start()
    container.exec("sh", "-c", "until [ -S /run/systemd/private ]; do sleep 0.02; done")
    state = container.exec("systemctl", "is-system-running", "--wait", check=False).stdout
    assert state == "running\n"
    assert (container.files / "root/began").exists()
    pve_box.pct("shutdown", "210", "--timeout", "30")
    assert (container.files / "root/ended").exists()
    container.remove()


def test_nothing_is_left_of_a_box_that_is_stopped_while_containers_run() -> None:
    box = PveBox()
    box.start()
    box.container(200, systemd=True)
    name, number = box.cgroup, box.number
    box.stop()
    assert not Path(f"/run/netns/{name}").exists()
    assert not [line for line in leftovers.found() if line.endswith(f"box{number}")]
    assert not [entry for entry in Path("/proc").glob("[0-9]*") if name in alive_in(entry)]


def alive_in(process: Path) -> str:
    """The cgroups of a process; empty if it has ended, and only nobody has asked how."""
    with contextlib.suppress(OSError):
        if (process / "cmdline").read_bytes():
            return (process / "cgroup").read_text()
    return ""
