"""Conditions on elements, and choices between elements by them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch

from dicp.loop.ir.expr import Expr, apply, const


def compare(op: str, a: Expr, b: Expr | float) -> Expr:
    """The boolean of comparison `op`; a number is of the dtype of `a`."""
    return apply(op, torch.bool, a, b if isinstance(b, Expr) else const(b, a.dtype))


def both(a: Expr, b: Expr) -> Expr:
    """Whether two conditions hold."""
    return apply("bitwise_and", torch.bool, a, b)


def either(a: Expr, b: Expr) -> Expr:
    """Whether one of two conditions holds."""
    return apply("bitwise_or", torch.bool, a, b)


def all_of(tests: Sequence[Expr]) -> Expr | None:
    """The conjunction of conditions; None for none."""
    return reduce(both, tests) if tests else None


def is_nan(x: Expr) -> Expr:
    """Whether `x` is NaN."""
    return apply("isnan", torch.bool, x)


def select(test: Expr, a: Expr | float, b: Expr | float) -> Expr:
    """`a` where `test` holds, else `b`; one of both may be a number."""
    dtype = a.dtype if isinstance(a, Expr) else b.dtype  # type: ignore[union-attr]
    x, y = (v if isinstance(v, Expr) else const(v, dtype) for v in (a, b))
    return apply("where", dtype, test, x, y)


def maximum(a: Expr, b: float) -> Expr:
    """The larger of `a` and a number; NaN where `a` is."""
    return apply("maximum", a.dtype, const(b, a.dtype), a)


def minimum(a: Expr, b: float) -> Expr:
    """The smaller of `a` and a number; NaN where `a` is."""
    return apply("minimum", a.dtype, const(b, a.dtype), a)
