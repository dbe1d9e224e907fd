"""`pvesm`: storages and what lies on them (CLI/pvesm.pm, API2/Storage/)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from . import storage
from .errors import BadParameters, Died, not_simulated
from .options import FLAG, TEXT, VMID, Option, parse
from .world import World

CONTENT = ("images", "rootdir", "vztmpl", "backup", "iso", "snippets", "import")


def main(world: World, words: Sequence[str]) -> None:
    if not words:
        raise Died("ERROR: no command specified\nUSAGE: pvesm <COMMAND> [ARGS] [OPTIONS]")
    command, *rest = words
    if command in (
        "add",
        "set",
        "remove",
        "scan",
        "extractconfig",
        "export",
        "import",
        "apiinfo",
        "prune-backups",
    ):
        not_simulated(f"pvesm {command}")
    if command not in COMMANDS:
        raise Died(f"ERROR: unknown command 'pvesm {command}'\nUSAGE: pvesm <COMMAND> [ARGS] [OPTIONS]")
    COMMANDS[command](world, rest)


def status(world: World, words: Sequence[str]) -> None:
    given, _ = parse(
        words, {"content": TEXT, "storage": TEXT, "enabled": FLAG, "format": FLAG, "target": TEXT}, []
    )
    wanted = [word for word in re.split(r"[\s,;]+", given.get("content", "")) if word]
    for word in wanted:
        if word not in CONTENT:
            said = {"content": f"invalid format - invalid storage content type '{word}'"}
            raise BadParameters("Parameter verification failed.", said)
    if "storage" in given:
        storage.storage(given["storage"])
    found = [
        one
        for name, one in sorted(storage.storages().items())
        if given.get("storage", name) == name
        and all(word in one.content for word in wanted)
        and not (given.get("enabled") == "1" and one.disabled)
    ]
    width = max([len(one.name) for one in found], default=0) + 1
    head = ("Name", "Type", "Status", "Total (KiB)", "Used (KiB)", "Available (KiB)", "%")
    print("{:<{w}} {:>10} {:>10} {:>15} {:>15} {:>15} {:>8}".format(*head, w=width))
    for one in found:
        total, used, free = (0, 0, 0) if one.disabled or not one.path.is_dir() else one.room()
        state = "disabled" if one.disabled else "active" if total else "inactive"
        share = "     N/A" if one.disabled else f"{used * 100 / total if total else 0:7.2f}%"
        row = f"{one.name:<{width}} {one.type:>10} {state:>10} "
        print(f"{row}{total // 1024:>15} {used // 1024:>15} {free // 1024:>15} {share}")


def path(world: World, words: Sequence[str]) -> None:
    """Where a volume would lie; whether it is there is not asked."""
    given, _ = parse(words, {"volume": Option(required=True)}, ["volume"])
    print(storage.volume(world, given["volume"]).path)


def show_list(world: World, words: Sequence[str]) -> None:
    given, _ = parse(words, {"storage": TEXT, "content": TEXT, "vmid": VMID}, ["storage"])
    one = storage.storage(given["storage"])
    rows: list[tuple[str, str, str, int, str]] = []
    for kind, folder in storage.SUBDIRECTORIES.items():
        if one.type == "dir" and kind in one.content and given.get("content", kind) == kind:
            for file in sorted((one.path / folder).glob("*")):
                rows += _file(world, one, kind, file)
    if {"rootdir", "images"} & one.content and given.get("content", "rootdir") in ("rootdir", "images"):
        places = one.path.glob("subvol-*") if one.type == "zfspool" else one.path.glob("images/*/*")
        for place in sorted(places):
            owner = place.name.split("-")[1]
            name = place.name if one.type == "zfspool" else f"{owner}/{place.name}"
            rows.append((f"{one.name}:{name}", "subvol", "rootdir", 0, owner))
    wide = max([len(row[0]) for row in rows], default=0)
    digits = max([len(str(row[3])) for row in rows], default=1)
    print(f"{'Volid':<{wide}} {'Format':<7} {'Type':<9} {'Size':>{digits}} VMID")
    for volid, form, kind, size, owner in rows:
        if not given.get("vmid") or given["vmid"] == owner:
            print(f"{volid:<{wide}} {form:<7} {kind:<9} {size:>{digits}} {owner}".rstrip())


def _file(world: World, one: storage.Storage, kind: str, file: Path) -> list[tuple[str, str, str, int, str]]:
    try:
        found = storage.volume(world, f"{one.name}:{kind}/{file.name}")
    except Died:
        return []  # a file whose name does not fit is not shown
    suffix = file.name.rpartition(".tar")[2]
    form = {"vztmpl": f"t{suffix[1:]}" if suffix else "tar", "snippets": "snippet"}.get(kind, "raw")
    return [(f"{one.name}:{found.name}", form, kind, file.stat().st_size, "")]


def alloc(world: World, words: Sequence[str]) -> None:
    schema = {
        "storage": TEXT,
        "vmid": VMID,
        "filename": TEXT,
        "size": Option(pattern=r"\d+[MG]?"),
        "format": TEXT,
    }
    given, _ = parse(words, schema, ["storage", "vmid", "filename", "size"])
    number = int(given["size"].rstrip("MG"))
    kib = number * {"M": 1 << 10, "G": 1 << 20}.get(given["size"][-1], 1)
    if given["filename"]:
        not_simulated("pvesm alloc with a name: give '' for the next free one")
    volume, _ = storage.allocate(given["storage"], given["vmid"], kib / (1 << 20))
    print(f"successfully created '{volume}'")


def free(world: World, words: Sequence[str]) -> None:
    given, _ = parse(words, {"volume": TEXT, "storage": TEXT, "delay": Option("integer", 1, 30)}, ["volume"])
    found = storage.volume(world, given["volume"])
    if not found.path.exists():
        raise Died(f"volume '{given['volume']}' does not exist")
    storage.free(world, given["volume"])
    print(f"Removed volume '{given['volume']}'")


COMMANDS = {"status": status, "path": path, "list": show_list, "alloc": alloc, "free": free}
