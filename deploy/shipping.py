"""An image to a host without a registry: `docker save`, rsync of what the host lacks, `docker load` there.

The layers travel as files named by their SHA-256, uncompressed, so that rsync can resume in the middle of one
and takes of a new layer only what differs from the old one in its place. On the host deploy.image_store
checks them and has the engine load them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import posixpath
import select
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from deploy import files, onhost, rsyncing
from deploy.errors import DeployError
from deploy.host import Host
from deploy.sizes import age, size

BLOCK = 1 << 20
SIGN_OF_LIFE = 10.0  # seconds between two words on a transfer
PAUSE = 0.2  # seconds between two looks at a lock that somebody else has
DOCKER_TIMEOUT = 60.0  # seconds for a question to the engine here
SAVE_SILENCE = 1800.0  # seconds; an engine may write all of an image to its disk before the first byte
EXPORT_PATIENCE = 7200.0  # seconds for another deploy here to take its image out
SILENCE = 180.0  # seconds; a load gives a sign of life every 5, but a disk may be busy
PARTIAL = ".export-"  # before the name of a directory that is being filled
LIST = "blobs.json"  # beside the layers of an image: which they are, in order; locked by who uses them

Report = Callable[[str], None]
Blobs = Sequence[tuple[str, int]]  # (SHA-256, bytes) of each layer from the bottom up, then the configuration


def cache() -> Path:
    """Where this machine keeps the layers of the last image that it shipped."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    directory = Path(base).expanduser() / "drafthouse" / "images"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def send(
    host: Host, images: str, here: str, reference: str, there: Mapping[str, Any], report: Report
) -> None:
    """Bring the image that this machine's engine calls `here` to the host's engine, as `reference`.

    `images` is the host's directory for this, `there` what its survey found. Raises DeployError; then what
    has arrived is kept, and the next call goes on from it.
    """
    check(host, there)
    with export(here, report) as (directory, blobs):
        found = onhost.ask(host, "deploy.image_store:wanted", images, host.name, blobs, timeout=60)
        if found["missing"]:
            sizes = dict(blobs)
            total = sum(sizes[name] for name in found["missing"])
            report(f"{host.name}: shipping {size(total)} of the image's {size(sum(sizes.values()))}")
            began = time.monotonic()
            sent = rsync(host, directory, found["missing"], found["incoming"], total, report)
            report(f"{host.name}: {size(sent)} travelled in {time.monotonic() - began:.0f} s")
    told = _prefixed(host, report)
    for function, *words in (("take_in", blobs), ("load", blobs, reference)):
        onhost.ask(
            host, f"deploy.image_store:{function}", images, host.name, *words, timeout=SILENCE, progress=told
        )


def check(host: Host, there: Mapping[str, Any]) -> None:
    """Raises DeployError if no image can be shipped to the host, by what its survey found."""
    rsyncing.check("ships images")
    if not there["rsync"]:
        raise DeployError(
            f"{host.name} has no rsync, which ships images: fab bootstrap --host {host.name} installs it"
        )


def _prefixed(host: Host, report: Report) -> Report:
    return lambda text: report(f"{host.name}: {text}")


# -- out of the engine here --------------------------------------------------------------------------------


@contextlib.contextmanager
def export(reference: str, report: Report) -> Iterator[tuple[Path, Blobs]]:
    """The layers of an image of this machine's engine as files: their directory and what they are.

    They are kept until another image is shipped: a second host, or a second try, need not wait for them.
    Nobody removes them while the context lasts.
    """
    name = _docker("image", "inspect", "--format", "{{.Id}}", reference).strip().removeprefix("sha256:")[:12]
    place = cache()
    final, partial = place / name, place / f"{PARTIAL}{name}"
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(open(place / "export.lock", "w"))
        _wait_for(lock, report)
        try:
            shutil.rmtree(partial, ignore_errors=True)
            if not (final / LIST).exists():
                _forget_others(place)
                partial.mkdir()
                (partial / LIST).write_text(json.dumps(_save(reference, partial, report)))
                partial.rename(final)
            using = stack.enter_context(open(final / LIST))
        except OSError as error:
            raise DeployError(
                f"the image's layers cannot be kept under {place}: {error.strerror}; make room there, or set "
                "XDG_CACHE_HOME to another disk"
            ) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        fcntl.flock(using, fcntl.LOCK_SH)
        fcntl.flock(lock, fcntl.LOCK_UN)
        yield final, [(digest, count) for digest, count in json.load(using)]


def _forget_others(place: Path) -> None:
    """Remove the layers of images that nobody ships any more, and what an interrupted export has left."""
    for old in place.iterdir():
        if old.name.startswith(PARTIAL):
            shutil.rmtree(old, ignore_errors=True)
        elif (old / LIST).exists():
            with contextlib.suppress(OSError), open(old / LIST) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(old, ignore_errors=True)


def _wait_for(lock: IO[str], report: Report) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        report("another deploy on this machine takes the image out of the engine: waiting for it")
        began = time.monotonic()
        while not files.take(lock.fileno()):
            if time.monotonic() - began > EXPORT_PATIENCE:
                raise DeployError(
                    "another deploy on this machine has been taking an image out of the engine for more than "
                    f"{age(EXPORT_PATIENCE)} ({lock.name} is locked): end it, then try again"
                ) from None
            time.sleep(PAUSE)


