"""deploy/health.py: every situation that was seen, from its evidence to its verdict.

tests/cases has one file per situation: an entry of the probe's "runs" as it was recorded from a real run, the
time of judging (moved on where a silence is the point), the word, and what the reason must name.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy import health_output
from deploy.health import WORDS, verdict

CASES = sorted((Path(__file__).resolve().parent.parent / "cases").glob("*.json"))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_recorded_situation_gets_its_verdict(path):
    case = json.loads(path.read_text())
    found = verdict(case["run"], case["time"])
    assert found.word == case["word"], found
    for part in case["reason"]:
        assert part in found.reason
    assert found.next_command == case["next_command"]
    assert "\n" not in found.reason


def test_a_run_that_ended_with_its_container_was_killed_by_nobody():
    found = case("failed-rebooted")
    assert "the machine restarted since" in verdict(found["run"], found["time"]).reason
    found["run"].update(only_container=True, oom_kills_since=None)
    assert "a record of its end: the container restarted since" in verdict(found["run"], found["time"]).reason


def test_an_empty_file_may_have_all_in_a_buffer_that_the_program_made_itself():
    """PYTHONUNBUFFERED does not reach ``open(1, "w", buffering=8192)``; only fab peek tells."""
    found = case("stalled-buffered-file")
    (printer,) = [item for item in found["run"]["processes"] if item["stdout_file"]]
    printer["unbuffered"], printer["stdout_file"]["bytes"] = "1", 0
    told = verdict(found["run"], found["time"])
    assert (told.word, told.next_command) == ("stalled", "fab peek --name demo")
    assert "held back" not in told.reason  # which is not known
    printer["stdout_file"]["bytes"] = 1
    assert verdict(found["run"], found["time"]).next_command == "fab stacks --name demo"


def test_every_word_has_a_recorded_situation():
    assert {json.loads(path.read_text())["word"] for path in CASES} == set(WORDS)


def case(name: str) -> dict:
    (path,) = [path for path in CASES if path.stem == name]
    return json.loads(path.read_text())


def test_the_next_command_names_the_host_unless_it_is_this_one():
    failed = case("failed-exit-code")
    command = "fab tail --host gpu-box --name demo --lines 50"
    assert verdict(failed["run"], failed["time"], host="gpu-box").next_command == command
    assert "--host" not in (verdict(failed["run"], failed["time"], host="localhost").next_command or "")


def test_the_end_of_a_run_outweighs_what_was_read_before_it():
    """A probe reads one file after the other; the run may end in between."""
    training, finished = case("training"), case("finished")
    run = {**training["run"], "exit": finished["run"]["exit"]}
    assert verdict(run, training["time"]).word == "finished"


def test_a_heartbeat_without_steps_proves_no_progress():
    """A thread can send heartbeats while the step waits for ever."""
    stalled = case("stalled-training")
    stalled["run"]["heartbeats"]["0"]["time"] = stalled["time"]
    assert verdict(stalled["run"], stalled["time"]).word == "stalled"


def test_the_rank_that_is_furthest_behind_speaks_for_the_run():
    stalled, training = case("stalled-training"), case("training")
    now = stalled["time"]
    fresh = {**training["run"]["heartbeats"]["0"], "rank": 1, "last_step_time": now, "time": now}
    stalled["run"]["heartbeats"]["1"] = fresh
    found = verdict(stalled["run"], now)
    assert found.word == "stalled"
    assert found.reason.startswith("rank 0 ")


def several(*changes: dict) -> dict:
    """The case "training" with rank 0 as a drafter and further ranks beside it, each with its changes."""
    found = case("training")
    first = found["run"]["heartbeats"]["0"]
    found["run"]["heartbeats"] = {
        str(rank): {**first, "rank": rank, "pid": first["pid"] if rank == 0 else 900 + rank, **change}
        for rank, change in enumerate(changes)
    }
    found["run"]["processes"] += [
        {**found["run"]["processes"][-1], "pid": 900 + rank, "nspid": 900 + rank}
        for rank in range(len(changes))
    ]
    return found


def target(**changes: object) -> dict:
    return {
        "role": "target",
        "step": 480,
        "loss": None,
        "tokens_per_second": {},
        "phase_seconds": {},
        **changes,
    }


def test_of_several_ranks_the_books_of_rank_0_are_told():
    found = several({"role": "drafter"}, target(last_step_time=case("training")["time"] - 20))
    told = verdict(found["run"], found["time"])
    assert (told.word, told.reason) == ("training", verdict(case("training")["run"], found["time"]).reason)


@pytest.mark.parametrize("phase", ["checkpointing", "evaluating", "finishing"])
def test_ranks_that_wait_for_one_that_saves_or_evaluates_are_not_stalled(phase):
    found = several({"role": "drafter"}, target())
    later = found["time"] + 200
    found["run"]["heartbeats"]["0"].update(phase=phase, phase_since=found["time"], time=later)
    told = verdict(found["run"], later)
    assert told.word == ("checkpointing" if phase == "checkpointing" else "training"), told
    assert "step 17/" in told.reason


def test_the_rank_that_still_loads_is_named():
    found = several(
        {"role": "drafter"}, target(phase="loading", detail="target /m", step=0, last_step_time=None)
    )
    told = verdict(found["run"], found["time"])
    assert (told.word, told.reason[:25]) == ("loading", "rank 1 (target) target /m")


def test_the_rank_that_hangs_is_named_with_the_step_of_the_training():
    found = several({"role": "drafter"}, target())
    found["run"]["heartbeats"]["1"]["last_step_time"] -= 3
    told = verdict(found["run"], found["time"] + 900)
    assert told.word in ("silent", "stalled")
    assert told.reason.startswith("rank 1 (target) training: no progress for 15 min after step 17")


def test_a_target_may_take_as_long_as_the_steps_that_it_serves():
    found = several({"role": "drafter", "phase_seconds": {"forward": 30}}, target())
    found["run"]["heartbeats"]["1"]["last_step_time"] -= 3
    assert verdict(found["run"], found["time"] + 200).word == "training"
    assert verdict(found["run"], found["time"] + 400).word != "training"


def test_a_rank_that_is_through_is_not_waited_for():
    found = several({"role": "drafter"}, target(phase="finishing"))
    del found["run"]["processes"][-1]
    for moment in ("time", "phase_since", "last_step_time"):
        found["run"]["heartbeats"]["1"][moment] -= 900
    assert verdict(found["run"], found["time"]).word == "training"


def test_heartbeats_of_an_earlier_attempt_do_not_speak_for_this_one():
    run = case("training")["run"]
    run["launch"].update(attempt=2, output=0, offset=run["log"]["bytes"])
    assert verdict(run, case("training")["time"]).word == "starting"


def test_control_characters_of_a_log_do_not_reach_the_reason():
    failed = case("failed-exit-code")
    failed["run"]["exit"]["last_lines"] = ["\x1b]0;title\x07 boom\nsecond" + "x" * 1000]
    reason = verdict(failed["run"], failed["time"]).reason
    assert reason.isprintable()
    assert len(reason) < 300


def test_a_slow_run_needs_a_reference_and_enough_steps():
    slow = case("slow")
    assert verdict(slow["run"], slow["time"]).word == "slow"
    slow["run"]["recent"]["tokens_per_second"] = 8100
    assert verdict(slow["run"], slow["time"]).word == "training"
    slow = case("slow")
    slow["run"]["recent"]["steps"] = 5
    assert verdict(slow["run"], slow["time"]).word == "training"
    slow["run"]["reference"] = None
    assert verdict(slow["run"], slow["time"]).word == "training"


def test_who_gets_no_cpu_though_nobody_else_wants_one_is_limited():
    """As by the quota of a container's cgroup."""
    silent = case("silent-few-turns")
    silent["run"]["load"] = {"average": 0.4, "ready": 2, "cpus": 8}
    reason = verdict(silent["run"], silent["time"]).reason
    assert "(0.05 of 0.2 CPUs; load 2 on 8 CPUs: is it limited, or pinned to a busy one?)" in reason
    silent["run"]["load"] = None
    assert "(0.05 of 0.2 CPUs)" in verdict(silent["run"], silent["time"]).reason


