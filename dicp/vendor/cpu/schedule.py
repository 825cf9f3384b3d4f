"""Chooses the form of each kernel on the host, by the thresholds of this room."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import sympy
import torch

from dicp.codegen.emitter import LINE_BYTES
from dicp.codegen.types import VALUE_TYPE
from dicp.loop.ir import expr as ir
from dicp.loop.ir.access import deep_variables, unconditional_reads
from dicp.loop.ir.expr import Read, Ref
from dicp.loop.ir.index import Index, Indirect, Size, Var, is_below, product
from dicp.loop.ir.kernel import Kernel, Let, Phase, Reduce, Scan, ScratchStore, Stmt, Store
from dicp.loop.passes.moments import squared_distances
from dicp.loop.passes.split_loops import Range, split
from dicp.loop.schedule.form import cost_of_point, crossing_loop, exp_weights, online_softmax
from dicp.vendor.cpu import form
from dicp.vendor.cpu.form import HostForm, Online, Pass, PlaneStep, Prefetch, Strip, Team
from dicp.vendor.cpu.thresholds import (
    BEYOND_NEAR,
    COLUMN_TILE,
    COPY_TILE,
    FEW_ROWS,
    FEW_TILES,
    HALF_VECTOR,
    MAX_HALF_ROW,
    MIN_PASS,
    MIN_PLACES,
    MIN_PLANE,
    MIN_PLANES,
    MIN_REDUCTION_BYTES,
    MIN_SCAN,
    MIN_SHARE,
    MIN_WIDTH,
    NON_TEMPORAL_WIDTH,
    PARALLEL_COST,
    PREFETCH_BYTES,
    ROW_BLOCK,
    SPLIT_COST,
    SQUARE,
    SUM_BLOCK,
    TILE,
    UNROLL_AND_JAM,
    WEIGHT_BLOCK,
)


def with_form(kernel: Kernel, non_temporal_bytes: float = math.inf) -> Kernel:
    """The kernel with its form; results of `non_temporal_bytes` and more are not kept in caches."""
    choosers: dict[str, type[_Chooser]] = {
        "pointwise": _Pointwise, "inner_reduction": _Inner, "outer_reduction": _Outer,
        "scatter": _Scatter,
    }  # fmt: skip
    chosen = choosers[kernel.kind](kernel, non_temporal_bytes).choose()
    return replace(kernel, form=chosen, variants=exp_weights(kernel))


class _Chooser:
    """What the choosers of all kinds of kernels ask."""

    def __init__(self, kernel: Kernel, non_temporal_bytes: float) -> None:
        self.kernel = kernel
        self.non_temporal_bytes = non_temporal_bytes
        """Bytes from which no part of a result is still in a cache when it is read."""
        self.stored = {s.ref.root for s in kernel.stores()}

    def choose(self) -> HostForm:
        raise NotImplementedError

    def team(self, loops: Sequence[Var], collapse: int = 0) -> Team | None:
        """The team for `loops`; None if they are too little work for more than one thread."""
        work = product([*(v.size for v in loops), cost_of_point(self.kernel)])
        if isinstance(work, int):
            return Team(collapse) if work >= PARALLEL_COST else None
        return Team(collapse, work)

    def half_vectors(self, var: Var) -> bool:
        """Whether half a vector of 16-bit floats at a time shortens a short row's remainder, which
        is computed element by element."""
        size = var.size
        if (
            not isinstance(size, int)
            or size >= MAX_HALF_ROW
            or size % (2 * HALF_VECTOR) < HALF_VECTOR
        ):
            return False
        return any(item.ref.dtype in ir.LOW_PRECISION for item in self.kernel.reads())

    def in_blocks(self, stmt: Stmt, block: int) -> bool:
        """Whether a floating sum is long and goes in blocks: its error grows with these only."""
        count = product(v.size for v in self.kernel.reduction)
        long = not isinstance(count, int) or count > 2 * block
        sums = isinstance(stmt, (Reduce, Scan)) and stmt.op == "sum"
        return long and sums and stmt.dtype.is_floating_point  # type: ignore[union-attr]

    # ---- cache lines ----------------------------------------------------------------------------

    def strips(self, stmts: Sequence[Stmt], var: Var, prefetch: Sequence[Read]) -> list[Strip]:
        """The loop over `var` in ranges that need not test conditions on it at each point."""
        return [self._strip(part, var, prefetch) for part in split(stmts, var)]

    def _strip(self, part: Range, var: Var, prefetch: Sequence[Read]) -> Strip:
        """The range, strip-mined if it has non-temporal stores or prefetches the next row, and is
        not short and in whole lines."""
        non_temporal = self._non_temporal_stores(part, var)
        lanes = line([*(s.ref for s in non_temporal), *(item.ref for item in prefetch)])
        least = MIN_PASS if any(isinstance(s, Reduce) for s in part.stmts) else lanes
        if not non_temporal and not prefetch or not _in_whole_lines(part, lanes, least):
            return Strip(part)
        next_row = tuple((item, self.kernel.parallel[-1], 1) for item in prefetch)
        return Strip(part, lanes, tuple(non_temporal), next_row)

    def _non_temporal_stores(self, part: Range, var: Var) -> list[Store]:
        """The stores of a loop that become non-temporal stores of whole cache lines."""
        least = 1 if self.kernel.kind == "pointwise" else MIN_REDUCTION_BYTES
        stores = [s for s in part.stmts if isinstance(s, Store) and self.is_non_temporal(s, var)]
        return [s for s in stores if s.ref.dtype.itemsize >= least]

    def is_non_temporal(self, stmt: Store, var: Var) -> bool:
        index = stmt.index
        size = product([*(v.size for v in index.variables()), stmt.ref.dtype.itemsize])
        if stmt.op or not isinstance(size, int) or size < self.non_temporal_bytes:
            return False
        reads = {item.ref.root for item in self.kernel.reads()}
        if stmt.ref.root in reads or index.coefficient(var) != 1:
            return False
        others = [(a, c) for a, c in index.terms if a != var]
        steps = [index.const, *(c for _, c in others)]
        hidden = any(var in deep_variables(a) for a, _ in others)
        whole = line([stmt.ref])
        return not hidden and all(isinstance(c, int) and c % whole == 0 for c in steps)


def line(refs: Sequence[Ref]) -> int:
    """Elements that fill whole cache lines of each of these tensors."""
    return LINE_BYTES // min((ref.dtype.itemsize for ref in refs), default=LINE_BYTES)


def _in_whole_lines(part: Range, count: int, least: int) -> bool:
    low, high = part.low, part.high
    if not isinstance(low, int) or not isinstance(high, int) or high - low < least:
        return False
    return low % count == high % count == 0


def _unrolled(var: Var) -> bool:
    """Whether a loop's size is a known multiple of `UNROLL_AND_JAM`."""
    return isinstance(var.size, int) and var.size % UNROLL_AND_JAM == 0


