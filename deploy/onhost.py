"""How our own scripts get to a host that has nothing installed: whole, over stdin or as a directory.

Modules keep their names there, so that the same source runs on both sides. They use the standard library of
Python 3.9 and each other, nothing else. Which ones a script needs is found by following its imports.

`ask` calls one function there and returns its value; `open` leaves it running, with its stdin and stdout in
our hands. Both send the program over stdin, behind its length, so that no argument is long and what follows
on stdin is the function's own.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import marshal
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any

from deploy import CHECKOUT
from deploy.errors import DeployError
from deploy.host import OLD_PYTHON, SCRIPT_FLAGS, Host, HostError, NoPython

PACKAGES = ("deploy", "trainer")
TIMEOUT = 60.0  # seconds that a function gets if nothing else is said
_IMPORT = re.compile(r"^[ \t]*(?:from ([\w.]+) import (?:\(([^)]*)\)|(.*))|import (.*))", re.MULTILINE)
END = 5.0  # seconds from the end of a function's stdin to ours of its patience


# -- which modules -----------------------------------------------------------------------------------------


def source(module: str) -> str:
    """The text of one of our modules, ``deploy.probe``."""
    return (CHECKOUT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")


@functools.cache
def needed(module: str) -> tuple[str, ...]:
    """`module` and all of ours that it imports, directly or through others, in alphabetical order."""
    wanted, found = [module], set()
    while wanted:
        name = wanted.pop()
        if name in found or not (CHECKOUT / (name.replace(".", "/") + ".py")).is_file():
            continue
        found.add(name)
        wanted += imported(source(name))
    return tuple(sorted(found))


def imported(text: str) -> list[str]:
    """What a module imports of ours, by its text; a name that is no module may be among it.

    Parsing it would tell, too, and take a tenth of a second in every command of `fab`.
    """
    found = []
    for package, several, one, plain in _IMPORT.findall(text):
        words = re.findall(r"[\w.]+", re.sub(r" as \w+|#.*", "", several or one or plain))
        found += [package, *(f"{package}.{word}" for word in words)] if package else words
    return [name for name in found if name.partition(".")[0] in PACKAGES and "." in name]


def texts(modules: Sequence[str]) -> dict[str, str]:
    """The source of `modules` and of what they import, by name."""
    return {name: source(name) for name in sorted({name for main in modules for name in needed(main)})}


# -- as a program ------------------------------------------------------------------------------------------


def install(host: Host, state_root: str, modules: Sequence[str]) -> str:
    """Put `modules` on the host as a directory that ``python DIRECTORY`` runs: the last one's `main()`.

    The directory is named by its content, so that a script in use is never replaced. Returns its path.
    """
    files = {"__main__.py": f"from {modules[-1]} import main\n\nmain()\n".encode()}
    for module, text in texts(modules).items():
        files[module.replace(".", "/") + ".py"] = text.encode()
        files[module.partition(".")[0] + "/__init__.py"] = b""
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:12]
    path = f"{state_root}/tools/{digest}"
    host.write_tree(path, files)
    return path


def command(host: Host, program: str, *arguments: str) -> list[str]:
    """The argv that runs one of our scripts on `host`: a directory from `install`, or ``-`` for stdin."""
    return [host.python, *SCRIPT_FLAGS, program, *arguments]


# -- as a call ---------------------------------------------------------------------------------------------


def ask(
    host: Host,
    function: str,
    *arguments: Any,
    data: bytes = b"",
    stream: Iterable[bytes] = (),
    timeout: float = TIMEOUT,
    progress: Callable[[str], None] | None = None,
) -> Any:
    """Call ``"deploy.module:function"`` on `host` and return its value; both ways all is JSON.

    `data` is given to the function as its keyword argument of that name. With `progress` it gets a callable
    of that name too, whose texts arrive here while it runs; the call then has a connection of its own,
    `timeout` is the longest silence in seconds instead of the whole time, and `stream` is what it can read
    from its stdin.

    A DeployError there is raised here with the same sentence, an OSError as one that names the host and the
    file. Raises HostError if the function cannot run or fails in another way.
    """
    more = {"data": len(data) if data else None, "progress": progress is not None}
    stdin = sent(host, function, arguments, "call", **more)
    argv = command(host, "-c", _LOADER)
    if progress is None:
        result = host.run(argv, timeout=timeout, input=stdin + data, check=False)
        if result.code == 127 and not result.out and not host.is_local:
            from deploy.remote_files import no_python  # (which most calls have no need of)

            raise no_python(host)
        lines: Iterator[bytes] = iter(result.out.splitlines())
        return _value(host, function, lines, lambda text: None, lambda: (result.code, result.err))
    process = _bulk(host, argv)
    try:
        failures: list[DeployError] = []
        sending = (process, itertools.chain((stdin, data), stream), failures)
        threading.Thread(target=_send, args=sending, daemon=True).start()
        lines = _lines(host, function, process, timeout)
        try:
            return _value(host, function, lines, progress, lambda: _rest(process))
        except DeployError:
            if failures:  # what ended it began on this side
                raise failures[0] from None
            raise
    except BaseException:
        kill(process)
        raise
    finally:
        close(process)


def open(host: Host, function: str, *arguments: Any, bulk: bool = False) -> subprocess.Popen[bytes]:
    """Start ``"deploy.module:function"`` on `host` with `arguments` and leave it running.

    Its stdin (behind the program, which has been sent) and its stdout are the returned process's, bytes as
    they are. It ends with exit code 0 when the function returns, 1 after an error, whose sentence is then
    the last line of stderr. With `bulk` it has a connection of its own.
    """
    argv = command(host, "-c", _LOADER)
    process = _bulk(host, argv) if bulk else host.open_stream(argv)
    feed(process, [sent(host, function, arguments, "open")], end=False)
    return process


class Ahead:
    """A connection that is made before it is known what it will be for. `open` takes it, or a new one."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._made: list[subprocess.Popen[bytes]] = []
        self._failed: list[HostError] = []
        self._thread: threading.Thread | None = threading.Thread(target=self._make, daemon=True)
        self._thread.start()

    def _make(self) -> None:
        try:
            self._made.append(_bulk(self._host, command(self._host, "-c", _LOADER)))
        except HostError as error:
            self._failed.append(error)

    def open(self, function: str, *arguments: Any) -> subprocess.Popen[bytes]:
        """As `open` does it with `bulk`. Raises HostError."""
        self._join()
        if self._failed:
            raise self._failed.pop()
        if not self._made:
            return open(self._host, function, *arguments, bulk=True)
        process = self._made.pop()
        feed(process, [sent(self._host, function, arguments, "open")], end=False)
        return process

    def close(self) -> None:
        """End a connection that nobody has taken."""
        self._join()
        self._failed.clear()
        for process in self._made:
            kill(process)
            close(process)
        self._made.clear()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _bulk(host: Host, argv: Sequence[str]) -> subprocess.Popen[bytes]:
    started: subprocess.Popen[bytes] = getattr(host, "bulk", host.open_stream)(argv)
    return started