def test_a_kernel_that_does_not_count_waits_for_a_cpu_leaves_it_to_what_was_computed():
    silent = case("silent-few-turns")
    for item in silent["run"]["processes"]:
        item.update(wanted=None)
    assert "1 process using 0.05 CPUs" in verdict(silent["run"], silent["time"]).reason
    silent["run"]["processes"][-1]["ran"] = [0, 18_400_000]
    assert "1 process using hardly any CPU (4.6 % of one)" in verdict(silent["run"], silent["time"]).reason


def test_a_rank_that_finishes_before_the_others_is_not_taken_for_dead():
    dead = case("stalled-rank-dead")
    dead["run"]["heartbeats"]["1"]["phase"] = "finishing"
    assert verdict(dead["run"], dead["time"]).word == "training"


def test_a_run_that_evaluates_does_no_steps_and_is_not_stalled():
    found = case("training")
    (beat,) = found["run"]["heartbeats"].values()
    later = found["time"] + 900
    beat["time"] = later - 1
    assert verdict(found["run"], later).word != "training"
    beat.update(
        phase="evaluating", phase_since=found["time"], detail="speculative decoding of x: 3 of 8 prompts"
    )
    told = verdict(found["run"], later)
    assert told.word == "training"
    assert told.reason.startswith(f"evaluating, step {beat['step']}")
    assert "3 of 8 prompts" in told.reason


