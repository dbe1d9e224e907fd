"""What starts the next run after a reboot: decided from facts, and put in place, also for a plain user."""

from __future__ import annotations

import pytest

from deploy import bootunit, unitfile
from deploy.errors import DeployError
from deploy.release import Layout

LAYOUT = Layout("/home/ada/.local/state/drafthouse", "/dev/shm/drafthouse", "demo")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"uid": 0, "systemd": True}, "by drafthouse-demo.service after a reboot"),
        ({"uid": 1000, "systemd": True}, "by drafthouse-demo.service of your own systemd"),
        ({"uid": 0, "systemd": False}, "by an @reboot line in your crontab"),
        ({"uid": 0, "systemd": False, "programs": {"crontab": "/usr/bin/crontab"}}, "by an @reboot line"),
        ({"uid": 0, "systemd": False, "programs": {"crontab": None}}, "nothing starts after a reboot"),
        ({"uid": 0, "systemd": True, "boot_unit": False}, "DRAFTHOUSE_BOOT=no"),
    ],
)
def test_the_plan_says_by_what_the_next_run_will_start(facts, words):
    assert words in bootunit.describe(facts, "demo", "process")


def test_the_plan_says_that_a_restart_of_the_engine_counts_too_where_there_is_one():
    facts = {"uid": 0, "systemd": True}
    assert "after a reboot or a restart of the engine unless" in bootunit.describe(facts, "demo", "compose")
    assert "engine" not in bootunit.describe(facts, "demo", "process")


@pytest.mark.parametrize("facts", [{"uid": 0, "systemd": False}, {"uid": 1000, "systemd": True}])
def test_what_is_not_tied_to_the_engine_is_not_said_to_act_when_the_engine_alone_restarts(facts):
    said = bootunit.describe(facts, "demo", "compose")
    assert "after a reboot unless the last run finished" in said
    assert said.endswith("; when the engine alone restarts, fab start does")
    assert "engine" not in bootunit.describe(facts, "demo", "process")


def test_only_a_container_is_tied_to_the_engine_and_only_a_unit_of_the_system_can_be():
    def text(uid: int, runtime: str) -> str:
        return bootunit.text(LAYOUT, "demo", {"uid": uid}, runtime, 99.5)

    assert "PartOf=docker.service" in text(0, "compose")
    assert "WantedBy=multi-user.target docker.service\n" in text(0, "compose")
    assert "docker" not in text(0, "process")
    assert "docker" not in text(1000, "compose")
    assert "WantedBy=default.target\n" in text(1000, "compose")
    assert "TimeoutStopSec=130\n" in text(0, "process")  # the seconds, and what launch and we take


def test_declining_reaches_no_host(monkeypatch):
    monkeypatch.setenv("DRAFTHOUSE_BOOT", "no")
    said = bootunit.install(None, LAYOUT, "demo", "")  # type: ignore[arg-type]
    assert said == "nothing was put in place to start demo after a reboot (DRAFTHOUSE_BOOT=no)"


