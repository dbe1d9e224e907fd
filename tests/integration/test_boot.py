"""deploy/boot.py with real runs: what happens to them when the machine restarts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from deployed import HOST, TRAINER, Place, processes_of, steps, until

from deploy import boot, bootunit, onhost, switch
from trainer import status

pytestmark = pytest.mark.slow

# Goes on at the step that the file CHECKPOINT holds, and saves there every step.
RESUMES = TRAINER.replace(
    "while not stop:",
    'saved = os.environ["CHECKPOINT"]\n'
    "beat.step = int(open(saved).read()) if os.path.exists(saved) else 0\n"
    'print("begins at step", beat.step, flush=True)\n'
    "while not stop:",
).replace(
    "    time.sleep(0.02)",
    '    open(saved + ".new", "w").write(str(beat.step)); os.replace(saved + ".new", saved)\n'
    "    time.sleep(0.02)",
)


class Machine(Place):
    """A state root that is deployed to and rebooted."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.checkpoint = root.parent / "checkpoint"
        self.weights: dict | None = None

    def prepare(self, command=RESUMES, **fields) -> tuple[status.RunDir, dict]:
        """What a deploy leaves before the switch."""
        fields.setdefault("environment", {"CHECKPOINT": str(self.checkpoint)})
        run = self.run_dir(command, **fields)
        spec = self.spec(run, release_id=self.whole_release())
        made = run.run()
        assert made
        status.write_json(run.path / boot.FILE, boot.template(made, spec, self.weights), mode=0o600)
        return run, spec

    def deploy(self, command=RESUMES, **fields) -> status.RunDir:
        run, spec = self.prepare(command, **fields)
        switch.watch(HOST, switch.start(HOST, spec), lambda step: None)
        return run

    def program(self) -> list[str]:
        """What the unit starts, all but the arguments."""
        tool = onhost.install(HOST, str(self.root), bootunit.MODULES)
        return onhost.command(HOST, tool)

    def boot(self, *words: str, name: str = "demo") -> subprocess.CompletedProcess[str]:
        argv = [*self.program(), str(self.root), name, *words]
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, env={})

    def runs(self) -> list[str]:
        return [run.path.name for run in status.list_runs(self.root / "runs", "demo")]

    def decision(self) -> boot.Decision:
        return boot.decide(status.list_runs(self.root / "runs", "demo"))

    def last(self) -> status.RunDir:
        return status.list_runs(self.root / "runs", "demo")[-1]


