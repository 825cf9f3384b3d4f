"""Tiles, variants, builds and launches of Triton kernels: what can be said of them without a GPU.

The driver is a stand-in that writes down what it is asked; the compiler is the real one.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recorder import TritonRecorder, record
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from dicp import torch_private
from dicp.cache import Cache
from dicp.config import Config
from dicp.dynamo_bridge.backend import Backend
from dicp.errors import (
    CompilerError,
    DeviceMovedError,
    FallbackWarning,
    LaunchError,
    SimulatorForbiddenError,
    ToolchainError,
)
from dicp.gpu import tiles
from dicp.gpu.build import Binary, Variant
from dicp.gpu.launch import Device
from dicp.loop.ir.index import Var
from dicp.loop.ir.kernel import Kernel
from dicp.target import LowerContext, find_target
from dicp.vendor.triton import TritonTarget, aot, builder, driver
from dicp.vendor.triton.builder import Builder, Job, Plan, Workers
from dicp.vendor.triton.driver import Driver
from dicp.vendor.triton.facts import GPU
from dicp.vendor.triton.simulator import simulated_blocks

COPY = """(a0, a1, n0, INDEX: tl.constexpr, XBLOCK: tl.constexpr):
    xi = tl.program_id(0).to(INDEX) * XBLOCK + tl.arange(0, XBLOCK)
    xm = xi < n0
    tl.store(a1 + xi, tl.load(a0 + xi, xm, other=0), xm)
