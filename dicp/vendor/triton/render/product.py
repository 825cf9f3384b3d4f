"""Triton code of a matrix product with its epilogue, one tile per program.

The skeleton (`product.py.jinja`) accumulates a tile in float32; the epilogue is written by the same
emitter, from the same expressions, as every other kernel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dicp.codegen.values import local
from dicp.gpu.products import RESULT, TOTAL, ProductTile
from dicp.loop.ir.index import Size, Var, normal, quotient
from dicp.loop.ir.kernel import Kernel
from dicp.loop.program import RenderedKernel
from dicp.serialize import encode_size
from dicp.template import render_template
from dicp.vendor.triton.render.emit import EVERYWHERE, Axis, Emitter

SKELETON = Path(__file__).parent / "product.py.jinja"


class _Result(Emitter):
    """Emits the epilogue of a tile, all elements of which have the same batch index."""

    def __init__(self, kernel: Kernel, axes: list[Axis], form: ProductTile) -> None:
        super().__init__(kernel, axes, form.limited)
        self.batch = form.product.z
        self.places[local(TOTAL)] = self.level

    def variable(self, var: Var) -> str:
        if var in self.batch:
            return self.digit_of("zi", self.batch, var, EVERYWHERE)
        return super().variable(var)


def render_product(kernel: Kernel, form: ProductTile) -> RenderedKernel:
    """The text of a product's kernel, in its form."""
    product, tiling = form.product, form.tiling
    axes = [Axis("y", product.y, tiling.y, 0), Axis("x", product.x, tiling.x, 1)]
    writer = _Result(kernel, axes, form)
    left, right = writer.arg(product.a), writer.arg(product.b)
    batch, *sides = product.shape
    rows, columns, depth = (writer.size(s) for s in sides)
    operands = {
        "left": _operand(writer, left, product.a.strides, 1),
        "right": _operand(writer, right, product.b.strides, 0),
    }
    writer.set(local(RESULT), writer.value(product.value), writer.level)
    writer.statements(product.stores)
    batched = len(product.a.shape) == 3
    several = batched or product.parts > 1
    groups = quotient(normal(batch), product.parts)
    assert groups is not None
    of_parts = {"parts": product.parts, "groups": writer.size(groups) if product.parts > 1 else ""}
    cut = not isinstance(product.depth, int) or product.depth % tiling.k != 0
    ends = [f"({side}_k < {depth} - start)" if cut else "" for side in ("left", "right")]
    body = render_template(
        SKELETON, names=", ".join(_names(writer, several)), batched=batched, group=form.group,
        rows=rows, columns=columns, depth=depth, y_mask=axes[0].masked, x_mask=axes[1].masked,
        left_mask=_load_mask("ym" if axes[0].masked else "", ends[0]),
        right_mask=_load_mask("xm" if axes[1].masked else "", ends[1]),
        precision="tf32" if form.tf32 else "ieee", after=writer.scopes[0].lines, **of_parts,
        **operands,
    ).rstrip()  # fmt: skip
    return writer.rendered(body, tiling, _launch(axes, form, batch if several else None), False)


def _operand(writer: Emitter, name: str, strides: tuple[Size, ...], depth: int) -> dict[str, str]:
    """An operand for the skeleton: its name, and its strides by axis (batch, outer, depth)."""
    texts = [writer.size(s) for s in strides]
    *batch, first, second = (t if t.isidentifier() or t.isdigit() else f"({t})" for t in texts)
    pair = (first, second) if depth else (second, first)
    return {"name": name, "batch": batch[0] if batch else "0", "outer": pair[0], "depth": pair[1]}


def _load_mask(*tests: str) -> str:
    mask = " & ".join(t for t in tests if t)
    return f", mask={mask}, other=0.0" if mask else ""


def _names(writer: Emitter, several: bool) -> list[str]:
    blocks = [*(["ZBLOCK"] if several else []), "YBLOCK", "XBLOCK", "KBLOCK"]
    constants = [f"{name}: tl.constexpr" for name in ("INDEX", *blocks)]
    return [*writer.args.values(), *writer.symbols.values(), *constants]


def _launch(axes: list[Axis], form: ProductTile, batch: Size | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if batch is not None:
        found["z"] = {"size": encode_size(batch), "block": 1, "masked": False, "fixed": True}
    for axis in axes:
        found[axis.name] = {
            "size": encode_size(axis.size), "block": axis.block, "masked": axis.masked,
            "least": form.least,
        }  # fmt: skip
    return {
        "grid": list(found),
        "axes": found,
        "constants": {"KBLOCK": form.tiling.k},
        "warps": form.tiling.warps,
        "stages": form.tiling.stages,
    }
