"""The interface to a device's kernels and memory, and its implementation for the host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch

from dicp.loop.runtime.native import NativeLibrary
from dicp.loop.schedule.placement import Buffer
from dicp.serialize import evaluate_size


class Launch(ctypes.Structure):
    """One kernel of a segment, as native code reads it: its function, argument slots, sizes."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("slots", ctypes.POINTER(ctypes.c_int32)),
        ("count", ctypes.c_int64),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
    ]


@runtime_checkable
class Segment(Protocol):
    """Consecutive kernels, bound to the addresses in a table.

    Any other status than these raises RunStatusError.
    """

    def run(self) -> int:
        """0, or one more than the position of the kernel that reported an error."""

    def run_one(self, position: int) -> int:
        """0, or 1 where the kernel at `position` reported an error."""


@runtime_checkable
class DeviceRuntime(Protocol):
    """A device's loaded kernels, ready to launch."""

    def segment(
        self,
        launches: Sequence[Mapping[str, Any]],
        symbols: Mapping[str, int],
        table: Any,
        status: Any,
    ) -> Segment:
        """`launches` as one step, which reads the addresses from `table` at every run."""


@dataclass(frozen=True)
class Native:
    """The host: kernel entry points by name, and the function that runs a segment."""

    functions: Mapping[str, int]
    run_segment: Callable[..., int]
    libraries: Sequence[NativeLibrary] = ()
    """The shared objects of `functions`, kept loaded."""

    @property
    def entry(self) -> int:
        """The address of `run_segment`."""
        return ctypes.cast(self.run_segment, ctypes.c_void_p).value or 0  # type: ignore[arg-type]

    def segment(
        self,
        launches: Sequence[Mapping[str, Any]],
        symbols: Mapping[str, int],
        table: Any,
        status: Any,
    ) -> _HostSegment:
        array = (Launch * len(launches))()
        keep: list[Any] = []
        for entry, step in zip(array, launches, strict=True):
            slots = (ctypes.c_int32 * len(step["args"]))(*step["args"])
            sizes = (ctypes.c_int64 * max(len(step["symbols"]), 1))(
                *(evaluate_size(s, symbols) for s in step["symbols"])
            )
            keep += [slots, sizes]
            entry.function = self.functions[step["kernel"]]
            entry.slots = ctypes.cast(slots, ctypes.POINTER(ctypes.c_int32))
            entry.sizes = ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64))
            entry.count = len(step["args"])
        return _HostSegment(self.run_segment, array, table, status, keep)


class _HostSegment:
    """One native call for all kernels of a segment; integers are the cheapest ctypes arguments."""

    def __init__(self, run: Any, array: Any, table: Any, status: Any, keep: list[Any]) -> None:
        at, fixed = ctypes.addressof, (ctypes.addressof(table), ctypes.addressof(status))
        self.run: Callable[[], int] = partial(run, at(array), len(array), *fixed)
        self._one = lambda k: run(at(array[k]), 1, *fixed)
        self._keep = [*keep, array, table, status]

    def run_one(self, position: int) -> int:
        return int(self._one(position))

    @property
    def launches(self) -> tuple[int, int]:
        """Address and length of the array of launches."""
        return ctypes.addressof(self._keep[-3]), len(self._keep[-3])


class OwnMemory:
    """Allocates a workspace for one run and never reuses it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def take(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def give(self, block: torch.Tensor) -> None:
        """Does nothing: a recording keeps the memory it uses, and no other run may take it."""

    def result(self, buffer: Buffer) -> Callable[[], torch.Tensor]:
        return fresh_result(buffer, self.device)


def fresh_result(buffer: Buffer, device: torch.device) -> Callable[[], torch.Tensor]:
    """A function that allocates a result where PyTorch does."""
    layout = buffer.shape, buffer.strides
    return partial(torch.empty_strided, *layout, dtype=buffer.dtype, device=device)


def is_kept(block: torch.Tensor, beside: Sequence[torch.Tensor], most: int, bound: int) -> bool:
    """Whether to keep a workspace for the next run: with those kept already (`beside`), at most
    `most` blocks and `bound` bytes."""
    return len(beside) < most and block.numel() + sum(b.numel() for b in beside) <= bound


def reused(kept: list[torch.Tensor], size: int) -> torch.Tensor | None:
    """A workspace of at least `size` bytes taken from `kept`, if there is one; smaller ones that
    come before it are released, since it also serves requests of their size."""
    for k in range(len(kept) - 1, -1, -1):
        try:
            block = kept.pop(k)
        except IndexError:  # another thread was first
            continue
        if block.numel() >= size:
            return block
        release(block)
    return None


def release(block: torch.Tensor) -> None:
    """Free a workspace's memory at once: plans for other sizes hold views that would keep it alive
    until they run again."""
    block.untyped_storage().resize_(0)


class Pool(Protocol):
    """Lends blocks of the device's memory, and allocates results."""

    def take(self, size: int) -> torch.Tensor:
        """A block of at least `size` bytes."""

    def give(self, block: torch.Tensor) -> None: ...

    def result(self, buffer: Buffer) -> Callable[[], torch.Tensor]:
        """A function that allocates `buffer` for each run of one plan."""
