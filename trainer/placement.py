"""Where the layers of a target lie that is spread over several devices. Needs no torch.

Layers stay in their order, so that a pass crosses from one device to the next once. What the rest of the
trainer touches lies on the first: embedding, output head (one tensor in many targets) and what it hands out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def spread(layers: Sequence[int], first: int, last: int, room: Sequence[float]) -> tuple[list[int], float]:
    """Which device each of the `layers` (sizes in bytes) goes to, and the largest share of a device's `room`
    that is then taken: the smallest possible; above 1 it does not fit.

    `first` is what lies on the first device in any case, `last` what lies on the last.
    """
    ends = [0]
    for size in layers:
        ends.append(ends[-1] + size)
    count = len(layers)
    fixed = [0] * len(room)
    fixed[0] += first
    fixed[-1] += last
    # best[k]: the largest share where the devices so far hold the first k layers; cuts[d][k]: where d begins.
    best = [_share(fixed[0] + ends[k], room[0]) for k in range(count + 1)]
    cuts: list[list[int]] = [[0] * (count + 1)]
    for extra, here in zip(fixed[1:], room[1:], strict=True):
        ways = [
            min((max(best[j], _share(extra + ends[k] - ends[j], here)), j) for j in range(k + 1))
            for k in range(count + 1)
        ]
        best, begins = [way[0] for way in ways], [way[1] for way in ways]
        cuts.append(begins)
    devices, end = [0] * count, count
    for device in range(len(room) - 1, 0, -1):
        begin = cuts[device][end]
        devices[begin:end] = [device] * (end - begin)
        end = begin
    return devices, best[count]


def needed(layers: Sequence[int], first: int, last: int, each: int, room: float) -> int | None:
    """The fewest devices of `room` bytes that hold a target where each keeps `each` bytes beside its layers;
    None if no number of them does.
    """
    if each >= room:
        return None
    for count in range(1, len(layers) + 1):
        if spread(layers, first, last, [room - each] * count)[1] <= 1:
            return count
    return None


def gpus_for(memory: Mapping[str, int], vocabulary: int, layers: int, room: float) -> int | None:
    """The fewest GPUs of `room` bytes for a target, by `estimate.Estimate.target_memory`; None: none will do.

    `vocabulary` is how many bytes of its weights are embedding and output head; its `layers` count as equal.
    """
    each = (memory["weights"] - vocabulary) // layers
    first = vocabulary + memory["features"]
    return needed([each] * layers, first, 0, memory["a layer's activations"], room)


def human(size: float) -> str:
    """``54.7 GB``"""
    for unit, whole in (("GB", 1e9), ("MB", 1e6)):
        if size >= 0.1 * whole:
            return f"{size / whole:,.1f} {unit}"
    return f"{size / 1e3:,.1f} KB"


def _share(taken: float, room: float) -> float:
    return taken / room if room > 0 else float("inf")
