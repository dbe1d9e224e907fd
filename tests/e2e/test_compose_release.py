"""Releases of the compose runtime, read by a real Compose and started by a real engine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from samples import facts as sample
from samples import recipe, survey
from testbed.docker import Docker

from deploy import CHECKOUT, evidence, files, new_run, plan, release
from deploy.host import Local
from deploy.image import Image
from deploy.release import Layout, Release
from deploy.runtimes import compose
from deploy.settings import HostSettings
from deploy.weights import Weights
from trainer import status

pytestmark = [pytest.mark.engine, pytest.mark.root]

BOX = HostSettings(name="box", address="box", runtime="compose")
PYTHON_IMAGE = "python:3.11-slim-bookworm"
TRAINER = "weights: toy\ntrainer: {max-steps: 600}\n"
HOSTILE = "a b;c $(id) ${HOME} $$ 'q' \"d\" \\ #x {y} τ🙂"


class Place:
    """A host with an engine: a state root of its own, and what the compose runtime leaves in it."""

    def __init__(self, root: Path, engine: Docker, name: str) -> None:
        self.engine = engine
        self.layout = Layout(str(root / "state"), str(root / "shm"), name)
        self.host = Local()
        keep = ("DOCKER_HOST", "DOCKER_CONFIG")
        self.facts = sample(
            engine={
                "client": engine.command[0],
                "answers": True,
                "permitted": True,
                "version": "20.10.24",
                "compose": "2.40.3",
                "variables": {key: engine.environment[key] for key in keep},
            },
            state={"root": self.layout.state},
            home=str(root),
        )

    def release(self, text: str, path: Path, reference: str | None = None, **changes: Any) -> Release:
        """Rendered for this host, and written there. `reference` is an image of ours that is there."""
        settings = recipe(text, path, stem=self.layout.name).settings
        found = {**self.facts, **changes.pop("facts", {})}
        image = compose.image(CHECKOUT, BOX, settings, found)
        if isinstance(image, Image) and reference:
            image = dataclasses.replace(image, reference=reference)
        taken = survey(
            found,
            name=self.layout.name,
            layout=self.layout,
            app=release.trainer_files(CHECKOUT),
            image=image,
            **changes,
        )
        made = plan.make_release(taken, BOX, settings)
        release.write(self.host, self.layout, made)
        return made

    def run(
        self, made: Release, owner: int = compose.IMAGE_USER, content: str | None = None, **fields: Any
    ) -> status.Run:
        """The next run, in the state that a deploy and the switch bring it into before the start."""
        told = status.Run(
            "",
            self.layout.name,
            list(made.command),
            runtime="compose",
            user=f"{owner}:{owner}",
            devices=[],
            **{"restart_attempts": 0, **fields},
        )
        places = [self.layout.checkpoints, self.layout.cache]
        done = new_run.make(self.layout.state, vars(told), content, places, [owner, owner])
        run = status.Run(**done["run"])
        files.replace_link(Path(self.layout.home, "run"), f"../../runs/{run.run_id}")
        if run.secrets_file:
            files.replace_link(Path(self.layout.home, "secrets"), os.path.basename(run.secrets_file))
        return run

    def path(self, run: status.Run) -> str:
        return f"{self.layout.runs}/{run.run_id}"

    def start(self, made: Release, run: status.Run) -> status.RunDir:
        """What the switch does with the start of a container, in short."""
        path = self.layout.release(made.id)
        files.replace_link(Path(self.layout.home, "current"), f"releases/{made.id}")
        spec = compose.start_spec(run, self.facts, self.layout, path, self.path(run))
        done = subprocess.run(
            spec["argv"],
            env=spec["environment"],
            cwd=spec["working_directory"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return status.RunDir(self.path(run))

    def trial(self, made: Release, run: status.Run) -> tuple[int, str]:
        """(exit code, last line on stderr)."""
        trial = compose.trial(run, self.facts, self.layout, self.layout.release(made.id), self.path(run))
        done = self.host.run(trial.argv, env=trial.environment, input=trial.input, timeout=120, check=False)
        lines = done.err.decode().strip().splitlines() or [""]
        return done.code, lines[-1]

    def compose(self, made: Release, *words: str) -> str:
        file = f"{self.layout.release(made.id)}/compose.yaml"
        return self.engine.run("compose", "--file", file, *words)

    def down(self) -> None:
        for file in Path(self.layout.home, "releases").glob("*/compose.yaml"):
            with contextlib.suppress(Exception):
                self.engine.run("compose", "--file", file, "down", "--timeout", "5")


@pytest.fixture
def place(engine: Docker, tmp_path: Path) -> Iterator[Callable[[str], Place]]:
    made: list[Place] = []

    def make(name: str) -> Place:
        made.append(Place(tmp_path, engine, name))
        return made[-1]

    yield make
    for one in made:
        one.down()


def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.05)
    return found


# -- read by Compose ---------------------------------------------------------------------------------------

GPUS = {
    "gpus": {
        "devices": [{"index": index, "path": f"/dev/nvidia{index}"} for index in range(2)],
        "control": ["/dev/nvidiactl"],
    }
}


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        (TRAINER, {}),
        (f"{TRAINER}gpus: [1]", {"facts": GPUS}),
        (f"{TRAINER}gpus: all\nmemory: 64g\nuser: root", {"facts": GPUS}),
        (f"{TRAINER}secrets: {{KEY: env}}\ngrace_seconds: 90.5", {}),
        (f"command: [a]\nimage: {{use: '{PYTHON_IMAGE}'}}", {"data": "/data/a b $x"}),
    ],
    ids=["cpu", "gpu", "all", "secrets", "foreign"],
)
def test_compose_reads_what_is_rendered_as_it_was_meant(
    text: str, changes: Mapping[str, Any], place: Callable[[str], Place], tmp_path: Path
) -> None:
    here = place("cmpread")
    made = here.release(text, tmp_path, **changes)
    document = json.loads(here.compose(made, "config", "--format", "json"))
    assert document["name"] == "drafthouse-cmpread"
    (service,) = document["services"].values()
    assert service["read_only"] is True
    assert service["restart"] == "no"
    assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert int(service["logging"]["options"]["max-file"]) >= 3
    assert "ports" not in service
    bare = {key: value for key, value in service.items() if key in ("privileged", "init", "build")}
    assert bare == ({"init": True} if "use:" in text else {})
    binds = [mount for mount in service["volumes"] if mount["type"] == "bind"]
    assert binds == service["volumes"]
    assert all(not mount["bind"].get("create_host_path") for mount in binds)
    if "[1]" in text:
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["device_ids"] == ["1"]
        assert [entry["source"] for entry in service["devices"]] == ["/dev/nvidia1", "/dev/nvidiactl"]
    if "90.5" in text:
        assert service["stop_grace_period"] == "1m41s"
        assert service["environment"]["DRAFTHOUSE_SECRETS_FILE"] == compose.SECRETS
    if "use:" in text:
        plain = json.loads(json.dumps(binds).replace("$$", "$"))
        mounted = {mount["target"]: mount["source"] for mount in plain}
        assert mounted[compose.APP] == f"{here.layout.release(made.id)}/app", (
            "beside the file, whatever its id"
        )
        assert mounted["/data/a b $x"] == "/data/a b $x"


def test_hostile_places_reach_compose_as_they_are(engine: Docker, tmp_path: Path) -> None:
    root = tmp_path / HOSTILE.replace("/", "")
    here = Place(root, engine, "cmp.hostile")
    made = here.release(TRAINER, tmp_path)
    text = here.compose(made, "config", "--format", "json")
    document = json.loads(text)
    (service,) = document["services"].values()
    found = {mount["source"].replace("$$", "$") for mount in service["volumes"]}
    assert found == {f"{here.layout.home}/{name}" for name in ("run", "checkpoints", "cache")}
    assert document["name"] == compose.project("cmp.hostile")


def test_the_log_can_be_followed_from_current_by_hand(place: Callable[[str], Place], tmp_path: Path) -> None:
    here = place("cmpcurrent")
    made = here.release(TRAINER, tmp_path)
    files.replace_link(Path(here.layout.home, "current"), f"releases/{made.id}")
    listed = subprocess.run(
        [*here.engine.command, "compose", "config", "--services"],
        cwd=f"{here.layout.home}/current",
        env={**os.environ, **here.engine.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (listed.returncode, listed.stdout) == (0, "trainer\n")


def test_the_commands_for_people_are_a_script_that_a_shell_reads(
    place: Callable[[str], Place], tmp_path: Path
) -> None:
    here = place("cmpscript")
    made = here.release("command: [sh, -c, \"echo 'x'\\nrm -rf y\"]\nimage: {use: x}", tmp_path)
    script = made.files["launch.sh"].decode()
    commands = [line for line in script.splitlines() if line and not line.startswith("#")]
    assert len(commands) == 1
    assert commands[0].startswith("docker compose --file ")
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)


# -- started by an engine ----------------------------------------------------------------------------------

TELL = """\
import json, os, signal, sys, time
where = os.environ["DRAFTHOUSE_RUN_DIR"]
told = {
    "uid": os.getuid(), "cwd": os.getcwd(), "note": os.environ.get("NOTE"), "key": os.environ.get("KEY"),
    "unbuffered": os.environ.get("PYTHONUNBUFFERED"), "where": where,
    "first": open("/proc/1/comm").read().strip(),
    "caps": [line for line in open("/proc/self/status") if line.startswith(("CapEff", "NoNewPrivs"))],
    "shm": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize, "written": [],
}
weights = os.environ["DRAFTHOUSE_WEIGHTS"]
told["weights"] = os.listdir(weights)
checkpoints = os.environ["DRAFTHOUSE_CHECKPOINTS"]
for path in ("/", "/usr", "/opt/drafthouse", weights, "/tmp", where, checkpoints, "/dev/shm"):
    try:
        open(os.path.join(path, "x"), "w").close()
        told["written"].append(path)
    except OSError:
        pass
