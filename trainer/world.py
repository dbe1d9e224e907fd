"""The processes of one run, and what they tell each other: torch.distributed behind a few words.

What decides the next thing to do (a stop, a save, a log line) travels between the hosts by gloo, so that no
GPU is waited for; gradients travel as the devices do, by NCCL between GPUs and by gloo on CPUs. A run of one
process has a world of one, in which nothing travels.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer import lost
from trainer.roles import Rank

# A checkpoint or an evaluation of rank 0 may take as long as it takes. Who died is told by a closed
# connection, who hangs by --stall-timeout.
PATIENCE = datetime.timedelta(days=365)


_LOST = re.compile(r"connection|socket|broken pipe|peer", re.IGNORECASE)


class PeerLost(Exception):
    """Another process of the run is gone."""


class World:
    """All ranks of a run, seen from one of them. The drafters (or the colocated ranks) are a team.

    Every method that names the team or all must be called by each of these, in the same order. All of them
    raise PeerLost if a process that takes part is gone.
    """

    def __init__(self, ranks: Sequence[Rank], number: int, store: str | None = None) -> None:
        """Join the others; waits until they have come. `store`: where they find each other, as
        torch.distributed's init_method; needed if there are others.
        """
        self.ranks = tuple(ranks)
        self.rank = ranks[number]
        self.team = [rank for rank in ranks if rank.role != "target"]
        self.targets = [rank for rank in ranks if rank.role == "target"]
        self._team_hosts: Any = None
        self._team_devices: Any = None
        self._all: Any = None
        self.channels: Any = None  # the group in which features are asked for, by threads of their own
        if len(ranks) == 1:
            return
        assert store is not None
        on_gpu = self.rank.device.startswith("cuda")
        if store.startswith("file:"):  # one machine: its host name need not lead anywhere
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        lost.watch()
        with peers():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                init_method=store,
                rank=number,
                world_size=len(ranks),
                timeout=PATIENCE,
            )
            members = [rank.number for rank in self.team]
            self._all = dist.new_group(backend="gloo", timeout=PATIENCE)
            self.channels = dist.new_group(backend="gloo", timeout=PATIENCE)
            self._team_hosts = dist.new_group(members, backend="gloo", timeout=PATIENCE)
            self._team_devices = (
                dist.new_group(members, backend="nccl", timeout=PATIENCE) if on_gpu else self._team_hosts
            )

    @property
    def main(self) -> bool:
        """Whether this rank keeps the books: log line, checkpoints, metrics, requests."""
        return self.rank.number == 0

    @property
    def several(self) -> bool:
        return len(self.ranks) > 1

    def mine(self, first: int, end: int) -> range:
        """The micro-batches `first` … `end` - 1 that this member of the team trains on, or this target
        computes: number j is trained on by member j mod D and computed by target j mod T.
        """
        count = len(self.targets if self.rank.role == "target" else self.team)
        return range(first + (self.rank.index - first) % count, end, count)

    # -- the team --------------------------------------------------------------------------------

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over the team, on the devices."""
        if len(self.team) > 1:
            with peers():
                for tensor in tensors:
                    dist.all_reduce(tensor, group=self._team_devices)

    def add(self, values: Sequence[float]) -> list[float]:
        """Sums of numbers over the team, on the hosts."""
        if len(self.team) == 1:
            return [float(value) for value in values]
        summed = torch.tensor(values, dtype=torch.float64)
        with peers():
            dist.all_reduce(summed, group=self._team_hosts)
        return summed.tolist()

    def tell(self, value: Any) -> Any:
        """What rank 0 says, to the team."""
        return self._broadcast(value, self._team_hosts) if len(self.team) > 1 else value

    def gather(self, value: Any) -> list[Any]:
        """What each of the team says, by rank, to rank 0; nothing to the others."""
        if len(self.team) == 1:
            return [value]
        found: list[Any] | None = [None] * len(self.team) if self.main else None
        with peers():
            dist.gather_object(value, found, dst=0, group=self._team_hosts)
        return found or []

    def copy_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by that of rank 0, in the team."""
        if len(self.team) > 1:
            with peers():
                for tensor in tensors:
                    own = tensor if tensor.is_contiguous() else tensor.contiguous()
                    dist.broadcast(own, src=0, group=self._team_devices)
                    if own is not tensor:
                        tensor.copy_(own)

    # -- all ranks, and two of them ------------------------------------------------------------------

    def order(self, value: Any = None) -> Any:
        """What rank 0 says, to all."""
        return self._broadcast(value, self._all) if self.several else value

    def send(self, value: Any, to: Rank) -> None:
        with peers():
            dist.send_object_list([value], dst=to.number, group=self._all)

    def receive(self, source: Rank) -> Any:
        found = [None]
        with peers():
            dist.recv_object_list(found, src=source.number, group=self._all)
        return found[0]

    def send_tensors(self, tensors: Iterable[Tensor], to: Rank) -> None:
        with peers():
            for tensor in tensors:
                dist.send(tensor.detach().contiguous(), dst=to.number)

    def receive_tensors(self, tensors: Iterable[Tensor], source: Rank) -> None:
        """Into contiguous `tensors`."""
        with peers():
            for tensor in tensors:
                dist.recv(tensor.detach(), src=source.number)

    def _broadcast(self, value: Any, group: Any) -> Any:
        said = [value]
        with peers():
            dist.broadcast_object_list(said, src=0, group=group)
        return said[0]

    def close(self) -> None:
        if self.several and dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def peers() -> Iterator[None]:
    """Raises PeerLost for what torch.distributed says of a connection that has ended: gloo a RuntimeError in
    words of its own, NCCL one of torch's.
    """
    try:
        yield
    except (dist.DistNetworkError, dist.DistBackendError):
        raise PeerLost from None
    except RuntimeError as error:
        if _LOST.search(str(error)) is None:
            raise
        raise PeerLost from None
