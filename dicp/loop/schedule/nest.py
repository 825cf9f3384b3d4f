"""The loop nest of a kernel: loops split where indices divide them, ordered, and coalesced.

In: phases over the axes of a group. Out: a `Kernel` whose loops run along memory.
"""

from __future__ import annotations

from collections.abc import Iterable

from dicp.loop.ir import expr as ir
from dicp.loop.ir.access import all_variables
from dicp.loop.ir.expr import Expr, Load, Read, Rewriter
from dicp.loop.ir.index import (
    ZERO,
    FloorDiv,
    Index,
    Mod,
    Size,
    Var,
    indirect_exprs,
    normal,
    quotient,
    variable,
)
from dicp.loop.ir.kernel import Kernel, KernelKind, Phase, Reduce, Store, rewritten
from dicp.loop.thresholds import (
    ADJACENT,
    ASSUMED_STRIDE,
    MAX_DIVISIONS,
    MAX_STRIDE,
    STRIDE_POWER,
    TIE,
)
from dicp.origin import Origin


class Nest:
    """The loops of a kernel while they are split, ordered and merged."""

    def __init__(self, phases: list[Phase], parallel: list[Var], reduction: list[Var]) -> None:
        self.phases = phases
        self.parallel = parallel
        self.reduction = reduction
        self._next = max((v.position for v in parallel + reduction), default=-1) + 1

    def indices(self) -> list[tuple[Index, int]]:
        """The index expressions of every pass, with the bytes that they move per point."""
        found: list[tuple[Index, int]] = []
        for phase in self.phases:
            seen: set[Expr] = set()
            for stmt in phase.stmts:
                if isinstance(stmt, Store):
                    found.append((stmt.index, 2 * stmt.ref.dtype.itemsize))
                    for inner in indirect_exprs(stmt.index):
                        found += self._of(inner, seen)
                if isinstance(stmt, Reduce) and stmt.position is not None:
                    found.append((stmt.position, 0))
                found += self._of(stmt.value, seen)
        return found

    def _of(self, expr: Expr, seen: set[Expr]) -> list[tuple[Index, int]]:
        result = []
        for e in ir.walk(expr, seen):
            weight = e.ref.dtype.itemsize if isinstance(e, (Load, Read)) else 0
            result += [(i, weight) for i in ir.indices_of(e)]
        return result

    def substitute(self, mapping: dict[Var, Index]) -> None:
        rewrite = Rewriter(mapping)
        self.phases = [
            Phase(p.level, tuple(rewritten(s, rewrite, rewrite.index) for s in p.stmts))
            for p in self.phases
        ]

    def fresh(self, size: Size) -> Var:
        self._next += 1
        return Var(self._next - 1, size)

    def split_by_division(self) -> None:
        """Split loop v at each v // d or v % d where d divides v's size: v = d * high + low."""
        for _ in range(MAX_DIVISIONS):
            found = self._division()
            if found is None:
                return
            var, divisor = found
            outer = quotient(var.size, divisor)
            assert outer is not None
            high, low = self.fresh(outer), self.fresh(divisor)
            self.substitute({var: variable(high) * divisor + variable(low)})
            for loops in (self.parallel, self.reduction):
                if var in loops:
                    at = loops.index(var)
                    loops[at : at + 1] = [high, low]

    def _division(self) -> tuple[Var, Size] | None:
        for index, _ in self.indices():
            for atom in _divisions(index):
                if len(atom.value.terms) != 1 or atom.value.const != 0:
                    continue
                ((var, c),) = atom.value.terms
                if isinstance(var, Var):
                    exact = quotient(var.size, atom.divisor) if c == 1 else None
                    if exact is not None and exact != 1 and atom.divisor != 1:
                        return var, atom.divisor
        return None

    def order(self, keep_reduction: bool) -> None:
        """Put loops with the largest strides outermost."""
        weights = self._weights()
        self.parallel.sort(key=lambda v: weights[v], reverse=True)
        if not keep_reduction:
            self.reduction.sort(key=lambda v: weights[v], reverse=True)

    def _weights(self) -> dict[Var, float]:
        """Sort key of each loop: the order that suits most of the memory traffic.

        The sum over accesses of what `thresholds.py` says of their strides. Ties keep the given
        order.
        """
        total: dict[Var, float] = dict.fromkeys(self.parallel + self.reduction, 0.0)
        stores = [
            (s.index, s.ref.dtype.itemsize)
            for p in self.phases for s in p.stmts if isinstance(s, Store)
        ]  # fmt: skip
        rank = {v: -i * TIE for i, v in enumerate(self.parallel + self.reduction)}
        for index, weight in [*self.indices(), *stores]:
            for var in index.variables():
                c = index.coefficient(var)
                stride = abs(c) if isinstance(c, int) else ASSUMED_STRIDE
                if stride == 1 and not self._is_table(index, var):
                    total[var] -= weight * ADJACENT
                elif stride > 1:
                    total[var] += weight * min(stride, MAX_STRIDE) ** STRIDE_POWER
        return {v: total[v] + rank[v] for v in total}

    def _is_table(self, index: Index, var: Var) -> bool:
        """Whether an access along `var` is the same for all of another loop: it is of few elements,
        in a cache, and is hoisted out of that loop where that is the inner one."""
        loops = self.parallel if var in self.parallel else self.reduction
        return not all_variables(index).issuperset(loops)

    def merge(self) -> None:
        """Coalesce adjacent loops that every index expression addresses as one loop."""
        for loops in (self.parallel, self.reduction):
            k = 0
            while k + 1 < len(loops):
                outer, inner = loops[k], loops[k + 1]
                if self._mergeable(outer, inner):
                    var = self.fresh(normal(outer.size * inner.size))
                    self.substitute({outer: ZERO, inner: variable(var)})
                    loops[k : k + 2] = [var]
                else:
                    k += 1

    def _mergeable(self, outer: Var, inner: Var) -> bool:
        for index, _ in self.indices():
            hidden = {v for atom in _divisions(index) for v in atom.value.variables()}
            if outer in hidden or inner in hidden:
                return False
            if index.coefficient(outer) != normal(index.coefficient(inner) * inner.size):
                return False
        return True

    def kernel(self, kind: KernelKind, origins: tuple[Origin, ...]) -> Kernel:
        renamed = [Var(k, v.size) for k, v in enumerate([*self.parallel, *self.reduction])]
        old = [*self.parallel, *self.reduction]
        # Two steps, since old and new variables may coincide.
        stand_in = [self.fresh(v.size) for v in old]
        self.substitute({o: variable(s) for o, s in zip(old, stand_in, strict=True)})
        self.substitute({s: variable(n) for s, n in zip(stand_in, renamed, strict=True)})
        count = len(self.parallel)
        return Kernel(
            kind, tuple(renamed[:count]), tuple(renamed[count:]), tuple(self.phases), origins
        )


def _divisions(index: Index) -> Iterable[FloorDiv | Mod]:
    for atom, _ in index.terms:
        if isinstance(atom, (FloorDiv, Mod)):
            yield atom
            yield from _divisions(atom.value)
