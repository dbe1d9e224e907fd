"""What rsync has for ssh: its words go to sh by stdin, and what the login prints before is dropped.

Started by rsync as ``python sshpipe.py WORDS-FILE HOST WORDS…``: the file says in JSON which program to start
(ssh with its words) and what it is to be fed first. The host's name is only good for rsync's messages, since
ssh's words say whom we mean. See deploy.sshcommand.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import cast

BLOCK = 1 << 18


def shell(place: Path, argv: Sequence[str], through: bytes = b"") -> str:
    """What rsync needs for ``-e``: `argv` is started, fed `through`, then given rsync's words as a script.

    `place` is a private directory, in which the file of words is left.
    """
    words = place / "rsync-words"
    said = {"argv": list(argv), "through": os.fsdecode(through)}
    words.write_text(json.dumps(said))
    return shlex.join([sys.executable, "-I", "-S", __file__, str(words)])


def main() -> None:
    file, _, *words = sys.argv[1:]
    token = f"drafthouse-{secrets.token_hex(12)}"
    script = f"printf '\\n%s\\n' {token}; {' '.join(words)}".encode("utf-8", "surrogateescape")
    for descriptor in (0, 1):  # rsync's ends of its pipes do not block
        os.set_blocking(descriptor, True)
    wanted = json.loads(Path(file).read_text())
    ssh = subprocess.Popen(wanted["argv"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert ssh.stdin
    head = b"%s%d\n%s" % (os.fsencode(wanted["through"]), len(script), script)
    threading.Thread(target=_feed, args=(ssh.stdin.fileno(), head), daemon=True).start()
    out = cast(io.BufferedReader, ssh.stdout)
    while (line := out.readline()) and line != f"{token}\n".encode():
        pass
    with contextlib.suppress(OSError):  # rsync has gone
        while data := out.read1(BLOCK):
            _write(1, data)
    out.close()
    code = ssh.wait()
    # Not by the usual way out, which would wait for the thread: rsync waits for us before it closes its end.
    os._exit(code if code >= 0 else 128 - code)


def _feed(descriptor: int, head: bytes) -> None:
    with contextlib.suppress(OSError):
        _write(descriptor, head)
        while data := os.read(0, BLOCK):
            _write(descriptor, data)
    os.close(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


if __name__ == "__main__":
    main()
