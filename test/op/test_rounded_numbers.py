"""Python numbers beside short floats that do not hold them: eager rounds some to the dtype first.

Which ones is an operator's own affair: a remainder by 0.01 depends on each digit of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dicp.compare import Rule, check_tensor

NUMBERS = (0.01, 1 / 3, 3.3, 257.7)
ELEMENTS = (1.0, -1.0, 0.01, 0.1, 1 / 3, 3.3, 0.7, 257.7, -0.01, 2.5, -7.0, 0.3, -257.7, 5.0)
Call = Callable[[Tensor, float], Tensor]

SAME_BITS: dict[str, Call] = {
    "fmod": torch.fmod,
    "remainder": torch.remainder,
    "remainder_of_number": lambda x, n: n % x,
    "fmod_by_tensor": lambda x, n: torch.fmod(x, torch.tensor(n)),
    "remainder_by_tensor": lambda x, n: torch.remainder(x, torch.tensor(n)),
    "divide_down": lambda x, n: torch.div(x, n, rounding_mode="floor"),
    "divide_towards_zero": lambda x, n: torch.div(x, n, rounding_mode="trunc"),
    "floor_divide": lambda x, n: x // n,
    "copysign": torch.copysign,
    "multiply": lambda x, n: x * n,
    "divide": lambda x, n: x / n,
    "multiply_by_tensor": lambda x, n: x * torch.tensor(n),
    "divide_by_tensor": lambda x, n: x / torch.tensor(n),
    "divide_down_by_tensor": lambda x, n: x // torch.tensor(n),
    "divide_towards_zero_by_tensor": lambda x, n: torch.div(
        x, torch.tensor(n), rounding_mode="trunc"
    ),
    "equal": lambda x, n: x == n,
    "not_equal": lambda x, n: x != n,
    "less": lambda x, n: x < n,
    "less_or_equal": lambda x, n: x <= n,
    "greater": lambda x, n: x > n,
    "greater_or_equal": lambda x, n: x >= n,
    "less_than_tensor": lambda x, n: x < torch.tensor(n),
    "where": lambda x, n: torch.where(x > 0, x, n),
    "masked_fill": lambda x, n: x.masked_fill(x > 0, n),
    "clamp_min": lambda x, n: x.clamp(min=n),
    "clamp_max": lambda x, n: x.clamp(max=n),
    "hardtanh": lambda x, n: F.hardtanh(x, -n, n),
    "threshold": lambda x, n: F.threshold(x, n, n),
    "hardshrink": F.hardshrink,
    "isin": torch.isin,
}
NEAR: dict[str, Call] = {
    "add": lambda x, n: x + n,
    "subtract": lambda x, n: x - n,
    "subtract_from": lambda x, n: n - x,
    "divide_number": lambda x, n: n / x,
    "power": lambda x, n: x.abs() ** n,
    "add_scaled": lambda x, n: torch.add(x, x, alpha=n),
    "subtract_scaled": lambda x, n: torch.sub(x, x, alpha=n),
    "scaled_subtract_from": lambda x, n: torch.rsub(x, x, alpha=n),
    "add_scaled_number": lambda x, n: torch.add(x, n, alpha=3),
    "subtract_scaled_number": lambda x, n: torch.sub(x, n, alpha=3),
    "addcmul": lambda x, n: torch.addcmul(x, x, x, value=n),
    "addcdiv": lambda x, n: torch.addcdiv(x, x, x, value=n),
    "lerp": lambda x, n: torch.lerp(x, -x, n),
    "xlogy": lambda x, n: torch.xlogy(x.abs(), n),
    "xlogy_of_number": lambda x, n: torch.xlogy(n, x.abs()),
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "celu": F.celu,
    "softplus": F.softplus,
    "nan_to_num": lambda x, n: (x / 0).nan_to_num(n, n, n),
    "float_power": lambda x, n: torch.float_power(x.abs(), n),
    "atan2": lambda x, n: torch.atan2(x, torch.tensor(n)),
    "hypot": lambda x, n: torch.hypot(x, torch.tensor(n)),
    "smooth_l1": lambda x, n: F.smooth_l1_loss(x, x * 0, beta=n, reduction="none"),
    "huber": lambda x, n: F.huber_loss(x, x * 0, delta=n, reduction="none"),
}


def all_calls(calls: dict[str, Call], x: Tensor) -> list[Tensor]:
    return [call(x, number) for call in calls.values() for number in NUMBERS]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("calls", [SAME_BITS, NEAR], ids=["same_bits", "near"])
def test_number(calls: dict[str, Call], dtype: torch.dtype, backend_name: str) -> None:
    x = torch.tensor(ELEMENTS, dtype=torch.float64).to(dtype)
    compiled = torch.compile(all_calls, backend=backend_name, fullgraph=True)(calls, x)
    names = [(name, number) for name in calls for number in NUMBERS]
    rule = Rule(exact=calls is SAME_BITS)
    found = zip(names, compiled, all_calls(calls, x), all_calls(calls, x.double()), strict=True)
    wrong = {
        name: p for name, got, eager, exact in found if (p := check_tensor(got, eager, exact, rule))
    }
    assert not wrong


def test_softshrink_is_decomposed_by_pytorch(backend_name: str) -> None:
    """PyTorch compares with a rounded limit, eager's kernel does not: of a compiled program PyTorch
    shows the comparison alone."""

    def shrink(x: Tensor) -> Tensor:
        return F.softshrink(x, 0.01)

    x = torch.tensor([0.01, -0.01, 1.0]).bfloat16()
    given = torch.compile(shrink, backend="aot_eager")(x)
    assert not torch.equal(given, shrink(x)), "PyTorch has fixed this: compare with eager"
    torch.compiler.reset()
    assert torch.equal(torch.compile(shrink, backend=backend_name)(x), given)


JUMPS: dict[str, Callable[[Tensor], Tensor]] = {
    "floor": torch.floor,
    "round": torch.round,
    "remainder": lambda y: y % 1,
    "truncated_quotient": lambda y: torch.div(y, 0.5, rounding_mode="trunc"),
    "integer": lambda y: y.clamp(-9, 9).to(torch.int32),
    "infinite": torch.isinf,
    "positive_infinity": torch.isposinf,
    "infinity_replaced": lambda y: y.nan_to_num(posinf=2.0),
    "step": lambda y: torch.heaviside(y, torch.tensor(0.5).to(y)),
    "threshold": lambda y: F.threshold(y, 1.5, 7.0),
    "fraction": torch.frac,
    "floor_of_converted": lambda y: y.double().floor(),
    "not": torch.logical_not,
    "any": lambda y: y.any(-1),
    "place": lambda y: y.argmax(-1),
    "place_of_copy": lambda y: y.t().contiguous().argmin(0),
    "place_so_far": lambda y: y.cummax(-1)[1],
    "place_in_window": lambda y: F.max_pool2d(y[None], 3, 1, 1, return_indices=True)[1],
    "place_in_range": lambda y: F.adaptive_max_pool2d(y[None], (7, 30), return_indices=True)[1],
    "places_of_parts": lambda y: torch.cat([y, y.flip(0)], 1).max(-1)[1],
}
ROOTS: dict[str, Callable[[Tensor], Tensor]] = {
    "below_window": lambda y: (F.max_pool2d(y[None], 3, 1, 1)[0] - y).sqrt(),
    "below_largest": lambda y: (y.amax(-1, keepdim=True) - y).sqrt(),
    "above_smallest": lambda y: (y - y.min(-1, keepdim=True)[0]).sqrt(),
    "above_floor": lambda y: (y - y.floor()).sqrt(),
    "above_limit": lambda y: torch.where(y > 0.1, (y - torch.tensor(0.1).to(y)).sqrt(), 0.0),
}
"""Roots of numbers that are not negative if both operands are what the operator has read."""


def factors_of_jumps(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers whose products lie near integers, near each other, and where rounding overflows and
    underflows."""
    torch.manual_seed(0)
    a, b = torch.randn(48, 200).to(dtype), (1 + torch.rand(48, 200)).to(dtype)
    # Maxima of rounded products are often equal.
    a[24:], b[24:] = a[24:] % 0.1 + 1.9, b[24:] % 0.1 + 1
    eps = torch.finfo(dtype).eps
    a[0], b[0] = (1 + eps) * 2.0 ** math.floor(math.log2(torch.finfo(dtype).max)), 2 - 2 * eps
    a[1] = b[1] = torch.tensor(torch.finfo(dtype).smallest_normal * eps).sqrt() / 2
    return a, b


@pytest.mark.parametrize("stored", [False, True], ids=["fused", "stored"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_operators_that_jump(dtype: torch.dtype, stored: bool, backend_name: str) -> None:
    """They read computed numbers rounded, as eager does, and so does arithmetic beside them."""

    def called(calls: dict[str, Callable[[Tensor], Tensor]], xs: list[Tensor]) -> list[Tensor]:
        ys = [x * b for x in xs]  # a number that one operator reads is rounded for all others
        found = [call(y) for call, y in zip(calls.values(), ys, strict=True)]
        return [*found, *(ys if stored else [])]

    a, b = factors_of_jumps(dtype)
    for calls in (JUMPS, ROOTS):
        torch.compiler.reset()
        xs = [a.clone() for _ in calls]
        found = torch.compile(called, backend=backend_name)(calls, xs)
        for name, got, eager in zip(calls, found, called(calls, xs), strict=False):
            if calls is JUMPS:
                torch.testing.assert_close(got, eager, rtol=0, atol=0, equal_nan=True, msg=name)
            else:
                assert torch.equal(got.isnan(), eager.isnan()), name