def script(host: Host, module: str, *arguments: str) -> tuple[list[str], bytes]:
    """(argv, stdin) that run the `main()` of one of our modules with `arguments` on its command line.

    What follows on stdin is its own to read. Nothing is written to the host's disk.
    """
    return command(host, "-c", _LOADER), sent(host, f"{module}:main", arguments, "script")


def sent(host: Host, function: str, arguments: Sequence[Any], mode: str, **more: Any) -> bytes:
    """What goes to the loader's stdin: the program and the call, each behind its length."""
    module, _, name = function.partition(":")
    packed = _packed(module, host.is_local and host.python == sys.executable)
    call = {"module": module, "function": name, "arguments": list(arguments), "mode": mode, **more}
    words = json.dumps(call, ensure_ascii=True).encode("ascii")
    return b"%012d%s%012d%s" % (len(packed), packed, len(words), words)


@functools.cache
def _packed(module: str, ours: bool) -> bytes:
    """The program of `module`. For `ours`, the interpreter that we run in, with what it has compiled before.

    Elsewhere another Python may read it; and text is a third of the bytes on a slow link.
    """
    found = texts([module, "deploy.errors"])
    codes = {name: marshal.dumps(_code(name)) for name in found} if ours else {}
    words = _PROGRAM.format(texts=dict.fromkeys(found, "") if ours else found, codes=codes, last=_CALL)
    return zlib.compress(words.encode(), 1 if ours else 6)


def _code(module: str) -> CodeType:
    """A module as Python keeps it in its cache; compiled, and kept there, if it has changed."""
    path = CHECKOUT / (module.replace(".", "/") + ".py")
    code = SourceFileLoader(module, str(path)).get_code(module)
    assert code  # a file with a text always has one
    return code


def _send(process: subprocess.Popen[bytes], parts: Iterable[bytes], failures: list[DeployError]) -> None:
    try:
        feed(process, parts)
    except DeployError as error:
        failures.append(error)
        feed(process, ())


def feed(process: subprocess.Popen[bytes], parts: Iterable[bytes], end: bool = True) -> None:
    """Write to a process that may have ended meanwhile: what it left on stderr says why."""
    assert process.stdin
    with contextlib.suppress(OSError, ValueError):
        for part in parts:
            process.stdin.write(part)
        process.stdin.flush()
    if end:
        with contextlib.suppress(OSError, ValueError):
            process.stdin.close()


