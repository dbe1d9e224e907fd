"""Takes a directory from another machine: one process that holds the lock and decides, several that write.

`control` says over its stdout, a JSON object a line, what is missing: then each `stream` writes the chunks
that come over its own stdin, in any order. Both end with their stdin, and the streams with `control`. What
has arrived stays for the next try, which sends only the rest. The directory appears under its name once
`control` has read back every byte of it.

Runs ON the host, asked by `deploy.sender`. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import select
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deploy import manifest, weights_store
from deploy import pieces as piecewise
from deploy.errors import DeployError
from deploy.manifest import Chunk, Told

HEAD = 12  # bytes before each chunk of a stream: its number, in decimal
SILENCE = 60.0  # seconds without a word of our client, which says one every few, until it is taken for lost
LATE = 3  # exit code of a stream that has come too late
LOOK = 1.0  # seconds between two looks of a stream at whether `control` lives
DRAIN = 5.0  # seconds without a byte after that, until a stream ends, ...
DRAIN_MOST = 20.0  # ... and altogether
STRAGGLERS = 30.0  # seconds that a new `control` gives the streams of the last one


def control(target: str, wanted: dict[str, Any], durable: bool, link: bool) -> None:
    """Have `wanted`, a manifest, at `target`; see `deploy.sender`, which speaks with it.

    Says ``told`` (progress), ``there`` (nothing to do) or ``missing`` ([first, last + 1] of runs of chunks)
    with ``cpus``, ``kernel``, ``pid`` and ``incoming``. Then it answers each line of stdin: ``ping`` with
    ``pong``; ``finish`` with ``missing`` (what did not arrive whole) or ``done``. ``here`` only tells that
    somebody is. Raises DeployError for no room and the like.
    """
    path = Path(target)
    incoming, name = weights_store.incoming_of(path), weights_store.base(path)
    what = f"{path.parent.name if durable else 'weights'} {wanted['source']}"
    key = weights_store.STATE_KEY if durable else weights_store.SHM_KEY
    said = _heard()
    os.umask(0o022)  # whatever the login has: what others can write to does not count

    def progress(text: str) -> None:
        _say({"told": text})

    with weights_store.locked(path.parent, name, key, progress):
        weights_store.clear(path.parent, name, but=incoming)
        if manifest.whole(path):
            if link:
                weights_store.link_name(path)
            _say({"there": True})
            return
        pieces = manifest.chunks(wanted)
        missing = list(range(len(pieces)))
        if _is_ours(incoming, wanted):
            _wait_for_stragglers(incoming)
            missing = _wrong(incoming, wanted, pieces, missing, progress)
        else:
            shutil.rmtree(incoming, ignore_errors=True)
        weights_store.prepare(incoming, wanted, what, key, progress)
        (incoming / manifest.FILE).write_text(json.dumps(wanted), encoding="ascii")
        words: dict[str, Any] = {"cpus": os.cpu_count() or 1, "kernel": kernel()}
        words.update(pid=os.getpid(), incoming=str(incoming))
        _say({"missing": runs(missing), **words})
        while True:
            word = said.get()
            if word == "ping":
                _say({"pong": True})
            elif word == "finish":
                missing = _wrong(incoming, wanted, pieces, missing, progress)
                if missing:
                    _say({"missing": runs(missing)})
                    continue
                (incoming / manifest.FILE).unlink(missing_ok=True)  # ends a stream whose connection hangs
                _wait_for_stragglers(incoming)
                try:
                    weights_store.publish(incoming, path, wanted, durable)
                except OSError as error:
                    raise DeployError(f"{what} could not be put at {path}: {error.strerror}") from None
                if link:
                    weights_store.link_name(path)
                weights_store.clear(path.parent, name)
                _say({"done": True})
                return


def stream(incoming: str, digest: str, controller: int) -> None:
    """Write the chunks that come over stdin, and say the number of each when it is written.

    Ends with the process `controller`: whoever pushes after it can rely on nobody else writing.
    """
    root = Path(incoming)
    own = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(own, fcntl.LOCK_SH)  # until we end
    taken = [0]  # bytes so far
    threading.Thread(target=_end_with, args=(controller, own, taken), daemon=True).start()
    wanted = manifest.of_copy(root)
    if wanted is None or wanted["digest"] != digest or not _lives(controller):
        os.write(2, f"{incoming} is not there any more\n".encode())
        os._exit(LATE)  # not as after an error, which another try would meet again
    pieces = manifest.chunks(wanted)
    piecewise.widen(0)
    buffer = piecewise.buffer()
    with contextlib.closing(piecewise.Files(root)) as opened:
        while _fill(buffer[:HEAD]):
            number = int(bytes(buffer[:HEAD]))
            one = pieces[number]
            file, offset, end = opened[one.relative], one.offset, one.offset + one.length
            while offset < end:
                count = piecewise.pour(0, file, offset, min(len(buffer), end - offset), buffer)
                if not count:
                    return
                offset += count
                taken[0] += count
            _write(f"{number}\n")


def kernel() -> str:
    """Which running kernel this is: two machines that say the same are one, however they are reached.

    Known by the moment at which it began, since LXC gives each container a boot_id of its own. Empty where
    that cannot be told (macOS).
    """
    try:
        began = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    except AttributeError:
        return ""
    system = os.uname()
    return f"{system.release} {system.version} {began:.2f}"


def _end_with(controller: int, directory: int, taken: list[int]) -> None:
    while _lives(controller) and _awaited(directory):
        time.sleep(LOOK)
    # What a killed client had sent still comes, and then the end of stdin.
    before, end = -1, time.monotonic() + DRAIN_MOST
    while _awaited(directory) and taken[0] != before and time.monotonic() < end:
        before = taken[0]
        time.sleep(DRAIN)
    os._exit(1)


def _awaited(directory: int) -> bool:
    """Whether `control` still waits for chunks: else it takes the manifest away, and all have arrived."""
    try:
        os.stat(manifest.FILE, dir_fd=directory)
        return True
    except OSError:
        return False


def _lives(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def _wait_for_stragglers(incoming: Path) -> None:
    """Until no stream writes there any more: they end with their stdin, or with their `control`."""
    directory = os.open(incoming, os.O_RDONLY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + STRAGGLERS
        while True:
            with contextlib.suppress(OSError):
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            if time.monotonic() > deadline:
                raise DeployError(f"a process of an earlier push still writes to {incoming}; try again soon")
            time.sleep(0.05)
    finally:
        os.close(directory)


def runs(numbers: list[int]) -> list[list[int]]:
    """Sorted numbers as [first, last + 1] of each run of consecutive ones."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1][1] += 1
        else:
            found.append([number, number + 1])
    return found


