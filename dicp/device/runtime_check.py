"""A vendor's runtime library against the interface: what is missing, and whether the rest works.

The library runs in the process of the caller; it needs no PyTorch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dicp.device.runtime_interface import (
    DTYPES,
    IDENTIFIER_BYTES,
    PREFIX,
    REDUCTIONS,
    declare,
    functions,
    has_collectives,
    last_error,
    missing,
)
from dicp.errors import DeviceError

BYTES = 1 << 16
TASK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


@dataclass(frozen=True)
class Finding:
    """One line of the report; `detail` is empty where all is well."""

    name: str
    detail: str

    @property
    def ok(self) -> bool:
        return not self.detail


class Library:
    """Calls a runtime's functions by name and raises DeviceError where one fails."""

    def __init__(self, library: Any) -> None:
        declare(library)
        self.library = library

    def __getattr__(self, name: str) -> Callable[..., None]:
        return partial(self._call, name)

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self.library, PREFIX + name)(*args)
        if status != 0:
            raise DeviceError("device", PREFIX + name, status, last_error(self.library))

    def made(self, name: str, *args: Any) -> ctypes.c_void_p:
        """What a function writes through its last argument, a pointer."""
        value = ctypes.c_void_p()
        self._call(name, *args, ctypes.byref(value))
        return value

    def number(self, name: str, *args: Any) -> int:
        value = ctypes.c_int(-1)
        self._call(name, *args, ctypes.byref(value))
        return value.value


def check_library(path: Path) -> list[Finding]:
    """Why it cannot be loaded, else every missing function, else the result of every check."""
    try:
        library = ctypes.CDLL(str(path.absolute() if path.exists() else path))
    except OSError as error:
        return [Finding("loading", str(error))]
    lacking = missing(library)
    if lacking:
        return [Finding(name, "missing") for name in lacking]
    return list(check_runtime(library))


def check_runtime(library: Any) -> Iterator[Finding]:
    """The result of every check of a complete library."""
    runtime = Library(library)
    yield Finding(f"{len(functions())} functions", "")
    checks = [_devices, _memory, _copies, _streams, _failures, _events]
    if has_collectives(library):
        checks.append(_collectives)
    for check in checks:
        try:
            detail = check(runtime)
        except (DeviceError, ctypes.ArgumentError) as error:
            detail = str(error)
        yield Finding(check.__name__.strip("_"), detail)


def _devices(runtime: Library) -> str:
    count = runtime.number("device_count")
    if count < 1:
        return "there is no device"
    runtime.set_device(count - 1)
    runtime.set_device(0)
    runtime.device_synchronize(0)
    try:
        runtime.set_device(count)
    except DeviceError:
        return ""
    return f"device {count} is accepted, and there are {count}"


def _memory(runtime: Library) -> str:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    runtime.memory_info(0, ctypes.byref(free), ctypes.byref(total))
    blocks = [runtime.made("malloc", 0, BYTES) for _ in range(8)]
    places = sorted(block.value or 0 for block in blocks)
    apart = all(b - a >= BYTES for a, b in zip(places, places[1:], strict=False))
    owner = runtime.number("address_device", blocks[0])
    host = ctypes.create_string_buffer(8)
    stranger = runtime.number("address_device", ctypes.addressof(host))
    for block in blocks:
        runtime.free(0, block)
    if not apart:
        return "blocks overlap"
    if owner != 0 or stranger != -1:
        return f"addresses are ascribed to devices {owner} and {stranger}; expected 0 and -1"
    try:
        runtime.malloc(0, total.value * 2 + BYTES, ctypes.byref(ctypes.c_void_p()))
    except DeviceError:
        return ""
    return "twice the memory there is can be allocated"


