"""Pooling and its gradients: the vendor's where it fits, else windows gathered by position."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dicp.dtypes import opmath_dtype
from dicp.graphop.operators import NoRule, Ops, Value, per_axis
from dicp.rules import RuleTable

aten = torch.ops.aten
RULES = RuleTable()
rule = RULES.register


def _axis_places(
    g: Ops, count: Any, kernel: int, stride: int, padding: int, dilation: int
) -> Value:
    """(count, kernel): the position of each element of each window along one dimension."""
    starts = g.add(g.mul(g.arange(count), stride), -padding)
    steps = g.mul(g.arange(kernel), dilation)
    return g.add(g.reshape(starts, [count, 1]), g.reshape(steps, [1, kernel]))


class Windows:
    """Positions of all windows over the last `rank` dimensions, flattened, and which are inside."""

    def __init__(
        self, g: Ops, x: Value, out: Sequence[Any], kernel: Sequence[int], stride: Sequence[int],
        padding: Sequence[int], dilation: Sequence[int],
    ) -> None:  # fmt: skip
        rank = len(kernel)
        self.sizes = list(x.shape[x.ndim - rank :])
        self.lead = list(x.shape[: x.ndim - rank])
        self.out = list(out)
        self.count, self.area = math.prod(self.out), math.prod(kernel)
        flat: Value | None = None
        inside: Value | None = None
        for axis in range(rank):
            places = _axis_places(
                g, out[axis], kernel[axis], stride[axis], padding[axis], dilation[axis]
            )
            shape: list[Any] = [1] * (2 * rank)
            shape[axis], shape[rank + axis] = out[axis], kernel[axis]
            places = g.reshape(places, shape)
            size = g.number(self.sizes[axis], torch.int64)
            fits = g.op("LogicalAnd", g.op("GreaterEqual", places, g.const(0, torch.int64)),
                        g.op("Less", places, size))  # fmt: skip
            inside = fits if inside is None else g.op("LogicalAnd", inside, fits)
            flat = places if flat is None else g.add(g.mul(flat, self.sizes[axis]), places)
        assert flat is not None and inside is not None
        shape = [*self.out, *kernel]
        self.flat = g.reshape(g.broadcast(flat, shape), [self.count, self.area])
        self.inside = g.reshape(g.broadcast(inside, shape), [self.count, self.area])

    def gather(self, g: Ops, x: Value, fill: Any) -> Value:
        """(lead..., count, area): the elements of each window, `fill` outside."""
        size = math.prod(self.sizes)
        flat = g.reshape(x, [*self.lead, size])
        safe = g.where(self.inside, self.flat, 0, torch.int64)
        picked = g.op("Gather", flat, safe, g.const(flat.ndim - 1, torch.int64))
        return g.where(self.inside, picked, fill, x.dtype)


def _max_with_indices(
    g: Ops, x: Value, kernel: Any, stride: Any, padding: Any, dilation: Any, rank: int
) -> tuple[Value, Value]:
    out = g.meta[0].shape[-rank:]
    geometry = (per_axis(v, rank) for v in (kernel, stride or kernel, padding, dilation))
    windows = Windows(g, x, out, *geometry)
    lowest = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    picked = windows.gather(g, x, lowest)
    best = g.unsqueeze(_place_of_max(g, windows, picked), picked.ndim - 1)
    values = g.op("GatherElements", picked, best, dim=picked.ndim - 1)
    places = g.broadcast(windows.flat, picked.shape)
    where = g.op("GatherElements", places, best, dim=picked.ndim - 1)
    shape = g.meta[0].shape
    return g.reshape(values, shape), g.reshape(where, shape)


def _place_of_max(g: Ops, windows: Windows, picked: Value) -> Value:
    """The position of each window's maximum in eager: the last NaN, else the first of the largest.

    No position outside counts, not even where all elements inside are the lowest number.
    """
    last = picked.ndim - 1
    order = g.arange(windows.area, torch.float32)
    top = g.op("GreaterEqual", picked, g.reduce("ReduceMax", picked, [last], True))
    early = g.where(g.op("LogicalAnd", top, windows.inside), g.sub(windows.area, order), 0.0,
                    torch.float32)  # fmt: skip
    if picked.dtype.is_floating_point:
        late = g.add(order, windows.area + 1)
        early = g.where(g.op("IsNan", picked), late, early, torch.float32)
    return g.op("ArgMax", early, g.const(last, torch.int64), dtype=torch.int64)


def _window_attrs(kernel: Any, stride: Any, padding: Any, ceil_mode: bool) -> dict[str, Any]:
    """The attributes that the vendors' operators on images describe windows by."""
    return {
        "ksize": [1, 1, *per_axis(kernel, 2)],
        "strides": [1, 1, *per_axis(stride or kernel, 2)],
        "padding_mode": "CALCULATED",
        "pads": [p for pad in per_axis(padding, 2) for p in (pad, pad)],
        "data_format": "NCHW",
        "ceil_mode": ceil_mode,
    }


