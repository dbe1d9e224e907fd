"""Whether GPUs hold what they are to hold, by estimate, and how many a target needs. Needs no torch."""

from __future__ import annotations

from types import SimpleNamespace

from trainer import device, placement, roles
from trainer.config import Settings
from trainer.errors import counted
from trainer.estimate import BYTES, Estimate
from trainer.placement import human

ROOM = 0.95  # of a GPU's memory: the rest is a runtime's and an allocator's


def gpus_of_target(settings: Settings, found: Estimate, target: SimpleNamespace, memory: float) -> int | None:
    """The fewest GPUs of `memory` bytes that hold one target; None if no number of them does."""
    heads = 1 if getattr(target, "tie_word_embeddings", False) else 2
    vocabulary = heads * target.vocab_size * target.hidden_size * BYTES[settings.dtype]
    return placement.gpus_for(found.target_memory, vocabulary, target.num_hidden_layers, ROOM * memory)


def memory_of_both(found: Estimate) -> int:
    """Bytes of a device that is target and drafter: what both have is there once."""
    shared = {**found.target_memory, **found.drafter_memory}
    del shared["embedding and output head"]  # the target's own
    return sum(shared.values())


def lines(
    settings: Settings, found: Estimate, target: SimpleNamespace, gpu_memory: float | None
) -> list[str]:
    """What to change where GPUs of `gpu_memory` GB (None: those here) do not hold a role; else that they do.

    Nothing if the run is not on GPUs, or their memory is not known.
    """
    assigned = roles.of(settings)
    name = assigned.devices[0]
    if not device.on_gpu(name) and (gpu_memory is None or name != "auto"):
        return []
    whole = device.gpu_memory() if gpu_memory is None else gpu_memory * 1e9
    if whole is None:
        return []
    weights, drafting = found.target_memory["weights"], sum(found.drafter_memory.values())
    beside = sum(found.target_memory.values()) - weights
    takes = f"the target takes {human(weights)} + {human(beside)} for a micro-batch"
    both, room, size = memory_of_both(found), ROOM * whole, f"{whole / 1e9:.3g} GB"
    needs = gpus_of_target(settings, found, target, whole)
    said = []
    if needs is None:
        said.append(
            f"{takes}; no number of GPUs of {size} holds it, since each needs the activations of a layer and "
            "the first the hidden states that are handed on: lower --token-budget, or take larger GPUs"
        )
    elif assigned.colocated and both > room:
        said.append(
            f"target and drafter take {human(both)} together, more than a GPU of {size} holds; "
            f"give each a GPU of its own: --target-gpus {_groups([], needs, 1)} --drafter-gpus {needs}"
        )
    elif any(len(place.split("+")) < needs for place in assigned.targets) and not assigned.colocated:
        numbers = [int(one.removeprefix("cuda:")) for one in assigned.devices]
        own = [number for number, one in zip(numbers, assigned.devices, strict=True)
               if any(one in place.split("+") for place in assigned.targets)]  # fmt: skip
        groups = _groups(own, needs, max(numbers) + 1)
        said.append(f"{takes}; it needs {counted(needs, 'GPU')} of {size}: --target-gpus {groups}")
    if drafting > room:
        said.append(
            f"a drafter takes {human(drafting)}, more than a GPU of {size} holds: lower --max-anchors or "
            "--token-budget, or take larger GPUs"
        )
    return said or [f"GPUs of {size} hold that, by this estimate"]


def _groups(numbers: list[int], size: int, following: int) -> str:
    """``0+1,2+3``: as many groups as `numbers` make, one at least, then with numbers from `following` on."""
    if len(numbers) < size:
        first = following if numbers else 0
        numbers = [*numbers, *range(first, first + size - len(numbers))]
    whole = range(0, len(numbers) - size + 1, size)
    return ",".join("+".join(map(str, numbers[i : i + size])) for i in whole)
