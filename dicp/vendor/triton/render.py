"""Triton code of loop kernels: maps loops to tile axes, in one block or in a loop over blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dicp.gpu import tiles
from dicp.gpu.tiles import Tile
from dicp.gpu.work_partition import PartitionedKernel, cross_row_stores
from dicp.loop.ir.expr import Ref
from dicp.loop.ir.index import Index, Size, Var, product
from dicp.loop.ir.kernel import Kernel, Phase, Store, kernel_name
from dicp.loop.ir.ops import INDEX_CHECKS
from dicp.loop.passes.one_hot import without_one_hot_sums
from dicp.origin import Origin
from dicp.vendor.triton.emit import Axis
from dicp.vendor.triton.facts import GPU
from dicp.vendor.triton.reduction import LoopedRows, Reduction
from dicp.vendor.triton.spelling import ELEMENT
from dicp.vendor.triton.writer import Writer


@dataclass(frozen=True)
class TritonKernel:
    """A rendered kernel: equal work has equal `body`, hence an equal name."""

    name: str
    body: str
    args: tuple[Ref, ...]
    symbols: tuple[Size, ...]
    kernel: Kernel
    sites: tuple[tuple[str, Origin | None], ...]
    """The kind and the origin of each checked operation, for error messages."""
    extra: Mapping[str, Any]
    """The launch: axes with their sizes and blocks, warps, and the compiler's options."""


def render(kernel: Kernel) -> TritonKernel:
    kernel = without_one_hot_sums(kernel)
    sums = cross_row_stores(kernel)
    if sums:
        return _looped_rows(kernel, sums)
    if kernel.kind in ("inner_reduction", "outer_reduction"):
        tile = tiles.reduction(kernel, GPU)
        inner = Axis("r", kernel.reduction, tile.blocks["r"], 1)
        axes = [Axis("x", kernel.parallel, tile.blocks["x"], 0), inner]
        return _finish(Reduction(kernel, axes, not tile.persistent), tile)
    if not kernel.parallel:
        return _finish(_Pointwise(kernel, [], False), Tile({}, False, 1))
    cross = _crossing_loop(kernel) if kernel.kind == "pointwise" else None
    if cross is not None:
        return _tiled(kernel, cross)
    tile = tiles.pointwise(kernel, GPU)
    return _finish(
        _Pointwise(kernel, [Axis("x", kernel.parallel, tile.blocks["x"], 0)], False), tile
    )


def render_partitioned(shared: PartitionedKernel) -> TritonKernel:
    """An inner reduction with fused cross-row sums, one program per share of the rows."""
    kernel = shared.kernel
    tile = tiles.cross_row(shared.chunk, product(v.size for v in kernel.reduction), GPU)
    axes = [
        Axis("x", kernel.parallel, tile.blocks["x"], 0, cut=True),
        Axis("r", kernel.reduction, tile.blocks["r"], 1),
    ]
    return _finish(
        LoopedRows(kernel, axes, (shared.part,), cross_row_stores(kernel), shared.chunk), tile
    )


def _looped_rows(kernel: Kernel, sums: Sequence[Store]) -> TritonKernel:
    """An inner reduction with fused cross-row sums: one program per point of the loops that the
    sums keep, in a loop over the others."""
    kept = set().union(*(s.index.variables() for s in sums))
    parts = tuple(v for v in kernel.parallel if v in kept)
    rows = tuple(v for v in kernel.parallel if v not in kept)
    tile = tiles.cross_row(
        product(v.size for v in rows), product(v.size for v in kernel.reduction), GPU
    )
    axes = [Axis("x", rows, tile.blocks["x"], 0), Axis("r", kernel.reduction, tile.blocks["r"], 1)]
    return _finish(LoopedRows(kernel, axes, parts, sums), tile)


def _tiled(kernel: Kernel, cross: Var) -> TritonKernel:
    """A kernel with two tile axes: reads along one and writes along the other span whole lines."""
    last = kernel.parallel[-1]
    outer = (*(v for v in kernel.parallel[:-1] if v is not cross), cross)
    tile = tiles.transposed(
        cross.size, last.size, min(r.dtype.itemsize for r in _touched(kernel)), GPU
    )
    axes = [Axis("y", outer, tile.blocks["y"], 0), Axis("x", (last,), tile.blocks["x"], 1)]
    return _finish(_Pointwise(kernel, axes, False), tile)


def _finish(writer: Writer, tile: Tile) -> TritonKernel:
    writer.write()
    found = writer.launch_axes()
    names = [*writer.args.values(), *writer.sizes.values()]
    names += ["INDEX: tl.constexpr", *(f"{name.upper()}BLOCK: tl.constexpr" for name in found)]
    body = "\n".join([f"({', '.join(names)}):", *writer.scopes[0].lines])
    launch = {
        "grid": [name for name in found if name not in ("r", writer.looped_axis)],
        "axes": found,
        "warps": tile.warps,
        "elements": [ELEMENT[r.dtype] for r in writer.args],
        "checks": any(kind in INDEX_CHECKS for kind, _ in writer.sites),
        "whole": tile.persistent,
        "reaches": list(writer.reaches),
    }
    name = kernel_name(writer.kernel.origins, f"{body} {tile.warps}")
    return TritonKernel(
        name, body, tuple(writer.args), tuple(writer.sizes), writer.kernel, tuple(writer.sites),
        {"launch": launch},
    )  # fmt: skip


def _touched(kernel: Kernel) -> list[Ref]:
    """What the kernel reads and writes."""
    reads = [item.ref for item in kernel.reads()]
    return reads + [s.ref for p in kernel.phases for s in p.stmts if isinstance(s, Store)]


def _crossing_loop(kernel: Kernel) -> Var | None:
    """The outer loop along which a tensor is contiguous that the last loop reads with a stride."""
    last = kernel.parallel[-1]
    indices: list[Index] = [item.index for item in kernel.reads()]
    indices += [s.index for p in kernel.phases for s in p.stmts if isinstance(s, Store)]
    for index in indices:
        for var in kernel.parallel[:-1]:
            if index.coefficient(var) == 1 and index.coefficient(last) not in (0, 1):
                if all(tiles.extent(v.size) >= 8 for v in (var, last)):
                    return var
    return None


class _Pointwise(Writer):
    """Every statement at every point of the parallel loops."""

    def phase(self, phase: Phase) -> None:
        values = {id(s): self.value(s.value) for s in phase.stmts}
        self.stores(phase, values, frozenset(self.axes))