# ---- kernels without a reduction ---------------------------------------------------------------


class _Pointwise(_Chooser):
    def choose(self) -> HostForm:
        rows, stmts = self.kernel.parallel, self.kernel.stmts()
        if not rows:
            return form.Points()
        crossing = crossing_loop(self.kernel)
        if crossing is not None:
            return self._transposed(crossing)
        strips, several = tuple(self.strips(stmts, rows[-1], ())), len(rows) > 1
        team = self.team(rows, len(rows) - 1)
        return form.Points(team, strips, several and self.half_vectors(rows[-1]))

    def _transposed(self, crossing: Var) -> form.Transposed:
        """Two loops in tiles, so that both directions use whole cache lines."""
        rows, last = self.kernel.parallel, self.kernel.parallel[-1]
        team = self.team(rows, len(rows))
        stores = self.kernel.stores()
        if self._is_transposed_copy(crossing, last):
            (store,) = stores
            # Squares of shorter elements do not fill cache lines.
            streams = store.ref.dtype.itemsize in (4, 8) and self.is_non_temporal(store, last)
            extents = (NON_TEMPORAL_WIDTH, line([store.ref])) if streams else COPY_TILE
            return form.Transposed(
                team, crossing=crossing, extents=extents, copy=True, streams=streams
            )
        small = any(isinstance(v.size, int) and v.size < SQUARE for v in (crossing, last))
        reads = [] if small else unconditional_reads(self.kernel.stmts())  # else no full squares
        staged = tuple(r for r in reads if _is_transposed(r[1], crossing, last))
        return form.Transposed(team, crossing=crossing, extents=(TILE, TILE), staged=staged)

    def _is_transposed_copy(self, crossing: Var, last: Var) -> bool:
        stmts = self.kernel.stmts()
        if len(stmts) != 1 or not isinstance(stmts[0], Store) or not stmts[0].is_copy:
            return False
        store, source = stmts[0], stmts[0].value
        assert isinstance(source, Read)
        read = _is_transposed(source.index, crossing, last)
        return read and _is_transposed(store.index, last, crossing)


