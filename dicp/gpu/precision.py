"""Chooses cheaper forms of a kernel's operators, where what is known of their operands or results
allows them.

In: a kernel's statements. Out: a map from expressions to `Variant`, which a language spells.
"""

from __future__ import annotations

import math

import torch

from dicp.dtypes import REDUCED_FLOATS
from dicp.gpu.thresholds import MAX_DIVISOR
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Const, Expr, Named, is_const
from dicp.loop.ir.index import indirect_exprs
from dicp.loop.ir.kernel import Kernel, Reduce, ScratchStore, Stmt, Store, Variant
from dicp.loop.ir.ops import float32
from dicp.loop.schedule.form import is_distance_below

FLOAT32 = frozenset({torch.float32, *REDUCED_FLOATS})
"""The dtypes that are computed in float32."""


def variants(kernel: Kernel) -> dict[Expr, Variant]:
    """The cheaper form of each operator that has one.

    - "exp_short", "normal_cdf_short": the result is rounded to 16 bits;
    - "normalized": a quotient of exponentials by their sum;
    - "over_above_one": a divisor that is 1 + exp(..);
    - "over", "scaled": a constant divisor, the inverse of which, `number`, is rounded or exact.
    """
    chooser = _Chooser(kernel)
    seen: set[Expr] = set()
    exprs = [e for x in kernel.exprs() for e in ir.walk(x, seen)]
    found = {e: chooser.variant(e) for e in exprs}
    return {e: v for e, v in found.items() if v is not None}


class _Chooser:
    def __init__(self, kernel: Kernel) -> None:
        self.stmts = kernel.stmts()
        self.saves = {s.name: s for s in self.stmts if isinstance(s, ScratchStore)}
        self.accumulates = [s for s in self.stmts if isinstance(s, Reduce)]
        self.sums = {s.name: s for s in self.accumulates if s.op == "sum"}
        self.full_precision = full_precision(self.stmts)

    def variant(self, expr: Expr) -> Variant | None:
        if expr.dtype not in FLOAT32:
            return None
        if expr.op == "div":
            return self._quotient(expr)
        if expr not in self.full_precision and self._has_short_form(expr):
            return Variant(f"{expr.op}_short")
        return None

    def _quotient(self, expr: Expr) -> Variant | None:
        if self._is_normalized_exp(expr):
            return Variant("normalized")
        if _is_over_above_one(expr):
            return Variant("over_above_one")
        divisor = expr.args[1]
        if not isinstance(divisor, Const):
            return None
        if not 1 / MAX_DIVISOR < divisor.value < MAX_DIVISOR:
            return None
        number = float32(divisor.value)
        exact = math.frexp(number)[0] == 0.5
        return Variant("scaled" if exact else "over", float32(1 / number))

    def _has_short_form(self, expr: Expr) -> bool:
        """Whether `expr` has a form of reduced precision: the normal CDF, and exp(x - max(x)).

        Such exponentials are at most 1, and one of them is 1: their errors are small next to it.
        """
        return expr.op == "normal_cdf" or (expr.op == "exp" and self._is_below_max(expr.args[0]))

    def _is_normalized_exp(self, expr: Expr) -> bool:
        """Whether `expr` divides exponentials by their sum, one of them being exp(0): a softmax."""
        part, divisor = expr.args
        if not isinstance(divisor, Named):
            return False
        total = self.sums.get(divisor.name)
        if isinstance(part, Named) and part.op == "scratch":
            part = self.saves[part.name].value
        if total is None or total.value is not part or part.op != "exp":
            return False
        return self._is_below_max(part.args[0])

    def _is_below_max(self, moved: Expr) -> bool:
        """Whether `moved` is x - max(x)."""
        return any(is_distance_below(moved, s) for s in self.accumulates)


def _is_over_above_one(expr: Expr) -> bool:
    """Whether `expr` divides by 1 + exp(..)."""
    if expr.args[1].op != "add":
        return False
    parts = {part.op: part for part in expr.args[1].args}
    return parts.keys() == {"exp", "const"} and is_const(parts["const"], 1)


# ---- values that are rounded to 16 bits need no full precision -----------------------------------


def full_precision(stmts: list[Stmt]) -> set[Expr]:
    """The expressions whose values reach memory in more than 16 bits."""
    named = {s.name: s for s in stmts if not isinstance(s, Store)}
    left = [s for s in stmts if isinstance(s, Store) and s.ref.dtype not in REDUCED_FLOATS]
    pending = [s.value for s in left]
    found: set[Expr] = set()
    while pending:
        expr = pending.pop()
        if expr in found or _rounds(expr):
            continue
        found.add(expr)
        pending += expr.args
        pending += [e for index in ir.indices_of(expr) for e in indirect_exprs(index)]
        part = named.get(expr.name) if isinstance(expr, Named) else None
        if part is not None and not _averages(part):
            pending.append(part.value)
    return found


def _rounds(expr: Expr) -> bool:
    return expr.op == "cast" and expr.dtype in REDUCED_FLOATS and ir.rounds(expr)


def _averages(stmt: Stmt) -> bool:
    """Whether `stmt` sums exponentials of 16-bit numbers: the errors of small terms are below the
    rounding error of the sum."""
    if not (isinstance(stmt, Reduce) and stmt.op == "sum" and stmt.value.op == "exp"):
        return False
    reads = ir.reads([stmt.value])
    return bool(reads) and all(r.ref.dtype in REDUCED_FLOATS for r in reads)
