"""Splitting a loop where conditions on its variable change, so that no condition is left inside.

`x[v] if v < 8 else y[v - 8]` over 0 .. 15 becomes two loops without a test: concatenation,
padding, half-rotation and pooling then read memory in whole vectors. So does rolling: `x[(v + 9) %
16]` is `x[v + 9]` below 7 and `x[v - 7]` from there on.
"""

from __future__ import annotations

import itertools
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
    quotient,
    variable,
)
from dicp.loop.ir.kernel import Stmt, Store, rewritten
from dicp.loop.thresholds import MAX_PARTS, MAX_RANGES


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
    """The loop over `var` as ranges, in each of which every condition on `var` alone is constant,
    and so is what `var` alone is divided by a number.

    Where that takes more than MAX_RANGES copies of the statements, it is split at conditions only,
    or not at all.
    """
    whole = Range(0, var.size, tuple(stmts))
    for at_wraps in (True, False):
        parts = _divide(whole, var, at_wraps)
        if len(parts) > 1 and is_short([p.stmts for p in parts], stmts, MAX_RANGES):
            return parts
    return parts if len(parts) == 1 else [whole]


def is_short(parts: Sequence[Sequence[Stmt]], whole: Sequence[Stmt], copies: int) -> bool:
    """Whether the text of `parts` is no longer than `copies` of the statements they are parts of:
    those of a concatenation of any number of tensors each read one."""
    if len(parts) <= copies:
        return True
    return sum(_count(p) for p in parts) <= copies * _count(whole)


def _count(stmts: Sequence[Stmt]) -> int:
    return sum(1 for _ in _expressions(stmts))


Limits = tuple[Var, Size, Size]
"""A loop, and the range low <= v < high of it."""


def inside(stmts: Sequence[Stmt], loops: Sequence[Var]) -> tuple[list[Limits], list[Stmt]]:
    """The longest ranges of `loops` in which no condition changes that one of them alone decides
    and under which memory is read, and the statements simplified for those.

    The pixels of an image whose windows read no padding, for example. No ranges where there are no
    such conditions, or where they change within every half of a loop.
    """
    limits: list[Limits] = []
    known: dict[Expr, bool] = {}
    tests = [e.args[0] for e in _expressions(stmts) if e.op == "masked"]
    conditions = dict.fromkeys(e for test in tests for e in _conjuncts(test))
    for var in loops:
        steps = {e: s for e in conditions if (s := _step(e, var)) is not None}
        if not isinstance(var.size, int) or not all(isinstance(s.at, int) for s in steps.values()):
            continue
        points = sorted({0, var.size, *(min(max(int(s.at), 0), var.size) for s in steps.values())})
        low, high = max(itertools.pairwise(points), key=lambda part: part[1] - part[0])
        if 2 * (high - low) < var.size:
            return [], list(stmts)
        known |= {e: s.before != _reached(s.at, low) for e, s in steps.items()}
        if (low, high) != (0, var.size):
            limits.append((var, low, high))
    fold = _Fold(known, {})
    return limits, [fold.stmt(s) for s in stmts] if limits else list(stmts)


def _conjuncts(test: Expr) -> Iterator[Expr]:
    """The conditions that all hold where `test` does."""
    if test.op == "bitwise_and" and test.dtype == torch.bool:
        for arg in test.args:
            yield from _conjuncts(arg)
    else:
        yield test


def _divide(part: Range, var: Var, at_wraps: bool) -> list[Range]:
    """`part` split at its conditions; recursive, as folding some conditions exposes others."""
    conditions = {e: s for e in _expressions(part.stmts) if (s := _step(e, var)) is not None}
    atoms = _divisions(part.stmts) if at_wraps else ()
    wraps = {a: w for a in atoms if (w := _wraps(a, var, part)) is not None}
    points = {s.at for s in conditions.values()}.union(*wraps.values())
    bounds = sorted_sizes({part.low, part.high} | {at for at in points if not _outside(at, part)})
    if not (conditions or wraps) or bounds is None or len(bounds) > MAX_PARTS + 1:
        return [part]
    parts: list[Range] = []
    for low, high in zip(bounds, bounds[1:], strict=False):
        known = {e: step.before != _reached(step.at, low) for e, step in conditions.items()}
        whole = {a: sum(_reached(at, low) for at in w) for a, w in wraps.items()}
        fold = _Fold(known, {a: _divided(a, count) for a, count in whole.items()})
        parts += _divide(Range(low, high, tuple(map(fold.stmt, part.stmts))), var, at_wraps)
    return parts


