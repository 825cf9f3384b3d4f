"""Numbers that a dtype does not hold: eager refuses or wraps them, and so does compiled code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import torch
import torch.nn.functional as F

from dicp.compare import Rule, check_tensor
from dicp.dtypes import fits
from dicp.testing import BackendUnderTest

BYTE, HALF, WORD = torch.uint8, torch.float16, torch.int32
INDEX = LABELS = torch.tensor([0, 2])

CALLS: dict[str, Callable[..., Any]] = {
    "full": lambda x, n: torch.full((3,), n, dtype=x.dtype),
    "full_like": torch.full_like,
    "new_full": lambda x, n: x.new_full((3,), n),
    "fill": lambda x, n: x.clone().fill_(n),
    "masked_fill": lambda x, n: x.masked_fill(x > 1, n),
    "where": lambda x, n: torch.where(x > 1, x, n),
    "index_fill": lambda x, n: x.index_fill(0, INDEX, n),
    "scatter": lambda x, n: x.scatter(0, INDEX, n),
    "pad": lambda x, n: F.pad(x, (1, 1), value=n),
    "clamp": lambda x, n: x.clamp(0, n),
    "clamp_min": lambda x, n: x.clamp(min=n),
    "hardtanh": lambda x, n: F.hardtanh(x, 0, n),
    "threshold": lambda x, n: F.threshold(x, 1, n),
    "alpha": lambda x, n: torch.add(x, x, alpha=n),
    "addcmul": lambda x, n: torch.addcmul(x, x, x, value=n),
    "elu": lambda x, n: F.elu(x, n),
    "softplus": lambda x, n: F.softplus(x, n),
    "addmm": lambda x, n: torch.addmm(x, x[None], x.new_ones(3, 3), beta=n),
    "pow": lambda x, n: x.pow(n),
    "linspace": lambda x, n: torch.linspace(0, n, 3, dtype=x.dtype),
    "add": lambda x, n: x + n,
    "less": lambda x, n: x < n,
}  # fmt: skip
NUMBERS = [(BYTE, 300), (BYTE, -1), (HALF, 1e5), (WORD, 2**40), (torch.float32, 1e39)]


@pytest.mark.parametrize("name", CALLS)
def test_a_number_is_taken_or_refused_as_by_eager(name: str, backend: BackendUnderTest) -> None:
    for dtype, number in NUMBERS:
        x = torch.tensor([1, 2, 3]).to(dtype)

        def call(x: torch.Tensor, number: Any = number) -> torch.Tensor:
            return CALLS[name](x, number)

        backend.start_over()
        compiled = torch.compile(call, backend=backend)
        try:
            wanted = call(x)
        except (RuntimeError, ValueError):
            with pytest.raises((RuntimeError, ValueError)):
                compiled(x)
        else:
            assert torch.equal(compiled(x), wanted), (dtype, number)


def test_what_fits_is_what_a_tensor_is_filled_with() -> None:
    numbers = [0, 1, -1, 255, 256, -255, -256, 127, 128, -128, -129, 65504, 65505, 2**31, -(2**31),
               2**40, 2**63 - 1, -(2**63), 0.5, -0.5, 255.0, 255.5, -1.0, 65504.0, 65520.0, 2.0**31,
               2.0**63, 1e19, 3.4e38, 3.41e38, 1e39, -1e39, float("inf"), float("nan"), True]  # fmt: skip  # noqa: E501
    integers = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
    for dtype in (*integers, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for number in numbers:
            try:
                torch.full((2,), number, dtype=dtype)
                taken = True
            except RuntimeError:
                taken = False
            assert fits(number, dtype) == taken, (number, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_powers_of_half_of_special_numbers(dtype: torch.dtype, backend_name: str) -> None:
    """The square root of -0.0 and of -inf is another number; eager takes it in some dtypes."""
    x = torch.tensor([-torch.inf, -0.0, 0.0, torch.inf, -4.0, 2.0], dtype=dtype).repeat(6)
    for power in (0.5, -0.5):
        for exponent in (power, torch.full_like(x, power)):
            fn = lambda x, exponent=exponent: torch.pow(x, exponent)  # noqa: E731
            torch._dynamo.reset()
            compiled = torch.compile(fn, backend=backend_name, fullgraph=True)
            got, eager = compiled(x), fn(x)
            torch.testing.assert_close(got, eager, equal_nan=True)
            negative = [y.nan_to_num(1, torch.inf, -torch.inf).signbit() for y in (got, eager)]
            assert torch.equal(*negative), (got, eager)


@pytest.mark.parametrize("decimals", [30, 400, -400])
def test_rounding_to_digits_beyond_the_largest_number(decimals: int, backend_name: str) -> None:
    """The power of 10 is infinite: infinity over infinity."""
    x = torch.tensor([1.5, 0.0, -2.0])
    compiled = torch.compile(lambda x: x.round(decimals=decimals), backend=backend_name)
    torch.testing.assert_close(compiled(x), x.round(decimals=decimals), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_powers_of_two_beyond_the_dtype(dtype: torch.dtype, backend_name: str) -> None:
    numbers = [torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.5, -3.3, 2.0**-140, 2.0**100, 1e300]
    exponents = torch.tensor([-5000, -1100, -300, -240, -24, 0, 3, 200, 240, 2000, 5000])
    x = torch.tensor(numbers, dtype=torch.float64).to(dtype)[:, None].expand(-1, len(exponents))
    compiled = torch.compile(torch.ldexp, backend=backend_name, fullgraph=True)
    for each in (exponents, exponents.int()):
        assert not check_tensor(compiled(x, each), torch.ldexp(x, each), None, Rule(exact=True))


def test_fractional_powers_of_two_beside_wider_numbers(backend_name: str) -> None:
    """2 has the dtype of the first operand; an exponent without dimensions does not lower it."""
    dtypes = torch.float64, torch.bfloat16, torch.float16
    x = [torch.tensor([100.0, 3.0]).to(dtype) for dtype in dtypes]
    exponents = [torch.tensor(2.3).to(dtype) for dtype in (torch.float32, *dtypes)]
    exponents += [torch.full((1,), 2.3)]

    def powers(x: list[torch.Tensor], exponents: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.ldexp(each, exponent) for each in x for exponent in exponents]

    compiled = torch.compile(powers, backend=backend_name, fullgraph=True)
    for got, eager in zip(compiled(x, exponents), powers(x, exponents), strict=True):
        assert not check_tensor(got, eager, None, Rule())


@pytest.mark.parametrize(
    ("fn", "dtypes"),
    [
        (torch.complex, (torch.float32, torch.float64)),
        (torch.polar, (torch.float32, torch.float64)),
        (lambda x, y: torch.addcdiv(x, x, y), (torch.bool, torch.bool)),
        (torch.hypot, (torch.int64, torch.int64)),
        (torch.fmod, (torch.bool, torch.bool)),
        (torch.relu, (torch.bool,)),
        (F.gelu, (torch.int64,)),
        (lambda x: x.log_softmax(0), (torch.int64,)),
        (torch.var, (torch.int64,)),
        (torch.special.ndtr, (torch.complex64,)),
        (torch.special.log_ndtr, (torch.complex64,)),
    ],
    ids=[
        "complex", "polar", "addcdiv", "hypot", "fmod", "relu", "gelu", "log_softmax", "var",
        "ndtr", "log_ndtr",
    ],
)  # fmt: skip
def test_dtypes_are_refused_as_by_eager(fn: Any, dtypes: Any, backend: BackendUnderTest) -> None:
    given = [torch.ones(3, dtype=dtype) for dtype in dtypes]
    with pytest.raises(RuntimeError) as refusal:
        fn(*given)
    with pytest.raises(type(refusal.value)):
        torch.compile(fn, backend=backend)(*given)


IMAGE, ROWS = (1, 2, 4, 4), (2, 3)
KINDS: dict[str, tuple[tuple[int, ...], Callable[..., Any], tuple[torch.dtype, ...]]] = {
    **{
        mode: (
            (1, 2, *[4] * rank),
            lambda x, mode=mode: F.interpolate(x, scale_factor=2, mode=mode),
            dtypes,
        )
        for mode, rank, dtypes in (
            ("nearest", 3, (torch.bool, torch.int64, torch.complex64)),
            ("nearest-exact", 2, (torch.int8, torch.complex64)),
            ("linear", 1, (torch.uint8, torch.int32)),
            ("bilinear", 2, (torch.bool, torch.int64)),
            ("bicubic", 2, (torch.int8,)),
        )
    },
    "unfold": (IMAGE, lambda x: F.unfold(x, 2), (torch.int64,)),
    "hardshrink": (ROWS, F.hardshrink, (torch.int64, torch.complex64)),
    "mse_loss": (ROWS, lambda x: F.mse_loss(x, x), (torch.complex64,)),
    "huber_loss": (ROWS, lambda x: F.huber_loss(x, x), (torch.complex64,)),
    "smooth_l1_loss": (ROWS, lambda x: F.smooth_l1_loss(x, x), (torch.complex64,)),
    "multi_margin_loss": (
        ROWS, lambda x: F.multi_margin_loss(x, LABELS), (torch.bool, torch.int64),
    ),
    "multilabel_margin_loss": (
        ROWS, lambda x: F.multilabel_margin_loss(x, LABELS[:, None].repeat(1, 3)), (torch.int64,),
    ),
    "softmax's gradient": (
        ROWS, lambda x: torch.ops.aten._softmax_backward_data(x, x, 1, x.dtype), (torch.int64,),
    ),
    "batch_norm": (
        ROWS, lambda x: F.batch_norm(x, x[0], x[0]), (torch.int64, torch.uint8),
    ),
    "nansum": (ROWS, torch.nansum, (torch.complex64,)),
    "xlogy": (ROWS, lambda x: torch.xlogy(x, x), (torch.complex64,)),
    "zeta": (ROWS, lambda x: torch.special.zeta(x, x), (torch.float16, torch.bfloat16)),
    "polar": (ROWS, lambda x: torch.polar(x, x), (torch.float16,)),
    "bitwise_and": (ROWS, lambda x: x & x, (torch.float32,)),
    "bitwise_or of a number": (ROWS, lambda x: x | 1, (torch.float32,)),
    "bitwise_not": (ROWS, torch.bitwise_not, (torch.float32,)),
    "shift": (ROWS, lambda x: torch.bitwise_left_shift(x, x), (torch.float32, torch.bool)),
    "round": (ROWS, lambda x: x.round(decimals=0), (torch.int64, torch.bool)),
    "difference": (ROWS, lambda x: 1.5 * x - x, (torch.bool,)),
    "cumsum": (ROWS, lambda x: x.cumsum(0, dtype=x.dtype), (torch.bool,)),
    "scatter_reduce": (
        ROWS, lambda x: x.scatter_reduce(1, LABELS[:, None], x, "mean"), (torch.bool,),
    ),
    "trace": (ROWS, torch.trace, (torch.bool,)),
    "cross": (ROWS, lambda x: torch.linalg.cross(x, x), (torch.bool,)),
    "mvlgamma": (ROWS, lambda x: torch.mvlgamma(x, 1), (torch.bool,)),
    "randint_like": (ROWS, lambda x: torch.randint_like(x, 300), (torch.bool, torch.uint8)),
    "randint_like below 0": (ROWS, lambda x: torch.randint_like(x, -5, 5), (torch.uint8,)),
    "randint": (
        ROWS, lambda x: torch.randint(10**5, (3,), dtype=x.dtype),
        (torch.bool, torch.uint8, torch.int16, torch.float16, torch.complex64),
    ),
    "randint below 0": (
        ROWS, lambda x: torch.randint(-5, 2, (3,), dtype=x.dtype), (torch.bool, torch.uint8),
    ),
    "uniform": (ROWS, lambda x: x.clone().uniform_(0, 1e6), (torch.float16,)),
    "uniform of a wide range": (
        ROWS, lambda x: x.clone().uniform_(-6e4, 6e4), (torch.float16,),
    ),
    "index of index_select": (
        ROWS, lambda x: torch.eye(3).index_select(0, x[0]), (torch.float32, torch.uint8),
    ),
    "index of index_add": (
        ROWS, lambda x: torch.eye(3).index_add(0, x[0], torch.eye(3)), (torch.float32,),
    ),
    "index of index_copy": (
        ROWS, lambda x: torch.eye(3).index_copy(0, x[0, :1], torch.ones(1, 3)), (torch.int32,),
    ),
    "index of put": (
        ROWS, lambda x: torch.eye(3).put(x[0], torch.ones(3), True), (torch.float32, torch.int32),
    ),
    "index of index_put": (
        ROWS, lambda x: torch.eye(3).index_put((x[0, :1],), torch.ones(3)), (torch.int16,),
    ),
    "index of index_fill": (ROWS, lambda x: torch.eye(3).index_fill(0, x[0], 2.0), (torch.int32,)),
    "target of nll_loss": (
        ROWS, lambda x: F.nll_loss(torch.eye(2, 3), x[:, 0]), (torch.int32, torch.float32),
    ),
    "target of nll_loss for images": (
        ROWS, lambda x: F.nll_loss(torch.ones(2, 3, 1, 1), x[:, :1, None]), (torch.int32,),
    ),
}  # fmt: skip
"""Shape, call and dtypes that eager refuses and fake tensors take."""


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_numbers_are_refused_as_by_eager(name: str, backend: BackendUnderTest) -> None:
    shape, call, dtypes = KINDS[name]
    for dtype in dtypes:
        x = torch.ones(shape, dtype=dtype)
        with pytest.raises((RuntimeError, IndexError)) as refusal:
            call(x)
        backend.start_over()
        with pytest.raises(type(refusal.value)):
            torch.compile(lambda x: call(x), backend=backend)(x)


PAIRS: dict[str, Callable[..., Any]] = {
    "index_put": lambda x, y: x.index_put((INDEX,), y[INDEX]),
    "index_put of sums": lambda x, y: x.index_put((INDEX,), y[INDEX], accumulate=True),
    "index_put of one number": lambda x, y: x.index_put((INDEX,), y[0, 0]),
    "index_put of sums at a mask": lambda x, y: x.index_put((x > 0.5,), y[0, 0], accumulate=True),
    "index_add": lambda x, y: x.index_add(0, INDEX, y[INDEX]),
    "index_copy": lambda x, y: x.index_copy(0, INDEX, y[INDEX]),
    "index_reduce": lambda x, y: x.index_reduce(0, INDEX, y[INDEX], "amax"),
    "put": lambda x, y: x.put(INDEX, y[0, INDEX]),
    "nll_loss": lambda x, y: F.nll_loss(x, torch.arange(3), weight=y[0]),
    "nll_loss of images": lambda x, y: F.nll_loss(
        x[..., None, None], torch.arange(3).reshape(3, 1, 1), weight=y[0]
    ),
    "binary_cross_entropy": F.binary_cross_entropy,
    "gradient of binary_cross_entropy": lambda x, y: torch.ops.aten.binary_cross_entropy_backward(
        x, x, y
    ),
    "heaviside": torch.heaviside,
    "cross": torch.linalg.cross,
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_dtypes_are_refused_as_by_eager(name: str, backend: BackendUnderTest) -> None:
    x, call = torch.rand(3, 3), PAIRS[name]
    for dtype in (torch.float16, torch.int64, x.dtype):
        y = (x > 0.5).to(dtype)
        backend.start_over()
        compiled = torch.compile(lambda x, y: call(x, y), backend=backend)
        if dtype == x.dtype:
            torch.testing.assert_close(compiled(x, y), call(x, y))
            continue
        with pytest.raises(RuntimeError) as refusal:
            call(x, y)
        with pytest.raises(type(refusal.value)):
            compiled(x, y)


def test_a_mask_is_filled_with_a_number_of_another_dtype(backend_name: str) -> None:
    def fn(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x.index_put((x > 0.5,), n)

    x, n = torch.rand(3, 3), torch.tensor(2.5, dtype=torch.float16)
    compiled = torch.compile(fn, backend=backend_name, fullgraph=True)
    torch.testing.assert_close(compiled(x, n), fn(x, n))


def test_operands_of_two_dtypes_are_taken_as_by_eager(backend: BackendUnderTest) -> None:
    """One of a dtype that eager refuses alone."""
    whole, half = torch.tensor([3, 4, 5]), torch.tensor([0.5, 1.5, 2.5])

    def fn(whole: torch.Tensor, half: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.hypot(whole, half), torch.fmod(whole > 3, half), (whole > 3).clamp(max=half)

    compiled = torch.compile(fn, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(whole, half), fn(whole, half))


LOGARITHMS: dict[str, Callable[..., Any]] = {
    "xlogy": lambda x, n: torch.xlogy(x, n),
    "xlogy of a number": lambda x, n: torch.xlogy(n, x),
    "xlog1py": lambda x, n: torch.special.xlog1py(x, n),
    "xlog1py of a number": lambda x, n: torch.special.xlog1py(n, x),
}


@pytest.mark.parametrize("name", LOGARITHMS)
def test_logarithms_take_any_number(name: str, backend: BackendUnderTest) -> None:
    halves = ((HALF, 1e6), (HALF, 65505.0), (HALF, 70000))
    for dtype, number in (*halves, (torch.float32, 1e300), (BYTE, 1e300), (torch.float32, 2.5)):
        x = torch.tensor([0, 2, 3]).to(dtype)
        backend.start_over()
        compiled = torch.compile(lambda x, n=number: LOGARITHMS[name](x, n), backend=backend)
        torch.testing.assert_close(compiled(x), LOGARITHMS[name](x, number), equal_nan=True)


REFUSED: dict[str, Callable[..., Any]] = {
    "celu": lambda x, n: F.celu(x, n),
    "smooth_l1": lambda x, n: F.smooth_l1_loss(x, x * 2, beta=n),
    "difference": lambda x, n: x - n,
    "difference to a number": lambda x, n: n - x,
    "weighted sum": lambda x, n: torch.add(x, x, alpha=n),
    "weighted difference": lambda x, n: torch.sub(x, x, alpha=n),
}


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_are_refused_as_by_eager(name: str, backend: BackendUnderTest) -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    for number in (0.5, True, 0.0, False, -1.0, 1e-45, 1e300, 2):
        backend.start_over()
        compiled = torch.compile(lambda x, n=number: REFUSED[name](x, n), backend=backend)
        try:
            wanted = REFUSED[name](x, number)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                compiled(x)
        else:
            torch.testing.assert_close(compiled(x), wanted)


@pytest.mark.parametrize("name", ["weighted sum", "weighted difference"])
def test_symbolic_weights_are_refused_as_by_eager(name: str, backend: BackendUnderTest) -> None:
    """A sum of integers takes no floating-point number as its weight, not even a whole one."""
    x = torch.tensor([1, 2, 3])
    backend.start_over()
    compiled = torch.compile(REFUSED[name], backend=backend, dynamic=True)
    for number in (2.5, 7.0):
        with pytest.raises(RuntimeError, match="alpha must not be a floating point number"):
            compiled(x, number)
        torch.testing.assert_close(compiled(x * 0.5, number), REFUSED[name](x * 0.5, number))
    torch.testing.assert_close(compiled(x, 3), REFUSED[name](x, 3))


FAR = [0.0, -0.0, 1.0, -2.5, 5e-324, -2.3e-308, 1e-40, 1.7e308, torch.inf, -torch.inf, torch.nan]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_neighbours_of_special_numbers(dtype: torch.dtype, backend_name: str) -> None:
    x, y = torch.cartesian_prod(*[torch.tensor(FAR, dtype=torch.float64)] * 2).T.to(dtype)
    compiled = torch.compile(torch.nextafter, backend=backend_name, fullgraph=True)
    got, wanted = compiled(x, y), torch.nextafter(x, y)
    assert not check_tensor(got, wanted, None, Rule(exact=True))
    assert torch.equal(got.signbit() & ~got.isnan(), wanted.signbit() & ~wanted.isnan())


def test_remainders_of_large_quotients(backend_name: str) -> None:
    """One rounding of a quotient of doubles may reach the next integer."""
    quotients = torch.tensor(
        [1, 3, 2.0**29 + 1, 2.0**52 - 1, 2.0**53, 2.0**60], dtype=torch.float64
    )
    divisors = torch.tensor([0.1, -0.3, 7.0, 1e-310, 1e17], dtype=torch.float64)
    q, y = torch.cartesian_prod(quotients, divisors).T
    x, far = q * y, torch.tensor(FAR, dtype=torch.float64)
    x = torch.cat([x, torch.nextafter(x, torch.zeros_like(x)), -x, far])
    y = torch.cat([y, y, y, y[: len(far)]])
    compiled = torch.compile(torch.fmod, backend=backend_name, fullgraph=True)
    exact = [
        math.fmod(a, b) if math.isfinite(a) else math.nan
        for a, b in zip(x.tolist(), y.tolist(), strict=True)
    ]
    got, lost = compiled(x, y), torch.fmod(x, y).isnan()  # in eager's loop, for some quotients
    wanted = torch.where(got.isnan() & lost, got, torch.tensor(exact, dtype=torch.float64))
    assert not check_tensor(got, wanted, None, Rule(exact=True))


def test_inverse_error_function_up_to_its_ends(backend_name: str) -> None:
    steps = 2.0 ** -torch.arange(1, 54, dtype=torch.float64)
    x = torch.cat([1 - steps, steps - 1, steps, -steps, torch.tensor(FAR, dtype=torch.float64)])
    compiled = torch.compile(torch.erfinv, backend=backend_name, fullgraph=True)
    torch.testing.assert_close(compiled(x), torch.erfinv(x), rtol=2e-15, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fn", [torch.lgamma, torch.digamma])
def test_gamma_functions_of_special_numbers(
    fn: Callable[..., Any], dtype: torch.dtype, backend_name: str
) -> None:
    x = torch.tensor([*FAR, 2.0, 3.0, 0.5, 1e-3, 8.0, 10.0, 1e30, -1.0, -2.0, -0.25, -1e-20, -1e30])
    x = x.to(dtype)
    got = torch.compile(fn, backend=backend_name, fullgraph=True)(x)
    torch.testing.assert_close(got, fn(x), rtol=16 * torch.finfo(dtype).eps, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_interpolation_up_to_the_largest_number(dtype: torch.dtype, backend_name: str) -> None:
    """The product alone overflows where the result does not."""
    largest = torch.finfo(dtype).max
    ends = torch.tensor([largest, -largest, largest / 2, 3.0], dtype=dtype)
    start, weight = -torch.ones_like(ends), torch.tensor([-1.0, -1.0, -1.75, 0.6], dtype=dtype)
    compiled = torch.compile(torch.lerp, backend=backend_name, fullgraph=True)
    torch.testing.assert_close(compiled(start, ends, weight), torch.lerp(start, ends, weight))


def test_logarithms_of_the_normal_distribution(backend_name: str) -> None:
    x = torch.linspace(-12, 8, 301, dtype=torch.float64)
    compiled = torch.compile(torch.special.log_ndtr, backend=backend_name, fullgraph=True)
    torch.testing.assert_close(compiled(x), torch.special.log_ndtr(x), rtol=6e-16, atol=0)


def test_sums_of_truth_values_are_truth_values(backend_name: str) -> None:
    x = torch.zeros(7, 24)
    x[2], x[3, 5], x[4, :2], x[5] = 1, -2, torch.tensor([1.0, -1.0]), 0.5

    def sums(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.sum(y, dim, dtype=torch.bool)
            for y in (x, x.bool(), x.int())
            for dim in (0, 1, (0, 1))
        ]

    compiled = torch.compile(sums, backend=backend_name, fullgraph=True)
    for got, wanted in zip(compiled(x), sums(x), strict=True):
        assert got.dtype == torch.bool and torch.equal(got, wanted)


@pytest.mark.parametrize("fn", [torch.add, torch.sub], ids=["add", "sub"])
def test_sums_of_two_symbolic_numbers(fn: Any, backend_name: str) -> None:
    """PyTorch's functions take a number in a tensor's place."""
    for pair in ((3, 7), (-8.5, 1.75), (3, -1.75), (2.5, 3)):
        torch._dynamo.reset()
        run = torch.compile(lambda x, y: fn(x, y), backend=backend_name, dynamic=True)
        assert not check_tensor(run(*pair), fn(*pair), None, Rule())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_shifts_by_any_number(dtype: torch.dtype, backend_name: str) -> None:
    x = torch.tensor([0, 1, 127, 85]).to(dtype)
    x = torch.cat([x, ~x])
    by = torch.tensor([0, 3, 7, 8, 31, 32, 64, 127]).to(dtype)

    def shifts(x: torch.Tensor, by: torch.Tensor) -> list[torch.Tensor]:
        return [x[:, None] << by, x[:, None] >> by, x >> 8, x >> 100, x << 100]

    compiled = torch.compile(shifts, backend=backend_name, fullgraph=True)
    for got, wanted in zip(compiled(x, by), shifts(x, by), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_integers_beyond_the_dtype_wrap_around(dtype: torch.dtype, backend_name: str) -> None:
    def combined(x: torch.Tensor, number: int) -> tuple[torch.Tensor, ...]:
        return x == number, x < number, x + number, x * number, x & number

    x = torch.tensor([0, 1, 100]).to(dtype)
    compiled = torch.compile(combined, backend=backend_name, fullgraph=True, dynamic=True)
    for number in (2**40 + 1, -(2**35) - 3):
        for got, wanted in zip(compiled(x, number), combined(x, number), strict=True):
            assert torch.equal(got, wanted)


def test_doubles_beyond_32_bits_are_bytes_modulo_256(backend_name: str) -> None:
    numbers = [2.0**32 + 5, -(2.0**32) - 5, 2.0**31 + 3.7, 2.0**52 + 5, -(2.0**52) - 77]
    numbers += [2.0**62, 2.0**63, 1e300, torch.inf, -torch.inf, torch.nan]
    numbers += [-1.5, 300.7, 255.9, -0.7]
    x = torch.tensor(numbers, dtype=torch.float64).repeat(5)
    compiled = torch.compile(lambda x: x.to(torch.uint8), backend=backend_name, fullgraph=True)
    assert torch.equal(compiled(x), x.to(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_signs_of_infinite_complex_numbers(dtype: torch.dtype, backend_name: str) -> None:
    """In eager's vectorized loop, which divides each part by the absolute value."""
    parts = torch.tensor([0.0, -0.0, 1.0, -2.0, torch.inf, -torch.inf, torch.nan])
    x = torch.complex(*torch.cartesian_prod(parts, parts).T).to(dtype).repeat(16).reshape(28, 28)
    for each in (x, x.mT, x.conj()):
        torch._dynamo.reset()
        compiled = torch.compile(torch.sgn, backend=backend_name, fullgraph=True)
        got, wanted = compiled(each), torch.sgn(each)
        assert got.stride() == wanted.stride()
        torch.testing.assert_close(
            torch.view_as_real(got), torch.view_as_real(wanted), equal_nan=True
        )


