"""Launch plans: consecutive kernels whose launches are prepared except for the stream.

A launch takes the addresses of its arguments. For a pointer argument that is the address of its
entry in the table of buffers, so that a run need not pack arguments.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from dicp import torch_private
from dicp.errors import LaunchError
from dicp.gpu.build import Binary, Builder, Driver, Job, Variant
from dicp.gpu.index_width import needs_wide
from dicp.gpu.thresholds import MAX_KEPT
from dicp.loop.runtime.device import fresh_result, is_kept, release, reused
from dicp.loop.schedule.placement import Buffer
from dicp.serialize import evaluate_size

ALIGNMENT = 16


@dataclass(frozen=True)
class BufferLocation:
    """Where a buffer lies: the buffer that owns its memory, and the bytes from its start."""

    root: int
    offset: int | None
    """None if it depends on sizes that are not known at compile time."""


def location_of(
    buffers: Sequence[Mapping[str, Any]], slot: int, external: Collection[int] = ()
) -> BufferLocation:
    """Where `slot` lies; a buffer in `external` owns its memory even if it has a base."""
    offset: int | None = 0
    while buffers[slot]["base"] is not None and slot not in external:
        step = buffers[slot]["offset"]
        width = getattr(torch, buffers[slot]["dtype"]).itemsize
        known = isinstance(step, int) and offset is not None
        offset = offset + step * width if known else None  # type: ignore[operator]
        slot = buffers[slot]["base"]
    return BufferLocation(slot, offset)


def extent_of(buffer: Mapping[str, Any], symbols: Mapping[str, int]) -> int:
    """Elements of memory from the buffer's first to its last."""
    shape = [evaluate_size(s, symbols) for s in buffer["shape"]]
    strides = [evaluate_size(s, symbols) for s in buffer["strides"]]
    return 1 + sum((s - 1) * t for s, t in zip(shape, strides, strict=False)) if all(shape) else 0


AnyJob = TypeVar("AnyJob", bound=Job)


class LaunchPlan(Generic[AnyJob]):
    """Selects the variants that a program's kernels are compiled for."""

    job_type: type[AnyJob]

    def __init__(self, program: Mapping[str, Any], texts: Mapping[str, str], arch: int) -> None:
        self.program = program
        self.texts = texts
        self.arch = arch
        self.buffers = program["buffers"]
        made_by_calls = {
            slot for s in program["steps"] if "call" in s and not s["into"] for slot in s["outs"]
        }
        self.external = {
            slot for slot, b in enumerate(self.buffers)
            if b["role"] in ("input", "constant") or slot in made_by_calls
        }  # fmt: skip
        """Buffers that the program does not allocate: only a run knows their alignment."""
        slots = range(len(self.buffers))
        self.locations = [location_of(self.buffers, slot, made_by_calls) for slot in slots]

    def variant(
        self,
        step: Mapping[str, Any],
        symbols: Mapping[str, int] | None,
        misaligned: frozenset[int] = frozenset(),
    ) -> Variant:
        """The variant of `step`; without `symbols`, unknown sizes are assumed to be small."""
        aligned = []
        for slot in step["args"]:
            location = self.locations[slot]
            known = location.offset is not None and location.offset % ALIGNMENT == 0
            aligned.append(known and location.root not in misaligned)
        even = symbols is not None and bool(step["symbols"]) and all(
            evaluate_size(s, symbols) % ALIGNMENT == 0 for s in step["symbols"]
        )  # fmt: skip
        return Variant(self.arch, self._wide(step, symbols), tuple(aligned), even)

    def _wide(self, step: Mapping[str, Any], symbols: Mapping[str, int] | None) -> bool:
        fixed = symbols is None
        known = {} if symbols is None else symbols
        try:
            extents = [extent_of(self.buffers[slot], known) for slot in step["args"]]
            return needs_wide(step, known, extents)
        except NameError:  # a size known only at run time
            assert fixed
            return False

    def job(self, step: Mapping[str, Any], variant: Variant) -> AnyJob:
        name = step["kernel"]
        return self.job_type(
            name, self.texts[name], step["launch"], len(step["symbols"]), variant,
            tuple(map(str, step["origins"])),
        )  # fmt: skip

    def jobs(self) -> list[AnyJob]:
        """Every kernel once, in the variant assumed before sizes and addresses are known."""
        found = [
            self.job(step, self.variant(step, None))
            for step in self.program["steps"] if "kernel" in step
        ]  # fmt: skip
        return list({(j.name, j.variant): j for j in found}.values())


class Device:
    """A program's kernels on one GPU."""

    def __init__(self, plan: LaunchPlan[Any], builder: Builder, driver: Driver, index: int) -> None:
        self.plan = plan
        self.builder = builder
        self.driver = driver
        self.index = index
        self.module = torch.get_device_module(driver.device_type)
        self.functions: dict[tuple[bytes, str], int] = {}
        """Kernels in use: their code is unloaded after the program is dropped."""
        self.outlives_captures = False
        """Whether every graph that captures a run is dropped before this program."""

    def function(self, binary: Binary) -> int:
        """The kernel's handle on this GPU."""
        key = (binary.code, binary.entry)
        if key not in self.functions:
            self.functions[key] = self.driver.function(self.index, binary)
        return self.functions[key]

    def keep_if_captured(self) -> None:
        """Keeps the kernels loaded for good if a user's graph captures their launch."""
        if not self.outlives_captures and torch_private.capturing():
            for function in self.functions.values():
                self.driver.keep(function)

    def segment(
        self,
        launches: Sequence[Mapping[str, Any]],
        symbols: Mapping[str, int],
        table: Any,
        status: Any,
    ) -> DeviceSegment:
        return DeviceSegment(self, launches, symbols, table)

    def stream(self) -> int:
        return torch_private.current_stream(self.index)


