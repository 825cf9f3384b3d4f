"""What generated C++ must keep: NaNs, 16-bit rounding, the bits of what is moved, long sums."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorder import record
from torch import Tensor

from dicp.compare import assert_matches
from dicp.config import Config
from dicp.loop.thresholds import SAMPLE_STEP

pytestmark = pytest.mark.sweep

BF16 = torch.bfloat16


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, backend="cpugraph", fullgraph=True)


def text_of(fn: Callable[..., Any], *args: Tensor) -> str:
    """The generated source."""
    target = record(fn, *args)
    return target.render(target.programs[0], Config()).files["kernels.cpp"]


def worst(found: Tensor, exact: Tensor) -> float:
    return (found.double() - exact).abs().max().item()


# ---- limits that are numbers ---------------------------------------------------------------------

LIMITED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "clamp": lambda x: x.clamp(-1, 2),
    "clamp to NaN": lambda x: x.clamp(min=math.nan),
    "hardtanh": F.hardtanh,
    "maximum": lambda x: torch.maximum(torch.full_like(x, 0.5), x),
    "minimum": lambda x: torch.minimum(x, torch.full_like(x, math.nan)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16, torch.float16])
@pytest.mark.parametrize("name", LIMITED)
def test_limits_pass_nan_on(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 37).mul(3).to(dtype)
    x[0, :5] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0], dtype=dtype)
    fn = LIMITED[name]
    assert torch.equal(compiled(fn)(x).nan_to_num(7), fn(x).nan_to_num(7))


def test_limits_of_integers() -> None:
    x = torch.randint(-9, 9, (50,))
    assert torch.equal(compiled(lambda x: x.clamp(-3, 4).relu())(x), x.clamp(-3, 4).relu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16])
@pytest.mark.parametrize("width", [600, 1024])
def test_places_of_extrema_in_long_rows(width: int, dtype: torch.dtype) -> None:
    x = torch.randn(5, width).to(dtype)
    x[1, [300, width - 3]] = math.nan
    x[2] = -math.inf
    x[3, [299, 301, width - 1]] = math.inf

    def places(x: Tensor) -> tuple[Tensor, ...]:
        return x.argmax(1), x.argmin(1), x.max(1).indices, x.min(1).indices

    for found, expected in zip(compiled(places)(x), places(x), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("width", [33, 40, 47, 64, 100, 200, 256, 300, 512, 1024])
def test_sums_of_short_rows_are_as_exact_as_eagers(width: int) -> None:
    """The root mean square of the errors of 4,096 sums; g++ adds lanes one after another."""
    torch.manual_seed(width)
    x = torch.randn(4096, width)
    exact = x.double().sum(1)

    def error(found: Tensor) -> float:
        return (found.double() - exact).square().mean().sqrt().item()

    assert error(compiled(lambda x: x.sum(1))(x)) < error(x.sum(1))


@pytest.mark.parametrize("value", [1, 3, 0.3])
def test_addcmul_rounds_as_eager(value: float) -> None:
    """Its sum and second product are rounded once: the product alone may overflow."""
    x, y, z = (torch.randn(1000) for _ in range(3))
    z[:9] = 3.4e38
    x[:9], y[:9] = -z[:9], torch.linspace(1.0, 1.5, 9) / value
    fn = lambda *o: torch.addcmul(*o, value=value)  # noqa: E731
    assert fn(x, y, z)[:9].isfinite().all()
    assert torch.equal(compiled(fn)(x, y, z), fn(x, y, z))


def test_zeros_of_both_signs() -> None:
    a, b = (torch.tensor(v * 8) for v in ([-0.0, 0.0, -0.0, 0.0], [0.0, -0.0, -0.0, 0.0]))

    def extrema(a: Tensor, b: Tensor) -> list[Tensor]:
        found = [f(a, b) for f in (torch.maximum, torch.minimum, torch.fmax, torch.fmin)]
        zero = torch.zeros_like(a)
        found += [torch.maximum(a, zero), torch.minimum(-zero, a), torch.minimum(a, -zero)]
        return [*found, a.clamp(0.0), a.clamp(-0.0, 0.0), a.clamp(b), a.relu(), F.relu6(a)]

    for found, eager in zip(compiled(extrema)(a, b), extrema(a, b), strict=True):
        assert torch.equal(found.signbit(), eager.signbit())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16, torch.float16])
def test_integers_of_what_does_not_fit(dtype: torch.dtype) -> None:
    """C++ leaves these conversions open; PyTorch's are the processor's."""
    powers = [s * 2.0**k for k in (31, 32, 63) for s in (1, -1)]
    x = torch.tensor([math.nan, math.inf, 1e10, 1e20, 300.7, 1.5, 300.5, 7e4, 0.9, *powers])
    x = torch.cat([x, x + 2.0**-20, -x]).to(dtype)
    kinds = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)

    def whole(x: Tensor) -> list[Tensor]:
        return [x.to(kind) for kind in kinds]

    for found, eager in zip(compiled(whole)(x), whole(x), strict=True):
        assert torch.equal(found, eager)


def test_small_halves_where_subnormals_are_flushed() -> None:
    x = torch.arange(0, 1 << 16, 7, dtype=torch.int32).to(torch.int16).view(torch.float16)
    run = compiled(lambda x: x.float() * 2)
    run(x)
    torch.set_flush_denormal(True)
    try:
        found = run(x)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found.nan_to_num(7), (x.float() * 2).nan_to_num(7))


@pytest.mark.parametrize("width", [300, 1000])
def test_places_of_what_is_computed(width: int) -> None:
    """A value computed twice, in vectors and by itself, may differ; places do not depend on it."""
    xs = [torch.randn(rows, width) for rows in (64, 63, 62)]

    def places(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        return x.sin().argmax(1), y.abs().log().max(1).indices, z.cos().argmin(1)

    run = torch.compile(places, backend="cpugraph", options={"cxx_flags": "-march=x86-64"})
    x, y, z = (x.double() for x in xs)
    for found, values in zip(run(*xs), (x.sin(), y.abs().log(), -z.cos()), strict=True):
        assert found.min() >= 0 and found.max() < width
        assert (values.amax(1) - values.gather(1, found[:, None])[:, 0]).max() < 1e-6


def test_tanh_stays_within_one() -> None:
    x = torch.linspace(-12, 12, 100_001)
    x[:6] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40])
    found, exact = compiled(torch.tanh)(x), x.double().tanh()
    assert ((found.double() - exact).abs() <= 3 * 2.0**-23 * exact.abs())[6:].all()
    assert torch.equal(found[:6].nan_to_num(7), x.tanh()[:6].nan_to_num(7))
    assert found[6:].abs().max() == 1


def test_weights_keep_every_nan() -> None:
    x = torch.randn(3, 64)
    x[1, 5] = torch.tensor(0x7FC00001, dtype=torch.int32).view(torch.float32)
    x[2, 7] = -math.inf
    found = compiled(lambda x: x.softmax(1))(x)
    assert found[1].isnan().all() and not found[[0, 2]].isnan().any() and found[2, 7] == 0


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("places", [3, 400])
def test_sums_of_rows_by_destination(places: int, symbolic: bool) -> None:
    """Every number of rows for one destination, none, one without effect, all for the same."""
    index = torch.randint(0, places, (3, 500))
    index[0] = 1
    grad, table = torch.randn(3, 500, 96), torch.randn(places, 96)

    def sums(grad: Tensor, table: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.ops.aten.embedding_dense_backward(grad, index, places, 2, False)
        return found, table.index_add(0, index[2], grad[2] * 2)

    run = torch.compile(sums, backend="cpugraph", fullgraph=True, dynamic=symbolic)
    for found, exact, eager in zip(
        run(grad, table, index),
        sums(grad.double(), table.double(), index),
        sums(grad, table, index),
        strict=True,
    ):
        assert worst(found, exact) <= 2 * worst(eager, exact) + 1e-6


@pytest.mark.parametrize(
    ("base", "fresh"),
    [
        (lambda x: torch.zeros(400, 96), True),
        (lambda x: torch.ones(400, 96), False),
        (lambda x: x[0].expand(400, 96), False),
    ],
)
def test_sums_by_destination_write_zeros_themselves(
    base: Callable[[Tensor], Tensor], fresh: bool
) -> None:
    x, index = torch.randn(500, 96), torch.randint(0, 300, (500,))

    def sums(x: Tensor, index: Tensor) -> Tensor:
        return base(x).index_add(0, index, x)

    target = record(sums, x, index)
    source = target.render(target.programs[0], Config()).files["kernels.cpp"]
    assert ("begun" in source) == fresh
    torch.testing.assert_close(compiled(sums)(x, index), sums(x, index))


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("rows", [70, 900])
def test_sums_by_destination_are_rounded_in_their_kernel(
    rows: int, dtype: torch.dtype, symbolic: bool
) -> None:
    """Few rows and many, several for one destination and none; no tensor of float32 is stored."""
    grad, index = torch.randn(rows, 640).to(dtype), torch.randint(0, 300, (rows,))
    index[:9] = 5

    def sums(grad: Tensor, index: Tensor) -> Tensor:
        return torch.ops.aten.embedding_dense_backward(grad, index, 300, 7, False) * 2

    (program,) = record(sums, grad, index).programs
    temps = [b["dtype"] for b in program.serialized["buffers"] if b["role"] == "temp"]
    assert temps.count("float32") == 0
    torch.compiler.reset()
    run = torch.compile(sums, backend="cpugraph", fullgraph=True, dynamic=symbolic)
    found, exact = run(grad, index), sums(grad.double(), index)
    once = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(found.double(), exact, rtol=1.01 * once, atol=1e-5)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_sums_in_rows_are_rounded_in_their_kernel(dtype: torch.dtype) -> None:
    """The gradient of gather: each row is complete before the next one."""
    grad, index = torch.randn(40, 70).to(dtype), torch.randint(0, 90, (40, 70))

    def sums(grad: Tensor, index: Tensor) -> Tensor:
        return grad.new_zeros(40, 90).scatter_add(1, index, grad)

    (program,) = record(sums, grad, index).programs
    assert [b["dtype"] for b in program.serialized["buffers"]].count("float32") == 0
    torch.compiler.reset()
    exact = sums(grad.double(), index)
    assert_matches(compiled(sums)(grad, index), sums(grad, index), exact)


@pytest.mark.parametrize("kind", ["read before", "read again", "read apart", "returned"])
def test_sums_that_are_read_elsewhere_stay_in_memory(kind: str) -> None:
    """Only what reads each element at its own place can follow each row."""
    grad, index = torch.randn(900, 640).to(BF16), torch.randint(0, 300, (900,))

    def sums(grad: Tensor, index: Tensor) -> Any:
        found = torch.zeros(300, 640).index_add(0, index, grad.float())
        if kind == "read before":
            return found.sum(0).to(BF16), found.to(BF16)
        if kind == "read again":
            return found[:2] @ (found * 2).mT
        return found.flip(1).to(BF16) if kind == "read apart" else (found, found.to(BF16))

    torch.compiler.reset()
    found, expected = compiled(sums)(grad, index), sums(grad, index)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_rows_for_a_destination_that_is_not_there() -> None:
    grad, index = torch.randn(500, 96), torch.full((500,), 400)
    run = compiled(lambda g, i: torch.ops.aten.embedding_dense_backward(g, i, 400, -1, False))
    with pytest.raises(IndexError):
        run(grad, index)


@pytest.mark.parametrize("width", [1024, 1500, 5000])
def test_sums_of_weights_in_blocks(width: int) -> None:
    """Masked blocks, maxima that come late, infinities and NaN."""
    x = torch.randn(8, width) * 3
    x[1, :700] = -math.inf
    x[2] = -math.inf
    x[3, 900] = math.inf
    x[4, 600] = math.nan
    x[5] = torch.linspace(-200, 200, width)
    x[6] = torch.linspace(200, -200, width)
    x[7, 1:] = -math.inf

    def losses(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.log_softmax(1), F.cross_entropy(x, torch.arange(8), reduction="none")

    for found, exact, eager in zip(compiled(losses)(x), losses(x.double()), losses(x), strict=True):
        finite = exact.isfinite()
        assert torch.equal(found[~finite].nan_to_num(7), eager[~finite].nan_to_num(7))
        assert worst(found[finite], exact[finite]) <= 2 * worst(eager[finite], exact[finite]) + 1e-6


def test_erf_is_exact_to_a_unit() -> None:
    x = torch.linspace(-6, 6, 100_001)
    x[:6] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40])
    found, exact = compiled(torch.erf)(x).double(), x.double().erf()
    unit = 2.0 ** (exact.abs().log2().floor() - 23)
    assert ((found - exact).abs() <= 1.1 * unit)[6:].all()
    assert torch.equal(found[:6].float().nan_to_num(7), x.erf()[:6].nan_to_num(7))


def test_erfinv_over_its_whole_range() -> None:
    """Near one, where the result is steep, every number is tried."""
    one = torch.ones(())
    ends = (one.view(torch.int32) - torch.arange(200_000, dtype=torch.int32)).view(torch.float32)
    y = torch.cat([torch.linspace(-1, 1, 400_001), ends, -ends, torch.logspace(-38, 0, 100_000)])
    y[:8] = torch.tensor([0.0, -0.0, 1.0, -1.0, 1.5, -1.5, math.nan, math.inf])
    found, exact = compiled(torch.erfinv)(y), torch.erfinv(y.double())
    assert_matches(found[:8], torch.erfinv(y[:8]), exact[:8])
    assert found[1].signbit()
    finite = exact.isfinite() & (exact != 0)
    error = (found.double() - exact).abs() / exact.abs()
    assert error[finite].max() < 1.8 * 2.0**-23 and torch.equal(found.isnan(), exact.isnan())


def test_exp_over_its_whole_range() -> None:
    """Subnormal results, infinite ones and NaN included."""
    x = torch.cat([torch.linspace(-110, 90, 200_001), torch.linspace(-1e-3, 1e-3, 1001)])
    x[:5] = torch.tensor([math.nan, math.inf, -math.inf, -1e30, 1e30])
    found, exact = compiled(torch.exp)(x), x.double().exp()
    finite = exact[5:] < torch.finfo(torch.float32).max
    unit = 2.0 ** (exact[5:].clamp(min=2.0**-126).log2().floor() - 23)
    assert (((found[5:].double() - exact[5:]).abs() <= 2 * unit) | ~finite).all()
    assert found[5:][~finite].isposinf().all()
    assert torch.equal(found[:5].nan_to_num(7, 8, 9), torch.tensor([7.0, 8, 0, 0, 8]))


def test_gelu_far_from_zero() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, -1e30, -40.0, -5.6, 5.6, 40.0, 1e30])
    want = [math.nan, math.inf, math.nan, 0.0, 0.0, 0.0, 5.6, 40.0, 1e30]
    found = compiled(F.gelu)(x)
    assert torch.equal(found.nan_to_num(7), torch.tensor(want).nan_to_num(7))


@pytest.mark.parametrize(
    "activation",
    [F.gelu, partial(F.gelu, approximate="tanh"), F.mish],
    ids=["gelu", "gelu_tanh", "mish"],
)
def test_gradient_of_activation_is_as_exact_as_eager(activation: Callable[..., Tensor]) -> None:
    def gradient(fn: Callable[..., Tensor], x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(fn(x).sum(), x)[0]

    x = torch.linspace(-12, 12, 4096)
    exact = gradient(activation, x.double())
    allowed = 2 * worst(gradient(activation, x), exact)
    assert worst(gradient(compiled(activation), x), exact) <= allowed


def test_mish_is_as_exact_as_eager() -> None:
    x = torch.linspace(-80, 100, 1 << 16)
    error = (compiled(F.mish)(x) - F.mish(x.double())).norm()
    assert error <= 2 * (F.mish(x) - F.mish(x.double())).norm()
    special = torch.tensor([math.nan, math.inf, -math.inf, -0.0, -1e30, 1e30, -104.0])
    found, want = compiled(F.mish)(special), F.mish(special)
    assert torch.equal(found.nan_to_num(7, 8, 9), want.nan_to_num(7, 8, 9))
    assert torch.equal(found.signbit(), want.signbit())


@pytest.mark.parametrize("length", [5, 49, 64])
def test_softmax_of_special_values(length: int) -> None:
    x = torch.randn(6, length) * 30
    x[0, 3], x[1, 3], x[2, 3], x[3], x[4, 1:] = math.nan, math.inf, -math.inf, -math.inf, -100.0
    for fn in (lambda x: x.softmax(-1), lambda x: x.log_softmax(-1)):
        torch.testing.assert_close(compiled(fn)(x), fn(x), equal_nan=True)


# ---- 16-bit floats -------------------------------------------------------------------------------


def test_a_programs_own_conversion_rounds() -> None:
    x = torch.randn(1000)
    fn = lambda x: x.to(BF16).float() * 3  # noqa: E731
    assert torch.equal(compiled(fn)(x), fn(x))


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.int64, torch.bool, BF16])
def test_a_cast_that_is_stored_rounds_once(source: torch.dtype) -> None:
    x = torch.randn(1000).mul(9).to(source)
    fn = lambda x: x.half()  # noqa: E731
    assert "d_round_f16" not in text_of(fn, x)
    assert torch.equal(compiled(fn)(x), fn(x))


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_an_extremum_equals_what_it_was_found_in(dtype: torch.dtype) -> None:
    """One side of the comparison is computed again, the other comes from memory."""
    x, y = (torch.randn(40, 3000).to(dtype) for _ in range(2))

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = x * 1.7 + y.exp()
        top = z.amax()
        return (z == top).sum(), (z >= z.amax(1, keepdim=True)).sum(1)

    alone, in_rows = compiled(fn)(x, y)
    assert alone >= 1 and (in_rows >= 1).all()


def test_results_between_operators_are_not_rounded() -> None:
    x = torch.randn(4, 24, 9, 9).to(BF16)
    mean, var, w, b = (torch.rand(24).add(0.5).to(BF16) for _ in range(4))

    def fn(*args: Tensor) -> Tensor:
        x, mean, var, w, b = args
        return F.hardswish(F.batch_norm(x, mean, var, w, b)) * 7 - x

    args = (x, mean, var, w, b)
    exact = fn(*(a.double() for a in args))
    assert worst(compiled(fn)(*args), exact) < worst(fn(*args), exact)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_gelu_of_16_bits(dtype: torch.dtype) -> None:
    x = torch.linspace(-8, 8, 5001).to(dtype)
    x[:3] = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype)
    found, exact = compiled(F.gelu)(x), F.gelu(x.double())
    assert torch.equal(found[:3].nan_to_num(7), exact[:3].to(dtype).nan_to_num(7))
    unit = torch.finfo(dtype).eps
    assert ((found.double() - exact).abs() <= unit * exact.abs() + 1e-6)[3:].all()


# ---- copies --------------------------------------------------------------------------------------

SHAPES = [(70, 40), (16, 16), (3, 100), (100, 3), (65, 2), (4, 130), (129, 257), (17, 1),
          (9, 70), (70, 9), (9, 7), (3, 49), (49, 3), (25, 43), (5, 16), (137, 70)]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_transposed_copy(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randint(-100, 100, (2, *shape)).to(dtype)
    fn = lambda x: x.transpose(1, 2).contiguous()  # noqa: E731
    assert torch.equal(compiled(fn)(x), fn(x))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_transposed_operand(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, y = (torch.randn(2, *shape).to(dtype) for _ in range(2))
    fn = lambda x, y: (x - 2 * y).transpose(1, 2).contiguous()  # noqa: E731
    exact = fn(x.double(), y.double())
    assert worst(compiled(fn)(x, y), exact) <= worst(fn(x, y), exact) + 1e-6


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
def test_colours_side_by_side(channels: int) -> None:
    x = torch.randn(2, channels, 9, 13)[:, :, 1:]
    fn = lambda x: x.clone(memory_format=torch.channels_last)  # noqa: E731
    found = compiled(fn)(x)
    assert torch.equal(found, x) and found.stride() == fn(x).stride()


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().contiguous(),
    "joined": lambda x: torch.cat([x, x], 1),
    "sliced": lambda x: x[:, 3:].clone(),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_keep_every_bit(name: str) -> None:
    """A NaN's payload is part of a value that is only moved."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).reshape(256, 256)
    x, fn = bits.view(BF16), COPIES[name]
    assert torch.equal(compiled(fn)(x).view(torch.int16), fn(x).view(torch.int16))


