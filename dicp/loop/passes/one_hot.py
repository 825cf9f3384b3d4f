"""Sums over a reduction loop of values nonzero at one iteration at most: they need no loop.

sum over r of (v if first + r == place else 0) = v if first <= place < first + R else 0
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, IndexValue, Named, apply, is_const
from dicp.loop.ir.index import Index, Var
from dicp.loop.ir.kernel import Kernel, Let, Phase, Reduce, Scan, ScratchStore, Stmt


def without_one_hot_sums(kernel: Kernel) -> Kernel:
    """The kernel with such sums as scalars of the row, outside the reduction loop.

    Sums over parts of the loop are left: only one of the parts has the iteration.
    """
    if kernel.kind not in ("inner_reduction", "outer_reduction") or len(kernel.reduction) != 1:
        return kernel
    if kernel.partition is not None and not kernel.cross_row_stores():
        return kernel
    own = frozenset(s.name for s in kernel.stmts() if isinstance(s, (Scan, ScratchStore)))
    row = _Row(kernel.reduction[0], own)
    phases: list[Phase] = []
    for phase in kernel.phases:
        found = {id(s): row.hit(s) for s in phase.stmts} if phase.level == "reduction" else {}
        defined = tuple(d for d in found.values() if d is not None)
        rest = tuple(s for s in phase.stmts if found.get(id(s)) is None)
        phases += [Phase("parallel", defined)] if defined else []
        phases += [Phase(phase.level, rest)] if rest else []
    return replace(kernel, phases=tuple(phases))


class _Row:
    """A reduction loop, and the names of scans and scratch values, which vary along it."""

    def __init__(self, along: Var, own: frozenset[str]) -> None:
        self.along = along
        self.own = own

    def hit(self, stmt: Stmt) -> Let | None:
        """`stmt` as a scalar of the row, if it sums at most one nonzero element; else None."""
        if not isinstance(stmt, Reduce) or stmt.op != "sum":
            return None
        value = self._element(stmt.value)
        return None if value is None else Let(stmt.name, stmt.dtype, value)

    def _element(self, expr: Expr) -> Expr | None:
        if expr.op in ("cast", "widen"):
            inner = self._element(expr.args[0])
            return None if inner is None else expr.with_args((inner,))
        if expr.op != "where":
            return None
        test, value, other = expr.args
        found = self._test(test)
        if found is None or not is_const(other, 0) or self._varies(value):
            return None
        return expr.with_args((found, value, other))

    def _test(self, expr: Expr) -> Expr | None:
        """The condition that `expr` holds at an iteration; None if it may hold at several."""
        for one, other in (expr.args, expr.args[::-1]) if len(expr.args) == 2 else ():
            if self._varies(other):
                continue
            index = one.index if expr.op == "eq" and isinstance(one, IndexValue) else None
            if index is not None and index.coefficient(self.along) == 1:
                return self._first_match(index, other)
            found = self._test(one) if expr.op in ("logical_and", "bitwise_and") else None
            if found is not None:
                return expr.with_args((found, other))
        return None

    def _first_match(self, index: Index, place: Expr) -> Expr | None:
        """The condition that `index`, which grows by one per iteration, takes the value `place`."""
        first = index.without(self.along)
        if self.along in first.variables():
            return None
        limits = (("ge", first), ("lt", first + self.along.size))
        tests = (apply(op, torch.bool, place, ir.index_value(limit)) for op, limit in limits)
        return apply("logical_and", torch.bool, *tests)

    def _varies(self, expr: Expr) -> bool:
        parts = list(ir.walk(expr))
        named = any(isinstance(e, Named) and e.name in self.own for e in parts)
        return named or any(self.along in i.variables() for e in parts for i in ir.indices_of(e))