def test_a_rank_that_has_just_died_may_be_what_ends_all_of_them():
    dead = case("stalled-rank-dead")
    assert verdict(dead["run"], dead["run"]["heartbeats"]["1"]["time"] + 1).word == "training"


def test_no_rank_is_called_dead_if_the_processes_could_not_be_read():
    dead = case("stalled-rank-dead")
    dead["run"]["processes"] = []
    assert "is gone" not in verdict(dead["run"], dead["time"] + 600).reason


def test_how_the_attempt_before_ended_is_told():
    found = case("training-second-attempt")
    launch = found["run"]["launch"]
    launch["ended"] = {"attempt": 1, "how": "by SIGKILL after 2 min 3 s"}
    words = "attempt 2 (the one before ended by SIGKILL after 2 min 3 s)"
    assert words in verdict(found["run"], found["time"]).reason
    launch.update(trainer_pid=None, ended={"attempt": 2, "how": "with exit code 3 after 5.0 s"})
    reason = verdict(found["run"], found["time"]).reason
    assert "attempt 2 has ended with exit code 3 after 5.0 s, the next one" in reason
    assert "the one before" not in reason  # of that nothing is told any more


def test_between_two_attempts_the_next_one_is_awaited():
    run = case("training-second-attempt")["run"]
    run["launch"]["trainer_pid"] = None
    found = verdict(run, case("training-second-attempt")["time"])
    assert found.word == "starting"
    assert "attempt 2 has ended, the next one is about to start" in found.reason


def test_a_device_that_the_machine_does_not_show_any_more_is_lost():
    lost = case("gpu-lost")
    lost["run"]["gpus"][0].update(lost=None, error=None, missing=True)
    found = verdict(lost["run"], lost["time"])
    assert (found.word, found.next_command) == ("gpu-lost", "fab restart --name demo")
    assert "this machine does not show it any more" in found.reason


def test_a_run_that_failed_on_a_lost_device_says_so():
    lost, failed = case("gpu-lost"), case("failed-traceback")
    found = verdict({**failed["run"], "gpus": lost["run"]["gpus"]}, failed["time"])
    assert found.word == "failed"
    assert "GPU 1 is lost" in found.reason


def test_kills_for_memory_are_told_of_a_run_that_lost_a_process_and_lives():
    dead = case("stalled-loader-dead")
    dead["run"]["memory_group"] = {"oom_kills": 2, "limit": 1 << 30}
    assert "the kernel counts 2 kills for want of memory" in verdict(dead["run"], dead["time"]).reason


def test_a_wait_for_a_network_disk_is_named():
    stalled = case("stalled-socket")
    for item in stalled["run"]["processes"]:
        item["wait"] = {"call": "read", "kind": "network disk", "on": ["/data/part-0.arrow"]}
    assert "for a network disk (its server is away?)" in verdict(stalled["run"], stalled["time"]).reason


def test_a_halt_is_the_reason_whatever_was_computed_before_it_within_the_sample():
    halted = case("stalled-halted-training")
    for item in halted["run"]["processes"]:
        item["cpu_ticks"] = [100, 108]
    found = verdict(halted["run"], halted["time"])
    assert (found.word, found.next_command) == ("stalled", "kill -CONT 22413")
    assert "halted by a signal" in found.reason
    assert "CPUs" not in found.reason


