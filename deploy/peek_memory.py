"""Another process's memory, read only: its mappings, words and texts, and where its symbols are.

All is read through /proc/PID/maps and /proc/PID/mem, which neither stops the process nor changes it. Symbols
are looked up in the tables that the dynamic linker itself uses, which are in memory too: so a program that
was replaced on disk, or whose files lie in a container, is read like any other. Runs ON the host. Standard
library only, Python >= 3.9.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

MOST = 64 << 20  # bytes of one reading: whoever asks for more follows a pointer that is none
ELF64 = b"\x7fELF\x02\x01"  # 64 bits, the least significant byte first
PT_LOAD, PT_DYNAMIC = 1, 2
DT_NULL, DT_HASH, DT_STRTAB, DT_SYMTAB, DT_GNU_HASH = 0, 4, 5, 6, 0x6FFFFEF5
SYMBOL = struct.Struct("=IBBHQQ")  # name info other section value size
_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) \S+ (\d+)\s*(.*)")


class Unreadable(Exception):
    """An address that is no longer, or never was, what it was taken for."""


@dataclass(frozen=True)
class Mapping:
    start: int
    end: int
    rights: str  # rwxp
    offset: int
    path: str  # empty for memory without a file


class Memory:
    """The memory of process `pid`. Raises OSError from the system if it may not be read."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.mappings = mappings(pid)
        self._file = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def read(self, address: int, count: int) -> bytes:
        """Exactly `count` bytes. Raises Unreadable."""
        if not 0 <= count <= MOST or not 4096 <= address < 1 << 63:
            raise Unreadable(f"{count} bytes at {address:#x}")
        try:
            found = os.pread(self._file, count, address)
        except (OSError, OverflowError):
            raise Unreadable(f"{count} bytes at {address:#x}") from None
        if len(found) != count:
            raise Unreadable(f"{count} bytes at {address:#x}")
        return found

    def word(self, address: int) -> int:
        """An unsigned number of 8 bytes, or a pointer."""
        return int.from_bytes(self.read(address, 8), "little")

    def signed(self, address: int) -> int:
        return int.from_bytes(self.read(address, 8), "little", signed=True)

    def words(self, address: int, count: int) -> tuple[int, ...]:
        return struct.unpack(f"={count}Q", self.read(address, 8 * count))

    def text(self, address: int, longest: int = 64) -> bytes:
        """The bytes up to a NUL, of which one is within `longest`. Raises Unreadable."""
        count = min(longest, 4096 - address % 4096)  # what follows the page may not be mapped
        found = self.read(address, count)
        if b"\0" not in found and count < longest:
            found += self.read(address + count, longest - count)
        text, nul, _ = found.partition(b"\0")
        if not nul:
            raise Unreadable(f"a text at {address:#x}")
        return text

    def programs(self) -> Iterator[Program]:
        """The programs and libraries mapped here, as far as they can be read, the program itself first."""
        for mapping in self.mappings:
            if mapping.path.startswith("/") and mapping.offset == 0 and "r" in mapping.rights:
                try:
                    yield Program(self, mapping)
                except (Unreadable, struct.error):
                    continue


class Program:
    """An ELF file as it lies in memory from `mapping` on. Raises Unreadable if it is none of 64 bits."""

    def __init__(self, memory: Memory, mapping: Mapping) -> None:
        self.memory = memory
        self.path = mapping.path
        head = memory.read(mapping.start, 64)
        if not head.startswith(ELF64):
            raise Unreadable(f"{mapping.path} is no program of 64 bits")
        offset, size, count = struct.unpack_from("=Q", head, 32)[0], *struct.unpack_from("=HH", head, 54)
        lowest, dynamic = None, 0
        for index in range(count):
            found = memory.read(mapping.start + offset + index * size, 56)
            kind, _, at, address = struct.unpack_from("=IIQQ", found)
            if kind == PT_LOAD and at == 0:
                lowest = address
            elif kind == PT_DYNAMIC:
                dynamic = address
        if lowest is None or not dynamic:
            raise Unreadable(f"{mapping.path} has no table of symbols")
        self._bias = mapping.start - lowest
        self._tables = self._dynamic(self._bias + dynamic)

    def _dynamic(self, address: int) -> dict[int, int]:
        tables: dict[int, int] = {}
        for index in range(512):
            tag, value = self.memory.words(address + 16 * index, 2)
            if tag == DT_NULL:
                return tables
            # glibc has turned these into addresses, musl has not
            tables[tag] = value if value >= self._bias else value + self._bias
        raise Unreadable(f"{self.path} has no end of its dynamic section")

    def symbol(self, name: str) -> tuple[int, int] | None:
        """(address, size in bytes) of what `name` is; None if the program does not offer it."""
        wanted = name.encode()
        try:
            if DT_GNU_HASH in self._tables:
                return self._gnu(wanted)
            return self._sysv(wanted) if DT_HASH in self._tables else None
        except (Unreadable, KeyError, struct.error, ZeroDivisionError):
            return None

    def _gnu(self, wanted: bytes) -> tuple[int, int] | None:
        memory, table = self.memory, self._tables[DT_GNU_HASH]
        value = 5381
        for char in wanted:
            value = (value * 33 + char) & 0xFFFFFFFF
        buckets, first, bloom, _ = struct.unpack("=4I", memory.read(table, 16))
        starts = table + 16 + 8 * bloom
        index = int.from_bytes(memory.read(starts + 4 * (value % buckets), 4), "little")
        chains = starts + 4 * buckets
        while index >= first:
            found = int.from_bytes(memory.read(chains + 4 * (index - first), 4), "little")
            if found | 1 == value | 1:
                symbol = self._named(index, wanted)
                if symbol:
                    return symbol
            if found & 1:
                break
            index += 1
        return None

    def _sysv(self, wanted: bytes) -> tuple[int, int] | None:
        memory, table = self.memory, self._tables[DT_HASH]
        value = 0
        for char in wanted:
            value = (value << 4) + char
            high = value & 0xF0000000
            value = (value ^ high >> 24) & ~high & 0xFFFFFFFF
        buckets, count = struct.unpack("=2I", memory.read(table, 8))
        starts = table + 8
        index = int.from_bytes(memory.read(starts + 4 * (value % buckets), 4), "little")
        for _ in range(count):
            symbol = self._named(index, wanted) if index else None
            if symbol or not index:
                return symbol
            index = int.from_bytes(memory.read(starts + 4 * (buckets + index), 4), "little")
        return None

    def _named(self, index: int, wanted: bytes) -> tuple[int, int] | None:
        entry = self.memory.read(self._tables[DT_SYMTAB] + SYMBOL.size * index, SYMBOL.size)
        name, _, _, section, value, size = SYMBOL.unpack(entry)
        if not section or self.memory.read(self._tables[DT_STRTAB] + name, len(wanted) + 1) != wanted + b"\0":
            return None
        return self._bias + value, size


def mappings(pid: int) -> list[Mapping]:
    """What /proc/PID/maps lists. Raises OSError."""
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as file:
        found = (_LINE.match(line.rstrip("\n")) for line in file)
        return [
            Mapping(int(one[1], 16), int(one[2], 16), one[3], int(one[4], 16), one[6]) for one in found if one
        ]