open(os.path.join(where, "told.json"), "w").write(json.dumps(told))
print("hello from inside", flush=True)
signal.signal(signal.SIGTERM, lambda *_: (print("saved and out", flush=True), sys.exit(0)))
while True:
    time.sleep(0.1)
"""


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A weights directory where weights are: below the host's /dev/shm."""
    directory = Path(tempfile.mkdtemp(prefix="drafthouse-test-", dir="/dev/shm"))
    directory.chmod(0o755)
    weights = directory / "w@0123"
    weights.mkdir()
    (weights / "config.json").write_text("{}")
    yield weights
    shutil.rmtree(directory)


# The image's own user where root deploys; a deployer's uid, which no image knows.
@pytest.mark.parametrize("uid", [0, 4321])
def test_a_run_in_a_container_has_its_places_its_user_and_no_more(
    uid: int, base_images: Docker, place: Callable[[str], Place], shared_memory: Path, tmp_path: Path
) -> None:
    here = place("cmprun")
    inside = uid or compose.IMAGE_USER
    command = json.dumps(["python3", "-c", TELL])
    text = f"image: {{use: '{PYTHON_IMAGE}'}}\ncommand: {command}\nsecrets: {{KEY: env}}\n"
    staged = Weights("w", "present", str(shared_memory))
    made = here.release(text, tmp_path, facts={"uid": uid, "gid": uid}, weights=staged)
    places = {
        "DRAFTHOUSE_CHECKPOINTS": here.layout.checkpoints,
        "DRAFTHOUSE_WEIGHTS": str(shared_memory),
        "NOTE": HOSTILE,
    }
    run = here.run(made, inside, "KEY=hunter2\n", environment=places, secrets=["KEY"])
    assert here.trial(made, run)[0] == 0
    directory = here.start(made, run)
    told = json.loads(until(lambda: read(directory.path / "told.json")))
    assert (told["uid"], told["key"], told["note"]) == (inside, "hunter2", HOSTILE)
    assert told["weights"] == ["config.json"], "the host's, below the container's own /dev/shm"
    assert (told["where"], told["cwd"], told["unbuffered"]) == ("/run/drafthouse", "/run/drafthouse", "1")
    assert told["written"] == ["/tmp", "/run/drafthouse", here.layout.checkpoints, "/dev/shm"]
    assert [line.split()[1] for line in told["caps"]] == ["0000000000000000", "1"]
    assert told["first"] in ("tini", "docker-init"), "one init, which passes SIGTERM on"
    assert told["shm"] == compose.shm_bytes()
    assert directory.alive(), "the lock is seen from outside"
    # From outside everything is where the plan says, and the engine's copy of the log is there for people.
    until(lambda: "hello from inside" in here.compose(made, "logs"))
    assert "hunter2" not in here.compose(made, "config") + here.compose(made, "logs")
    container = here.compose(made, "ps", "--quiet").strip()
    assert "hunter2" not in here.engine.run("inspect", container)
    here.engine.run("kill", "--signal", "TERM", container)
    ended = until(directory.exit)
    assert (ended.reason, ended.code) == ("stopped", 0), ended
    assert "saved and out" in here.compose(made, "logs"), "also after its end"