ROLLED: dict[str, Callable[[Tensor], Tensor]] = {
    "copied": lambda x: x.transpose(1, 2).roll(5, 2).contiguous(),
    "computed": lambda x: x.transpose(1, 2).roll(-9, 2).contiguous() * 2 + 1,
}


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("name", ROLLED)
def test_rolled_rows_are_transposed_in_tiles(name: str, dtype: torch.dtype) -> None:
    """The last loop, which wraps around, crosses the one along which the input is contiguous."""
    x, fn = torch.randn(2, 37, 35).to(dtype), ROLLED[name]
    source = text_of(fn, x)
    assert source.count("tile1 += ") >= 2 and "% 37" not in source
    assert_matches(compiled(fn)(x), fn(x), fn(x.double()))


@pytest.mark.parametrize("axis", [0, 1])
def test_scans_store_along_what_they_load(axis: int) -> None:
    """Scans of a transposed tensor, whose result is not, stored a column at a time."""
    x = torch.randn(64, 100).t()
    source = text_of(lambda x: x.cumsum(axis), x)
    scan, transposed = source.split("extern")[1:]
    assert "v_r0" in scan and "tile0" not in scan and "tile0" in transposed
    loaded, stored = (re.search(rf"a{k}\[(.*?)\]", scan.partition("sizes")[2]) for k in (0, 1))
    assert loaded and stored and loaded[1] == stored[1]


