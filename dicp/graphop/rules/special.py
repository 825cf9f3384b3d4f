"""What some vendors have as one operator: special functions, masks, counts, sampling."""

from __future__ import annotations

import math
from typing import Any

import torch

from dicp.graphop.operators import NoRule, Ops, Value
from dicp.rules import RuleTable

aten = torch.ops.aten
prims = torch.ops.prims
RULES = RuleTable()
rule = RULES.register


@rule(aten.special_ndtri.default, prims.ndtri.default)
def ndtri(g: Ops, x: Value) -> Value:
    return g.op("Ndtri", g.cast(x, g.dtype))


def _incomplete_gamma(kind: str) -> Any:
    def apply(g: Ops, a: Value, x: Value) -> Value:
        wide = torch.float64 if g.dtype == torch.float64 else torch.float32
        return g.cast(g.op(kind, g.cast(a, wide), g.cast(x, wide)), g.dtype)

    return apply


for _ops, _kind in (((aten.igamma, prims.igamma), "Igamma"),
                    ((aten.igammac, prims.igammac), "Igammac")):  # fmt: skip
    for _op in _ops:
        RULES.add(_op.default, _incomplete_gamma(_kind))


@rule(aten.masked_scatter.default)
def masked_scatter(g: Ops, x: Value, mask: Value, source: Value) -> Value:
    return g.op("MaskedScatter", g.broadcast(x, g.shape), g.broadcast(mask, g.shape), source)


@rule(aten.masked_scatter_backward.default)
def masked_scatter_backward(g: Ops, dy: Value, mask: Value, sizes: Any) -> Value:
    """The gradients under the mask, one after another, then zeros."""
    count, size = math.prod(dy.shape), math.prod(sizes)
    flat = g.reshape(g.broadcast(mask, dy.shape), [count])
    numbers = g.op("Cumsum", g.cast(flat, torch.int64), g.const(0, torch.int64))
    place = g.where(flat, g.add(numbers, -1), size, torch.int64)
    last = g.reshape(place, [count, 1])  # what is not under the mask goes behind the end
    zeros = g.full([size + 1], 0, dy.dtype)
    out = g.op("ScatterNDUpdate", zeros, last, g.reshape(dy, [count]))
    return g.reshape(g.slice(out, 0, 0, size), list(sizes))


@rule(aten.histc.default)
def histc(g: Ops, x: Value, bins: int = 100, min: float = 0, max: float = 0) -> Value:
    if x.dtype != torch.float32:
        raise NoRule(f"Histogram does not take {str(x.dtype).removeprefix('torch.')}")
    return g.op("Histogram", x, bins=bins, min=float(min), max=float(max))


_INTERPOLATION = ("bilinear", "nearest", "bicubic")
_PADDING = ("zeros", "border", "reflection")


@rule(aten.grid_sampler_2d.default)
def grid_sampler_2d(
    g: Ops, x: Value, grid: Value, interpolation: int, padding: int, align_corners: bool
) -> Value:
    return g.op(
        "GridSampler2D", x, grid, interpolation_mode=_INTERPOLATION[interpolation],
        padding_mode=_PADDING[padding], align_corners=align_corners,
    )  # fmt: skip


@rule(aten.grid_sampler_2d_backward.default)
def grid_sampler_2d_backward(
    g: Ops, dy: Value, x: Value, grid: Value, interpolation: int, padding: int, align_corners: bool,
    mask: Any,
) -> tuple[Value | None, Value | None]:  # fmt: skip
    dx, dgrid = g.ops(
        "GridSampler2DGrad", dy, x, grid, interpolation_mode=_INTERPOLATION[interpolation],
        padding_mode=_PADDING[padding], align_corners=align_corners,
    )  # fmt: skip
    return (dx if mask[0] else None), (dgrid if mask[1] else None)