def own_command(**launch) -> tuple[dict, float]:
    """Two minutes after the start of a command of somebody's own, of which launch counts the output."""
    told = case("training-own-command")
    now = told["run"]["launch"]["trainer_started"] + 120
    told["run"]["launch"].update({"output": 0, "output_time": None, "offset": 211, **launch})
    told["run"]["log"].update(bytes=211, last_write=now - 100)
    return told["run"], now


def test_launchs_own_lines_are_no_output():
    run, now = own_command()
    assert "no output yet after 2 min" in verdict(run, now).reason
    run["log"]["tail"] = ["── drafthouse run 0001-demo", "── pid 7 holds its output back"]
    assert "last line" not in verdict(run, now).reason


def test_output_is_what_launch_has_counted_and_what_came_since():
    run, now = own_command(output=8, output_time=1.0)
    run["log"].update(bytes=219, last_write=now - 20)
    found = verdict(run, now)
    assert found.word == "training"
    assert "16 bytes of output, the newest 20 s ago" in found.reason
    run, now = own_command(output=8)
    run["launch"]["output_time"] = now - 50  # then came a line of launch's own
    assert "8 bytes of output, the newest 50 s ago" in verdict(run, now).reason


def test_a_command_that_has_printed_in_its_first_minute_trains_and_ours_still_starts():
    run, now = own_command(output=8, output_time=1.0)
    now -= 90
    run["launch"]["output_time"] = now - 5
    assert verdict(run, now).word == "training"
    run["run"]["command"] = ["/opt/venv/bin/python", "-u", "-m", "trainer", "--resume", "auto"]
    found = verdict(run, now)
    assert found.word == "starting"
    assert found.reason.startswith("no heartbeat yet; 8 bytes of output")


@pytest.mark.parametrize(
    ("living", "dead", "words"),
    [
        ([0, 2], [9], "rank 1 (pid 70) was killed by signal 9, of 3 ranks"),
        ([0, 1], [9], "rank 2 (pid 70) was killed by signal 9, of 3 ranks"),
        ([0], [256, 9], "rank 1 (pid 70) has ended with exit code 1; rank 2 (pid 71) was killed by signal 9"),
        ([0], [256], "a rank (pid 70) has ended with exit code 1, of 3 ranks"),
        ([0, 2], [], "rank 1 of 3 is gone"),
        ([0, 1], [], None),  # the last one may be on another machine
        ([0, 2], [0], None),  # it has ended well, earlier than the others
    ],
)
def test_a_dead_rank_is_known_by_the_numbers_of_the_others(living, dead, words):
    run, now = own_command()
    launch, _, trainer = run["processes"]
    run["processes"] = [launch, trainer]
    for rank in living:
        ranks = {"WORLD_SIZE": 3, "RANK": rank, "LOCAL_RANK": rank}
        run["processes"].append({**trainer, "pid": 60 + rank, "ppid": trainer["pid"], "ranks": ranks})
    for place, ended in enumerate(dead):
        gone = {"pid": 70 + place, "ppid": trainer["pid"], "state": "Z", "ended": ended, "cmdline": []}
        run["processes"].append(gone)
    found = verdict(run, now)
    assert (words or "") in found.reason
    assert ("rank" in found.reason) is (words is not None)


def test_a_dead_rank_for_which_the_others_spin_is_told_once_and_is_no_silence():
    dead = case("stalled-rank-dead")
    for item in dead["run"]["processes"]:
        item["cpu_ticks"] = [100, 140]
    found = verdict(dead["run"], dead["time"])
    assert found.word == "stalled"
    assert found.reason.count("signal 11") == 1


def test_a_killed_launch_is_explained_by_the_kernels_count():
    gone = case("failed-without-a-record")
    gone["run"]["oom_kills_since"] = 0
    assert "killed by somebody (the kernel has killed nothing" in verdict(gone["run"], gone["time"]).reason
    gone["run"]["oom_kills_since"] = 2
    assert "the kernel counts 2 kills since it began" in verdict(gone["run"], gone["time"]).reason


def test_a_finished_run_with_a_checkpoint_is_brought_home():
    finished = case("finished")
    finished["run"]["exit"]["last_checkpoint"] = {"step": 600}
    assert verdict(finished["run"], finished["time"]).next_command == "fab pull --name demo"