def test_cropped_images_are_copied() -> None:
    """Padding by negative numbers tested whether each element lies inside."""
    x = torch.randn(2, 3, 9, 40).to(BF16)
    fn = lambda x: F.pad(x, (-3, -2, -1, 0))  # noqa: E731
    assert "?" not in text_of(fn, x)
    assert torch.equal(compiled(fn)(x), fn(x))


def test_conditions_of_outer_loops_leave_inner_loops_in_vectors() -> None:
    """g++ 12 took seven times as long for windows that booleans select."""
    x = torch.ones(1, 64, 10, 10).to(memory_format=torch.channels_last)
    source = text_of(lambda x: F.adaptive_avg_pool2d(x, 7), x)
    inner = source[source.index("#pragma omp simd") :]
    tests = set(re.findall(r"(\w+) \?", inner))
    assert len(tests) == 9
    assert all(re.search(rf"const int32_t {name} = d_opaque", source) for name in tests)
    assert source.count(": a0;") == 9, "what is left out is read at the start of the tensor"


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("mode", ["reflection", "replication"])
def test_gradients_of_padding_test_no_pixel(mode: str, dtype: torch.dtype) -> None:
    """The pixels of each kind of place have a loop of their own, which selects nothing."""
    x = torch.randn(2, 40, 9, 12).to(dtype).to(memory_format=torch.channels_last)
    g = torch.randn(2, 40, 12, 14).to(dtype).to(memory_format=torch.channels_last)
    backward = getattr(torch.ops.aten, f"{mode}_pad2d_backward")
    fn = lambda g, x: backward(g, x, (1, 1, 1, 2))  # noqa: E731
    assert "?" not in text_of(fn, g, x)
    torch.compiler.reset()
    assert_matches(compiled(fn)(g, x), fn(g, x), fn(g.double(), x.double()))


