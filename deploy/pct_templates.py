"""Images as files in the template storage of a Proxmox host: looked for, made ready for, put in place.

`deploy.receiver` fills them, in the directory ``.drafthouse`` beside the others, from which they are moved to
their name. There, too, is what was found of each: ``<name>.json``, so that none is read without need.

Runs ON the Proxmox host, asked by `deploy.pct_image`. Standard library only, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from deploy import hashing, manifest, pieces, weights_store
from deploy.errors import DeployError, either
from deploy.manifest import Progress, Told, silent
from deploy.sizes import printable, size

OURS = ".drafthouse"
KEY = "template_storage: in fabric.yaml"
ASK_TIMEOUT = 30.0  # seconds for Proxmox to answer; storage on a network takes a while
BLOCK = 1 << 20
KEPT = 2  # images of a kind that stay: the last one, and the one before, to which the next is compared


# -- what Proxmox says -------------------------------------------------------------------------------------


def version(where: str) -> str:
    """The version of Proxmox, like ``9.1.4``. Raises DeployError where there is none."""
    said = _ask(where, "pveversion")
    found = re.match(r"pve-manager/([0-9][0-9.]*)", said)
    if not found:
        raise DeployError(f"pveversion on {where} names no version of Proxmox: {printable(said)[:80]}")
    return found[1]


def directory(where: str, storage: str) -> str:
    """The directory of the templates in a storage. Raises DeployError for one that takes none."""
    fit = _storages(_ask(where, "pvesm", "status", "--content", "vztmpl"))
    if storage not in fit:
        known = _storages(_ask(where, "pvesm", "status"))
        if storage in known:
            raise DeployError(
                f"storage {storage} of {where} takes no container templates; let it in the web interface "
                f"(Datacenter, Storage, {storage}, Content), or choose {either(sorted(fit))} with {KEY}"
            )
        raise DeployError(
            f"{where} has no storage {printable(storage)}; {either(sorted(fit))} takes templates ({KEY})"
        )
    if fit[storage] != "active":
        raise DeployError(
            f"storage {storage} of {where} is {printable(fit[storage])}; pvesm status shows it there"
        )
    # A name that every version takes; nothing of that name has to be there.
    path = _ask(where, "pvesm", "path", f"{storage}:vztmpl/drafthouse.tar.zst").strip()
    if not path.startswith("/"):
        raise DeployError(f"pvesm on {where} names no directory for {storage}: {printable(path)[:80]}")
    return os.path.dirname(path)


def _storages(table: str) -> dict[str, str]:
    """Name -> status of each line of `pvesm status`."""
    lines = [line.split() for line in table.splitlines()[1:]]
    return {words[0]: words[2] for words in lines if len(words) > 2}


def _ask(where: str, *words: str) -> str:
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_TIMEOUT, check=False
        )
    except FileNotFoundError:
        raise DeployError(
            f"{where} is no Proxmox host: it has no {words[0]}; correct runtime: or --host"
        ) from None
    except subprocess.TimeoutExpired:
        raise DeployError(
            f"{words[0]} on {where} did not answer within {ASK_TIMEOUT:.0f} s; try it there"
        ) from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise DeployError(f"{' '.join(words[:2])} failed on {where}: {printable(lines[-1])}")
    return done.stdout.decode(errors="replace")


# -- the file ----------------------------------------------------------------------------------------------


def look(
    place: str, where: str, name: str, count: int, sha256: str, progress: Progress = silent
) -> dict[str, Any]:
    """Whether the image `name`, of `count` bytes, is in the directory `place`, whole.

    ``there``; and ``hashes``, which this host can compute. Raises DeployError if it is not there and would
    not fit.
    """
    root = Path(place)
    if not root.is_dir():
        raise DeployError(f"there is no directory {place} on {where}; correct {KEY}")
    if _is(root, name, count, sha256, progress):
        return {"there": True, "hashes": hashing.names()}
    free = shutil.disk_usage(root).free
    need = count - weights_store.held(str(root / OURS), _kind(name))
    if free < need:
        raise DeployError(
            f"{where} has {size(free)} free in {place}, but the image needs {size(need)}: "
            f"{size(need - free)} too little; remove templates that nothing needs there, or choose another "
            f"storage with {KEY}"
        )
    return {"there": False, "hashes": hashing.names()}


def _is(root: Path, name: str, count: int, sha256: str, progress: Progress) -> bool:
    """Whether the file is what it must be: read once, then known by its time of change."""
    path, record = root / name, root / OURS / f"{name}.json"
    try:
        found = path.stat()
        if found.st_size != count:
            return False
        stamp = [found.st_size, found.st_mtime_ns, found.st_ino]
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(record.read_bytes())
            if isinstance(known, dict) and known.get("stamp") == stamp:
                return bool(known.get("sha256") == sha256)
        told, digest = Told("read back", count, progress), hashlib.sha256()
        with open(path, "rb") as file:
            while True:
                block = file.read(BLOCK)
                if not block:
                    break
                digest.update(block)
                told.add(len(block))
    except OSError:
        return False
    if digest.hexdigest() == sha256:
        _remember(root, name, sha256)
    return digest.hexdigest() == sha256


def _remember(root: Path, name: str, sha256: str) -> None:
    found = (root / name).stat()
    said = {"stamp": [found.st_size, found.st_mtime_ns, found.st_ino], "sha256": sha256, "put": time.time()}
    with contextlib.suppress(OSError):  # then it is read once more, the next time
        (root / OURS).mkdir(exist_ok=True)
        temporary = root / OURS / f".{name}.json.{os.getpid()}"
        temporary.write_text(json.dumps(said), encoding="ascii")
        os.replace(temporary, root / OURS / f"{name}.json")


def _kind(name: str) -> str:
    """What images of one kind are called while they come: ``drafthouse-cpu.tar``."""
    return re.sub(r"-[0-9a-f]{12}(?=\.)", "", name)


def target(place: str, name: str, digest: str) -> str:
    """The directory in which the image comes, for `deploy.sender`. Pure."""
    return f"{place}/{OURS}/{_kind(name)}@{digest[:12]}"


def seed(place: str, name: str, wanted: dict[str, Any], progress: Progress = silent) -> int:
    """Take over from the last image of this kind what the new one, whose manifest is `wanted`, has in common.

    What is left of a try before is gone on with instead. The bytes that need not come. Raises nothing: then
    all of it comes.
    """
    coming = Path(target(place, name, wanted["digest"]))
    kind, incoming = _kind(name), weights_store.incoming_of(coming)
    with contextlib.suppress(OSError, DeployError):
        before = [one for one in _known(Path(place), kind) if one != name]
        if not before:
            return 0
        with weights_store.locked(coming.parent, kind, KEY, progress):
            if incoming.exists() or coming.exists():
                return 0
            weights_store.clear(coming.parent, kind)
            return _take_over(Path(place), before[0], name, wanted, incoming, progress)
    return 0


def _take_over(
    root: Path, old: str, name: str, wanted: dict[str, Any], incoming: Path, progress: Progress
) -> int:
    """Copy the chunks that both have at the same place."""
    reader, length = pieces.Reader(root, wanted["hash"]), (root / old).stat().st_size
    chunks = [one for one in manifest.chunks(wanted) if one.offset + one.length <= length]
    told = Told("compared", sum(one.length for one in chunks), progress)

    def same(one: pieces.Chunk) -> pieces.Chunk | None:
        found = reader.hash(one._replace(relative=old)).hex()
        told.add(one.length)
        return one if found == one.hash else None

    common = [one for one in manifest.parallel(same, chunks) if one is not None]
    if not common:
        return 0
    weights_store.prepare(incoming, wanted, f"the image {name}", KEY, progress)
    with open(root / old, "rb") as source, open(incoming / name, "r+b") as out:
        for one in common:
            source.seek(one.offset)
            out.seek(one.offset)
            out.write(source.read(one.length))
    (incoming / manifest.FILE).write_text(json.dumps(wanted), encoding="ascii")
    return sum(one.length for one in common)


def put(place: str, name: str, digest: str, sha256: str) -> list[str]:
    """Move an image that has come, and was read back, to its name; the older ones that went for it.

    Raises DeployError if it is not there any more.
    """
    root, came = Path(place), Path(target(place, name, digest))
    kind = _kind(name)
    with weights_store.locked(came.parent, kind, KEY, silent):
        try:
            os.chmod(came / name, 0o644)
            os.replace(came / name, root / name)
        except FileNotFoundError:
            if not (root / name).exists():  # else another upload of the same was faster
                raise DeployError(f"{came / name} is not there any more; upload the image again") from None
        descriptor = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        _remember(root, name, sha256)
        shutil.rmtree(came, ignore_errors=True)
        return _forget_older(root, kind)


def _known(root: Path, kind: str) -> list[str]:
    """The images of a kind that we put there and that still lie there, the newest first."""
    found = []
    for record in (root / OURS).glob("*.json"):
        name = record.name[: -len(".json")]
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if _kind(name) == kind and (root / name).is_file():
                found.append((json.loads(record.read_bytes())["put"], name))
    return [name for _, name in sorted(found, reverse=True)]


def _forget_older(root: Path, kind: str) -> list[str]:
    """Remove the images before the last two that we put there: a container that is made needs none."""
    gone = _known(root, kind)[KEPT:]
    for name in gone:
        with contextlib.suppress(OSError):
            (root / name).unlink()
            (root / OURS / f"{name}.json").unlink()
    return gone
