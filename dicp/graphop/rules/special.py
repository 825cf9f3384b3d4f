"""Operators that some vendors have as one: special functions, masks, counts, sampling."""

from __future__ import annotations

import math
from collections.abc import Callable
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

# ---- the gamma function --------------------------------------------------------------------------

STEPS = 8
"""Steps by which the recurrence moves an argument before the asymptotic series is summed: then the
series' first omitted term is below 1e-14."""
_LGAMMA = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156, -3617 / 122400)
_DIGAMMA = (-1 / 12, 1 / 120, -1 / 252, 1 / 240, -1 / 132, 691 / 32760, -1 / 12, 3617 / 8160)
"""B(2k) / (2k (2k - 1)) and -B(2k) / 2k, of the Bernoulli numbers (DLMF 5.11)."""


def _series(g: Ops, factors: tuple[float, ...], z: Value) -> Value:
    """The sum of factors[k] / z^2k."""
    inverse = g.div(1.0, g.op("Square", z))
    total: Any = factors[-1]
    for factor in reversed(factors[:-1]):
        total = g.add(g.mul(inverse, total), factor)
    return total


def _gamma_function(kind: str, compose: Callable[[Ops, Value], Value]) -> Any:
    """The vendor's operator, else `compose` in float64, where the vendor takes that."""

    def apply(g: Ops, x: Value) -> Value:
        x, wide = g.cast(x, g.dtype), torch.float64
        kinds = ("Log", "Sin", "Cos")
        double = g.dtype != wide and all(g.takes(name, "x", wide) for name in kinds)
        if g.takes(kind, "x", g.wide(x).dtype) or not double:
            return g.op(kind, x)
        return g.cast(compose(g, g.cast(x, wide)), g.dtype)

    return apply


def _reflected(g: Ops, x: Value) -> tuple[Value, Value, Value]:
    """Whether x is replaced by 1 - x, the one of them that is at least 1/2, and the distance of x
    above the nearest integer."""
    low = g.op("Less", x, g.number(0.5, x.dtype))
    return low, g.where(low, g.sub(1.0, x), x, x.dtype), g.sub(x, g.op("Round", x))


def _lgamma(g: Ops, x: Value) -> Value:
    """log |G(y)| = (z - 1/2) (log z - 1) - 1/2 + log(2 pi) / 2 + series - log(y (y + 1) ...), and
    |G(x) G(1 - x)| = pi / |sin(pi x)|."""
    low, y, offset = _reflected(g, x)
    small = g.op("Less", y, g.number(float(STEPS), y.dtype))
    product = y
    for k in range(1, STEPS):
        product = g.mul(product, g.add(y, float(k)))
    z = g.where(small, g.add(y, float(STEPS)), y, y.dtype)
    terms = g.add(g.div(_series(g, _LGAMMA, z), z), 0.5 * math.log(2 * math.pi) - 0.5)
    high = g.add(g.mul(g.add(z, -0.5), g.add(g.op("Log", z), -1.0)), terms)
    high = g.sub(high, g.op("Log", g.where(small, product, 1.0, y.dtype)))
    sine = g.op("Sin", g.mul(g.op("Abs", offset), math.pi))
    reflected = g.sub(g.op("Log", g.div(math.pi, sine)), high)
    both = g.where(low, reflected, high, x.dtype)
    zeros = g.op("Equal", g.mul(g.add(x, -1.0), g.add(x, -2.0)), g.number(0, x.dtype))
    return g.where(g.op("IsInf", x), math.inf, g.where(zeros, 0.0, both, x.dtype), x.dtype)


def _digamma(g: Ops, x: Value) -> Value:
    """The derivative of `_lgamma`; NaN at negative integers, -+inf at +-0."""
    low, y, offset = _reflected(g, x)
    small = g.op("Less", y, g.number(float(STEPS), y.dtype))
    sums = g.div(1.0, y)
    for k in range(1, STEPS):
        sums = g.add(sums, g.div(1.0, g.add(y, float(k))))
    z = g.where(small, g.add(y, float(STEPS)), y, y.dtype)
    tail = g.sub(g.div(_series(g, _DIGAMMA, z), g.op("Square", z)), g.div(0.5, z))
    high = g.sub(g.add(g.op("Log", z), tail), g.where(small, sums, 0.0, y.dtype))
    angle = g.mul(offset, math.pi)
    slope = g.div(g.op("Cos", angle), g.op("Sin", angle))
    slope = g.where(g.op("Equal", offset, g.number(0, x.dtype)), math.nan, slope, x.dtype)
    both = g.where(low, g.sub(high, g.mul(slope, math.pi)), high, x.dtype)
    at_zero = g.op("Equal", x, g.number(0, x.dtype))
    return g.where(at_zero, g.div(-1.0, x), both, x.dtype)


RULES.add(aten.lgamma.default, _gamma_function("Lgamma", _lgamma))
RULES.add(aten.digamma.default, _gamma_function("Digamma", _digamma))


# ---- masks, counts, sampling ---------------------------------------------------------------------


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
    last = g.reshape(place, [count, 1])  # unmasked elements go behind the end
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