def _copies(runtime: Library) -> str:
    data = bytes(range(256)) * (BYTES // 256)
    source = ctypes.create_string_buffer(data, BYTES)
    result = ctypes.create_string_buffer(BYTES)
    first, second = (runtime.made("malloc", 0, BYTES) for _ in range(2))
    runtime.copy_to_device(0, first, source, BYTES, None)
    runtime.copy_on_device(0, second, first, BYTES, None)
    runtime.copy_to_host(0, result, second, BYTES, None)
    there = result.raw == data
    runtime.fill(0, first, 7, BYTES, None)
    runtime.copy_to_host(0, result, first, BYTES, None)
    filled = result.raw == b"\x07" * BYTES
    runtime.copy_between(0, first, 0, second, BYTES, None)
    runtime.copy_to_host(0, result, first, BYTES, None)
    between = result.raw == data
    runtime.free(0, first)
    runtime.free(0, second)
    wrong = [n for n, ok in (("copies", there), ("fill", filled), ("copy_between", between))
             if not ok]  # fmt: skip
    return f"wrong contents after {', '.join(wrong)}" if wrong else ""


def _streams(runtime: Library) -> str:
    """Tasks run in order, and all of them before a synchronization returns."""
    seen: list[int] = []

    def append(argument: int | None) -> int:
        seen.append(argument or 0)
        return 0

    task = TASK(append)
    for priority in (0, -1):
        stream = runtime.made("stream_create", 0, priority)
        for number in range(32):
            runtime.stream_launch(stream, task, number, 0 if number % 2 else BYTES << 8)
        runtime.stream_synchronize(stream)
        idle = runtime.number("stream_idle", stream)
        runtime.stream_destroy(stream)
        if seen != list(range(32)):
            return f"tasks ran in the order {seen}"
        if not idle:
            return "a stream is not idle after its synchronization"
        seen.clear()
    return ""


def _failures(runtime: Library) -> str:
    stream = runtime.made("stream_create", 0, 0)
    task = TASK(lambda argument: 3)
    runtime.stream_launch(stream, task, None, 0)
    try:
        runtime.stream_synchronize(stream)
    except DeviceError:
        runtime.stream_synchronize(stream)  # an error is reported once
        runtime.stream_destroy(stream)
        return ""
    return "a task that fails is not reported by the stream's synchronization"


def _appending(seen: list[str], name: str) -> Any:
    def append(argument: int | None) -> int:
        seen.append(name)
        return 0

    return TASK(append)


def _events(runtime: Library) -> str:
    streams = [runtime.made("stream_create", 0, 0) for _ in range(2)]
    start, end = (runtime.made("event_create", 0, 1) for _ in range(2))
    seen: list[str] = []
    first, second = _appending(seen, "first"), _appending(seen, "second")
    runtime.event_record(start, streams[0])
    runtime.stream_launch(streams[0], first, None, BYTES << 8)
    runtime.event_record(end, streams[0])
    runtime.stream_wait(streams[1], end)
    runtime.stream_launch(streams[1], second, None, 0)
    runtime.stream_synchronize(streams[1])
    runtime.event_synchronize(end)
    done = runtime.number("event_done", end)
    passed = ctypes.c_double(-1.0)
    runtime.event_elapsed(start, end, ctypes.byref(passed))
    for event in (start, end):
        runtime.event_destroy(event)
    for stream in streams:
        runtime.stream_destroy(stream)
    if seen != ["first", "second"]:
        return f"a stream that waits for an event ran in the order {seen}"
    if not done or passed.value < 0:
        return "an event that was synchronized is not done, or has no time"
    return ""


def _collectives(runtime: Library) -> str:
    """A communicator of one member, whose collectives copy."""
    identifier = ctypes.create_string_buffer(IDENTIFIER_BYTES)
    runtime.communicator_identifier(identifier)
    alone = runtime.made("communicator_create", 0, identifier, 0, 1)
    count = 4
    values = (ctypes.c_float * count)(1.5, -2.0, 0.0, 3.0)
    size = ctypes.sizeof(values)
    source, target = (runtime.made("malloc", 0, size) for _ in range(2))
    stream = runtime.made("stream_create", 0, 0)
    codes = DTYPES.index("float32"), REDUCTIONS.index("sum")
    calls: dict[str, tuple[Any, ...]] = {
        "all_reduce": (source, target, count, *codes),
        "reduce_scatter": (source, target, count, *codes),
        "broadcast": (target, size, 0),
        "all_gather": (source, target, size),
        "all_to_all": (source, target, size),
    }
    wrong = []
    for name, arguments in calls.items():
        held = target if name == "broadcast" else source
        runtime.fill(0, target, 0, size, None)
        runtime.copy_to_device(0, held, values, size, None)
        getattr(runtime, name)(alone, *arguments, stream)
        runtime.stream_synchronize(stream)
        result = (ctypes.c_float * count)()
        runtime.copy_to_host(0, result, target, size, None)
        if list(result) != list(values):
            wrong.append(name)
    runtime.communicator_destroy(alone)
    runtime.stream_destroy(stream)
    runtime.free(0, source)
    runtime.free(0, target)
    return f"wrong contents after {', '.join(wrong)}" if wrong else ""