@pytest.fixture
def user(tmp_path, monkeypatch):
    """A user with a systemd; what is asked of it is noted, and done as far as it leaves files."""
    asked = []
    units = tmp_path / "config" / "systemd" / "user"
    loaded: dict[str, str] = {}

    def call(*argv: str) -> str:
        asked.append(" ".join(argv))
        name = argv[-1]
        if "enable" in argv or "disable" in argv:
            assert "--no-reload" in argv
            link = units / "default.target.wants" / name
            link.parent.mkdir(exist_ok=True)
            link.unlink(missing_ok=True)
            if "enable" in argv:
                link.symlink_to(units / name)
        if "start" in argv:
            loaded.setdefault(name, (units / name).read_text())
        if "show" in argv:
            other = loaded.get(name, (units / name).read_text()) != (units / name).read_text()
            return f"NeedDaemonReload={'yes' if other else 'no'}\n"
        if argv[0] == "loginctl" and not (tmp_path / "refuses").exists():
            (tmp_path / "linger").mkdir(exist_ok=True)
            (tmp_path / "linger" / argv[2]).touch()
        return ""

    (tmp_path / "running").mkdir()
    (tmp_path / "state").mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(unitfile, "RUNNING", str(tmp_path / "running"))
    monkeypatch.setattr(unitfile, "LINGER", tmp_path / "linger")
    monkeypatch.setattr(unitfile, "call", call)
    monkeypatch.setattr(unitfile.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(unitfile.shutil, "which", lambda *words, **more: None)  # no crontab
    return asked


def unit(tmp_path) -> str:
    layout = Layout(str(tmp_path / "state"), "/dev/shm/drafthouse", "demo")
    return bootunit.text(layout, "demo", {"uid": 1000}, "process", 90)


def test_a_user_gets_a_unit_that_does_not_wait_for_a_login(tmp_path, user):
    text, state = unit(tmp_path), str(tmp_path / "state")
    said = unitfile.install(state, "demo", text, "/tools/1234")
    assert said == "drafthouse-demo.service starts the next run after a reboot (written)"
    assert (tmp_path / "config" / "systemd" / "user" / "drafthouse-demo.service").read_text() == text
    assert user[0].startswith("loginctl enable-linger ")
    assert user[1:] == [
        "systemctl --user show --property=NeedDaemonReload drafthouse-demo.service",
        "systemctl --user enable --no-reload drafthouse-demo.service",
        "systemctl --user start --no-block drafthouse-demo.service",
    ]
    assert unitfile.remove(state, "demo").endswith("drafthouse-demo.service")
    assert not (tmp_path / "config" / "systemd" / "user" / "drafthouse-demo.service").exists()


def test_systemd_reads_its_units_again_only_for_one_that_it_has_loaded_with_another_text(tmp_path, user):
    """A reload takes the GPUs from containers of others."""
    text, state = unit(tmp_path), str(tmp_path / "state")
    unitfile.install(state, "demo", text, "/tools/1234")
    del user[:]
    assert unitfile.install(state, "demo", text, "/tools/1234").endswith("(as it was)")
    assert user == ["systemctl --user start --no-block drafthouse-demo.service"]
    (tmp_path / "config" / "systemd" / "user" / "default.target.wants" / "drafthouse-demo.service").unlink()
    unitfile.install(state, "demo", text, "/tools/1234")
    assert user[1] == "systemctl --user enable --no-reload drafthouse-demo.service"
    del user[:]
    assert unitfile.install(state, "demo", text + "# 2\n", "/tools/1234").endswith("(written)")
    assert user[:2] == [
        "systemctl --user show --property=NeedDaemonReload drafthouse-demo.service",
        "systemctl --user daemon-reload",
    ]
    del user[:]
    unitfile.remove(state, "demo")
    assert user == ["systemctl --user disable --no-reload drafthouse-demo.service"]


def test_a_user_whom_systemd_refuses_and_who_has_no_cron_is_told_both(tmp_path, user):
    (tmp_path / "refuses").touch()
    with pytest.raises(DeployError, match=r"does not let .* go on without a login, and there is no crontab"):
        unitfile.install(str(tmp_path / "state"), "demo", unit(tmp_path), "/tools/1234")
    assert not (tmp_path / "config").exists()


def test_a_systemd_that_does_not_take_the_unit_leaves_none_behind(tmp_path, user, monkeypatch):
    def refuse(*argv: str) -> None:
        if argv[0] == "systemctl":
            raise unitfile.Unable("systemctl --user daemon-reload failed: Failed to connect to bus")

    (tmp_path / "linger").mkdir()
    (tmp_path / "linger" / unitfile.machine.user_name()).touch()
    monkeypatch.setattr(unitfile, "call", refuse)
    with pytest.raises(DeployError, match="Failed to connect to bus, and there is no crontab"):
        unitfile.install(str(tmp_path / "state"), "demo", unit(tmp_path), "/tools/1234")
    assert not list((tmp_path / "config" / "systemd" / "user").iterdir())