"""
LAUNCH = {
    "elements": ["fp32", "fp32"], "grid": ["x"], "warps": 4, "checks": False, "whole": False,
    "reaches": [], "axes": {"x": {"size": "s0", "block": 256, "masked": True}},
}  # fmt: skip


def job(body: str = COPY, arch: int = 90, **changes: Any) -> Job:
    return Job("copy", body, {**LAUNCH, **changes}, 1, Variant(arch, False, (True, True)), ("op",))


@pytest.fixture
def workers() -> Iterator[Workers]:
    found = Workers()
    yield found
    found.close()


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache.open(Config(cache_dir=tmp_path))


# ---- tiles ---------------------------------------------------------------------------------------


def kernel(kind: Any, rows: tuple[int, ...], inner: tuple[int, ...] = ()) -> Kernel:
    sizes = [Var(k, s) for k, s in enumerate((*rows, *inner))]
    return Kernel(kind, tuple(sizes[: len(rows)]), tuple(sizes[len(rows) :]), (), ())


def test_blocks_are_powers_of_two_and_programs_many_enough() -> None:
    for count in (1, 31, 1000, 65536, 10**6, 10**9):
        tile = tiles.pointwise(kernel("pointwise", (count,)), GPU)
        block = tile.blocks["x"]
        assert block & (block - 1) == 0 and 32 <= block <= 1024
        assert 1 <= tile.warps <= 4
    assert tiles.pointwise(kernel("pointwise", (10**9,)), GPU).blocks["x"] == 1024
    assert tiles.pointwise(kernel("pointwise", (65536,)), GPU).blocks["x"] == 128


def test_short_rows_stay_in_registers_and_long_ones_are_walked() -> None:
    short = tiles.reduction(kernel("inner_reduction", (4096,), (768,)), GPU)
    assert short.persistent and short.blocks["r"] == 1024
    long = tiles.reduction(kernel("inner_reduction", (64,), (50257,)), GPU)
    assert not long.persistent and long.blocks == {"x": 1, "r": 2048}
    column = tiles.reduction(kernel("outer_reduction", (768,), (4096,)), GPU)
    assert not column.persistent and column.blocks == {"x": 16, "r": 256}


@pytest.mark.parametrize(
    "op, shape, dtype, tile",
    [
        (torch.softmax, (4096, 1024), torch.bfloat16, (1, 1)),
        (torch.softmax, (4096, 700), torch.bfloat16, (1, 1)),
        (torch.softmax, (4096, 512), torch.float32, (2, 1)),
        (torch.softmax, (4096, 3000), torch.float32, (1, 4)),
        (torch.logsumexp, (4096, 1024), torch.bfloat16, (2, 1)),
        (torch.softmax, (4096, 1024), torch.float64, (2, 4)),
        (torch.softmax, (1024, 1024), torch.bfloat16, (2, 4)),
        (torch.softmax, (4096, 256), torch.bfloat16, (8, 4)),
    ],
)
def test_many_rows_have_a_warp_each(op: Any, shape: Any, dtype: Any, tile: Any) -> None:
    """Where they are long, few enough of them have to be kept, and there is something to read."""
    x = torch.empty(shape, dtype=dtype)
    (program,) = record(lambda x: op(x, -1), x, target=TritonRecorder()).programs
    launch = program.serialized["steps"][0]["launch"]
    assert (launch["axes"]["x"]["block"], launch["warps"]) == tile


def test_what_is_turned_around_spans_whole_lines_both_ways() -> None:
    assert tiles.transposed(4096, 4096, 4, GPU).blocks == {"y": 32, "x": 32}
    assert tiles.transposed(4096, 4096, 2, GPU).blocks == {"y": 64, "x": 64}
    assert tiles.transposed(8, 4096, 8, GPU).blocks == {"y": 8, "x": 32}


def test_the_simulator_runs_few_programs_and_keeps_to_whole_blocks() -> None:
    launch = {"grid": ["x"], "axes": {"x": {"size": 4096, "block": 128, "masked": False}}}
    blocks, programs = simulated_blocks(launch, {})
    assert programs * blocks[0] == 4096 and programs <= 3
    odd = {"grid": ["x"], "axes": {"x": {"size": 3 * 128, "block": 128, "masked": False}}}
    assert simulated_blocks(odd, {}) == ([128], 3)
    masked = {"grid": ["x"], "axes": {"x": {"size": "s0", "block": 128, "masked": True}}}
    assert simulated_blocks(masked, {"s0": 100_000}) == ([65536], 2)


# ---- variants ------------------------------------------------------------------------------------


def plan_of(fn: Callable[..., Any], *inputs: Tensor, dynamic: bool = False) -> Plan:
    (program,) = record(fn, *inputs, dynamic=dynamic, target=TritonRecorder()).programs
    return Plan(program.serialized, program.kernel_texts, 90)


def first_kernel(plan: Plan) -> Mapping[str, Any]:
    return next(s for s in plan.program["steps"] if "kernel" in s)


def test_pointers_are_aligned_unless_their_input_is_not() -> None:
    plan = plan_of(lambda x: torch.relu(x) * 2, torch.ones(64))
    step = first_kernel(plan)
    assert plan.variant(step, {}) == Variant(90, False, (True, True))
    source = step["args"][0]
    assert plan.variant(step, {}, frozenset({source})).aligned == (False, True)


def test_a_view_at_an_odd_place_is_not_aligned() -> None:
    whole = {"name": "t", "role": "temp", "dtype": "float32", "shape": [64], "strides": [1],
             "offset": 0, "base": None}  # fmt: skip
    views = [{**whole, "role": "alias", "base": 0, "offset": n} for n in (3, 4, "s0")]
    step = {"kernel": "copy", "args": [0, 1, 2, 3], "symbols": [], "origins": [], "launch": LAUNCH}
    plan = Plan({"buffers": [whole, *views], "steps": [step]}, {"copy": COPY}, 90)
    assert plan.variant(step, {"s0": 4}).aligned == (True, False, True, False)


def test_indices_are_wide_only_where_sizes_need_it() -> None:
    plan = plan_of(lambda x: x + 1, torch.ones(4, 8), dynamic=True)
    step = first_kernel(plan)
    names = list(plan.program["symbols"])
    assert plan.variant(step, None).wide is False
    assert plan.variant(step, dict.fromkeys(names, 16)).wide is False
    assert plan.variant(step, dict.fromkeys(names, 2**16)).wide is True


def windows(x: Tensor) -> Tensor:
    return torch.nn.functional.adaptive_avg_pool1d(x, 60_000)


def test_interpreted_indices_are_wide_for_elements_far_apart(tmp_path: Path) -> None:
    x = torch.empty(2**32 + 1, dtype=torch.int8)[:: 2**31]  # memory of which 3 pages are used
    x.copy_(torch.tensor([1, 2, 3]))
    torch._dynamo.reset()
    got = torch.compile(lambda x: x + 1, backend=Backend("triton", cache_dir=tmp_path))(x)
    assert got.tolist() == [2, 3, 4]


def test_indices_are_wide_where_they_are_divided_beyond_32_bits() -> None:
    for size, wide in ((100_001, True), (10_001, False)):
        plan = plan_of(windows, torch.ones(1, 1, size))
        assert plan.variant(first_kernel(plan), {}).wide is wide


def test_windows_beyond_32_bits_lie_where_they_should() -> None:
    x = torch.randn(1, 1, 100_001)
    found = torch.compile(windows, backend="tritongraph", dynamic=False)(x)
    assert_close(found, windows(x))


def test_numbers_made_of_sizes_are_handed_over_whole() -> None:
    plan = plan_of(lambda x: x * x.shape[0] ** 3, torch.ones(8), dynamic=True)
    step, (name, *_) = first_kernel(plan), plan.program["symbols"]
    assert [plan.variant(step, {name: size}).wide for size in (1000, 2000)] == [False, True]


def test_even_sizes_are_told_to_the_compiler() -> None:
    plan = plan_of(lambda x: x + 1, torch.ones(4, 8), dynamic=True)
    step, names = first_kernel(plan), list(plan.program["symbols"])
    assert plan.variant(step, dict.fromkeys(names, 32)).even
    assert not plan.variant(step, dict.fromkeys(names, 33)).even


# ---- builds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [80, 90])
def test_a_kernel_takes_its_pointers_its_sizes_and_two_scratch_pointers(
    arch: int, workers: Workers
) -> None:
    one = job(arch=arch)
    answer = workers.compile(one.request(one.blocks()))
    assert "error" not in answer, answer
    parameters = [x for x in answer["ptx"].splitlines() if x.strip().startswith(".param")]
    widths = [p.split()[1] for p in parameters]
    assert widths == [".u64", ".u64", ".u32", ".u64", ".u64"]
    assert answer["scratch"] == 0 and answer["warps"] == 4


def test_wide_indices_take_wide_sizes(workers: Workers) -> None:
    one = replace(job(), variant=Variant(90, True, (True, True)))
    answer = workers.compile(one.request(one.blocks()))
    assert ".param .u64 copy_param_2" in answer["ptx"]


def test_a_build_is_kept_and_not_repeated(cache: Cache, workers: Workers) -> None:
    first = Builder(cache, workers, 1).build([job()])
    asked: list[Any] = []
    other = Workers()
    other.compile = asked.append  # type: ignore[assignment]
    assert Builder(cache, other, 1).build([job()]) == first
    assert not asked


def test_what_the_compiler_refuses_is_named(cache: Cache, workers: Workers) -> None:
    broken = job("(a0, a1, n0, INDEX: tl.constexpr, XBLOCK: tl.constexpr):\n    tl.nonsense(a0)\n")
    with pytest.raises(CompilerError, match="nonsense") as caught:
        Builder(cache, workers, 1).build([broken])
    assert caught.value.kernel_sources == ("op",) and "sm_90" in str(caught.value)


def test_workers_compile_whatever_the_environment_asks_of_triton(
    cache: Cache, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert Builder(cache, workers, 1).build([job()])[0].entry == "copy"


def test_a_worker_that_ended_while_it_waited_is_replaced(cache: Cache, workers: Workers) -> None:
    workers.warm_up(1)
    process = workers._idle.get()
    process.process.terminate()
    process.process.wait(60)
    workers._idle.put(process)
    assert Builder(cache, workers, 1).build([job()])[0].entry == "copy"


def test_a_worker_that_dies_is_replaced(cache: Cache, workers: Workers) -> None:
    deadly = job("(a0, a1, n0, INDEX, XBLOCK):\n    pass\n\nimport os; os.abort()")
    with pytest.raises(CompilerError, match="the compile worker died"):
        Builder(cache, workers, 1).build([deadly])
    assert Builder(cache, workers, 1).build([job()])[0].entry == "copy"


class Fat(Workers):
    """A compiler whose kernels need 2 KiB of shared memory per element of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.tried: list[int] = []

    def compile(self, request: Mapping[str, Any]) -> dict[str, Any]:
        block = max(v for k, v in request["constants"].items() if k.endswith("BLOCK"))
        self.tried.append(block)
        return {"binary": "", "ptx": "", "entry": "copy", "shared": 2048 * block, "warps": 4}


