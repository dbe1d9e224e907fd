"""An engine's side of an image: building it, taking in what was shipped, loading it.

Runs ON the host (and, for a build here, on this machine), as what `onhost.ask` calls. Standard library only,
Python >= 3.9. `where` is the machine's name in sentences; `images` is the directory `<state>/images`:

    blobs/<sha256>       layers and configuration of the last ship, each checked; what the next one builds on
    incoming/            what a ship is bringing; .partial/ in it is what an interrupted one has brought
    seeds/<sha256>       the old layer that a new one most resembles, for rsync to take the difference to
    shipped.json         of which image they are, and which make it, in order
    load.json, load.lock the load in progress or the last one, and who does it
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from deploy.errors import DeployError
from deploy.sizes import age, size

BLOCK = 1 << 20
ASK_TIMEOUT = 30.0  # seconds for a question to the engine
SIGN_OF_LIFE = 15.0  # seconds between two reports of something that takes long
STALL = 120.0  # seconds in which a load takes no byte
DIGEST_RATE = 20e6  # bytes a second that an engine unpacks at the very least
LEFTOVER = 86400.0  # seconds after which what a ship has left in incoming/ belongs to nobody

Progress = Callable[[str], None]


def survey(images: str, where: str, reference: str) -> dict[str, Any]:
    """What a ship has to know of this machine before it starts. `reference` is the image in question."""
    architecture, root = _docker(
        where, "info", "--format", "{{.Architecture}}\t{{.DockerRootDir}}"
    ).partition("\t")[::2]
    Path(images).mkdir(parents=True, exist_ok=True)
    return {
        "id": image_id(where, reference),
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(architecture, architecture),
        "free_bytes": _free(images),
        # None for an engine whose disk is not in sight, such as Docker Desktop's.
        "engine_free_bytes": _free(root.strip()),
        "rsync": shutil.which("rsync"),
    }


def image_id(where: str, reference: str) -> str | None:
    """The id of an image that the engine has; None if it has none of that name."""
    try:
        return _docker(where, "image", "inspect", "--format", "{{.Id}}", reference).strip()
    except DeployError as error:
        if "No such image" in str(error):
            return None
        raise


def _free(path: str) -> int | None:
    with contextlib.suppress(OSError):
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize
    return None


def _docker(where: str, *words: str, timeout: float = ASK_TIMEOUT) -> str:
    """`docker WORDS`, a question that takes no time. Raises DeployError."""
    try:
        done = subprocess.run(
            ["docker", *words], stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False
        )
    except FileNotFoundError:
        raise DeployError(f"{where} has no docker client: fab bootstrap says what to install") from None
    except subprocess.TimeoutExpired:
        raise DeployError(
            f"the engine on {where} did not answer docker {words[0]} within {timeout:.0f} s: "
            "see journalctl -u docker there"
        ) from None
    if done.returncode:
        raise DeployError(f"docker {words[0]} failed on {where}: {_last(done.stderr)}")
    return done.stdout.decode(errors="replace")


def _last(text: bytes) -> str:
    lines = [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


# -- building ----------------------------------------------------------------------------------------------


def build(
    images: str,
    where: str,
    reference: str,
    settings: Mapping[str, Any],
    timeout: float,
    data: bytes = b"",
    progress: Progress = print,
) -> None:
    """Build `data`, a tar of the context, by Compose with its `build:` `settings`; then tag it `reference`.

    Raises DeployError with the step that failed and its last line. When the one who asked is gone, it ends.
    """
    os.makedirs(images, exist_ok=True)
    directory = tempfile.mkdtemp(prefix=".build-", dir=images)
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as context:
            for member in context:
                target = os.path.join(directory, member.name)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                source = context.extractfile(member)
                assert source
                with open(target, "wb") as file:
                    shutil.copyfileobj(source, file)
                os.chmod(target, 0o644)
        service = {"image": reference, "build": {"context": directory, **settings}}
        file_name = os.path.join(directory, "compose.build.json")
        with open(file_name, "w", encoding="utf-8") as described:
            json.dump({"name": "drafthouse-image", "services": {"image": service}}, described)
        argv = ["docker", "compose", "--file", file_name, "build", "image"]
        _watch_build(argv, where, timeout, progress)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


# Docker's client leaves its plugins running when it is ended. So the build has a group of its own, which ends
# with our end of a pipe, however we end.
_GROUP = """\
exec 3<&0
"$@" </dev/null 3<&- & job=$!
(trap "" TERM; cat <&3; kill -TERM 0; sleep 10; kill -KILL 0) >/dev/null 2>&1 & watch=$!
wait "$job"; code=$?
kill -KILL "$watch"
exit "$code"
"""


def _watch_build(argv: Sequence[str], where: str, timeout: float, progress: Progress) -> None:
    # Plain lines instead of a screen that is redrawn; and the engine's own builder, whose images it can use
    # at once, whatever buildx is set to.
    chosen = {"BUILDKIT_PROGRESS": "plain", "BUILDX_BUILDER": "default", "COMPOSE_BAKE": "false"}
    environment = {**os.environ, **chosen, "DOCKER_BUILDKIT": "1"}
    try:
        process = subprocess.Popen(
            ["sh", "-c", _GROUP, "build", *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise DeployError(f"{where} has no shell to build in") from None
    assert process.stdin
    said = Said()
    reader = threading.Thread(target=said.read, args=(process.stdout,), daemon=True)
    reader.start()
    began = told = time.monotonic()
    try:
        while process.poll() is None:
            said.news.wait(0.25)
            now = time.monotonic()
            for step in said.steps():
                progress(step)
                told = now
            progress("")  # shows nothing, and fails when nobody listens any more
            if now - told > SIGN_OF_LIFE:
                progress(f"building for {age(now - began)}: {said.last}")
                told = now
            if now - began > timeout:
                raise DeployError(
                    f"the build on {where} did not end within {age(timeout)}, it was at {said.step!r}: "
                    f"its last line was: {said.last}"
                )
    finally:
        process.stdin.close()  # too long, or nobody listens any more: then this ends it
        process.wait()
    reader.join(5)
    for step in said.steps():
        progress(step)
    if process.returncode:
        raise DeployError(said.reason(where))


class Said:
    """What BuildKit's plain progress tells: which step it is at, and why it failed."""

    def __init__(self) -> None:
        self.news = threading.Event()
        self.step = "its start"
        self.last = "nothing yet"
        self._new: list[str] = []
        self._steps: dict[str, str] = {}  # "#12" -> "[base 2/3] RUN …"
        self._output: dict[str, str] = {}  # "#12" -> its last line of output
        self._failed = ""

    def read(self, stream: IO[bytes] | None) -> None:
        for line in stream or ():
            self.take(line.decode(errors="replace").rstrip())

    def take(self, line: str) -> None:
        number, _, rest = line.partition(" ")
        if not number.startswith("#") or not number[1:].isdigit():
            if line.strip():
                self.last = line.strip()
        elif rest.startswith("["):
            # Compose puts its service's name first.
            step = _short(rest.removeprefix("[image] ").replace("[image ", "[", 1))
            if number not in self._steps and not step.startswith("[internal]"):
                self.step = step
                self._new.append(step)
                self.news.set()
            self._steps[number] = step
        elif rest.startswith("ERROR"):
            self._failed = number
            self._output.setdefault(number, rest.partition(" ")[2])
        elif rest and not rest.startswith(("DONE", "CACHED", "sha256:", "...")):
            self.last = (rest.split(" ", 1)[-1] if rest[0].isdigit() else rest).strip() or self.last
            self._output[number] = self.last

    def steps(self) -> list[str]:
        """The steps that have begun since the last call."""
        self.news.clear()
        found, self._new = self._new, []
        return found

    def reason(self, where: str) -> str:
        step = self._steps.get(self._failed)
        if step is None:
            return f"the image could not be built on {where}: {self.last}"
        return f"the image could not be built on {where}, at {step}: {self._output[self._failed]}"


