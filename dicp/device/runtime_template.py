"""The runtime interface in Python: devices over host memory, whose streams run at once.

A vendor's package may start from this file: each function of `dicp/device/native/runtime.h` is a
method, and `library()` gives them as ctypes functions, as an entry point of the group
`dicp.devices` has to.
"""

from __future__ import annotations

import ctypes
import math
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dicp.device.runtime_interface import (
    DTYPES,
    IDENTIFIER_BYTES,
    PREFIX,
    REDUCTIONS,
    UNSUPPORTED,
    collectives,
    functions,
)

MEMORY = 1 << 30
PATIENCE = 300.0
"""Seconds in which each member has to join a collective."""


class Properties(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char * 128),
        ("total_memory", ctypes.c_uint64),
        ("major", ctypes.c_int32),
        ("minor", ctypes.c_int32),
        ("multi_processor_count", ctypes.c_int32),
        ("host_addressable", ctypes.c_int32),
    ]


class _Failed(Exception):
    """A call that fails; the text is what `last_error` tells."""

    status = 1


class _Unsupported(_Failed):
    """A collective of a dtype or reduction that is not there."""

    status = UNSUPPORTED


@dataclass
class Communicator:
    """Members exchange files in a folder, whose path is the identifier."""

    folder: Path
    rank: int
    size: int
    calls: int = 0

    def exchange(self, data: bytes, patience: float) -> list[bytes]:
        """What each member gives to this call."""
        self.calls += 1
        names = [self.folder / f"{self.calls}.{rank}" for rank in range(self.size)]
        fresh = self.folder / f"{self.rank}.partial"
        fresh.write_bytes(data)
        fresh.rename(names[self.rank])
        deadline = time.monotonic() + patience
        for rank, name in enumerate(names):
            while not name.exists():
                if time.monotonic() > deadline:
                    raise _Failed(f"member {rank} gave nothing in {patience:g} s")
                time.sleep(1e-4)
        # Every member is at this call: none reads files of the one before.
        self.folder.joinpath(f"{self.calls - 1}.{self.rank}").unlink(missing_ok=True)
        return [name.read_bytes() for name in names]

    def leave(self) -> None:
        """Remove the folder if the other members have left it."""
        self.folder.joinpath(f"{self.rank}.left").touch()
        if all(self.folder.joinpath(f"{rank}.left").exists() for rank in range(self.size)):
            shutil.rmtree(self.folder, ignore_errors=True)


