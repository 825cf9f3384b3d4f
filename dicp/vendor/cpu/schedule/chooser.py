"""What the choosers of all kinds of kernels ask: teams of threads, blocks, whole cache lines.

In: a kernel without a form. Out: parts of its form (`dicp.vendor.cpu.form`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch

from dicp.loop.ir.access import is_along
from dicp.loop.ir.expr import Read, Ref
from dicp.loop.ir.index import Var, product
from dicp.loop.ir.kernel import Kernel, Reduce, Scan, Stmt, Store
from dicp.loop.passes.split_loops import Range, split
from dicp.loop.schedule.form import cost_of_point
from dicp.vendor.cpu.form import LINE_BYTES, BlockSizes, HostForm, Strip, Team
from dicp.vendor.cpu.thresholds import (
    CONVERTED_IN_CACHE,
    CONVERTED_IN_REGISTERS,
    HALF_VECTOR,
    MAX_CONVERTED_ONCE,
    MAX_HALF_ROW,
    MIN_CONVERTED,
    MIN_LANE_LOOP,
    MIN_REDUCTION_BYTES,
    PARALLEL_COST,
)

CONVERTED = BlockSizes(
    MIN_CONVERTED, MAX_CONVERTED_ONCE, CONVERTED_IN_REGISTERS, CONVERTED_IN_CACHE
)


class Chooser:
    """What the choosers of all kinds of kernels ask."""

    def __init__(self, kernel: Kernel, non_temporal_bytes: float) -> None:
        self.kernel = kernel
        self.non_temporal_bytes = non_temporal_bytes
        """Bytes from which no part of a result is still in a cache when it is read."""
        self.stored = kernel.written_buffers()

    def choose(self) -> HostForm:
        raise NotImplementedError

    def team(self, loops: Sequence[Var], collapse: int = 0) -> Team | None:
        """The team for `loops`; None if they are too little work for more than one thread."""
        work = product([*(v.size for v in loops), cost_of_point(self.kernel)])
        if isinstance(work, int):
            return Team(collapse) if work >= PARALLEL_COST else None
        return Team(collapse, work, PARALLEL_COST)

    def half_vectors(self, var: Var) -> bool:
        """Whether half a vector of bfloat16 at a time shortens a short row's remainder, which
        is computed element by element."""
        size = var.size
        if (
            not isinstance(size, int)
            or size >= MAX_HALF_ROW
            or size % (2 * HALF_VECTOR) < HALF_VECTOR
        ):
            return False
        return any(item.ref.dtype == torch.bfloat16 for item in self.kernel.reads())

    def is_long(self, most: int) -> bool:
        """Whether the reduction is over more than `most` elements."""
        count = product(v.size for v in self.kernel.reduction)
        return not isinstance(count, int) or count > most

    # ---- cache lines ----------------------------------------------------------------------------

    def strips(self, stmts: Sequence[Stmt], var: Var, prefetch: Sequence[Read]) -> list[Strip]:
        """The loop over `var` in ranges that need not test conditions on it at each point."""
        return [self.strip(part, var, prefetch) for part in split(stmts, var)]

    def strip(self, part: Range, var: Var, prefetch: Sequence[Read]) -> Strip:
        """The range, strip-mined if it has non-temporal stores or prefetches the next row, and is
        not short and in whole lines."""
        non_temporal = self._non_temporal_stores(part, var)
        lanes = line([*(s.ref for s in non_temporal), *(item.ref for item in prefetch)])
        least = MIN_LANE_LOOP if any(isinstance(s, Reduce) for s in part.stmts) else lanes
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
        if stmt.ref.root in reads or not is_along(index, var):
            return False
        others, whole = index.without(var), line([stmt.ref])
        steps = [index.const, *(c for _, c in others.terms)]
        return all(isinstance(c, int) and c % whole == 0 for c in steps)


def is_floating_sum(stmt: Stmt) -> TypeGuard[Reduce | Scan]:
    """Whether a reduction's or scan's rounding error grows with its length."""
    return isinstance(stmt, (Reduce, Scan)) and stmt.op == "sum" and stmt.dtype.is_floating_point


def line(refs: Sequence[Ref]) -> int:
    """Elements that fill whole cache lines of each of these tensors."""
    return LINE_BYTES // min((ref.dtype.itemsize for ref in refs), default=LINE_BYTES)


def _in_whole_lines(part: Range, count: int, least: int) -> bool:
    low, high = part.low, part.high
    if not isinstance(low, int) or not isinstance(high, int) or high - low < least:
        return False
    return low % count == high % count == 0
