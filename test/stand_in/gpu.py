"""A stand-in for a GPU: "cuda" tensors lie in the host's memory, and all that runs, runs there.

A CUDA build of PyTorch believes that there is a GPU of compute capability 9.0 (`runtime.cpp`).
Operators that it would run there are run by the host's, over the same memory. What dicp launches
has been built for the chip (with STAND_IN_BUILDS=0 it is not built, to save time) and comes through
the driver's interface (`driver.cpp`) with the grid and the parameters it would have; it is
interpreted. Streams run at once; what is recorded is repeated.

So this shows what the interpreter alone does not: which operators a GPU is asked for and how,
devices, streams, graphs, launches, grids. It shows nothing of speed, of what runs at the same time,
or of what NVIDIA's libraries compute. Known to differ: `_embedding_bag` gives its second to fourth
results other sizes on the host, and NCCL, cuDNN's CTC loss and fused LSTM cells are missing.

Import it (pytest: `-p stand_in.gpu`) before anything is done on the GPU.
"""

from __future__ import annotations

import ctypes
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from stand_in import operators
from torch.utils import _pytree as pytree

from dicp.gpu.build import Binary
from dicp.vendor.triton.builder import Builder, Job
from dicp.vendor.triton.driver import Driver
from dicp.vendor.triton.simulator import interpreter

BEGIN, END, REPLAY, COPY, SET = range(5)
"""Events, as in `runtime.cpp`."""
FAILED = 999


class Launch(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_ulong), ("stream", ctypes.c_ulong), ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
    ]  # fmt: skip


EVENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Launch))


class Gpu:
    """The one device, and what is recorded on it."""

    def __init__(self) -> None:
        self.runtime = ctypes.CDLL(os.environ["STAND_IN_RUNTIME"])
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.recording: list[Callable[[], Any]] | None = None
        self.recordings: dict[int, list[Callable[[], Any]]] = {}
        self.launches = 0
        self._kernels: dict[int, tuple[Job, Binary]] = {}
        self._made: dict[bytes, tuple[Job, Binary]] = {}
        self._functions: dict[tuple[str, str], Any] = {}
        self._callbacks = (EVENT(self._event), LAUNCH(self._launched))
        self.runtime.stand_in_callback(self._callbacks[0])
        self.driver.stand_in_launches(self._callbacks[1])

    def do(self, work: Callable[[], Any]) -> None:
        """Runs `work` now, or whenever what is being recorded is replayed."""
        if self.recording is not None:
            self.recording.append(work)
        else:
            work()

    def _event(self, event: int, a: int, b: int, c: int) -> None:
        if event == BEGIN:
            self.recording = self.recordings[a] = []
        elif event == END:
            self.recording = None
        elif event == REPLAY:
            for work in self.recordings[a]:
                work()
        elif self.recording is not None:
            move = ctypes.memmove if event == COPY else ctypes.memset
            self.recording.append(lambda: move(a, b, c))

    # ---- launches -------------------------------------------------------------------------------

    def follow(self, build: bool) -> None:
        """Notes which kernel is behind each handle; `build=False` builds none."""
        build_one, function = Builder.build_one, Driver.function

        def built(builder: Builder, job: Job) -> Binary:
            binary = build_one(builder, job) if build else _unbuilt(job)
            self._made[binary.code] = job, binary
            return binary

        def loaded(driver: Driver, device: int, binary: Binary) -> int:
            handle = function(driver, device, binary)
            self._kernels[handle] = self._made[binary.code]
            return handle

        Builder.build_one, Driver.function = built, loaded  # type: ignore[method-assign]

    def _launched(self, pointer: Any) -> int:
        try:
            launch = pointer.contents
            job, binary = self._kernels[launch.function]
            addresses, sizes = self._parameters(job, launch.parameters)
            assert launch.block[0] == 32 * binary.warps and launch.shared == binary.shared
            self._check(job, addresses, sizes)
            programs = launch.grid[0]
            self.launches += 1
            self.do(lambda: self._interpret(job, binary, addresses, sizes, programs))
        except BaseException:
            traceback.print_exc()
            return FAILED
        return 0

    def _parameters(self, job: Job, given: Any) -> tuple[list[int], list[int]]:
        def read(position: int, kind: Any) -> int:
            return int(ctypes.cast(given[position], ctypes.POINTER(kind))[0])

        count = len(job.launch["elements"])
        kind = ctypes.c_int64 if job.variant.wide else ctypes.c_int32
        addresses = [read(k, ctypes.c_uint64) for k in range(count)]
        sizes = [read(count + k, kind) for k in range(job.sizes)]
        assert [read(count + job.sizes + k, ctypes.c_uint64) for k in range(2)] == [0, 0]
        return addresses, sizes

    def _check(self, job: Job, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        """Holds a launch to what its kernel was built to count on."""
        for aligned, address in zip(job.variant.aligned, addresses, strict=True):
            assert not aligned or address % 16 == 0, f"{job.name}: {address:x} is not aligned"
            on_device = not address or self.runtime.stand_in_is_device(ctypes.c_void_p(address))
            assert on_device, f"{job.name}: {address:x} is not the device's memory"
        assert not job.variant.even or all(size % 16 == 0 for size in sizes), f"{job.name}: {sizes}"

    def _interpret(
        self,
        job: Job,
        binary: Binary,
        addresses: Sequence[int],
        sizes: Sequence[int],
        programs: int,
    ) -> None:
        host = interpreter()
        kernel = self._functions.get((job.name, job.body))
        if kernel is None:
            kernel = self._functions[job.name, job.body] = host.function(job.name, job.body)
        pointers = [
            host.pointer(address, host.pointer_type(element))
            for address, element in zip(addresses, job.launch["elements"], strict=True)
        ]
        index = host.language.int64 if job.variant.wide else host.language.int32
        args = [*pointers, *map(host.runtime._implicit_cvt, sizes), index]
        args += [*binary.blocks.values(), *job.launch.get("constants", {}).values()]
        with operators.below_autograd():
            host.run(kernel, programs, args)


def _unbuilt(job: Job) -> Binary:
    code = repr(job.request(job.blocks())).encode()
    return Binary(code, job.name, 0, job.launch["warps"], job.blocks())


# ---- tensors -------------------------------------------------------------------------------------


def on_host(t: torch.Tensor) -> torch.Tensor:
    """A tensor of the host over the same memory."""
    storage = t.untyped_storage()
    size, address = storage.nbytes(), storage.data_ptr()
    if not size or not address:
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype)
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
    elements = torch.from_numpy(memory)[: size // t.element_size() * t.element_size()].view(t.dtype)
    shown = torch.as_strided(elements, t.size(), t.stride(), t.storage_offset())
    return shown.conj() if t.is_conj() else shown


def on_device(t: torch.Tensor) -> torch.Tensor:
    """A tensor of the device that lies as `t` does."""
    copy = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cuda")
    if t.numel():
        on_host(copy).copy_(t)
    return copy


def is_on_device(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "cuda"


def tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


GPU = Gpu()
GPU.follow(build=os.environ.get("STAND_IN_BUILDS", "1") != "0")
operators.install(GPU, on_host, on_device)
