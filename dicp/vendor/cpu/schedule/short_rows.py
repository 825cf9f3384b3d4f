"""The form of inner reductions over short rows: vectors of rows, not of a row's elements.

In: an inner reduction. Out: `ShortRows`, or None where another form is faster or needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from dicp.loop.ir import expr as ir
from dicp.loop.ir.access import Access, all_variables, unconditional_reads
from dicp.loop.ir.expr import Checked, Const, Expr, IndexValue, Masked, Named, Read, Ref
from dicp.loop.ir.index import Index, Size, Var
from dicp.loop.ir.kernel import Kernel, Let, Phase, Reduce, Scan, Stmt, Store, rewritten
from dicp.vendor.cpu import form
from dicp.vendor.cpu.form import LINE_BYTES, Team
from dicp.vendor.cpu.schedule.chooser import is_floating_sum
from dicp.vendor.cpu.schedule.vectors import is_vectorized
from dicp.vendor.cpu.thresholds import (
    LANE_ADDITIONS,
    MAX_SHORT_ROW,
    MAX_SHORT_ROW_OF_LINES,
    ROW_TILE,
    SUM_ADDITIONS,
)

ElementAddress: TypeAlias = tuple[Ref, Size, Index]
"""Memory, and the offset of an element in it."""


def short_rows(kernel: Kernel, team: Team | None) -> form.ShortRows | None:
    """The form of short rows, if the kernel has these and all of it can run in vectors of rows."""
    if not _has_short_rows(kernel) or kernel.cross_row_stores():
        return None
    row, (element,) = kernel.parallel[-1], kernel.reduction
    assert isinstance(element.size, int)
    steps = _with_values_of_rows(kernel.phases, element)
    inner = [s for p in steps if p.level == "reduction" for s in p.stmts]
    reads, stores = unconditional_reads(inner), [s for s in inner if isinstance(s, Store)]
    read_back = _read_back(steps, stores)
    if read_back is None:
        return None
    moving = (place for place in reads if row in all_variables(place[1]))
    staged = tuple(place for place in moving if place not in read_back)
    refs = [*(ref for ref, _ in staged), *(s.ref for s in stores)]
    places = any(isinstance(s, Reduce) and s.finds_position for s in inner)
    if not _is_short(element.size, refs, places):
        return None
    indices = [*(index for _, index in staged), *(s.index for s in stores)]
    if not all(_is_row(index, row, element) for index in indices):
        return None
    values = [e for s in inner for e in ir.walk(s.value)]
    if any(isinstance(e, (Checked, Masked)) for e in values):
        return None
    if not is_vectorized(inner, Var(row.position, ROW_TILE)):
        return None
    blocks = -(-element.size // LANE_ADDITIONS) if element.size > SUM_ADDITIONS else 1
    sums = frozenset(s for s in inner if is_floating_sum(s))
    return form.ShortRows(
        team, steps=steps, tile=ROW_TILE, staged=staged, results=tuple(stores), read_back=read_back,
        long=sums if blocks > 1 else frozenset(), block=-(-element.size // blocks),
    )  # fmt: skip


def _read_back(steps: Iterable[Phase], stores: Sequence[Store]) -> dict[Access, int] | None:
    """The reads of what the kernel has stored before, and by which of `stores`.

    None where memory that it stores is read elsewhere, or both before and after: tiles of elements
    are filled before the first phase, and results are stored after the last.
    """
    numbers = {_address(s.ref, s.index): k for k, s in enumerate(stores)}
    written = {s.ref.root for p in steps for s in p.stmts if isinstance(s, Store)}
    found: dict[Access, int] = {}
    early: set[ElementAddress] = set()
    stored: set[ElementAddress] = set()
    for phase in steps:
        for stmt in phase.stmts:
            reads = (e for e in ir.walk(stmt.value) if isinstance(e, Read))
            for access in ((e.ref, e.index) for e in reads if e.ref.root in written):
                place = _address(*access)
                if phase.level == "parallel" or place not in numbers:
                    return None
                if place in stored:
                    found[access] = numbers[place]
                else:
                    early.add(place)
            if isinstance(stmt, Store):
                stored.add(_address(stmt.ref, stmt.index))
    return None if any(_address(*access) in early for access in found) else found


def _address(ref: Ref, index: Index) -> ElementAddress:
    return ref.root, ref.offset, index


def _has_short_rows(kernel: Kernel) -> bool:
    if not kernel.parallel or len(kernel.reduction) != 1:
        return False
    rows, length = kernel.parallel[-1].size, kernel.reduction[0].size
    if not isinstance(length, int) or length < 2 or (isinstance(rows, int) and rows < ROW_TILE):
        return False
    return not any(isinstance(s, Scan) for s in kernel.stmts())


def _is_short(length: int, refs: Iterable[Ref], finds_position: bool) -> bool:
    """Whether vectors of rows are faster than those of a row's elements, which long rows fill."""
    widest = max((ref.dtype.itemsize for ref in refs), default=1)
    fills_lines = length * widest % LINE_BYTES == 0 and widest > 2
    most = MAX_SHORT_ROW_OF_LINES if fills_lines and not finds_position else MAX_SHORT_ROW
    return length < most[widest]


def _is_row(index: Index, row: Var, element: Var) -> bool:
    """Whether rows are contiguous, each a known number of elements after the one before."""
    step = index.coefficient(row)
    known = isinstance(step, int) and step > 1 and index.coefficient(element) == 1
    return known and all_variables(index.without(row, element)).isdisjoint((row, element))


def _with_values_of_rows(phases: Iterable[Phase], element: Var) -> tuple[Phase, ...]:
    """The phases, with what they compute for a row alone in a phase before: inside the vectorized
    loop over rows, it would be computed for every element."""
    found: list[Phase] = []
    names: dict[Expr, Let] = {}
    for phase in phases:
        if phase.level == "parallel":
            found.append(phase)
            continue
        known, stmts = len(names), [_named(s, element, names) for s in phase.stmts]
        own = tuple(names.values())[known:]
        found += [Phase("parallel", own)] * bool(own)
        found.append(Phase("reduction", tuple(stmts)))
    return tuple(found)


def _named(stmt: Stmt, element: Var, names: dict[Expr, Let]) -> Stmt:
    """`stmt` with each value that does not vary along a row replaced by its name."""
    fixed: dict[Expr, bool] = {}

    def is_fixed(expr: Expr) -> bool:
        known = fixed.get(expr)
        if known is None:
            varies = any(element in all_variables(i) for i in ir.indices_of(expr))
            varies |= isinstance(expr, Named) and expr.op == "scratch"
            known = fixed[expr] = not varies and all(map(is_fixed, expr.args))
        return known

    def visit(expr: Expr) -> Expr:
        if isinstance(expr, (Const, Named, IndexValue)):
            return expr
        if is_fixed(expr):
            let = names.setdefault(expr, Let(f"row{len(names)}", expr.dtype, expr))
            return ir.result(let.name, let.dtype)
        if isinstance(expr, Read) or not expr.args:
            return expr
        args = tuple(map(visit, expr.args))
        return expr if args == expr.args else expr.with_args(args)

    return rewritten(stmt, visit, lambda index: index)