def _short(text: str, longest: int = 90) -> str:
    text = " ".join(text.split())
    return text if len(text) <= longest else text[: longest - 1] + "…"


# -- taking in what was shipped ----------------------------------------------------------------------------


def wanted(images: str, where: str, blobs: Sequence[Sequence[Any]], unpacked: bool = True) -> dict[str, Any]:
    """Which of `blobs`, pairs of (sha256, bytes) in the image's order, have to come, and where to put them.

    Makes ready for them: what interrupted ships have left is put where rsync goes on from it. Raises
    DeployError if they would not fit.
    """
    root = Path(images)
    incoming, seeds = root / "incoming", root / "seeds"
    for directory in (incoming / ".partial", seeds, root / "blobs"):
        directory.mkdir(parents=True, exist_ok=True)
    names = {name for name, _ in blobs}
    _clear(incoming, names)
    for seed in seeds.iterdir():
        seed.unlink(missing_ok=True)
    missing = []
    for name, count in blobs:
        if not _has(root / "blobs" / name, count) and not _has(incoming / name, count):
            missing.append(name)
    previous = _json(root / "shipped.json").get("blobs") or []
    for position, (name, _) in enumerate(blobs):
        if name in missing:
            _rescue(incoming, name)
            if position < len(previous) and previous[position][0] not in names:
                with contextlib.suppress(OSError):
                    os.link(root / "blobs" / previous[position][0], seeds / name)
    coming = sum(count for name, count in blobs if name in missing)
    coming -= sum(file.stat().st_size for file in (incoming / ".partial").iterdir() if file.name in names)
    _fits(images, where, coming, "what is shipped")
    if unpacked:
        # The engine keeps a copy of what it is given until it has unpacked it.
        engine = None
        with contextlib.suppress(DeployError):
            engine = _docker(where, "info", "--format", "{{.DockerRootDir}}").strip()
        if engine:
            _fits(engine, where, 2 * sum(count for _, count in blobs), "what the engine unpacks")
    return {"missing": missing, "incoming": str(incoming)}


