"""Which elements at checked indices are loaded before a loop.

A loop that checks indices is not vectorized, as it may report one of them. Where it also computes
elementary functions, the loads are made in a loop before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from dicp.loop.ir import expr as ir
from dicp.loop.ir.access import Access, deep_variables, unconditional_reads
from dicp.loop.ir.expr import Checked, Expr
from dicp.loop.ir.index import Index, Indirect, Var, indirect_exprs
from dicp.loop.ir.kernel import Let, Stmt, Store
from dicp.loop.ir.ops import INDEX_CHECKS, SCALAR_OPS
from dicp.loop.thresholds import HEAVY


def gathered(stmts: Sequence[Stmt], var: Var) -> list[Access]:
    """The elements at checked indices without which the loop over `var` has a vector form; none
    where another operator has no such form, or all are cheap."""
    if not all(isinstance(s, (Let, Store)) for s in stmts):
        return []
    stored = {s.ref.root for s in stmts if isinstance(s, Store)}
    found = [
        (ref, index) for ref, index in unconditional_reads(stmts)
        if ref.root not in stored and _is_checked(index, var)
    ]  # fmt: skip
    seen: set[Expr] = {ir.read(ref, index) for ref, index in found}
    rest = [e for s in stmts for e in ir.walk(s.value, seen)]
    if any(isinstance(e, Checked) for e in rest) or not any(_is_heavy(e) for e in rest):
        return []
    return found


def _is_checked(index: Index, var: Var) -> bool:
    """Whether `index` contains a check of a value that changes with `var`."""
    changes = any(isinstance(a, Indirect) and var in deep_variables(a) for a, _ in index.terms)
    checks = (e for inner in indirect_exprs(index) for e in ir.walk(inner))
    return changes and any(e.op in INDEX_CHECKS for e in checks)


def _is_heavy(expr: Expr) -> bool:
    row = SCALAR_OPS.get(expr.op)
    return row is not None and row.cost >= HEAVY and expr.dtype.is_floating_point