def power_cut(run: status.RunDir) -> None:
    """Everything of a run ends at once, and nobody writes a last word."""
    launch = run.launch()
    assert launch
    while run.alive() or processes_of(run):
        for pid in [launch.pid, *processes_of(run)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    assert run.exit() is None


def reboot(run: status.RunDir) -> None:
    """What the switch of a run recorded was before the machine came up."""
    record = json.loads((run.path / "switch.json").read_text())
    status.write_json(run.path / "switch.json", {**record, "started": 1.0})


def log(run: status.RunDir) -> str:
    return b"".join(part.read_bytes() for part in sorted(run.log.iterdir())).decode()


@pytest.fixture
def machine(tmp_path):
    made = Machine(tmp_path / "state")
    try:
        yield made
    finally:
        made.end_all()


def model(path: Path) -> Path:
    """A directory that passes for a model's."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
    return path


def with_weights(machine: Machine, tmp_path: Path) -> tuple[Path, Path]:
    """Let the machine's runs have weights: (where they lie on its disk, where in shared memory)."""
    from deploy import manifest, weights_store

    source = model(tmp_path / "disk" / "model")
    digest = manifest.tree_digest(source)
    staged = tmp_path / "shm" / f"model@{digest[:12]}"
    machine.weights = {"source": str(source), "path": str(staged), "digest": digest}
    weights_store.stage(str(source), str(staged), digest)
    return source, staged


def test_after_a_reboot_the_weights_are_staged_and_the_next_run_resumes(machine, tmp_path):
    source, staged = with_weights(machine, tmp_path)
    first = machine.deploy()
    until(lambda: steps(first) > 5)
    power_cut(first)
    shutil.rmtree(staged.parent)
    reached = int(machine.checkpoint.read_text())
    done = machine.boot()
    assert (done.returncode, done.stderr) == (0, ""), done
    assert (staged / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert os.readlink(staged.parent / "model") == staged.name
    assert machine.runs() == ["0001-demo", "0002-demo"]
    second = machine.last()
    assert second.alive()
    assert "drafthouse run 0002-demo" in log(second)
    assert f"begins at step {reached}\n" in log(second)
    made = second.run()
    assert made.who.startswith("boot@")
    assert (made.command, made.environment) == (first.run().command, first.run().environment)
    assert "run 0001-demo was in progress when the machine or its engine went down" in done.stdout
    assert "start: ok" in done.stdout
    noted = json.loads((machine.root / "names" / "demo" / "booted.json").read_text())
    assert (noted["outcome"], noted["run_id"]) == ("started", "0002-demo")


def test_a_machine_that_reboots_again_goes_on_again(machine):
    run = machine.deploy()
    for _ in range(2):
        until(lambda run=run: steps(run) > 2)
        power_cut(run)
        assert machine.boot().returncode == 0
        run = machine.last()
    assert machine.runs() == ["0001-demo", "0002-demo", "0003-demo"]
    assert run.alive()


def test_a_run_that_lost_its_launch_alone_leaves_nothing_beside_the_next_one(machine):
    """An engine or a person kills launch; what it started may hold the devices."""
    first = machine.deploy()
    trainer = first.launch().trainer_pid
    os.kill(first.launch().pid, signal.SIGKILL)
    until(lambda: not first.alive())
    assert machine.boot().returncode == 0
    assert trainer not in processes_of(first)
    assert processes_of(first) == []
    assert machine.last().alive()


def test_a_finished_run_is_not_started_again(machine):
    run = machine.deploy("print('done')")
    until(lambda: run.exit() and not run.alive())
    done = machine.boot()
    assert done.returncode == 0
    assert "nothing to do: run 0001-demo has finished" in done.stdout
    assert machine.runs() == ["0001-demo"]


def test_a_run_that_a_person_stopped_is_not_started_again(machine):
    run = machine.deploy()
    stopped = switch.start(HOST, machine.spec(None, run))
    assert switch.watch(HOST, stopped, lambda step: None).word == "done"
    done = machine.boot()
    assert done.returncode == 0
    assert "run 0001-demo was stopped by ada@desk" in done.stdout
    assert machine.runs() == ["0001-demo"]


def test_a_run_that_failed_after_its_attempts_is_not_started_again(machine):
    run = machine.deploy("import sys; print('bad luck'); sys.exit(3)", restart_attempts=1)
    until(lambda: run.exit() and not run.alive())
    assert run.exit().attempts == 2
    done = machine.boot()
    assert done.returncode == 0
    assert "run 0001-demo failed: ended with exit code 3" in done.stdout
    assert machine.runs() == ["0001-demo"]


def test_a_run_in_progress_is_left_alone(machine):
    run = machine.deploy()
    done = machine.boot()
    assert (done.returncode, "run 0001-demo is in progress" in done.stdout) == (0, True)
    assert run.alive()
    assert machine.runs() == ["0001-demo"]


def test_of_two_boots_at_once_one_starts_the_run_and_the_other_sees_it(machine):
    power_cut(machine.deploy())
    argv = [*machine.program(), str(machine.root), "demo"]
    both = [
        subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = sorted((process.communicate()[0] for process in both), key=len)
    assert [process.returncode for process in both] == [0, 0]
    assert "run 0002-demo is in progress" in said[0]
    assert "run 0002-demo goes on" in said[1]
    assert machine.runs() == ["0001-demo", "0002-demo"]


def test_a_boot_waits_for_a_deploy_that_is_switching_and_then_has_nothing_to_do(machine, tmp_path):
    old = machine.deploy()
    gate = tmp_path / "gate"
    power_cut(old)
    held = machine.deploy(environment={"CHECKPOINT": str(machine.checkpoint), "GATE": str(gate)})
    new, spec = machine.prepare()
    record = switch.start(HOST, {**spec, "old_run_path": str(held.path)})  # waits for a checkpoint
    argv = [*machine.program(), str(machine.root), "demo"]
    waiting = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert waiting.stdout
    assert "a switch by ada@desk is under way; waiting" in waiting.stdout.readline()
    gate.write_text("")
    assert switch.watch(HOST, record, lambda step: None).word == "done"
    assert f"run {new.path.name} is in progress" in waiting.communicate()[0]
    assert waiting.returncode == 0
    assert machine.last().path == new.path


def test_a_switch_that_the_reboot_interrupted_goes_on_with_the_new_release(machine, tmp_path):
    held = machine.deploy(environment={"CHECKPOINT": str(machine.checkpoint), "GATE": str(tmp_path / "gate")})
    new, spec = machine.prepare("import time; print('the new one', flush=True); time.sleep(1000)")
    release = machine.whole_release("second")
    changed = {**spec, "release_id": release, "heartbeats": False}
    status.write_json(new.path / boot.FILE, boot.template(new.run(), changed, None))
    record = switch.start(HOST, {**changed, "old_run_path": str(held.path)})
    os.kill(json.loads(HOST.read(record))["job"]["pid"], signal.SIGKILL)
    power_cut(held)
    assert "run 0001-demo was in progress when" in machine.decision().reason  # not yet: no machine went down
    reboot(new)
    done = machine.boot()
    assert done.returncode == 0, done
    assert "was about to start when the machine went down" in done.stdout
    assert "the new one" in log(machine.last())
    assert os.readlink(machine.root / "names" / "demo" / "current") == f"releases/{release}"


def test_weights_that_are_gone_are_one_sentence_and_the_next_boot_finds_them_again(machine, tmp_path):
    source, staged = with_weights(machine, tmp_path)
    power_cut(machine.deploy())
    shutil.rmtree(staged.parent)
    source.rename(tmp_path / "unplugged")
    done = machine.boot()
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"weights {source} are not there any more" in done.stderr
    assert machine.runs() == ["0001-demo"]
    noted = json.loads((machine.root / "names" / "demo" / "booted.json").read_text())
    assert noted["outcome"] == "failed"
    assert str(source) in noted["reason"]
    (tmp_path / "unplugged").rename(source)
    assert machine.boot().returncode == 0
    assert machine.last().alive()


def test_weights_that_changed_on_the_disk_are_not_taken_for_those_of_the_run(machine, tmp_path):
    source, staged = with_weights(machine, tmp_path)
    power_cut(machine.deploy())
    shutil.rmtree(staged.parent)
    data = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(data[:-4] + b"abce")
    done = machine.boot()
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert machine.runs() == ["0001-demo"]
    assert not staged.exists()


@pytest.mark.parametrize(
    "part", ["release", "app/trainer/loss.py", "boot.json", "damaged boot.json", "secrets"]
)
def test_what_is_missing_is_named_and_nothing_is_left(machine, part):
    secrets = machine.root / "names" / "demo" / "secrets-0001-demo"
    secrets.parent.mkdir(parents=True)
    secrets.write_text("KEY=value\n")
    secrets.chmod(0o400)
    run = machine.deploy(secrets=["KEY"], secrets_file=str(secrets))
    power_cut(run)
    if part == "release":
        shutil.rmtree(machine.root / "names" / "demo" / "releases")
    elif part.startswith("app/"):
        (release,) = (machine.root / "names" / "demo" / "releases").iterdir()
        (release / part).write_text("loss = 0  # edited on the host")
    elif part == "secrets":
        secrets.unlink()
    elif part == "boot.json":
        (run.path / boot.FILE).unlink()
    else:
        (run.path / boot.FILE).write_text(json.dumps({"schema": 1, "run": {}, "spec": {}}))
    done = machine.boot()
    assert done.returncode == 1
    assert part.rpartition(" ")[2] in done.stderr
    assert "fab deploy" in done.stderr
    assert done.stderr.count("\n") == 1
    assert machine.runs() == ["0001-demo"]


def test_secrets_go_over_to_the_next_run_and_only_its_owner_reads_them(machine):
    secrets = machine.root / "names" / "demo" / "secrets-0001-demo"
    secrets.parent.mkdir(parents=True)
    secrets.write_text("API_KEY=hunter2\n")
    secrets.chmod(0o400)
    tells = "import os, time\nprint('key', os.environ['API_KEY'][::-1], flush=True)\ntime.sleep(1000)"
    run, spec = machine.prepare(tells, secrets=["API_KEY"], secrets_file=str(secrets))
    spec["heartbeats"] = False
    status.write_json(run.path / boot.FILE, boot.template(run.run(), spec, None), mode=0o600)
    switch.watch(HOST, switch.start(HOST, spec), lambda step: None)
    power_cut(run)
    done = machine.boot()
    assert done.returncode == 0, done
    new = machine.last()
    copy = machine.root / "names" / "demo" / "secrets-0002-demo"
    assert new.run().secrets_file == str(copy)
    assert copy.stat().st_mode & 0o777 == 0o400
    assert (copy.stat().st_uid, copy.stat().st_gid) == (secrets.stat().st_uid, secrets.stat().st_gid)
    assert copy.read_text() == "API_KEY=hunter2\n"
    assert "key 2retnuh" in log(new)
    assert "hunter2" not in done.stdout + json.dumps(status.read_json(new.path / boot.FILE))
    assert (new.path / boot.FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.root
def test_the_next_run_belongs_to_the_user_of_the_run(machine):
    run, spec = machine.prepare()
    spec["start"]["user"] = [10001, 10002]
    status.write_json(run.path / boot.FILE, boot.template(run.run(), spec, None), mode=0o600)
    switch.watch(HOST, switch.start(HOST, spec), lambda step: None)
    power_cut(run)
    assert machine.boot().returncode == 0
    owner = machine.last().path.stat()
    assert (owner.st_uid, owner.st_gid, owner.st_mode & 0o7777) == (0, 10002, 0o1775)


def test_a_run_that_dies_at_once_is_told_and_the_exit_code_says_so(machine):
    """Its checkpoint's disk is gone, say."""
    run = machine.deploy(environment={"CHECKPOINT": str(machine.checkpoint)})
    power_cut(run)
    machine.checkpoint.write_text("no number")
    done = machine.boot()
    assert done.returncode == 1
    assert "run 0002-demo was not started: run 0002-demo failed with exit code 1" in done.stderr
    assert "ValueError" in done.stdout
    assert "run 0002-demo failed" in machine.boot().stdout  # and it is not tried again for ever


def test_a_name_that_is_gone_is_no_failure(machine):
    done = machine.boot(name="pruned")
    assert (done.returncode, done.stderr) == (0, "")
    assert not (machine.root / "names" / "pruned").exists()


# -- before the machine goes down --------------------------------------------------------------------------


def test_a_shutdown_saves_first_and_the_next_boot_goes_on(machine, tmp_path):
    saves = tmp_path / "saves"
    run = machine.deploy(environment={"CHECKPOINT": str(machine.checkpoint), "SAVES": str(saves)})
    until(lambda: steps(run) > 2)
    done = machine.boot("--shutdown")
    assert done.returncode == 0, done
    assert [line.split()[0] for line in saves.read_text().splitlines()] == ["checkpoint", "term"]
    assert not run.alive()
    assert run.exit().asked_by.startswith("shutdown@")
    assert machine.boot().returncode == 0
    assert machine.last().path.name == "0002-demo"
    assert machine.last().alive()


def test_a_shutdown_stops_a_run_that_cannot_save(machine):
    run = machine.deploy(environment={"CHECKPOINT": str(machine.checkpoint), "ANSWER": "no space left"})
    until(lambda: steps(run) > 2)
    done = machine.boot("--shutdown")
    assert done.returncode == 0, done
    assert "no space left" in done.stdout
    assert not run.alive()


def test_a_run_that_has_its_signal_already_gets_no_second_one(machine, tmp_path):
    """systemd ends the processes of a login and our unit at the same time."""
    saves = tmp_path / "saves"
    slow = RESUMES.replace("if mark:\n    open", "time.sleep(1)\nif mark:\n    open")
    run = machine.deploy(slow, environment={"CHECKPOINT": str(machine.checkpoint), "SAVES": str(saves)})
    until(lambda: steps(run) > 2)
    os.kill(run.launch().pid, signal.SIGTERM)
    until(lambda: run.launch().stopping)
    assert machine.boot("--shutdown").returncode == 0
    assert not run.alive()
    assert "again" not in log(run)
    assert run.exit().asked_by == "SIGTERM"


def test_a_shutdown_with_nothing_in_progress_is_no_failure(machine):
    run = machine.deploy("print('done')")
    until(lambda: run.exit() and not run.alive())
    done = machine.boot("--shutdown")
    assert (done.returncode, "no run of demo is in progress" in done.stdout) == (0, True)


@pytest.mark.root
def test_a_full_disk_keeps_no_run_from_being_stopped_before_the_machine_goes_down(machine, tmp_path):
    machine.root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", machine.root], check=True)
    try:
        # One that writes nothing: a file that is replaced gives a page back now and then.
        run, spec = machine.prepare("import time; print('hello', flush=True); time.sleep(1000)")
        status.write_json(run.path / boot.FILE, boot.template(run.run(), spec, None))
        started = switch.start(HOST, {**spec, "heartbeats": False})
        assert switch.watch(HOST, started, lambda step: None).word == "done"
        with contextlib.suppress(OSError), open(machine.root / "full", "wb", buffering=0) as full:
            while full.write(bytes(4096)) == 4096:
                pass
        tool = onhost.install(HOST, str(tmp_path / "elsewhere"), bootunit.MODULES)
        argv = [*onhost.command(HOST, tool), str(machine.root), "demo", "--shutdown"]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert done.returncode == 0, done
        assert not run.alive()
        assert "stop: ok" in done.stdout
        assert boot.decide([run]).run is run  # though nobody's name found room on the disk
    finally:
        Path(f"/dev/shm/.drafthouse-{os.getuid()}-demo-stop.json").unlink(missing_ok=True)
        machine.end_all()
        subprocess.run(["umount", "-l", machine.root], check=True)
