"""What `cuda_stub.c` writes down of a launch, and what a compiled kernel says of itself."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

MOST, WIDEST = 256, 64
"""Launches that are kept, and parameters of each."""


class Record(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_uint64), ("stream", ctypes.c_uint64), ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3), ("shared", ctypes.c_uint32), ("count", ctypes.c_uint32),
        ("values", ctypes.c_uint64 * WIDEST),
    ]  # fmt: skip


# ---- what a binary says of its kernel ------------------------------------------------------------

PARAMETER, THREADS = 0x17, 0x10
"""EIATTR_KPARAM_INFO and EIATTR_REQNTID, as cuobjdump names the entries of `.nv.info`."""


def section(code: bytes, name: str) -> bytes:
    """A section of an ELF file of 64 bits."""
    (at,) = struct.unpack_from("<Q", code, 0x28)
    size, count, names = struct.unpack_from("<3H", code, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", code, at + k * size) for k in range(count)]
    for label, _, _, _, start, length in heads:
        text = heads[names][4] + label
        if code[text : code.index(b"\0", text)].decode() == name:
            return code[start : start + length]
    raise LookupError(name)


@dataclass(frozen=True)
class Facts:
    """The widths of a kernel's parameters in bytes, and the threads of its block."""

    widths: list[int]
    threads: int


def facts_of(code: bytes, entry: str) -> Facts:
    body, at = section(code, f".nv.info.{entry}"), 0
    widths: dict[int, int] = {}
    threads = 0
    while at < len(body):
        form, attribute, size = struct.unpack_from("<BBH", body, at)
        at += 4
        if form == 4:
            if attribute == PARAMETER:
                _, ordinal, _, flags = struct.unpack_from("<IHHI", body, at)
                widths[ordinal] = flags >> 18
            elif attribute == THREADS:
                threads = struct.unpack_from("<III", body, at)[0]
            at += size
    return Facts([widths[k] for k in range(len(widths))], threads)