def test_blocks_shrink_until_shared_memory_suffices(cache: Cache) -> None:
    fat = Fat()
    with pytest.warns(FallbackWarning, match=r"blocks of {'x': 64} in the place of {'x': 256}"):
        (binary,) = Builder(cache, fat, 1).build([job()])
    assert fat.tried == [256, 128, 64] and binary.blocks == {"x": 64}
    whole_row = job(axes={"r": {"block": 1024, "size": 1024, "masked": False}}, whole=True)
    with pytest.raises(CompilerError, match="out of shared memory"):
        Builder(cache, fat, 1).build([whole_row])


def test_a_compiler_that_runs_out_of_shared_memory_itself_is_asked_for_less(cache: Cache) -> None:
    class Short(Fat):
        def compile(self, request: Mapping[str, Any]) -> dict[str, Any]:
            answer = super().compile(request)
            if answer["shared"] <= 1 << 17:
                return answer
            return {"error": "out of resource: shared memory, Required: 524288"}

    with pytest.warns(FallbackWarning, match=r"blocks of {'x': 64} in the place of {'x': 256}"):
        (binary,) = Builder(cache, Short(), 1).build([job()])
    assert binary.blocks == {"x": 64}


def test_a_kernel_that_wants_memory_of_its_own_is_refused(cache: Cache) -> None:
    class Wanting(Workers):
        def compile(self, request: Mapping[str, Any]) -> dict[str, Any]:
            return {"binary": "", "entry": "copy", "shared": 0, "warps": 4, "scratch": 128}

    with pytest.raises(CompilerError, match="memory of its own"):
        Builder(cache, Wanting(), 1).build([job()])


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise builder.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(builder.importlib.metadata, "version", missing)
    builder.triton_version.cache_clear()
    try:
        with pytest.raises(ToolchainError, match=r"pip install 'dicp\[triton\]'"):
            builder.triton_version()
    finally:
        builder.triton_version.cache_clear()


