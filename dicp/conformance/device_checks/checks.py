"""Checks of a device beside its operators: what it says of itself, errors, streams and memory.

Each returns what it found in words, and raises AssertionError with what is wrong. Devices are used
through PyTorch's module for them, such as `torch.dipu`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MB = 1 << 20
SIZE = 1 << 12
BUSY = 50_000_000
"""How long streams are kept busy, in cycles; of the eager device, in nanoseconds."""
ROUNDS = 16


@dataclass(frozen=True)
class Device:
    """A device type, and PyTorch's module for it."""

    type: str

    @property
    def module(self) -> Any:
        return torch.get_device_module(self.type)

    def zeros(self, size: int = SIZE) -> Tensor:
        return torch.zeros(size, device=self.type)


def expect(condition: bool, problem: str) -> None:
    if not condition:
        raise AssertionError(problem)


def error_of(call: Callable[[], Any], what: str) -> RuntimeError:
    """The error of a call that must fail, with a text."""
    try:
        call()
    except RuntimeError as error:
        expect(bool(str(error).strip()), f"{what} fails without a text")
        return error
    raise AssertionError(f"{what} is accepted")


def count_and_properties(device: Device) -> str:
    """Every device has a name and memory, and there is none beyond the last."""
    count = device.module.device_count()
    expect(count >= 1, "there is no device")
    names = []
    for index in range(count):
        found = device.module.get_device_properties(index)
        free, total = device.module.mem_get_info(index)
        expect(bool(found.name), f"device {index} has no name")
        expect(found.total_memory > 0, f"device {index} has {found.total_memory} bytes of memory")
        expect(0 < free <= total, f"device {index} has {free} free of {total} bytes")
        names.append(f"{found.name}, {total // MB} MiB")
    error_of(lambda: torch.empty(1, device=f"{device.type}:{count}"), f"device {count} of {count}")
    return f"{count}: {'; '.join(names)}"


def error_text(device: Device) -> str:
    """Each failed call has a text of its own, and the next call is not affected."""
    narrow = torch.ones(2, 3, device=device.type)
    product = str(error_of(lambda: narrow @ narrow, "a product of 2x3 by 2x3"))
    expect("2x3" in product, f"the text names no shapes: {product}")
    count = device.module.device_count()
    index = str(error_of(lambda: device.module.set_device(count), f"set_device({count})"))
    expect(index != product, f"another call fails with the same text: {index}")
    device.module.synchronize()
    total = (narrow @ narrow.T).sum().item()
    expect(total == 12.0, f"after the errors a sum is {total}, expected 12")
    return product.splitlines()[0]


def streams_and_event(device: Device) -> str:
    """A stream that waits for an event of another one sees what that has written before."""
    module = device.module
    first, second = module.Stream(), module.Stream()
    written, read = device.zeros(), device.zeros()
    read.copy_(written.add_(0.0))  # the first call of a form may compile it
    start, end = (module.Event(enable_timing=True) for _ in range(2))
    module.synchronize()
    with module.stream(first):
        start.record()
        module._sleep(BUSY)
        written.add_(1.0)
        end.record()
    with module.stream(second):
        second.wait_event(end)
        read.copy_(written)
    second.synchronize()
    values = read.cpu().unique().tolist()
    expect(values == [1.0], f"the waiting stream read {values}, expected [1.0]")
    expect(end.query() and first.query(), "an event that was waited for has not taken place")
    passed = start.elapsed_time(end)
    expect(passed > 0, f"{passed} ms passed between the events")
    return f"{passed:.1f} ms between the events"


def memory_exhaustion(device: Device) -> str:
    """Too large a request says how much it was, takes nothing, and work goes on."""
    module = device.module
    before = module.memory_allocated()
    total = module.mem_get_info()[1]

    def too_large() -> None:
        torch.empty(2 * total, dtype=torch.uint8, device=device.type)

    error = error_of(too_large, f"{2 * total} bytes of {total}")
    expect(isinstance(error, torch.OutOfMemoryError), f"it raises {type(error).__name__}: {error}")
    expect(any(c.isdigit() for c in str(error)), f"the text names no amount: {error}")
    kept = module.memory_allocated() - before
    expect(kept == 0, f"{kept} bytes stay allocated after it")
    module.empty_cache()
    module.set_per_process_memory_fraction((module.memory_reserved() + 64 * MB) / total)
    try:
        blocks = [_filled(device, 16 * MB) for _ in range(2)]
        error_of(lambda: _filled(device, 64 * MB), "a block beyond the limit")
        blocks.clear()
        again = _filled(device, 24 * MB)[-1].item()
    finally:
        module.set_per_process_memory_fraction(1.0)
    expect(again == 1, f"a block of memory that was freed holds {again}, expected 1")
    return str(error).splitlines()[0]


def context_reuse(device: Device) -> str:
    """Streams and events serve again, after errors and in other threads, too."""
    module = device.module
    stream, event, total = module.Stream(), module.Event(), device.zeros()
    current = module.current_stream()
    for _ in range(ROUNDS):
        with module.stream(stream):
            total.add_(1.0)
            event.record()
        module.current_stream().wait_event(event)
        total.add_(1.0)
        stream.wait_stream(module.current_stream())
    values = total.cpu().unique().tolist()
    expect(values == [2.0 * ROUNDS], f"{ROUNDS} rounds make {values}, expected {2.0 * ROUNDS}")
    try:
        with module.stream(stream):
            raise KeyError("an error of the program's own")
    except KeyError:
        expect(module.current_stream() == current, "an error leaves another stream current")
    sums: list[float] = []
    threads = [threading.Thread(target=lambda: sums.append(_sum_on(device))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expect(sums == [float(SIZE)] * 4, f"threads compute {sums}, expected {float(SIZE)} in each")
    return f"{ROUNDS} rounds on two streams, {len(threads)} threads"


def _filled(device: Device, size: int) -> Tensor:
    """A block of ones; a first call, which compiles, may need as much memory again."""
    return torch.empty(size, dtype=torch.uint8, device=device.type).fill_(1)


def _sum_on(device: Device) -> float:
    with device.module.stream(device.module.Stream()):
        return float(device.zeros().add_(1.0).sum())


CHECKS: dict[str, Callable[[Device], str]] = {
    "device count and properties": count_and_properties,
    "error text after a failed call": error_text,
    "two streams with an event between": streams_and_event,
    "memory exhaustion message": memory_exhaustion,
    "context reuse": context_reuse,
}
