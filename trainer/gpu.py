"""What a CUDA device tells of itself without being waited for."""

from __future__ import annotations

from typing import Any

import torch


class GpuClock:
    """Marks in the device's own queue: what lies between two is what the device took, not the host."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1000


def memory(device: torch.device) -> tuple[int, int]:
    """(now, peak) bytes that this process holds of the device, its caches included."""
    return torch.cuda.memory_reserved(device), torch.cuda.max_memory_reserved(device)
