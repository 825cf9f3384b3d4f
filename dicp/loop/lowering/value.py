"""Tensors and numbers during lowering.

In: a Ref of the loop IR, a Python number, a symbolic size. Out: its elements as expressions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sympy
import torch

from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, Ref
from dicp.loop.ir.index import ZERO, Index, Size, Var, normal
from dicp.rules import NoRule

Body = Callable[[tuple[Index, ...]], Expr]
"""The element of a tensor at given coordinates."""
Coordinates = Callable[[tuple[Index, ...]], Sequence[Index]]
"""Coordinates in another tensor, of those in this one."""


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor during lowering: a view of a Ref, with coordinates as functions of its own axes."""

    ref: Ref
    shape: tuple[Size, ...]
    coords: tuple[Index, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.ref.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def at(self, idx: Sequence[Index]) -> Expr:
        """The element at `idx` (one index per axis)."""
        return ir.load(self.ref, self.place(idx))

    def place(self, idx: Sequence[Index]) -> tuple[Index, ...]:
        mapping = {Var(i, s): x for i, (s, x) in enumerate(zip(self.shape, idx, strict=True))}
        return tuple(c.substitute(mapping) for c in self.coords)

    def broadcast_at(self, idx: Sequence[Index]) -> Expr:
        """The element at `idx` of a larger shape this tensor broadcasts to."""
        own = list(idx[len(idx) - self.ndim :]) if self.ndim else []
        return self.at([ZERO if s == 1 else x for s, x in zip(self.shape, own, strict=True)])


_FLOAT_FUNCTIONS = {
    "Add": "add",
    "Mul": "mul",
    "Max": "maximum",
    "Min": "minimum",
    "FloatTrueDiv": "div",
    "IntTrueDiv": "div",
    "FloatPow": "pow",
    "Pow": "pow",
    "PowByNatural": "pow",
    "OpaqueUnaryFn_sqrt": "sqrt",
    "OpaqueUnaryFn_log": "log",
    "OpaqueUnaryFn_exp": "exp",
}


def symbolic_float(value: sympy.Expr) -> Expr:
    """A number computed from sizes, such as `2.0 / n`, in double precision."""
    if value.is_number:
        return ir.const(float(value), torch.float64)
    if value.is_integer:
        return ir.index_value(Index(normal(value)), torch.float64)
    kind = type(value).__name__
    if kind == "ToFloat":
        return symbolic_float(value.args[0])
    if kind not in _FLOAT_FUNCTIONS:
        raise NoRule(f"a number computed from sizes: {value}")
    args = [symbolic_float(a) for a in value.args]
    result = args[0]
    for arg in args[1:]:
        result = ir.apply(_FLOAT_FUNCTIONS[kind], torch.float64, result, arg)
    return result if args[1:] else ir.apply(_FLOAT_FUNCTIONS[kind], torch.float64, result)


def single(op: str, value: Expr, dtype: torch.dtype) -> Expr:
    """The result of a reduction over one element."""
    if op in ("argmax", "argmin"):
        return ir.const(0, dtype)
    if op in ("any", "all"):
        return ir.cast(value, torch.bool)
    value = ir.opmath(value, dtype)
    if op == "sum" and value.dtype.is_floating_point:
        return ir.apply("add", value.dtype, value, ir.const(0.0, value.dtype))  # -0 becomes +0
    return value