class PreparedLaunch(NamedTuple):
    """What a launch needs but the stream."""

    function: int
    programs: int
    threads: int
    shared: int
    """Bytes of dynamic shared memory."""
    parameters: Any
    """The array of the arguments' addresses."""


class DeviceSegment:
    """Consecutive kernels on one stream; prepares launches once per set of misaligned buffers."""

    def __init__(
        self,
        device: Device,
        launches: Sequence[Mapping[str, Any]],
        symbols: Mapping[str, int],
        table: Any,
    ) -> None:
        self.device = device
        self.steps = launches
        self.symbols = symbols
        self.table = table
        self.start = ctypes.addressof(table)
        self.no_scratch = ctypes.c_void_p()
        used = {s for step in launches for s in step["args"]}
        roots = {device.plan.locations[s].root for s in used}
        self.external = np.array(sorted(roots & device.plan.external), dtype=np.int64)
        self.addresses = np.ctypeslib.as_array(
            ctypes.cast(table, ctypes.POINTER(ctypes.c_uint64)), (len(table),)
        )
        self._prepared: dict[frozenset[int], list[PreparedLaunch]] = {}
        self._keep: list[Any] = []

    def run(self) -> int:
        self._launch(self._ready())
        return 0

    def run_one(self, position: int) -> int:
        self._launch(self._ready()[position : position + 1], position)
        return 0

    def _ready(self) -> list[PreparedLaunch]:
        low = self.addresses[self.external] & (ALIGNMENT - 1)
        misaligned = frozenset(self.external[low != 0].tolist()) if low.any() else frozenset()
        found = self._prepared.get(misaligned)
        if found is None:
            found = self._prepared[misaligned] = self._prepare(misaligned)
        return found

    def _launch(self, launches: Sequence[PreparedLaunch], first: int = 0) -> None:
        """Launches consecutive kernels of the segment, the first of which is number `first`."""
        module, driver = self.device.module, self.device.driver
        if module.current_device() != self.device.index:
            with module.device(self.device.index):
                self._launch(launches, first)
            return
        launch, stream = driver.launch, self.device.stream()
        self.device.keep_if_captured()
        for function, programs, threads, shared, parameters in launches:
            if not programs:  # a scatter of zero elements
                continue
            rest = (programs, 1, 1, threads, 1, 1, shared, stream, parameters, None)
            result = launch(function, *rest)
            if result == driver.no_context:
                driver.enter(self.device.index)
                result = launch(function, *rest)
            if result:
                position = next(k for k, x in enumerate(launches) if x.parameters is parameters)
                step = self.steps[first + position]
                reason = (
                    f"{driver.describe(result)}, with {programs} blocks of {threads} threads and "
                    f"{shared} bytes of dynamic shared memory"
                )
                raise LaunchError(
                    driver.target, step["kernel"], reason, tuple(map(str, step["origins"]))
                )

    def _prepare(self, misaligned: frozenset[int]) -> list[PreparedLaunch]:
        plan = self.device.plan
        jobs = [plan.job(s, plan.variant(s, self.symbols, misaligned)) for s in self.steps]
        binaries = self.device.builder.build(jobs)
        with self.device.module.device(self.device.index):
            return [
                self._bound(step, job, binary)
                for step, job, binary in zip(self.steps, jobs, binaries, strict=True)
            ]

    def _bound(self, step: Mapping[str, Any], job: Job, binary: Binary) -> PreparedLaunch:
        width = ctypes.c_int64 if job.variant.wide else ctypes.c_int32
        sizes = [width(evaluate_size(s, self.symbols)) for s in step["symbols"]]
        self._keep.append(sizes)
        entry = ctypes.sizeof(ctypes.c_void_p)
        addresses = [self.start + entry * slot for slot in step["args"]]
        addresses += [ctypes.addressof(s) for s in sizes]
        addresses += [ctypes.addressof(self.no_scratch)] * 2
        parameters = (ctypes.c_void_p * len(addresses))(*addresses)
        programs = 1
        for name in step["launch"]["grid"]:
            size = evaluate_size(step["launch"]["axes"][name]["size"], self.symbols)
            programs *= -(-size // binary.blocks[name])
        function = self.device.function(binary)
        threads = self.device.driver.lanes * binary.warps
        return PreparedLaunch(function, programs, threads, binary.shared, parameters)


def index_of(device: torch.device) -> int:
    """The number of a GPU; of the current one if `device` names none."""
    if device.index is not None:
        return device.index
    current: int = torch.get_device_module(device).current_device()
    return current


class StreamPool:
    """A pool of workspaces per stream: a workspace is reused only on the stream that returned it.

    The caller may capture runs in a device graph, whose replays run on any stream at any time: a
    workspace taken during a capture is not reused.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: dict[int, list[torch.Tensor]] = {}

    def _blocks(self) -> list[torch.Tensor]:
        stream = torch_private.current_stream(index_of(self.device))
        return self._free.setdefault(stream, [])

    def take(self, size: int) -> torch.Tensor:
        block = None if torch_private.capturing() else reused(self._blocks(), size)
        if block is None:
            block = torch.empty(size, dtype=torch.uint8, device=self.device)
        return block

    def give(self, block: torch.Tensor) -> None:
        if torch_private.capturing():
            return
        blocks = self._blocks()
        if is_kept(block, blocks, 2, MAX_KEPT):
            blocks.append(block)
        else:
            release(block)

    def result(self, buffer: Buffer) -> Callable[[], torch.Tensor]:
        return fresh_result(buffer, self.device)
