"""What rsync has for ssh: its words go to sh by stdin, and what the login prints before is dropped.

Started by rsync as ``python sshpipe.py WORDS-FILE HOST WORDS…``: the file has the words of ssh as a JSON
list. The host's name is only good for rsync's messages, since ssh's words say whom we mean. See
deploy.sshcommand.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import subprocess
import sys
import threading
from pathlib import Path
from typing import cast

BLOCK = 1 << 18


def main() -> None:
    file, _, *words = sys.argv[1:]
    token = f"drafthouse-{secrets.token_hex(12)}"
    script = f"printf '\\n%s\\n' {token}; {' '.join(words)}".encode("utf-8", "surrogateescape")
    for descriptor in (0, 1):  # rsync's ends of its pipes do not block
        os.set_blocking(descriptor, True)
    ssh = subprocess.Popen(json.loads(Path(file).read_text()), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert ssh.stdin
    threading.Thread(
        target=_feed, args=(ssh.stdin.fileno(), b"%d\n%s" % (len(script), script)), daemon=True
    ).start()
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
