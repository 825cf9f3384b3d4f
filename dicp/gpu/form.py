"""The forms of kernels on a GPU: tiles of programs, for languages that work on tiles.

`dicp.gpu.threads` has the forms for languages that are written thread by thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dicp.gpu import tiles
from dicp.gpu.facts import DeviceFacts
from dicp.gpu.passes import Hints, barriers, cache_hints, executed, online_pairs
from dicp.gpu.precision import variants
from dicp.gpu.random_groups import limited_stores, words
from dicp.gpu.thresholds import ASSUMED_SIZE, MIN_CROSSING
from dicp.gpu.tiles import Tile, numel
from dicp.loop.ir.expr import Ref
from dicp.loop.ir.index import Var
from dicp.loop.ir.kernel import Form, Kernel, Reduce, Stmt, Store
from dicp.loop.passes.moments import Deviations, deviations
from dicp.loop.passes.one_hot import without_one_hot_sums
from dicp.loop.schedule.form import crossing_loop


@dataclass(frozen=True, eq=False)
class TileForm(Form):
    """A program computes one tile."""

    tile: Tile
    limited: Mapping[Store, int] = field(default_factory=dict, kw_only=True)
    """Stores, and the most adjacent elements of one that a thread may store at once."""


@dataclass(frozen=True, eq=False)
class PointTile(TileForm):
    """Every statement at every point; with `crossing`, in a tile of two axes: reads along one and
    writes along the other span whole lines."""

    crossing: Var | None = None


@dataclass(frozen=True, eq=False)
class ReductionTile(TileForm):
    """Rows whose reduction is in one block (`tile.persistent`), or in a loop over blocks."""

    passes: tuple[tuple[Stmt, ...], ...]
    """By phase, the statements that run in it: without those of scratch values, which are
    rematerialized where they are read, and without the sums of `deviations`."""
    online: tuple[tuple[int, Reduce, Reduce], ...] = ()
    """Online softmax: the phase of a maximum, the maximum, and the next phase's sum."""
    deviations: tuple[Deviations, ...] = ()
    """Sums over deviations from a mean, computed in the pass of the mean's own sum."""
    barriers: frozenset[int] = frozenset()
    """The phases before which the threads of a program wait for each other."""
    hints: Mapping[int, Hints] = field(default_factory=dict)
    """By phase, which of its loads the cache keeps."""


@dataclass(frozen=True, eq=False)
class RowLoop(TileForm):
    """Fused cross-row sums: each program loops over rows and adds up."""

    passes: tuple[tuple[Stmt, ...], ...]
    """As those of a `ReductionTile`."""
    parts: tuple[Var, ...]
    """The loops that the sums keep, or the index of a part: one program per point."""
    rows: tuple[Var, ...]
    """The loops in each program."""
    stages: int
    """Pipeline stages of the loop over rows."""
    barriers: frozenset[int] = frozenset()
    """As those of a `ReductionTile`."""


def with_tile(kernel: Kernel, facts: DeviceFacts) -> Kernel:
    """The kernel with its tiles, and without sums that need no loop."""
    kernel = without_one_hot_sums(kernel)
    form = _form_of(kernel, facts)
    crossed = isinstance(form, PointTile) and form.crossing is not None
    inner = kernel.reduction or (kernel.parallel[-1:] if crossed else kernel.parallel)
    form = replace(form, limited=limited_stores(kernel, inner))
    return replace(kernel, form=form, variants={**variants(kernel), **words(kernel)})


def _form_of(kernel: Kernel, facts: DeviceFacts) -> TileForm:
    if kernel.cross_row_stores():
        return _row_loop(kernel, facts)
    if kernel.kind in ("inner_reduction", "outer_reduction"):
        return _reduction(kernel, facts)
    if not kernel.parallel:
        return PointTile(Tile({}, False, 1))
    crossing = None
    if kernel.kind == "pointwise":
        crossing = crossing_loop(kernel, MIN_CROSSING, ASSUMED_SIZE)
    if crossing is None:
        return PointTile(tiles.pointwise(kernel, facts))
    width = min(r.dtype.itemsize for r in _touched(kernel))
    last = kernel.parallel[-1]
    return PointTile(tiles.transposed(crossing.size, last.size, width, facts), crossing)


def _touched(kernel: Kernel) -> list[Ref]:
    """What the kernel reads and writes."""
    return [item.ref for item in kernel.reads()] + [s.ref for s in kernel.stores()]


def _reduction(kernel: Kernel, facts: DeviceFacts) -> ReductionTile:
    tile = tiles.reduction(tiles.with_rows_of_part(kernel), facts)
    passes = tuple(map(executed, kernel.phases))
    if tile.persistent:
        return ReductionTile(tile, passes, barriers=barriers(kernel, passes))
    online = online_pairs(passes)
    rescaled = {total for _, _, total in online}
    found = tuple(each for each in deviations(kernel) if each.total not in rescaled)
    early = {stmt for each in found for stmt in each.sums}
    passes = tuple(tuple(s for s in stmts if s not in early) for stmts in passes)
    hints = cache_hints(kernel, passes, [k for k, *_ in online])
    return ReductionTile(tile, passes, online, found, barriers(kernel, passes), hints)


def _row_loop(kernel: Kernel, facts: DeviceFacts) -> RowLoop:
    kept, rows, count = tiles.looped_rows(kernel)
    parts = kept if kernel.partition is None else (kernel.partition.part,)
    tile = tiles.cross_row(count, numel(kernel.reduction), facts)
    passes = tuple(map(executed, kernel.phases))
    stages = _stages(kernel, tile, rows, facts)
    return RowLoop(tile, passes, parts, rows, stages, barriers(kernel, passes))


def _stages(kernel: Kernel, tile: Tile, rows: tuple[Var, ...], facts: DeviceFacts) -> int:
    """Pipeline stages of the loop over rows; 1 if the kernel reads what it stores."""
    written = {s.ref.root for s in kernel.stores() if not s.op}
    loops, inner = set(rows), set(kernel.reduction)
    read = {item.ref: item.index.variables() for item in kernel.reads()}
    if written & {ref.root for ref in read}:
        return 1
    whole = [ref.dtype.itemsize for ref, used in read.items() if used & loops and used & inner]
    return tiles.stages(sum(whole) * tile.blocks["x"] * tile.blocks["r"], facts)
