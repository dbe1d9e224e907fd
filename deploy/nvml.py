"""What NVIDIA's management library says of the devices: use, memory, by process too, and which are lost.

The library is called by ctypes, in a child process: one call to a device that fell off its bus may wait in
the kernel for ever, where no signal ends it, and nobody must wait for that with it. Runs ON the host, as a
part of the probe. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import time
from ctypes import byref, c_char_p, c_int, c_uint, c_ulonglong, c_void_p
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
PATIENCE = 1.0  # seconds for the library's answers, beside the pause between two samples
INSUFFICIENT_SIZE, GPU_IS_LOST, RESET_REQUIRED = 7, 15, 16
LOST = (GPU_IS_LOST, RESET_REQUIRED)
NO_GPUS, NO_ATTACH = 1, 2  # flags of nvmlInitWithFlags: a bad device must not keep us from the others
UNKNOWN_BYTES = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE
MOST_DEVICES, MOST_PROCESSES = 64, 1024

_left: list[int] = []  # children that did not answer: while one is there, no other is made


class Memory(ctypes.Structure):
    """nvmlMemory_t; bytes."""

    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


class Memory2(ctypes.Structure):
    """nvmlMemory_v2_t, whose `used` is without what the driver keeps; bytes."""

    _fields_ = [
        ("version", c_uint),
        ("total", c_ulonglong),
        ("reserved", c_ulonglong),
        ("free", c_ulonglong),
        ("used", c_ulonglong),
    ]


class Utilization(ctypes.Structure):
    """nvmlUtilization_t; percent of the last sample period (a sixth of a second to a second)."""

    _fields_ = [("gpu", c_uint), ("memory", c_uint)]


class Process(ctypes.Structure):
    """nvmlProcessInfo_t of the functions that end in _v2 and _v3."""

    _fields_ = [("pid", c_uint), ("memory", c_ulonglong), ("gpu", c_uint), ("compute", c_uint)]


class Use(ctypes.Structure):
    """nvmlProcessUtilizationSample_t; time in microseconds, percent."""

    _fields_ = [
        ("pid", c_uint),
        ("time", c_ulonglong),
        ("sm", c_uint),
        ("memory", c_uint),
        ("encoder", c_uint),
        ("decoder", c_uint),
    ]


class Failed(Exception):
    """A call that the library refused: its number and its words."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(words)
        self.code = code


class Library:
    """The loaded and initialised library. Raises OSError without one, Failed if it does not work."""

    def __init__(self) -> None:
        self.loaded = ctypes.CDLL(LIBRARY)
        self.loaded.nvmlErrorString.restype = c_char_p
        self.loaded.nvmlErrorString.argtypes = [c_int]
        self.call("nvmlInitWithFlags", c_uint(NO_GPUS | NO_ATTACH))

    def call(self, name: str, *arguments: Any) -> None:
        function = getattr(self.loaded, name)
        function.restype = c_int
        code = function(*arguments)
        if code:
            raise Failed(code, f"{self.words(code)} ({name})")

    def words(self, code: int) -> str:
        said = self.loaded.nvmlErrorString(code)
        return said.decode("utf-8", "replace") if said else f"error {code}"

    def has(self, name: str) -> bool:
        return hasattr(self.loaded, name)

    def count(self) -> int:
        found = c_uint()
        self.call("nvmlDeviceGetCount_v2", byref(found))
        return min(found.value, MOST_DEVICES)

    def device(self, index: int) -> c_void_p:
        found = c_void_p()
        self.call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(found))
        return found

    def uuid(self, device: c_void_p) -> str:
        found = ctypes.create_string_buffer(96)
        self.call("nvmlDeviceGetUUID", device, found, c_uint(len(found)))
        return found.value.decode("ascii", "replace")

    def memory(self, device: c_void_p) -> Memory | Memory2:
        if self.has("nvmlDeviceGetMemoryInfo_v2"):
            second = Memory2(version=ctypes.sizeof(Memory2) | 2 << 24)
            with contextlib.suppress(Failed):  # (the driver may be older than the library)
                self.call("nvmlDeviceGetMemoryInfo_v2", device, byref(second))
                return second
        first = Memory()
        self.call("nvmlDeviceGetMemoryInfo", device, byref(first))
        return first

    def utilization(self, device: c_void_p) -> int:
        found = Utilization()
        self.call("nvmlDeviceGetUtilizationRates", device, byref(found))
        return int(found.gpu)

    def processes(self, device: c_void_p) -> list[dict[str, Any]]:
        names = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")
        name = next((name for name in names if self.has(name)), names[-1])
        return [
            {"pid": one.pid, "memory": None if one.memory == UNKNOWN_BYTES else one.memory}
            for one in self.listed(name, device, Process)
        ]

    def uses(self, device: c_void_p) -> dict[int, int]:
        """Percent of the device by process, as far as the library sampled any; the newest sample counts."""
        found: dict[int, tuple[int, int]] = {}
        for one in self.listed("nvmlDeviceGetProcessUtilization", device, Use, c_ulonglong(0)):
            if one.sm <= 100 and one.time >= found.get(one.pid, (0, 0))[0]:
                found[one.pid] = (one.time, one.sm)
        return {pid: percent for pid, (_, percent) in found.items()}

    def listed(self, name: str, device: c_void_p, kind: Any, *more: Any) -> list[Any]:
        """A list whose length the library tells by refusing one that is too short.

        nvmlDeviceGetProcessUtilization takes the list before its length, the others after it.
        """
        room = 16
        while True:
            length, found = c_uint(room), (kind * room)()
            both = (byref(length), found)
            try:
                self.call(name, device, *(both[::-1] if kind is Use else both), *more)
                return list(found[: length.value])
            except Failed as error:
                if error.code != INSUFFICIENT_SIZE or room >= MOST_PROCESSES:
                    raise
                room = min(max(room * 2, length.value + 4), MOST_PROCESSES)