def test_complex_differences_and_quotients_of_special_numbers(backend_name: str) -> None:
    """Sums multiply by 1 + 0j, differences by -1 + 0j; real zeros divide without their sign."""
    parts = torch.tensor([0.0, -0.0, 1.0, -2.0, torch.inf, -torch.inf, torch.nan])
    x = torch.complex(*torch.cartesian_prod(parts, parts).T)

    def combined(x: torch.Tensor, y: torch.Tensor, real: torch.Tensor) -> list[torch.Tensor]:
        rows = [x - y, y - real, real - y, torch.add(x, y, alpha=2), x + y]
        return [torch.view_as_real(row) for row in (*rows, x / real, x / y)]

    compiled = torch.compile(combined, backend=backend_name, fullgraph=True)
    inputs = (x[:, None], x[None], parts.repeat(7))
    for got, wanted in zip(compiled(*inputs), combined(*inputs), strict=True):
        torch.testing.assert_close(got, wanted, equal_nan=True)


def test_rounded_quotients_beyond_the_largest_number(backend_name: str) -> None:
    x = torch.tensor([2.0, -2.0, 1e30, -1e30, 1e38, 3.0]).repeat(8)
    y = torch.tensor([2.9e-39, -2.9e-39, 1e-20, -3e-9, 1e-3, torch.inf]).repeat_interleave(8)
    compiled = torch.compile(torch.floor_divide, backend=backend_name, fullgraph=True)
    torch.testing.assert_close(compiled(x, y), torch.floor_divide(x, y))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_subnormal_16_bit_floats(dtype: torch.dtype, backend_name: str) -> None:
    least = torch.finfo(dtype).smallest_normal
    x = (least * torch.tensor([0.5, -0.75, 0.125, 1.0, 2.0, 0.0])).to(dtype).repeat(8)

    def results(x: torch.Tensor) -> list[torch.Tensor]:
        return [x + x, x.float(), x == 0, x * 0.5, x.abs(), (x.float() * 0.75).to(dtype)]

    compiled = torch.compile(results, backend=backend_name, fullgraph=True)
    for got, wanted in zip(compiled(x), results(x), strict=True):
        assert torch.equal(got, wanted)


