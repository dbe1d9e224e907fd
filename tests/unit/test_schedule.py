"""The simulated schedule of roles: against sums that can be done by hand, and against a second simulation."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = str(ROOT / "runs" / "qwen3.6-27b-8gpu.yaml")


def _bench() -> Any:
    spec = importlib.util.spec_from_file_location("bench_schedule", ROOT / "bench" / "schedule.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


schedule = _bench()
Split, Stages, simulate = schedule.Split, schedule.Stages, schedule.simulate
ASSUMED = schedule.Assumed(300, 300, 50, 20, 96, 1800)
WAYS = [(1, 1), (1, 2), (2, 1), (3, 1), (3, 2), (2, 3), (5, 3)]


@pytest.mark.parametrize("times", [(3.0, 2.0, 1.0), (1.0, 3.0, 2.0), (1.0, 2.0, 3.0)])
def test_a_pipeline_is_as_fast_as_its_slowest_stage(times: tuple[float, float, float]) -> None:
    target, transfer, drafter = times
    found = simulate(Stages(target, drafter, transfer, tokens=10), Split(1, 1), 4)
    assert found.rate == pytest.approx(10 / max(times))
    assert found.step == pytest.approx(4 * max(times))
    assert found.target_waits == pytest.approx(1 - target / max(times), abs=0.01)
    assert found.drafter_waits == pytest.approx(1 - drafter / max(times), abs=0.01)


def test_what_only_a_step_has_is_added_to_a_drafters_time() -> None:
    stages = Stages(target=1.0, drafter=5.0, reduced=3.0, hop=0.25, optimizer=2.0)
    assert simulate(stages, Split(1, 1), 4).step == pytest.approx(4 * 5 + 2), "alone it sums nothing up"
    two = simulate(stages, Split(4, 2), 4)
    assert two.step == pytest.approx(2 * 5 + 2 * (3 / 2 + 0.25) + 2)
    assert two.drafters_together == pytest.approx(3.5 / two.step)


@pytest.mark.parametrize(("devices", "rounds"), [(1, 6), (2, 3), (4, 2), (6, 1)])
def test_devices_that_do_both_take_turns_in_rounds(devices: int, rounds: int) -> None:
    found = simulate(Stages(target=2.0, drafter=3.0), Split(devices, devices, colocated=True), 6)
    if 6 % devices == 0:
        assert found.step == pytest.approx(5 * rounds)
    assert found.step >= 5 * 6 / devices
    assert found.drafter_waits == pytest.approx(0)


def test_a_step_of_one_micro_batch_keeps_one_drafter_busy() -> None:
    stages = Stages(target=0.1, drafter=3.0)
    one, three = (simulate(stages, Split(2, drafters), 1) for drafters in (1, 3))
    assert one.rate == pytest.approx(three.rate)
    assert three.drafters_together == pytest.approx(2 / 3)


def tick(split: Any, G: int, steps: int, times: tuple[int, int, int, int], send: int, receive: int) -> float:
    """When the last step ends, by another road: processes that look at each tick what they may do."""
    target, transfer, drafter, closing = times
    T, D, count = split.targets, split.drafters, G * steps
    made, moving, arrived, done = [0] * count, [0] * count, [0] * count, [0] * count  # ends; 0: not begun
    now, barrier, closed = 0, 0, 0  # closed: steps whose sum is made
    while closed < steps:
        whole = [j for j in range(closed * G, closed * G + G) if 0 < done[j] <= now]
        if len(whole) == G and barrier == 0:
            barrier = now + closing
        if barrier and now >= barrier:
            closed, barrier = closed + 1, 0
        before = None
        while before != (made[:], arrived[:], done[:]):  # what happens at one tick may allow the next thing
            before = (made[:], arrived[:], done[:])
            for j in range(count):
                own = range(j % T, j, T)
                filled = [i for i in own if made[i] and not 0 < arrived[i] <= now]
                if not made[j] and all(0 < made[i] <= now for i in own) and len(filled) < send:
                    made[j] = now + target
                theirs = range(j % D, j, D)
                held = [i for i in theirs if moving[i] and not 0 < done[i] <= now]
                earlier = [i for i in range(j) if i % T == j % T or i % D == j % D]
                ready = 0 < made[j] <= now and all(0 < arrived[i] <= now for i in earlier)
                if ready and not moving[j] and len(held) < receive:
                    moving[j], arrived[j] = 1, now + transfer
                ready = 0 < arrived[j] <= now and all(0 < done[i] <= now for i in theirs)
                if ready and not done[j] and j // G == closed and not barrier:
                    done[j] = now + drafter
        now += 1
    return now - 1


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("times", [(7, 1, 3, 2), (3, 1, 8, 1), (5, 4, 5, 3), (2, 6, 3, 1)])
def test_another_simulation_tick_by_tick_ends_at_the_same_time(
    ways: tuple[int, int], times: tuple[int, int, int, int]
) -> None:
    split, (target, transfer, drafter, closing) = Split(*ways), times
    stages = Stages(target, drafter, transfer, optimizer=closing)
    for G, send, receive in ((3, 2, 2), (4, 1, 1), (2, 3, 1)):
        found = simulate(stages, split, G, steps=4, send=send, receive=receive)
        last = max(end for _, end in found.training) + closing
        assert last == tick(split, G, 4, times, send, receive), (G, send, receive)


@pytest.mark.parametrize("ways", WAYS)
def test_no_device_does_two_things_at_once_and_none_runs_too_far_ahead(ways: tuple[int, int]) -> None:
    targets, drafters = ways
    stages = Stages(2.0, 1.5, 0.4, optimizer=0.5)
    found = simulate(stages, Split(*ways), 6, steps=40, spread=0.6, seed=3)
    assert len(found.forward) == len(found.training) == 240
    slack = 1e-9
    for each, count in ((found.forward, targets), (found.training, drafters)):
        for j in range(count, 240):
            assert each[j][0] >= each[j - count][1] - slack
    for j, (begin, end) in enumerate(found.forward):
        assert begin < end < found.sent[j] <= found.training[j][0] + slack
        if j >= 2 * targets:
            assert begin >= found.sent[j - 2 * targets] - slack
        if j >= 2 * drafters:
            assert found.sent[j] > found.training[j - 2 * drafters][1]
    steps = [found.training[i : i + 6] for i in range(0, 240, 6)]
    for one, following in itertools.pairwise(steps):
        assert min(b for b, _ in following) >= max(e for _, e in one) + 0.5 - slack


@pytest.mark.parametrize("ways", WAYS)
def test_more_buffers_never_hurt(ways: tuple[int, int]) -> None:
    stages = Stages(2.0, 1.1, 0.3, reduced=0.2, optimizer=0.1)
    for seed in range(5):
        how = {"steps": 30, "spread": 0.7, "seed": seed}
        ends = [
            max(end for _, end in simulate(stages, Split(*ways), 6, send=s, receive=r, **how).training)
            for s, r in ((1, 1), (1, 2), (2, 2), (4, 4))
        ]
        assert ends == sorted(ends, reverse=True)
        assert ends[0] > ends[-1]


def test_a_seed_is_a_run() -> None:
    stages = Stages(2.0, 1.0)
    rates = [simulate(stages, Split(2, 1), 4, spread=0.3, seed=seed).rate for seed in (1, 1, 2)]
    assert rates[0] == rates[1] != rates[2]
    sizes = [size for pair in schedule.factors(20_000, 0.5, 0) for size in pair]
    assert sum(sizes) / len(sizes) == pytest.approx(1, abs=0.02)


def test_the_role_that_is_short_is_named() -> None:
    hints = [simulate(Stages(6.0, 2.0), Split(t, 1), 12).hint for t in (1, 3, 6)]
    assert hints == ["targets are short", "even", "drafters are short"]
    found = {split: simulate(Stages(6.0, 2.0), split, 12) for split in schedule.splits(4)}
    assert schedule.best(found) == Split(3, 1)


def test_every_split_uses_every_gpu() -> None:
    assert [str(split) for split in schedule.splits(4)] == ["1:3", "2:2", "3:1", "4 × both"]
    assert [str(split) for split in schedule.splits(8, 3)] == ["1:5", "2:2", "8 × both"]


def test_stages_follow_from_the_recipe_and_what_is_assumed() -> None:
    job = schedule.derived(RECIPE, schedule.SHAPES["Qwen3.6-27B"], ASSUMED)
    assert (job.stages.tokens, job.micro_batches, job.per_target) == (49152, 12, 1)
    assert job.moved == 49152 * 6 * 5120 * 2, "five taps and the last hidden state, in bfloat16"
    assert job.stages.transfer == pytest.approx(20e-6 + job.moved / 50e9)
    # 2 FLOP for each of 25 billion parameters and token, and the attention
    assert 2 * 24e9 * 49152 / 300e12 < job.stages.target < 2 * 30e9 * 49152 / 300e12
    slower = schedule.derived(
        RECIPE, schedule.SHAPES["Qwen3.6-27B"], schedule.Assumed(300, 60, 50, 20, 48, 1800)
    )
    assert slower.stages.drafter == pytest.approx(5 * job.stages.drafter)
    assert slower.per_target == 2
    assert schedule.derived(RECIPE, schedule.SHAPES["Llama-3.3-70B"], ASSUMED).per_target == 2


def test_given_times_make_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--gpus",
        "4",
        "--target-ms",
        "3000",
        "--drafter-ms",
        "1000",
        "--tokens",
        "1000",
        "--spread",
        "0",
    ]
    assert schedule.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["1:3", "333"], ["2:2", "667"], ["*", "3:1"]]
    with pytest.raises(SystemExit):
        schedule.main(["--target-ms", "3"])
    assert "--target-ms and --drafter-ms are given together" in capsys.readouterr().err
