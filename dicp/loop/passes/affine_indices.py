"""Computed indices that are affine in the loop variables, as those of `arange` are.

In: indices and integer expressions. Out: affine indices without checks, where that is proved.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dicp.loop.ir.expr import Const, Expr, IndexValue
from dicp.loop.ir.index import (
    Index,
    Indirect,
    Size,
    Var,
    combine,
    is_nonnegative,
    is_positive,
    normal,
)


def with_affine(index: Index) -> Index:
    """`index` with each computed coordinate that is affine in its place."""
    computed = [(a, c, affine(a.expr)) for a, c in index.terms if isinstance(a, Indirect)]
    known = [(atom, c, found) for atom, c, found in computed if found is not None]
    if not known:
        return index
    rest = index.without(*(atom for atom, _, _ in known))
    return combine([(rest, 1), *((found, c) for _, c, found in known)])


def affine(expr: Expr) -> Index | None:
    """An int64 expression as an affine index of the loop variables; None where it is not proved to
    be one. A check that cannot fail is left out."""
    return _Finder().find(expr)


class _Finder:
    def __init__(self) -> None:
        self._known: dict[Expr, Index | None] = {}

    def find(self, expr: Expr) -> Index | None:
        if expr not in self._known:
            self._known[expr] = self._find(expr)
        return self._known[expr]

    def _find(self, expr: Expr) -> Index | None:
        if isinstance(expr, IndexValue):
            return expr.index if expr.index.is_affine else None
        if expr.dtype != torch.int64:
            return None
        if isinstance(expr, Const):
            return Index(int(expr.value))
        if expr.op == "where":
            return self._chosen(*expr.args)
        rule = _RULES.get(expr.op)
        args = [self.find(arg) for arg in expr.args] if rule else []
        return None if rule is None or None in args else rule(*args)

    def _chosen(self, test: Expr, yes: Expr, no: Expr) -> Index | None:
        """The operand of `where` that a comparison with one outcome chooses."""
        if test.op != "lt" or test.args[0].dtype != torch.int64:
            return None
        a, b = map(self.find, test.args)
        if a is None or b is None:
            return None
        if _least(b, a, margin=1):
            return self.find(yes)
        return self.find(no) if _least(a, b) else None


def _product(a: Index, b: Index) -> Index | None:
    if not a.terms:
        return b * a.const
    return None if b.terms else a * b.const


def _maximum(a: Index, b: Index) -> Index | None:
    if _least(a, b):
        return a
    return b if _least(b, a) else None


def _checked(index: Index, size: Index) -> Index | None:
    return index if _least(index, Index(0)) and _least(size, index, margin=1) else None


def _wrapped(index: Index, size: Index) -> Index | None:
    from_end = _least(Index(0), index, margin=1)
    return _checked(index + size if from_end else index, size)


def _least(a: Index, b: Index, margin: int = 0) -> bool:
    """Whether a >= b + margin is proved at every point of the loops."""
    low = _minimum(a + b * -1)
    return low is not None and is_nonnegative(normal(low - margin))


def _minimum(index: Index) -> Size | None:
    """The least value of an affine index; None where a coefficient's sign is not known."""
    low = index.const
    for atom, c in index.terms:
        assert isinstance(atom, Var)
        if is_positive(normal(-1 * c)):
            low = low + c * (atom.size - 1)
        elif not is_nonnegative(c):
            return None
    return normal(low)


_RULES: dict[str, Callable[..., Index | None]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a + b * -1,
    "neg": lambda a: a * -1,
    "mul": _product,
    "maximum": _maximum,
    "minimum": lambda a, b: _negated(_maximum(a * -1, b * -1)),
    "check_index": _checked,
    "wrap_index": _wrapped,
}


def _negated(index: Index | None) -> Index | None:
    return None if index is None else index * -1
