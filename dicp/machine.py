"""The machine that is measured: the name of its processor, its devices, and clocks."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from dicp.torch_private import HOST

_DELAY_BYTES = 1 << 28
_DELAY_FILLS = 256
"""At 4 terabytes per second, as many fills of that many bytes take 16 milliseconds."""


def processor(device: torch.device) -> str:
    """The name of the processor or accelerator behind a device."""
    if device.type != HOST:
        name = getattr(torch.get_device_module(device), "get_device_name", None)
        return str(name(device)) if name else device.type
    return processor_fact("model name") or platform.processor() or platform.machine()


def processor_fact(name: str) -> str:
    """The field `name` of /proc/cpuinfo for the first processor; empty where it is missing."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = (line.partition(":")[2].strip() for line in lines if line.startswith(name))
    return next(found, "")


def device_problem(name: str) -> str:
    """Why this machine has no memory on a device, as PyTorch says it; empty if it has."""
    try:
        torch.empty(0, device=name)
    except Exception as error:  # a device's plugin raises its own
        return (str(error).splitlines() or [name])[0]
    return ""


def memory_bytes() -> int:
    """Bytes of main memory that this process may use: the machine's, or what its container may."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int((Path("/sys/fs/cgroup") / name).read_text()))
    return min(limits)


def running() -> float:
    """The mean number of processes and threads that wanted to run in the last minute."""
    return os.getloadavg()[0]


def stopwatch(device: torch.device) -> Callable[[], float]:
    """Start a measurement on the device's current stream; the call ends it, in milliseconds."""
    module = torch.get_device_module(device) if device.type != HOST else None
    if module is None:
        start = time.perf_counter()
        return lambda: (time.perf_counter() - start) * 1e3
    module.synchronize(device)
    event = getattr(module, "Event", None)
    if event is None:
        start = time.perf_counter()

        def end() -> float:
            module.synchronize(device)
            return (time.perf_counter() - start) * 1e3

        return end
    first, last = event(enable_timing=True), event(enable_timing=True)
    first.record()

    def end_events() -> float:
        last.record()
        module.synchronize(device)
        return float(first.elapsed_time(last))

    return end_events


class StepClock:
    """Measures each step of one run, by a key.

    On a device, the run is queued behind other work, so that the device does not wait for the host
    between steps; its events are read when all is done.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device) if device.type != HOST else None
        self._spans: list[tuple[int, Any, Any]] = []

    def delay(self) -> None:
        """Occupy the device for some milliseconds."""
        if self._module is not None:
            block = torch.empty(_DELAY_BYTES, dtype=torch.uint8, device=self.device)
            for _ in range(_DELAY_FILLS):
                block.zero_()

    @contextlib.contextmanager
    def measure(self, key: int) -> Iterator[None]:
        if self._module is None:
            start = time.perf_counter()
            yield
            self._spans.append((key, start, time.perf_counter()))
            return
        first, last = (self._module.Event(enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        self._spans.append((key, first, last))

    def seconds(self) -> dict[int, float]:
        """The time of each key since the last call."""
        if self._module is not None:
            self._module.synchronize(self.device)
        found = {
            key: first.elapsed_time(last) / 1e3 if self._module is not None else last - first
            for key, first, last in self._spans
        }
        self._spans.clear()
        return found
