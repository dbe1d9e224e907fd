"""A machine with a real systemd, deployed to and then rebooted: in order, and by a power cut. And cron."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deployed import CHECKOUT, TRAINER, Place, steps, until
from testbed.systemd import Machine

from deploy import boot, bootunit, host, manifest, switch, unitfile
from deploy.release import Layout
from trainer import status

pytestmark = [pytest.mark.boot, pytest.mark.root, pytest.mark.slow]

# Goes on at the step that the file CHECKPOINT holds, and saves there when it is asked to, or told to end.
RESUMES = TRAINER.replace(
    "while not stop:",
    'saved = os.environ["CHECKPOINT"]\n'
    "beat.step = int(open(saved).read()) if os.path.exists(saved) else 0\n"
    'print("begins at step", beat.step, flush=True)\n'
    'assert open(os.environ["WEIGHTS"] + "/model.safetensors", "rb").read()\n'
    "while not stop:",
).replace(
    "        beat.last_checkpoint =",
    '        open(saved, "w").write(str(beat.step))\n        beat.last_checkpoint =',
)


class Inside(host.Local):
    """A machine of the testbed as a host: its processes are its own, its files are ours."""

    def __init__(self, machine: Machine) -> None:
        super().__init__("box", sys.executable)
        self.machine = machine

    def _start(self, argv, env, stdin):
        return super()._start(self.machine.command(*argv), env, stdin)


class Box(Place):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "state")
        self.directory = directory
        self.shm = directory / "memory" / "drafthouse"
        self.machine = Machine(directory, [self.shm.parent])
        self.host = Inside(self.machine)
        self.layout = Layout(str(self.root), str(self.shm), "demo")
        self.unit = bootunit.unit_name("demo")
        self.facts = {"uid": 0, "systemd": True, "python_path": sys.executable}

    def text(self) -> str:
        return bootunit.text(self.layout, "demo", self.facts, "process", 90)

    def deploy(self) -> status.RunDir:
        """What a deploy does on the host, from the weights to the unit."""
        source = self.directory / "disk" / "model"
        if not source.exists():
            source.mkdir(parents=True)
            header = b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
            (source / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
            (source / "config.json").write_text("{}")
        digest = manifest.tree_digest(source)
        staged = self.shm / f"model@{digest[:12]}"
        stage = f"from deploy.weights_store import stage; stage({str(source)!r}, {str(staged)!r}, {digest!r})"
        done = self.host.run([sys.executable, "-c", stage], timeout=60, env={"PYTHONPATH": str(CHECKOUT)})
        assert done.code == 0
        environment = {"CHECKPOINT": str(self.directory / "checkpoint"), "WEIGHTS": str(staged)}
        run = self.run_dir(RESUMES, environment=environment)
        spec = self.spec(run)
        spec["release_id"] = self.seal()  # as a deploy leaves it
        weights = {"source": str(source), "path": str(staged), "digest": digest}
        made = run.run()
        assert made
        again = boot.template(made, spec, weights, 60.0)
        self.host.write(f"{run.path}/{boot.FILE}", json.dumps(again).encode(), mode=0o600)
        assert switch.watch(self.host, switch.start(self.host, spec), lambda step: None).word == "done"
        return run

    def last(self) -> status.RunDir:
        return status.list_runs(self.root / "runs", "demo")[-1]

    def log(self, run: status.RunDir) -> str:
        return b"".join(part.read_bytes() for part in sorted(run.log.iterdir())).decode()


@pytest.fixture
def box(tmp_path, monkeypatch):
    monkeypatch.delenv("DRAFTHOUSE_BOOT")
    made = Box(tmp_path)
    try:
        made.machine.boot()
        yield made
    finally:
        made.machine.power_cut()


def test_a_run_saves_at_a_shutdown_goes_on_at_the_next_boot_and_also_after_a_power_cut(box):
    first = box.deploy()
    said = bootunit.install(box.host, box.layout, "demo", box.text())
    assert said == f"{box.unit} starts the next run after a reboot (written)"
    assert box.machine.settled(box.unit) == "active"
    assert box.last().path == first.path  # it found that one, and left it alone
    until(lambda: steps(first) > 5)

    box.machine.power_off()
    exit = first.exit()
    assert exit
    assert exit.reason == "stopped"
    assert exit.asked_by.startswith("shutdown@")
    saved = int((box.directory / "checkpoint").read_text())
    assert saved > 5
    assert not list(box.shm.parent.iterdir())  # as we see it; a tmpfs was over it

    box.machine.boot()
    assert box.machine.settled(box.unit) == "active", box.machine.printed()
    second = box.last()
    assert second.path.name == "0002-demo"
    assert f"begins at step {saved}\n" in box.log(second)
    assert "copied" in box.machine.printed()
    assert box.machine.run("systemctl", "show", "-p", "Result", box.unit).stdout.strip() == "Result=success"
    until(lambda: steps(second) > saved)

    box.machine.power_cut()
    assert second.exit() is None
    box.machine.boot()
    assert box.machine.settled(box.unit) == "active", box.machine.printed()
    third = box.last()
    assert third.path.name == "0003-demo"
    assert f"begins at step {saved}\n" in box.log(third)

    # A person stops it, and a reboot does not bring it back.
    record = switch.start(box.host, box.spec(None, third))
    assert switch.watch(box.host, record, lambda step: None).word == "done"
    box.machine.power_off()
    box.machine.boot()
    assert box.machine.settled(box.unit) == "active"
    assert "run 0003-demo was stopped by ada@desk" in box.machine.printed()
    assert box.last().path == third.path


COUNTING = """\
command:
- python
- -c
- |
  import itertools, os, time
  print("key", os.environ["KEY"][::-1], os.environ["GREETING"], flush=True)
  for number in itertools.count():
      print("line", number, flush=True)
      time.sleep(0.05)