@pytest.mark.parametrize("last", [False, True])
def test_normalization_by_running_statistics_is_a_product_and_a_sum(last: bool) -> None:
    """What depends on the channel alone is computed once for each, not for each pixel."""
    x = torch.randn(2, 48, 9, 11).to(BF16)
    x = x.to(memory_format=torch.channels_last) if last else x
    stats = torch.randn(48).to(BF16), torch.rand(48).to(BF16)
    affine = torch.rand(48).to(BF16), torch.randn(48).to(BF16)
    fn = lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b)  # noqa: E731
    args = (x, *stats, *affine)
    loop = text_of(fn, *args).rpartition('extern "C"')[2]
    assert len(re.findall(r"const float x\d+ = x\d+ [*+-] ", loop)) == 2
    torch.compiler.reset()
    assert_matches(compiled(fn)(*args), fn(*args), fn(*(a.double() for a in args)))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_gradients_of_maxima_gather_channels(dtype: torch.dtype) -> None:
    """Each pixel sums the windows whose maximum it is: no stores collide, channels fill vectors."""
    x = torch.randn(2, 32, 9, 12).to(dtype).to(memory_format=torch.channels_last)
    g = torch.randn_like(x)
    indices = F.max_pool2d(x, 3, 1, 1, return_indices=True)[1]

    def gradient(g: Tensor, x: Tensor, indices: Tensor) -> Tensor:
        backward = torch.ops.aten.max_pool2d_with_indices_backward
        return backward(g, x, (3, 3), (1, 1), (1, 1), (1, 1), False, indices)

    assert "d_check_index" not in text_of(gradient, g, x, indices)
    torch.compiler.reset()
    found, eager = compiled(gradient)(g, x, indices), gradient(g, x, indices)
    assert_matches(found, eager, gradient(g.double(), x.double(), indices))
    assert found.stride() == eager.stride()


def test_indices_of_columns_are_checked_once() -> None:
    """A loop that may report an error is not vectorized: it ran for every row."""
    x, index = torch.randn(50, 60), torch.randint(0, 60, (40,))
    fn = lambda x, i: x.index_select(1, i)  # noqa: E731
    checks, gather = text_of(fn, x, index).split('extern "C"')[1:]
    assert "d_check_index" in checks and "d_check_index" not in gather
    torch.compiler.reset()
    assert torch.equal(compiled(fn)(x, index), fn(x, index))
    with pytest.raises(IndexError):
        compiled(fn)(x, index + 30)


@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_places_in_columns(name: str) -> None:
    """Of equal numbers the first, and the first NaN; positions of 32 bits fill vectors."""
    x = torch.randint(0, 5, (40, 70)).float()
    x[[7, 9], 3], x[:, 5] = math.nan, -math.inf
    fn = lambda x: getattr(x, name)(0)  # noqa: E731
    assert "int32_t column_at" in text_of(fn, x)
    torch.compiler.reset()
    assert torch.equal(compiled(fn)(x), fn(x))


@pytest.mark.parametrize("name", ["sum", "amax", "prod"])
def test_other_reductions_have_as_many_lanes_as_sums(name: str) -> None:
    """Rows of 33 float64 or int64 took two to three times as long in one vector."""
    x = torch.arange(5 * 61.0).reshape(5, 61).to(torch.int64)
    assert "lanes_r0[16]" in text_of(lambda x: getattr(x, name)(1), x)
    assert torch.equal(compiled(lambda x: getattr(x, name)(1))(x), getattr(x, name)(1))
    assert torch.equal(compiled(lambda x: getattr(x, name)(1))(x * 1.0), getattr(x * 1.0, name)(1))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("width", "lanes"), [(768, 32), (784, 16)])
