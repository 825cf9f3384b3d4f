"""Scatters into float32 whose results another kernel rounds: rows of sums that stay in a cache.

Sums of 16-bit floats are added up in float32 and rounded once. Where a scatter completes row after
row of its buffer, the kernel that reads the buffer becomes its epilogue, and the buffer is one row:
memory is written once, in 16 bits, instead of twice in 32 bits, read, and written in 16.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, Masked, Read, Ref, Rewriter
from dicp.loop.ir.graph import Call
from dicp.loop.ir.index import Index, Size, Var, product, variable
from dicp.loop.ir.kernel import Kernel, Phase, Stmt, Store, rewritten
from dicp.origin import merged_origins
from dicp.vendor.cpu.form import ByDestination, Epilogue, Points, Scattered
from dicp.vendor.cpu.schedule.pointwise import Pointwise
from dicp.vendor.cpu.schedule.scatter import Scatter, rows_apart
from dicp.vendor.cpu.thresholds import BEYOND_PRIVATE_CACHES
from dicp.vendor.cpu.zeros import buffers_of, without_zeros_of, written_completely


@dataclass(frozen=True)
class _Sums:
    """A scatter's form, and its buffer as `count` rows of `width` elements, complete one by one."""

    form: ByDestination | Scattered
    store: Store
    count: Size
    width: int


def with_epilogues(
    steps: Sequence[Kernel | Call], outputs: Collection[Ref], non_temporal_bytes: float
) -> list[Kernel | Call]:
    """The steps, those scatters with their epilogues; `outputs` are the graph's.

    A kernel that did nothing but fill a buffer has no statements left: `without_zeros` drops it.
    """
    kept = list(steps)
    for step in steps:
        if not isinstance(step, Kernel) or step.kind != "scatter":
            continue
        sums = _sums(step, non_temporal_bytes)
        if sums is not None and sums.store.ref.root not in outputs:
            _fuse(kept, step, sums, non_temporal_bytes)
    return kept


def _fuse(
    kept: list[Kernel | Call], scatter: Kernel, sums: _Sums, non_temporal_bytes: float
) -> None:
    """Makes one kernel in `kept` of those that fill, sum into and read the buffer, if these are
    all that use it."""
    at, buffer = kept.index(scatter), sums.store.ref.root
    uses = [k for k, step in enumerate(kept) if buffer in buffers_of(step)]
    if len(uses) != 3 or uses[1] != at:
        return
    before, _, after = uses
    zeros, reader = without_zeros_of(kept[before], buffer), kept[after]
    if zeros is None or not isinstance(reader, Kernel) or not _may_move(kept[at : after + 1]):
        return
    if reader.written_buffers() & buffers_of(scatter):
        return  # later rows are still read
    epilogue = _epilogue(reader, sums, scatter, non_temporal_bytes)
    if epilogue is None:
        return
    team = Scatter(scatter, non_temporal_bytes).team((epilogue.row, epilogue.element))
    form = replace(sums.form, epilogue=epilogue, team=team)
    kept[before], kept[at] = zeros, _with_form(scatter, form, reader)
    del kept[after]


def _sums(kernel: Kernel, non_temporal_bytes: float) -> _Sums | None:
    """The rows that a scatter completes one by one, if it adds floats to a buffer of such rows."""
    if len(kernel.stmts()) != 1:
        return None
    (store,) = kernel.stores()
    if store.op != "sum" or store.ref.root.dtype != torch.float32 or store.index.const != 0:
        return None
    form = kernel.form
    if isinstance(form, Scattered):
        form = _by_destination(kernel, form, non_temporal_bytes) or form
    if isinstance(form, ByDestination):
        width = kernel.parallel[-1].size
        if not isinstance(width, int) or written_completely(kernel, form) is None:
            return None
        return _Sums(form, store, form.place.size, width)
    if not isinstance(form, Scattered) or not rows_apart(kernel):
        return None
    row = kernel.parallel[0]
    step = store.index.coefficient(row)
    if not isinstance(step, int) or step * store.ref.dtype.itemsize > BEYOND_PRIVATE_CACHES:
        return None
    whole = product([row.size, step]) == product(store.ref.root.shape)
    return _Sums(form, store, row.size, step) if whole else None


