"""How N GPUs are best divided between target and drafter: python bench/schedule.py [--gpus 8]

A simulation of the trainer's schedule. Micro-batch j, counted through the run, is computed by target j mod T
and trained on by drafter j mod D. A target computes its own in their order and runs ahead while it has a
free send buffer. A transfer needs the micro-batch, and a free receive buffer of the drafter (two each); a
sender and a receiver have one at a time, in the order of j. A drafter trains on its own in their order. After
the G micro-batches of a step all drafters sum their gradients and step the optimiser together. Colocated,
each of N devices does both for its own. Every event follows from earlier ones alone, so one pass over the
micro-batches in their order gives the times of all.

Without --target-ms the times of the stages follow from a run's file: the work that trainer/estimate.py
counts, at speeds that are assumed and printed. With it they are given, as measured:

    python bench/schedule.py --gpus 8 --micro-batches 12 --tokens 49152 --target-ms 9000 --drafter-ms 2300

It needs no GPU and no torch. Only the default box is recorded in bench/results.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trainer.waiting import AHEAD, SHORT  # noqa: E402

CASE = (5, 3)  # the split of the run behind this project, and what it gave before and after
CASE_BEFORE, CASE_AFTER = 21_500, 12_400  # tok/s

SHAPES: dict[str, dict[str, Any]] = {  # as their config.json says
    "Qwen3-1.7B": {
        "model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    },
    "Qwen3.6-27B": {
        "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408,
        "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
        "vocab_size": 248320,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "Llama-3.3-70B": {
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    },
}  # fmt: skip
BOX = "Qwen3.6-27B"


@dataclass(frozen=True)
class Stages:
    """Seconds of each stage for one micro-batch, or for one step; `tokens` of a micro-batch."""

    target: float
    drafter: float  # forward, objective and backward
    transfer: float = 0.0
    reduced: float = (
        0.0  # bytes that a ring of drafters sums up, over the bytes that a link moves in a second
    )
    hop: float = 0.0  # latency of one hop of that ring
    optimizer: float = 0.0
    tokens: float = 1.0

    def reduce(self, drafters: int) -> float:
        """A ring all-reduce: 2 (D - 1) hops, each with a D-th of the gradient."""
        return 2 * (drafters - 1) * (self.reduced / drafters + self.hop)


@dataclass(frozen=True)
class Split:
    targets: int
    drafters: int
    colocated: bool = False

    def __str__(self) -> str:
        return f"{self.drafters} × both" if self.colocated else f"{self.targets}:{self.drafters}"


@dataclass(frozen=True)
class Result:
    """Of a run after its first steps. Shares are of the time, over all devices of a role."""

    rate: float  # tokens a second
    step: float  # seconds
    target_waits: float  # for a free send buffer
    drafter_waits: float  # for hidden states
    drafters_together: float  # for the slowest drafter, and summing gradients
    queue: float  # micro-batches that are computed and not yet trained on, in the mean
    forward: list[tuple[float, float]]  # (begin, end) of each micro-batch, from the run's begin
    sent: list[float]  # when it is in the drafter's buffer
    training: list[tuple[float, float]]

    @property
    def hint(self) -> str:
        if self.drafter_waits - self.target_waits > SHORT:
            return "targets are short"
        if self.target_waits - self.drafter_waits > SHORT:
            return "drafters are short"
        return "even"


def factors(count: int, spread: float, seed: int) -> list[tuple[float, float]]:
    """How much longer than the mean each micro-batch takes: (its size, which target, transfer and tokens
    follow; the drafter's work for it). Log-normal with mean 1 and the deviation `spread` of the logarithm.
    """
    rng = random.Random(seed)

    def draw() -> float:
        return math.exp(rng.gauss(0.0, spread) - spread * spread / 2) if spread else 1.0

    return [(draw(), draw()) for _ in range(count)]


def simulate(
    stages: Stages,
    split: Split,
    micro_batches: int,
    *,
    steps: int = 200,
    spread: float = 0.0,
    seed: int = 0,
    send: int = AHEAD,
    receive: int = AHEAD,
) -> Result:
    """`micro_batches` is G, of a step. The first fifth of the `steps` is left out of what is said."""
    T, D = split.targets, split.drafters
    count = micro_batches * steps
    sizes = factors(count, spread, seed)
    forward: list[tuple[float, float]] = []
    sent: list[float] = []
    training: list[tuple[float, float]] = []
    step_ends = [0.0]
    free = [0.0] * D  # when each drafter can go on
    together = [0.0] * steps  # seconds that the drafters of a step wait for one another and for the sum

    def at(times: list[Any], number: int, default: Any = 0.0) -> Any:
        return times[number] if number >= 0 else default

    for j, (size, more) in enumerate(sizes):
        own = j % D
        if split.colocated:
            forward.append((free[own], free[own] + stages.target * size))
            sent.append(forward[j][1])
        else:
            begin = max(at(forward, j - T, (0.0, 0.0))[1], at(sent, j - send * T))
            forward.append((begin, begin + stages.target * size))
            begin = max(
                forward[j][1],
                at(sent, j - T),
                at(sent, j - D),
                at(training, j - receive * D, (0.0, 0.0))[1],
            )
            sent.append(begin + stages.transfer * size)
        begin = max(sent[j], free[own])
        free[own] = begin + stages.drafter * more
        training.append((begin, free[own]))
        if (j + 1) % micro_batches == 0:
            summed = max(free) + stages.reduce(D)
            together[j // micro_batches] = sum(summed - one for one in free)
            step_ends.append(summed + stages.optimizer)
            free = [step_ends[-1]] * D
    return _result(split, micro_batches, stages, sizes, forward, sent, training, step_ends, together)


def _result(
    split: Split,
    micro_batches: int,
    stages: Stages,
    sizes: list[tuple[float, float]],
    forward: list[tuple[float, float]],
    sent: list[float],
    training: list[tuple[float, float]],
    step_ends: list[float],
    together: list[float],
) -> Result:
    steps = len(step_ends) - 1
    first = steps // 5
    since, until = step_ends[first], step_ends[-1]
    window = until - since

    def within(begin: float, end: float) -> float:
        return max(0.0, min(end, until) - max(begin, since))

    computing = sum(within(*one) for one in forward)
    trained = sum(within(*one) for one in training)
    waited = sum(together[first:])
    stepping = split.drafters * stages.optimizer * (steps - first)
    drafters = split.drafters * window
    idle = drafters - trained - waited - stepping - (computing if split.colocated else 0.0)
    ready = 0.0 if split.colocated else sum(
        within(made[1], taken[0]) for made, taken in zip(forward, training, strict=True)
    )  # fmt: skip
    return Result(
        rate=stages.tokens * sum(size for size, _ in sizes[first * micro_batches :]) / window,
        step=window / (steps - first),
        target_waits=0.0 if split.colocated else 1 - computing / (split.targets * window),
        drafter_waits=max(0.0, idle) / drafters,
        drafters_together=waited / drafters,
        queue=ready / window,
        forward=forward,
        sent=sent,
        training=training,
    )


def splits(gpus: int, per_target: int = 1) -> list[Split]:
    """Every way to use all of them where a target takes `per_target`."""
    found = [Split(t, gpus - t * per_target) for t in range(1, (gpus - 1) // per_target + 1)]
    return [*found, Split(gpus, gpus, colocated=True)]


# -- stages by what a run computes ------------------------------------------------------------------------


@dataclass(frozen=True)
class Assumed:
    target_tflops: float
    drafter_tflops: float
    link_gb: float  # GB/s between two GPUs, either way
    latency_us: float
    memory_gb: float  # of a GPU
    memory_rate_gb: float  # GB/s of its memory

    def line(self) -> str:
        return (
            f"assumed: {self.target_tflops:g} TFLOP/s for a target's products, {self.drafter_tflops:g} for a "
            f"drafter's; {self.link_gb:g} GB/s and {self.latency_us:g} µs between two GPUs; "
            f"{self.memory_gb:g} GB a GPU, {self.memory_rate_gb:g} GB/s to it"
        )


@dataclass(frozen=True)
class Job:
    """A recipe with a target: its stages, and what memory says of where they can be."""

    stages: Stages
    micro_batches: int
    work: dict[str, float]  # FLOP of a micro-batch
    moved: int  # bytes of a micro-batch from target to drafter
    both_memory: int  # bytes of a device that is target and drafter
    both_fit: bool  # on a GPU
    per_target: int | None  # GPUs that a target takes; None: no number of them holds it


def derived(run_file: str, shape: dict[str, Any], assumed: Assumed, vocabulary_products: float = 1.0) -> Job:
    """`vocabulary_products`: how often the products with the vocabulary are done, of what is needed."""
    from trainer import config, estimate, fitting
    from trainer.drafter_config import DrafterConfig

    settings = config.Settings(**config.read_file(run_file))
    target = SimpleNamespace(**shape)
    drafter = DrafterConfig.for_target(
        target,
        block_size=settings.block_size,
        num_layers=settings.num_draft_layers,
        num_taps=settings.num_taps,
        sliding_window=settings.sliding_window,
        mask_token_id=0,
    )
    found = estimate.estimate(settings, drafter, target, 0)
    work = {**found.work, "vocabulary": found.work["vocabulary"] * vocabulary_products}
    size = estimate.BYTES[settings.dtype]
    states = len(drafter.target_layer_ids) + settings.use_soft_labels  # the last one, too
    moved = found.positions * states * drafter.hidden_size * size
    gradient, link = 4 * found.drafter_parameters, assumed.link_gb * 1e9
    stages = Stages(
        target=work["target"] / (assumed.target_tflops * 1e12),
        drafter=sum(value for name, value in work.items() if name != "target")
        / (assumed.drafter_tflops * 1e12),
        transfer=assumed.latency_us * 1e-6 + moved / link,
        reduced=gradient / link,
        hop=assumed.latency_us * 1e-6,
        optimizer=7 * gradient / (assumed.memory_rate_gb * 1e9),  # four tensors read, three written
        tokens=found.positions,
    )
    return Job(
        stages=stages,
        micro_batches=settings.grad_accum * len(settings.drafter_gpus or (0,)),
        work=work,
        moved=moved,
        both_memory=fitting.memory_of_both(found),
        both_fit=fitting.memory_of_both(found) <= fitting.ROOM * assumed.memory_gb * 1e9,
        per_target=fitting.gpus_of_target(settings, found, target, assumed.memory_gb * 1e9),
    )


# -- for people -------------------------------------------------------------------------------------------


def best(results: dict[Split, Result]) -> Split:
    return max(results, key=lambda split: results[split].rate)


def table(results: dict[Split, Result], notes: dict[Split, str] | None = None) -> list[str]:
    """One line a split; the best of them is marked."""
    top = best({split: one for split, one in results.items() if split not in (notes or {})} or results)
    lines = ["     split     tok/s   step s  target waits  drafter waits  (sum)  queue"]
    for split, one in results.items():
        alone = "     -" if split.colocated else f"{100 * one.target_waits:4.0f} %"
        said = (notes or {}).get(split) or ("" if split.colocated else one.hint)
        lines.append(
            f"  {'*' if split == top else ' '} {split!s:>8} {one.rate:9,.0f} {one.step:8,.2f} {alone:>13} "
            f"{100 * one.drafter_waits:12.0f} % {100 * one.drafters_together:4.0f} % {one.queue:6.1f}  {said}"
        )
    return lines


def all_splits(job: Job, gpus: int, args: argparse.Namespace) -> dict[Split, Result]:
    how = {"steps": args.steps, "spread": args.spread, "seed": args.seed}
    ways = splits(gpus, job.per_target or gpus)
    return {split: simulate(job.stages, split, job.micro_batches, **how) for split in ways}


def too_large(job: Job, results: dict[Split, Result]) -> dict[Split, str]:
    """Colocated ones that a GPU cannot hold, by estimate."""
    if job.both_fit:
        return {}
    return {s: f"needs {job.both_memory / 1e9:,.0f} GB a GPU" for s in results if s.colocated}


def described(job: Job) -> str:
    s, drafting = job.stages, sum(job.work.values()) - job.work["target"]
    return (
        f"a micro-batch: {s.tokens:,.0f} tokens, target {job.work['target'] / 1e12:,.0f} TFLOP in "
        f"{s.target:.2f} s, drafter {drafting / 1e12:,.0f} TFLOP in {s.drafter:.2f} s, "
        f"{job.moved / 1e9:.2f} GB moved in {1000 * s.transfer:.0f} ms; a step: {job.micro_batches} of them, "
        f"summing gradients {1000 * s.reduce(3):.0f} ms (3 drafters), optimiser {1000 * s.optimizer:.0f} ms"
    )


def sizes_table(args: argparse.Namespace, assumed: Assumed) -> None:
    print(f"\nThe best split of {args.gpus} GPUs by the target's size, the recipe otherwise the same")
    print("          target  GPUs a target     best     tok/s  both on each  at 5:3")
    for name, shape in SHAPES.items():
        job = derived(args.config, shape, assumed)
        results = all_splits(job, args.gpus, args)
        large = too_large(job, results)
        top = best({split: one for split, one in results.items() if split not in large})
        both = next(one for split, one in results.items() if split.colocated)
        case = results.get(Split(*CASE))
        print(
            f"{name:>16} {job.per_target or '-':>14} {top!s:>8} {results[top].rate:9,.0f} {both.rate:9,.0f}"
            f"{' (!)' if large else '    '} {f'{case.rate:7,.0f}' if case else '      -'}"
        )
    print("  (!) does not fit into a GPU's memory, by estimate")


def box(args: argparse.Namespace, assumed: Assumed) -> None:
    """The reference box: its recipe, its split, and its two figures."""
    job = derived(args.config, SHAPES[BOX], assumed)
    results = all_splits(job, args.gpus, args)
    large = too_large(job, results)
    split = best({one: found for one, found in results.items() if one not in large})
    print(f"\n{BOX} by {Path(args.config).name}: {described(job)}")
    print(*table(results, large), sep="\n")
    whole = math.ceil(job.micro_batches / args.gpus) * args.gpus
    if whole != job.micro_batches:
        both = Split(args.gpus, args.gpus, colocated=True)
        full = simulate(job.stages, both, whole, steps=args.steps, spread=args.spread, seed=args.seed)
        print(
            f"  {job.micro_batches} micro-batches do not come out even on {args.gpus} devices; with {whole} "
            f"in a step {both} would do {full.rate:,.0f} tok/s."
        )
    if (case := results.get(Split(*CASE))) is None:
        return
    print(f"  {Split(*CASE)} gives {100 * case.rate / results[split].rate:.0f} % of {split}.")
    for rate in (CASE_BEFORE, CASE_AFTER):
        share = rate / case.rate
        print(
            f"  {rate:,} tok/s of the run behind this project, at {Split(*CASE)}, are {100 * share:.0f} % of "
            f"that: as if GPUs did {share * assumed.target_tflops:.0f} TFLOP/s (target) and "
            f"{share * assumed.drafter_tflops:.0f}."
        )
    by_speed(args, assumed)
    by_buffers(args, job, [split, Split(*CASE)])
    if vars(args) == vars(parsed([])):
        _record(results, split, large, args)


def by_speed(args: argparse.Namespace, assumed: Assumed) -> None:
    print("\nBy what a GPU does in a drafter's step (float32, TF32 and bfloat16 differ by up to ten)")
    print("  drafter TFLOP/s     best     tok/s  5:3 tok/s  of best  six products with the vocabulary at 5:3")
    for tflops in (300, 200, 150, 110, 80, 60, 40):
        other = dataclasses.replace(assumed, drafter_tflops=tflops)
        job = derived(args.config, SHAPES[BOX], other)
        found = all_splits(job, args.gpus, args)
        which = best({one: result for one, result in found.items() if not one.colocated})
        rate = found[Split(*CASE)].rate
        twice = derived(args.config, SHAPES[BOX], other, vocabulary_products=2)
        slower = all_splits(twice, args.gpus, args)[Split(*CASE)].rate
        print(
            f"  {tflops:15} {which!s:>8} {found[which].rate:9,.0f} {rate:10,.0f} "
            f"{100 * rate / found[which].rate:6.0f} % {slower:9,.0f}, {100 * slower / rate:.0f} %"
        )


def by_buffers(args: argparse.Namespace, job: Job, chosen: list[Split]) -> None:
    print(
        "\nBy how unequal micro-batches are and how many buffers a process has: tok/s of equal ones and two"
    )
    print("   spread  buffers " + "".join(f"{one!s:>8}" for one in chosen))
    for spread in (0.0, 0.2, 0.5):
        for buffers in (1, 2, 4):
            how: dict[str, Any] = {"send": buffers, "receive": buffers, "spread": spread, "seed": args.seed}
            row = ""
            for one in chosen:
                equal = simulate(job.stages, one, job.micro_batches, steps=args.steps)
                found = simulate(job.stages, one, job.micro_batches, steps=args.steps, **how)
                row += f"{100 * found.rate / equal.rate:6.0f} %"
            print(f"  {spread:7} {buffers:8} {row}")


def _record(
    results: dict[Split, Result], split: Split, large: dict[Split, str], args: argparse.Namespace
) -> None:
    from _results import record

    print()
    both = next(one for one in results if one.colocated)
    for against, other in (
        (f"its own split, {Split(*CASE)}", Split(*CASE)),
        (f"target and drafter on each of them{', if that fitted' if both in large else ''}", both),
    ):
        record(
            f"Qwen3.6-27B's recipe, simulated: the best split of {args.gpus} GPUs ({split})",
            against,
            ours=1e6 / results[split].rate,
            theirs=1e6 / results[other].rate,
            unit="s per million tokens",
            n=args.steps,
        )


def given(args: argparse.Namespace) -> None:
    stages = Stages(
        target=args.target_ms / 1000,
        drafter=args.drafter_ms / 1000,
        transfer=args.transfer_ms / 1000,
        # What was measured with many drafters; a ring's time hardly depends on how many.
        reduced=args.reduce_ms / 2000,
        optimizer=args.optimizer_ms / 1000,
        tokens=args.tokens,
    )
    job = Job(stages, args.micro_batches, {}, 0, 0, True, args.per_target)
    print(*table(all_splits(job, args.gpus, args)), sep="\n")


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--gpus", type=int, default=8)
    add("--config", default=str(ROOT / "runs" / "qwen3.6-27b-8gpu.yaml"), help="a run's file: the recipe")
    add("--target-tflops", type=float, default=300.0, help="that a GPU does in the target's forward pass")
    add("--drafter-tflops", type=float, default=300.0, help="… in a drafter's step")
    add("--link", type=float, default=50.0, help="GB/s between two GPUs")
    add("--latency", type=float, default=20.0, help="µs of a transfer")
    add("--gpu-memory", type=float, default=96.0, help="GB of a GPU")
    add("--memory-rate", type=float, default=1800.0, help="GB/s to a GPU's memory")
    add(
        "--spread",
        type=float,
        default=0.2,
        help="of micro-batches: deviation of the logarithm of their times",
    )
    add("--seed", type=int, default=0)
    add("--steps", type=int, default=200)
    add("--target-ms", type=float, help="measured: a target's forward pass of a micro-batch")
    add("--drafter-ms", type=float, help="measured: a drafter's forward, objective and backward")
    add("--transfer-ms", type=float, default=0.0)
    add("--reduce-ms", type=float, default=0.0, help="measured: summing gradients")
    add("--optimizer-ms", type=float, default=0.0)
    add("--micro-batches", type=int, default=12, help="of a step, where times are given")
    add("--tokens", type=float, default=16384.0, help="of a micro-batch, where times are given")
    add("--per-target", type=int, default=1, help="GPUs that a target takes, where times are given")
    args = parser.parse_args(argv)
    if (args.target_ms is None) != (args.drafter_ms is None):
        parser.error("--target-ms and --drafter-ms are given together, or none of them")
    if args.gpus < 2 or args.gpus <= args.per_target:
        parser.error(f"--gpus {args.gpus}: a target and a drafter need more GPUs than that")
    if min(args.steps, args.micro_batches, args.per_target) < 1 or args.spread < 0:
        parser.error("--steps, --micro-batches and --per-target are at least 1, and --spread at least 0")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parsed(argv)
    if args.target_ms is not None:
        given(args)
        return 0
    assumed = Assumed(
        args.target_tflops, args.drafter_tflops, args.link, args.latency, args.gpu_memory, args.memory_rate
    )
    print(assumed.line())
    print(
        f"         micro-batches of the largest size, all of it tokens, that differ by {args.spread:g} "
        f"(log-normal, seed {args.seed}); transfers cost the GPUs nothing else; G as the recipe has it"
    )
    box(args, assumed)
    sizes_table(args, assumed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
