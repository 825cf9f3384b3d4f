"""Padding by a number, by reflection and by repetition, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dicp.graphop.operators import Ops, Value
from dicp.rules import RuleTable

aten = torch.ops.aten
RULES = RuleTable()
rule = RULES.register


def pad(g: Ops, x: Value, widths: Sequence[Any], value: Any = None) -> Value:
    """`widths` as F.pad's: before and after, from the last dimension on; zeros by default."""
    pairs = [(widths[k], widths[k + 1]) for k in range(0, len(widths), 2)]
    pairs += [(0, 0)] * (x.ndim - len(pairs))
    for dim, (before, after) in enumerate(reversed(pairs)):
        if not (g.proves(before >= 0) and g.proves(after >= 0)):
            start, end = (torch.sym_max(-width, 0) for width in (before, after))
            x = g.slice(x, dim, start, x.shape[dim] - end)
    positive = [torch.sym_max(width, 0) for pair in reversed(pairs) for width in pair]
    if all(isinstance(w, int) and w == 0 for w in positive):
        return g.op("Identity", x)
    fill = g.number(0 if value is None else value, x.dtype)
    return g.op("Pad", x, g.ints(positive), fill)


RULES.update({
    aten.constant_pad_nd.default: lambda g, x, widths, value=0: pad(g, x, widths, value),
    (aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default):
        lambda g, x, widths: _take_padded(g, x, widths, _reflected),
    (aten.replication_pad1d.default, aten.replication_pad2d.default,
     aten.replication_pad3d.default):
        lambda g, x, widths: _take_padded(g, x, widths, _clamped_place),
    (aten.reflection_pad1d_backward.default, aten.reflection_pad2d_backward.default,
     aten.reflection_pad3d_backward.default):
        lambda g, dy, x, widths: _give_padded(g, dy, x, widths, _reflected),
    (aten.replication_pad1d_backward.default, aten.replication_pad2d_backward.default,
     aten.replication_pad3d_backward.default):
        lambda g, dy, x, widths: _give_padded(g, dy, x, widths, _clamped_place),
})  # fmt: skip


def _reflected(g: Ops, place: Value, last: Value) -> Value:
    return g.sub(last, g.op("Abs", g.sub(last, g.op("Abs", place))))


def _clamped_place(g: Ops, place: Value, last: Value) -> Value:
    return g.op("Minimum", g.op("Maximum", place, g.const(0, torch.int64)), last)


def padded_places(g: Ops, size: Any, before: Any, after: Any, fold: Any) -> Value:
    """The source of each element of a padded dimension."""
    places = g.add(g.arange(size + before + after), g.number(-before, torch.int64))
    return fold(g, places, g.number(size - 1, torch.int64))


def _take_padded(g: Ops, x: Value, widths: Sequence[Any], fold: Any) -> Value:
    for k in range(0, len(widths), 2):
        dim = x.ndim - 1 - k // 2
        before, after = widths[k], widths[k + 1]
        if isinstance(before, int) and isinstance(after, int) and before == after == 0:
            continue
        places = padded_places(g, x.shape[dim], before, after, fold)
        x = g.op("Gather", x, places, g.const(dim, torch.int64))
    return x


def _give_padded(g: Ops, dy: Value, x: Value, widths: Sequence[Any], fold: Any) -> Value:
    """Each gradient added at its element's source."""
    dtype = dy.dtype
    dy = g.wide(dy)
    for k in range(0, len(widths), 2):
        dim = x.ndim - 1 - k // 2
        places = padded_places(g, x.shape[dim], widths[k], widths[k + 1], fold)
        dy = add_at(g, dy, dim, places, x.shape[dim])
    return g.cast(dy, dtype)


def add_at(g: Ops, dy: Value, dim: int, places: Value, size: Any) -> Value:
    """Zeros of `size` along `dim` to which `dy` is added at `places` (a vector)."""
    shape = list(dy.shape)
    shape[dim] = size
    index = g.along(places, dim, dy.shape)
    zeros = g.full(shape, 0, dy.dtype)
    return g.op("ScatterElements", zeros, index, dy, axis=dim, reduction="add")
