"""Accesses of memory: what a kernel reads and stores at each point, and along which loops."""

from __future__ import annotations

from collections.abc import Iterable

from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, Read, Ref
from dicp.loop.ir.index import Atom, Index, Indirect, Var, indirect_exprs
from dicp.loop.ir.kernel import Stmt

Access = tuple[Ref, Index]


def deep_variables(atom: Atom) -> set[Var]:
    """The loop variables that `atom` depends on, those in indirect expressions included."""
    if isinstance(atom, Var):
        return {atom}
    if isinstance(atom, Indirect):
        indices = [i for e in ir.walk(atom.expr) for i in ir.indices_of(e)]
        return {v for i in indices for a, _ in i.terms for v in deep_variables(a)}
    return {v for a, _ in atom.value.terms for v in deep_variables(a)}


def all_variables(index: Index) -> set[Var]:
    """The loop variables that `index` depends on, those in indirect expressions included."""
    return {v for atom, _ in index.terms for v in deep_variables(atom)}


def is_along(index: Index, var: Var) -> bool:
    """Whether `index` rises by one with each point of `var`."""
    return index.coefficient(var) == 1 and var not in all_variables(index.without(var))


def unconditional_reads(stmts: Iterable[Stmt]) -> list[Access]:
    """The reads of every point, without those that are made only where a condition holds."""
    found: dict[Access, bool] = {}
    seen: dict[Expr, bool] = {}

    def visit(expr: Expr, always: bool) -> None:
        if expr in seen and (seen[expr] or not always):
            return
        seen[expr] = always
        if isinstance(expr, Read):
            place = (expr.ref, expr.index)
            found[place] = found.get(place, False) or always
        for k, arg in enumerate(expr.args):
            visit(arg, always and not (expr.op == "masked" and k == 1))
        for index in ir.indices_of(expr):
            for inner in indirect_exprs(index):
                visit(inner, always)

    for stmt in stmts:
        visit(stmt.value, True)
    return [place for place, always in found.items() if always]