def look(library: Library) -> list[dict[str, Any]]:
    """Every device once, in the library's order, which is that of the bus. What it does not tell is None."""
    found = []
    for index in range(library.count()):
        one: dict[str, Any] = {
            "index": index,
            "uuid": None,
            "lost": False,
            "error": None,
            "utilization": None,
        }
        one.update(memory_used=None, memory_total=None, processes=[], uses={})
        found.append(one)
        try:
            device = library.device(index)
        except Failed as error:
            one.update(lost=error.code in LOST, error=str(error))
            continue
        for ask in (_uuid, _memory, _utilization, _processes, _uses):
            try:
                ask(library, device, one)
            except Failed as error:
                if error.code in LOST:
                    one.update(lost=True, error=str(error))
                    break
                if ask in (_uuid, _memory):
                    one["error"] = str(error)
            except AttributeError:
                continue  # a library that has no such function
    return found


def _uuid(library: Library, device: c_void_p, one: dict[str, Any]) -> None:
    one["uuid"] = library.uuid(device)


def _memory(library: Library, device: c_void_p, one: dict[str, Any]) -> None:
    found = library.memory(device)
    one.update(memory_used=found.used, memory_total=found.total)


def _utilization(library: Library, device: c_void_p, one: dict[str, Any]) -> None:
    one["utilization"] = library.utilization(device)


def _processes(library: Library, device: c_void_p, one: dict[str, Any]) -> None:
    one["processes"] = library.processes(device)


def _uses(library: Library, device: c_void_p, one: dict[str, Any]) -> None:
    one["uses"] = library.uses(device)


def joined(samples: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The samples of each device as one: ``{index uuid lost error utilization [percent, one a sample]
    memory_used memory_total processes [{pid memory (bytes) memory_before utilization}]}``.
    """
    last = samples[-1]
    found = []
    for place, now in enumerate(last):
        each = [sample[place] for sample in samples if place < len(sample)]
        before = {item["pid"]: item["memory"] for item in each[0]["processes"]}
        lost = next((one for one in each if one["lost"]), now)
        found.append(
            {
                **{key: now[key] for key in ("index", "uuid", "memory_used", "memory_total")},
                **{key: lost[key] for key in ("lost", "error")},
                "utilization": [one["utilization"] for one in each if one["utilization"] is not None],
                "processes": [
                    {
                        **item,
                        "memory_before": before.get(item["pid"]),
                        "utilization": now["uses"].get(item["pid"]),
                    }
                    for item in now["processes"]
                ],
            }
        )
    return found


# -- the child ---------------------------------------------------------------------------------------------


class Asking:
    """The library, asked from now on by a child: the first sample at once, the second one after a pause."""

    def __init__(self, pause: float) -> None:
        self.until = time.monotonic() + pause + PATIENCE
        self.pid, self.reading, self.problem = 0, -1, ""
        if _stuck():
            self.problem = f"an earlier question to {LIBRARY} still waits for its answer"
            return
        self.reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _answer(writing, pause)
        os.close(writing)

    def result(self) -> list[dict[str, Any]] | dict[str, str]:
        """What `joined` gives, or ``{"unknown": why}``."""
        if not self.pid:
            return {"unknown": f"because {self.problem}"}
        text, whole = b"", False
        while not whole and select.select([self.reading], [], [], max(0.0, self.until - time.monotonic()))[0]:
            block = os.read(self.reading, 1 << 16)
            text, whole = text + block, not block
        os.close(self.reading)
        if not whole:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            _left.append(self.pid)
            _stuck()
            return {"unknown": f"because {LIBRARY} does not answer within {PATIENCE:g} s"}
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        try:
            found: list[dict[str, Any]] | dict[str, str] = json.loads(text)
        except ValueError:
            return {"unknown": f"because {LIBRARY} ended the process that asked it"}
        return found


def _stuck() -> bool:
    """Whether a child that was given up is still there."""
    for pid in list(_left):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                continue
        _left.remove(pid)
    return bool(_left)


def _answer(writing: int, pause: float) -> None:
    """The child: nothing of its parent's stays open in it, else whoever reads from that would wait for it."""
    try:
        empty = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(empty, descriptor)
        os.dup2(writing, 3)
        os.closerange(4, 256)
        os.write(3, json.dumps(_sampled(pause)).encode("ascii"))
    finally:
        os._exit(0)


def _sampled(pause: float) -> list[dict[str, Any]] | dict[str, str]:
    try:
        library = Library()
        samples = [look(library)]
        if pause > 0:
            time.sleep(pause)
            samples.append(look(library))
        return joined(samples)
    except Failed as error:
        return {"unknown": f"because NVML says: {error}"}
    except (OSError, AttributeError) as error:
        return {"unknown": f"because {LIBRARY} cannot be used: {error}"}