def _docker(*words: str) -> str:
    argv, limit = ["docker", *words], DOCKER_TIMEOUT
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit)
    except FileNotFoundError:
        raise DeployError("this machine has no docker client, which takes images out of its engine") from None
    except subprocess.TimeoutExpired:
        raise DeployError(
            f"this machine's engine did not answer docker {words[0]} within {limit:g} s: "
            "see whether docker ps works here"
        ) from None
    if done.returncode:
        raise DeployError(f"docker {words[0]} failed on this machine: {done.stderr.strip()}")
    return done.stdout


def _save(reference: str, directory: Path, report: Report) -> Blobs:
    """`docker save` into `directory`, each file under its SHA-256; what is no layer is dropped."""
    report("taking the image out of this machine's engine")
    argv = ["docker", "save", reference]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    assert process.stderr
    try:
        found, manifest = _unpack(_Watched(process.stdout), directory, report)
        process.wait(SAVE_SILENCE)
        errors = process.stderr.read().decode(errors="replace").strip()
        if process.returncode or not manifest:
            raise DeployError(f"docker save failed on this machine: {errors or 'it gave no manifest'}")
    except (TimeoutError, subprocess.TimeoutExpired):
        raise DeployError(
            f"docker save on this machine gave no sign of life for {age(SAVE_SILENCE)} and was ended: "
            "look at its engine (docker ps, its disk), then try again"
        ) from None
    except tarfile.TarError:
        errors = process.stderr.read().decode(errors="replace").strip()
        raise DeployError(
            f"docker save failed on this machine: {errors or 'its output ended early'}"
        ) from None
    finally:
        if process.poll() is None:
            process.kill()
        with process:
            pass
    blobs = [found[_resolved(name)] for name in [*manifest[0]["Layers"], manifest[0]["Config"]]]
    for file in directory.iterdir():
        if file.name not in dict(blobs):
            file.unlink()
    return blobs


class _Watched(io.RawIOBase):
    """A pipe to be read by one who waits `SAVE_SILENCE` for the next bytes, then raises TimeoutError."""

    def __init__(self, pipe: IO[bytes]) -> None:
        super().__init__()
        self._pipe = pipe

    def read(self, count: int = BLOCK) -> bytes:
        if not select.select([self._pipe], [], [], SAVE_SILENCE)[0]:
            raise TimeoutError
        return os.read(self._pipe.fileno(), count)


def _unpack(
    stream: _Watched, directory: Path, report: Report
) -> tuple[dict[str, tuple[str, int]], list[dict[str, Any]]]:
    """(member's name -> (SHA-256, bytes), manifest.json) of an archive in the format of `docker save`."""
    found: dict[str, tuple[str, int]] = {}
    links: dict[str, str] = {}
    manifest: list[dict[str, Any]] = []
    told, count = time.monotonic(), 0
    with tarfile.open(fileobj=stream, mode="r|", bufsize=BLOCK) as archive:
        for member in archive:
            name = _resolved(member.name)
            if member.issym():  # the same layer twice
                links[name] = _resolved(posixpath.join(posixpath.dirname(name), member.linkname))
            elif member.islnk():
                links[name] = _resolved(member.linkname)
            source = archive.extractfile(member) if member.isfile() else None
            if source is None:
                continue
            if name == "manifest.json":
                manifest = json.load(source)
                continue
            digest, temporary = hashlib.sha256(), directory / "incoming"
            with open(temporary, "wb") as file:
                while block := source.read(BLOCK):
                    digest.update(block)
                    file.write(block)
                    count += len(block)
                    if time.monotonic() - told > SIGN_OF_LIFE:
                        report(f"taking the image out of this machine's engine: {size(count)}")
                        told = time.monotonic()
            temporary.rename(directory / digest.hexdigest())
            found[name] = (digest.hexdigest(), member.size)
    for name, target in links.items():
        if target in found:
            found[name] = found[target]
    return found, manifest


def _resolved(name: str) -> str:
    return posixpath.normpath(name)


# -- over to the host --------------------------------------------------------------------------------------


def rsync_command(host: Host, directory: Path, incoming: str) -> list[str]:
    """The rsync that brings files of `directory`, whose names it reads from stdin, into `incoming` there."""
    shell = host.rsync_shell()
    argv = [
        "rsync",
        "--files-from=-",
        "--ignore-times",  # never "the same, by its time": what is asked for is lacking
        "--partial-dir=.partial",
        "--copy-dest=../seeds",
        f"--timeout={rsyncing.LINK_TIMEOUT}",
        "--info=progress2,stats1",
        "--no-inc-recursive",
    ]
    if shell is None:
        return [*argv, f"{directory}/", f"{incoming}/"]
    # Paths go over the connection itself, not through the login shell there.
    argv += ["--protect-args", "--compress", "--compress-level=1", f"--rsh={shell}"]
    return [*argv, f"{directory}/", f"host:{incoming}/"]


def rsync(
    host: Host, directory: Path, names: Sequence[str], incoming: str, total: int, report: Report
) -> int:
    """Run it, tell how far it is, and return the bytes that went over the wire. Raises DeployError."""
    argv = rsync_command(host, directory, incoming)
    return rsyncing.run(host, argv, "".join(f"{name}\n" for name in names).encode(), total, report)
