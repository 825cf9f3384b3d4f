"""The scalar operators of the loop IR: one table row each.

`cost` counts roughly in units of one vector addition; it decides between rematerializing a value
and storing it. How an operator is spelled in a language stands in a table of that language.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from dicp.loop.thresholds import HEAVY


@dataclass(frozen=True)
class ScalarOp:
    name: str
    arity: int
    cost: int = 1


def _rows(*rows: tuple[str, int, int]) -> dict[str, ScalarOp]:
    return {name: ScalarOp(name, arity, cost) for name, arity, cost in rows}


SCALAR_OPS: dict[str, ScalarOp] = _rows(
    ("add", 2, 1),
    ("sub", 2, 1),
    ("mul", 2, 1),
    ("div", 2, 4),
    ("fma", 3, 1),
    ("neg", 1, 1),
    ("abs", 1, 1),
    ("sign", 1, 2),
    ("signbit", 1, 1),
    ("square", 1, 1),
    ("reciprocal", 1, 4),
    ("floor_div", 2, 8),
    ("trunc_div", 2, 8),
    ("remainder", 2, 8),
    ("fmod", 2, 8),
    ("maximum", 2, 1),
    ("minimum", 2, 1),
    ("fmax", 2, 2),
    ("fmin", 2, 2),
    ("pow", 2, HEAVY * 2),
    ("exp", 1, HEAVY),
    ("exp2", 1, HEAVY),
    ("expm1", 1, HEAVY),
    ("log", 1, HEAVY),
    ("log2", 1, HEAVY),
    ("log10", 1, HEAVY),
    ("log1p", 1, HEAVY),
    ("sqrt", 1, 4),
    ("rsqrt", 1, 6),
    ("sin", 1, HEAVY),
    ("cos", 1, HEAVY),
    ("tan", 1, HEAVY),
    ("asin", 1, HEAVY),
    ("acos", 1, HEAVY),
    ("atan", 1, HEAVY),
    ("atan2", 2, HEAVY),
    ("sinh", 1, HEAVY),
    ("cosh", 1, HEAVY),
    ("tanh", 1, HEAVY),
    ("asinh", 1, HEAVY),
    ("acosh", 1, HEAVY),
    ("atanh", 1, HEAVY),
    ("erf", 1, HEAVY),
    ("erfc", 1, HEAVY),
    ("normal_cdf", 1, HEAVY),
    ("normal_cdf_tanh", 1, HEAVY),
    ("erfinv", 1, HEAVY),
    ("lgamma", 1, HEAVY),
    ("digamma", 1, HEAVY),
    ("hypot", 2, HEAVY),
    ("copysign", 2, 1),
    ("nextafter", 2, HEAVY),
    ("sigmoid", 1, HEAVY + 4),
    ("floor", 1, 1),
    ("ceil", 1, 1),
    ("trunc", 1, 1),
    ("round", 1, 1),
    ("eq", 2, 1),
    ("ne", 2, 1),
    ("lt", 2, 1),
    ("le", 2, 1),
    ("gt", 2, 1),
    ("ge", 2, 1),
    ("where", 3, 1),
    ("logical_not", 1, 1),
    ("logical_and", 2, 1),
    ("logical_or", 2, 1),
    ("logical_xor", 2, 1),
    ("bitwise_not", 1, 1),
    ("bitwise_and", 2, 1),
    ("bitwise_or", 2, 1),
    ("bitwise_xor", 2, 1),
    ("lshift", 2, 1),
    ("rshift", 2, 1),
    ("isnan", 1, 1),
    ("isinf", 1, 1),
    ("philox_uniform", 3, HEAVY * 4),
    ("philox_normal", 3, HEAVY * 6),
    ("philox_bits", 3, HEAVY * 4),
)

PHILOX_NEIGHBOURS = {
    ("philox_uniform", torch.float32): 4,
    ("philox_normal", torch.float32): 4,
    ("philox_uniform", torch.float64): 2,
    ("philox_bits", torch.int64): 2,
    ("philox_normal", torch.float64): 1,
}
"""Adjacent elements that share a Philox call, by operator and type."""

CHECKED_OPS = frozenset({"floor_div", "trunc_div", "remainder", "fmod"})
"""Operators that raise on integer division by zero, as PyTorch does on the CPU."""


INDEX_CHECKS = frozenset({"check_index", "wrap_index"})
"""Operators on (index, size) that return the index, which must lie in 0 .. size-1. "wrap_index"
first counts a negative one from the end."""


@dataclass(frozen=True)
class Reduction:
    """A reduction: the kind of value it starts from."""

    name: str
    start: Literal["zero", "one", "lowest", "highest"]


REDUCTIONS: dict[str, Reduction] = {
    r.name: r
    for r in (
        Reduction("sum", "zero"),
        Reduction("prod", "one"),
        Reduction("max", "lowest"),
        Reduction("min", "highest"),
        Reduction("any", "zero"),
        Reduction("all", "one"),
        Reduction("argmax", "lowest"),
        Reduction("argmin", "highest"),
    )
}


def neutral_element(op: str, dtype: torch.dtype) -> float | int | bool:
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
