"""Whether weights, and what their run needs besides, fit into a host's memory; what would make room. Pure.

A tmpfs takes whatever its own limit allows, also where there is no memory for it: then the kernel kills
something. So three things are compared with what is needed before a byte is sent: the limit of the tmpfs, the
memory that is free on the host, and what the limit of the container leaves that we may be in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deploy import sizes
from deploy.checks import Check
from deploy.runtimes import CONTAINED, compose
from deploy.settings import TOY, RunSettings
from deploy.sizes import size

if TYPE_CHECKING:
    from deploy.survey import Survey
    from deploy.weights import Weights

TOY_BYTES = 20_000_000
PROCESS_BYTES = 1_000_000_000  # of a trainer's process without weights: PyTorch with its buffers on the host

Run = Mapping[str, Any]  # of the probe
Copy = Mapping[str, Any]  # an item of `weights_uses.listing`


@dataclass(frozen=True)
class Own:
    """What a run needs of memory besides its weights, as far as anybody says so."""

    bytes: int = 0
    words: str = ""


NOTHING = Own()


@dataclass(frozen=True)
class Short:
    """What is too small: `where` (shm | memory), by how many bytes, and the sentence that says so."""

    where: str
    bytes: int
    sentence: str


@dataclass(frozen=True)
class Eviction:
    """A copy that goes so that others fit in. `held`: only once the run in progress has stopped."""

    path: str
    bytes: int
    held: bool = False

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True)
class Budget:
    """What is known of a run's memory: `words` for the plan, what is short, and what goes first."""

    words: str = ""
    checks: tuple[Check, ...] = ()
    evict: tuple[Eviction, ...] = ()


def of_run(survey: Survey, host: str, run: RunSettings, runtime: str, devices: int) -> Budget:
    """The budget of a plan. What is short fails no check if what --evict-first removes makes up for it."""
    weights, live = survey.weights, survey.live
    need = need_of(weights)
    if weights is None or not need:
        return Budget()
    toy = weights.action == TOY  # next to nothing, and so is the run that learns from it
    own = NOTHING if toy else own_need(run, runtime, devices, live)
    short = shortages(survey.facts, host, need, own, held=weights.held)
    evict: tuple[Eviction, ...] = ()
    if short and survey.copies is not None:
        most = max(one.bytes for one in short)
        evict = evictions(survey.copies, weights.path or "", weights.name, live, most)
    failed = [] if evict else [Check(one.where, False, one.sentence, _remedy(survey, one)) for one in short]
    return Budget("" if toy else _words(survey.facts, need, own), tuple(failed), evict)


def need_of(weights: Weights | None) -> int:
    """Bytes of shared memory that weights still take there."""
    if weights is None or weights.action == TOY:
        return 0 if weights is None else TOY_BYTES
    return weights.bytes if weights.action in ("copy", "push") else 0


def own_need(run: RunSettings, runtime: str, devices: int, live: Run | None) -> Own:
    """What the run needs besides its weights: as its file says, else what our trainer is known to need.

    A run in progress gives back about as much when it stops, so nothing is added then.
    """
    if live is not None:
        return Own(0, f"the run takes the place of {live['run_id']}")
    limit = sizes.parse(run.memory) if run.memory and runtime in CONTAINED else None
    if limit is not None:
        return Own(limit, f"memory: {run.memory}")
    return working_need(run, runtime, devices)


def working_need(run: RunSettings, runtime: str, devices: int) -> Own:
    """What a run needs besides its weights, as far as it is known, whatever its file permits it."""
    if run.command is not None:
        return Own(0, "what its command needs besides is not known")
    count = max(1, devices)
    parts = [f"{count} process{'es' if count > 1 else ''}"]
    total = count * PROCESS_BYTES
    if runtime in CONTAINED:
        total += compose.container_shm(run, devices)
        parts.append("its container's /dev/shm")
    return Own(total, " and ".join(parts))


def shortages(
    facts: Mapping[str, Any], host: str, need: int, own: Own = NOTHING, *, held: int = 0
) -> list[Short]:
    """What is too small for `need` bytes of weights more, and for the run; empty if all fits.

    `held`: bytes of an interrupted copy, which this one takes over or clears away.
    """
    shm, memory = facts["shm"], facts.get("memory") or {}
    found = []

    def look(where: str, holder: str, free: int | None, what: str, needed: int) -> None:
        if free is not None and free + held < needed:
            short = needed - free - held
            sentence = f"{holder} has {size(free + held)}{what}: {size(short)} too little"
            found.append(Short(where, short, sentence))

    look("shm", shm["root"], shm.get("free_bytes"), f" free, but the weights need {size(need)}", need)
    if shm.get("is_tmpfs"):
        whole = need + own.bytes
        what = f"the weights need {size(need)}"
        if own.bytes:
            what = (
                f"the weights ({size(need)}) and the run ({size(own.bytes)}: {own.words}) need {size(whole)}"
            )
        what = f" of memory free, but {what}"
        look("memory", host, memory.get("available"), what, whole)
        look("memory", container_of(facts, host), memory.get("room"), what, whole)
    return found