class HostRuntime:
    """One device. Handles of streams and events are numbers; 0 is no handle."""

    def __init__(self, name: str = "template", memory: int = MEMORY) -> None:
        self.name, self.memory, self.used = name, memory, 0
        self.blocks: dict[int, Any] = {}
        self.pinned: dict[int, Any] = {}
        self.errors: dict[int, str] = {}
        self.events: dict[int, float] = {}
        self.communicators: dict[int, Communicator] = {}
        self.patience = PATIENCE
        self.error = ""
        self._next = 1

    def library(self) -> SimpleNamespace:
        """The functions of the interface, callable from C."""
        found = {PREFIX + name: self._from_c(name) for name in functions() + collectives()}
        return SimpleNamespace(**found)

    def _from_c(self, name: str) -> Any:
        method: Callable[..., None] = getattr(self, name)
        kinds = _ARGUMENTS[name]

        def call(*args: Any) -> int:
            try:
                method(*args)
            except _Failed as error:
                self.error = str(error)
                return error.status
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(call)

    def _handle(self) -> int:
        self._next += 1
        return self._next

    # ---- devices ----

    def device_count(self, count: Any) -> None:
        count[0] = 1

    def set_device(self, device: int) -> None:
        if device != 0:
            raise _Failed(f"there is no device {device}")

    def device_properties(self, device: int, properties: int) -> None:
        self.set_device(device)
        found = Properties.from_address(properties)
        found.name, found.total_memory = self.name.encode(), self.memory
        found.major, found.minor, found.multi_processor_count = 1, 0, 1
        found.host_addressable = 0

    def device_synchronize(self, device: int) -> None:
        self.set_device(device)
        for stream in list(self.errors):
            self.stream_synchronize(stream)

    def memory_info(self, device: int, free_bytes: Any, total_bytes: Any) -> None:
        free_bytes[0], total_bytes[0] = self.memory - self.used, self.memory

    # ---- memory ----

    def malloc(self, device: int, size: int, address: Any) -> None:
        if self.used + size > self.memory:
            raise _Failed("out of memory")
        address[0], block = _aligned_block(size)
        self.blocks[address[0]] = (block, size)
        self.used += size

    def free(self, device: int, address: int) -> None:
        if address not in self.blocks:
            raise _Failed(f"{address:#x} is not a block")
        self.used -= self.blocks.pop(address)[1]

    def host_malloc(self, size: int, address: Any) -> None:
        address[0], block = _aligned_block(size)
        self.pinned[address[0]] = block

    def host_free(self, address: int) -> None:
        self.pinned.pop(address, None)

    def address_device(self, address: int, device: Any) -> None:
        device[0] = 0 if self._holds(address, 1) else -1

    def _holds(self, address: int, size: int) -> bool:
        return any(at <= address and address + size <= at + n for at, (_, n) in self.blocks.items())

    def _check(self, address: int, size: int) -> None:
        if not self._holds(address, size):
            raise _Failed(f"{address:#x} is not memory of the device")

    def _copy(self, to: int, source: int, size: int, *ours: int) -> None:
        for address in ours:
            self._check(address, size)
        ctypes.memmove(to, source, size)

    def copy_to_device(self, device: int, to: int, source: int, size: int, stream: int) -> None:
        self._copy(to, source, size, to)

    def copy_to_host(self, device: int, to: int, source: int, size: int, stream: int) -> None:
        self._copy(to, source, size, source)

    def copy_on_device(self, device: int, to: int, source: int, size: int, stream: int) -> None:
        self._copy(to, source, size, to, source)

    def copy_between(
        self, device: int, to: int, other: int, source: int, size: int, stream: int
    ) -> None:
        self._copy(to, source, size, to, source)

    def fill(self, device: int, to: int, value: int, size: int, stream: int) -> None:
        self._check(to, size)
        ctypes.memset(to, value, size)

    # ---- streams ----

    def stream_create(self, device: int, priority: int, stream: Any) -> None:
        stream[0] = self._handle()

    def stream_destroy(self, stream: int) -> None:
        self.errors.pop(stream, None)

    def stream_synchronize(self, stream: int) -> None:
        if stream in self.errors:
            raise _Failed(self.errors.pop(stream))

    def stream_idle(self, stream: int, idle: Any) -> None:
        idle[0] = 1

    def stream_wait(self, stream: int, event: int) -> None:
        return None

    def stream_launch(self, stream: int, task: Any, argument: int, size: int) -> None:
        status = task(argument)
        if status != 0:
            self.errors.setdefault(stream, f"a task returned {status}")

    # ---- events ----

    def event_create(self, device: int, timing: int, event: Any) -> None:
        event[0] = self._handle()

    def event_destroy(self, event: int) -> None:
        self.events.pop(event, None)

    def event_record(self, event: int, stream: int) -> None:
        self.events[event] = time.perf_counter()

    def event_done(self, event: int, done: Any) -> None:
        done[0] = 1

    def event_synchronize(self, event: int) -> None:
        return None

    def event_elapsed(self, start: int, end: int, milliseconds: Any) -> None:
        if start not in self.events or end not in self.events:
            raise _Failed("an event was never recorded")
        milliseconds[0] = (self.events[end] - self.events[start]) * 1e3

    def last_error(self, text: int, size: int) -> None:
        ctypes.memmove(
            text, self.error.encode()[: size - 1] + b"\0", min(len(self.error) + 1, size)
        )

    # ---- collectives ----

    def communicator_identifier(self, identifier: int) -> None:
        folder = tempfile.mkdtemp(prefix="dicp_rt_").encode()
        if len(folder) >= IDENTIFIER_BYTES:
            raise _Failed(f"the path of the folder for files is too long: {folder.decode()}")
        ctypes.memmove(identifier, folder + b"\0", len(folder) + 1)

    def communicator_create(
        self, device: int, identifier: int, rank: int, size: int, communicator: Any
    ) -> None:
        folder = Path(ctypes.string_at(identifier).decode())
        communicator[0] = handle = self._handle()
        self.communicators[handle] = Communicator(folder, rank, size)

    def communicator_destroy(self, communicator: int) -> None:
        self.communicators.pop(communicator).leave()

    def _exchange(self, communicator: int, address: int, size: int) -> list[bytes]:
        self._check(address, size)
        data = ctypes.string_at(address, size)
        return self.communicators[communicator].exchange(data, self.patience)

    def _put(self, to: int, data: bytes) -> None:
        self._check(to, len(data))
        ctypes.memmove(to, data, len(data))

    def all_reduce(
        self, communicator: int, source: int, to: int, count: int, dtype: int, how: int, stream: int
    ) -> None:
        kind = _number(dtype, how)
        parts = self._exchange(communicator, source, count * ctypes.sizeof(kind))
        self._put(to, _reduced(kind, parts, REDUCTIONS[how]))

    def reduce_scatter(
        self, communicator: int, source: int, to: int, count: int, dtype: int, how: int, stream: int
    ) -> None:
        member, kind = self.communicators[communicator], _number(dtype, how)
        size = count * ctypes.sizeof(kind)
        parts = self._exchange(communicator, source, size * member.size)
        mine = [part[size * member.rank :][:size] for part in parts]
        self._put(to, _reduced(kind, mine, REDUCTIONS[how]))

    def broadcast(self, communicator: int, data: int, size: int, root: int, stream: int) -> None:
        self._put(data, self._exchange(communicator, data, size)[root])

    def all_gather(self, communicator: int, source: int, to: int, size: int, stream: int) -> None:
        self._put(to, b"".join(self._exchange(communicator, source, size)))

    def all_to_all(self, communicator: int, source: int, to: int, size: int, stream: int) -> None:
        member = self.communicators[communicator]
        parts = self._exchange(communicator, source, size * member.size)
        self._put(to, b"".join(part[size * member.rank :][:size] for part in parts))