def test_every_kernel_of_a_cache_folder_is_built(tmp_path: Path, capsys: Any) -> None:
    assert aot.main([str(tmp_path)]) == 1
    assert "0 of 0 kernels built" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        aot.main([str(tmp_path / "none")])
    assert "there is no folder" in capsys.readouterr().err and not (tmp_path / "none").exists()


# ---- launches ------------------------------------------------------------------------------------


class StandIn:
    """NVIDIA's driver library: writes launches down, results as it is told."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.loaded: list[bytes] = []
        self.result = 0

        class Entry:
            def __init__(self, run: Callable[..., int]) -> None:
                self.run = run
                self.argtypes: Any = None

            def __call__(self, *args: Any) -> int:
                return self.run(*args)

        self.cuLaunchKernel = Entry(self._launch)
        self.cuModuleLoadData = Entry(self._load)
        self.cuModuleGetFunction = Entry(self._function)
        self.cuModuleUnload = Entry(lambda *args: 0)
        self.cuFuncSetAttribute = Entry(lambda *args: 0)
        self.cuGetErrorString = Entry(lambda code, text: 0)
        self.context = 1
        self.cuCtxGetCurrent = Entry(lambda context: self._give(context, self.context))
        self.cuCtxSetCurrent = Entry(self._enter)
        self.cuDeviceGet = Entry(lambda handle, device: 0)
        self.cuDevicePrimaryCtxRetain = Entry(lambda context, handle: self._give(context, 1))

    def _give(self, context: Any, value: int) -> int:
        ctypes.cast(context, ctypes.POINTER(ctypes.c_void_p))[0] = value
        return 0

    def _enter(self, context: Any) -> int:
        self.context = context.value
        return 0

    def _load(self, module: Any, code: bytes) -> int:
        self.loaded.append(code)
        ctypes.cast(module, ctypes.POINTER(ctypes.c_void_p))[0] = len(self.loaded)
        return self.result

    def _function(self, function: Any, module: Any, name: bytes) -> int:
        ctypes.cast(function, ctypes.POINTER(ctypes.c_void_p))[0] = 100 + module
        return 0

    def _launch(self, function: int, x: int, y: int, z: int, threads: int, *rest: Any) -> int:
        _, _, shared, stream, parameters, _ = rest
        if not self.context:
            return 201
        values = [ctypes.cast(p, ctypes.POINTER(ctypes.c_int64))[0] for p in parameters]
        self.launches.append((function, x, threads, shared, stream, values))
        return self.result


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch_private, "current_stream", lambda device: 77)
    return StandIn()


class Named(Builder):
    """A builder whose binaries are the jobs' descriptions."""

    def __init__(self) -> None:
        self.jobs_seen: list[Job] = []

    def build(self, jobs: Any) -> list[Binary]:
        self.jobs_seen += jobs
        return [Binary(f"{j.name} {j.variant}".encode(), j.name, 0, j.launch["warps"], j.blocks())
                for j in jobs]  # fmt: skip


