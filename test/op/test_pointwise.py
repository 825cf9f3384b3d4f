"""Elementwise operators: arithmetic, comparison, logic, activations, conversion."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dicp.testing import ALL_LAYOUTS, FLOATS, INTS, LAYOUTS, T, op
from dicp.testing.cases import pointwise

X = (6, 37)
SMALL = (*LAYOUTS, "scalar", "empty")
NUMBERS = (*FLOATS, torch.int64, torch.int32, torch.uint8)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
BITS = (*INTEGERS, torch.bool)
F32_F64 = (torch.float32, torch.float64)

UNARY = [
    pointwise(torch.abs, X, dtypes=NUMBERS),
    pointwise(torch.acos, T(X, -1, 1)),
    pointwise(torch.acosh, T(X, 1, 9)),
    pointwise(torch.asin, T(X, -1, 1)),
    pointwise(torch.asinh, X),
    pointwise(torch.atan, X),
    pointwise(torch.atanh, T(X, -1, 1)),
    pointwise(torch.ceil, X, dtypes=(*FLOATS, torch.int64), exact=True),
    pointwise(torch.cos, X, dtypes=(*FLOATS, torch.int64)),
    pointwise(torch.cosh, X),
    pointwise(torch.erf, X),
    pointwise(torch.erfc, X),
    pointwise(torch.erfinv, T(X, -1, 1), floor=2.0),  # float64 has no finer reference
    pointwise(torch.exp, X, dtypes=(*FLOATS, torch.int32, torch.bool)),
    pointwise(torch.exp2, X),
    pointwise(torch.expm1, X),
    pointwise(torch.floor, X, dtypes=(*FLOATS, torch.int64), exact=True),
    pointwise(torch.frac, X),
    pointwise(torch.lgamma, T(X, 0.1, 9), grad=False),
    pointwise(torch.digamma, T(X, 0.1, 9), grad=False, floor=4.0),  # its root, 1.46, is near
    pointwise(torch.log, T(X, 0.01, 9), dtypes=(*FLOATS, torch.int64)),
    pointwise(torch.log10, T(X, 0.01, 9)),
    pointwise(torch.log1p, T(X, -0.9, 9)),
    pointwise(torch.log2, T(X, 0.01, 9)),
    pointwise(torch.neg, X, dtypes=NUMBERS),
    pointwise(torch.positive, X, dtypes=NUMBERS),
    pointwise(torch.reciprocal, X, dtypes=(*FLOATS, torch.int64)),
    pointwise(torch.round, T(X, -9, 9), dtypes=(*FLOATS, torch.int64), exact=True),
    pointwise(
        "round_half_even",
        torch.round,
        torch.arange(-5.5, 6.0),
        dtypes=FLOATS[:1],
        layouts=("contiguous",),
        exact=True,
    ),
    pointwise(
        "round_decimals",
        lambda x: torch.round(x, decimals=2),
        T(X, -9, 9),
        grad=False,
        dtypes=(torch.float32, torch.float64),
    ),
    pointwise(torch.rsqrt, T(X, 0.01, 9), dtypes=(*FLOATS, torch.int64)),
    pointwise(torch.sigmoid, X, dtypes=(*FLOATS, torch.int64)),
    pointwise(torch.sign, X, dtypes=(*NUMBERS, torch.bool)),
    pointwise(torch.sgn, X),
    pointwise(torch.signbit, X, dtypes=(*NUMBERS, torch.bool)),
    pointwise(torch.sin, X),
    pointwise(torch.sinc, X),
    pointwise(torch.sinh, X),
    pointwise(torch.sqrt, T(X, 0, 9), dtypes=(*FLOATS, torch.int64)),
    pointwise(torch.square, X, dtypes=NUMBERS),
    pointwise(torch.tan, T(X, -1.4, 1.4)),
    pointwise(torch.tanh, X),
    pointwise(torch.trunc, X, dtypes=(*FLOATS, torch.int64), exact=True),
    pointwise(torch.isnan, X, dtypes=(*FLOATS, torch.int64)),
    pointwise(torch.isinf, X, dtypes=(*FLOATS, torch.int64)),
    pointwise(torch.isfinite, X, dtypes=(*FLOATS, torch.int64)),
    pointwise(torch.logical_not, X, dtypes=(*FLOATS, *INTS)),
    pointwise(torch.bitwise_not, X, dtypes=BITS),
    pointwise(torch.nan_to_num, X),
    pointwise(torch.deg2rad, X),
    pointwise(torch.logit, T(X, 0.05, 0.95), layouts=SMALL),
    pointwise("special_i0", torch.special.i0, X, grad=False),
    pointwise(
        "special_ndtri",
        torch.special.ndtri,
        T(X, 0.1, 0.9),
        grad=False,
        dtypes=(torch.float32, torch.float64),
    ),
]

ACTIVATIONS = [
    pointwise(torch.relu, X, dtypes=NUMBERS),
    pointwise(F.relu6, X),
    # Eager's 1 + erf(x / sqrt(2)) in float64 is a difference of nearly equal numbers below 0.
    pointwise("gelu", F.gelu, X, rtol=1e-12),
    pointwise("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), X),
    pointwise(F.silu, X),
    pointwise(F.mish, X),
    pointwise(F.softplus, X),
    pointwise(F.elu, X),
    pointwise("elu_alpha", lambda x: F.elu(x, 0.7), X),
    pointwise(F.celu, X),
    pointwise(F.selu, X),
    pointwise(F.leaky_relu, X),
    pointwise("leaky_relu_slope", lambda x: F.leaky_relu(x, 0.3), X),
    pointwise(F.hardtanh, X),
    pointwise(F.hardswish, X),
    pointwise(F.hardsigmoid, X, dtypes=FLOATS[:3]),
    pointwise(F.logsigmoid, X, strides=False),
    pointwise(F.softsign, X),
    pointwise(F.tanhshrink, X, grad=False, elementwise=False),
    pointwise(F.softshrink, X, grad=False),
    op("softshrink_grad", F.softshrink, X),
    pointwise(F.hardshrink, X),
    pointwise("threshold", lambda x: F.threshold(x, 0.1, 20.0), X),
    op(F.glu, (6, 38), fixed=(38,)),
    op("prelu", F.prelu, (3, 5, 7), (5,), fixed=(5,)),
]

BINARY = [
    pointwise(torch.add, X, X, dtypes=(*NUMBERS, torch.bool)),
    # eager fuses the product into the sum, which shows where both cancel
    # Sums of two: where they cancel, the product's rounding is large unless it is fused.
    pointwise(
        "add_alpha", lambda x, y: torch.add(x, y, alpha=3), X, X, dtypes=NUMBERS, elementwise=False
    ),
    pointwise("add_scalar", lambda x: x + 2, X, dtypes=NUMBERS),
    pointwise("add_float_scalar", lambda x: x + 0.1, X, dtypes=(*FLOATS, *INTS)),
    pointwise(torch.sub, X, X, dtypes=NUMBERS),
    pointwise(
        "sub_alpha", lambda x, y: torch.sub(x, y, alpha=3), X, X, dtypes=NUMBERS, elementwise=False
    ),
    pointwise("sub_scalar_alpha", lambda x: torch.sub(x, 2, alpha=3), X, dtypes=NUMBERS),
    pointwise("rsub", lambda x: 1.5 - x, X),
    pointwise("rsub_alpha", lambda x, y: torch.rsub(x, y, alpha=2), X, X, dtypes=NUMBERS),
    pointwise(torch.mul, X, X, dtypes=(*NUMBERS, torch.bool)),
    pointwise("mul_scalar", lambda x: x * 1.7, X, dtypes=(*FLOATS, torch.int64)),
    pointwise(torch.div, X, X, dtypes=(*FLOATS, torch.int64, torch.uint8)),
    pointwise("div_scalar", lambda x: x / 3, X, dtypes=(*FLOATS, torch.int64)),
    pointwise(
        "div_floor",
        lambda x, y: torch.div(x, y, rounding_mode="floor"),
        X,
        X,
        exact=True,
        dtypes=F32_F64,
        grad=False,
    ),
    pointwise(
        "div_floor_ints",
        lambda x, y: torch.div(x, y, rounding_mode="floor"),
        X,
        T(X, 1, 9),
        dtypes=INTEGERS,
        layouts=SMALL,
    ),
    pointwise(
        "div_by_most_bytes",
        lambda x, y: (
            *(x // y, torch.div(x, y, rounding_mode="trunc"), x % y, torch.fmod(x, y)),
            *(x // -1, torch.div(x, 255, rounding_mode="trunc"), x % -1, torch.fmod(x, 255)),
        ),
        T(X, 0, 256),
        T(X, 253, 256),
        dtypes=(torch.uint8,),
        layouts=SMALL,
    ),
    pointwise(
        "div_negative_ints",
        lambda x, y: (x // y, torch.div(x, y, rounding_mode="trunc"), x % y, torch.fmod(x, y)),
        X,
        T(X, -9, -1),
        dtypes=(torch.int64, torch.int32),
        layouts=SMALL,
    ),
    pointwise(
        "div_trunc",
        lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        X,
        X,
        exact=True,
        dtypes=F32_F64,
        grad=False,
    ),
    pointwise(
        "div_scalar_floor",
        lambda x: torch.div(x, 0.3, rounding_mode="floor"),
        X,
        exact=True,
        grad=False,
    ),
    pointwise(
        "div_scalar_trunc",
        lambda x: torch.div(x, -3, rounding_mode="trunc"),
        X,
        exact=True,
        dtypes=(*FLOATS, torch.int64),
        grad=False,
    ),
    pointwise("floor_divide", torch.floor_divide, X, X, exact=True, grad=False, dtypes=F32_F64),
    pointwise("divide_by_zero", lambda x: (x / 0, x / -0.0, x // 0.0, x % 0.0), X, grad=False),
    pointwise(torch.fmod, X, X, grad=False, exact=True),
    pointwise("fmod_scalar", lambda x: torch.fmod(x, 1.5), X, exact=True, grad=False),
    pointwise(torch.remainder, X, X, exact=True, grad=False, dtypes=(torch.float32, torch.float64)),
    pointwise(
        "remainder_scalar",
        lambda x: torch.remainder(x, -1.5),
        X,
        exact=True,
        dtypes=(torch.float32, torch.float64),
    ),
    pointwise("pow_tensor", torch.pow, T(X, 0.1, 3), X, grad=False),
    pointwise(
        "pow_grad", torch.pow, T(X, 0.1, 3), X, layouts=SMALL, dtypes=(torch.float32, torch.float64)
    ),
    pointwise("pow_ints", torch.pow, T(X, -3, 4), T(X, 0, 6), dtypes=INTEGERS, layouts=SMALL),
    pointwise(
        "pow_scalars",
        lambda x: (x**2, x**3, x**-1, x**0.5, x**-0.5, x**0, x**2.5),
        X,
        dtypes=(torch.float32, torch.bfloat16, torch.float64),
    ),
    pointwise("pow_of_scalar", lambda x: torch.pow(2.0, x), X, strides=False),
    pointwise(
        "scalar_pow_int",
        lambda x: torch.pow(2, x),
        T(X, 0, 9),
        dtypes=(torch.int64,),
        layouts=SMALL,
        strides=False,
    ),
    pointwise(torch.atan2, X, X, grad=False),
    pointwise("atan2_grad", torch.atan2, X, X, layouts=SMALL),
    pointwise(torch.hypot, X, X, grad=False),
    pointwise(torch.maximum, X, X, dtypes=(*NUMBERS, torch.bool)),
    pointwise(torch.minimum, X, X, dtypes=(*NUMBERS, torch.bool)),
    pointwise(torch.fmax, X, X),
    pointwise(torch.fmin, X, X),
    pointwise(torch.copysign, X, X, grad=False),
    pointwise(
        "copysign_number",
        lambda x: (torch.copysign(x, -0.5), torch.copysign(x, 2), torch.copysign(x, -0.0)),
        X,
        grad=False,
        dtypes=F32_F64,
    ),
    pointwise(torch.xlogy, X, T(X, 0.1, 4), grad=False),
    # a result near zero is a difference of numbers near one
    pointwise(torch.logaddexp, X, X, grad=False, dtypes=(torch.float32, torch.float64), floor=8.0),
    pointwise(torch.nextafter, X, X, dtypes=(torch.float32, torch.float64), grad=False),
    pointwise(torch.heaviside, X, X, grad=False),
]


def _compare(x: Any, y: Any) -> Any:
    return x == y, x != y, x < y, x <= y, x > y, x >= y


LOGIC = [
    pointwise("comparisons", _compare, X, X, dtypes=(*FLOATS, *INTS)),
    pointwise("comparisons_scalar", lambda x: _compare(x, 0.5), X, dtypes=(*FLOATS, *INTS)),
    pointwise("comparisons_int_scalar", lambda x: _compare(x, 1), X, dtypes=(*FLOATS, *INTS)),
    pointwise(
        "logical",
        lambda x, y: (torch.logical_and(x, y), torch.logical_or(x, y), torch.logical_xor(x, y)),
        X,
        X,
        dtypes=(*FLOATS, *INTS),
    ),
    pointwise("bitwise", lambda x, y: (x & y, x | y, x ^ y), X, X, dtypes=BITS),
    pointwise("bitwise_scalar", lambda x: (x & 5, x | 5, x ^ 5), X, dtypes=INTEGERS),
    pointwise(
        "shift", lambda x, y: (x << y, x >> y), X, T(X, 0, 7), dtypes=INTEGERS, layouts=SMALL
    ),
    op("where", torch.where, T(X, dtype=torch.bool), X, X, dtypes=(*FLOATS, *INTS)),
    op(
        "where_broadcasts_all_three",
        torch.where,
        T((5, 1, 1), dtype=torch.bool),
        (1, 4, 1),
        (1, 1, 37),
    ),
    op(
        "where_scalars",
        lambda c, x: (torch.where(c, x, 0.5), torch.where(c, 1, 2)),
        T(X, dtype=torch.bool),
        X,
    ),
    op("masked_fill", lambda x, m: x.masked_fill(m, float("-inf")), X, T(X, dtype=torch.bool)),
    op("isclose", lambda x, y: torch.isclose(x, y, rtol=0.5), X, X, grad=False),
]

CLAMP = [
    pointwise("clamp", lambda x: torch.clamp(x, -0.5, 0.5), X),
    pointwise("clamp_ints", lambda x: torch.clamp(x, 1, 4), X, dtypes=INTEGERS),
    pointwise("clamp_min_only", lambda x: torch.clamp(x, min=0.25), X),
    pointwise("clamp_tensors", torch.clamp, X, X, X, grad=False),
    op("clamp_broadcast", lambda x, lo: torch.clamp(x, lo, None), X, (37,)),
    pointwise(
        "addcmul",
        lambda x, y, z: torch.addcmul(x, y, z, value=0.3),
        X,
        X,
        X,
        grad=False,
        elementwise=False,
    ),
    op("addcdiv", lambda x, y, z: torch.addcdiv(x, y, z, value=0.3), X, X, T(X, 1, 2)),
    op(
        "scaled_product_that_overflows_unscaled",
        lambda x: torch.addcmul(x, x * 1e30, x * 1e30, value=1e-30),
        T(X, 1, 2),
        dtypes=(torch.float32,),
        grad=False,
    ),
    op("lerp", lambda x, y: torch.lerp(x, y, 0.3), X, X),
    op("lerp_tensor", torch.lerp, X, X, X),
]

BROADCAST = [
    op("broadcast_row", torch.add, (6, 37), (37,), dtypes=(*FLOATS, torch.int64)),
    op("broadcast_column", torch.mul, (6, 37), (6, 1)),
    op("broadcast_both", torch.sub, (6, 1, 5), (1, 37, 5)),
    # a gradient is a sum of float64 that cancels, and has no finer reference
    op("broadcast_scalar_tensor", lambda x, s: x * s, (6, 37), (), floor=4.0),
    op(
        "channels_last_add",
        lambda x, b: F.relu(x + b),
        (2, 5, 6, 7),
        (1, 5, 1, 1),
        layouts=ALL_LAYOUTS,
    ),
    op("unaligned", lambda x: x.exp() + 1, (6, 37), layouts=("offset",), dtypes=FLOATS),
]

PROMOTION = [
    op(
        "promote_int_float",
        lambda x, i: (x + i, x * i, i / 2, i - 0.5),
        X,
        T(X, dtype=torch.int64),
        dtypes=FLOATS,
    ),
    op(
        "promote_bf16_f32",
        lambda x, y: x + y,
        T(X, dtype=torch.bfloat16),
        X,
        dtypes=(torch.float32, torch.float64, torch.float16),
    ),
    op("promote_zero_dim", lambda x, s: (x + s, s + x), X, T((), dtype=torch.float64, grad=False)),
    op(
        "promote_bool",
        lambda b, x: (b + x, b * 2, b + 0.5, b & True),
        T(X, dtype=torch.bool),
        X,
        dtypes=(*FLOATS, torch.int64, torch.uint8),
    ),
    op("promote_uint8_int32", torch.add, T(X, dtype=torch.uint8), X, dtypes=(torch.int32,)),
    op(
        "int_overflow_wraps",
        lambda x: (x * 100, x + 100, x - 100),
        X,
        dtypes=(torch.uint8, torch.int8, torch.int16),
        grad=False,
    ),
]


def _to_all(x: torch.Tensor) -> list[torch.Tensor]:
    targets = (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.bool,
    )
    return [x.to(dtype) for dtype in targets]


CONVERT = [
    op(
        "convert_floats",
        _to_all,
        X,
        dtypes=FLOATS,
        layouts=(*LAYOUTS, "empty", "scalar"),
        exact=True,
    ),
    op(
        "convert_ints",
        _to_all,
        X,
        exact=True,
        dtypes=(*INTS, torch.int8, torch.int16),
        layouts=(*LAYOUTS, "empty", "scalar"),
    ),
    op(
        "convert_to_uint8",
        lambda x: x.to(torch.uint8),
        T(X, 0, 200),
        exact=True,
        dtypes=(*FLOATS, torch.int64, torch.bool),
    ),
    pointwise(
        "convert_special",
        lambda x: (x.to(torch.bool), x.half(), x.bfloat16(), x.double()),
        X,
        exact=True,
        dtypes=FLOATS,
    ),
    op("minus_infinity_in_half", lambda x: x.masked_fill(x > 0, float("-inf")), X, exact=True),
    op(
        "constant_digits",
        lambda x: x * 0.1234567890123456789 + 1e-7,
        X,
        dtypes=(torch.float64, torch.float32),
        layouts=("contiguous",),
    ),
    op(
        "constants_of_every_dtype",
        lambda x: (x, torch.full_like(x, 1), torch.zeros_like(x) + 1),
        X,
        dtypes=(torch.bool, torch.bfloat16, torch.int8, torch.float16),
        exact=True,
    ),
    op(
        "bf16_outputs",
        lambda x: (x.to(torch.bfloat16), (x * 2).to(torch.bfloat16)),
        X,
        dtypes=FLOATS,
    ),
]

INPLACE = [
    op(
        "inplace_chain",
        lambda x, y: x.add_(y).mul_(2).relu_(),
        X,
        X,
        grad=False,
        layouts=("contiguous", "transposed", "sliced", "offset"),
    ),
    op(
        "inplace_slice",
        lambda x: x[:, ::2].fill_(3),
        (6, 38),
        grad=False,
        layouts=("contiguous", "transposed", "sliced"),
    ),
    op(
        "inplace_copy",
        lambda x, y: x.copy_(y),
        X,
        T(X, dtype=torch.float64),
        grad=False,
        layouts=("contiguous", "transposed", "sliced"),
    ),
    op(
        "inplace_integers",
        lambda x: x.add_(1).bitwise_and_(3),
        X,
        dtypes=(torch.int64,),
        layouts=("contiguous", "transposed", "sliced"),
    ),
    op(
        "inplace_then_view",
        lambda x: (x.mul_(2), x.t(), x.view(-1)),
        X,
        grad=False,
        layouts=("contiguous",),
    ),
]

# None of these may be left to eager.
NATIVE = [*ACTIVATIONS, *BINARY, *LOGIC, *CLAMP, *BROADCAST, *PROMOTION, *INPLACE]
CASES = [*UNARY, *CONVERT, *(replace(case, expect="native") for case in NATIVE)]


@pytest.mark.sweep
def test_op(case: Any, check_op: Any) -> None:
    check_op(case)
