"""How the threads of a block divide a kernel's points, for kernels written thread by thread.

`dicp.gpu.tiles` chooses tiles for languages that work on tiles. Here a thread has points of its
own: groups of adjacent ones that it reads and writes in one access of up to 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dicp.gpu.facts import DeviceFacts
from dicp.gpu.passes import barriers, executed, online_pairs
from dicp.gpu.precision import variants
from dicp.gpu.random_groups import words
from dicp.gpu.thresholds import (
    ACCESS_BYTES,
    ASSUMED_SIZE,
    COLUMN_BLOCK,
    FEW_ROW_POINTS,
    MANY_ROWS,
    MAX_GROUP,
    MAX_PERSISTENT,
    MAX_WAVE_POINTS,
    MIN_COLUMNS,
    MIN_CROSSING,
    POINTS_A_THREAD,
    ROW_BLOCK,
    ROW_POINTS,
    ROWS_PER_PROGRAM,
    WIDEST,
)
from dicp.gpu.tiles import (
    extent,
    looped_rows,
    numel,
    power_of_two,
    transposed_side,
    with_rows_of_part,
)
from dicp.loop.ir.access import Access, is_along, unconditional_reads
from dicp.loop.ir.index import Index, Var, quotient
from dicp.loop.ir.kernel import Form, Kernel, Phase, Reduce, Scan, Store
from dicp.loop.passes.one_hot import without_one_hot_sums
from dicp.loop.schedule.form import crossing_loop, exp_weights


@dataclass(frozen=True, eq=False)
class PointThreads(Form):
    """A pointwise kernel's block: its threads, accesses of each, and points of an access."""

    threads: int
    steps: int
    width: int

    @property
    def points(self) -> int:
        return self.threads * self.steps * self.width


@dataclass(frozen=True, eq=False)
class CrossingThreads(Form):
    """A pointwise kernel's block where some accesses are contiguous along an outer loop: a square
    tile of that loop and the last one, which those pass through shared memory, as far as it holds
    them."""

    threads: int
    side: int
    """Points of the tile along either loop."""
    crossing: Var
    reads: tuple[Access, ...]
    """The reads that are contiguous along `crossing`; `stores` has the stores."""
    stores: tuple[Access, ...]


@dataclass(frozen=True, eq=False)
class RowThreads(Form):
    """A reduction's block: `rows` rows, each shared by `group` threads."""

    group: int
    rows: int
    width: int
    """Points of an access."""
    steps: int | None
    """Accesses of a thread, if its points may stay in registers."""
    apart: bool = False
    """Whether the threads of a group are a block's rows apart: adjacent ones share columns."""
    barriers: frozenset[int] = frozenset()
    """The phases before which the threads of a block wait for each other."""
    exchanges: bool = False
    """Whether threads of a block exchange values or wait for each other."""

    masked: bool = True
    """Whether the last block may have rows past the end."""
    online: tuple[tuple[int, Reduce, Reduce], ...] = ()
    """Online softmax: the phase of a maximum, the maximum, and the next phase's sum."""

    @property
    def threads(self) -> int:
        return self.group * self.rows


@dataclass(frozen=True, eq=False)
class LoopedRowThreads(RowThreads):
    """Fused cross-row sums: each block loops over rows, `rows` at a time, and each thread adds up
    its points of them."""

    parts: tuple[Var, ...] = ()
    """The loops that the sums keep, with one block per point; none in a kernel with a partition."""
    looped: tuple[Var, ...] = ()
    """The loops in each block."""


def with_threads(kernel: Kernel, facts: DeviceFacts) -> Kernel:
    """The kernel with its threads, and without sums that need no loop."""
    kernel = without_one_hot_sums(kernel)
    found = {**exp_weights(kernel), **variants(kernel), **words(kernel)}
    return replace(kernel, form=_form_of(kernel, facts), variants=found)


def _form_of(kernel: Kernel, facts: DeviceFacts) -> Form:
    if kernel.reduction:
        return _cooperative_rows(kernel, facts)
    return _crossing_threads(kernel, facts) or point_threads(kernel, facts)


def _cooperative_rows(kernel: Kernel, facts: DeviceFacts) -> RowThreads:
    stmts = kernel.stmts()
    cross_row = bool(kernel.cross_row_stores())
    form = (_looped_rows if cross_row else _row_form)(kernel, facts)
    waits = barriers(kernel, [p.stmts for p in kernel.phases])
    scans = form.group > 1 and any(isinstance(s, Scan) for s in stmts)
    joins = scans or any(isinstance(s, Reduce) for s in stmts)
    exchanges = bool(waits) or joins or (cross_row and form.rows > 1)
    loops = form.looped if isinstance(form, LoopedRowThreads) else kernel.parallel
    uneven = cross_row and kernel.partition is not None
    count = numel(loops)
    masked = uneven or not isinstance(count, int) or count % form.rows != 0
    return replace(form, barriers=waits, exchanges=exchanges, masked=masked)


