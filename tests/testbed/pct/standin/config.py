"""A container's configuration file: reading, writing, locking (LXC/Config.pm, AbstractConfig.pm)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from .errors import Died
from .options import FALSE, TRUE
from .properties import Formats
from .world import LOCKS, LXC, World

RAW = re.compile(r"(lxc\.[a-z0-9_\-.]+)(?::|\s*=)\s*(.*?)\s*")
KEY = re.compile(r"([a-z][a-z_]*\d*):\s*(.+?)\s*")
RUNTIME = "lxc.environment.runtime"
# LXC/Config.pm $valid_lxc_conf_keys; two of them are known, and refused with a reason
_ALLOWED = """
apparmor.profile apparmor.allow_incomplete apparmor.allow_nesting apparmor.raw selinux.context include arch
uts.name signal.halt signal.reboot signal.stop init.cmd init.cwd init.uid init.gid init.groups pty.max
console.logfile console.path tty.max devtty.dir hook.autodev autodev kmsg mount.fstab mount.entry mount.auto
rootfs.mount cap.drop cap.keep seccomp.profile seccomp.notify.proxy seccomp.notify.cookie idmap
hook.pre-start hook.pre-mount hook.mount hook.start hook.stop hook.post-stop hook.clone hook.destroy
hook.version log.level log.file start.auto start.delay start.order group environment environment.runtime
environment.hooks sysctl.fs.mqueue sysctl.kernel.msgmax sysctl.kernel.msgmnb sysctl.kernel.msgmni
sysctl.kernel.sem sysctl.kernel.shmall sysctl.kernel.shmmax sysctl.kernel.shmmni
sysctl.kernel.shm_rmid_forced
"""
ALLOWED = {f"lxc.{name}" for name in _ALLOWED.split()}
REFUSED = {
    "lxc.rootfs.path": "lxc.rootfs.path is auto generated from rootfs",
    "lxc.rootfs.options": "lxc.rootfs.options is not supported, "
    'please use mount point options in the "rootfs" key',
}
_WHOLE_FAMILIES = ("lxc.cgroup2.", "lxc.prlimit.", "lxc.net.")


class Config:
    """`values` by key; `env` and `raw` hold the lxc.* lines; `pending` changes wait for the next start."""

    def __init__(self, values: dict[str, str] | None = None, env: list[str] | None = None) -> None:
        self.values = values or {}
        self.env = env or []
        self.raw: list[tuple[str, str]] = []
        self.pending: dict[str, str] = {}
        self.rest = ""  # snapshots, as they stand in the file
        self.text = ""  # as it was read

    @property
    def digest(self) -> str:
        import hashlib

        return hashlib.sha1(self.text.encode()).hexdigest()

    def get(self, key: str, default: str = "") -> str:
        return self.values.get(key, default)

    @property
    def unprivileged(self) -> bool:
        return self.get("unprivileged") == "1" or any(key == "lxc.idmap" for key, _ in self.raw)

    def numbered(self, kind: str) -> list[tuple[str, str]]:
        """The keys mp0, mp1, … (or dev0…, net0…) with their values, in order."""
        keys = [key for key in self.values if re.fullmatch(rf"{kind}\d+", key)]
        return [(key, self.values[key]) for key in sorted(keys, key=lambda key: int(key[len(kind) :]))]


def load(world: World, formats: Formats, vmid: str) -> Config:
    """The configuration of a container of this node. Raises Died as AbstractConfig.pm load_config does.

    So for a container of another node, too: its file lies there. The exit code is errno's ENOENT.
    """
    try:
        text = world.config_path(vmid).read_text()
    except FileNotFoundError:
        sentence = f"Configuration file 'nodes/{world.node}/lxc/{vmid}.conf' does not exist"
        raise Died(sentence, errno.ENOENT) from None
    return parse(formats, vmid, text)


def parse(formats: Formats, vmid: str, text: str) -> Config:
    """LXC/Config.pm parse_pct_config: a line that it cannot use is warned of, and lost at the next write."""
    found = Config()
    found.text = text
    head, *rest = re.split(r"^(?=\[(?!pve:pending\]))", text, maxsplit=1, flags=re.M)
    found.rest = rest[0] if rest else ""
    current, pending, description = found, Config(), ""
    for line in head.split("\n"):
        if not line.strip():
            continue
        if line.strip().lower() == "[pve:pending]":
            current = pending
        elif line.startswith("#"):
            description += _unquoted(line[1:]) + "\n"
        elif match := RAW.fullmatch(line):
            _raw_line(vmid, current, *match.groups(), line)
        elif (match := KEY.fullmatch(line)) and (match[1] != "delete" or current is pending):
            current.values[match[1]] = _value(formats, vmid, *match.groups())
        else:
            _warn(f"vm {vmid} - unable to parse config: {line}")
    if description:
        found.values["description"] = description
    found.pending = pending.values
    return found


def _raw_line(vmid: str, current: Config, key: str, value: str, line: str) -> None:
    if key == RUNTIME:
        current.env.append(value)
    elif key in REFUSED:
        _warn(f"vm {vmid} - {key}: {REFUSED[key]}")
    elif key in ALLOWED or key.startswith(_WHOLE_FAMILIES):
        current.raw.append((key, value))
    elif key.startswith("lxc.cgroup."):
        _warn(f"vm {vmid} - {key} is deprecated, this will be a hard error in the future!")
        current.raw.append((key, value))
    else:
        _warn(f"vm {vmid} - unable to parse config: {line}")


def _value(formats: Formats, vmid: str, key: str, value: str) -> str:
    """check_type: only the type is looked at, and a value that is wrong is kept."""
    option = formats.keys.get(key)
    if key == "delete":
        return value
    try:
        if option is None:
            raise Died(f"unknown setting '{key}'")
        if option.type == "boolean":
            if not TRUE.match(value) and not FALSE.match(value):
                raise Died(f"type check ('boolean') failed - got '{value}'")
            return "1" if TRUE.match(value) else "0"
        if option.type == "integer" and not value.isdigit():
            raise Died(f"type check ('integer') failed - got '{value}'")
        if option.type == "number" and not re.fullmatch(r"\d+(\.\d+)?", value):
            raise Died(f"type check ('number') failed - got '{value}'")
        if option.check is not None:
            option.check(value)
    except Died as died:
        _warn(f"vm {vmid} - unable to parse value of '{key}' - {died}")
    return value


def write(world: World, vmid: str, config: Config) -> None:
    """LXC/Config.pm write_pct_config: the description as comments, keys sorted, environment, raw lines."""
    lines = []
    for line in config.get("description").splitlines():
        lines.append("#" + _quoted(line))
    for key in sorted(config.values):
        if key != "description":
            lines.append(f"{key}: {config.values[key]}")
    lines += [f"{RUNTIME}: {variable}" for variable in config.env if variable]
    lines += [f"{key}: {value}" for key, value in config.raw]
    text = "\n".join(lines) + "\n"
    if config.pending:
        text += "\n[pve:pending]\n" + "".join(f"{k}: {v}\n" for k, v in sorted(config.pending.items()))
    path = world.config_path(vmid)
    temporary = path.with_name(f"{path.name}.tmp.{os.getpid()}")
    temporary.write_text(text + (f"\n{config.rest}" if config.rest else ""))
    temporary.rename(path)
    world.write_vmlist()


def running(vmid: int | str) -> bool:
    """LXC.pm list_active_containers: its monitor listens on an abstract socket."""
    name = f"@{LXC}/{vmid}/command"
    return any(line.split()[-1] == name for line in Path("/proc/net/unix").read_text().splitlines())


def apply(config: Config, deleted: str, changed: dict[str, str]) -> None:
    """Take away the keys of `deleted` (they part at commas), and set those of `changed`."""
    for key in filter(None, deleted.split(",")):
        if key == "env":
            config.env = []
        elif key.startswith("mp") and not config.get(key, "/").startswith("/"):
            volume = config.values.pop(key).split(",")[0]
            free = next(f"unused{n}" for n in range(256) if f"unused{n}" not in config.values)
            config.values[free] = volume
        else:
            config.values.pop(key, None)
    for key, value in changed.items():
        if key == "env":
            config.env = value.split("\0")
        else:
            config.values[key] = value


def check_lock(config: Config, *, but: str = "") -> None:
    """Raises Died if something else has the container, such as a backup (AbstractConfig.pm check_lock)."""
    if (held := config.get("lock")) and held != but:
        raise Died(f"CT is locked ({held})")


def check_protection(config: Config, sentence: str) -> None:
    if config.get("protection") == "1":
        raise Died(f"{sentence} - protection mode enabled")


@contextlib.contextmanager
def locked(vmid: str, seconds: float = 10) -> Iterator[None]:
    """While one command changes a container, others wait; 10 s at most (AbstractConfig.pm lock_config)."""
    path = LOCKS / f"pve-config-{vmid}.lock"
    with open(path, "w") as lock:
        deadline = time.monotonic() + seconds
        said = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not said:
                    print("trying to acquire lock...", file=sys.stderr)
                    said = True
                if time.monotonic() > deadline:
                    raise Died(f"can't lock file '{path}' - got timeout") from None
                time.sleep(0.05)
        yield


def _quoted(text: str) -> str:
    """Tools.pm encode_text: what is not printed as it is, %, and :."""
    return re.sub(rb"[^ -~]|[%:]", lambda match: b"%%%02X" % match[0][0], text.encode()).decode()


def _unquoted(text: str) -> str:
    raw = re.sub(rb"%([0-9A-Fa-f]{2})", lambda match: bytes([int(match[1], 16)]), text.encode())
    return raw.decode(errors="replace")


def _warn(sentence: str) -> None:
    print(sentence, file=sys.stderr)