@pytest.mark.parametrize(
    ("words", "variable", "held"),
    [
        (["python3", "train.py"], None, True),
        (["python3", "-u", "train.py"], None, False),
        (["python3", "-Wignore", "-Xdev", "-Bu", "train.py"], None, False),
        (["python3", "train.py", "-u"], None, True),
        (["python3", "-W", "u", "train.py"], None, True),
        (["python3", "-c", "x", "-u"], "0", True),
        (["python3", "train.py"], "1", False),
        (["python3", "train.py"], "yes", False),
        (["python3", "train.py"], "", True),
        (["python3", "train.py"], "00", True),
        (["python3", "-I", "train.py"], "1", True),
        (["python3", "-Iu", "train.py"], "1", False),
        (["train"], None, False),
        ([], None, False),
    ],
)
@pytest.mark.parametrize("stdout", ["pipe:[1]", "/out.txt", "/dev/null", "/dev/pts/1", "socket:[1]", None])
def test_held_back_output_is_told_from_all_that_python_looks_at(words, variable, held, stdout):
    item = {"cmdline": words, "unbuffered": variable, "stdout": stdout}
    assert bool(health_output.buffered(item)) is (held and stdout in ("pipe:[1]", "/out.txt"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**40) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PLACES = [
    ("run",), ("launch",), ("heartbeats",), ("exit",), ("switch",), ("log",), ("processes",), ("alive",),
    ("launch", "attempt"), ("launch", "pid"), ("launch", "ended"), ("heartbeats", "0"),
    ("heartbeats", "0", "phase"),
    ("heartbeats", "0", "phase_since"), ("heartbeats", "0", "step"), ("heartbeats", "0", "phase_seconds"),
    ("heartbeats", "0", "tokens_per_second"), ("heartbeats", "0", "last_step_time"), ("log", "tail"),
    ("log", "last_write"), ("exit", "code"), ("exit", "last_lines"), ("exit", "last_checkpoint"),
    ("exit", "reason"), ("switch", "steps"), ("run", "created"), ("processes", 0),
    ("processes", 0, "cpu_ticks"), ("processes", 0, "io"), ("processes", 0, "wait"),
    ("processes", 0, "threads"), ("processes", 0, "reading"), ("processes", 0, "ranks"),
    ("processes", 0, "ended"), ("processes", 0, "cmdline"),
    ("processes", 0, "stdout_file"), ("processes", 0, "unbuffered"), ("processes", 0, "state"),
    ("gpus",), ("gpus", 0), ("gpus", 0, "others"), ("gpus", 0, "own"), ("gpus", 0, "utilization"),
    ("gpus", 0, "own_memory"), ("gpus", 0, "index"), ("gpus", 0, "error"), ("reference",), ("recent",),
    ("reference", "tokens_per_second"), ("recent", "tokens_per_second"), ("recent", "steps"), ("weights",),
    ("weights", "path"), ("deleted",), ("memory_group",), ("memory_group", "oom_kills"),
    ("log", "free_bytes"), ("log", "last_line"), ("log", "bytes"), ("launch", "offset"), ("launch", "output"),
    ("launch", "output_time"), ("processes", 0, "ran"), ("processes", 2, "wanted"),
    ("switching",), ("load",), ("load", "average"), ("load", "cpus"), ("oom_kills_since",),
    ("run", "command"),
    ("launch", "log_missing"), ("launch", "trainer_pid"), ("run", "restart_attempts"), ("exit", "signal"),
    ("container",), ("container", "exit_code"), ("container", "unknown"),
    ("container", "gone"), ("container", "error"), ("container", "finished"), ("container", "engine_started"),
]  # fmt: skip


@pytest.mark.slow
@settings(max_examples=400)
@given(st.sampled_from(CASES), st.lists(st.tuples(st.sampled_from(PLACES), JSON), min_size=1, max_size=3))
def test_no_foreign_value_breaks_a_verdict(path, damage):
    case = json.loads(path.read_text())
    for place, value in damage:
        here = case["run"]
        for key in place[:-1]:
            try:
                here = here[key]
            except (KeyError, IndexError, TypeError):
                here = None
        if isinstance(here, dict) or (isinstance(here, list) and len(here) > 0 and place[-1] == 0):
            here[place[-1]] = value
    found = verdict(case["run"], case["time"])
    assert found.word in WORDS
    assert found.reason