def _is_ours(incoming: Path, wanted: dict[str, Any]) -> bool:
    """Whether an earlier try began with the very same manifest."""
    found = manifest.of_copy(incoming)
    return found is not None and found.get("digest") == wanted["digest"]


def _wrong(
    incoming: Path,
    wanted: dict[str, Any],
    pieces: list[Chunk],
    numbers: Iterable[int],
    progress: manifest.Progress,
) -> list[int]:
    """Which of these chunks are not, as they lie there, what the manifest says."""
    numbers = list(numbers)
    told = Told("read back", sum(pieces[number].length for number in numbers), progress)
    reader = manifest.Reader(incoming, wanted["hash"])

    def check(number: int) -> int | None:
        one = pieces[number]
        try:
            right = reader.hash(one).hex() == one.hash
        except DeployError:  # short, or not there
            right = False
        told.add(one.length)
        return None if right else number

    return [number for number in manifest.parallel(check, numbers) if number is not None]


# -- stdin and stdout, without a buffer: the loader has read from them before us ---------------------------


def _heard() -> queue.Queue[str]:
    """The lines of stdin. When it ends or stays silent, our client is gone, and we end whatever we are at.

    Whoever comes next would otherwise wait for our lock; a lost link may stay unnoticed here for hours.
    """
    found: queue.Queue[str] = queue.Queue()

    def hear() -> None:
        data = b""
        while select.select([0], [], [], SILENCE)[0]:
            more = os.read(0, 4096)
            if not more:
                break
            *lines, data = (data + more).split(b"\n")
            for line in lines:
                found.put(line.decode("ascii", "replace"))
        os._exit(1)

    threading.Thread(target=hear, daemon=True).start()
    return found


_saying = threading.Lock()  # progress is told from any thread


def _say(value: dict[str, Any]) -> None:
    with _saying:
        _write(json.dumps(value) + "\n")


def _write(text: str) -> None:
    data = memoryview(text.encode("ascii"))
    while data:
        data = data[os.write(1, data) :]


def _fill(view: memoryview) -> bool:
    """Fill a buffer from stdin; False if that ends before."""
    done = 0
    while done < len(view):
        count = os.readv(0, [view[done:]])
        if not count:
            return False
        done += count
    return True
