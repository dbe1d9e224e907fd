"""OCI archives: which files are taken for one, and how one becomes a container (LXC/Create.pm)."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from .config import Config
from .errors import Died
from .lxcconfig import COUNT, SHIFT

COMPRESSION = {".gz": "-z", ".bz2": "-j", ".xz": "-J", ".lzo": "--lzop", ".zst": "--zstd"}
# Storage/Plugin.pm @COMMON_TAR_FLAGS
FLAGS = ["--one-file-system", "-p", "--sparse", "--numeric-owner", "--acls", "--xattrs"]
FLAGS += ["--xattrs-include=user.*", "--xattrs-include=security.capability"]
FLAGS += ["--warning=no-file-ignored", "--warning=no-xattr-write"]
CONTROL = re.compile(r"[\x00-\x08\x10-\x1f\x7f]")


def is_archive(path: Path) -> bool:
    """archive_is_oci_format: ends in .tar, and lists exactly these names."""
    if not path.name.endswith(".tar"):
        return False
    done = subprocess.run(["tar", "-tf", path], capture_output=True, text=True)
    if done.returncode != 0:
        raise Died(f"command 'tar -tf {path}' failed: exit code {done.returncode}")
    names = done.stdout.splitlines()
    return "oci-layout" in names and "index.json" in names and any(n.startswith("blobs/") for n in names)


def within(unprivileged: bool) -> list[str]:
    """The words before a command that shall act with the container's ids."""
    if not unprivileged:
        return []
    return ["lxc-usernsexec", "-m", f"u:0:{SHIFT}:{COUNT}", "-m", f"g:0:{SHIFT}:{COUNT}", "--"]


def unpack_root(archive: Path, root: Path, unprivileged: bool) -> None:
    """A root file system's archive (restore_tar_archive).

    As the container's root: device nodes cannot be made there, but those below ./dev/ are left out.
    """
    suffix = re.search(r"\.tar(\.[^.]+)?$", str(archive))
    if not suffix:
        raise Died(f"file does not look like a template archive: {archive}")
    if suffix[1] and suffix[1] not in COMPRESSION:
        raise Died(f"unrecognized compression format: {suffix[1]}")
    print(f"extracting archive '{archive}'", flush=True)
    command = [*within(unprivileged), "tar", "xpf", "-", *([COMPRESSION[suffix[1]]] if suffix[1] else [])]
    command += ["--totals", *FLAGS, "-C", str(root), "--skip-old-files", "--anchored", "--exclude", "./dev/*"]
    with open(archive, "rb") as source:
        done = subprocess.run(command, stdin=source)
    if done.returncode != 0:
        raise Died(f"command '{shlex.join(command)}' failed: exit code {done.returncode}")


def unpack(archive: Path, root: Path, config: Config, *, with_user: bool) -> None:
    """An image's layers, and what its configuration says as keys of ours (restore_oci_archive).

    HEALTHCHECK, EXPOSE and labels are not looked at; a volume becomes a directory.
    """
    with tarfile.open(archive) as outer:

        def read(name: str) -> Any:
            file = outer.extractfile(name)
            assert file
            return json.load(file)

        try:
            index = read("index.json")
            manifest = read(_blob(index["manifests"][0]["digest"]))
            said = read(_blob(manifest["config"]["digest"])).get("config", {})
            for layer in manifest["layers"]:
                _layer(outer, layer, root, config.unprivileged)
        except KeyError as error:
            raise Died(f"failed to parse OCI image: {error}") from None
    for path in said.get("Volumes") or {}:
        print(f"creating base directory for volume at {path}")
        place = [*within(config.unprivileged), "chroot", str(root), "mkdir", "-p", f"/{path}"]
        subprocess.run(place, check=True)
    _keys(said, root, config, with_user)


def _blob(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _layer(outer: tarfile.TarFile, layer: dict[str, str], root: Path, unprivileged: bool) -> None:
    """First take away what the layer hides of those below, then lay it over them."""
    name = _blob(layer["digest"])
    kind = layer["mediaType"]
    flag = ["-z"] if "gzip" in kind else ["--zstd"] if "zstd" in kind else []
    listing = _through(outer, name, ["tar", "-t", *flag, "--wildcards", "*.wh.*"])
    for line in listing.splitlines():
        hidden = root / line.strip("/")
        if hidden.name == ".wh..wh..opq":
            for entry in hidden.parent.iterdir() if hidden.parent.is_dir() else ():
                _remove(entry)
        elif hidden.name.startswith(".wh."):
            _remove(hidden.with_name(hidden.name[4:]))
    extract = ["tar", "-xp", *flag, "--numeric-owner", "--xattrs", "--exclude=.wh.*", "--exclude=*/.wh.*"]
    _through(outer, name, [*within(unprivileged), *extract, "-C", str(root)])


def _through(outer: tarfile.TarFile, name: str, command: list[str]) -> str:
    file = outer.extractfile(name)
    assert file
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=False
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        try:
            shutil.copyfileobj(file, process.stdin, 1 << 20)
            process.stdin.close()
        except BrokenPipeError:
            pass
        said, errors = process.stdout.read(), process.stderr.read().decode(errors="replace")
    if process.returncode != 0 and "Not found in archive" not in errors:
        raise Died(
            f"failed to extract OCI image: {errors.strip().splitlines()[-1] if errors else 'tar failed'}"
        )
    return said.decode(errors="replace")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _keys(said: dict[str, Any], root: Path, config: Config, with_user: bool) -> None:
    for key in ("Entrypoint", "Cmd", "Env"):
        if any(CONTROL.search(text) for text in said.get(key) or ()):
            raise Died(f"OCI config array-value for '{key}' contains forbidden control characters!")
    for key in ("User", "WorkingDir", "StopSignal"):
        if CONTROL.search(said.get(key) or ""):
            raise Died(f"OCI config value for '{key}' contains forbidden control characters!")
    command = [*(said.get("Entrypoint") or ()), *(said.get("Cmd") or ())]
    if command and command[0] != "/sbin/init":
        config.values["entrypoint"] = shlex.join(command)
        config.values["cmode"] = "console"  # a tty would break it
        for key, value in config.numbered("net"):
            if "host-managed" not in value:
                print(f"Auto-Enabling host-managed network for network device {key}.")
                config.values[key] = f"{value},host-managed=1"
    if with_user and said.get("User"):
        config.raw += _user(said["User"], root)
    if said.get("WorkingDir"):
        config.raw.append(("lxc.init.cwd", said["WorkingDir"]))
    config.env = list(said.get("Env") or ())
    config.raw.append(("lxc.signal.halt", said.get("StopSignal") or "SIGTERM"))


def _user(text: str, root: Path) -> list[tuple[str, str]]:
    """resolve_oci_user, by the image's own /etc/passwd and /etc/group."""
    user, _, group = text.partition(":")
    passwd = [line.split(":") for line in _lines(root / "etc/passwd")]
    groups = [line.split(":") for line in _lines(root / "etc/group")]
    row = next((row for row in passwd if row[2 if user.isdigit() else 0] == user), None)
    uid = user if user.isdigit() else row[2] if row else ""
    gid = row[3] if row and not group else ""
    if group:
        gid = group if group.isdigit() else next((row[2] for row in groups if row[0] == group), "")
    found = [("lxc.init.uid", uid)] if uid else []
    if gid:
        found.append(("lxc.init.gid", gid))
    if row and not group:
        member = ",".join(line[2] for line in groups if row[0] in line[3].split(","))
        found.append(("lxc.init.groups", member))
    return found


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []
