"""Antialiased downsampling: weighted sums along one dimension after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dicp.graphop.operators import Ops, Value
from dicp.graphop.rules.pooling import sums_between
from dicp.rules import RuleTable

aten = torch.ops.aten
RULES = RuleTable()
rule = RULES.register


def _scale(size: Any, out: Any, align_corners: bool, given: float | None) -> Any:
    """The number of the input's elements per element of the result."""
    if align_corners:
        return (size - 1) / (out - 1) if out != 1 else 0.0
    return 1.0 / given if given else size / out


class _Taps(NamedTuple):
    """What each result reads along a dimension of the input: `weights` (elements, results) from
    element `start` until `end` of its column, `most` elements at most. The others are not
    multiplied: 0 times an infinity is NaN."""

    weights: Value
    start: Value
    end: Value
    most: Any


def _most(size: Any, out: Any, align_corners: bool, given: float | None) -> Any:
    """The most elements that a result reads: a triangle is as wide as two distances of results, or
    of elements where these are longer."""
    if align_corners:
        size, out, given = size - 1, out - 1, None
        if out == 0:
            return size + 1
    elements = math.floor(2 / given) if given else 2 * size // out
    return torch.sym_max(elements, 2) + 1


def _taps(
    g: Ops, size: Any, out: Any, align_corners: bool, given: float | None, dtype: torch.dtype,
    backward: bool,
) -> _Taps:  # fmt: skip
    """A triangle around each result's position. `backward`: the results that read each element."""
    scale = _scale(size, out, align_corners, given)
    place = g.reshape(g.arange(out, dtype), [out, 1])
    center = g.mul(g.add(place, 0.5), g.number(scale, dtype))
    element = g.reshape(g.arange(size, dtype), [1, size])
    one = g.const(1.0, dtype)
    support = g.op("Maximum", g.number(scale, dtype), one)
    rounded = g.const(0.5, dtype)
    first = g.op("Floor", g.add(g.sub(center, support), rounded))
    last = g.op("Floor", g.add(g.add(center, support), rounded))
    begun, ahead = g.op("GreaterEqual", element, first), g.op("Less", element, last)
    distance = g.op("Abs", g.op("Div", g.sub(g.add(element, 0.5), center), support))
    triangle = g.op("Relu", g.op("Sub", one, distance))
    weights = g.where(g.op("LogicalAnd", begun, ahead), triangle, 0.0, dtype)
    weights = g.op("Div", weights, g.reduce("ReduceSum", weights, [1], True))
    if not backward:
        start = g.sub(size, _count(g, begun, 1))
        most = _most(size, out, align_corners, given)
        return _Taps(g.transpose(weights, [1, 0]), start, _count(g, ahead, 1), most)
    most = _most(out, size, align_corners, 1 / given if given else None)
    return _Taps(weights, g.sub(out, _count(g, ahead, 0)), _count(g, begun, 0), most)


def _count(g: Ops, condition: Value, axis: int) -> Value:
    """The number of elements along an axis for which the condition holds."""
    ones = g.cast(condition, torch.float32)
    return g.cast(g.reduce("ReduceSum", ones, [axis], False), torch.int64)


def _interpolated(
    g: Ops, x: Value, sizes: Sequence[Any], outs: Sequence[Any], align_corners: bool,
    scales: Sequence[float | None], backward: bool = False,
) -> Value:  # fmt: skip
    result = g.wide(x)
    for axis, size, out, given in zip((-2, -1), sizes, outs, scales, strict=True):
        taps = _taps(g, size, out, align_corners, given, result.dtype, backward)
        result = sums_between(
            g, result, x.ndim + axis, taps.start, taps.end, taps.most, taps.weights
        )
    return g.cast(result, x.dtype)


@rule(aten._upsample_bilinear2d_aa.default)
def bilinear(
    g: Ops, x: Value, output_size: Sequence[Any], align_corners: bool,
    scales_h: float | None = None, scales_w: float | None = None,
) -> Value:  # fmt: skip
    scales = scales_h, scales_w
    return _interpolated(g, x, x.shape[-2:], output_size, align_corners, scales)


@rule(aten._upsample_bilinear2d_aa_backward.default)
def bilinear_backward(
    g: Ops, dy: Value, output_size: Sequence[Any], input_size: Sequence[Any], align_corners: bool,
    scales_h: float | None = None, scales_w: float | None = None,
) -> Value:  # fmt: skip
    scales = scales_h, scales_w
    return _interpolated(g, dy, input_size[-2:], output_size, align_corners, scales, backward=True)
