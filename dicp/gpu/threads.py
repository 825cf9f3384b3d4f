"""How the threads of a block divide a kernel's points, for kernels written thread by thread.

`dicp.gpu.tiles` chooses tiles for languages that work on tiles. Here a thread has points of its
own: groups of adjacent ones that it reads and writes in one access of up to 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dicp.gpu.facts import DeviceFacts
from dicp.gpu.thresholds import MANY_ROWS, MAX_PERSISTENT
from dicp.gpu.tiles import extent, numel, power_of_two
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, Read, Ref
from dicp.loop.ir.index import Atom, Index, Indirect, Var, indirect_exprs, quotient
from dicp.loop.ir.kernel import Kernel, Phase, Scan, Stmt, Store

ACCESS_BYTES = 16
WIDEST = 8
"""Most points of one access: more would need too many registers."""
POINTS = 8
"""Points of a thread of a pointwise kernel on large tensors."""
ROW_POINTS = 16
"""Points of a row per thread; they may stay in registers."""
MOST_ROW_POINTS = 32
"""Most points of a row per thread of a group that is one wave, which needs no barrier."""
GROUP = 512
"""Most threads that share a row."""
BLOCK = 128
"""Threads of a block of short rows."""
COLUMN_BLOCK = 256
"""Threads of a block of an outer reduction."""

Access = tuple[Ref, Index]


@dataclass(frozen=True)
class PointThreads:
    """A pointwise kernel's block: its threads, accesses of each, and points of an access."""

    threads: int
    steps: int
    width: int

    @property
    def points(self) -> int:
        return self.threads * self.steps * self.width


@dataclass(frozen=True)
class RowThreads:
    """A reduction's block: `rows` rows, each shared by `group` threads."""

    group: int
    rows: int
    width: int
    """Points of an access."""
    steps: int | None
    """Accesses of a thread, if its points may stay in registers."""

    @property
    def threads(self) -> int:
        return self.group * self.rows


def point_threads(kernel: Kernel, facts: DeviceFacts) -> PointThreads:
    count = extent(numel(kernel.parallel))
    scattered = kernel.kind == "scatter"
    width = 1 if scattered else access_width(kernel.parallel, _accesses(kernel.phases))
    points = POINTS
    while points > width and count // (points * COLUMN_BLOCK) < facts.enough_programs:
        points //= 2
    threads = COLUMN_BLOCK
    while threads > facts.lanes and count // (points * threads) < facts.enough_programs:
        threads //= 2
    return PointThreads(threads, points // width, width)


def row_threads(kernel: Kernel, facts: DeviceFacts) -> RowThreads:
    """The block of an inner reduction."""
    rows, inner = extent(numel(kernel.parallel)), numel(kernel.reduction)
    stmts = [s for p in kernel.phases for s in p.stmts]
    scans = any(isinstance(s, Scan) for s in stmts)
    phases = [p for p in kernel.phases if p.level == "reduction"]
    width = 1 if scans else access_width(kernel.reduction, _accesses(phases), kernel.parallel)
    points = ROW_POINTS if rows >= 4 * facts.enough_programs else max(width, 4)
    group = min(power_of_two(-(-extent(inner) // points)), GROUP)
    if facts.lanes < group <= facts.lanes * ROW_POINTS and rows >= MANY_ROWS:
        if extent(inner) <= facts.lanes * MOST_ROW_POINTS:
            group = facts.lanes
    in_registers = isinstance(inner, int) and inner <= min(group * MOST_ROW_POINTS, MAX_PERSISTENT)
    steps = -(-extent(inner) // (group * width)) if in_registers and not scans else None
    block = BLOCK if rows * group >= facts.enough_programs * BLOCK else facts.lanes
    return RowThreads(group, max(1, block // group), width, steps)


def column_threads(kernel: Kernel, facts: DeviceFacts) -> RowThreads:
    """The block of an outer reduction: `rows` adjacent columns, each shared by `group` threads."""
    columns, inner = extent(numel(kernel.parallel)), extent(numel(kernel.reduction))
    if any(isinstance(s, Scan) for p in kernel.phases for s in p.stmts):
        return RowThreads(1, facts.lanes, 1, None)
    wide = min(facts.lanes, max(16, power_of_two(columns)))
    while wide > 16 and columns // wide < facts.enough_programs:
        wide //= 2
    group = min(COLUMN_BLOCK // wide, power_of_two(inner))
    return RowThreads(max(group, facts.lanes // wide), wide, 1, None)


def access_width(
    loops: Sequence[Var], accesses: Iterable[Access], outer: Sequence[Var] = ()
) -> int:
    """The points along the last loop for which every access along memory is one aligned access."""
    last = loops[-1] if loops else None
    if last is None or not isinstance(last.size, int):
        return 1
    along = [(ref, index) for ref, index in accesses if is_along(index, last)]
    if not along:
        return 1
    width = min(WIDEST, ACCESS_BYTES // max(ref.dtype.itemsize for ref, _ in along))
    while width > 1 and (last.size % width or not all(_steps(i, last, width) for _, i in along)):
        width //= 2
    return width


def is_along(index: Index, var: Var) -> bool:
    """Whether `index` rises by one with each point of `var`."""
    others = (atom for atom, _ in index.terms if atom != var)
    return index.coefficient(var) == 1 and not any(var in _deep_variables(a) for a in others)


def _deep_variables(atom: Atom) -> set[Var]:
    """The loop variables that `atom` depends on, those in indirect expressions included."""
    if isinstance(atom, Var):
        return {atom}
    if isinstance(atom, Indirect):
        indices = [i for e in ir.walk(atom.expr) for i in ir.indices_of(e)]
        return {v for i in indices for a, _ in i.terms for v in _deep_variables(a)}
    return {v for a, _ in atom.value.terms for v in _deep_variables(a)}


def _steps(index: Index, last: Var, width: int) -> bool:
    """Whether `index` is a multiple of `width` wherever `last` is."""
    rest = (c for atom, c in index.terms if atom != last)
    return all(quotient(c, width) is not None for c in (index.const, *rest))


def _accesses(phases: Iterable[Phase]) -> list[Access]:
    stmts = [s for p in phases for s in p.stmts]
    stores = [(s.ref, s.index) for s in stmts if isinstance(s, Store)]
    return stores + unconditional_reads(stmts)


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
