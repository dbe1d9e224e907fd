"""What a run will take: memory of each device and work of a step, from shapes alone. Needs no torch.

Counts of parameters are exact, of the drafter always, of a target for the kinds that the tests hold. Memory
is what stays or is largest at one time, without what a runtime or an allocator adds. Work
counts products of matrices, the way that published figures do; the time is that work at a speed that is said.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

from trainer import device, formats, roles
from trainer.config import Settings
from trainer.drafter_config import DrafterConfig
from trainer.errors import counted

BYTES = {"float32": 4, "bfloat16": 2}
GPU_SPEED = 300e12  # FLOP/s that large matrices reach on a GPU of the H100's kind
CORE_SPEED = 40e9  # … and on a core of a CPU
MIB = 1 << 20


@dataclass(frozen=True)
class Estimate:
    """For one micro-batch of the largest size, unless it says otherwise."""

    positions: int  # of its documents, padding included
    slots: int  # of its blocks
    work: Mapping[str, float]  # FLOP by what they are for
    target_memory: Mapping[str, int]  # bytes, of a device that runs the target
    drafter_memory: Mapping[str, int]  # bytes, of a device that trains the drafter
    drafter_parameters: int
    target_parameters: int


def drafter_parameters(config: DrafterConfig) -> int:
    return sum(math.prod(shape) for shape in formats.tensors(config).values())


def target_parameters(target: SimpleNamespace) -> tuple[int, int]:
    """(all, those that a token is multiplied with, embedding and output head left out) of a decoder, by its
    text config. Layers of a kind that is not known here count as full attention.
    """
    c = vars(target)
    width, layers = c["hidden_size"], c["num_hidden_layers"]
    heads = c["num_attention_heads"]
    groups, head = c.get("num_key_value_heads") or heads, c.get("head_dim") or width // heads
    kind = str(c.get("model_type", ""))
    gated = kind.startswith(("qwen3_5", "qwen3_next"))  # the output is gated by a second half of the queries
    full = head * width * (heads * (3 if gated else 2) + 2 * groups)
    norms = 2 * width
    if kind.startswith("qwen3"):
        norms += 2 * head
    linear, linear_rest = _linear_layer(c)
    kinds = list(c.get("layer_types") or ["full_attention"] * layers)
    of_linear = kinds.count("linear_attention")
    experts, used = c.get("num_experts") or 0, c.get("num_experts_per_tok") or 0
    if experts:
        expert = 3 * width * (c.get("moe_intermediate_size") or c["intermediate_size"])
        shared = 3 * width * (c.get("shared_expert_intermediate_size") or 0)
        mlp, mlp_used = experts * (expert + width) + shared, used * expert + experts * width + shared
    else:
        mlp = mlp_used = 3 * width * c["intermediate_size"]
    mixing = (layers - of_linear) * full + of_linear * linear
    rest = (layers - of_linear) * norms + of_linear * (2 * width + linear_rest) + width
    vocabulary = c["vocab_size"] * width * (1 if c.get("tie_word_embeddings") else 2)
    return mixing + layers * mlp + rest + vocabulary, mixing + layers * mlp_used


def _linear_layer(c: Mapping[str, int]) -> tuple[int, int]:
    """(matrices, the rest) of a gated delta net's layer, as Qwen3-Next and Qwen3.5 have it."""
    keys = (c.get("linear_num_key_heads") or 0) * (c.get("linear_key_head_dim") or 0)
    value_heads, value = c.get("linear_num_value_heads") or 0, c.get("linear_value_head_dim") or 0
    values = value_heads * value
    matrices = c["hidden_size"] * (2 * keys + 3 * values + 2 * value_heads)
    return matrices, (2 * keys + values) * (c.get("linear_conv_kernel_dim") or 0) + 2 * value_heads + value


