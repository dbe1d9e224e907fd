"""How our own scripts get to a host that has nothing installed: whole, either over stdin or as a directory.

Modules keep their names there, so that the same source runs on both sides. They use the standard library of
Python 3.9 and each other, nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from deploy import CHECKOUT
from deploy.host import SCRIPT_FLAGS, Host


def source(module: str) -> str:
    """The text of one of our modules, ``deploy.probe``."""
    return (CHECKOUT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")


def program(modules: Sequence[str]) -> bytes:
    """`modules`, each after those that it imports, as one program for ``python -``; the last one is run."""
    texts = {module: source(module) for module in modules}
    return _PROGRAM.format(main=modules[-1], texts=texts).encode()


def install(host: Host, state_root: str, modules: Sequence[str]) -> str:
    """Put `modules` on the host as a directory that ``python DIRECTORY`` runs: the last one's `main()`.

    The directory is named by its content, so that a script in use is never replaced. Returns its path.
    """
    files = {"__main__.py": f"from {modules[-1]} import main\n\nmain()\n".encode()}
    for module in modules:
        files[module.replace(".", "/") + ".py"] = source(module).encode()
        files[module.partition(".")[0] + "/__init__.py"] = b""
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:12]
    path = f"{state_root}/tools/{digest}"
    host.write_tree(path, files)
    return path


def command(host: Host, program: str, *arguments: str) -> list[str]:
    """The argv that runs one of our scripts on `host`: a directory from `install`, or ``-`` for stdin."""
    return [host.python, *SCRIPT_FLAGS, program, *arguments]


_PROGRAM = """\
import sys, types
texts = {texts!r}
for name, text in texts.items():
    package = sys.modules.setdefault(name.partition(".")[0], types.ModuleType(name.partition(".")[0]))
    package.__path__ = []
    module = sys.modules[name] = types.ModuleType(name)
    setattr(package, name.partition(".")[2], module)
    if name == {main!r}:
        module.__name__ = "__main__"
    exec(compile(text, name, "exec"), module.__dict__)
"""
