"""Compiled kernels through the launch plan into a driver library that writes launches down.

The library (`cuda_stub.c`) is built here and stands for NVIDIA's; memory of the host stands for the
GPU's. How many parameters a kernel takes, how wide they are and how many threads it was built for
is read from the binary itself, as the real driver does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_stub import MOST, Record, facts_of
from recorder import TritonRecorder, record
from torch import Tensor

from dicp import torch_private
from dicp.cache import Cache
from dicp.config import Config
from dicp.errors import LaunchError, ToolchainError
from dicp.gpu.build import Binary
from dicp.gpu.launch import Device
from dicp.gpu.tiling import Tiling
from dicp.loop.runtime.executable import LoopExecutable
from dicp.loop.runtime.host_memory import HostMemory
from dicp.serialize import bound_sizes
from dicp.vendor.triton import target as triton_target
from dicp.vendor.triton.builder import Builder, Job, Plan, Workers
from dicp.vendor.triton.driver import Driver

HERE = Path(__file__).parent
STREAM = 0x5500_0000_0040


# ---- the driver that writes down -----------------------------------------------------------------


class Stub:
    """The driver library and what it was told."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.count = ctypes.c_uint32.in_dll(self.library, "stub_launch_count")
        self.count.value = 0
        self.library.stub_expect.argtypes = [ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p]
        self.library.stub_dynamic_shared.argtypes = [ctypes.c_uint64]
        self.library.cuCtxSetCurrent.argtypes = [ctypes.c_void_p]
        self.library.cuCtxSetCurrent(None)
        self.driver = Driver(self.library)
        self.known: list[int] = []

    @property
    def unloaded(self) -> int:
        return int(ctypes.c_uint32.in_dll(self.library, "stub_unload_count").value)

    def expect(self, binary: Binary) -> int:
        """Loads a kernel and tells the library which parameters it takes."""
        function = self.driver.function(0, binary)
        widths = facts_of(binary.code, binary.entry).widths
        self.library.stub_expect(function, len(widths), (ctypes.c_uint32 * len(widths))(*widths))
        self.known.append(function)
        return function

    @property
    def launches(self) -> list[Record]:
        return list((Record * MOST).in_dll(self.library, "stub_launches"))[: self.count.value]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(HERE / "cuda_stub.c")]
    subprocess.run([*command, "-o", str(built)], check=True)
    return built


