"""The form of kernels without a reduction: points in the order of memory, or tiles of two loops.

In: a pointwise kernel. Out: `Points` or `Transposed`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from dicp.loop.ir.access import Access, all_variables, unconditional_reads
from dicp.loop.ir.expr import Masked, Read, walk
from dicp.loop.ir.index import Index, Var
from dicp.loop.ir.kernel import Stmt, Store
from dicp.loop.passes.split_loops import Limits, Range, inside, is_short, split
from dicp.loop.schedule.form import crossing_loop
from dicp.vendor.cpu import form
from dicp.vendor.cpu.form import HostForm, Inside
from dicp.vendor.cpu.schedule.chooser import Chooser, line
from dicp.vendor.cpu.thresholds import COPY_TILE, MAX_CELLS, NON_TEMPORAL_WIDTH, SQUARE, TILE

Case: TypeAlias = tuple[tuple[Limits, ...], Sequence[Stmt]]
"""Ranges of loops, any of the ranges of each, and statements that need not test conditions inside
them."""


class Pointwise(Chooser):
    """Chooses the form of kernels without reductions: strips of vectors, or transposed tiles."""

    def choose(self) -> HostForm:
        rows, stmts = self.kernel.parallel, self.kernel.stmts()
        if not rows:
            return form.Points()
        whole = (Range(0, rows[-1].size, tuple(stmts)),)
        parts = tuple(split(stmts, rows[-1]))
        for ranges in (whole, parts):
            crossing = self._crossing(ranges)
            if crossing is not None:
                return self._transposed(crossing, ranges)
        team = self.team(rows, len(rows) - 1)
        half = len(rows) > 1 and self.half_vectors(rows[-1])
        cases, others = _cases(stmts, rows[:-1])
        own = tuple(Inside(at, tuple(self.strips(s, rows[-1], ()))) for at, s in cases)
        return form.Points(team, tuple(self.strips(others, rows[-1], ())), half, own)

    def _crossing(self, ranges: Sequence[Range]) -> Var | None:
        """The loop that crosses the last one in all `ranges` of that."""
        phase = self.kernel.phases[0]
        kernels = [replace(self.kernel, phases=(replace(phase, stmts=r.stmts),)) for r in ranges]
        first, *others = map(crossing_loop, kernels)
        return first if all(other == first for other in others) else None

    def _transposed(self, crossing: Var, ranges: tuple[Range, ...]) -> form.Transposed:
        """Two loops in tiles, so that both directions use whole cache lines."""
        rows, last = self.kernel.parallel, self.kernel.parallel[-1]
        team = self.team(rows, len(rows) - (len(ranges) > 1))
        if all(_is_transposed_copy(r.stmts, crossing, last) for r in ranges):
            store = self.kernel.stores()[0]
            # Squares of shorter elements do not fill cache lines.
            whole = len(ranges) == 1 and store.ref.dtype.itemsize in (4, 8)
            streams = whole and self.is_non_temporal(store, last)
            extents = (NON_TEMPORAL_WIDTH, line([store.ref])) if streams else COPY_TILE
            return form.Transposed(
                team, crossing=crossing, extents=extents, ranges=ranges, copy=True, streams=streams
            )
        small = any(isinstance(v.size, int) and v.size < SQUARE for v in (crossing, last))
        stmts = [s for r in ranges for s in r.stmts]
        reads = [] if small else unconditional_reads(stmts)  # else no full squares
        staged = tuple(r for r in reads if _is_transposed(r[1], crossing, last))
        stored = () if small else _transposed_stores(stmts, crossing, last)
        return form.Transposed(
            team, crossing=crossing, extents=(TILE, TILE), ranges=ranges, staged=staged,
            stored=stored,
        )  # fmt: skip


def _cases(stmts: Sequence[Stmt], loops: Sequence[Var]) -> tuple[list[Case], Sequence[Stmt]]:
    """Ranges of `loops` with the statements for them, and the statements for what is left."""
    if any(e.op == "where" or isinstance(e, Masked) for s in stmts for e in walk(s.value)):
        cells = _cells(stmts, loops)
        if len(cells) > 1 and not any(_reads_under_conditions(s) for c in cells for s in c[1]):
            *first, (_, last) = cells
            return first, last
    limits, inner = inside(stmts, loops)
    return [(tuple(limits), inner)] if limits else [], stmts


def _cells(stmts: Sequence[Stmt], loops: Sequence[Var]) -> list[Case]:
    """Ranges of `loops` in which no condition changes that one of them alone decides, as in a
    concatenation or the gradient of padding: those with equal statements together, and those of
    the most points first. None where they take more than MAX_CELLS copies of the statements."""
    cells: list[Case] = [((), stmts)]
    for var in loops:
        found: list[Case] = []
        for limits, inner in cells:
            equal: dict[tuple[object, ...], tuple[list[Limits], Sequence[Stmt]]] = {}
            for part in split(inner, var):
                key = tuple((type(s), s.value, *_places_of(s)) for s in part.stmts)
                equal.setdefault(key, ([], part.stmts))[0].append((var, part.low, part.high))
            for ranges, own in equal.values():
                found.append(((*limits, *(ranges if len(equal) > 1 else ())), own))
        if not is_short([own for _, own in found], stmts, MAX_CELLS):
            return []
        cells = found
    return sorted(cells, key=lambda case: _points(case, loops), reverse=True)


def _places_of(stmt: Stmt) -> tuple[object, ...]:
    return (stmt.ref, stmt.index, stmt.op) if isinstance(stmt, Store) else (stmt,)


def _points(case: Case, loops: Sequence[Var]) -> int:
    """The points of `loops` inside the ranges of a case, as far as they are known."""
    limits = {var: [(low, high) for v, low, high in case[0] if v == var] for var in loops}
    known = [
        sum(high - low for low, high in limits[var] or [(0, var.size)]) for var in loops
    ]  # fmt: skip
    return math.prod(size for size in known if isinstance(size, int))


def _reads_under_conditions(stmt: Stmt) -> bool:
    return any(isinstance(e, Masked) for e in walk(stmt.value))


def _is_transposed_copy(stmts: Sequence[Stmt], crossing: Var, last: Var) -> bool:
    if len(stmts) != 1 or not isinstance(stmts[0], Store) or not stmts[0].is_copy:
        return False
    store, source = stmts[0], stmts[0].value
    assert isinstance(source, Read)
    read = _is_transposed(source.index, crossing, last)
    return read and _is_transposed(store.index, last, crossing)


def _transposed_stores(stmts: Sequence[Stmt], crossing: Var, last: Var) -> tuple[Access, ...]:
    """The transposed stores that may follow those of all other points of a tile."""
    reads = {(e.ref, e.index) for s in stmts for e in walk(s.value) if isinstance(e, Read)}
    stores = [s for s in stmts if isinstance(s, Store)]
    places = [*reads, *((s.ref, s.index) for s in stores)]
    return tuple(
        (s.ref, s.index) for s in stores
        if not s.op and _is_transposed(s.index, crossing, last)
        and all(at == (s.ref, s.index) for at in places if at[0].root is s.ref.root)
    )  # fmt: skip


def _is_transposed(index: Index, along: Var, over: Var) -> bool:
    """Whether a tensor is contiguous along `along` and strided along `over`."""
    strided = index.coefficient(along) == 1 and index.coefficient(over) not in (0, 1)
    return strided and all_variables(index.without(along, over)).isdisjoint((along, over))