environment: {GREETING: "50 % of $HOME"}
secrets: {KEY: {env: KEY}}
grace_seconds: 5
settle_seconds: 0
"""


def test_what_fab_deploy_puts_there_starts_the_run_again_with_its_secrets(box):
    root = box.directory / "project"
    (root / "runs").mkdir(parents=True)
    for name in ("fabfile.py", "fabric.yaml"):
        shutil.copy(CHECKOUT / name, root / name)
    (root / "runs" / "demo.yaml").write_text(COUNTING)

    said = []

    def fab(*words: str) -> str:
        variables = {
            "PYTHONPATH": CHECKOUT,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "DRAFTHOUSE_STATE": box.root,
            "DRAFTHOUSE_SHM": box.shm,
            "HOME": root,
            "TMPDIR": box.directory,
            "KEY": "hunter2",
        }
        given = [f"{key}={value}" for key, value in variables.items()]
        done = box.machine.run("env", "-C", str(root), *given, "fab", *words, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stderr)
        return done.stdout

    assert f"by {box.unit} after a reboot unless the last run finished" in fab("plan")
    fab("deploy", "--no-follow")
    assert f"{box.unit} starts the next run after a reboot (written)" in said[-1]
    assert box.machine.settled(box.unit) == "active"
    first = box.last()
    until(lambda: "line 5" in box.log(first))
    box.machine.power_cut()

    box.machine.boot()
    assert box.machine.settled(box.unit) == "active", box.machine.printed()
    second = box.last()
    assert second.path.name == "0002-demo"
    until(lambda: "key 2retnuh 50 % of $HOME\n" in box.log(second))
    assert fab("plan").startswith("unchanged: 0002-demo runs release ")
    row = json.loads(fab("status", "--json"))[0]
    assert (row["run_id"], row["drift"]) == ("0002-demo", [])
    fab("stop")
    box.machine.power_off()
    box.machine.boot()
    assert box.machine.settled(box.unit) == "active"
    assert box.last().path == second.path


def test_the_unit_of_somebody_else_is_never_touched(box):
    path = box.machine.units / box.unit
    path.write_text("[Service]\nExecStart=true\n")
    before = path.stat().st_mtime_ns
    said = bootunit.install(box.host, box.layout, "demo", box.text())
    assert said.startswith("nothing starts demo after a reboot: ")
    assert f"{box.unit} was not written for demo" in said
    assert bootunit.remove(box.host, box.layout, "demo") == "demo had nothing that starts after a reboot"
    assert (path.read_text(), path.stat().st_mtime_ns) == ("[Service]\nExecStart=true\n", before)
    path.unlink()
    path.symlink_to("/dev/null")  # masked by an administrator
    assert "was not written for demo" in bootunit.install(box.host, box.layout, "demo", box.text())
    assert os.readlink(path) == "/dev/null"


def test_a_unit_is_written_once_renewed_when_it_changed_and_removed_with_its_name(box):
    assert "(written)" in bootunit.install(box.host, box.layout, "demo", box.text())
    box.machine.settled(box.unit)
    assert "(as it was)" in bootunit.install(box.host, box.layout, "demo", box.text())
    longer = bootunit.text(box.layout, "demo", box.facts, "process", 600)
    assert "(written)" in bootunit.install(box.host, box.layout, "demo", longer)
    shown = box.machine.run("systemctl", "show", "-p", "TimeoutStopUSec", box.unit).stdout
    assert shown.strip() == "TimeoutStopUSec=10min 30s"
    assert box.machine.run("systemctl", "is-enabled", box.unit).stdout.strip() == "enabled"
    other = Layout(str(box.directory / "other"), str(box.shm), "demo")  # the same name, another state root
    assert "was not written for demo in" in bootunit.install(box.host, other, "demo", box.text())
    assert bootunit.remove(box.host, box.layout, "demo").startswith("removed ")
    assert not (box.machine.units / box.unit).exists()
    assert not list(box.machine.units.glob("*.wants/*"))


def test_hostile_paths_reach_the_program_as_what_they_are(box):
    state = box.directory / """a "b" 'c' $d %e \\f; τ"""
    layout = Layout(str(state), str(box.shm), "demo")
    text = bootunit.text(layout, "demo", box.facts, "process", 90)
    assert unitfile.command(text)[-2:] == [str(state), "demo"]
    assert "(written)" in bootunit.install(box.host, layout, "demo", text)
    assert box.machine.settled(box.unit) == "active"
    assert f"{state} knows no experiment demo" in box.machine.printed()


@pytest.mark.parametrize("runtime", ["process", "compose"])
def test_systemd_finds_nothing_to_complain_about(tmp_path, runtime):
    for uid in (0, 1000):
        layout = Layout(str(tmp_path), "/dev/shm/drafthouse", "demo")
        facts = {"uid": uid, "python_path": "/usr/bin/python3"}
        path = tmp_path / "drafthouse-demo.service"
        path.write_text(bootunit.text(layout, "demo", facts, runtime, 360.5))
        scope = ["--user"] if uid else []
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
        argv = ["systemd-analyze", *scope, "verify", path]
        done = subprocess.run(argv, capture_output=True, text=True, env=environment)
        assert (done.returncode, done.stderr) == (0, ""), done


# -- cron --------------------------------------------------------------------------------------------------

# A crontab that is nobody's: /var/spool/cron/crontabs is empty in this mount namespace.
CRON = """
mount -t tmpfs -o mode=1730 tmpfs /var/spool/cron/crontabs
mount -t tmpfs tmpfs /run
exec "$@"
"""
CALLS = """
import subprocess, sys
from deploy import unitfile
from deploy.errors import DeployError
theirs = "# mine\\n@reboot echo hi  # drafthouse\\n5 4 * * * echo 100\\\\% τ\\n\\n@reboot not the last"
subprocess.run(["crontab", "-"], input=(theirs + "\\n").encode(), check=True)
state, text, program = sys.argv[1:]
def show(): return subprocess.run(["crontab", "-l"], capture_output=True, text=True).stdout
print(unitfile.install(state, "demo", text, program))
first = show()
assert first.startswith(theirs + "\\n"), first
assert first.count("\\n@reboot") == 3, first
unitfile.install(state, "demo", text, program)
assert show() == first
unitfile.install(state, "other", text.replace(" demo", " other"), program)
print(show().splitlines()[-1])
print(unitfile.remove(state, "demo"))
assert "names/demo" not in show() and "names/other" in show()
unitfile.remove(state, "other")
assert show() == theirs + "\\n", show()
print(unitfile.remove(state, "demo"))
subprocess.run(["crontab", "-r"], check=True)
unitfile.install(state, "demo", text, program)
print(show(), end="")
"""


def test_without_systemd_one_line_of_the_crontab_does_it_and_no_other_line_is_touched(tmp_path):
    state = tmp_path / "state 100% $HOME"
    (state / "names" / "demo").mkdir(parents=True)
    layout = Layout(str(state), str(tmp_path / "shm"), "demo")
    text = bootunit.text(layout, "demo", {"uid": 0, "python_path": sys.executable}, "process", 90)
    program = bootunit.onhost.install(host.Local(), str(state), bootunit.MODULES)
    argv = ["unshare", "--mount", "sh", "-euc", CRON, "sh", sys.executable, "-c", CALLS, state, text, program]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=CHECKOUT)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0].startswith("an @reboot line in the crontab of root starts the next run")
    assert said[2:4] == [
        "removed the line in the crontab",
        "demo had nothing that starts after a reboot",
    ]
    # What cron hands to the shell: the line up to its end, every \\% as %.
    line = said[-1].removeprefix("@reboot ").replace("\\%", "%")
    assert line.endswith(f"# drafthouse: demo in {state}")
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "there is no run that was ever started" in (state / "names" / "demo" / "boot.log").read_text()
    assert os.readlink(state / "tools" / "boot") == os.path.basename(program)
