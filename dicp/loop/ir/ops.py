"""The scalar operators of the loop IR: one table row each.

`cpp` is the C++ spelling: a format string over the argument temporaries, or the name of an
overloaded function of the prelude. `cost` counts roughly in units of one vector addition; it
decides between rematerializing a value and storing it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ScalarOp:
    name: str
    arity: int
    cpp: str
    cost: int = 1


def _rows(*rows: tuple[str, int, str, int]) -> dict[str, ScalarOp]:
    return {name: ScalarOp(name, arity, cpp, cost) for name, arity, cpp, cost in rows}


HEAVY = 16

SCALAR_OPS: dict[str, ScalarOp] = _rows(
    ("add", 2, "{0} + {1}", 1),
    ("sub", 2, "{0} - {1}", 1),
    ("mul", 2, "{0} * {1}", 1),
    ("div", 2, "{0} / {1}", 4),
    ("fma", 3, "d_fma({0}, {1}, {2})", 1),
    ("neg", 1, "-{0}", 1),
    ("abs", 1, "d_abs({0})", 1),
    ("sign", 1, "d_sign({0})", 2),
    ("signbit", 1, "d_signbit({0})", 1),
    ("square", 1, "{0} * {0}", 1),
    ("reciprocal", 1, "1 / {0}", 4),
    ("floor_div", 2, "d_floor_div({0}, {1}, d_status, {site})", 8),
    ("trunc_div", 2, "d_trunc_div({0}, {1}, d_status, {site})", 8),
    ("remainder", 2, "d_remainder({0}, {1}, d_status, {site})", 8),
    ("fmod", 2, "d_fmod({0}, {1}, d_status, {site})", 8),
    ("maximum", 2, "d_maximum({0}, {1})", 1),
    ("minimum", 2, "d_minimum({0}, {1})", 1),
    ("fmax", 2, "d_fmax({0}, {1})", 2),
    ("fmin", 2, "d_fmin({0}, {1})", 2),
    ("pow", 2, "d_pow({0}, {1})", HEAVY * 2),
    ("exp", 1, "d_exp({0})", HEAVY),
    ("exp2", 1, "d_exp2({0})", HEAVY),
    ("expm1", 1, "d_expm1({0})", HEAVY),
    ("log", 1, "d_log({0})", HEAVY),
    ("log2", 1, "d_log2({0})", HEAVY),
    ("log10", 1, "d_log10({0})", HEAVY),
    ("log1p", 1, "d_log1p({0})", HEAVY),
    ("sqrt", 1, "d_sqrt({0})", 4),
    ("rsqrt", 1, "1 / d_sqrt({0})", 6),
    ("sin", 1, "d_sin({0})", HEAVY),
    ("cos", 1, "d_cos({0})", HEAVY),
    ("tan", 1, "d_tan({0})", HEAVY),
    ("asin", 1, "d_asin({0})", HEAVY),
    ("acos", 1, "d_acos({0})", HEAVY),
    ("atan", 1, "d_atan({0})", HEAVY),
    ("atan2", 2, "d_atan2({0}, {1})", HEAVY),
    ("sinh", 1, "d_sinh({0})", HEAVY),
    ("cosh", 1, "d_cosh({0})", HEAVY),
    ("tanh", 1, "d_tanh({0})", HEAVY),
    ("asinh", 1, "d_asinh({0})", HEAVY),
    ("acosh", 1, "d_acosh({0})", HEAVY),
    ("atanh", 1, "d_atanh({0})", HEAVY),
    ("erf", 1, "d_erf({0})", HEAVY),
    ("erfc", 1, "d_erfc({0})", HEAVY),
    ("normal_cdf", 1, "d_normal_cdf({0})", HEAVY),
    ("normal_cdf_tanh", 1, "d_normal_cdf_tanh({0})", HEAVY),
    ("erfinv", 1, "d_erfinv({0})", HEAVY),
    ("lgamma", 1, "d_lgamma({0})", HEAVY),
    ("digamma", 1, "d_digamma({0})", HEAVY),
    ("hypot", 2, "d_hypot({0}, {1})", HEAVY),
    ("copysign", 2, "d_copysign({0}, {1})", 1),
    ("nextafter", 2, "d_nextafter({0}, {1})", HEAVY),
    ("sigmoid", 1, "1 / (1 + d_exp(-{0}))", HEAVY + 4),
    ("floor", 1, "d_floor({0})", 1),
    ("ceil", 1, "d_ceil({0})", 1),
    ("trunc", 1, "d_trunc({0})", 1),
    ("round", 1, "d_round({0})", 1),
    ("eq", 2, "{0} == {1}", 1),
    ("ne", 2, "{0} != {1}", 1),
    ("lt", 2, "{0} < {1}", 1),
    ("le", 2, "{0} <= {1}", 1),
    ("gt", 2, "{0} > {1}", 1),
    ("ge", 2, "{0} >= {1}", 1),
    ("where", 3, "{0} ? {1} : {2}", 1),
    ("logical_not", 1, "!{0}", 1),
    ("logical_and", 2, "({0} != 0) & ({1} != 0)", 1),
    ("logical_or", 2, "({0} != 0) | ({1} != 0)", 1),
    ("logical_xor", 2, "({0} != 0) ^ ({1} != 0)", 1),
    ("bitwise_not", 1, "d_bitwise_not({0})", 1),
    ("bitwise_and", 2, "{0} & {1}", 1),
    ("bitwise_or", 2, "{0} | {1}", 1),
    ("bitwise_xor", 2, "{0} ^ {1}", 1),
    ("lshift", 2, "d_lshift({0}, {1})", 1),
    ("rshift", 2, "d_rshift({0}, {1})", 1),
    ("isnan", 1, "d_isnan({0})", 1),
    ("isinf", 1, "d_isinf({0})", 1),
    ("philox_uniform", 3, "d_philox_uniform_{width}({0}, {1}, {2})", HEAVY * 4),
    ("philox_normal", 3, "d_philox_normal_{width}({0}, {1}, {2})", HEAVY * 6),
    ("philox_bits", 3, "d_philox_bits({0}, {1}, {2})", HEAVY * 4),
)

BESIDE_NUMBER = {"maximum": "{0} <= {1} ? {1} : {0}", "minimum": "{0} >= {1} ? {1} : {0}"}
"""C++ where the second operand is a constant other than NaN: a NaN in the first propagates."""
BEHIND_NUMBER = {"maximum": "{0} > {1} ? {0} : {1}", "minimum": "{0} < {1} ? {0} : {1}"}
"""C++ where the first operand is a constant other than NaN. For zeros of opposite sign the result
is the second operand, as in PyTorch's vectorized code: with a clamp's limit as the first, a zero
keeps its sign."""

CHECKED_OPS = frozenset({"floor_div", "trunc_div", "remainder", "fmod"})
"""Operators that raise on integer division by zero, as PyTorch does on the CPU."""


INDEX_CHECKS = frozenset({"check_index", "wrap_index"})
"""Operators on (index, size) that return the index, which must lie in 0 .. size-1. "wrap_index"
first counts a negative one from the end."""


@dataclass(frozen=True)
class Reduction:
    """A reduction: its starting value per dtype class and how two partial results combine."""

    name: str
    start: str
    combine: str


REDUCTIONS: dict[str, Reduction] = {
    r.name: r
    for r in (
        Reduction("sum", "zero", "{0} + {1}"),
        Reduction("prod", "one", "{0} * {1}"),
        Reduction("max", "lowest", "d_maximum({0}, {1})"),
        Reduction("min", "highest", "d_minimum({0}, {1})"),
        Reduction("any", "zero", "{0} | {1}"),
        Reduction("all", "one", "{0} & {1}"),
        Reduction("argmax", "lowest", "d_argmax"),
        Reduction("argmin", "highest", "d_argmin"),
    )
}


def identity_of(op: str, dtype: torch.dtype) -> float | int | bool:
    """The neutral element of a reduction: what it starts from."""
    kind = REDUCTIONS[op].start
    if dtype == torch.bool:
        return kind in ("one", "highest")
    if kind in ("zero", "one"):
        one = kind == "one"
        return float(one) if dtype.is_floating_point else int(one)
    if dtype.is_floating_point:
        return -math.inf if kind == "lowest" else math.inf
    info = torch.iinfo(dtype)
    return info.min if kind == "lowest" else info.max


def float32(value: float) -> float:
    """`value` rounded to float32."""
    return float(torch.tensor(value, dtype=torch.float32))