def point_threads(kernel: Kernel, facts: DeviceFacts) -> PointThreads:
    """Threads per block and points per thread: fewer of both until the chip's programs suffice."""
    count = extent(numel(kernel.parallel))
    scattered = kernel.kind == "scatter"
    width = 1 if scattered else access_width(kernel.parallel, _accesses(kernel.phases))
    points = POINTS_A_THREAD
    while points > width and count // (points * COLUMN_BLOCK) < facts.enough_programs:
        points //= 2
    threads = COLUMN_BLOCK
    while threads > facts.lanes and count // (points * threads) < facts.enough_programs:
        threads //= 2
    return PointThreads(threads, points // width, width)


def _crossing_threads(kernel: Kernel, facts: DeviceFacts) -> CrossingThreads | None:
    """The tile of a pointwise kernel that transposes; None for others."""
    if kernel.kind != "pointwise" or not kernel.parallel:
        return None
    crossing = crossing_loop(kernel, MIN_CROSSING, ASSUMED_SIZE)
    if crossing is None:
        return None
    last, stored = kernel.parallel[-1], kernel.written_buffers()
    reads = [
        access for access in unconditional_reads(kernel.stmts()) if access[0].root not in stored
    ]
    stores = [(s.ref, s.index) for s in kernel.stores()]
    crosses = [_crosses(index, crossing, last) for _, index in (*reads, *stores)]
    found = [access for access, yes in zip((*reads, *stores), crosses, strict=True) if yes]
    if not found:
        return None
    widest = max(ref.dtype.itemsize for ref, _ in found)
    side = transposed_side(widest, facts)
    fitting = found[: facts.prefetch_bytes // (side * side * widest)]
    return CrossingThreads(
        COLUMN_BLOCK, side, crossing, tuple(a for a in fitting if a in reads),
        tuple(a for a in fitting if a not in reads),
    )  # fmt: skip


def _crosses(index: Index, crossing: Var, last: Var) -> bool:
    """Whether points adjacent along `crossing` are adjacent in memory, and along `last` are not."""
    along = index.is_affine and is_along(index, crossing)
    return along and last in index.variables() and not is_along(index, last)


def _row_form(kernel: Kernel, facts: DeviceFacts) -> RowThreads:
    """The block of a reduction; one whose rows are partitioned has the rows of one part."""
    outer = kernel.partition is not None or kernel.kind == "outer_reduction"
    return (column_threads if outer else row_threads)(with_rows_of_part(kernel), facts)


def _looped_rows(kernel: Kernel, facts: DeviceFacts) -> LoopedRowThreads:
    """The block of an inner reduction with cross-row sums: enough threads for a row's accumulators,
    and as many rows at a time as fill a block, if there are so many."""
    parts, rows, count = looped_rows(kernel)
    phases = [p for p in kernel.phases if p.level == "reduction"]
    width = access_width(kernel.reduction, _accesses(phases))
    inner, most, points = extent(numel(kernel.reduction)), power_of_two(extent(count)), ROW_POINTS
    while True:
        group = min(power_of_two(-(-inner // points)), MAX_GROUP)
        at_once = max(1, min(COLUMN_BLOCK // group, most))
        if points <= width or group * at_once >= COLUMN_BLOCK:
            break
        points //= 2
    at_once = max(at_once, facts.lanes // group)
    steps = -(-inner // (group * width))
    return LoopedRowThreads(group, at_once, width, steps, parts=parts, looped=rows)


def row_threads(kernel: Kernel, facts: DeviceFacts) -> RowThreads:
    """The block of an inner reduction."""
    rows, inner = extent(numel(kernel.parallel)), numel(kernel.reduction)
    scans = any(isinstance(s, Scan) for s in kernel.stmts())
    phases = [p for p in kernel.phases if p.level == "reduction"]
    width = 1 if scans else access_width(kernel.reduction, _accesses(phases))
    many = rows >= ROWS_PER_PROGRAM * facts.enough_programs
    points = ROW_POINTS if many else max(width, FEW_ROW_POINTS)
    group = min(power_of_two(-(-extent(inner) // points)), MAX_GROUP)
    if facts.lanes < group <= facts.lanes * ROW_POINTS and rows >= MANY_ROWS:
        if extent(inner) <= facts.lanes * MAX_WAVE_POINTS:
            group = facts.lanes
    in_registers = isinstance(inner, int) and inner <= min(group * MAX_WAVE_POINTS, MAX_PERSISTENT)
    steps = -(-extent(inner) // (group * width)) if in_registers and not scans else None
    block = ROW_BLOCK if rows * group >= facts.enough_programs * ROW_BLOCK else facts.lanes
    online = () if in_registers or scans else online_pairs([*map(executed, kernel.phases)])
    return RowThreads(group, max(1, block // group), width, steps, online=online)


def column_threads(kernel: Kernel, facts: DeviceFacts) -> RowThreads:
    """The block of an outer reduction: `rows` adjacent columns, each shared by `group` threads."""
    columns, inner = extent(numel(kernel.parallel)), extent(numel(kernel.reduction))
    if any(isinstance(s, Scan) for s in kernel.stmts()):
        return RowThreads(1, facts.lanes, 1, None, apart=True)
    wide = min(facts.lanes, max(MIN_COLUMNS, power_of_two(columns)))
    while wide > MIN_COLUMNS and columns // wide < facts.enough_programs:
        wide //= 2
    group = min(COLUMN_BLOCK // wide, power_of_two(inner))
    return RowThreads(max(group, facts.lanes // wide), wide, 1, None, apart=True)


def access_width(loops: Sequence[Var], accesses: Iterable[Access]) -> int:
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


def _steps(index: Index, last: Var, width: int) -> bool:
    """Whether `index` is a multiple of `width` wherever `last` is."""
    rest = (c for atom, c in index.terms if atom != last)
    return all(quotient(c, width) is not None for c in (index.const, *rest))


def _accesses(phases: Iterable[Phase]) -> list[Access]:
    stmts = [s for p in phases for s in p.stmts]
    stores = [(s.ref, s.index) for s in stmts if isinstance(s, Store) and not s.op]
    return stores + unconditional_reads(stmts)