def _fits(path: str, where: str, needed: int, what: str) -> None:
    free = _free(path)
    if free is not None and needed > free:
        raise DeployError(
            f"{where} has {size(free)} free under {path}, and {what} takes {size(needed)}: "
            "free space there (fab prune, docker image prune), or use another disk (state:)"
        )


def _has(path: Path, count: int) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_size == count
    return False


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _clear(incoming: Path, names: set) -> None:
    """Remove what belongs to no ship of today's."""
    for file in [*incoming.iterdir(), *(incoming / ".partial").iterdir()]:
        with contextlib.suppress(OSError):
            ours = file.name.lstrip(".").partition(".")[0] in names
            if file.is_file() and not ours and time.time() - file.stat().st_mtime > LEFTOVER:
                file.unlink()


def _rescue(incoming: Path, name: str) -> None:
    """rsync keeps what an interrupted transfer has brought; if it was killed, its own file is left."""
    partial = incoming / ".partial" / name
    for file in incoming.glob(f".{name}.*"):
        with contextlib.suppress(OSError):
            found = file.stat()
            if time.time() - found.st_mtime < 60:
                continue  # perhaps somebody else's transfer of now
            if not partial.exists() or partial.stat().st_size < found.st_size:
                os.replace(file, partial)
            else:
                file.unlink()


def take_in(images: str, where: str, blobs: Sequence[Sequence[Any]], progress: Progress = print) -> None:
    """Check what has come against its digest, and put it to the other blobs.

    Raises DeployError if it is damaged; then it is removed.
    """
    root = Path(images)
    told = time.monotonic()
    for name, count in blobs:
        final, came = root / "blobs" / name, root / "incoming" / name
        if _has(final, count):
            continue
        found = hashlib.sha256()
        try:
            with open(came, "rb") as file:
                while block := file.read(BLOCK):
                    found.update(block)
                    if time.monotonic() - told > SIGN_OF_LIFE:
                        progress(f"checking what has come: {size(file.tell())} of {size(count)}")
                        told = time.monotonic()
                os.fsync(file.fileno())
            if found.hexdigest() == name:
                os.replace(came, final)
        except FileNotFoundError:
            if _has(final, count):  # another ship of the same was faster
                continue
            raise DeployError(f"a layer of the image did not reach {where}: run the command again") from None
        if found.hexdigest() != name:
            came.unlink(missing_ok=True)
            raise DeployError(
                f"a layer of the image arrived damaged on {where} and was removed: run the command again"
            )


# -- loading -----------------------------------------------------------------------------------------------


def load(
    images: str,
    where: str,
    blobs: Sequence[Sequence[Any]],
    reference: str,
    stall: float = STALL,
    progress: Progress = print,
) -> str:
    """Let the engine load the image whose layers, then configuration, are `blobs`; returns its id.

    The load is a process of its own: an engine that is interrupted in one may hang in the next (moby issue
    51623), so losing the one who asked does not end it, and whoever comes next waits for it. An engine that
    takes nothing for `stall` seconds is given up on. Raises DeployError.
    """
    root = Path(images)
    outcome: dict[str, Any] = {}
    with _lock(root, progress) as lock:
        found = image_id(where, reference)  # somebody else's load may have brought it
        if found is None:
            (root / "load.json").unlink(missing_ok=True)
            _detach(lambda: _load(root, blobs, reference, stall), keep=lock)
    if found is None:
        with _lock(root, progress):
            outcome = _json(root / "load.json")
    if outcome.get("stalled"):
        raise DeployError(
            f"the engine on {where} has been loading the image without a sign of life for "
            f"{age(outcome['stalled'])}, as one does in which an earlier load was interrupted (moby issue "
            "51623): restart it there (systemctl restart docker, which ends its containers unless "
            "live-restore is on), then try again"
        )
    found = found or image_id(where, reference)
    if not found:
        reason = outcome.get("error") or "the load was killed"
        raise DeployError(f"the engine on {where} could not load the image: {reason}")
    _keep_only(root, blobs, reference)
    return found