def _is_transposed(index: Index, along: Var, over: Var) -> bool:
    """Whether a tensor is contiguous along `along` and strided along `over`."""
    hidden = {v for a, _ in index.terms if a not in (along, over) for v in deep_variables(a)}
    strided = index.coefficient(along) == 1 and index.coefficient(over) not in (0, 1)
    return strided and not {along, over} & hidden


class _Scatter(_Chooser):
    def choose(self) -> HostForm:
        rows = self.kernel.parallel
        if not rows:
            return form.Points()
        destination = self._destination()
        if destination is not None:
            return form.ByDestination(store=destination[0], place=destination[1])
        last, stores = rows[-1], self.kernel.stores()
        owned = last.size != 1 and all(_owns(s.index, last) for s in stores)
        apart = not owned and len(rows) > 1 and all(_keeps_apart(s.index, rows[0]) for s in stores)
        return form.Scattered(self.team(rows) if owned or apart else None, owned)

    def _destination(self) -> tuple[Store, Indirect] | None:
        """The store and its index, if the kernel only sums whole rows into indexed rows."""
        rows, stmts = self.kernel.parallel, self.kernel.stmts()
        store = stmts[0]
        if len(rows) != 2 or len(stmts) != 1 or not isinstance(store, Store) or store.op != "sum":
            return None
        found = self._indexed_row(store, rows[-1])
        if found is None or not _enough_places(found, *rows):
            return None
        return store, found

    def _indexed_row(self, store: Store, last: Var) -> Indirect | None:
        """The index of the row that `store` adds to; None where it does not add whole rows."""
        dtype = store.ref.dtype
        if dtype in ir.LOW_PRECISION or dtype == torch.bool or not isinstance(last.size, int):
            return None
        reads = {e.ref.root for e in ir.walk(store.value) if isinstance(e, Read)}
        others = [(a, c) for a, c in store.index.terms if a != last]
        if store.ref.root in reads or len(others) != 1 or not _owns(store.index, last):
            return None
        ((found, step),) = others
        whole = isinstance(step, int) and step >= last.size
        return found if isinstance(found, Indirect) and whole else None


def _enough_places(place: Indirect, row: Var, last: Var) -> bool:
    """Whether sorting the rows by destination costs less than the collisions."""
    assert isinstance(last.size, int)
    if last.size < MIN_WIDTH or (isinstance(place.size, int) and place.size < MIN_PLACES):
        return False
    if not isinstance(row.size, int):
        return True
    few = isinstance(place.size, int) and row.size * MIN_SHARE < place.size
    return row.size * last.size >= PARALLEL_COST and not few


def _keeps_apart(index: Index, var: Var) -> bool:
    """Whether distinct values of `var` store to distinct blocks of memory, for any index values."""
    step = index.coefficient(var)
    rest = Index(index.const, tuple(t for t in index.terms if t[0] != var))
    return is_below(rest, step)


def _owns(index: Index, var: Var) -> bool:
    """Whether distinct values of `var` always store to distinct places of the last axis."""
    hidden = any(
        var in deep_variables(atom) for atom, _ in index.terms if not isinstance(atom, Var)
    )
    return index.coefficient(var) == 1 and not hidden


# ---- inner reductions --------------------------------------------------------------------------


