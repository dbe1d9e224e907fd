"""Releases: what is deployed, as files named by their content.

A release is a directory that never changes. Its id is a digest over its files, so equal settings and equal
code are one release, and whatever differs is another. `build` is pure, `write` acts.

    run.yaml       the resolved settings: what people compare
    command.json   the trainer's argv
    run.env        its environment, without secrets
    app/trainer/   a copy of the trainer, so that editing the checkout never changes what runs
    image.json     instead of app/, where the trainer is in an image: what went into that, file by file
    compose.yaml   with the compose runtime: the service
    launch.sh      with the compose runtime: the commands that start it, for people
    pct.conf       with the pct runtime: the container's configuration, with placeholders for what a run adds
    drafthouse-<name>.service   what starts the next run at boot
    release.json   id, digests, git; the only file outside the digest
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from deploy import flags, mask, onhost, render, yamlfile
from deploy.errors import DeployError
from deploy.host import Host
from deploy.runtimes import compose, pct
from deploy.settings import TOY, RunSettings

ID_LENGTH = 12
SHOWN = 80  # characters of a value in a line about a difference
MANIFEST = "release.json"
IMAGE = "image.json"


class Image(Protocol):
    """`deploy.image.Image`, or `compose.Used`."""

    @property
    def reference(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def files(self) -> Mapping[str, bytes]: ...
    @property
    def arguments(self) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class Layout:
    """Where a name's things lie on a host."""

    state: str
    shm: str
    name: str
    cache_root: str | None = None

    @property
    def home(self) -> str:
        return f"{self.state}/names/{self.name}"

    @property
    def checkpoints(self) -> str:
        return f"{self.home}/checkpoints"

    @property
    def cache(self) -> str:
        return self.cache_root or f"{self.home}/cache"

    def secrets(self, run_id: str) -> str:
        return f"{self.home}/secrets-{run_id}"

    @property
    def runs(self) -> str:
        return f"{self.state}/runs"

    def release(self, release_id: str) -> str:
        return f"{self.home}/releases/{release_id}"


@dataclass(frozen=True)
class Release:
    """An immutable set of files. `files` holds those that the digest covers."""

    id: str
    digest: str
    files: Mapping[str, bytes]
    command: tuple[str, ...]
    git: Mapping[str, Any]

    @property
    def digests(self) -> dict[str, str]:
        return {name: _digest(data) for name, data in sorted(self.files.items())}

    @property
    def manifest(self) -> bytes:
        """release.json: who made it and when is in run.json, since the same release may be started again."""
        value = {"id": self.id, "digest": self.digest, "files": self.digests, "git": dict(self.git)}
        return (json.dumps(value, indent=1) + "\n").encode()


# -- pure --------------------------------------------------------------------------------------------------


def command(
    settings: RunSettings, layout: Layout, python: str, weights: str | None, data: str | None
) -> list[str]:
    """The argv that launch starts: the trainer with its flags, or the foreign command as it is.

    `weights` and `data` are paths on the host, or `toy`.
    """
    if settings.command is not None:
        return list(settings.command)
    values = {"resume": "auto", **(settings.trainer or {})}
    if weights is not None:
        values["target-model"] = weights
    if data is not None and data != TOY:  # the trainer's own default is the toy's data
        values["data-dir"] = data
    own = ["--output-dir", layout.checkpoints, "--cache-dir", layout.cache]
    return [python, "-u", "-m", "trainer", *flags.argv(values), *own]


def environment(
    settings: RunSettings, layout: Layout, weights: str | None, data: str | None
) -> dict[str, str]:
    """What launch adds to the environment of the trainer; a foreign command learns its places from it."""
    places = {}
    if settings.command is not None:
        places = {"DRAFTHOUSE_CHECKPOINTS": layout.checkpoints, "DRAFTHOUSE_CACHE": layout.cache}
        places |= {"DRAFTHOUSE_WEIGHTS": weights} if weights else {}
        places |= {"DRAFTHOUSE_DATA": data} if data else {}
    return {**places, "PYTHONUNBUFFERED": "1", **settings.environment}


