"""Forms of kernels on the emulated GPU, which looks for races: cross-row sums fused into the kernel
of the rows, rows in parts, tiles that are transposed, online softmax."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recorder import MacaRecorder, record
from test_triton_cross_row import (
    NORMS,
    SHAPES,
    check_gradients,
    check_sums_in_parts,
    inputs_of,
    layer_norm,
    one_row_of_each_column,
    rows_beside_sums,
    sum_before_rows,
    sums_beside_kept_axes,
)
from torch import Tensor

from dicp.compare import assert_matches
from dicp.dynamo_bridge.backend import Backend

pytestmark = pytest.mark.sweep
WAVES = {torch.float32: 64, torch.bfloat16: 32}
"""Lanes of the emulated waves, by the dtype of a test."""


def texts_of(fn: Callable[..., Any], *inputs: Any, **options: Any) -> list[str]:
    target = record(fn, *inputs, target=MacaRecorder(), **options)
    return [text for program in target.programs for text in program.kernel_texts.values()]


def compiled(fn: Callable[..., Any], folder: Path, wave: int = 64, **options: Any) -> Any:
    torch._dynamo.reset()
    backend = Backend("maca", cache_dir=folder, maca_checked=True, maca_wave=wave)
    return torch.compile(fn, backend=backend, **options)


# ---- cross-row sums ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (768, 2050)], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_norms(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    fn = NORMS[name]
    found = compiled(fn, tmp_path, WAVES.get(dtype, 64), dynamic=False)
    check_gradients(found, fn, inputs_of(shape, dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_rows_are_read_once_for_all_sums(name: str, shape: tuple[int, ...]) -> None:
    found = [t for t in texts_of(NORMS[name], *inputs_of(shape, torch.bfloat16)) if "sums_0" in t]
    assert len(found) == 1 and "sums_1" in found[0]


def test_any_number_of_rows(tmp_path: Path) -> None:
    fn = compiled(layer_norm, tmp_path)
    for rows in (1031, 2047, 2048, 800, 5):
        check_gradients(fn, layer_norm, inputs_of((rows, 48), torch.float32))


@pytest.mark.parametrize("changing", [False, True], ids=["static", "any size"])
@pytest.mark.parametrize("fn", [sum_before_rows, rows_beside_sums])
@pytest.mark.parametrize("shape", [(1031, 64), (3, 359, 40)], ids=str)
def test_sums_that_no_rows_fuse_with_have_their_rows_in_parts(
    fn: Callable[..., Any], shape: tuple[int, ...], changing: bool, tmp_path: Path
) -> None:
    x = torch.randn(shape).flatten(0, -2)
    if changing:
        torch._dynamo.mark_dynamic(x, 0)
    got = compiled(fn, tmp_path, dynamic=False)(x)
    for mine, theirs, real in zip(got, fn(x), fn(x.double()), strict=True):
        assert_matches(mine, theirs, real)
    found = texts_of(fn, x)
    assert sum("first + at" in t for t in found) == 1 and not any("sums_0" in t for t in found)


@pytest.mark.parametrize("changing", [False, True], ids=["static", "any size"])
def test_parts_of_rows_behind_an_axis_that_is_kept(changing: bool, tmp_path: Path) -> None:
    x = torch.randn(2, 1021, 16, generator=torch.Generator().manual_seed(0))
    check_sums_in_parts("maca", sums_beside_kept_axes, x, 1, changing, tmp_path)


@pytest.mark.parametrize("changing", [False, True], ids=["static", "any size"])
def test_a_row_that_one_part_has(changing: bool, tmp_path: Path) -> None:
    x = torch.randn(1021, 24, generator=torch.Generator().manual_seed(0))
    check_sums_in_parts("maca", one_row_of_each_column, x, 0, changing, tmp_path)


# ---- transposed tiles ----------------------------------------------------------------------------


def moved(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def added(x: Tensor) -> Tensor:
    return x.transpose(1, 2) + torch.arange(x.shape[1], dtype=x.dtype)


@pytest.mark.parametrize("sized", [True, False], ids=["static", "any size"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool], ids=str
)
def test_tiles_are_transposed(dtype: torch.dtype, sized: bool, tmp_path: Path) -> None:
    for fn in (moved, added) if dtype != torch.bool else (moved,):
        found = compiled(fn, tmp_path, WAVES.get(dtype, 64), dynamic=not sized)
        for shape in ((2, 48, 70), (1, 9, 64), (3, 65, 33)):
            x = (torch.randn(shape) * 5).to(dtype)
            assert torch.equal(found(x), fn(x))


def test_adjacent_threads_read_and_write_adjacent_elements() -> None:
    (text,) = texts_of(moved, torch.ones(2, 48, 70))
    assert "d_shared<float, 1056> tile_0" in text  # 32 rows of 32 elements and one more
    assert "tile_0[at_x * 33 + at_y]" in text
    (small,) = texts_of(moved, torch.ones(2, 4, 70))
    assert "tile_0" not in small


def test_stores_are_transposed(tmp_path: Path) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = x * 2 + y
        return total, total.bfloat16().t().contiguous()

    inputs = torch.randn(70, 48), torch.randn(70, 48)
    assert sum("tile_0[at_x" in text for text in texts_of(fn, *inputs)) == 1
    for got, wanted in zip(compiled(fn, tmp_path)(*inputs), fn(*inputs), strict=True):
        assert torch.equal(got, wanted) and got.stride() == wanted.stride()


def test_tiles_fit_shared_memory(tmp_path: Path) -> None:
    def fn(*tensors: Tensor) -> Tensor:
        return sum(x if x.shape[0] == 70 else x.t() for x in tensors)  # type: ignore[return-value]

    shapes = [(70, 48)] * 8 + [(48, 70)] * 6
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    (text,) = texts_of(fn, *inputs)
    assert text.count("__shared__") == 4  # of 8 KiB each
    assert torch.equal(compiled(fn, tmp_path)(*inputs), fn(*inputs))


# ---- arrays of exchanges -------------------------------------------------------------------------


def test_many_reductions_fit_shared_memory(tmp_path: Path) -> None:
    def fn(x: Tensor) -> list[Tensor]:
        return [(x * k).argmax(0) for k in range(1, 25)]

    x = torch.randn(70, 48, dtype=torch.float64)
    (text,) = texts_of(fn, x)
    assert text.count("__shared__") == 4  # two of values and two of positions, of 2 KiB each
    for got, wanted in zip(compiled(fn, tmp_path, 32)(x), fn(x), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_rows_with_several_reductions_beside_sums(count: int, tmp_path: Path) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x
        for _ in range(count):
            y = y - y.amax(-1, keepdim=True) * 0.5
        return y, x.sum(0)

    x = torch.randn(1024, 600)
    assert any("sums_0" in text for text in texts_of(fn, x))
    for got, eager, real in zip(compiled(fn, tmp_path, 32)(x), fn(x), fn(x.double()), strict=True):
        assert_matches(got, eager, real)


# ---- online softmax ------------------------------------------------------------------------------


def log_softmax(x: Tensor) -> Tensor:
    return x.log_softmax(-1)


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("fn", [softmax, log_softmax])
def test_long_rows(fn: Callable[..., Any], dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = (torch.randn(6, 20001) * 4).to(dtype)
    x[1, 5:] = -torch.inf
    x[2, 7] = torch.inf
    x[3, 9] = torch.nan
    x[4] = -torch.inf
    x[5, :19000] = -torch.inf
    got = compiled(fn, tmp_path, WAVES.get(dtype, 64))(x)
    assert_matches(got, fn(x), fn(x.double()))
    assert got.isnan().any(-1).tolist() == [False, False, True, True, True, False]


def test_a_long_row_is_read_twice_by_its_softmax() -> None:
    (text,) = texts_of(softmax, torch.ones(64, 20000))
    assert text.count("for (d_index point") == 2 and "d_online(" in text