@contextlib.contextmanager
def _lock(root: Path, progress: Progress) -> Iterator[int]:
    """The lock that a load holds. Waits for it, and tells how far the one who has it is."""
    lock = os.open(root / "load.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _wait(root, lock, progress)
        yield lock
    finally:
        os.close(lock)


def _wait(root: Path, lock: int, progress: Progress) -> None:
    told = time.monotonic()
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError:
            time.sleep(0.1)
        if time.monotonic() - told > SIGN_OF_LIFE / 3:
            told = time.monotonic()
            state = _json(root / "load.json")
            sent, total = state.get("sent", 0), state.get("total", 0)
            if total and sent >= total:
                progress("the engine unpacks the image")
            else:
                progress(f"loading the image: {size(sent)} of {size(total)}")


def _detach(work: Callable[[], None], keep: int) -> None:
    """Run `work` in a process of its own that nobody waits for, with the descriptor `keep` and no other."""
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        return
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        os.closerange(3, keep)
        os.closerange(keep + 1, 4096)
        work()
    finally:
        os._exit(0)


def _load(root: Path, blobs: Sequence[Sequence[Any]], reference: str, stall: float) -> None:
    """Feed the engine and keep load.json; the end of this process is the end of the load."""
    state: dict[str, Any] = {"reference": reference, "sent": 0, "total": sum(count for _, count in blobs)}

    def note(**more: Any) -> None:
        state.update(more)
        temporary = root / ".load.json"
        temporary.write_text(json.dumps(state), encoding="utf-8")
        os.replace(temporary, root / "load.json")

    try:
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                ["docker", "load"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors
            )
            assert process.stdin
            counter = [0]
            words = (process.stdin, root, blobs, reference, counter)
            feeding = threading.Thread(target=_feed, args=words, daemon=True)
            feeding.start()
            changed, seen = time.monotonic(), -1
            while process.poll() is None:
                time.sleep(0.1)
                if counter[0] != seen:
                    seen, changed = counter[0], time.monotonic()
                    note(sent=seen)
                # It unpacks after it has taken all, without a word.
                patience = stall if feeding.is_alive() else stall + state["total"] / DIGEST_RATE
                if time.monotonic() - changed > patience:
                    process.kill()
                    process.wait()
                    note(stalled=patience)
                    return
            if process.returncode:
                errors.seek(0)
                note(error=_last(errors.read()))
            else:
                note(done=True)
    except OSError as error:
        with contextlib.suppress(OSError):
            note(error=error.strerror or str(error))


def _feed(
    pipe: IO[bytes], root: Path, blobs: Sequence[Sequence[Any]], reference: str, counter: list[int]
) -> None:
    """Write the archive that `docker load` takes: the engine tags the image when it has all of it."""
    with contextlib.suppress(OSError), pipe:
        for block in archive(root / "blobs", blobs, reference):
            pipe.write(block)
            counter[0] += len(block)


def archive(directory: Path, blobs: Sequence[Sequence[Any]], reference: str) -> Iterator[bytes]:
    """The blocks of a tar of the image: every engine since 1.10 reads this kind.

    Its files are in a directory that no other load has. An engine with containerd's image store takes in each
    file under its name in the archive, and where a load was interrupted that name stays locked.
    """
    own = f"{time.time_ns():x}"
    *layers, configuration = [f"{own}/{name}" for name, _ in blobs]
    manifest = [{"Config": configuration, "RepoTags": [reference], "Layers": layers}]
    described = json.dumps(manifest).encode()
    yield _header("manifest.json", len(described)) + described
    yield b"\0" * (-len(described) % tarfile.BLOCKSIZE)
    seen: set[str] = set()
    for name, count in blobs:
        if name in seen:  # an empty layer may be there twice
            continue
        seen.add(name)
        yield _header(f"{own}/{name}", count)
        with open(directory / name, "rb") as file:
            while block := file.read(BLOCK):
                yield block
        yield b"\0" * (-count % tarfile.BLOCKSIZE)
    yield b"\0" * 2 * tarfile.BLOCKSIZE


def _header(name: str, count: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = count
    return member.tobuf(tarfile.GNU_FORMAT)


def _keep_only(root: Path, blobs: Sequence[Sequence[Any]], reference: str) -> None:
    """The image is there: keep its blobs for the next ship to build on, and drop those of the one before.

    Others than these may be those of a ship that is under way.
    """
    names = {name for name, _ in blobs}
    before = {name for name, _ in _json(root / "shipped.json").get("blobs") or []}
    temporary = root / ".shipped.json"
    shipped = {"reference": reference, "blobs": [list(blob) for blob in blobs]}
    temporary.write_text(json.dumps(shipped), encoding="utf-8")
    os.replace(temporary, root / "shipped.json")
    for file in (root / "blobs").iterdir():
        with contextlib.suppress(OSError):
            old = file.name in before or time.time() - file.stat().st_mtime > LEFTOVER
            if old and file.name not in names:
                file.unlink()
    for file in (root / "seeds").iterdir():
        with contextlib.suppress(OSError):
            file.unlink()