def test_sums_have_two_vectors_of_lanes(width: int, lanes: int, dtype: torch.dtype) -> None:
    """Sums of half a line at a time took up to twice as long, those of 64 elements four times, and
    additions to a single vector wait for each other."""
    x = torch.randn(512, width).to(dtype)
    assert f"lanes_r0[{lanes}]" in text_of(lambda x: x.sum(1), x)


@pytest.mark.parametrize("width", [64, 96, 100, 120, 512])
def test_sums_of_one_block_are_folded_at_once(width: int) -> None:
    x = torch.randn(700, width)
    assert "totals_" not in text_of(lambda x: x.sum(1), x)
    torch.compiler.reset()
    found, eager, exact = compiled(lambda x: x.sum(1))(x), x.sum(1), x.double().sum(1)
    deviation = lambda y: (y - exact).square().mean().sqrt()  # noqa: E731
    assert deviation(found) <= 1.1 * deviation(eager)


def test_sums_of_indexed_rows_have_lanes() -> None:
    """An index that is checked once for each row, outside the loop, has no part in it."""
    table, x = torch.randn(50, 600), torch.randn(40, 600)
    places = torch.randint(0, 50, (40,))

    def fn(table: Tensor, places: Tensor, x: Tensor) -> Tensor:
        return (table[places] * x).sum(1)

    assert "lanes_" in text_of(fn, table, places, x)
    exact = fn(table.double(), places, x.double())
    assert_matches(compiled(fn)(table, places, x), fn(table, places, x), exact)


def test_sums_of_one_element_have_no_loop() -> None:
    """The gradient of cross entropy adds up a row that is zero but for the class."""
    classes, scores = torch.randint(0, 608, (40,)), torch.randn(40, 608)
    classes[3] = -100

    def fn(scores: Tensor, classes: Tensor) -> Tensor:
        logs = scores.log_softmax(1)
        g = torch.ones((), dtype=scores.dtype)
        g = torch.ops.aten.nll_loss_backward(g, logs, classes, None, 1, -100, g * 39)
        return torch.ops.aten._log_softmax_backward_data(g, logs, 1, scores.dtype)

    assert text_of(fn, scores, classes).count("d_sum(") == 1
    exact = fn(scores.double(), classes)
    assert_matches(compiled(fn)(scores, classes), fn(scores, classes), exact)


# ---- sums ----------------------------------------------------------------------------------------


def test_sums_of_columns_are_as_exact_as_eager() -> None:
    """However many rows there are, in one reduced loop or in several."""
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((1 << 18, 4), (0,)), ((4, 1 << 17, 4), (0, 1)), ((4, 1 << 17, 4), (1,)), ((2000, 64), (0,))
    ]  # fmt: skip
    xs = [torch.rand(shape) + 0.5 for shape, _ in shapes]

    def sums(xs: list[Tensor]) -> list[Tensor]:
        return [x.sum(dims) for x, (_, dims) in zip(xs, shapes, strict=True)]

    exact = sums([x.double() for x in xs])
    for found, eager, true in zip(compiled(sums)(xs), sums(xs), exact, strict=True):
        assert worst(found, true) <= max(worst(eager, true), 2.0**-24 * true.max().item())


FAR_APART: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sums of columns": lambda x, y: (x.transpose(1, 2) * y).sum((0, 1)),
    "places of rows": lambda x, y: x[..., 5] * x[..., 7] + x[..., 11],
    "sum of places": lambda x, y: (x[..., 5] * x[..., 7]).sum(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAR_APART)
def test_elements_that_lie_far_apart_are_compiled_fast(name: str, dtype: torch.dtype) -> None:
    """g++ 12 takes 20 to 110 s where it knows the step between them, and the kernel up to a hundred
    times as long."""
    fn = FAR_APART[name]
    x, y = torch.randn(4, 64, 4096).to(dtype), torch.randn(4, 4096, 64).to(dtype)
    torch.compiler.reset()
    begin = time.monotonic()
    found = compiled(fn)(x, y)
    assert time.monotonic() - begin < 15
    assert_matches(found, fn(x, y), fn(x.double(), y.double()))