def resolved(
    settings: RunSettings,
    runtime: str,
    python: str,
    weights: str | None,
    data: str | None,
    *,
    image: Image | None = None,
    user: str | None = None,
    devices: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The settings as run.yaml shows them. Secrets by name only."""
    value: dict[str, Any] = {"name": settings.name, "runtime": runtime}
    if image is not None:
        value |= {"image": image.reference, "user": user}
        value |= {key: getattr(settings, key) for key in ("memory", "shm_size") if getattr(settings, key)}
    if devices is not None:
        value |= {"devices": list(devices)}
    if settings.command is None:
        value |= {"python": python, "trainer": settings.trainer}
    else:
        value |= {"command": settings.command}
    value |= {"weights": weights, "data": data, "environment": dict(settings.environment)}
    value |= {"secrets": sorted(settings.secrets), "working_directory": settings.working_directory}
    value |= {"tty": True} if settings.tty else {}
    for key in ("grace_seconds", "checkpoint_timeout_seconds", "first_heartbeat_timeout_seconds"):
        value[key] = getattr(settings, key)
    if settings.command is not None:
        value["settle_seconds"] = settings.settle_seconds
    value |= {"restart": settings.restart.model_dump(), "log": settings.log.model_dump()}
    return value


def patience(files: Mapping[str, bytes]) -> dict[str, float]:
    """How long a start of a deployed release is waited for: those settings that its run.yaml has."""
    value = _yaml(files.get("run.yaml", b""))
    keys = ("first_heartbeat_timeout_seconds", "settle_seconds")
    found = {key: value.get(key) for key in keys} if isinstance(value, dict) else {}
    return {key: float(number) for key, number in found.items() if isinstance(number, int | float)}


def build(
    settings: RunSettings,
    layout: Layout,
    *,
    runtime: str,
    python: str,
    weights: str | None,
    data: str | None,
    app: Mapping[str, bytes],
    git: Mapping[str, Any],
    image: Image | None = None,
    user: str | None = None,
    devices: Sequence[str] | None = None,
    device_files: Sequence[str] = (),
    unit: str | None = None,
    container: pct.Container | None = None,
) -> Release:
    """The release for these settings. `app` maps ``trainer/x.py`` to its content.

    A container needs `image` and `user` (uid:gid in it), one of Proxmox `container`; `devices` are indices of
    GPUs (None: not said), `device_files` their nodes on the host, and `unit` is the text of the boot unit. A
    foreign command gets launch and what launch imports, so that work on our trainer is no change to it.
    """
    if settings.command is not None:
        app = needed(app, "trainer/launch.py")
    if image is not None and settings.image.use is None:
        app = {}  # it is in the image
    argv = command(settings, layout, python, weights, data)
    variables = environment(settings, layout, weights, data)
    shown = resolved(settings, runtime, python, weights, data, image=image, user=user, devices=devices)
    files = {
        "run.yaml": yamlfile.dump(shown).encode(),
        "command.json": (json.dumps(argv, ensure_ascii=False, indent=1) + "\n").encode(),
        "run.env": "".join(
            f"{key}={render.envfile(value)}\n" for key, value in sorted(variables.items())
        ).encode(),
        **{f"app/{name}": content for name, content in sorted(app.items())},
    }
    if container is not None and image is not None:
        files[pct.RELEASE_FILE] = pct.conf_file(container).encode()
        files[IMAGE] = _image(image)
        files |= container.files
    elif image is not None and user is not None:
        service = compose.deployed(
            settings,
            layout,
            image=image.reference,
            user=user,
            weights=weights,
            data=data,
            gpus=devices or (),
            device_files=device_files,
        )
        files["compose.yaml"] = compose.compose_file(service).encode()
        files["launch.sh"] = render.render(
            "launch.sh.j2",
            name=settings.name,
            home=layout.home,
            launch=service.command,
            command=_wrapped(argv),
        ).encode()
        files[IMAGE] = _image(image)
    if unit is not None:
        files[f"drafthouse-{settings.name}.service"] = unit.encode()
    return of(files, argv, git)


def _wrapped(argv: Sequence[str]) -> list[str]:
    """A command as people read and compare it: shell words, each flag on a line of its own."""
    lines: list[list[str]] = [[]]
    for word in argv:
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(render.shell(word))
    return "\n".join(" ".join(words) for words in lines).splitlines()


def _image(image: Image) -> bytes:
    """image.json: what went into the image, file by file, so that a difference can be named."""
    value = {
        "reference": image.reference,
        "digest": image.digest,
        "arguments": dict(image.arguments),
        "files": {name: _digest(data) for name, data in sorted(image.files.items())},
    }
    return (json.dumps(value, indent=1) + "\n").encode()


def of(
    files: Mapping[str, bytes], command: Sequence[str] = (), git: Mapping[str, Any] | None = None
) -> Release:
    """The release that consists of `files`. (The probe computes its id once more, from the manifest.)"""
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(f"{name}\0{_digest(data)}\n".encode())
    return Release(digest.hexdigest()[:ID_LENGTH], digest.hexdigest(), files, tuple(command), git or {})


def needed(app: Mapping[str, bytes], start: str) -> dict[str, bytes]:
    """The part of `app` that the module `start` imports, directly or through others."""
    wanted, found = [start, "trainer/__init__.py"], {}
    while wanted:
        name = wanted.pop()
        if name in found or name not in app:
            continue
        found[name] = app[name]
        imported = onhost.imported(app[name].decode("utf-8", "surrogateescape"))
        wanted += [f"{module.replace('.', '/')}.py" for module in imported]
    return found


def differences(old: Mapping[str, bytes] | None, old_digests: Mapping[str, str], new: Release) -> list[str]:
    """What differs between a deployed release and a new one, a line each: settings by key, code by file.

    `old` holds the old run.yaml and image.json (what else it holds is not needed), `old_digests` its per-file
    digests. What looks like a secret is not shown.
    """
    if old is None:
        return []
    before = _flat(_yaml(old.get("run.yaml", b"")))
    after = _flat(_yaml(new.files["run.yaml"]))
    found = []
    for key in [*after, *(key for key in before if key not in after)]:
        was, now = before.get(key, _ABSENT), after.get(key, _ABSENT)
        if was != now:
            hidden = mask.secret_name(key)
            found.append(
                f"{key}: {' → '.join(_short(_say(was, hidden), _say(now, hidden)))}"
                + (mask.OTHER if hidden and _ABSENT not in (was, now) else "")
            )
    found += _changes(_code(old_digests, old), _code(new.digests, new.files))
    if not found and old_digests != new.digests:  # only what follows from neither, like another state root
        found = _changes(old_digests, new.digests)
    return found


def _code(digests: Mapping[str, str], files: Mapping[str, bytes]) -> dict[str, str]:
    """Digests of the files of code, whether they lie in the release or in its image."""
    found = {name.removeprefix("app/"): value for name, value in digests.items() if name.startswith("app/")}
    try:
        value = json.loads(files[IMAGE])["files"] if IMAGE in files else {}
    except (ValueError, KeyError, TypeError):
        value = {}
    return {**found, **(value if isinstance(value, dict) else {})}


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    words = []
    for name in sorted({**before, **after}):
        was, now = before.get(name), after.get(name)
        if was != now:
            words.append(f"{name}: {'new' if was is None else 'removed' if now is None else 'changed'}")
    return words


class _Absent:
    def __repr__(self) -> str:
        return "not set"


_ABSENT = _Absent()


def _say(value: Any, hidden: bool = False) -> str:
    if value is None or value is _ABSENT:
        return "not set"
    if hidden:
        return mask.MASK
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():  # as people write it: 3, not 3.0
        value = int(value)
    text = repr(value) if isinstance(value, str) and (not value or set(value) - _PLAIN) else str(value)
    return mask.text(text)


def _short(was: str, now: str) -> tuple[str, str]:
    """Both texts, cut to what a line can show of them: from a little before the place where they differ."""
    if max(len(was), len(now)) <= SHOWN:
        return was, now
    pairs = enumerate(zip(was, now, strict=False))
    same = next((at for at, (a, b) in pairs if a != b), min(len(was), len(now)))
    begin = max(0, same - 20) if same > SHOWN // 2 else 0
    return _window(was, begin), _window(now, begin)


def _window(text: str, begin: int) -> str:
    rest = ("…" if begin else "") + text[begin:]
    return rest if len(rest) <= SHOWN else rest[: SHOWN - 1] + "…"


_PLAIN = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._/@:+-")


def _flat(value: Any, way: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        found: dict[str, Any] = {}
        for key, item in value.items():
            found |= _flat(item, f"{way}.{key}" if way else str(key))
        return found
    return {way: value} if way else {}


def _yaml(data: bytes) -> Any:
    try:
        return yamlfile.parse(data.decode(), "run.yaml").value
    except (DeployError, UnicodeDecodeError):  # damaged: then everything is new
        return None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def changed(facts: Mapping[str, Any], name: str, release_id: str | None) -> list[str]:
    """Files of a release that somebody changed on the host, by the probe's facts."""
    return list(facts["names"].get(name, {}).get("changed", {}).get(release_id, []))


def added(facts: Mapping[str, Any], name: str, release_id: str | None) -> list[str]:
    """Those of `changed` that nobody deployed."""
    return list(facts["names"].get(name, {}).get("added", {}).get(release_id, []))


def edited(facts: Mapping[str, Any], name: str, release_id: str) -> list[str]:
    """A line for each of them: ``run.env: changed on the host``."""
    new = added(facts, name, release_id)
    return [
        f"{file}: {'added' if file in new else 'changed'} on the host"
        for file in changed(facts, name, release_id)
    ]


def several(files: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b, c and 4 more``."""
    shown = list(files[:3]) + ([f"{len(files) - 3} more"] if len(files) > 3 else [])
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def refuse_changed(facts: Mapping[str, Any], host: str, name: str, release_id: str) -> None:
    """Raise DeployError if a release is not what was deployed: it would run under an id not its own."""
    files = changed(facts, name, release_id)
    if not files:
        return
    alive = any(run["name"] == name and run["alive"] for run in facts["runs"])
    only_added = len(files) == len(added(facts, name, release_id))
    verb, where = "was" if len(files) == 1 else "were", f"release {release_id} of {name}"
    said = f"{verb} added to {where} on {host}" if only_added else f"of {where} {verb} changed on {host}"
    raise DeployError(
        f"{several(files)} {said}; "
        + (
            f"fab {'restart' if alive else 'deploy'} writes it anew"
            if release_id == facts["names"].get(name, {}).get("current")
            else "it cannot be started again; fab restart makes a release of your files as they are now"
        )
    )


# -- acting ------------------------------------------------------------------------------------------------


def trainer_files(root: Path) -> dict[str, bytes]:
    """The trainer's sources in a checkout, as ``{"trainer/launch.py": b"..."}``, and nothing else."""
    package = root / "trainer"
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(package.rglob("*.py"))
        if not any(part.startswith((".", "__pycache__")) for part in path.relative_to(root).parts)
    }


def git_state(root: Path) -> dict[str, Any]:
    """``{"commit": ..., "dirty": ...}`` of the checkout; empty outside of one."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, timeout=20, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if not commit:
        return {}
    return {"commit": commit, "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}


def deployed(host: Host, layout: Layout, release_id: str) -> tuple[dict[str, bytes], dict[str, str]] | None:
    """(files that people compare, per-file digests) of a release on a host; None if it is not there."""
    return deployed_each(host, [layout.release(release_id)])[0]


def deployed_each(host: Host, paths: Sequence[str]) -> list[tuple[dict[str, bytes], dict[str, str]] | None]:
    """`deployed` of several releases by their directories; the host is asked once."""
    return [
        found
        and (
            {name: text.encode("utf-8", "surrogateescape") for name, text in found["files"].items()},
            found["digests"],
        )
        for found in onhost.ask(host, "deploy.release_store:read_each", list(paths))
    ]


def look_at(host: Host, layout: Layout, facts: Mapping[str, Any], release_id: str) -> None:
    """Add to the facts what was changed in a release that the probe passes over: one that does not run."""
    known = facts["names"].get(layout.name) or {}
    if release_id in known.get("releases", ()) and release_id not in known["changed"]:
        found = onhost.ask(host, "deploy.release_store:differing", layout.release(release_id))
        known["changed"][release_id], known["added"][release_id] = found


def damage(host: Host, layout: Layout, release: Release) -> list[str] | None:
    """Files of this release on the host that were changed or added; None if the release is not there."""
    found: list[str] | None = onhost.ask(host, "deploy.release_store:damage", layout.release(release.id))
    return found


def write(host: Host, layout: Layout, release: Release) -> str:
    """Put the release on the host; returns ``written``, ``there already``, or how a damaged one was mended.

    It appears by rename. One that is there is never written to; a damaged one is moved aside, whole, so that
    nothing that somebody changed there is lost, and the files that it should have had take its place.
    """
    path = layout.release(release.id)
    bad = damage(host, layout, release)
    if bad == []:
        return "there already"
    done = "written"
    if bad:
        aside = f"{layout.home}/releases/.damaged-{release.id}-{int(time.time())}"
        host.run(["mv", "-T", "--", path, aside], timeout=60)
        done = (
            f"written again: {', '.join(bad[:3])} on the host had been changed; the old files are in {aside}"
        )
    host.write_tree(path, {**release.files, MANIFEST: release.manifest}, mode=0o444)
    return done