def read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def trainer_run(here: Place, tmp_path: Path, command: list[str], **fields: Any) -> tuple[Release, status.Run]:
    made = here.release(f"image: {{use: '{PYTHON_IMAGE}'}}\ncommand: {json.dumps(command)}\n", tmp_path)
    return made, here.run(made, **fields)


def test_the_trial_finds_what_the_containers_user_cannot_write(
    base_images: Docker, place: Callable[[str], Place], tmp_path: Path
) -> None:
    here = place("cmptrial")
    made, run = trainer_run(here, tmp_path, ["python3"])
    assert here.trial(made, run)[0] == 0
    os.chown(here.layout.checkpoints, 0, 0)  # as after a plain process of root's
    assert here.trial(made, run) == (
        1,
        f"error: {here.layout.checkpoints} cannot be written by the container's user (10001:10001); "
        "give it to that user, or set user:",
    )


def test_the_trial_finds_a_program_that_is_not_in_the_image(
    base_images: Docker, place: Callable[[str], Place], tmp_path: Path
) -> None:
    here = place("cmpprogram")
    made, run = trainer_run(here, tmp_path, ["trian", "x"])
    assert here.trial(made, run) == (1, "error: there is no program trian in the image")


def test_the_trial_hears_what_the_trainer_says_of_its_settings(
    base_images: Docker, place: Callable[[str], Place], tmp_path: Path
) -> None:
    """The trainer stands for itself here: a module of its name that refuses, found by PYTHONPATH."""
    here = place("cmpcheck")
    made, run = trainer_run(here, tmp_path, ["python3"])
    Path(here.layout.cache, "trainer.py").write_text(
        "import sys\nsys.exit(f'error: {sys.argv[1:]} of {__file__}')\n"
    )
    run.command = ["python3", "-u", "-m", "trainer", "--lr", HOSTILE]
    run.environment = {"PYTHONPATH": here.layout.cache}
    assert here.trial(made, run) == (
        1,
        f"error: {['--lr', HOSTILE, '--check-config']} of {here.layout.cache}/trainer.py",
    )