def close(process: subprocess.Popen[bytes], patience: float = END) -> None:
    """End a process from `open` by the end of its stdin; it is killed if it does not hear of it."""
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe:
            with contextlib.suppress(OSError, ValueError):
                pipe.close()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_words(process: subprocess.Popen[bytes]) -> str:
    """Why a process from `open` has ended: the last line of its stderr, else its exit code."""
    code, errors = _rest(process)
    return _last(errors) or f"exit code {code}"


def _rest(process: subprocess.Popen[bytes]) -> tuple[int, bytes]:
    assert process.stderr
    with contextlib.suppress(OSError, ValueError):
        errors = process.stderr.read()
        return process.wait(), errors
    return process.wait(), b""


def _last(errors: bytes) -> str:
    lines = errors.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


def _lines(host: Host, function: str, process: subprocess.Popen[bytes], silence: float) -> Iterator[bytes]:
    """The lines of a process, as they come. Raises HostError after a `silence` of that many seconds."""
    found: queue.Queue[bytes | None] = queue.Queue()

    def read() -> None:
        assert process.stdout
        with contextlib.suppress(OSError, ValueError):
            for line in process.stdout:
                found.put(line)
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = found.get(timeout=silence)
        except queue.Empty:
            raise HostError(
                f"{host.name}: {function} gave no sign of life for {silence:g} s and was ended; "
                "look at the host's load and disks, then try again"
            ) from None
        if line is None:
            return
        yield line


def _value(
    host: Host,
    function: str,
    lines: Iterator[bytes],
    progress: Callable[[str], None],
    rest: Callable[[], tuple[int, bytes]],
) -> Any:
    for line in lines:
        try:
            said = json.loads(line)
        except ValueError:
            break
        if "progress" in said:
            progress(said["progress"])
        elif "error" in said:
            raise DeployError(said["error"], code=said["code"])
        elif "system" in said:
            raise HostError(f"{host.name}: {said['system']}")
        else:
            return said["value"]
    code, errors = rest()
    kind = NoPython if OLD_PYTHON.encode() in errors else HostError
    raise kind(f"{host.name}: {function} failed: {_last(errors) or f'exit code {code}'}")


# What is on the command line, the same for every call. It reads no byte beyond what is meant for it.
_LOADER = """\
import os, sys, zlib
if sys.version_info < (3, 9):
    old = sys.version.split()[0]
    sys.exit("Python is %s there, but OLD_PYTHON; install a newer python3" % old)
def take(count):
    found = b""
    while len(found) < count:
        block = os.read(0, count - len(found))
        if not block:
            sys.exit("the connection ended before all of the program had arrived")
        found += block
    return found
exec(compile(zlib.decompress(take(int(take(12)))), "drafthouse", "exec"))
""".replace("OLD_PYTHON", OLD_PYTHON)

# Modules are imported from these texts by Python's own machinery, so they may import each other as ever.
_PROGRAM = """\
import gc, marshal, sys
gc.disable()  # most of it lives as long as the process, and one that answers once is over before it matters
from importlib.machinery import ModuleSpec
texts = {texts!r}
codes = {codes!r}
class Ours:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in texts or name in ("deploy", "trainer"):
            return ModuleSpec(name, Ours, is_package=name not in texts)
    @staticmethod
    def create_module(spec):
        return None
    @staticmethod
    def exec_module(module):
        name = module.__spec__.name
        if name in texts:
            code = marshal.loads(codes[name]) if codes else compile(texts[name], name, "exec")
            exec(code, module.__dict__)
sys.meta_path.insert(0, Ours)
{last}
"""

_CALL = """\
import gc, importlib, json, os
call = json.loads(take(int(take(12))))
if call["mode"] == "script":
    sys.argv = [call["module"], *call["arguments"]]
function = getattr(importlib.import_module(call["module"]), call["function"])
if call["mode"] != "call" or call["progress"]:
    gc.freeze()
    gc.enable()
from deploy.errors import DeployError
def sentence(error):
    words = error.strerror or str(error)
    return "%s: %s" % (os.fsdecode(error.filename), words) if error.filename else words
if call["mode"] == "script":
    function()
elif call["mode"] == "open":
    try:
        function(*call["arguments"])
    except (DeployError, OSError) as error:
        sys.exit(sentence(error) if isinstance(error, OSError) else str(error))
else:
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    def say(value):
        answers.write(json.dumps(value) + chr(10))
        answers.flush()
    more = {}
    if call["data"] is not None:
        more["data"] = take(call["data"])
    if call["progress"]:
        more["progress"] = lambda text: say({"progress": text})
    try:
        say({"value": function(*call["arguments"], **more)})
    except DeployError as error:
        say({"error": str(error), "code": error.code})
    except OSError as error:
        say({"system": sentence(error)})
"""
