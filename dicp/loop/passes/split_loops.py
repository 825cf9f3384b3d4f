"""Splitting a loop where conditions on its variable change, so that no condition is left inside.

`x[v] if v < 8 else y[v - 8]` over 0 .. 15 becomes two loops without a test: concatenation,
padding, rolling, half-rotation and pooling then read memory in whole vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Const, Expr, IndexValue, Rewriter
from dicp.loop.ir.index import (
    Atom,
    FloorDiv,
    Index,
    Indirect,
    Mod,
    Size,
    Var,
    combine,
    floordiv,
    indirect_exprs,
    is_nonnegative,
    is_positive,
    mod,
    normal,
    variable,
)
from dicp.loop.ir.kernel import Stmt, Store, rewritten
from dicp.loop.thresholds import MAX_RANGES


@dataclass(frozen=True)
class Range:
    """The iterations low <= v < high of a loop, and its statements simplified for them."""

    low: Size
    high: Size
    stmts: tuple[Stmt, ...]


@dataclass(frozen=True)
class _Step:
    """A condition whose value is `before` while the variable is below `at`, then the opposite."""

    at: Size
    before: bool


def split(stmts: Sequence[Stmt], var: Var) -> list[Range]:
    """The loop over `var` as ranges, in each of which every condition on `var` alone is constant.

    Unsplit where that takes more than MAX_RANGES.
    """
    whole = Range(0, var.size, tuple(stmts))
    parts = _divide(whole, var)
    return parts if len(parts) <= MAX_RANGES else [whole]


def _divide(part: Range, var: Var) -> list[Range]:
    """`part` split at its conditions; recursive, as folding some conditions exposes others."""
    conditions = {e: s for e in _expressions(part.stmts) if (s := _step(e, var)) is not None}
    inside = {s.at for s in conditions.values() if not _outside(s.at, part)}
    bounds = _sorted({part.low, part.high} | inside)
    if not conditions or bounds is None or len(bounds) > MAX_RANGES + 1:
        return [part]
    parts: list[Range] = []
    for low, high in zip(bounds, bounds[1:], strict=False):
        known = {e: step.before != _reached(step.at, low) for e, step in conditions.items()}
        fold = _Fold(known)
        parts += _divide(Range(low, high, tuple(fold.stmt(s) for s in part.stmts)), var)
    return parts


def _expressions(stmts: Iterable[Stmt]) -> Iterator[Expr]:
    seen: set[Expr] = set()
    for stmt in stmts:
        yield from ir.walk(stmt.value, seen)
        if isinstance(stmt, Store):
            for inner in indirect_exprs(stmt.index):
                yield from ir.walk(inner, seen)


_LESS: dict[str, tuple[int, int]] = {
    "lt": (1, 0), "le": (1, -1), "gt": (-1, 0), "ge": (-1, -1), "minimum": (1, -1),
    "maximum": (-1, -1),
}  # fmt: skip
"""Operator -> (sign, offset): `first OP second` is `sign * (first - second) + offset < 0`. For an
extremum the condition is that it returns `first`, as it does for equal operands."""


def _step(expr: Expr, var: Var) -> _Step | None:
    """`expr` as a step function of `var`, if it compares indices that differ by `var` alone."""
    if expr.op not in _LESS:
        return None
    first, second = (_index_of(a) for a in expr.args)
    if first is None or second is None:
        return None
    sign, offset = _LESS[expr.op]
    rest = combine([(first, sign), (second, -sign)]) + offset
    if not rest.terms and isinstance(rest.const, int):
        return _Step(0, rest.const >= 0)  # the same at every point
    if len(rest.terms) != 1 or rest.terms[0][0] != var:
        return None
    return _first_change(rest.terms[0][1], rest.const)


def _first_change(factor: Size, const: Size) -> _Step | None:
    """The v at which `factor * v + const < 0` begins or ceases to hold as v grows."""
    if factor == 1:
        return _Step(normal(-1 * const), True)
    if factor == -1:
        return _Step(normal(const + 1), False)
    if not isinstance(factor, int) or not isinstance(const, int):
        return None
    return _Step(-(const // factor), True) if factor > 0 else _Step(const // -factor + 1, False)


def _index_of(expr: Expr) -> Index | None:
    if isinstance(expr, IndexValue):
        return expr.index
    if isinstance(expr, Const) and expr.dtype == torch.int64:
        return Index(int(expr.value))
    return None


def _below(a: Size, b: Size) -> bool | None:
    """Whether a < b; None where that cannot be proved either way."""
    if is_positive(normal(b - a)):
        return True
    return False if is_nonnegative(normal(a - b)) else None


def _outside(at: Size, part: Range) -> bool:
    """Whether `at` provably lies at a border of `part` or beyond."""
    return _below(part.low, at) is False or _below(at, part.high) is False


def _reached(at: Size, low: Size) -> bool:
    """Whether a condition that changes at `at` has changed for every value from `low` on."""
    return _below(low, at) is False


def _sorted(points: set[Size]) -> list[Size] | None:
    """`points` in increasing order; None where the order is not provable."""
    ordered: list[Size] = []
    for point in points:
        place = len(ordered)
        for k, other in enumerate(ordered):
            before = _below(point, other)
            if before is None:
                return None
            if before:
                place = min(place, k)
        ordered.insert(place, point)
    return ordered


class _Fold(Rewriter):
    """Rewrites statements with some conditions known, and folds what depends on them."""

    def __init__(self, known: dict[Expr, bool]) -> None:
        super().__init__()
        self.known = known

    def stmt(self, stmt: Stmt) -> Stmt:
        return rewritten(stmt, self, self.index)

    def index(self, index: Index) -> Index:
        """`index` with each indirect atom whose expression became a plain index replaced by it."""
        if not any(indirect_exprs(index)):
            return index
        return combine([(Index(index.const), 1), *((self._atom(a), c) for a, c in index.terms)])

    def _atom(self, atom: Atom) -> Index:
        if isinstance(atom, Indirect):
            inner = self(atom.expr)
            plain = _index_of(inner)
            return plain or Index(0, ((Indirect(inner, atom.size), 1),))
        if isinstance(atom, FloorDiv):
            return floordiv(self.index(atom.value), atom.divisor)
        if isinstance(atom, Mod):
            return mod(self.index(atom.value), atom.divisor)
        return variable(atom)

    def _rebuild(self, expr: Expr) -> Expr:
        known = self.known.get(expr)
        if known is not None:
            if expr.op in ("maximum", "minimum"):
                return self(expr.args[0 if known else 1])
            return ir.const(known, torch.bool)
        if expr.op in ("where", "masked"):
            test = self(expr.args[0])
            if isinstance(test, Const):
                if expr.op == "where":
                    return self(expr.args[1] if test.value else expr.args[2])
                return self(expr.args[1]) if test.value else ir.const(0, expr.dtype)
        if expr.op in ("bitwise_and", "bitwise_or") and expr.dtype == torch.bool:
            folded = _logical(expr.op, tuple(map(self, expr.args)))
            if folded is not None:
                return folded
        return super()._rebuild(expr)


def _logical(op: str, args: tuple[Expr, ...]) -> Expr | None:
    """x & true = x, x & false = false, x | false = x, x | true = true."""
    neutral = op == "bitwise_and"
    for one, other in (args, args[::-1]):
        if isinstance(one, Const):
            return other if bool(one.value) == neutral else one
    return None
