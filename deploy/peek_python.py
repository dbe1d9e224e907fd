"""What CPython 3.8 to 3.15 has printed but not written: the buffers of sys.stdout and sys.stderr.

The way there: the symbol `_PyRuntime` → the main interpreter → the dict of `sys` → a TextIOWrapper, which
keeps text of its own (`pending_bytes`), → its BufferedWriter, which keeps bytes (`write_pos` to `write_end`).
From 3.13 on `_Py_DebugOffsets` leads to the dict; before, the interpreter's words are tried until one points
to a dict that has what only `sys` has. Where fields lie in the objects of `io` is asked of the objects' own
types (`tp_members`); the rest follows from the structs in Modules/_io. Whatever is read is checked, and read
again until two readings agree, since the process goes on meanwhile. Runs ON the host. Standard library only,
Python >= 3.9.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deploy.peek_memory import Memory, Program, Unreadable

KNOWN = ((3, 8), (3, 15))  # the oldest and the newest that were tried
HEAD = 16  # bytes of an object: its count and its type
COOKIE = b"xdebugpy"
NAMES = ("stdout", "stderr", "__stdout__", "__stderr__")
TRIES = 40  # readings until two in a row agree
MOST_HELD = 16 << 20  # bytes of one stream; its buffer has 8 KiB unless the program says otherwise
MOST_ENTRIES = 4096  # of the dict of sys, which has about 100
UNICODE_KEYS = 1  # dk_kind of a dict whose keys are all str, from 3.11 on


class Unknown(Exception):
    """A process whose memory cannot be understood; the message is a sentence for people."""


class NotPython(Unknown):
    """A process that runs no Python at all, as far as can be told."""


class Python:
    """The interpreter in `memory`. Raises Unknown if there is none, or none that is known."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.program, self.runtime, size = _runtime(memory)
        version = self.program.symbol("Py_Version")  # from 3.11 on
        self.version = _version(int(memory.word(version[0]) & 0xFFFFFFFF)) if version else (3, 10, 0)
        self._check_known()
        described = self.version >= (3, 13)
        if described and memory.read(self.runtime, 8) != COOKIE:
            raise Unknown(f"{self.program.path} has no _Py_DebugOffsets where they belong")
        if described and memory.word(self.runtime + 16):
            raise Unknown(
                f"it is a free-threaded CPython {_dotted(self.version[:2])}, whose objects are not known"
            )
        self._names: dict[int, bytes] = {}
        for address in self._candidates(size, described):
            try:
                self.sys = self._entries(address)
            except Unreadable:
                continue
            if "stdout" in self.sys and "hexversion" in self.sys:
                self._sys_address = address
                break
        else:
            raise Unknown(
                f"the sys module of {self.program.path} was not found; it may be starting or ending"
            )
        if not version:  # an int of one digit, as Python has written it until 3.11
            number = memory.read(self.sys["hexversion"] + HEAD + 8, 4)
            self.version = _version(int.from_bytes(number, "little"))
            self._check_known()

    def _check_known(self) -> None:
        if not KNOWN[0] <= self.version[:2] <= KNOWN[1]:
            raise Unknown(
                f"it is CPython {_dotted(self.version[:2])}, whose objects are not known; those of "
                f"{_dotted(KNOWN[0])} to {_dotted(KNOWN[1])} are"
            )

    # -- from the runtime to sys ---------------------------------------------------------------------------

    def _candidates(self, size: int, described: bool) -> Iterator[int]:
        """Addresses of dicts, one of which is that of `sys`; the likely ones first."""
        memory, runtime = self.memory, self.runtime
        if described:  # {size finalizing interpreters_head} {size id next threads_head …}
            head = memory.word(runtime + memory.word(runtime + 40))
            number, following = memory.words(runtime + 56, 2)
            where = memory.word(runtime + (96 if self.version < (3, 14) else 104))
            for _ in range(1000):
                if not head:
                    break
                if memory.word(head + number) == 0:  # the main interpreter's; others have a sys of their own
                    yield memory.word(head + where)
                head = memory.word(head + following)
        interpreters: list[tuple[int, int]] = [(runtime, size)]  # it lies within the runtime, from 3.11 on
        if size < 1 << 14:
            interpreters += [(word, 1 << 13) for word in memory.words(runtime, size // 8) if _pointer(word)]
        for address, count in interpreters:
            for part in range(address, address + count, 1 << 10):
                try:
                    words = memory.words(part, min(1 << 10, address + count - part) // 8)
                except Unreadable:
                    break
                yield from (word for word in words if _pointer(word) and self._kind(word) == b"dict")

    def _kind(self, address: int) -> bytes:
        """The name of an object's type; empty if there is no object."""
        try:
            type_ = self.memory.word(address + HEAD - 8)
            if type_ not in self._names:
                self._names[type_] = self._type_name(type_)
            return self._names[type_]
        except Unreadable:
            return b""

    def _type_name(self, type_: int) -> bytes:
        try:
            return self.memory.text(self.memory.word(type_ + HEAD + 8))
        except Unreadable:
            return b""

    def _entries(self, address: int) -> dict[str, int]:
        """The entries of a dict whose keys are short ASCII texts: the addresses of their values."""
        memory = self.memory
        if self._kind(address) != b"dict":
            raise Unreadable(f"a dict at {address:#x}")
        keys = memory.word(address + HEAD + 16)
        if self.version >= (3, 11):
            head = memory.read(keys, 32)
            plain = head[10] == UNICODE_KEYS  # then an entry has no hash
            count, start = int.from_bytes(head[24:32], "little"), keys + 32 + (1 << min(head[9], 32))
        else:
            slots, count, plain = memory.word(keys + 8), memory.word(keys + 32), False
            width = 1 if slots <= 0xFF else 2 if slots <= 0xFFFF else 4
            start = keys + 40 + slots * width
        if count > MOST_ENTRIES:
            raise Unreadable(f"a dict of {count} entries at {address:#x}")
        size = 2 if plain else 3
        words = memory.words(start, size * count)
        found = {}
        for index in range(0, size * count, size):
            key, value = words[index + size - 2 : index + size]
            if key and value:
                try:
                    found[memory.text(key + self._text_head, 32).decode("ascii")] = value
                except (Unreadable, UnicodeDecodeError):
                    continue  # a longer name, or one with other characters: none of ours
        return found

    @property
    def _text_head(self) -> int:
        """Where the characters of an ASCII str begin: behind length, hash, state (and wstr, until 3.11)."""
        return HEAD + (24 if self.version >= (3, 12) else 32)

    # -- from sys to what is held back ---------------------------------------------------------------------

    def streams(self) -> tuple[list[dict[str, Any]], bool]:
        """Each stream of `sys` once, and whether a second reading confirms it: of a process that prints
        meanwhile, the later one begins with the earlier.

        {name, kind: the type's name} and, of a TextIOWrapper: {fd, mode: unbuffered line block, encoding,
        held: bytes in the order in which they will be written}. What is None in `sys` is left out.
        """
        before: list[dict[str, Any]] | None = None
        for _ in range(TRIES):
            try:
                now = self._streams()
            except Unreadable:
                continue
            if before is not None and _confirms(before, now):
                return before, True
            before = now
        if before is None:
            raise Unknown("its streams change faster than they can be read; try again")
        return before, False

    def _streams(self) -> list[dict[str, Any]]:
        entries = self._entries(self._sys_address)
        found: dict[int, dict[str, Any]] = {}
        for name in NAMES:
            address = entries.get(name)
            if address is None or self._kind(address) == b"NoneType":
                continue
            if address not in found:
                found[address] = {"name": f"sys.{name}", **self._stream(address)}
        return list(found.values())

    def _stream(self, address: int) -> dict[str, Any]:
        kind = self._kind(address).decode("ascii", "replace")
        fields = self._fields(address, b"_io.TextIOWrapper")
        if fields is None:
            return {"kind": kind}
        memory = self.memory
        binary = memory.word(address + fields["encoding"] - 8)  # (from 3.14 on no member tells of `buffer`)
        bytes_, fd, buffered = self._binary(binary)
        mode = "block" if buffered else "unbuffered"
        if buffered and memory.read(address + fields["line_buffering"], 1) != b"\0":
            mode = "line"
        encoding = memory.text(memory.word(address + fields["encoding"]) + self._text_head)
        # finalizing, encodefunc, encoding_start_of_stream, decoded_chars, decoded_chars_used, pending_bytes …
        pending, count = memory.words(_after(fields["_finalizing"] + 1, 8) + address + 32, 2)
        text = self._pending(pending)
        if len(text) < count:
            raise Unreadable(f"{len(text)} pending bytes instead of {count}")
        return {
            "kind": kind,
            "fd": fd,
            "mode": mode,
            "encoding": encoding.decode("ascii", "replace"),
            "held": bytes_ + text[:count],  # what was added since is of a later moment
        }

    def _pending(self, address: int) -> bytes:
        """`pending_bytes` of a TextIOWrapper: NULL, bytes, an ASCII str, or a list of these."""
        if not address:
            return b""
        memory, kind = self.memory, self._kind(address)
        if kind == b"list":
            count, items = memory.words(address + HEAD, 2)
            if count > MOST_HELD >> 3:
                raise Unreadable(f"a list of {count} texts")
            return b"".join(self._piece(item) for item in memory.words(items, count)) if count else b""
        return self._piece(address)

    def _piece(self, address: int) -> bytes:
        try:
            found = self.memory.read(address, 160)  # most are short: one reading instead of three
        except Unreadable:
            found = self.memory.read(address, HEAD + 8)
        type_, size = int.from_bytes(found[8:16], "little"), int.from_bytes(found[16:24], "little")
        if type_ not in self._names:
            self._kind(address)
        start = {b"bytes": HEAD + 16, b"str": self._text_head}.get(self._names.get(type_, b""))
        if start is None or size > MOST_HELD:
            raise Unreadable(f"a text at {address:#x}")
        whole = found[start : start + size]
        return whole if len(whole) == size else self.memory.read(address + start, size)

    def _binary(self, address: int) -> tuple[bytes, int | None, bool]:
        """(bytes held, descriptor, whether it holds back) of what a TextIOWrapper writes to."""
        memory = self.memory
        if self._fields(address, b"_io.FileIO") is not None:
            return b"", _int(memory.read(address + HEAD, 4)), False
        for name in (b"_io.BufferedWriter", b"_io.BufferedRandom"):
            fields = self._fields(address, name)
            if fields is None:
                continue
            raw = memory.word(address + fields["raw"])
            file = self._fields(raw, b"_io.FileIO") is not None
            # finalizing, fast_closed_checks, abs_pos, buffer, pos, raw_pos, read_end, write_pos, write_end
            start = address + _after(_after(fields["_finalizing"] + 1, 4) + 4, 8)
            buffer, (first, last) = memory.word(start + 8), (memory.signed(start + at) for at in (40, 48))
            if last >= 0 and not 0 <= first <= last <= MOST_HELD:
                raise Unreadable(f"a buffer from {first} to {last}")
            held = memory.read(buffer + first, last - first) if last > first else b""
            return held, _int(memory.read(raw + HEAD, 4)) if file else None, True
        return b"", None, True  # an object of the program's own

    def _fields(self, address: int, name: bytes) -> dict[str, int] | None:
        """Where the fields lie that the type `name` tells of; None for an object of another type.

        A subclass written in Python has them in the same places.
        """
        memory = self.memory
        type_ = memory.word(address + HEAD - 8)
        for _ in range(20):
            if not type_ or self._type_name(type_) == name:
                break
            type_ = memory.word(type_ + HEAD + 240)  # tp_base
        if not type_ or self._type_name(type_) != name:
            return None
        member, found = memory.word(type_ + HEAD + 224), {}  # tp_members: {name type offset flags doc}
        for _ in range(40 if member else 0):
            text, _, offset = memory.words(member, 3)
            if not text:
                break
            found[memory.text(text).decode("ascii", "replace")] = offset
            member += 40
        wanted = {b"_io.TextIOWrapper": ("encoding", "line_buffering", "_finalizing")}
        for key in wanted.get(name, ("_finalizing",) if name == b"_io.FileIO" else ("raw", "_finalizing")):
            if not HEAD <= found.get(key, 0) < 1 << 10:
                raise Unknown(f"{name.decode()} of this Python has no {key} where it is looked for")
        return found


def _runtime(memory: Memory) -> tuple[Program, int, int]:
    """(program, address, size) of `_PyRuntime`, which every Python offers since 3.7."""
    names = set()
    old = False
    for program in memory.programs():
        names.add(program.path.rpartition("/")[2])
        found = program.symbol("_PyRuntime")
        if found:
            return program, found[0], min(found[1], 1 << 21)
        old = old or bool(program.symbol("Py_GetVersion"))
    if any("pypy" in name for name in names):
        raise Unknown("it is PyPy, whose objects lie elsewhere; only CPython is known")
    if old:
        raise Unknown(
            f"it is a Python without _PyRuntime; only CPython {_dotted(KNOWN[0])} and later is known"
        )
    raise NotPython(
        "it is no Python (nothing in its memory offers _PyRuntime), and what a C library holds back in its "
        "own buffers is not looked for"
    )


def _confirms(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> bool:
    """Whether nothing that was read `before` is otherwise `now`; text may have been added."""
    return len(before) == len(now) and all(
        {**old, "held": b""} == {**new, "held": b""} and new.get("held", b"").startswith(old.get("held", b""))
        for old, new in zip(before, now)  # noqa: B905 (3.9 has no strict=)
    )


def _version(number: int) -> tuple[int, int, int]:
    """(3, 11, 7) of sys.hexversion."""
    return number >> 24 & 0xFF, number >> 16 & 0xFF, number >> 8 & 0xFF


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


def _pointer(word: int) -> bool:
    return word % 8 == 0 and 1 << 16 < word < 1 << 56


def _after(offset: int, size: int) -> int:
    """The next place for a field of `size` bytes."""
    return (offset + size - 1) // size * size


def _int(text: bytes) -> int:
    return int.from_bytes(text, "little", signed=True)
