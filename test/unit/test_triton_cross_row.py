"""Cross-row reductions: fused into the kernels that reduce those rows, or split."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorder import TritonRecorder, record
from torch import Tensor

from dicp.cache import Cache
from dicp.compare import assert_matches
from dicp.config import Config
from dicp.dynamo_bridge.backend import Backend
from dicp.gpu import tiles
from dicp.gpu.tiling import Tiling
from dicp.loop.schedule import kernels
from dicp.vendor.triton import aot, target
from dicp.vendor.triton.builder import Plan, Workers
from dicp.vendor.triton.facts import GPU

pytestmark = pytest.mark.sweep


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def rms_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    wide = x.float() if x.dtype != torch.float64 else x
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    return (wide * scale).to(x.dtype) * weight + bias


NORMS = {"layer norm": layer_norm, "rms norm": rms_norm}
SHAPES = [(1024, 96), (8, 128, 64), (2048, 16), (1031, 48), (3, 359, 64)]
"""With and without a divisor that gives enough parts."""


def inputs_of(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    found = [torch.randn(shape), torch.rand(shape[-1]) + 0.5, torch.rand(shape[-1])]
    return [t.to(dtype).requires_grad_() for t in found]


def gradients(fn: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    fn(*leaves).square().sum().backward()
    return [t.grad for t in leaves if t.grad is not None]


def check_gradients(
    compiled: Callable[..., Tensor], fn: Callable[..., Tensor], inputs: list[Tensor]
) -> None:
    mine, eager = gradients(compiled, inputs), gradients(fn, inputs)
    truth = gradients(fn, [t.double() for t in inputs])
    assert len(mine) == len(inputs)
    for got, theirs, real in zip(mine, eager, truth, strict=True):
        assert_matches(got, theirs, real)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_gradients(name: str, shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    fn = NORMS[name]
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=Backend("triton", cache_dir=tmp_path), dynamic=False)
    check_gradients(compiled, fn, inputs_of(shape, dtype))


def backward_of(
    shape: tuple[int, ...], dtype: torch.dtype, name: str = "layer norm", changing: bool = False
) -> Plan:
    inputs = inputs_of(shape, dtype)
    if changing:
        torch._dynamo.mark_dynamic(inputs[0], 0)
    recorder = record(NORMS[name], *inputs, target=TritonRecorder())
    *_, program = recorder.programs
    return Plan(program.serialized, program.kernel_texts, 90)


def cross_row_steps(plan: Plan) -> list[Any]:
    return [s for s in plan.program["steps"]
            if "kernel" in s and "sum_cross_row" in plan.texts[s["kernel"]]]  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_rows_are_read_once(name: str) -> None:
    """No tensor of the input's size lies between the kernels; the sums are in one of them."""
    plan = backward_of((8, 128, 64), torch.bfloat16, name)
    (step,) = cross_row_steps(plan)
    buffers = plan.buffers
    between = [b for b in buffers if b["role"] == "temp" and math.prod(b["shape"]) == 8 * 128 * 64]
    assert len(between) <= 1  # the gradient itself
    assert plan.texts[step["kernel"]].count("sum_cross_row") == 2
    assert step["launch"]["grid"] == ["p"] and step["launch"]["axes"]["p"]["size"] == 64


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("changing", [False, True])
def test_rows_in_any_number_are_read_once(name: str, changing: bool) -> None:
    """Where no divisor gives enough parts, and where the number may change."""
    plan = backward_of((1031, 64), torch.bfloat16, name, changing)
    (step,) = cross_row_steps(plan)
    between = [b["shape"] for b in plan.buffers if b["role"] == "temp"]
    large = [shape for shape in between if shape[0] not in (1, 64)]
    assert len(large) <= 1  # the gradient itself
    axes = step["launch"]["axes"]
    assert axes["p"]["size"] == 64 and axes["x"]["masked"]
    assert plan.texts[step["kernel"]].count("sum_cross_row") == 2
    symbols = {"s0": 1031} if changing else {}
    assert not plan.variant(step, {str(k): 1031 for k in plan.program["symbols"]} | symbols).wide


def test_one_kernel_for_any_number_of_rows(tmp_path: Path) -> None:
    torch._dynamo.reset()
    backend = Backend("triton", cache_dir=tmp_path)
    compiled = torch.compile(layer_norm, backend=backend)
    for rows in (1031, 2047, 2048, 800, 5):
        check_gradients(compiled, layer_norm, inputs_of((rows, 48), torch.float32))
    assert len(backend.reports) == 4  # the first number, and any


def sum_before_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """The rows need the sum of all rows: no kernel of theirs can compute it."""
    total = x.sum(0)
    return torch.softmax(x * total, -1), total


def rows_beside_sums(x: Tensor) -> tuple[Tensor, ...]:
    """Sums of rows that are stored, beside another reduction of the same rows."""
    y = torch.sin(x)
    total = y.sum(0)
    return y, total * 2, (y * x).sum(0), y.amax(0), torch.softmax(x * total, -1)


