"""The form of inner reductions: rows by teams, few rows split, planes, scans.

In: an inner reduction. Out: `Rows` with its passes, `Split`, `Planes`, `PrefixSums` or
`JammedScans`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal

import torch

from dicp.codegen.types import VALUE_TYPE
from dicp.loop.ir import expr as ir
from dicp.loop.ir.access import is_along
from dicp.loop.ir.expr import Read
from dicp.loop.ir.index import Index, Size, Var, product
from dicp.loop.ir.kernel import Let, Phase, Reduce, Scan, ScratchStore, Stmt, Store
from dicp.loop.passes.inline import cost_of
from dicp.loop.passes.moments import Deviations, deviations
from dicp.loop.passes.split_loops import Range, split
from dicp.loop.schedule.form import memory_indices, online_softmax
from dicp.vendor.cpu import form
from dicp.vendor.cpu.form import LINE_BYTES, HostForm, Online, Pass, PlaneStep, RowStep, Strip
from dicp.vendor.cpu.schedule.chooser import Chooser, is_floating_sum
from dicp.vendor.cpu.schedule.short_rows import short_rows
from dicp.vendor.cpu.schedule.vectors import is_vectorized
from dicp.vendor.cpu.thresholds import (
    BEYOND_PRIVATE_CACHES,
    COLUMN_TILE,
    FEW_ROWS,
    MIN_IN_PLANES,
    MIN_PLANE,
    MIN_SCAN,
    MIN_SHIFTED,
    ONLINE_BLOCK,
    PARALLEL_COST,
    POSITION_BLOCK,
    PREFETCH_AHEAD,
    PREFETCH_BYTES,
    SCAN_BLOCK,
    SHIFT_SAMPLE,
    SHORT_PREFETCHED_ROW,
    SHORT_ROW,
    SUM_ADDITIONS,
    SUM_BLOCK,
    SUM_LANES,
    UNROLL_AND_JAM,
)

IN_LANES = frozenset({"sum", "prod", "max", "min"})
"""Reductions for which a pass that computes nothing else has lane accumulators."""


class Inner(Chooser):
    """Chooses the form of kernels whose reductions run along memory."""

    def choose(self) -> HostForm:
        kernel = self.kernel
        loops = (*kernel.parallel, *kernel.reduction)
        if self._splittable():
            inner, *tail = kernel.phases
            return form.Split(first=self._pass(inner, part="chunk"), tail=tuple(tail))
        if self._in_planes():
            return self._planes()
        team = self.team(loops, len(kernel.parallel))
        if self.scans and self._is_outer_scan():
            return form.Columns(team, tile=COLUMN_TILE)
        if self.scans and self._only_prefix_sums():
            return form.PrefixSums(team, block=SCAN_BLOCK)
        if self.scans and self._can_jam():
            return form.JammedScans(team, jam=UNROLL_AND_JAM)
        short = short_rows(kernel, team)
        if short is not None:
            return short
        sums = tuple(kernel.cross_row_stores())
        return form.Rows(self.team(loops) if sums else team, tuple(self._passes()), sums)

    @cached_property
    def scans(self) -> list[Scan]:
        """The kernel's scans, each element of which depends on those before: no reduction shares a
        kernel with them."""
        return [s for s in self.kernel.stmts() if isinstance(s, Scan)]

    def _passes(self) -> list[RowStep]:
        phases = list(self.kernel.phases)
        prefetch = {} if self.scans else self._prefetched(self._memory_idle_phases())
        shifted = self._shifted_phases(prefetch)
        found: list[RowStep] = []
        while phases:
            phase = phases.pop(0)
            total = None if prefetch or not phases else self._online_total(phase, phases[0])
            if phase in shifted:
                found += shifted[phase]
            elif phase.level == "parallel":
                found.append(phase)
            elif total is not None:
                phases.pop(0)
                found.append(Online(self._pass(phase, part="block"), total, ONLINE_BLOCK))
            else:
                found.append(self._pass(phase, prefetch.get(phase, ())))
        return found

    def _pass(
        self, phase: Phase, prefetch: Sequence[Read] = (), loops: Sequence[Var] | None = None,
        part: Literal["chunk", "block"] | None = None,
    ) -> Pass:  # fmt: skip
        """The pass of a phase over the range of its first loop, or over a `part` of it: the chunk
        of a thread, or a block of online softmax, which is short."""
        loops = tuple(self.kernel.reduction if loops is None else loops)
        serial, own = bool(self.scans), set(phase.stmts)
        extrema: dict[Reduce, Reduce] = {}
        if loops and not serial:
            phase, extrema = _with_extrema(phase)
        added = frozenset(s for s in phase.stmts if s not in own)
        block = 0 if serial else self._block(phase, bool(prefetch))
        blocks = tuple(s for s in phase.stmts if block and is_floating_sum(s))
        if extrema:
            block = POSITION_BLOCK
        found = Pass(phase, loops, serial, blocks, block, extrema=extrema, added=added)
        if not loops:
            return found
        limited = part is not None and len(loops) == 1
        in_lanes = blocks or (part != "block" and not serial and self._only_reduces(phase))
        if in_lanes and not extrema and is_vectorized(phase.stmts, loops[-1]):
            return self._strip_mined(found, prefetch, limited)
        strips: list[Strip] = []
        if not blocks and not extrema and not limited:
            if serial:
                strips = [Strip(part) for part in split(phase.stmts, loops[-1])]
            else:
                strips = self.strips(phase.stmts, loops[-1], prefetch)
        half = not serial and self.half_vectors(loops[-1])
        return replace(found, strips=tuple(strips), half_vectors=half)

    def _block(self, phase: Phase, prefetches: bool) -> int:
        """Elements of a row per block of the phase's floating sums; 0 where the row is short."""
        loops = self.kernel.reduction
        if loops and is_vectorized(phase.stmts, loops[-1]):
            short = SHORT_PREFETCHED_ROW if prefetches else SHORT_ROW
            return SUM_BLOCK if self.is_long(short) else 0
        return SUM_ADDITIONS if self.is_long(SUM_ADDITIONS) else 0

    def _only_reduces(self, phase: Phase) -> bool:
        """Whether a pass has nothing but reductions that more lanes than those of one vector, which
        g++ takes, compute faster: each operation waits for the one before in its lane."""
        types = {item.ref.dtype for item in self.kernel.reads()} - {torch.float16}
        short = any(dtype.itemsize < 4 for dtype in types)
        reduces = all(isinstance(s, Reduce) and s.op in IN_LANES for s in phase.stmts)
        return reduces and not short and self.is_long(SHORT_ROW)

    def _strip_mined(self, over: Pass, prefetch: Sequence[Read], limited: bool) -> Pass:
        """The last loop strip-mined, if it is not short or goes in groups, which prefetch the loads
        of the next one. A loop `limited` to a part of a long row prefetches its own loads."""
        loops, stmts = over.loops, over.phase.stmts
        size, prefetched = loops[-1].size, (self.kernel.parallel[-1:], 1)
        lanes = _lanes(size)
        block, grouped = _even_block(size, lanes), False
        if isinstance(size, int) and _is_group(loops):
            reads = distinct(ir.reads(s.value for s in stmts))
            whole = all(map(is_floating_sum, stmts))
            prefetch = [item for item in reads if whole and self._is_stream(item)]
            block, grouped = SUM_BLOCK // size, True
            prefetched = loops[:1], block
        elif limited and not over.blocks:
            prefetch = [r for r in distinct(ir.reads(s.value for s in stmts)) if self._is_stream(r)]
            prefetched = loops[:1], PREFETCH_AHEAD
        elif isinstance(size, int) and size <= SHORT_ROW:
            return over
        (loop,), steps = prefetched if prefetch else (loops[:1], 0)
        prefetches = tuple((item, loop, steps) for item in prefetch)
        strip = Strip(Range(0, size, stmts), lanes, (), prefetches)
        # Of more elements, SUM_LANES lanes have a larger error than eager.
        most = block if lanes > SUM_LANES else min(block, SUM_BLOCK // 2)
        alone = len(loops) == 1 and isinstance(size, int) and size // lanes * lanes <= most
        return replace(over, strip=strip, block=block, grouped=grouped, one_block=alone)

    def _memory_idle_phases(self) -> list[Phase]:
        """The phases whose passes would leave memory idle: those after the first, which loads the
        row, and before the last, which stores one; of two passes, the last. Passes with long sums,
        which go in blocks, are left out."""
        passes = [p for p in self.kernel.phases if p.level == "reduction"]
        found = passes[1:-1] or passes[1:]
        return [
            p for p in found if not (self._block(p, True) and any(map(is_floating_sum, p.stmts)))
        ]

    def _online_total(self, maxima: Phase, sums: Phase) -> Reduce | None:
        """The sum of an online softmax in blocks, if the row is long enough."""
        found = online_softmax(maxima.stmts, sums.stmts)
        inner = self.kernel.reduction
        if found is None or len(inner) != 1 or maxima.level != "reduction":
            return None
        total = found[1]
        long = not isinstance(inner[0].size, int) or inner[0].size >= 2 * ONLINE_BLOCK
        return total if long and VALUE_TYPE[total.dtype] == "float" else None

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
        return whole and isinstance(size, int) and size >= BEYOND_PRIVATE_CACHES

    # ---- planes ---------------------------------------------------------------------------------

    def _in_planes(self) -> bool:
        """Whether rows lie in several planes, such as the channels of a batch of images, that all
        fit in the last-level cache: row by row, memory would be read in segments far apart."""
        kernel = self.kernel
        sizes = [v.size for v in (*kernel.parallel, *kernel.reduction) if isinstance(v.size, int)]
        if len(kernel.parallel) != 1 or len(kernel.reduction) != 2 or len(sizes) != 3:
            return False
        if product(sizes) < MIN_IN_PLANES or sizes[1] < 2 or sizes[2] < MIN_PLANE:
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
        loops = self.kernel.reduction[1:]
        found = [self._shifted(each, loops) for each in deviations(self.kernel)]
        early = {stmt for each in found for stmt in (each.sums.total, *each.sums.sums)}
        steps: list[Phase | form.MeanStep | PlaneStep] = []
        for phase in self.kernel.phases:
            if phase.level == "parallel":
                steps.append(phase)
                continue
            steps += [form.MeanStep(each) for each in found if each.sums.squares in phase.stmts]
            rest = replace(phase, stmts=tuple(s for s in phase.stmts if s not in early))
            mine = tuple(each for each in found if each.sums.total in phase.stmts)
            if rest.stmts or mine:
                steps.append(PlaneStep(self._pass(rest, loops=loops), mine))
        return form.Planes(steps=tuple(steps))

    def _shifted_phases(
        self, prefetch: Mapping[Phase, Sequence[Read]]
    ) -> dict[Phase, list[RowStep]]:
        """What replaces the phase of a row's sum and the one of its deviations from the mean, where
        neither computes anything else."""
        loops, sums = self.kernel.reduction, deviations(self.kernel)
        count = product(v.size for v in loops)
        if len(sums) != 1 or (isinstance(count, int) and count < MIN_SHIFTED):
            return {}
        totals, early = (
            next((p for p in self.kernel.phases if set(p.stmts) == set(stmts)), None)
            for stmts in ((sums[0].total,), sums[0].sums)
        )
        if totals is None or early is None:
            return {}
        found = self._shifted(sums[0], loops, prefetch.get(early, ()))
        return {totals: [found], early: [form.MeanStep(found)]}

    def _shifted(
        self, sums: Deviations, loops: Sequence[Var], prefetch: Sequence[Read] = ()
    ) -> form.ShiftedSums:
        """The passes that compute a row's sum together with those over deviations from its mean."""
        total, name = sums.total, sums.squares.name
        sample_sum = replace(total, name=f"sample_sum_{name}")
        square = ir.apply("mul", total.dtype, total.value, total.value)
        sample_squares = replace(total, name=f"sample_squares_{name}", value=square)
        shift = ir.result(f"shift_{name}", total.dtype)
        deviation = ir.apply("sub", total.dtype, total.value, shift)
        squares = replace(sums.squares, value=ir.apply("mul", total.dtype, deviation, deviation))
        residual = replace(total, name=f"residual_{name}", value=deviation)
        return form.ShiftedSums(
            sums,
            SHIFT_SAMPLE,
            Pass(Phase("reduction", (sample_sum, sample_squares)), tuple(loops)),
            self._pass(Phase("reduction", (residual, squares)), prefetch, loops),
        )

    # ---- scans ----------------------------------------------------------------------------------

    def _is_outer_scan(self) -> bool:
        """Whether scans run across rows: memory is contiguous along the last parallel loop, whose
        elements are computed in vectors, row after row."""
        kernel = self.kernel
        if len(kernel.phases) != 1 or len(kernel.reduction) != 1 or not kernel.parallel:
            return False
        if not all(isinstance(s, (Scan, Store)) for s in kernel.stmts()):
            return False
        column = kernel.parallel[-1]
        steps = {i.coefficient(column) for i in memory_indices(kernel)}
        wide = not isinstance(column.size, int) or column.size >= SUM_LANES
        return wide and steps <= {0, 1} and all(is_along(s.index, column) for s in kernel.stores())

    def _only_prefix_sums(self) -> bool:
        """Whether each scan is a prefix sum whose values do not depend on another scan."""
        kernel, inner = self.kernel, self.kernel.reduction
        return (
            len(kernel.phases) == len(inner) == 1
            and len(self.scans) + len(kernel.stores()) == len(kernel.stmts())
            and all(s.op == "sum" and VALUE_TYPE[s.dtype] != "bool" for s in self.scans)
            and not all(_is_plain_count(s) for s in self.scans)
            and not any(e.op == "reduction_result" for s in self.scans for e in ir.walk(s.value))
            and (not isinstance(inner[0].size, int) or inner[0].size >= MIN_SCAN)
        )

    def _can_jam(self) -> bool:
        rows = self.kernel.parallel
        return (
            bool(rows)
            and form.divides(UNROLL_AND_JAM, rows[-1])
            and rows[-1].size not in (0, UNROLL_AND_JAM)
            and len(self.kernel.phases) == 1
            and len(self.kernel.reduction) == 1
            and all(isinstance(s, (Scan, Store)) for s in self.kernel.stmts())
        )


def _is_group(loops: Sequence[Var]) -> bool:
    """Whether the last loop is so short that iterations of the one around it share a block."""
    size = loops[-1].size
    short = len(loops) == 2 and isinstance(size, int) and size <= SUM_BLOCK
    return short and isinstance(size, int) and size % LINE_BYTES == 0


def _lanes(size: Size) -> int:
    """Sums that a loop of `size` adds up at once: twice as many as a vector of floats has, whose
    additions would wait for each other, if it is in whole ones. Halves of a line of 16-bit elements
    are in shorter vectors, and accumulators that these have stored are loaded as whole ones only
    when the stores have reached the cache."""
    whole = isinstance(size, int) and size % (2 * SUM_LANES) == 0
    return 2 * SUM_LANES if whole else SUM_LANES


def _even_block(size: Size, lanes: int) -> int:
    """Elements per block of a loop of `size`: about SUM_ADDITIONS lines, no block much shorter."""
    if not isinstance(size, int) or size < lanes:
        return SUM_BLOCK
    lines = size // lanes
    blocks = max(1, round(lines / SUM_ADDITIONS))
    return -(-lines // blocks) * lanes


def distinct(reads: Sequence[Read]) -> list[Read]:
    """One load for each element: rebuilt expressions repeat loads."""
    return list({(item.ref, item.index): item for item in reads}.values())


def _is_plain(stmt: Stmt) -> bool:
    if isinstance(stmt, Reduce):
        return stmt.op == "sum" and VALUE_TYPE[stmt.dtype] == "float"
    return isinstance(stmt, Let) or (isinstance(stmt, Store) and not stmt.op)


def _is_plain_count(stmt: Scan) -> bool:
    """Whether a prefix sum adds up stored elements in int64, of which a vector has few: one after
    another they take 0.6 to 0.95 of its time, as an addition has a latency of one cycle."""
    return stmt.dtype == torch.int64 and cost_of(stmt.value) == 0


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