@pytest.mark.parametrize("rows", [12, 16, 40, 48, 64, 128])
def test_means_of_short_columns_are_as_exact_as_eagers(rows: int) -> None:
    """They decide the gradient of a variance where the mean is large."""

    def gradient(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(fn(x).sum(), x)[0]

    variance = lambda x: x.var(0)  # noqa: E731
    run, ours, eagers = compiled(variance), 0.0, 0.0
    for seed in range(30):
        x = torch.randn(rows, 7, generator=torch.Generator().manual_seed(seed)) + 1000
        exact = gradient(variance, x.double())
        ours += worst(gradient(run, x), exact)
        eagers += worst(gradient(variance, x), exact)
    assert ours < 0.9 * eagers


def test_long_sums_are_as_exact_as_eager() -> None:
    fn = lambda x: x.sum()  # noqa: E731
    run, errors, of_eager = compiled(fn), 0.0, 0.0
    for seed in range(20):
        x = torch.randn(300_000, generator=torch.Generator().manual_seed(seed)) + 0.5
        errors += worst(run(x), x.double().sum())
        of_eager += worst(fn(x), x.double().sum())
    assert errors <= 2 * of_eager


# ---- threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("parts", "threads"), [(1, False), (4, True)])
def test_traffic_is_worth_threads(parts: int, threads: bool) -> None:
    """What is moved at each point counts, though nothing is computed there."""
    target = record(lambda x: [p * 2 for p in x.split(256, 1)], torch.ones(64, 256 * parts))
    source = target.render(target.programs[0], Config()).files["kernels.cpp"]
    assert ("omp parallel" in source) == threads


# ---- results beyond the caches -------------------------------------------------------------------

MAX_DIVISOR: dict[str, tuple[Callable[..., Any], tuple[int, ...], str]] = {
    "flat": (lambda x: x.relu() + 1, (64, 64), "d_store_lanes_non_temporal"),
    "rows": (lambda x, y: x * y[0], (8, 16, 64), "d_store_lanes_non_temporal"),
    "parts": (lambda x, y: torch.cat([x * 2, y], -1), (32, 96), "d_store_lanes_non_temporal"),
    "two types": (lambda x: (x > 0, x * 2), (64, 64), "d_store_lanes_non_temporal"),
    "rounded": (lambda x: (x * 2).bfloat16(), (64, 64), "d_store_lanes_non_temporal"),
    "transposed": (lambda x: x.mT.contiguous(), (3, 80, 144), "d_transpose_non_temporal"),
    "transposed, a rest": (lambda x: x.mT.contiguous(), (64, 73), "d_transpose_non_temporal"),
    "transposed, doubles": (lambda x: x.mT.contiguous(), (64, 70), "d_transpose_non_temporal"),
    "no whole lines": (lambda x: x.relu() + 1, (63, 63), ""),
    "rows of half lines": (lambda x: torch.cat([x, x + 1], -1), (200, 24), ""),
    "transposed, no whole lines": (lambda x: x.mT.contiguous(), (70, 73), ""),
    "in place": (lambda x: x.mul_(2).add_(1), (64, 64), ""),
    "few": (lambda x: x.relu() + 1, (32, 16), ""),
}


@pytest.mark.parametrize("name", MAX_DIVISOR)
def test_results_beyond_the_caches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dicp.vendor.cpu.target.cache_bytes", lambda: 4096)
    fn, shape, call = MAX_DIVISOR[name]
    dtype = torch.float64 if "doubles" in name else torch.float32
    inputs = [torch.randn(shape, dtype=dtype) for _ in range(fn.__code__.co_argcount)]
    target = record(fn, *[x.clone() for x in inputs])
    source = target.render(target.programs[0], Config()).files["kernels.cpp"]
    assert (call in source) if call else "d_store_lanes_non_temporal" not in source
    torch.compiler.reset()
    found = compiled(fn)(*[x.clone() for x in inputs])
    torch.testing.assert_close(found, fn(*inputs), rtol=0, atol=0)


@pytest.mark.parametrize("transposed", [False, True])
def test_results_beyond_the_caches_may_lie_anywhere(
    transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dicp.vendor.cpu.target.cache_bytes", lambda: 4096)
    out, x = torch.zeros(64 * 64 + 1)[1:].view(64, 64), torch.randn(64, 64)

    def fn(out: Tensor, x: Tensor) -> None:
        out.copy_(x.t() if transposed else x * 2)

    torch.compiler.reset()
    compiled(fn)(out, x)
    assert torch.equal(out, x.t() if transposed else x * 2)


# ---- results in two orders of memory ----------------------------------------------------------

BOTH_ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda x: x * 0.5,
    "selected": lambda x: torch.where(x > 0, x, 0),
    "converted": lambda x: x.float() + 1,
    "in parts": lambda x: torch.where(torch.arange(x.shape[-1]) < 33, x, x + x),
    "in place": lambda x: x.mul_(2),
}


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16, torch.float64, torch.int8])
@pytest.mark.parametrize("name", BOTH_ORDERS)
def test_results_in_both_orders_of_memory(name: str, dtype: torch.dtype) -> None:
    """What is stored across the last loop gets its elements from a tile, a row at a time."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        result = BOTH_ORDERS[name](x)
        return result, result.contiguous()

    x = (torch.randn(2, 70, 147) * 9).to(dtype).mT
    target = record(fn, x.clone())
    assert "stored0" in target.render(target.programs[0], Config()).files["kernels.cpp"]
    for dynamic in (False, True):
        torch.compiler.reset()
        ours, theirs = x.clone(), x.clone()
        found = torch.compile(fn, backend="cpugraph", dynamic=dynamic)(ours)
        torch.testing.assert_close(found, fn(theirs), rtol=0, atol=0)
        assert torch.equal(ours, theirs)


# ---- rows in planes ------------------------------------------------------------------------------


def normalized(x: Tensor, weight: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return F.batch_norm(x, mean, variance, weight, weight, training=True).relu()


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("shift", [0.0, 30.0])
def test_rows_in_planes(dtype: torch.dtype, shift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels of images: the values, the running statistics and, of what has its mean near zero,
    the gradients."""
    monkeypatch.setattr("dicp.vendor.cpu.schedule.inner_reduction.MIN_IN_PLANES", 1)
    x = (torch.randn(5, 3, 7, 9) + shift).to(dtype)
    weight, grad = torch.rand(3) + 0.5, torch.randn(5, 3, 7, 9).to(dtype)

    def run(fn: Callable[..., Tensor], wide: torch.dtype, inner: torch.dtype) -> list[Tensor]:
        at, scale = x.to(inner).requires_grad_(), weight.to(wide).requires_grad_()
        state = [torch.zeros(3, dtype=wide), torch.ones(3, dtype=wide)]
        result = fn(at, scale, *state)
        grads = torch.autograd.grad(result, [at, scale], grad.to(inner))
        return [result.detach(), *state, *([] if shift else grads)]

    torch.compiler.reset()
    exact = run(normalized, torch.float64, torch.float64)
    eager = run(normalized, torch.float32, dtype)
    for found, wanted, other in zip(
        run(compiled(normalized), torch.float32, dtype), exact, eager, strict=True
    ):
        floor = 4 * torch.finfo(dtype).eps * wanted.abs().max().item()
        assert worst(found, wanted) <= 2 * worst(other, wanted) + floor


def test_rows_in_planes_are_swept_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sweep for both moments and one for the result, and none where no cache keeps them."""
    inputs = [torch.randn(5, 3, 7, 9), torch.ones(3), torch.zeros(3), torch.ones(3)]

    def source() -> str:
        target = record(normalized, *inputs)
        return target.render(target.programs[0], Config()).files["kernels.cpp"]

    monkeypatch.setattr("dicp.vendor.cpu.schedule.inner_reduction.MIN_IN_PLANES", 1)
    assert source().count("collapse(2)") == 2
    monkeypatch.setattr("dicp.vendor.cpu.target.cache_bytes", lambda: 1000)
    assert "collapse(2)" not in source()


def test_rows_in_planes_pass_what_is_no_number_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dicp.vendor.cpu.schedule.inner_reduction.MIN_IN_PLANES", 1)
    x = torch.randn(5, 4, 7, 9)
    x[1, 1, 3, 3], x[2, 2, 2, 2], x[:, 3] = math.nan, math.inf, 2.0
    torch.compiler.reset()
    found = compiled(normalized)(x, torch.ones(4), torch.zeros(4), torch.ones(4))
    exact = normalized(x, torch.ones(4), torch.zeros(4), torch.ones(4))
    torch.testing.assert_close(found, exact, equal_nan=True)


def far_from_the_first(x: Tensor) -> Tensor:
    """Rows whose first elements say nothing of the mean: by far larger, or 0."""
    x = x + 1000
    x[..., 0, :32], x[..., 1, :32] = 1e7, 0
    return x


def odd(x: Tensor) -> Tensor:
    x[..., 0, 5], x[..., 1, 50], x[..., 2, :] = math.inf, math.nan, 7.3
    x[..., 3, ::2], x[..., 3, 1::2] = 3e38, -3e38
    return x


MOMENTS = {"plain": lambda x: x, "near 0": lambda x: x - x.mean(-1, keepdim=True),
           "far": far_from_the_first, "odd": odd}  # fmt: skip


def in_segments(x: Tensor) -> Tensor:
    """Each row in five segments of memory: two loops."""
    return F.pad(x.view(len(x), 5, -1), (0, 3))[..., :-3]


ROWS_OF_MOMENTS: dict[str, tuple[tuple[int, ...], Any, Callable[[Tensor], Tensor]]] = {
    "rows": ((4, 5000), 1, lambda x: x),
    "planes": ((3, 4, 1300), (0, 2), lambda x: x),
    "segments": ((4, 5000), (1, 2), in_segments),
}


@pytest.mark.parametrize("kind", MOMENTS)
@pytest.mark.parametrize("rows", ROWS_OF_MOMENTS)
@pytest.mark.parametrize("symbolic", [False, True])
def test_shifted_moments(
    kind: str, rows: str, symbolic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mean and variance in one pass, whatever the first elements are."""
    monkeypatch.setattr("dicp.vendor.cpu.schedule.inner_reduction.MIN_IN_PLANES", 1)
    shape, axes, laid_out = ROWS_OF_MOMENTS[rows]

    def moments(x: Tensor) -> tuple[Tensor, ...]:
        return torch.var_mean(x, axes)

    x = laid_out(MOMENTS[kind](torch.randn(shape)))
    assert rows == "planes" or "d_estimated_mean" in text_of(moments, x)
    torch.compiler.reset()
    found = torch.compile(moments, backend="cpugraph", dynamic=symbolic)(x)
    eager, exact = moments(x), moments(x.double())
    if kind == "odd":  # eager's mean beside a variance is NaN where there is an infinity
        eager = eager[0], x.mean(axes)
        for mine, theirs in zip(found, eager, strict=True):
            assert torch.equal(mine[:3].isnan(), theirs[:3].isnan())
            assert torch.equal(mine[:3].isinf(), theirs[:3].isinf())
        found, eager, exact = ([v[2:3] for v in values] for values in (found, eager, exact))
    eps, (variance, mean) = torch.finfo(torch.float32).eps, exact
    floors = 16 * eps * variance, eps * (mean.abs() + variance.sqrt())
    for mine, theirs, real, floor in zip(found, eager, exact, floors, strict=True):
        assert ((mine - real).abs() <= 2 * (theirs - real).abs() + floor).all(), (mine, real)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_concatenation_along_rows_copies_them(dtype: torch.dtype) -> None:
    """Loops over the rows of each tensor select none and convert none."""
    inputs = [torch.randn(n, 40).to(dtype) for n in (3, 70, 5)]
    text = text_of(lambda *x: torch.cat(x), *inputs)
    assert "?" not in text and "d_from" not in text and text.count("if (v0") == 2
    torch.compiler.reset()
    assert torch.equal(compiled(lambda *x: torch.cat(x))(*inputs), torch.cat(inputs))