def estimate(settings: Settings, config: DrafterConfig, target: SimpleNamespace, tokens: int) -> Estimate:
    """`tokens` is how many the data has (0: not known)."""
    s, width = settings, config.hidden_size
    taps, layers = len(config.target_layer_ids), config.num_hidden_layers
    queries = config.num_attention_heads * config.head_dim
    shared = config.num_key_value_heads * config.head_dim
    window = config.sliding_window or s.max_seq_len
    positions = min(s.token_budget, s.max_batch_size * s.max_seq_len)
    slots = s.max_anchors * s.block_size
    rows = s.max_anchors * (s.block_size - 1)  # with a label
    shapes = formats.tensors(config)
    block = sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name[:2] != "fc")
    seen = min(s.max_seq_len // 2, window) + s.block_size  # keys of a slot, in the mean
    whole, used = target_parameters(target)
    soft = s.use_soft_labels
    heads = target.num_attention_heads * (
        getattr(target, "head_dim", None) or width // target.num_attention_heads
    )
    work = {
        "target": 2.0 * used * positions + 2.0 * heads * target.num_hidden_layers * positions * s.max_seq_len,
        "blocks": (8.0 if s.recompute else 6.0) * block * slots,
        "vocabulary": 2.0 * (3 if soft else 2) * config.vocab_size * width * rows,
        "context": 6.0 * positions * (taps * width * width + layers * 2 * shared * width),
        "attention": (16.0 if s.recompute else 12.0) * layers * queries * slots * seen,
    }
    size = BYTES[s.dtype]
    own = drafter_parameters(config)
    on_cpu = not device.on_gpu(roles.of(s).drafters[0])
    muon = s.optimizer == "muon"  # one moment of matrices instead of two
    kind = s.drafter_type(on_gpu=not on_cpu)
    features = positions * taps * width
    narrow = "bfloat16" in (s.dtype, kind)  # logits come in that, and are made float32
    logit = 4 * (2 if s.use_soft_labels else 1) + (2 if narrow else 0)
    chunk = min((s.loss_chunk_mb or (64 if on_cpu else 1024)) * MIB, rows * config.vocab_size * logit)
    head = config.vocab_size * width * size
    cached = tokens * taps * width * size if s.cache_features else 0
    return Estimate(
        positions=positions,
        slots=slots,
        work=work,
        target_memory={
            "weights": whole * size,
            "a layer's activations": positions * (4 * width + 3 * target.intermediate_size) * size,
            "features": features * size + cached,
        },
        drafter_memory={
            "drafter, gradients, optimiser": own * (4 + 4 + (4 if muon else 8)),
            "features": features * (size + BYTES[kind] * (kind != s.dtype)),
            **_pass(s, config, BYTES[kind], on_cpu=on_cpu, positions=positions, slots=slots, seen=seen),
            "logits": chunk,
            "output head in bfloat16": config.vocab_size * width * 2 * (kind == "bfloat16" != s.dtype),
            "embedding and output head": head * (1 if getattr(target, "tie_word_embeddings", False) else 2),
        },
        drafter_parameters=own,
        target_parameters=whole,
    )


def _pass(
    s: Settings, config: DrafterConfig, size: int, *, on_cpu: bool, positions: int, slots: int, seen: int
) -> dict[str, int]:
    """Bytes that the drafter keeps for the way back, and those of a moment on it; `size`: of a number in its
    products.
    """
    width, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    queries = config.num_attention_heads * config.head_dim
    shared = config.num_key_value_heads * config.head_dim
    cast = size != 4
    layer = slots * size * (4 * width + 4 * inner + 2 * queries + 2 * shared)
    context = positions * size * (2 * width + 3 * layers * shared)
    if on_cpu:  # attention by hand: in float32, with its probabilities; a tile sees as far as its last block
        probabilities = config.num_attention_heads * (3 * (seen - s.block_size) // 2 + 2 * s.block_size)
        layer += slots * 4 * (queries + 2 * shared + probabilities)
        context += positions * 4 * 2 * layers * shared * cast
    else:  # flex_attention: keys and values of context and blocks side by side, and its result
        layer += slots * size * (2 * queries + 2 * shared)
        context += positions * size * 2 * layers * shared
    # Matrices that are one in their product, and those that have not the type of their master.
    weights = size * width * (queries + 2 * shared + 2 * inner + (queries + inner) * cast)
    of_context = size * width * (2 * layers * shared + len(config.target_layer_ids) * width * cast)
    inputs = layers * slots * size * 2 * width
    return {
        "context": context,
        "activations": inputs + layer if s.recompute else layers * layer,
        "their gradients": max(slots * size * 3 * inner, 2 * width * inner * (size + 4)),
        "weights of products": weights * (1 if s.recompute else layers) + of_context,
    }


def lines(settings: Settings, found: Estimate, tokens: int) -> list[str]:
    """The estimate for people."""
    s, assigned = settings, roles.of(settings)
    micro_batches = s.grad_accum * len(assigned.drafters) * assigned.nodes
    total = micro_batches * sum(found.work.values())
    parts = " ".join(
        f"{name} {100 * micro_batches * work / total:.0f} %" for name, work in found.work.items()
    )
    out = [
        f"drafter: {found.drafter_parameters / 1e6:,.1f} M parameters, target: "
        f"{found.target_parameters / 1e6:,.1f} M · a step: {micro_batches} × at most "
        f"{found.positions:,} positions with {s.max_anchors:,} blocks of {s.block_size}, "
        f"{_flop(total)} ({parts})"
    ]
    if not assigned.colocated:
        for flag, memory in (("target", found.target_memory), ("drafter", found.drafter_memory)):
            places = s.target_gpus if flag == "target" else s.drafter_gpus
            what = "process" if places and places[0].startswith("cpu") else "GPU"
            out.append(f"memory of each {flag} {what} ({', '.join(places or ())}): {_memory(memory)}")
    else:
        shared = {**found.drafter_memory, **found.target_memory, "features": found.drafter_memory["features"]}
        del shared["embedding and output head"]  # the target's own
        which = (
            "the device" if len(assigned.devices) == 1 else f"each device ({', '.join(s.target_gpus or ())})"
        )
        out.append(f"memory of {which}: {_memory(shared)}")
    of_target = micro_batches * found.work["target"]
    if device.on_gpu(assigned.devices[0]):
        counts = [count * assigned.nodes for count in map(len, (assigned.targets, assigned.drafters))]
        each = (of_target / counts[0], (total - of_target) / counts[1])
        work = sum(each) if assigned.colocated else max(each)
        out.append(f"time: {work / GPU_SPEED:,.2g} s a step if a GPU does {_flop(GPU_SPEED)} in a second")
    else:
        cores = s.threads or len(os.sched_getaffinity(0))
        speed = cores * CORE_SPEED
        out.append(
            f"time: {total / speed:,.2g} s a step if {counted(cores, 'core')} "
            f"{'does' if cores == 1 else 'do'} {_flop(speed)} in a second"
        )
    if tokens:
        steps = math.ceil(tokens / found.positions) * s.epochs / micro_batches
        least = counted(math.ceil(steps), "step")
        out[-1] += f" · {tokens:,} tokens × {counted(s.epochs, 'epoch')} are at least {least}"
    return out


def _memory(parts: Mapping[str, int]) -> str:
    each = " + ".join(f"{name} {_size(value)}" for name, value in parts.items() if value)
    return f"{_size(sum(parts.values()))} = {each}"


def _size(value: float) -> str:
    return f"{value / 1e9:,.1f} GB" if value >= 1e9 else f"{value / 1e6:,.0f} MB"


def _flop(value: float) -> str:
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if value >= size:
            return f"{value / size:,.3g} {unit}"
    return f"{value / 1e6:,.3g} MFLOP"