def _expressions(stmts: Iterable[Stmt]) -> Iterator[Expr]:
    seen: set[Expr] = set()
    for stmt in stmts:
        yield from ir.walk(stmt.value, seen)
        if isinstance(stmt, Store):
            for inner in indirect_exprs(stmt.index):
                yield from ir.walk(inner, seen)


def _divisions(stmts: Iterable[Stmt]) -> Iterator[FloorDiv | Mod]:
    """The quotients and remainders in the indices of `stmts`."""
    indices = [i for e in _expressions(stmts) for i in ir.indices_of(e)]
    indices += [s.index for s in stmts if isinstance(s, Store)]
    for index in indices:
        yield from (a for a, _ in index.terms if isinstance(a, (FloorDiv, Mod)))


def _wraps(atom: FloorDiv | Mod, var: Var, part: Range) -> list[Size] | None:
    """Where `v + c`, 0 <= c < divisor, reaches a multiple of the divisor as v grows; None for what
    else is divided, and where that happens too often to split there."""
    value, divisor = atom.value, atom.divisor
    if [*value.terms] != [(var, 1)] or not is_nonnegative(value.const):
        return None
    if not is_positive(normal(divisor - value.const)):
        return None
    found: list[Size] = []
    while len(found) < MAX_RANGES:
        at = normal(divisor * (len(found) + 1) - value.const)
        before = _below(at, part.high)
        if not before:
            return None if before is None else found
        found.append(at)
    return None


def _divided(atom: FloorDiv | Mod, whole: int) -> Index:
    """The quotient or remainder where the quotient is `whole`."""
    if isinstance(atom, FloorDiv):
        return Index(whole)
    return atom.value + normal(-1 * whole * atom.divisor)


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
    if not isinstance(factor, int) or factor == 0:
        return None
    whole = const // abs(factor) if isinstance(const, int) else _floor(const, abs(factor))
    if whole is None:
        return None
    return _Step(normal(-1 * whole), True) if factor > 0 else _Step(normal(whole + 1), False)


def _floor(value: Size, divisor: int) -> Size | None:
    """`value // divisor`; None where the remainder is not known."""
    exact = (quotient(normal(value - rest), divisor) for rest in range(min(divisor, MAX_RANGES)))
    return next((q for q in exact if q is not None), None)


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


def sorted_sizes(points: Iterable[Size]) -> list[Size] | None:
    """`points` so that each is provably at least as large as those before it; None where there is
    no such order."""
    ordered: list[Size] = []
    for point in points:
        after = [other for other in ordered if _at_most(point, other)]
        before = [other for other in ordered if other not in after]
        if not all(_at_most(other, point) for other in before):
            return None
        ordered = [*before, point, *after]
    return ordered


def _at_most(a: Size, b: Size) -> bool:
    return is_nonnegative(normal(b - a))


class _Fold(Rewriter):
    """Rewrites statements with some conditions and some quotients and remainders known, and folds
    what depends on them."""

    def __init__(self, known: dict[Expr, bool], divided: dict[FloorDiv | Mod, Index]) -> None:
        super().__init__()
        self.known = known
        self.divided = divided

    def stmt(self, stmt: Stmt) -> Stmt:
        return rewritten(stmt, self, self.index)

    def index(self, index: Index) -> Index:
        """`index` with each quotient or remainder that is known, and each indirect atom whose
        expression became a plain index, replaced by it."""
        known = self.divided and any(a in self.divided for a, _ in index.terms)
        if not known and not any(indirect_exprs(index)):
            return index
        return combine([(Index(index.const), 1), *((self._atom(a), c) for a, c in index.terms)])

    def _atom(self, atom: Atom) -> Index:
        if isinstance(atom, (FloorDiv, Mod)) and atom in self.divided:
            return self.divided[atom]
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
