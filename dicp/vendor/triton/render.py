"""Triton text of loop kernels: which loops become which axis, one block at a time or in a loop."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dicp.gpu import tiles
from dicp.gpu.tiles import Tile
from dicp.gpu.work_partition import Shared, along
from dicp.loop.ir.expr import Ref
from dicp.loop.ir.index import Index, Size, Var, product
from dicp.loop.ir.kernel import Kernel, Phase, Store
from dicp.loop.ir.ops import INDEX_CHECKS
from dicp.loop.passes.one_hot import without_single_hits
from dicp.origin import Origin
from dicp.vendor.triton.emit import Axis
from dicp.vendor.triton.facts import GPU
from dicp.vendor.triton.reduction import Reduction, Walked
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
    """What each checked place in the code is, and its origin, for error messages."""
    extra: Mapping[str, Any]
    """The launch: axes with their sizes and blocks, warps, and what the compiler must be told."""


def render(kernel: Kernel) -> TritonKernel:
    kernel = without_single_hits(kernel)
    sums = along(kernel)
    if sums:
        return _walked(kernel, sums)
    if kernel.kind in ("row", "column"):
        tile = tiles.reduction(kernel, GPU)
        inner = Axis("r", kernel.inner, tile.blocks["r"], 1)
        axes = [Axis("x", kernel.rows, tile.blocks["x"], 0), inner]
        return _finish(Reduction(kernel, axes, not tile.persistent), tile)
    if not kernel.rows:
        return _finish(_Pointwise(kernel, [], False), Tile({}, False, 1))
    cross = _crossing_loop(kernel) if kernel.kind == "pointwise" else None
    if cross is not None:
        return _tiled(kernel, cross)
    tile = tiles.pointwise(kernel, GPU)
    return _finish(_Pointwise(kernel, [Axis("x", kernel.rows, tile.blocks["x"], 0)], False), tile)


def render_shared(shared: Shared) -> TritonKernel:
    """One program for every share of the rows."""
    kernel = shared.kernel
    tile = tiles.cross_row(shared.chunk, product(v.size for v in kernel.inner), GPU)
    axes = [
        Axis("x", kernel.rows, tile.blocks["x"], 0, cut=True),
        Axis("r", kernel.inner, tile.blocks["r"], 1),
    ]
    return _finish(Walked(kernel, axes, (shared.part,), along(kernel), shared.chunk), tile)


def _walked(kernel: Kernel, sums: Sequence[Store]) -> TritonKernel:
    """One program for every point of the loops that the sums across keep; it walks the others."""
    kept = set().union(*(s.index.variables() for s in sums))
    parts = tuple(v for v in kernel.rows if v in kept)
    rows = tuple(v for v in kernel.rows if v not in kept)
    tile = tiles.cross_row(
        product(v.size for v in rows), product(v.size for v in kernel.inner), GPU
    )
    axes = [Axis("x", rows, tile.blocks["x"], 0), Axis("r", kernel.inner, tile.blocks["r"], 1)]
    return _finish(Walked(kernel, axes, parts, sums), tile)


def _tiled(kernel: Kernel, cross: Var) -> TritonKernel:
    """Two axes, so that reads along one and writes along the other both span whole lines."""
    last = kernel.rows[-1]
    outer = (*(v for v in kernel.rows[:-1] if v is not cross), cross)
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
        "grid": [name for name in found if name not in ("r", writer.walked)],
        "axes": found,
        "warps": tile.warps,
        "elements": [ELEMENT[r.dtype] for r in writer.args],
        "checks": any(kind in INDEX_CHECKS for kind, _ in writer.sites),
        "whole": tile.persistent,
        "reaches": list(writer.reaches),
    }
    name = "k" + hashlib.sha256(f"{body} {tile.warps}".encode()).hexdigest()[:20]
    return TritonKernel(
        name, body, tuple(writer.args), tuple(writer.sizes), writer.kernel, tuple(writer.sites),
        {"launch": launch},
    )  # fmt: skip


def _touched(kernel: Kernel) -> list[Ref]:
    """What the kernel reads and writes."""
    reads = [item.ref for item in kernel.reads()]
    return reads + [s.ref for p in kernel.phases for s in p.stmts if isinstance(s, Store)]


def _crossing_loop(kernel: Kernel) -> Var | None:
    """The outer loop along which some tensor is contiguous while the last loop strides it."""
    last = kernel.rows[-1]
    indices: list[Index] = [item.coords[0] for item in kernel.reads()]
    indices += [s.index for p in kernel.phases for s in p.stmts if isinstance(s, Store)]
    for index in indices:
        for var in kernel.rows[:-1]:
            if index.coefficient(var) == 1 and index.coefficient(last) not in (0, 1):
                if all(tiles.extent(v.size) >= 8 for v in (var, last)):
                    return var
    return None


class _Pointwise(Writer):
    """Every statement at every point of the rows."""

    def phase(self, phase: Phase) -> None:
        values = {id(s): self.value(s.value) for s in phase.stmts}
        self.stores(phase, values, frozenset(self.axes))
