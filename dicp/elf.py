"""Checks a shared object before it is loaded: not truncated, for this machine, with its symbols.

The loader crashes (SIGBUS) on a file that ends before its segments do. The format is ELF (System V
ABI, chapters 4 and 5); on systems with another one nothing is checked.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Collection, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_MAGIC = b"\x7fELF"
_WORDS_OF_64_BITS = 2  # ELFCLASS64
_SHARED = 3  # ET_DYN
_LOADED = 1  # PT_LOAD
_DYNAMIC_SYMBOLS = 11  # SHT_DYNSYM
_WITHOUT_CONTENT = frozenset({0, 8})  # SHT_NULL, SHT_NOBITS
# Formats for `struct`, without the byte order that precedes them.
_HEADER, _SEGMENT, _SECTION, _SYMBOL = "16xHHIQQQIHHHHHH", "IIQQQQQQ", "IIQQQQIIQQ", "IBBHQQ"


class _Part(NamedTuple):
    """A segment or a section of the file; `link` indexes a symbol table's strings."""

    kind: int
    offset: int
    size: int
    link: int = 0


def fault_of(content: bytes, symbols: Collection[str] = ()) -> str:
    """Why a shared object cannot be loaded or lacks one of `symbols`; "" if nothing is wrong."""
    machine = _own_machine()
    if not machine:
        return "" if content else "it is empty"
    if content[:4] != _MAGIC:
        return "it is not a shared object"
    try:
        return _fault(content, machine, symbols)
    except (struct.error, IndexError, ValueError):
        return "it is cut off or damaged"


def _fault(content: bytes, machine: tuple[int, int, int], symbols: Collection[str]) -> str:
    if _machine(content) != machine:
        return "it was built for another machine"
    order = "<>"[content[5] - 1]
    (kind, _, _, _, segments_at, sections_at, _, _, *sizes, _) = struct.unpack_from(
        order + _HEADER, content
    )
    if kind != _SHARED:
        return "it is not a shared object"
    segments = [
        _Part(row[0], row[2], row[5])
        for row in _rows(content, order + _SEGMENT, segments_at, sizes[0], sizes[1])
    ]
    sections = [
        _Part(row[1], row[4], row[5], row[6])
        for row in _rows(content, order + _SECTION, sections_at, sizes[2], sizes[3])
    ]
    if all(part.kind != _LOADED for part in segments):
        return "it has nothing to load"
    kept = [*segments, *(part for part in sections if part.kind not in _WITHOUT_CONTENT)]
    if any(part.offset + part.size > len(content) for part in kept):
        return "it is cut off"
    missing = _missing(content, order + _SYMBOL, sections, symbols)
    return f"it does not define {', '.join(missing)}" if missing else ""


def _missing(
    content: bytes, form: str, sections: list[_Part], symbols: Collection[str]
) -> list[str]:
    """The `symbols` that no dynamic symbol table defines; none where sections are not listed."""
    wanted = {name.encode(): name for name in symbols}
    size = struct.calcsize(form)
    for table in (part for part in sections if part.kind == _DYNAMIC_SYMBOLS):
        text = sections[table.link]
        strings = content[text.offset : text.offset + text.size]
        for row in _rows(content, form, table.offset, size, table.size // size):
            if row[3]:  # the section it is defined in
                wanted.pop(strings[row[0] : strings.index(b"\0", row[0])], None)
    return sorted(wanted.values()) if sections else []


def _rows(
    content: bytes, form: str, offset: int, size: int, count: int
) -> Iterator[tuple[int, ...]]:
    """The rows of a table in the file. Raises struct.error where the file ends before it does."""
    if count and size != struct.calcsize(form):
        raise struct.error(f"rows of {size} bytes")
    return (struct.unpack_from(form, content, offset + k * size) for k in range(count))


def _machine(content: bytes) -> tuple[int, int, int]:
    """Word size, byte order and processor."""
    order = "<>"[content[5] - 1]
    return content[4], content[5], struct.unpack_from(f"{order}H", content, 18)[0]


@lru_cache(maxsize=1)
def _own_machine() -> tuple[int, int, int] | None:
    """The machine of the running interpreter; None if that is not a 64-bit ELF file."""
    for path in ("/proc/self/exe", sys.executable):
        try:
            with Path(path).open("rb") as file:
                start = file.read(20)
        except OSError:
            continue
        if start[:4] == _MAGIC and start[4] == _WORDS_OF_64_BITS:
            return _machine(start)
    return None