def test_gradient_of_tanh(backend_name: str) -> None:
    """1 - tanh(x)^2 magnifies the error of tanh by thousands: it must be as exact as eager's."""
    x = torch.linspace(-8, 8, 16001)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(torch.tanh(leaf).sum(), leaf)[0]

    compiled = torch.compile(lambda x: 1 - torch.tanh(x) ** 2, backend=backend_name)
    exact = gradient(x.double())
    mine, theirs = ((got.double() - exact).abs() / exact for got in (compiled(x), gradient(x)))
    for low in range(8):
        part = (x.abs() >= low) & (x.abs() < low + 1)
        assert mine[part].max() <= 2 * theirs[part].max() + 8 * torch.finfo(x.dtype).eps


TAILS: dict[str, Callable[..., Any]] = {
    "ndtr": torch.special.ndtr, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")
}  # fmt: skip


@pytest.mark.parametrize("name", TAILS)
def test_distributions_far_below_0(name: str, backend_name: str) -> None:
    x = torch.linspace(-9, -1, 2049, dtype=torch.float64)
    if name == "gelu_tanh":
        exact = x / (1 + torch.exp(-math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)))
    else:
        cdf = torch.special.erfc(x * -math.sqrt(0.5)) / 2
        exact = cdf if name == "ndtr" else x * cdf
    got = torch.compile(TAILS[name], backend=backend_name, fullgraph=True)(x)
    mine, theirs = ((result - exact).abs() / exact.abs() for result in (got, TAILS[name](x)))
    for low in range(-9, -1):
        part = (x >= low) & (x <= low + 1)
        assert mine[part].max() <= 2 * theirs[part].max() + 1e-13