def _within_limits(g: Ops, attrs: Mapping[str, Any]) -> bool:
    """Whether the vendor's pooling takes such windows."""
    return math.prod(attrs["ksize"]) <= g.largest_window and max(attrs["strides"]) <= g.largest_step


@rule(aten.max_pool2d_with_indices.default)
def max_pool2d(
    g: Ops, x: Value, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[Value, Value | None]:  # fmt: skip
    attrs = _window_attrs(kernel, stride, padding, ceil_mode)
    takes = x.ndim == 4 and g.takes("MaxPool2D", "x", x.dtype) and _within_limits(g, attrs)
    if g.is_read(1) or not takes or set(per_axis(dilation, 2)) != {1}:
        return _max_with_indices(g, x, kernel, stride, padding, dilation, 2)
    return g.op("MaxPool2D", x, **attrs), None


@rule(aten.max_pool3d_with_indices.default)
def max_pool3d(
    g: Ops, x: Value, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[Value, Value | None]:  # fmt: skip
    return _max_with_indices(g, x, kernel, stride, padding, dilation, 3)


def _max_backward(g: Ops, dy: Value, x: Value, indices: Value, rank: int) -> Value:
    """Each gradient added at its maximum's position."""
    lead = list(x.shape[: x.ndim - rank])
    size = math.prod(x.shape[x.ndim - rank :])
    count = math.prod(dy.shape[dy.ndim - rank :])
    flat = g.reshape(g.wide(dy), [*lead, count])
    places = g.reshape(indices, [*lead, count])
    zeros = g.full([*lead, size], 0, flat.dtype)
    out = g.op("ScatterElements", zeros, places, flat, axis=len(lead), reduction="add")
    return g.cast(g.reshape(out, x.shape), dy.dtype)


RULES.update({
    aten.max_pool2d_with_indices_backward.default:
        lambda g, dy, x, *geometry: _max_backward(g, dy, x, geometry[-1], 2),
    aten.max_pool3d_with_indices_backward.default:
        lambda g, dy, x, *geometry: _max_backward(g, dy, x, geometry[-1], 3),
    (aten.adaptive_max_pool2d_backward.default, aten.fractional_max_pool2d_backward.default):
        lambda g, dy, x, *rest: _max_backward(g, dy, x, rest[-1], 2),
    (aten.adaptive_max_pool3d_backward.default, aten.fractional_max_pool3d_backward.default):
        lambda g, dy, x, *rest: _max_backward(g, dy, x, rest[-1], 3),
})  # fmt: skip


# ---- averages ------------------------------------------------------------------------------------


@rule(aten.avg_pool2d.default)
def avg_pool2d(
    g: Ops, x: Value, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Value:  # fmt: skip
    attrs = _window_attrs(kernel, stride, padding, ceil_mode)
    takes = _within_limits(g, attrs) and g.takes("AvgPool2D", "x", x.dtype)
    if not takes or (divisor_override or 0) > g.largest_window:
        return _average(g, x, 2, kernel, stride, padding, ceil_mode, count_include_pad,
                        divisor_override)  # fmt: skip
    batched = x if x.ndim == 4 else g.unsqueeze(x, 0)
    out = g.op("AvgPool2D", batched, **attrs, exclusive=not count_include_pad,
               divisor_override=divisor_override or 0)  # fmt: skip
    return g.reshape(out, g.shape)


@rule(aten.avg_pool2d_backward.default)
def avg_pool2d_backward(
    g: Ops, dy: Value, x: Value, kernel: Any, stride: Any, padding: Any, ceil_mode: bool,
    count_include_pad: bool, divisor_override: int | None,
) -> Value:  # fmt: skip
    attrs = _window_attrs(kernel, stride, padding, ceil_mode)
    takes = _within_limits(g, attrs) and g.takes("AvgPool2DGrad", "input_grad", dy.dtype)
    if not (takes and _are_numbers(x.shape)):
        return _average_backward(g, dy, x, 2, kernel, stride, padding, ceil_mode, count_include_pad,
                                 divisor_override)  # fmt: skip
    if divisor_override:  # the operator divides by the window's area
        if ceil_mode:
            raise NoRule("divisor_override and ceil_mode: windows may reach beyond the padding")
        area = math.prod(attrs["ksize"])
        dy = g.cast(g.mul(g.wide(dy), area / divisor_override), dy.dtype)
    shape = x.shape if x.ndim == 4 else (1, *x.shape)
    batched = dy if dy.ndim == 4 else g.unsqueeze(dy, 0)
    sizes, exclusive = g.ints(list(shape), torch.int32), not (count_include_pad or divisor_override)
    return g.reshape(g.op("AvgPool2DGrad", sizes, batched, **attrs, exclusive=exclusive), g.shape)


class Averages:
    """Windows of an average over the last dimensions, and the divisor of each sum."""

    def __init__(
        self, g: Ops, x: Value, out: Sequence[Any], kernel: Any, stride: Any, padding: Any,
        ceil_mode: bool, count_include_pad: bool, divisor: int | None,
    ) -> None:  # fmt: skip
        if ceil_mode:
            raise NoRule("ceil_mode: windows may reach beyond the padding")
        rank = len(out)
        geometry = (per_axis(v, rank) for v in (kernel, stride or kernel, padding, 1))
        self.windows = Windows(g, x, out, *geometry)
        self.dtype = opmath_dtype(x.dtype)
        if divisor or count_include_pad:
            self.divisor = g.number(divisor or self.windows.area, self.dtype)
        else:
            inside = g.cast(self.windows.inside, self.dtype)
            self.divisor = g.reduce("ReduceSum", inside, [1], False)


@rule(aten.avg_pool3d.default)
def avg_pool3d(
    g: Ops, x: Value, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Value:  # fmt: skip
    return _average(g, x, 3, kernel, stride, padding, ceil_mode, count_include_pad,
                    divisor_override)  # fmt: skip


def _average(
    g: Ops, x: Value, rank: int, kernel: Any, stride: Any, padding: Any, ceil_mode: bool,
    count_include_pad: bool, divisor: int | None,
) -> Value:  # fmt: skip
    mean = Averages(
        g, x, g.shape[-rank:], kernel, stride, padding, ceil_mode, count_include_pad, divisor
    )
    picked = mean.windows.gather(g, g.cast(x, mean.dtype), 0)
    total = g.reduce("ReduceSum", picked, [picked.ndim - 1], False)
    kind = "Div" if mean.dtype.is_floating_point else "TruncateDiv"
    return g.cast(g.reshape(g.op(kind, total, mean.divisor), g.shape), x.dtype)


@rule(aten.avg_pool3d_backward.default)
def avg_pool3d_backward(
    g: Ops, dy: Value, x: Value, kernel: Any, stride: Any, padding: Any, ceil_mode: bool,
    count_include_pad: bool, divisor_override: int | None,
) -> Value:  # fmt: skip
    return _average_backward(g, dy, x, 3, kernel, stride, padding, ceil_mode, count_include_pad,
                             divisor_override)  # fmt: skip


def _average_backward(
    g: Ops, dy: Value, x: Value, rank: int, kernel: Any, stride: Any, padding: Any, ceil_mode: bool,
    count_include_pad: bool, divisor: int | None,
) -> Value:  # fmt: skip
    """Each window's divided gradient, added to all elements of the window."""
    mean = Averages(
        g, x, dy.shape[-rank:], kernel, stride, padding, ceil_mode, count_include_pad, divisor
    )
    windows = mean.windows
    grads = g.reshape(g.cast(dy, mean.dtype), [*windows.lead, windows.count])
    grads = g.unsqueeze(g.op("Div", grads, mean.divisor), len(windows.lead) + 1)
    grads = g.where(windows.inside, grads, 0.0, mean.dtype)
    places = g.where(windows.inside, windows.flat, 0, torch.int64)
    flat = [*windows.lead, windows.count * windows.area]
    index = g.reshape(g.broadcast(places, grads.shape), flat)
    zeros = g.full([*windows.lead, math.prod(windows.sizes)], 0, mean.dtype)
    out = g.op("ScatterElements", zeros, index, g.reshape(grads, flat), axis=len(windows.lead),
               reduction="add")  # fmt: skip
    return g.cast(g.reshape(out, x.shape), dy.dtype)


@rule(aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool3d(g: Ops, x: Value, output_size: Sequence[Any]) -> Value:
    return _adaptive_average(g, x, output_size)


@rule(aten._adaptive_avg_pool3d_backward.default)
def adaptive_avg_pool3d_backward(g: Ops, dy: Value, x: Value) -> Value:
    return _adaptive_backward(g, dy, x, 3)


def _adaptive_average(g: Ops, x: Value, outs: Sequence[Any]) -> Value:
    """The mean of each window over the last dimensions."""
    first = x.ndim - len(outs)
    total = g.wide(x)
    for axis, out in enumerate(outs, start=first):
        total = _window_sums(g, total, axis, out)
    return g.cast(_per_element(g, total, x.shape[first:]), x.dtype)


def _adaptive_backward(g: Ops, dy: Value, x: Value, rank: int) -> Value:
    """Each window's gradient, divided, added to all elements of the window. An element's windows
    follow each other: they are those of a mean of `dy` for as many results as `x` has elements."""
    first = x.ndim - rank
    total = _per_element(g, g.wide(dy), x.shape[first:])
    for axis in range(first, x.ndim):
        total = _window_sums(g, total, axis, x.shape[axis])
    return g.cast(total, dy.dtype)


@rule(aten.adaptive_max_pool2d.default)
def adaptive_max_pool2d(g: Ops, x: Value, output_size: Sequence[Any]) -> tuple[Value, Value]:
    if not _are_numbers(output_size):
        raise NoRule("symbolic sizes of the result")
    batched = x if x.ndim == 4 else g.unsqueeze(x, 0)
    y, places = g.ops("AdaptiveMaxPool2D", batched, output_size=list(output_size))
    return g.reshape(y, g.shape), g.cast(g.reshape(places, g.shape), torch.int64)


def _bounds(g: Ops, size: Any, out: Any) -> tuple[Value, Value]:
    """The start and the end of each window along a dimension."""
    window, count = g.arange(out), g.number(out, torch.int64)
    start = g.op("FloorDiv", g.mul(window, size), count)
    end = g.op("FloorDiv", g.add(g.mul(g.add(window, 1), size), out - 1), count)
    return start, end


def _are_equal(size: Any, out: Any) -> bool:
    """Whether windows along a dimension are known to have one length and not to overlap."""
    return isinstance(size, int) and isinstance(out, int) and size % out == 0


def _window_sums(g: Ops, x: Value, axis: int, out: Any) -> Value:
    """The sum of each window along a dimension; no element counts in another window."""
    size = x.shape[axis]
    if g.same(out, 0):
        raise NoRule("no window")
    if _are_equal(size, out):
        windows = g.reshape(x, [*x.shape[:axis], out, size // out, *x.shape[axis + 1 :]])
        return g.reduce("ReduceSum", windows, [axis + 1], False)
    start, end = _bounds(g, size, out)
    return sums_between(g, x, axis, start, end, (size + out - 1) // out + 1)


def sums_between(
    g: Ops, x: Value, axis: int, start: Value, end: Value, most: Any, weights: Value | None = None
) -> Value:
    """The sum of each window along a dimension: of `most` elements at most, from `start` until
    `end`, times their weights in the window's column of `weights`."""
    size = x.shape[axis]
    places = g.add(start, g.reshape(g.arange(most), [-1, 1]))
    inside = g.op("Less", places, end)
    zeros = g.full([1 if d == axis else n for d, n in enumerate(x.shape)], 0, x.dtype)
    padded = g.concat([x, zeros], axis)
    outside = g.where(inside, places, size, torch.int64)
    picked = g.op("Gather", padded, outside, g.const(axis, torch.int64))
    if weights is not None:
        weights = g.op("GatherElements", weights, g.where(inside, places, 0, torch.int64), dim=0)
        shape = [*weights.shape, *[1] * (x.ndim - axis - 1)]
        picked = g.op("Mul", picked, g.reshape(weights, shape))
    return g.reduce("ReduceSum", picked, [axis], False)


def _per_element(g: Ops, total: Value, sizes: Sequence[Any]) -> Value:
    """The sums of windows over dimensions of these sizes, the last ones, divided by the windows'
    lengths."""
    first = total.ndim - len(sizes)
    for axis, size in enumerate(sizes, start=first):
        out = total.shape[axis]
        if _are_equal(size, out):
            total = g.div(total, size // out)
            continue
        start, end = _bounds(g, size, out)
        length = g.cast(g.sub(end, start), total.dtype)
        total = g.op("Div", total, g.reshape(length, [-1, *[1] * (total.ndim - axis - 1)]))
    return total


def _are_numbers(sizes: Sequence[Any]) -> bool:
    return all(isinstance(size, int) for size in sizes)


@rule(aten._adaptive_avg_pool2d.default)
def adaptive_avg_pool2d(g: Ops, x: Value, output_size: Sequence[Any]) -> Value:
    if all(g.same(s, 1) for s in output_size):
        return g.reduce("ReduceMean", x, [x.ndim - 2, x.ndim - 1], True)
    if _are_numbers(output_size) and g.takes("AdaptiveAvgPool2D", "x", x.dtype):
        return g.op("AdaptiveAvgPool2D", x, output_size=list(output_size))
    return _adaptive_average(g, x, output_size)


@rule(aten._adaptive_avg_pool2d_backward.default)
def adaptive_avg_pool2d_backward(g: Ops, dy: Value, x: Value) -> Value:
    if all(g.same(s, 1) for s in dy.shape[-2:]):
        area = x.shape[-1] * x.shape[-2]
        wide = g.wide(dy)
        return g.broadcast(g.cast(g.div(wide, area), dy.dtype), x.shape)
    if _are_numbers(x.shape) and g.takes("AdaptiveAvgPool2DGrad", "input_grad", dy.dtype):
        return g.op("AdaptiveAvgPool2DGrad", dy, orig_input_shape=list(x.shape))
    return _adaptive_backward(g, dy, x, 2)
