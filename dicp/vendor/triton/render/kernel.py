"""Triton code of loop kernels: maps loops to tile axes, in one block or in a loop over blocks."""

from __future__ import annotations

from dicp.gpu.form import PointTile, ReductionTile, RowLoop, TileForm
from dicp.gpu.products import ProductTile
from dicp.loop.ir.index import Var
from dicp.loop.ir.kernel import Kernel
from dicp.loop.program import RenderedKernel
from dicp.vendor.triton.render.emit import Axis
from dicp.vendor.triton.render.product import render_product
from dicp.vendor.triton.render.reduction import LoopedRows, Reduction
from dicp.vendor.triton.render.writer import Writer


def render(kernel: Kernel) -> RenderedKernel:
    """The kernel's text, in its form."""
    form = kernel.form
    if isinstance(form, ProductTile):
        return render_product(kernel, form)
    assert isinstance(form, TileForm)
    shared = kernel.partition is not None
    if isinstance(form, RowLoop):
        axes = [_axis("x", form, form.rows, 0, shared), _axis("r", form, kernel.reduction, 1)]
        return _finish(LoopedRows(kernel, axes, form), form)
    if isinstance(form, ReductionTile):
        axes = [_axis("x", form, kernel.parallel, 0), _axis("r", form, kernel.reduction, 1, shared)]
        return _finish(Reduction(kernel, axes, form), form)
    return _finish(Writer(kernel, _point_axes(kernel, form), form.limited), form)


def _axis(name: str, form: TileForm, loops: tuple[Var, ...], dim: int, cut: bool = False) -> Axis:
    return Axis(name, loops, form.tile.blocks[name], dim, cut)


def _point_axes(kernel: Kernel, form: TileForm) -> list[Axis]:
    crossing = form.crossing if isinstance(form, PointTile) else None
    if crossing is not None:
        *outer, last = kernel.parallel
        rows = (*(v for v in outer if v is not crossing), crossing)
        return [_axis("y", form, rows, 0), _axis("x", form, (last,), 1)]
    return [_axis("x", form, kernel.parallel, 0)] if kernel.parallel else []


def _finish(writer: Writer, form: TileForm) -> RenderedKernel:
    writer.write()
    found = writer.launch_axes()
    names = [*writer.args.values(), *writer.symbols.values()]
    names += ["INDEX: tl.constexpr", *(f"{name.upper()}BLOCK: tl.constexpr" for name in found)]
    body = "\n".join([f"({', '.join(names)}):", *writer.scopes[0].lines])
    tile = form.tile
    launch = {"grid": writer.grid(), "axes": found, "warps": tile.warps}
    return writer.rendered(body, tile.warps, launch, tile.persistent)