def container_of(facts: Mapping[str, Any], host: str) -> str:
    """What a host's memory limit belongs to."""
    proxmox = facts.get("proxmox")
    return f"container {proxmox['container']} ({host})" if proxmox else f"the container of {host}"


def more_memory(facts: Mapping[str, Any]) -> str:
    """The command that gives a container of a Proxmox host more memory; empty for other hosts."""
    proxmox = facts.get("proxmox")
    return f"pct set {proxmox['container']} --memory MEGABYTES on the Proxmox host" if proxmox else ""


def evictions(
    copies: Iterable[Copy], wanted: str, name: str, live: Run | None, short: int
) -> tuple[Eviction, ...]:
    """Which copies go so that `short` bytes more fit in at `wanted`; none if all that may go is not enough.

    Other versions of `name`, and what the run in progress was started with: first those that nobody uses.
    What any process holds but those of the run in progress stays.
    """
    ours = {process["pid"] for process in live["processes"]} if live else set()
    started = _started(live)
    found = []
    for one in others(copies, wanted, name, started):
        held = bool(one["processes"]) or one["path"] == started
        if not set(one["processes"]) - ours:
            found.append(Eviction(one["path"], one["memory"], held))
    chosen: list[Eviction] = []
    for eviction in sorted(found, key=lambda one: (one.held, -one.bytes)):
        if sum(one.bytes for one in chosen) < short:
            chosen.append(eviction)
    return tuple(chosen) if sum(one.bytes for one in chosen) >= short else ()


def others(copies: Iterable[Copy], wanted: str, name: str, started: str | None = None) -> list[Copy]:
    """The copies in shared memory that could go for `wanted`: other versions of `name`, and `started`.

    Not what interrupted copies left: that is counted as `held` already.
    """
    version = wanted.rpartition("@")[2]

    def goes(one: Copy) -> bool:
        same = one["name"] == name and not (version and one["digest"].startswith(version))
        in_memory = one["where"] == "memory" and not one.get("partial")
        return in_memory and one["path"] != wanted and (same or one["path"] == started)

    return [one for one in copies if goes(one)]


def described(evicted: Sequence[Eviction]) -> str:
    """``m@0123456789ab (53 GB)`` of each."""
    return ", ".join(f"{one.name} ({size(one.bytes)})" for one in evicted)


def _started(live: Run | None) -> str | None:
    """The weights that a run was started with, where they lie."""
    found: str | None = ((live or {}).get("weights") or {}).get("path")
    return found


def _remedy(survey: Survey, short: Short) -> str:
    """How to make room. Where old and new weights do not fit in together, it says so."""
    weights, live = survey.weights, survey.live
    assert weights is not None
    old = [
        one
        for one in survey.facts.get("weights", ())
        if one["name"] == weights.name or one["path"] == _started(live)
    ]
    there = sum(one["bytes"] for one in old)
    if old and there >= short.bytes:
        taken = ", ".join(f"{one['name']}@{one['digest']}" for one in old)
        beside = f"the old ones ({taken}, {size(there)}) do not fit in beside them"
        if survey.copies is not None:
            return f"{beside}, and others use them: fab weights.list shows who"
        if live is None:
            return f"{beside}: --evict-first evicts them before"
        return f"{beside}: --evict-first stops {live['run_id']}, evicts them, and only then brings these"
    if short.where == "memory":
        given = more_memory(survey.facts)
        return f"stop what uses it, or add memory{given and f': {given}'}"
    return "remove weights that no run uses, or enlarge it: mount -o remount,size=… /dev/shm"


def _words(facts: Mapping[str, Any], need: int, own: Own) -> str:
    """The plan's line: what is needed, and what there is."""
    shm, memory = facts["shm"], facts.get("memory") or {}
    there = [f"{size(memory['available'])} of memory"] if memory.get("available") is not None else []
    if memory.get("room") is not None:
        there.append(f"{size(memory['room'])} within the container's limit")
    if shm.get("free_bytes") is not None:
        there.append(f"{size(shm['free_bytes'])} in {shm['root']}")
    besides = f" and {size(own.bytes)} for the run ({own.words})" if own.bytes else ""
    rest = f"; {own.words}" if own.words and not own.bytes else ""
    return f"{size(need)} for the weights{besides}, of {', '.join(there)} free{rest}"