def test_gelu_of_float64(backend_name: str) -> None:
    """Below 0 its error function magnifies the rounding of its argument."""
    below = -9 if backend_name in ("cpugraph", "macagraph") else 0  # the others subtract, as eager
    x = torch.linspace(below, 3, 240, dtype=torch.float64)
    got = torch.compile(F.gelu, backend=backend_name, fullgraph=True)(x)
    with mpmath.workdps(30):
        for value, result in zip(x.tolist(), got.tolist(), strict=True):
            exact = value * mpmath.ncdf(value)
            assert abs(result - exact) <= 4 * torch.finfo(x.dtype).eps * abs(exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_16_bit_floats_are_rounded_once(dtype: torch.dtype, backend_name: str) -> None:
    def sums(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [torch.addcmul(x, a, b), torch.addcdiv(x, a, b), torch.add(x, a, alpha=2)]

    gen = torch.Generator().manual_seed(0)
    given = [torch.randn(2048, generator=gen).to(dtype) for _ in range(3)]
    compiled = torch.compile(sums, backend=backend_name, fullgraph=True)
    exact = sums(*(x.double() for x in given))
    for got, eager, real in zip(compiled(*given), sums(*given), exact, strict=True):
        assert not check_tensor(got, eager, real, Rule(elementwise=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_elu_of_zero_is_zero_for_any_factor(dtype: torch.dtype, backend_name: str) -> None:
    x = torch.tensor([0.0, 1.5, -1.5, torch.nan, -torch.inf], dtype=dtype)

    def elus(x: torch.Tensor) -> list[torch.Tensor]:
        return [f(x, n) for f in (F.elu, F.celu) for n in (torch.inf, -torch.inf, torch.nan, 0.3)]

    compiled = torch.compile(elus, backend=backend_name, fullgraph=True)
    for got, eager in zip(compiled(x), elus(x), strict=True):
        assert not check_tensor(got, eager, None, Rule())


WRITES: dict[str, Callable[..., Any]] = {
    "nothing reads it": lambda s, x, a: (s.add_(1), x * 2)[1],
    "beside a Python number": lambda s, x, a: (s.add_(1), x * a + s)[1],
    "with a gradient": lambda s, x, a: (s.mul_(2), (x.requires_grad_() * x).sum())[1],
    "after item()": lambda s, x, a: x * (s.item(), s.add_(1))[0],
    "before item()": lambda s, x, a: x * (s.add_(1), s.item())[1],
}


@pytest.mark.parametrize("name", WRITES)
def test_a_float64_without_dimensions_is_written_to(name: str, backend_name: str) -> None:
    """Dynamo has a symbol for its item(), and took it for a number that it may make a constant."""
    fn = WRITES[name]
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(fn, backend=backend_name)
        for number, factor in ((5.0, 2.5), (7.0, 3.5), (8.0, 4.5)):
            mine = torch.tensor(number, dtype=torch.float64)
            theirs = mine.clone()
            found = compiled(mine, torch.ones(2), factor)
            torch.testing.assert_close(found, fn(theirs, torch.ones(2), factor))
            assert mine == theirs, (mine, theirs)