def test_a_segment_launches_on_the_stream_with_addresses_and_sizes(gpu: StandIn) -> None:
    plan = plan_of(lambda x: (x + 1).sum(1), torch.ones(40, 24), dynamic=True)
    steps = [s for s in plan.program["steps"] if "kernel" in s]
    names = list(plan.program["symbols"])
    sizes = dict(zip(names, (40, 24), strict=True))
    table = (ctypes.c_void_p * len(plan.buffers))()
    for k in range(len(plan.buffers)):
        table[k] = 4096 * (k + 1)
    device = Device(plan, Named(), Driver(gpu), 0)
    segment = device.segment(steps, sizes, table, None)
    assert segment.run() == 0
    (function, programs, threads, _, stream, values), *rest = gpu.launches
    assert not rest and stream == 77 and function > 100
    launch = steps[0]["launch"]
    assert threads == 32 * launch["warps"]
    assert programs == -(-40 // launch["axes"]["x"]["block"])
    assert values[: len(steps[0]["args"])] == [4096 * (s + 1) for s in steps[0]["args"]]


LIBRARY = """
extern "C" {
unsigned long seen[8];
int cuModuleLoadData(void** module, const char*) { *module = (void*)5; return 0; }
int cuModuleGetFunction(void** f, void*, const char*) { *f = (void*)0x123456789abcul; return 0; }
int cuModuleUnload(void*) { return 0; }
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuCtxGetCurrent(void** context) { *context = (void*)1; return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuDeviceGet(int*, int) { return 0; }
int cuDevicePrimaryCtxRetain(void**, int) { return 0; }
int cuGetErrorString(int, const char** text) { *text = "refused"; return 0; }
int cuLaunchKernel(void* f, unsigned x, unsigned, unsigned, unsigned threads, unsigned, unsigned,
                   unsigned shared, void* stream, void** parameters, void**) {
  unsigned long now[] = {(unsigned long)f, x, threads, shared, (unsigned long)stream,
                         *(unsigned long*)parameters[0], *(unsigned long*)parameters[1],
                         *(unsigned*)parameters[2]};
  for (int k = 0; k < 8; ++k) seen[k] = now[k];
  return 0;
}
}
"""


def test_a_launch_crosses_into_the_drivers_library(gpu: StandIn, tmp_path: Path) -> None:
    source, built = tmp_path / "cuda.cpp", tmp_path / "libcuda.so"
    source.write_text(LIBRARY)
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(built)], check=True)
    library = ctypes.CDLL(str(built))
    plan = plan_of(lambda x: torch.relu(x) + 1, torch.ones(40, 25), dynamic=True)
    step = first_kernel(plan)
    assert len(step["args"]) == 2 and len(step["symbols"]) == 1
    high = 0x7F00_0000_1000  # an address that needs all eight bytes
    table = (ctypes.c_void_p * len(plan.buffers))()
    for k in range(len(plan.buffers)):
        table[k] = high + 4096 * k
    sizes = dict(zip(plan.program["symbols"], (40, 25), strict=True))
    Device(plan, Named(), Driver(library), 0).segment([step], sizes, table, None).run()
    seen = list((ctypes.c_ulong * 8).in_dll(library, "seen"))
    block, warps = step["launch"]["axes"]["x"]["block"], step["launch"]["warps"]
    assert seen[:5] == [0x1234_5678_9ABC, -(-1000 // block), 32 * warps, 0, 77]
    assert seen[5:] == [high + 4096 * step["args"][0], high + 4096 * step["args"][1], 1000]


def test_a_misaligned_input_gets_a_kernel_of_its_own(gpu: StandIn) -> None:
    plan = plan_of(lambda x: x * 2, torch.ones(64))
    step = first_kernel(plan)
    table = (ctypes.c_void_p * len(plan.buffers))(*[4096] * len(plan.buffers))
    named = Named()
    segment = Device(plan, named, Driver(gpu), 0).segment([step], {}, table, None)
    segment.run()
    segment.run()
    assert [j.variant.aligned for j in named.jobs_seen] == [(True, True)]
    table[step["args"][0]] = 4100
    segment.run()
    assert [j.variant.aligned for j in named.jobs_seen[1:]] == [(False, True)]
    assert len(gpu.launches) == 3


def test_a_launch_the_driver_refuses_names_kernel_and_operators(gpu: StandIn) -> None:
    plan = plan_of(lambda x: x * 2, torch.ones(64))
    step = first_kernel(plan)
    table = (ctypes.c_void_p * len(plan.buffers))(*[4096] * len(plan.buffers))
    segment = Device(plan, Named(), Driver(gpu), 0).segment([step], {}, table, None)
    segment.run()
    gpu.result = 719
    with pytest.raises(LaunchError, match=r"aten\.mul\.Tensor") as caught:
        segment.run()
    assert caught.value.kernel == step["kernel"]


def test_a_launch_refused_in_a_profiled_run_names_its_own_kernel(gpu: StandIn) -> None:
    plan = plan_of(lambda x: torch.cumsum(x.sum(1), 0).exp(), torch.ones(64, 4096))
    steps = [s for s in plan.program["steps"] if "kernel" in s]
    assert len(steps) > 1
    table = (ctypes.c_void_p * len(plan.buffers))(*[4096] * len(plan.buffers))
    segment = Device(plan, Named(), Driver(gpu), 0).segment(steps, {}, table, None)
    segment.run()
    gpu.result = 719
    for position, step in enumerate(steps):
        with pytest.raises(LaunchError) as caught:
            segment.run_one(position)
        assert caught.value.kernel == step["kernel"]


def test_a_thread_without_a_context_enters_the_devices(gpu: StandIn) -> None:
    plan = plan_of(lambda x: x * 2, torch.ones(64))
    step = first_kernel(plan)
    table = (ctypes.c_void_p * len(plan.buffers))(*[4096] * len(plan.buffers))
    gpu.context = 0
    segment = Device(plan, Named(), Driver(gpu), 0).segment([step], {}, table, None)
    segment.run()
    assert gpu.context == 1 and len(gpu.launches) == 1
    gpu.context = 0  # as in a thread that comes later, the kernel being loaded
    segment.run()
    assert gpu.context == 1 and len(gpu.launches) == 2


def test_a_scatter_of_nothing_is_not_launched(gpu: StandIn) -> None:
    def add(x: Tensor, i: Tensor, v: Tensor) -> Tensor:
        return x.index_add(0, i, v)

    inputs = torch.ones(4, 8), torch.zeros(2, dtype=torch.int64), torch.ones(2, 8)
    plan = plan_of(add, *inputs, dynamic=True)
    *_, step = (s for s in plan.program["steps"] if "kernel" in s)
    table = (ctypes.c_void_p * len(plan.buffers))(*[4096] * len(plan.buffers))
    names = list(plan.program["symbols"])
    device = Device(plan, Named(), Driver(gpu), 0)
    for size, launches in ((8, 1), (0, 1)):
        device.segment([step], dict.fromkeys(names, size), table, None).run()
        assert len(gpu.launches) == launches


def test_a_driver_too_old_is_named(gpu: StandIn) -> None:
    gpu.result = 222
    with pytest.raises(ToolchainError, match="a newer NVIDIA driver"):
        Driver(gpu).function(0, Binary(b"code", "k", 0, 4, {}))


# ---- graphs of a GPU -----------------------------------------------------------------------------


def test_a_scalar_of_the_host_is_copied_once_for_all_generated_operators() -> None:
    with FakeTensorMode():
        x, count = torch.empty(8, device="cuda:0"), torch.empty(())
        gm = make_fx(lambda x, count: (x * count + 1, x / (count + 1), count + 1))(x, count)
    program = TritonTarget().lower(gm, LowerContext(Config(), "inference"))
    names = [s.get("call", "kernel") for s in program.serialized["steps"]]
    assert names.count("aten::_to_copy.") == 2  # of the count, and of what the host adds to it
    copies = [s for s in program.serialized["steps"] if s.get("call") == "aten::_to_copy."]
    waits = sorted(not s["kwargs"]["non_blocking"] for s in copies)
    assert waits == [False, True]  # only for the number that the caller may change
    eager = {n.op for n in program.nodes if n.decision == "eager"}
    assert eager == {"aten._to_copy.default", "aten.add.Tensor"}  # what the host itself adds
    assert {n.op for n in program.nodes if n.decision == "compiled"} >= {
        "aten.mul.Tensor", "aten.div.Tensor",
    }  # fmt: skip


@pytest.mark.parametrize(("device", "started"), [("cuda:0", 2), ("cpu", 0)])
def test_workers_start_beside_the_front_end_where_a_gpu_is_compiled_for(
    cache: Cache, device: str, started: int
) -> None:
    with FakeTensorMode():
        gm = make_fx(torch.sin)(torch.empty(8, device=device))
    for node in gm.graph.nodes:  # as Dynamo names what AOTAutograd calls "val"
        node.meta["example_value"] = node.meta.pop("val", None)
    target = TritonTarget()
    try:
        target.prepare(gm, False, cache, Config(compile_jobs=2))
        assert target._workers._idle.qsize() == started
    finally:
        target._workers.close()


# ---- where it runs -------------------------------------------------------------------------------


def test_the_simulator_may_be_forbidden() -> None:
    gm = make_fx(torch.sin, tracing_mode="fake")(torch.ones(3))
    context = LowerContext(Config(runs_on="device"), "inference")
    with pytest.raises(SimulatorForbiddenError, match="device of type 'cuda'"):
        TritonTarget().lower(gm, context)
    compiled = torch.compile(torch.sin, backend=Backend("triton", runs_on="device", cache=False))
    with pytest.raises(BackendCompilerFailed, match="device of type 'cuda'"):
        compiled(torch.ones(3))


def test_a_machine_without_a_driver_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARIES", ("libno-such-driver.so",))
    driver.find_driver.cache_clear()
    try:
        with pytest.raises(ToolchainError, match=r"libno-such-driver\.so.*Install the driver"):
            driver.find_driver()
    finally:
        driver.find_driver.cache_clear()


def on_devices(*names: str) -> list[Tensor]:
    with FakeTensorMode():
        return [torch.empty(8 if n != "number" else (), device=n if n != "number" else "cpu")
                for n in names]  # fmt: skip


def test_inputs_on_another_kind_of_device_are_refused_by_name() -> None:
    backend = Backend("triton")
    gm = make_fx(lambda x, y: x + 1)(torch.ones(3), torch.ones(3))
    with pytest.raises(DeviceMovedError, match=r"on cuda:0 \(x_1\) and xpu:0 \(y_1\)\. Move"):
        backend(gm, on_devices("cuda:0", "xpu:0"))
    for host in ("cpu", "number"):
        target, _ = backend._target_and_config(gm, on_devices("cuda:0", host), {})
        assert target.name == "triton"


def test_what_lies_on_the_host_is_moved_where_the_graph_says_so() -> None:
    with FakeTensorMode():
        x, weight = torch.empty(8), torch.empty(8, device="cuda:0")
        gm = make_fx(lambda x, w: (x.to("cuda:0") * w + 1,))(x, weight)
    program = TritonTarget().lower(gm, LowerContext(Config(), "inference"))
    reasons = {n.op: n.reason for n in program.nodes if n.decision == "eager"}
    assert reasons == {"aten._to_copy.default": "tensor on cpu in a graph on cuda:0"}
    assert program.kernel_texts


def test_what_lies_on_another_gpu_is_left_to_eager_with_the_reason() -> None:
    with FakeTensorMode():
        x, y = (torch.empty(8, device=f"cuda:{k}") for k in range(2))
        gm = make_fx(lambda x, y: (x + 1, y * 2))(x, y)
    program = TritonTarget().lower(gm, LowerContext(Config(), "inference"))
    reasons = {n.op: n.reason for n in program.nodes if n.decision == "eager"}
    assert reasons == {"aten.mul.Tensor": "tensor on cuda:1 in a graph on cuda:0"}


def test_a_failed_assertion_names_the_operator_and_the_line(workers: Workers) -> None:
    """The message that the device prints lies in the binary; kernels without checks have none."""

    def pick(x: Tensor, i: Tensor) -> Tensor:
        return x[i] + 1

    plan = plan_of(pick, torch.ones(8), torch.tensor([1, 2]))
    (one,) = plan.jobs()
    code = base64.b64decode(workers.compile(one.request(one.blocks()))["binary"])
    message = re.search(rb"index out of range: [ -~]+", code)
    assert message and re.search(rb"aten\.index\.Tensor.*test_triton_launch\.py:\d+", message[0])
    plain = job()
    code = base64.b64decode(workers.compile(plain.request(plain.blocks()))["binary"])
    assert b"out of range" not in code


def test_doctor_builds_a_kernel() -> None:
    checks = {c.name: c for c in find_target("triton").doctor(Config())}
    assert checks["triton"].ok and checks["build"].ok, checks
    assert ("simulator" in checks) != torch.cuda.is_available()
    refused = {c.name: c.ok for c in find_target("triton").doctor(Config(runs_on="device"))}
    assert refused.get("simulator", False) is False