def _by_destination(
    kernel: Kernel, form: Scattered, non_temporal_bytes: float
) -> ByDestination | None:
    """The form of rows that are sorted, however few, so that those of a destination are added at
    once; None for other scatters."""
    other = Scatter(kernel, non_temporal_bytes).by_destination(always=True)
    if other is None:
        return None
    return replace(
        other, scalar_rows=form.scalar_rows, stack_bytes=form.stack_bytes,
        converted=form.converted, hidden=form.hidden,
    )  # fmt: skip


def _may_move(steps: Sequence[Kernel | Call]) -> bool:
    """Whether the last step may run directly after the first: those between share no memory."""
    last = buffers_of(steps[-1])
    return all(not last & buffers_of(step) for step in steps[1:-1])


def _epilogue(
    reader: Kernel, sums: _Sums, scatter: Kernel, non_temporal_bytes: float
) -> Epilogue | None:
    """The statements of `reader` as an epilogue of the scatter; None if it reads the buffer at
    other places than its own point."""
    plain = isinstance(reader.form, Points) and not reader.variants and bool(reader.parallel)
    if not plain or len(reader.parallel) > 2 or any(s.op for s in reader.stores()):
        return None
    if any(isinstance(e, Masked) for x in reader.exprs() for e in ir.walk(x)):
        return None
    row, element = _loops(scatter, sums)
    point = variable(row) * sums.width + variable(element)
    mapping = _mapping(reader.parallel, row, element, point)
    if mapping is None:
        return None
    rewrite = Rewriter(mapping)
    stmts = [rewritten(s, rewrite, rewrite.index) for s in reader.stmts()]
    kernel = replace(
        reader, parallel=(row, element), phases=(Phase("parallel", tuple(stmts)),), form=None
    )
    buffer = sums.store.ref.root
    reads = [item for item in kernel.reads() if item.ref.root is buffer]
    if any(item.index != point or item.ref.offset != 0 for item in reads):
        return None
    chooser = Pointwise(kernel, non_temporal_bytes)

    def zero(item: Read) -> Expr | None:
        return ir.const(0.0, item.dtype) if item.ref.root is buffer else None

    without = Rewriter(on_read=zero)
    untouched: list[Stmt] = [rewritten(s, without, without.index) for s in stmts]
    return Epilogue(
        row, element, tuple((item.ref, item.index) for item in reads),
        tuple(chooser.strips(stmts, element, ())), tuple(chooser.strips(untouched, element, ())),
    )  # fmt: skip


def _loops(scatter: Kernel, sums: _Sums) -> tuple[Var, Var]:
    """The loops over rows of the buffer and over their elements."""
    if isinstance(sums.form, ByDestination):
        return scatter.new_variable(sums.count), scatter.parallel[-1]
    return scatter.parallel[0], scatter.new_variable(sums.width)


def _mapping(loops: Sequence[Var], row: Var, element: Var, point: Index) -> dict[Var, Index] | None:
    """The loops of a kernel over the elements of the buffer as loops over its rows and these."""
    if len(loops) == 1:
        whole = product([row.size, element.size])
        return {loops[0]: point} if loops[0].size == whole else None
    same = [v.size for v in loops] == [row.size, element.size]
    return {loops[0]: variable(row), loops[1]: variable(element)} if same else None


def _with_form(scatter: Kernel, form: ByDestination | Scattered, reader: Kernel) -> Kernel:
    """The scatter with the statements of its epilogue, for which it accounts."""
    assert form.epilogue is not None
    stmts = tuple(s for strip in form.epilogue.strips for s in strip.range.stmts)
    return replace(
        scatter,
        phases=(*scatter.phases, Phase("parallel", stmts)),
        origins=merged_origins(scatter.origins, reader.origins),
        fresh=True,
        form=form,
    )