def _aligned_block(size: int) -> tuple[int, Any]:
    """An aligned address in new host memory, and the object that keeps that alive."""
    block = ctypes.create_string_buffer(max(size, 1) + 64)
    return (ctypes.addressof(block) + 63) // 64 * 64, block


_NUMBERS = {
    "uint8": ctypes.c_uint8, "int8": ctypes.c_int8, "int32": ctypes.c_int32,
    "int64": ctypes.c_int64, "float32": ctypes.c_float, "float64": ctypes.c_double,
}  # fmt: skip
_REDUCE: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "sum": sum,
    "product": math.prod,
    "min": lambda values: next((v for v in values if v != v), min(values)),  # NaN, if there is one
    "max": lambda values: next((v for v in values if v != v), max(values)),
    "avg": lambda values: sum(values) / len(values),
}


def _number(dtype: int, how: int) -> Any:
    kind = _NUMBERS.get(DTYPES[dtype])
    if kind is None or (REDUCTIONS[how] == "avg" and "int" in DTYPES[dtype]):
        raise _Unsupported(f"no {REDUCTIONS[how]} of {DTYPES[dtype]}")
    return kind


def _reduced(kind: Any, parts: list[bytes], how: str) -> bytes:
    numbers = kind * (len(parts[0]) // ctypes.sizeof(kind))
    columns = zip(*(numbers.from_buffer_copy(part) for part in parts), strict=True)
    return bytes(numbers(*map(_REDUCE[how], columns)))


_INT, _SIZE, _POINTER = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
_INTS, _SIZES = ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_size_t)
_POINTERS = ctypes.POINTER(ctypes.c_void_p)
_TASK = ctypes.CFUNCTYPE(_INT, _POINTER)
_COPY = (_INT, _POINTER, _POINTER, _SIZE, _POINTER)
_REDUCTION = (_POINTER, _POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER)
_MOVE = (_POINTER, _POINTER, _POINTER, _SIZE, _POINTER)
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "device_count": (_INTS,),
    "set_device": (_INT,),
    "device_properties": (_INT, _POINTER),
    "device_synchronize": (_INT,),
    "memory_info": (_INT, _SIZES, _SIZES),
    "malloc": (_INT, _SIZE, _POINTERS),
    "free": (_INT, _POINTER),
    "host_malloc": (_SIZE, _POINTERS),
    "host_free": (_POINTER,),
    "address_device": (_POINTER, _INTS),
    "copy_to_device": _COPY,
    "copy_to_host": _COPY,
    "copy_on_device": _COPY,
    "copy_between": (_INT, _POINTER, _INT, _POINTER, _SIZE, _POINTER),
    "fill": (_INT, _POINTER, _INT, _SIZE, _POINTER),
    "stream_create": (_INT, _INT, _POINTERS),
    "stream_destroy": (_POINTER,),
    "stream_synchronize": (_POINTER,),
    "stream_idle": (_POINTER, _INTS),
    "stream_wait": (_POINTER, _POINTER),
    "stream_launch": (_POINTER, _TASK, _POINTER, _SIZE),
    "event_create": (_INT, _INT, _POINTERS),
    "event_destroy": (_POINTER,),
    "event_record": (_POINTER, _POINTER),
    "event_done": (_POINTER, _INTS),
    "event_synchronize": (_POINTER,),
    "event_elapsed": (_POINTER, _POINTER, ctypes.POINTER(ctypes.c_double)),
    "last_error": (_POINTER, _SIZE),
    "communicator_identifier": (_POINTER,),
    "communicator_create": (_INT, _POINTER, _INT, _INT, _POINTERS),
    "communicator_destroy": (_POINTER,),
    "all_reduce": _REDUCTION,
    "reduce_scatter": _REDUCTION,
    "broadcast": (_POINTER, _POINTER, _SIZE, _INT, _POINTER),
    "all_gather": _MOVE,
    "all_to_all": _MOVE,
}
