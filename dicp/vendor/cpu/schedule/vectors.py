"""Which loops the compiler vectorizes: the others add up one element after another."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dicp.loop.ir import expr as ir
from dicp.loop.ir.access import deep_variables
from dicp.loop.ir.expr import Checked, Expr
from dicp.loop.ir.index import FloorDiv, Index, Indirect, Mod, Var
from dicp.loop.ir.kernel import Stmt
from dicp.loop.ir.ops import SCALAR_OPS
from dicp.loop.thresholds import HEAVY
from dicp.vendor.cpu.thresholds import SUM_LANES

SCALAR_FUNCTIONS = frozenset({
    ("lgamma", torch.float64), ("philox_normal", torch.float32), ("philox_normal", torch.float64),
})  # fmt: skip
"""Functions without a vector variant."""
SUNK_FUNCTIONS = frozenset({"sin", "cos"})
"""Calls that the compiler moves into the branch of a condition, which then stays one."""


def is_vectorized(stmts: Iterable[Stmt], var: Var) -> bool:
    """Whether the compiler is expected to vectorize the loop over `var`.

    It does not where operators or indices have no vector form, nor where it unrolls a short loop.
    """
    if isinstance(var.size, int) and var.size < 2 * SUM_LANES:
        return False
    found = _varying(stmts, var)
    if any(e.op == "where" for e in found) and any(e.op in SUNK_FUNCTIONS for e in found):
        return False
    return not any(_is_scalar(e) or _is_scattered(e, var) for e in found)


def _varying(stmts: Iterable[Stmt], var: Var) -> list[Expr]:
    """The values that change with `var`: others are computed before its loop."""
    seen: set[Expr] = set()
    found: dict[Expr, None] = {}
    for expr in (e for s in stmts for e in ir.walk(s.value, seen)):
        atoms = (atom for index in ir.indices_of(expr) for atom, _ in index.terms)
        if any(arg in found for arg in expr.args) or any(var in deep_variables(a) for a in atoms):
            found[expr] = None
    return list(found)


def _is_scalar(expr: Expr) -> bool:
    if isinstance(expr, Checked) or (expr.op, expr.dtype) in SCALAR_FUNCTIONS:
        return True
    row = SCALAR_OPS.get(expr.op)
    is_call = row is not None and row.cost >= HEAVY
    return is_call and not expr.dtype.is_floating_point


def _is_scattered(expr: Expr, var: Var) -> bool:
    """Whether an index of `expr` is read, divided or wrapped around as `var` changes."""
    indices: tuple[Index, ...] = ir.indices_of(expr)
    return any(
        isinstance(atom, (FloorDiv, Mod, Indirect)) and var in deep_variables(atom)
        for index in indices
        for atom, _ in index.terms
    )