@pytest.fixture
def stub(library: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """The library, under a framework that names one GPU and one stream."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch_private, "current_stream", lambda device: STREAM)
    return Stub(library)


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    workers = Workers()
    folder = tmp_path_factory.mktemp("cubins")
    yield Builder(Cache.open(Config(cache_dir=folder)), workers, 2)
    workers.close()


@dataclass
class Ran:
    """A program that was launched: its plan, kernels, inputs and results."""

    plan: Plan
    jobs: list[Job]
    binaries: list[Binary]
    results: list[Any]


def launched(
    stub: Stub, builder: Builder, fn: Callable[..., Any], *inputs: Any, dynamic: bool = False
) -> Ran:
    """`fn` as it is compiled for sm_90, launched once with `inputs`."""
    (program,) = record(fn, *inputs, dynamic=dynamic, target=TritonRecorder()).programs
    plan = Plan(program.serialized, program.kernel_texts, 90)
    steps = [s for s in program.serialized["steps"] if "kernel" in s]
    sizes = [n for x in inputs if dynamic for n in x.shape]
    executable = LoopExecutable(
        program.serialized, Device(plan, builder, stub.driver, 0), HostMemory()
    )
    given = [*_sizes(program.serialized, sizes), *inputs]
    values = bound_sizes(executable._sources, given)
    symbols = dict(zip(program.serialized["symbols"], values, strict=True))
    jobs = [plan.job(s, plan.variant(s, symbols)) for s in steps]
    binaries = builder.build(jobs)
    stub.library.cuCtxSetCurrent(1)
    for binary in binaries:
        stub.expect(binary)
    results = executable(given)
    return Ran(plan, jobs, binaries, results)


def _sizes(plain: Any, sizes: Sequence[int]) -> list[int]:
    """The sizes that a program takes before its tensors."""
    before = next(k for k, slot in enumerate(plain["inputs"]) if slot is not None)
    return list(dict.fromkeys(sizes))[:before]


def check(stub: Stub, ran: Ran) -> list[Record]:
    """Every launch is what its binary was built for; what they are is returned."""
    found = stub.launches
    assert len(found) == len(ran.binaries)
    for launch, binary, job in zip(found, ran.binaries, ran.jobs, strict=True):
        facts = facts_of(binary.code, binary.entry)
        assert list(launch.block) == [facts.threads, 1, 1] == [32 * binary.warps, 1, 1]
        assert list(launch.grid)[1:] == [1, 1] and launch.shared == binary.shared
        assert launch.stream == STREAM
        pointers, sizes = len(job.launch["elements"]), job.sizes
        wide = 8 if job.variant.wide else 4
        assert facts.widths == [8] * pointers + [wide] * sizes + [8, 8]
        assert list(launch.values)[pointers + sizes : launch.count] == [0, 0]  # no scratch
        for k in range(pointers):
            assert not job.variant.aligned[k] or launch.values[k] % 16 == 0
    return found


def values(launch: Record) -> list[int]:
    return list(launch.values)[: launch.count]


# ---- tests ---------------------------------------------------------------------------------------


def test_a_pointwise_kernel_is_handed_addresses_in_order(stub: Stub, builder: Builder) -> None:
    x, y = (torch.randn(64, 512).to(torch.bfloat16) for _ in range(2))
    ran = launched(stub, builder, lambda x, y: torch.relu(x) * y + 1, x, y)
    (launch,) = check(stub, ran)
    block = ran.binaries[0].blocks["x"]
    assert launch.grid[0] == 64 * 512 // block
    assert values(launch) == [x.data_ptr(), y.data_ptr(), ran.results[0].data_ptr(), 0, 0]


def test_sizes_are_handed_over_by_value(stub: Stub, builder: Builder) -> None:
    x = torch.randn(40, 24)
    ran = launched(stub, builder, lambda x: (x.exp() + 1).sum(1), x, dynamic=True)
    (launch,) = check(stub, ran)
    assert launch.grid[0] == -(-40 // ran.binaries[0].blocks["x"])
    first, second, *sizes, _, _ = values(launch)
    assert (first, second) == (x.data_ptr(), ran.results[0].data_ptr())
    assert sorted(sizes) == [24, 40]


def test_several_kernels_come_in_order(stub: Stub, builder: Builder) -> None:
    x = torch.randn(4096, 96)
    ran = launched(stub, builder, lambda x: (y := torch.softmax(x, 1), (y * x).sum(0)), x)
    assert len(check(stub, ran)) >= 2
    functions = [launch.function for launch in stub.launches]
    assert functions == [stub.driver.function(0, b) for b in ran.binaries]
    written = [values(launch)[len(job.launch["elements"]) - 1]
               for launch, job in zip(stub.launches, ran.jobs, strict=True)]  # fmt: skip
    assert written[-1] == ran.results[1].data_ptr()


def test_checked_indices_and_random_numbers(stub: Stub, builder: Builder) -> None:
    x, i = torch.randn(32, 64), torch.arange(16)
    ran = launched(stub, builder, lambda x, i: F.dropout(x[i], 0.5), x, i)
    found = check(stub, ran)
    assert {x.data_ptr(), i.data_ptr()} <= {v for launch in found for v in values(launch)}


def test_a_product_gets_the_shared_memory_that_it_asks_for(
    stub: Stub, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiling = Tiling(128, 128, 64, 4, 8)
    monkeypatch.setattr(triton_target, "chooser", lambda *_: lambda product: tiling)
    a, b = (torch.randn(256, 256).to(torch.bfloat16) for _ in range(2))
    ran = launched(stub, builder, lambda a, b: torch.relu(a @ b), a, b)
    (launch,) = check(stub, ran)
    assert launch.shared > 49152 and launch.grid[0] == 4
    assert stub.library.stub_dynamic_shared(launch.function) == launch.shared
    assert values(launch) == [a.data_ptr(), b.data_ptr(), ran.results[0].data_ptr(), 0, 0]


def test_a_thread_without_a_context_gets_the_devices(stub: Stub, builder: Builder) -> None:
    x = torch.randn(64)
    ran = launched(stub, builder, lambda x: x * 2, x)
    (program,) = record(lambda x: x * 2, x, target=TritonRecorder()).programs
    executable = LoopExecutable(
        program.serialized, Device(ran.plan, builder, stub.driver, 0), HostMemory()
    )
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(executable([x])))
    thread.start()
    thread.join()
    assert results and len(stub.launches) == 2


def test_what_the_driver_refuses_is_an_error(stub: Stub, builder: Builder) -> None:
    x = torch.randn(64)
    ran = launched(stub, builder, lambda x: x * 2, x)
    table = (ctypes.c_void_p * len(ran.plan.buffers))(*[4096] * len(ran.plan.buffers))
    (step,) = (s for s in ran.plan.program["steps"] if "kernel" in s)
    segment = Device(ran.plan, builder, stub.driver, 0).segment([step], {}, table, None)
    (launch,) = segment._ready()
    with pytest.raises(LaunchError, match="refused by the stub"):
        segment._launch([launch._replace(threads=2048)])
    with pytest.raises(ToolchainError):
        stub.driver.function(0, Binary(b"no binary", "k", 0, 4, {}))


@pytest.mark.sweep
@pytest.mark.usefixtures("own_objects")
def test_code_of_dropped_programs_is_unloaded_but_in_no_capture(
    stub: Stub, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next load: kernels of another program stay, as do those that a user's graph runs."""
    capturing = False
    monkeypatch.setattr(torch_private, "capturing", lambda: capturing)
    x = torch.randn(64)

    def loaded(factor: int) -> LoopExecutable:
        (program,) = record(lambda x: x * factor, x, target=TritonRecorder()).programs
        device = Device(Plan(program.serialized, program.kernel_texts, 90), builder, stub.driver, 0)
        return LoopExecutable(program.serialized, device, HostMemory())

    start = stub.unloaded
    first, second, third = loaded(3), loaded(4), loaded(5)
    first([x]), second([x])
    capturing = True
    third([x])
    del first, third
    gc.collect()
    loaded(6)([x])
    assert stub.unloaded == start, "nothing is unloaded during a capture"
    capturing = False
    gc.collect()
    last = loaded(7)
    last([x])
    assert stub.unloaded == start + 1, "the captured one stays"
    second([x])
    assert len(stub.launches) == 6
    recorded = loaded(8)
    assert isinstance(recorded.loaded.runtime, Device)
    recorded.loaded.runtime.outlives_captures = capturing = True
    recorded([x])
    capturing = False
    del recorded
    gc.collect()
    loaded(9)([x])
    assert stub.unloaded == start + 2


@pytest.mark.skipif(
    not Path(sysconfig.get_paths()["include"], "Python.h").exists(),
    reason="Triton's own launcher is built against Python's headers",
)
def test_tritons_own_launcher_launches_the_same(
    stub: Stub, builder: Builder, library: Path, tmp_path: Path
) -> None:
    """The same binaries with the same arguments, as Triton's driver module hands them over."""

    def several(x: Tensor) -> Any:
        return (y := torch.softmax(x, 1)), y.sum(0)

    x = torch.randn(512, 96)
    ran = launched(stub, builder, several, x, dynamic=True)
    tasks = []
    for launch, job, binary in zip(check(stub, ran), ran.jobs, ran.binaries, strict=True):
        facts = facts_of(binary.code, binary.entry)
        tasks.append({"request": job.request(binary.blocks), "grid": launch.grid[0],
                      "arguments": values(launch)[:-2], "widths": facts.widths})  # fmt: skip
    (library.parent / "libcuda.so").unlink(missing_ok=True)
    (library.parent / "libcuda.so").symlink_to(library)
    environment = {**os.environ, "TRITON_LIBCUDA_PATH": str(library.parent),
                   "TRITON_CACHE_DIR": str(tmp_path), "LD_PRELOAD": str(library),
                   "TRITON_INTERPRET": "0"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(HERE / "own_launcher.py"), str(library), str(STREAM)],
        input=json.dumps(tasks), capture_output=True, text=True, env=environment, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout)
    mine = [{"grid": list(r.grid), "block": list(r.block), "shared": r.shared, "stream": r.stream,
             "values": values(r)} for r in stub.launches]  # fmt: skip
    assert theirs == mine