def test_devices_that_the_engine_cannot_give_are_refused_in_the_trial(
    base_images: Docker, place: Callable[[str], Place], tmp_path: Path
) -> None:
    here = place("cmpgpu")
    text = f"image: {{use: '{PYTHON_IMAGE}'}}\ncommand: [python3]\ngpus: [0]\n"
    made = here.release(text, tmp_path, facts={"gpus": {"devices": [{"index": 0, "path": "/dev/null"}]}})
    code, said = here.trial(made, here.run(made))
    assert code != 0
    assert "could not select device driver" in said


def test_a_container_that_was_started_leaves_nothing_when_its_run_was_started_before(
    base_images: Docker, place: Callable[[str], Place], tmp_path: Path
) -> None:
    """`docker compose up` by hand starts no second trainer on the checkpoints of a run that is over."""
    here = place("cmpagain")
    made, run = trainer_run(here, tmp_path, ["python3", "-c", "print('once')"])
    directory = here.start(made, run)
    until(directory.exit)
    here.start(made, run)
    until(lambda: "a run starts once" in here.compose(made, "logs"))
    assert [item.path.name for item in status.list_runs(here.layout.runs)] == [run.run_id]


@pytest.mark.slow
def test_our_own_image_runs_the_trainer_from_a_release(
    image: str, place: Callable[[str], Place], tmp_path: Path
) -> None:
    here = place("cmpown")
    made = here.release(f"{TRAINER}gpus: 0", tmp_path, reference=image)
    run = here.run(made)
    assert here.trial(made, run)[0] == 0
    wrong = dataclasses.replace(run, command=[*run.command, "--target-model", "/missing"])
    assert here.trial(made, wrong)[1].startswith("error: --data-dir is missing")
    directory = here.start(made, run)
    beat = until(lambda: directory.heartbeats().get(0))
    assert beat.phase in status.PHASES
    container = here.compose(made, "ps", "--quiet").strip()
    health = ["exec", container, "python", "-m", "trainer.healthcheck", "--run-dir", compose.RUN_DIR]
    assert here.engine.run(*health).startswith(f"{run.run_id}: ")
    here.engine.run("kill", "--signal", "TERM", container)
    assert until(directory.exit, 120).reason == "stopped"


def test_the_probe_of_this_engine_is_what_the_samples_say(engine: Docker, tmp_path: Path) -> None:
    """The facts that the tests above make up have the shape of real ones."""
    real = evidence.collect(Local(), str(tmp_path / "state"), str(tmp_path / "shm"), sample=0)
    assert {"client", "answers", "permitted", "version", "compose", "variables"} <= set(real["engine"])