def far_in_the_sample(x: Tensor) -> Tensor:
    """Images whose mean is far from that of every SAMPLE_STEP-th pixel."""
    x = x + 1
    x.flatten(2)[..., ::SAMPLE_STEP] = 1e4
    return x


def odd_pixels(x: Tensor) -> Tensor:
    """One group has an infinity, one a NaN, one equal numbers, one is very large."""
    pixels = x.flatten(2)
    pixels[0, 0, 5], pixels[0, 8, 50], pixels[0, 16:24] = math.inf, math.nan, 7.3
    pixels[1, :8] *= 1e17
    return x


@pytest.mark.parametrize("kind", [torch.nn.Identity(), far_in_the_sample, odd_pixels])
@pytest.mark.parametrize("symbolic", [False, True])
def test_group_norm_about_the_mean_of_a_sample(kind: Any, symbolic: bool) -> None:
    """Channels-last images are read once for their moments, whatever the sampled pixels are."""

    def normalized(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        sizes = x.shape[0], 64, x.shape[2] * x.shape[3]
        return torch.ops.aten.native_group_norm(x, weight, None, *sizes, 8, 1e-5)

    x = kind(torch.randn(2, 64, 20, 13)).to(memory_format=torch.channels_last)
    weight = torch.randn(64)
    torch.compiler.reset()
    found = torch.compile(normalized, backend="cpugraph", dynamic=symbolic)(x, weight)
    eager, exact = normalized(x, weight), normalized(x.double(), weight.double())
    for mine, theirs, real in zip(found, eager, exact, strict=True):
        finite = real.isfinite() & theirs.isfinite()
        assert finite.sum() > finite.numel() / 2 and mine[finite].isfinite().all()
        bound = 2 * (theirs - real).abs() + 1e-5 * real.abs() + 1e-6
        assert ((mine - real).abs() <= bound)[finite].all()
    if kind is odd_pixels:
        for mine, theirs in zip(found, eager, strict=True):
            assert torch.equal(mine.isnan(), theirs.isnan())
            assert torch.equal(mine.isinf(), theirs.isinf())


@pytest.mark.parametrize("last", [False, True])
def test_gradients_of_group_norm_store_one_image(last: bool) -> None:
    """That of the input: the products with the gradient are summed for each channel, not stored."""
    x = torch.randn(2, 64, 16, 16)
    x = x.to(memory_format=torch.channels_last) if last else x
    mean, scale, weight = torch.randn(2, 8), torch.rand(2, 8), torch.randn(64)

    def gradients(*args: Tensor) -> tuple[Tensor, ...]:
        sizes = (2, 64, 256, 8)
        return torch.ops.aten.native_group_norm_backward(*args, *sizes, [True, True, True])

    (program,) = record(gradients, x, x, mean, scale, weight).programs
    sizes = [math.prod(b["shape"]) for b in program.serialized["buffers"] if b["role"] == "temp"]
    assert sizes.count(x.numel()) == 1 and max(sizes) == x.numel()


def test_moments_of_empty_rows() -> None:
    torch.compiler.reset()
    fn = torch.compile(lambda x: (x.sum(1), x.mean(1), x.var(1)), backend="cpugraph", dynamic=True)
    for size in (200, 3, 0):
        x = torch.ones(3, size)
        total, mean, variance = fn(x)
        assert torch.equal(total, x.sum(1))
        assert torch.equal(mean.nan_to_num(7), x.mean(1).nan_to_num(7))
        assert torch.equal(variance.nan_to_num(7), x.var(1).nan_to_num(7))


def test_only_distances_below_the_maximum_are_summed_online() -> None:
    """A sum so far may be rescaled where the exponent is x - max(x), and for no other exponent."""

    def sums(x: Tensor) -> tuple[Tensor, ...]:
        below = x - x.amax(-1, keepdim=True)
        return below.exp().sum(-1), (below * below * -0.5).exp().sum(-1)

    x = torch.randn(4, 8192)
    for k in range(2):
        compiled = torch.compile(lambda x, k=k: sums(x)[k], backend="cpugraph")
        torch.testing.assert_close(compiled(x).double(), sums(x.double())[k], rtol=1e-6, atol=0.0)


# ---- remainders of floats ------------------------------------------------------------------------

NUMBERS = [0.0, -0.0, 1, -1, 2.5, -2.5, 7, -7, math.inf, -math.inf, math.nan, 1e-45, 3e38, -3e38]
NUMBERS += [1e-38, 1e30, 0.1, 16777216.0, 5e-39, 2.0**29, 2.0**29 + 64]


@pytest.mark.parametrize("level", ["native", "x86-64-v3", "x86-64-v2"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_remainders_are_exact(dtype: torch.dtype, level: str) -> None:
    """Every pair of special numbers, and numbers of any magnitude; eager's scalar loops are exact,
    and its vectors give NaN for large quotients."""
    torch.manual_seed(0)
    numbers = torch.tensor(NUMBERS)
    drawn = [torch.randn(500) * 10 ** torch.empty(500).uniform_(-20, 20) for _ in range(2)]
    a = torch.cat([numbers.repeat_interleave(len(numbers)), drawn[0]]).to(dtype)
    b = torch.cat([numbers.repeat(len(numbers)), drawn[1]]).to(dtype)
    options = {} if level == "native" else {"cxx_flags": f"-march={level}"}
    for fn in (torch.fmod, torch.remainder, torch.floor_divide):
        found = torch.compile(fn, backend="cpugraph", options=options)(a, b)
        eager = torch.stack([fn(x, y) for x, y in zip(a, b, strict=True)])
        same = (found == eager) & (found.signbit() == eager.signbit())
        wrong = ~(same | (found.isnan() & eager.isnan()))
        assert not wrong.any(), (fn, a[wrong][:5], b[wrong][:5], found[wrong][:5], eager[wrong][:5])


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("scale", [1e-25, 1e25])
@pytest.mark.parametrize("dim", [0, 1, (0, 1)])
def test_deviations_whose_squares_leave_float32(
    dtype: torch.dtype, scale: float, dim: int | tuple[int, ...]
) -> None:
    """Eager accumulates variances in double."""

    def deviations(x: Tensor) -> tuple[Tensor, ...]:
        return x.std(dim), *torch.std_mean(x, dim)

    x = (torch.randn(40, 70) * scale).to(dtype)
    wanted = deviations(x.double())
    for value, exact in zip(compiled(deviations)(x), wanted, strict=True):
        bound = torch.finfo(dtype).eps * exact.abs().max().item()
        assert worst(value, exact) <= bound


def test_a_column_is_replaced_without_a_condition_on_each_element() -> None:
    x, y = torch.randn(8, 96), torch.randn(8)
    assert "?" not in text_of(lambda x, y: x.select_scatter(y, 1, 5), x, y)


@pytest.mark.parametrize("shape", [(64, 96), (96, 64)])
def test_a_diagonal_is_stored_over_a_copy(shape: tuple[int, int]) -> None:
    x, y = torch.randn(shape), torch.randn(64)
    assert "?" not in text_of(torch.diagonal_scatter, x, y)
    assert "?" not in text_of(torch.diag_embed, x)


@pytest.mark.parametrize("size", [24, 25])
@pytest.mark.parametrize(("start", "step"), [(0, 2), (1, 2), (4, 3), (3, 4), (1, 7)])
def test_a_slice_with_a_step_is_replaced_without_conditions(
    start: int, step: int, size: int
) -> None:
    x = torch.randn(40, size)
    y = torch.randn_like(x[:, start::step])

    def replaced(x: Tensor, y: Tensor) -> Tensor:
        return x.slice_scatter(y, 1, start, None, step)

    text = text_of(replaced, x, y)
    assert "?" not in text and "%" not in text
    assert torch.equal(compiled(replaced)(x, y), replaced(x, y))


@pytest.mark.parametrize(("columns", "divided"), [(2, False), (8, False), (31, False), (37, True)])
def test_scattered_rows_are_divided_in_vectors(columns: int, divided: bool) -> None:
    """Threads own no range of a row that would fill no vector: one of them adds narrow rows."""
    x, index = torch.randn(300, columns), torch.randint(0, 20, (300,))

    def added(x: Tensor, index: Tensor) -> Tensor:
        return torch.zeros(20, columns).index_add(0, index, x.exp())

    text = text_of(added, x, index)
    assert ("d_strips" in text) is divided and "#pragma omp simd" in text.partition("index_add")[2]
    torch.testing.assert_close(compiled(added)(x, index), added(x, index))


BITS = torch.arange(-(2**15), 2**15, dtype=torch.int16).reshape(256, 256)
MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "tril": torch.tril,
    "pad": lambda x: torch.nn.functional.pad(x, (1, 2), value=3.3),
    "where": lambda x: torch.where(torch.arange(256) > 200, x, x.t()),
    "concatenated": lambda x: torch.cat([x[:, :7].t(), x[:4]], 0)[:, 3:],
    "column": lambda x: x.select_scatter(x[0], 1, 5),
    "masked_fill": lambda x: x.masked_fill(torch.arange(256) > 200, -2.7),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MOVES)
def test_elements_of_16_bits_are_selected_unconverted(name: str, dtype: torch.dtype) -> None:
    """NaNs of all kinds included, as in eager."""
    x = BITS.view(dtype)
    text = text_of(MOVES[name], x)
    assert not re.search("d_(from|to)_(f16|bf16)|d_widen|d_narrow", text)
    found = compiled(MOVES[name])(x)
    assert torch.equal(found.view(torch.int16), MOVES[name](x).view(torch.int16))


def test_the_maximum_of_a_window_is_converted_once() -> None:
    """Its values are compared: to choose among their bits, too, would be done twice."""
    x = torch.randn(2, 16, 9, 10).to(BF16).contiguous(memory_format=torch.channels_last)

    def pooled(x: Tensor) -> Tensor:
        return torch.nn.functional.max_pool2d(x, 3, 2, 1)

    text = text_of(pooled, x)
    assert "int16_t" not in text
    assert torch.equal(compiled(pooled)(x), pooled(x))


@pytest.mark.parametrize(("kernel", "step"), [(2, 2), (3, 2), (3, 1), (2, 3)])
def test_gradients_of_maxima_of_channels_last_images_are_gathered(kernel: int, step: int) -> None:
    """Equal maxima and NaN included; a point outside of all windows has no gradient."""
    x = torch.randint(-2, 3, (2, 16, 11, 12)).float().contiguous(memory_format=torch.channels_last)
    x[0, :, 3, 4] = float("nan")
    args = [kernel], [step], [kernel // 2], [1], False
    y, index = torch.ops.aten.max_pool2d_with_indices(x, *args)

    def gradient(g: Tensor, x: Tensor, index: Tensor) -> Tensor:
        return torch.ops.aten.max_pool2d_with_indices_backward(g, x, *args, index)

    g = torch.randn_like(y)
    assert "d_check_index" not in text_of(gradient, g, x, index)
    torch.testing.assert_close(compiled(gradient)(g, x, index), gradient(g, x, index))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool], ids=str)
def test_counts_are_added_up_one_after_another(dtype: torch.dtype) -> None:
    x = torch.randint(0, 2, (7, 300)).to(dtype)
    assert "d_running_sum" not in text_of(lambda x: x.cumsum(1), x)
    assert torch.equal(compiled(lambda x: x.cumsum(1))(x), x.cumsum(1))
