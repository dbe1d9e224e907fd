"""Weights and data by rsync: to a host without Python for `deploy.receiver`, or where it is asked for.

What has arrived is read back on both sides (``rsync --checksum`` as a dry run, which must find nothing to
do), and only then the directory appears under its name, by a rename, as ever. It is one stream, keeps no copy
on disk, and sends what several links lead to once, too. Nothing but sh, rsync and the usual small programs is
needed there.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy import manifest, rsyncing
from deploy.errors import DeployError
from deploy.host import Host, HostError
from deploy.manifest import Progress
from deploy.sender import Sent
from deploy.sizes import size

TIMEOUT = 60.0  # seconds for a look, or for the rename
READING = 50e6  # bytes a second that both sides read at least
TASK = "brings weights without our receiver"
TRIES = 2  # of what arrives damaged

# Arguments: the copy's directory. Says a word and the size and name of each of its files; nothing if it is
# not there.
LIST = """\
[ -d "$1" ] || exit 0
echo there
cd -- "$1" && find . -type f -exec stat -c '%s %n' {} +
"""

# Arguments: place, name, version. Says a word if nothing can be done; else how many kB the incoming directory
# has, are free in the place, and of memory (- if it is no tmpfs).
LOOK = """\
set -eu
umask 022
command -v rsync >/dev/null || { echo no-rsync; exit 0; }
mkdir -p -- "$1"
[ -O "$1" ] || { echo foreign; exit 0; }
incoming=$1/.$2.incoming.$3
[ -d "$incoming" ] || mkdir -m 700 -- "$incoming"
cd -- "$incoming"  # (a name may have a newline in it)
has=$(du -sk . | cut -f1)
free=$(df -Pk . | awk 'NR == 2 { print $4 }')
memory=$(awk '$1 == "MemAvailable:" { print $2 }' /proc/meminfo)
[ "$(stat -f -c %T .)" = tmpfs ] || memory=-
echo "$has $free $memory"
"""

# Arguments: place, name, version.
LINK = """\
set -eu
cd -- "$1"
[ "$(readlink -- "$2")" != "$2@$3" ] || exit 0
ln -s -- "$2@$3" ".$2.link.$$"
mv -T -- ".$2.link.$$" "$2"
"""

# Arguments: place, name, version, whether a copy that is there is damaged and goes; then pairs of names that
# are one file, of which the second is there. The manifest comes over stdin.
PUBLISH = """\
set -eu
cd -- "$1"
incoming=.$2.incoming.$3 final=$2@$3 old=.damaged-$2@$3-$$
[ "$4" = no ] || mv -T -- "$final" "$old" || :
shift 4
while [ $# -gt 0 ]; do
  mkdir -p -- "$incoming/$(dirname -- "$1")"
  ln -f -- "$incoming/$2" "$incoming/$1"
  shift 2
done
cat >"$incoming/.drafthouse.json"
find "./$incoming" -type f -exec chmod 444 {} +
find "./$incoming" -type d -exec chmod 755 {} +
[ -d "$final" ] || mv -T -- "$incoming" "$final"
rm -rf -- "$old"
"""


def send(
    host: Host,
    source: Path,
    wanted: Mapping[str, Any],
    target: str,
    *,
    link: bool,
    progress: Progress = manifest.silent,
) -> Sent:
    """Have `source`, which is what `wanted` says, at `target` on `host`, verified. See `sender.send`.

    Raises DeployError; then what has arrived is gone on with by the next call.
    """
    rsyncing.check(TASK)
    began = time.monotonic()
    place, _, last = target.rpartition("/")
    name, _, version = last.rpartition("@")
    names = [one for one in wanted["stamp"] if one not in wanted["same"]]
    total = sum(wanted["stamp"][one][0] for one in names)
    there = _listing(host, target)
    if there and _whole(there, wanted):
        if link:
            _shell(host, LINK, place, name, version)
        return Sent(0, total, time.monotonic() - began, 0)
    if there:
        progress(f"{target} on {host.name} is not whole; it is sent again")
    _see_room(host, place, name, version, total)
    argv = _command(host, source, f"{place}/.{name}.incoming.{version}")
    sent = rsyncing.run(host, argv, _listed(names), total, progress, str(source))
    for _ in range(TRIES):
        progress(f"reading back what has arrived on {host.name}")
        wrong = _differing(host, argv, names, total)
        if not wrong:
            break
        again = [*argv[:-2], "--ignore-times", *argv[-2:]]
        sent += rsyncing.run(host, again, _listed(wrong), total, progress, str(source))
    else:
        raise DeployError(f"{source / wrong[0]} arrived damaged {TRIES} times; look at {host.name}'s memory")
    if manifest.stamp_of(source) != wanted["stamp"]:
        raise DeployError(f"{source} changed while it was sent; push it again when it is whole")
    same = [one for pair in wanted["same"].items() for one in pair]
    data = json.dumps(dict(wanted)).encode()
    _shell(host, PUBLISH, place, name, version, "yes" if there else "no", *same, input=data)
    if link:
        _shell(host, LINK, place, name, version)
    return Sent(sent, 0, time.monotonic() - began, 1)


def _listing(host: Host, target: str) -> bytes:
    """What is said of a copy's files by ``stat``, a line each; empty if it is not there."""
    return host.run(["sh", "-c", LIST, "sh", target], timeout=TIMEOUT).out


def _whole(there: bytes, wanted: Mapping[str, Any]) -> bool:
    """Whether all files are there, each in full length. (A newline in a name makes two lines of both.)"""
    sizes = [f"{length} ./{name}\n" for name, (length, _) in wanted["stamp"].items()]
    expected = Counter("".join(sizes).encode("utf-8", "surrogateescape").split(b"\n"))
    found = Counter(there.split(b"\n"))
    described = any(line.endswith(f" ./{manifest.FILE}".encode()) for line in found)
    return described and not expected - found


def _see_room(host: Host, place: str, name: str, version: str, total: int) -> None:
    """Make the place and the incoming directory. Raises DeployError if the copy cannot come to be."""
    said = _shell(host, LOOK, place, name, version).split()
    if said == ["no-rsync"]:
        raise DeployError(f"{host.name} has no rsync either; install it there, or Python 3.9 or later")
    if said == ["foreign"]:
        raise DeployError(
            f"{place} on {host.name} belongs to another user, who can change what is in it; choose another "
            "place in fabric.yaml"
        )
    has, *rest = [None if word == "-" else int(word) * 1024 for word in said]
    for what, free in zip((place, f"{host.name}'s memory"), rest, strict=True):
        need = total - (has or 0)
        if free is not None and free < need:
            raise DeployError(
                f"{what} has {size(free)} free, but {size(need)} are needed: {size(need - free)} too little; "
                "remove what nobody uses there"
            )


def _command(host: Host, source: Path, incoming: str) -> list[str]:
    """rsync from `source` to there, of the files that it is told over stdin; the last two words are paths."""
    argv = [
        "rsync",
        "--files-from=-",
        "--from0",
        "--copy-links",
        "--times",
        "--omit-dir-times",
        "--inplace",
        "--no-whole-file",
    ]
    argv += [f"--timeout={rsyncing.LINK_TIMEOUT}", "--info=progress2,stats1", "--no-inc-recursive"]
    shell = host.rsync_shell()
    if shell is None:
        return [*argv, f"{source}/", f"{incoming}/"]
    return [*argv, "--protect-args", f"--rsh={shell}", f"{source}/", f"host:{incoming}/"]


def _listed(names: Sequence[str]) -> bytes:
    return "".join(f"{one}\0" for one in names).encode("utf-8", "surrogateescape")


def _differing(host: Host, argv: Sequence[str], names: Sequence[str], total: int) -> list[str]:
    """Those files that are not the same on both sides. Reads all of them."""
    words = [one for one in argv[:-2] if not one.startswith(("--info", "--timeout"))]
    words += ["--checksum", "--dry-run", "--out-format=%n", *argv[-2:]]
    timeout = TIMEOUT + total / READING
    try:
        done = subprocess.run(words, input=_listed(names), capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise HostError(f"{host.name}: reading back took more than {timeout:.0f} s and was ended") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"rsync: {done.returncode}"]
        raise HostError(f"{host.name}: what has arrived could not be read back: {lines[0].strip()}")
    said = {
        one
        for one in done.stdout.decode("utf-8", "surrogateescape").splitlines()
        if one and not one.endswith("/")
    }
    known = [one for one in names if one in said]
    return known if len(known) == len(said) else list(names)  # (a newline in a name is told as \\#012)


def _shell(host: Host, script: str, *words: str, input: bytes | None = None) -> str:
    return host.run(["sh", "-c", script, "sh", *words], timeout=TIMEOUT, input=input).text