@pytest.mark.parametrize("changing", [False, True], ids=["static", "any size"])
@pytest.mark.parametrize("fn", [sum_before_rows, rows_beside_sums])
@pytest.mark.parametrize("shape", [(1031, 64), (3, 359, 40)], ids=str)
def test_sums_that_no_rows_fuse_with_have_their_rows_in_parts(
    fn: Callable[..., Any], shape: tuple[int, ...], changing: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    x = torch.randn(shape).flatten(0, -2)
    backend = Backend("triton", cache_dir=tmp_path)
    if changing:
        torch._dynamo.mark_dynamic(x, 0)
    got = torch.compile(fn, backend=backend, dynamic=False)(x)
    for mine, theirs, real in zip(got, fn(x), fn(x.double()), strict=True):
        assert_matches(mine, theirs, real)
    (stored,) = aot.stored_programs(Cache.open(Config(cache_dir=tmp_path)))
    plan = Plan(stored["program"], stored["texts"], 90)
    assert not cross_row_steps(plan)
    steps = [s for s in plan.program["steps"] if "kernel" in s]
    shared = [s for s in steps if s["launch"]["grid"] == ["p", "x"]]
    assert len(shared) == 1 and shared[0]["launch"]["axes"]["r"]["masked"]


def sums_beside_kept_axes(x: Tensor) -> tuple[Tensor, Tensor]:
    """The second sum keeps an axis before the one that it reduces."""
    return x.sum((0, 2)), x.sum(1)


@pytest.mark.parametrize("changing", [False, True], ids=["static", "any size"])
def test_parts_of_rows_behind_an_axis_that_is_kept(changing: bool, tmp_path: Path) -> None:
    x = torch.randn(2, 1021, 16, generator=torch.Generator().manual_seed(0))
    check_sums_in_parts("triton", sums_beside_kept_axes, x, 1, changing, tmp_path)


def one_row_of_each_column(x: Tensor) -> tuple[Tensor, Tensor]:
    """One row at most adds to the sum of a column."""
    place = torch.arange(x.shape[1]) * 7
    hit = torch.arange(x.shape[0])[:, None] == place
    return torch.softmax(x, -1), torch.where(hit, place + 0.5, 0.0).sum(0)


@pytest.mark.parametrize("changing", [False, True], ids=["static", "any size"])
def test_a_row_that_one_part_has(changing: bool, tmp_path: Path) -> None:
    x = torch.randn(1021, 24, generator=torch.Generator().manual_seed(0))
    check_sums_in_parts("triton", one_row_of_each_column, x, 0, changing, tmp_path)


def check_sums_in_parts(
    vendor: str, fn: Callable[..., Any], x: Tensor, rows: int, changing: bool, folder: Path
) -> None:
    """Compares results of a function that sums along axis `rows`, which may be `changing`."""
    torch._dynamo.reset()
    if changing:
        torch._dynamo.mark_dynamic(x, rows)
    backend = Backend(vendor, cache_dir=folder)
    got = torch.compile(fn, backend=backend, dynamic=False)(x)
    for mine, theirs, real in zip(got, fn(x), fn(x.double()), strict=True):
        assert_matches(mine, theirs, real)


def test_a_graph_is_scheduled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    fused = kernels.fuse
    monkeypatch.setattr(kernels, "fuse", lambda *a: calls.append(a) or fused(*a))
    (program,) = record(sum_before_rows, torch.randn(1031, 64), target=TritonRecorder()).programs
    assert len(calls) == 1
    assert len(program.serialized["steps"]) == 3  # sums of the parts, their sum, and the softmax


def test_few_rows_and_long_rows_are_left_to_kernels_of_their_own() -> None:
    assert not cross_row_steps(backward_of((256, 64), torch.float32))
    assert not cross_row_steps(backward_of((1024, 8192), torch.float32))


def test_sums_that_few_programs_would_walk_are_left_alone() -> None:
    def work(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.softmax(x, -1), x.sum(1)

    for batch, joined in ((2, 0), (64, 1)):
        x = torch.randn(batch, 100, 32)
        (program,) = record(work, x, target=TritonRecorder()).programs
        assert len(cross_row_steps(Plan(program.serialized, program.kernel_texts, 90))) == joined


@pytest.fixture
def workers() -> Iterator[Workers]:
    found = Workers()
    yield found
    found.close()


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("rows", [2048, 2049])
def test_it_is_built_with_wide_loads_and_nothing_spilled(
    rows: int, arch: int, workers: Workers
) -> None:
    plan = backward_of((rows, 1024), torch.bfloat16)
    plan.arch = arch
    (step,) = cross_row_steps(plan)
    job = plan.job(step, plan.variant(step, {}))
    answer = workers.compile(job.request(job.blocks()))
    assert "error" not in answer, answer["error"]
    assert "cp.async.cg.shared.global" in answer["ptx"] and "st.global.v4.b32" in answer["ptx"]
    assert ".local" not in answer["ptx"]


def read_again(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that one phase stores are read by the next."""
    y = torch.sin(x) * 2
    z = y - y.mean(-1, keepdim=True)
    return y, z, z.sum(0)


def test_rows_that_are_written_are_not_prefetched() -> None:
    (program,) = record(read_again, torch.randn(2048, 64), target=TritonRecorder()).programs
    (text,) = (t for t in program.kernel_texts.values() if "sum_cross_row" in t)
    assert "debug_barrier" in text and "num_stages" not in text
    reading = backward_of((2048, 1024), torch.bfloat16)
    assert "num_stages=3" in reading.texts[cross_row_steps(reading)[0]["kernel"]]


def test_as_much_is_read_ahead_as_leaves_room_for_two_programs() -> None:
    assert [tiles.stages(k << 10, GPU) for k in (16, 40, 41, 80, 81)] == [3, 3, 2, 2, 1]


# ---- sums over everything but channels -----------------------------------------------------------


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(64, 16, 8, 8).to(dtype, memory_format=torch.channels_last)


def over_pixels(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sum((0, 2, 3)), (x * x).sum((0, 2, 3))


def test_sums_over_pixels_are_split_by_how_images_lie_in_memory() -> None:
    (program,) = record(over_pixels, images(), target=TritonRecorder()).programs
    first, *_ = (s for s in program.serialized["steps"] if "kernel" in s)
    sizes = {name: axis["size"] for name, axis in first["launch"]["axes"].items()}
    assert sizes["x"] == 32 * 16 and sizes["x"] * sizes["r"] == 64 * 16 * 8 * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_over_pixels(dtype: torch.dtype, tmp_path: Path) -> None:
    torch._dynamo.reset()
    x = images(dtype)
    compiled = torch.compile(over_pixels, backend=Backend("triton", cache_dir=tmp_path))
    for got, theirs, real in zip(compiled(x), over_pixels(x), over_pixels(x.double()), strict=True):
        assert_matches(got, theirs, real)


# ---- what the compiler makes of it ---------------------------------------------------------------


def ptx_of(fn: Callable[..., Any], *inputs: Tensor, workers: Workers) -> list[str]:
    """The code for sm_90 of every kernel."""
    (program,) = record(fn, *inputs, target=TritonRecorder()).programs
    jobs = Plan(program.serialized, program.kernel_texts, 90).jobs()
    answers = [workers.compile(job.request(job.blocks())) for job in jobs]
    assert all("error" not in a for a in answers)
    return [a["ptx"] for a in answers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_bound_by_memory_move_16_bytes_at_a_time(
    dtype: torch.dtype, workers: Workers
) -> None:
    def work(x: Tensor, y: Tensor, long: Tensor, transposed: Tensor) -> Any:
        rows = torch.softmax(y, -1), torch.softmax(long, -1)
        return F.silu(x) * y, *rows, x.sum(0), transposed.t().contiguous()

    inputs = [torch.randn(1024, n).to(dtype) for n in (1024, 1024, 16384, 2048)]
    found = ptx_of(work, *inputs, workers=workers)
    assert len(found) >= 4
    for ptx in found:
        # cp.async.cg moves 16 bytes, cp.async.ca may move less.
        loads = re.findall(r"(?:ld\.global|cp\.async\.c[ag])[\w.:]*", ptx)
        assert loads and all(".v4.b32" in x or x.startswith("cp.async.cg") for x in loads), loads
        assert ".local" not in ptx


@pytest.mark.parametrize(("dtypes", "loads"), [("h", 2), ("hh", 2), ("f", 2), ("b", 1), ("hf", 3)])
def test_a_thread_has_32_bytes_on_their_way(dtypes: str, loads: int, workers: Workers) -> None:
    """(16 of a type of one byte: longer loads there are none, and more elements are many.)"""
    kinds = {"h": torch.bfloat16, "f": torch.float32, "b": torch.int8}
    inputs = [torch.empty(1 << 23, dtype=kinds[k]) for k in dtypes]
    (ptx,) = ptx_of(lambda *x: sum(t + 1 for t in x), *inputs, workers=workers)
    found = re.findall(r"ld\.global[\w.:]*", ptx)
    assert len(found) == loads and all(".v4.b32" in load for load in found)


@pytest.mark.parametrize("fn", [lambda x: torch.softmax(x, -1), F.silu, torch.sigmoid])
def test_quotients_are_not_what_kernels_wait_for(fn: Any, workers: Workers) -> None:
    """An exact quotient takes more instructions than the exponential: a row has one at most."""
    (ptx,) = ptx_of(fn, torch.randn(1024, 4096).to(torch.bfloat16), workers=workers)
    assert len(re.findall(r"div\.(rn|full)|rcp\.rn", ptx)) <= 1


def test_products_use_the_matrix_units_and_prefetch(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "chooser", lambda *_: lambda product: Tiling(128, 128, 64, 4, 8))
    a, b = (torch.randn(512, 512).to(torch.bfloat16) for _ in range(2))
    (ptx,) = ptx_of(lambda a, b: torch.relu(a @ b), a, b, workers=workers)
    assert "wgmma.mma_async" in ptx and "cp.async.cg" in ptx and "st.global.v4" in ptx