class _Inner(_Chooser):
    def choose(self) -> HostForm:
        kernel = self.kernel
        loops = (*kernel.parallel, *kernel.reduction)
        if self._splittable():
            inner, *tail = kernel.phases
            return form.Split(first=self.pass_over(inner, limited=True), tail=tuple(tail))
        if self._in_planes():
            return self._planes()
        team = self.team(loops, len(kernel.parallel))
        scan = any(isinstance(s, Scan) for s in kernel.stmts())
        if scan and self._only_prefix_sums():
            return form.PrefixSums(team)
        if scan and self._can_jam():
            return form.JammedScans(team)
        sums = tuple(kernel.cross_row_stores())
        return form.Rows(self.team(loops) if sums else team, tuple(self._passes(scan)), sums)

    def _passes(self, scan: bool) -> list[Phase | Pass | Online]:
        phases = list(self.kernel.phases)
        prefetch = {} if scan else self._prefetched(self._between())
        found: list[Phase | Pass | Online] = []
        while phases:
            phase = phases.pop(0)
            online = None if prefetch or not phases else self._online(phase, phases[0])
            if phase.level == "parallel":
                found.append(phase)
            elif online is not None:
                phases.pop(0)
                found.append(Online(self.pass_over(phase, limited=True), online[1]))
            else:
                found.append(self.pass_over(phase, scan, prefetch=prefetch.get(phase, ())))
        return found

    def pass_over(
        self, phase: Phase, serial: bool = False, limited: bool = False,
        prefetch: Sequence[Read] = (), loops: Sequence[Var] | None = None,
    ) -> Pass:  # fmt: skip
        """The pass of a phase; `limited`: over a part of the range of its first loop."""
        loops = tuple(self.kernel.reduction if loops is None else loops)
        own = set(phase.stmts)
        extrema: dict[Reduce, Reduce] = {}
        if loops and not serial:
            phase, extrema = _with_extrema(phase)
        added = frozenset(s for s in phase.stmts if s not in own)
        sums = (s for s in phase.stmts if isinstance(s, (Reduce, Scan)))
        blocks = tuple(s for s in sums if not serial and self.in_blocks(s, SUM_BLOCK))
        found = Pass(phase, loops, serial, blocks, extrema, added)
        if not loops:
            return found
        if _in_groups(phase, loops, blocks):
            return replace(found, grouped=self._group(phase, loops))
        strips: list[Strip] = []
        if not blocks and not extrema and not (limited and len(loops) == 1):
            if serial:
                strips = [Strip(part) for part in split(phase.stmts, loops[-1])]
            else:
                strips = self.strips(phase.stmts, loops[-1], prefetch)
        half = not serial and self.half_vectors(loops[-1])
        return replace(found, strips=tuple(strips), half_vectors=half)

    def _group(self, phase: Phase, loops: tuple[Var, ...]) -> Strip:
        """The innermost loop of a group; prefetches the loads of the next group."""
        outer, last = loops
        assert isinstance(last.size, int)
        reads = distinct(ir.reads(s.value for s in phase.stmts))
        streams = [item for item in reads if self._is_stream(item)]
        lanes = line([item.ref for item in streams]) if streams else LINE_BYTES // 4
        ahead: tuple[Prefetch, ...] = tuple(
            (item, outer, SUM_BLOCK // last.size) for item in streams
        )
        return Strip(Range(0, last.size, tuple(phase.stmts)), lanes, (), ahead)

    def _between(self) -> list[Phase]:
        """The passes during which memory would be idle: those after the first, which loads the row,
        and before the last, which stores one; of two passes, the last. Passes with long sums, which
        go in blocks, are left out."""
        passes = [p for p in self.kernel.phases if p.level == "reduction"]
        found = passes[1:-1] or passes[1:]
        return [
            p for p in found
            if not any(isinstance(s, Reduce) and self.in_blocks(s, SUM_BLOCK) for s in p.stmts)
        ]  # fmt: skip

    def _online(self, phase: Phase, sums: Phase) -> tuple[Reduce, Reduce] | None:
        """The maximum and the sum of an online softmax in blocks, if the row is long enough."""
        found = online_softmax(phase.stmts, sums.stmts)
        inner = self.kernel.reduction
        if found is None or len(inner) != 1 or phase.level != "reduction":
            return None
        long = not isinstance(inner[0].size, int) or inner[0].size >= 2 * WEIGHT_BLOCK
        return found if long and VALUE_TYPE[found[0].dtype] == "float" else None

    # ---- few rows -------------------------------------------------------------------------------

    def _splittable(self) -> bool:
        """Whether threads divide the reduction loop: there are few rows and one pass over each."""
        kernel = self.kernel
        kept = any(isinstance(s, (Scan, ScratchStore)) for s in kernel.stmts())
        if kept or kernel.cross_row_stores():
            return False
        passes = [p for p in kernel.phases if p.level == "reduction"]
        if len(passes) != 1 or kernel.phases[0].level != "reduction":
            return False
        return self._few_rows() and bool(kernel.reduction)

    def _few_rows(self) -> bool:
        count = product(v.size for v in self.kernel.parallel)
        work = product(v.size for v in self.kernel.reduction)
        few = isinstance(count, int) and count < FEW_ROWS
        return few and (not isinstance(work, int) or work >= PARALLEL_COST)

    # ---- prefetch of the next row ---------------------------------------------------------------

    def _prefetched(self, passes: Sequence[Phase]) -> dict[Phase, list[Read]]:
        """Divides the loads of the next row among these passes."""
        found: dict[Phase, list[Read]] = {}
        for k, item in enumerate(self._streams() if passes else []):
            found.setdefault(passes[k % len(passes)], []).append(item)
        return found

    def _streams(self) -> list[Read]:
        """Loads of elements that only one row reads, from beyond the private caches; none where a
        row is too long to stay in the L1 cache until it is computed."""
        rows, inner = self.kernel.parallel, self.kernel.reduction
        if not rows or not inner:
            return []
        streams = [item for item in distinct(self.kernel.reads()) if self._is_stream(item)]
        sizes = [v.size for v in inner]
        moved = product([*sizes, sum(item.ref.dtype.itemsize for item in streams)])
        return streams if isinstance(moved, int) and moved <= PREFETCH_BYTES else []

    def _is_stream(self, item: Read) -> bool:
        index, loops = item.index, (*self.kernel.parallel, *self.kernel.reduction)
        if item.ref.root in self.stored or not all(isinstance(a, Var) for a, _ in index.terms):
            return False
        size = product([*(v.size for v in index.variables()), item.ref.dtype.itemsize])
        steps = [index.coefficient(v) for v in loops]
        whole = all(isinstance(c, int) and c for c in steps) and steps[-1] == 1
        return whole and isinstance(size, int) and size >= BEYOND_NEAR

    # ---- planes ---------------------------------------------------------------------------------

    def _in_planes(self) -> bool:
        """Whether rows lie in several planes, such as the channels of a batch of images, that all
        fit in the last-level cache: row by row, memory would be read in segments far apart."""
        kernel = self.kernel
        sizes = [v.size for v in (*kernel.parallel, *kernel.reduction) if isinstance(v.size, int)]
        if len(kernel.parallel) != 1 or len(kernel.reduction) != 2 or len(sizes) != 3:
            return False
        if product(sizes) < MIN_PLANES or sizes[1] < 2 or sizes[2] < MIN_PLANE:
            return False
        passes = [p for p in kernel.phases if p.level == "reduction"]
        if len(passes) < 2 or not all(map(_is_plain, kernel.stmts())):
            return False
        inner = kernel.reduction[1]
        reads = {(i.ref, i.index) for i in kernel.reads() if inner in i.index.variables()}
        if product([*sizes, sum(r.dtype.itemsize for r, _ in reads)]) >= self.non_temporal_bytes:
            return False
        stores = [s.index for s in kernel.stores() if inner in s.index.variables()]
        return all(self._lies_in_planes(index) for index in (*(i for _, i in reads), *stores))

    def _lies_in_planes(self, index: Index) -> bool:
        steps = [index.coefficient(v) for v in (self.kernel.reduction[0], *self.kernel.parallel)]
        image, row = (s if isinstance(s, int) else 0 for s in steps)
        return image > row >= MIN_PLANE and index.coefficient(self.kernel.reduction[1]) == 1

    def _planes(self) -> form.Planes:
        squares = squared_distances(self.kernel)
        taken = dict(squares)
        steps: list[Phase | form.MeanStep | PlaneStep] = []
        for phase in self.kernel.phases:
            if phase.level == "parallel":
                steps.append(phase)
                continue
            own = [s for s in phase.stmts if isinstance(s, Reduce) and s in taken]
            rest = tuple(s for s in phase.stmts if s not in own)
            steps += [form.MeanStep(s, taken[s]) for s in own]
            if rest:
                steps.append(self._plane_step(replace(phase, stmts=rest), squares))
        return form.Planes(steps=tuple(steps))

    def _plane_step(self, phase: Phase, squares: Sequence[tuple[Reduce, Reduce]]) -> PlaneStep:
        inner = self.kernel.reduction[1:]
        mine = []
        for square, stmt in squares:
            if stmt in phase.stmts:
                middle = ir.result(form.middle_of(square), stmt.dtype)
                away = ir.apply("sub", stmt.dtype, stmt.value, middle)
                squared = replace(square, value=ir.apply("mul", stmt.dtype, away, away))
                own = self.pass_over(Phase("reduction", (squared,)), loops=inner)
                mine.append((square, stmt, own))
        return PlaneStep(self.pass_over(phase, loops=inner), tuple(mine))

    # ---- scans ----------------------------------------------------------------------------------

    def _only_prefix_sums(self) -> bool:
        """Whether each scan is a prefix sum whose values do not depend on another scan."""
        stmts, inner = self.kernel.stmts(), self.kernel.reduction
        running = [s for s in stmts if isinstance(s, Scan)]
        return (
            len(self.kernel.phases) == len(inner) == 1
            and len(running) + len(self.kernel.stores()) == len(stmts)
            and all(s.op == "sum" and VALUE_TYPE[s.dtype] != "bool" for s in running)
            and not any(e.op == "reduction_result" for s in running for e in ir.walk(s.value))
            and (not isinstance(inner[0].size, int) or inner[0].size >= MIN_SCAN)
        )

    def _can_jam(self) -> bool:
        rows = self.kernel.parallel
        return (
            bool(rows)
            and _unrolled(rows[-1])
            and rows[-1].size not in (0, UNROLL_AND_JAM)
            and len(self.kernel.phases) == 1
            and len(self.kernel.reduction) == 1
            and all(isinstance(s, (Scan, Store)) for s in self.kernel.stmts())
        )


def distinct(reads: Sequence[Read]) -> list[Read]:
    """One load for each element: rebuilt expressions repeat loads."""
    return list({(item.ref, item.index): item for item in reads}.values())


def _is_plain(stmt: Stmt) -> bool:
    if isinstance(stmt, Reduce):
        return stmt.op == "sum" and VALUE_TYPE[stmt.dtype] == "float"
    return isinstance(stmt, Let) or (isinstance(stmt, Store) and not stmt.op)


def _in_groups(phase: Phase, loops: Sequence[Var], blocks: Sequence[Stmt]) -> bool:
    """Whether long sums have a short innermost loop, such as the planes of many images."""
    size = loops[-1].size
    whole = len(loops) == 2 and len(phase.stmts) == len(blocks)
    return whole and isinstance(size, int) and 2 * size <= SUM_BLOCK and size % LINE_BYTES == 0


def _with_extrema(phase: Phase) -> tuple[Phase, dict[Reduce, Reduce]]:
    """The phase with a max or min beside each argmax or argmin, and the map from one to the other.

    A max or min that the phase already computes is reused.
    """
    found = {(s.op, s.dtype, s.value): s for s in phase.stmts if isinstance(s, Reduce)}
    extrema: dict[Reduce, Reduce] = {}
    for stmt in phase.stmts:
        if isinstance(stmt, Reduce) and stmt.finds_position:
            own = replace(stmt, name=f"best_{stmt.name}", op=stmt.op[3:], position=None)
            extrema[stmt] = found.setdefault((own.op, own.dtype, own.value), own)
    stmts = dict.fromkeys((*extrema.values(), *phase.stmts))
    return replace(phase, stmts=tuple(stmts)) if extrema else phase, extrema


# ---- outer reductions --------------------------------------------------------------------------


class _Outer(_Chooser):
    def choose(self) -> form.Columns:
        kernel = self.kernel
        outer, column = kernel.parallel[:-1], kernel.parallel[-1]
        tiles: Size = sympy.oo
        if isinstance(column.size, int):
            tiles = product([*(v.size for v in outer), -(-column.size // COLUMN_TILE)])
        split_rows = self._splits_rows(tiles)
        loops = (*kernel.parallel, *kernel.reduction)
        team = None if split_rows else self.team(loops, len(outer) + 1)
        blocks = frozenset(
            s for s in kernel.stmts()
            if isinstance(s, (Reduce, Scan)) and self.in_blocks(s, ROW_BLOCK)
        )  # fmt: skip
        inner = kernel.reduction
        return form.Columns(team, split_rows, blocks, bool(inner) and _unrolled(inner[-1]))

    def _splits_rows(self, tiles: Size) -> bool:
        """Whether threads divide the rows: there are few tiles of columns for them."""
        kernel = self.kernel
        ordered = any(
            isinstance(s, Scan) or (isinstance(s, Reduce) and s.finds_position)
            for s in kernel.stmts()
        )
        if ordered or not isinstance(tiles, int) or tiles >= FEW_TILES:
            return False
        work = product(v.size for v in (*kernel.parallel, *kernel.reduction))
        enough = PARALLEL_COST if tiles == 1 else SPLIT_COST
        much = not isinstance(work, int) or work >= enough
        return much and product(v.size for v in kernel.reduction) != 1
