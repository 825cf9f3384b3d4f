"""Bags of embeddings: looked-up rows, summed, averaged or reduced to their maximum per bag."""

from __future__ import annotations

import math
from typing import Any

import torch

from dicp.graphop.operators import NoRule, Ops, Value
from dicp.graphop.rules.indexing import add_rows
from dicp.rules import RuleTable

aten = torch.ops.aten
RULES = RuleTable()
rule = RULES.register

SUM, MEAN, MAX = range(3)


def _bags(g: Ops, indices: Value, offsets: Value) -> Value:
    """The number of each index's bag: how many bags begin before or with it, less one; 0 before
    the first, which is an error."""
    positions = g.arange(indices.shape[0], offsets.dtype)
    count = g.op("SearchSorted", offsets, positions, dtype=torch.int64, right=True)
    return g.op("Maximum", g.add(count, -1), g.const(0, torch.int64))


def _counted(g: Ops, indices: Value, padding_idx: int) -> Value:
    """1 for each index that counts, 0 for padding."""
    if padding_idx < 0:
        return g.full([indices.shape[0]], 1, torch.int64)
    other = g.op("NotEqual", indices, g.number(padding_idx, indices.dtype))
    return g.cast(other, torch.int64)


def _without_padding(g: Ops, values: Value, indices: Value, padding_idx: int) -> Value:
    """The values of each index, 0 for padding, whose own may be infinite."""
    if padding_idx < 0:
        return values
    padding = g.op("Equal", indices, g.number(padding_idx, indices.dtype))
    padding = g.reshape(padding, [padding.shape[0], *[1] * (values.ndim - 1)])
    return g.where(g.broadcast(padding, values.shape), 0.0, values, values.dtype)


def _per_bag(g: Ops, bags: Value, values: Value, count: Any) -> Value:
    """The sum of each bag's rows."""
    zeros = g.full([count, *values.shape[1:]], 0, values.dtype)
    return add_rows(g, zeros, bags, values)


@rule(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    g: Ops, weight: Value, indices: Value, offsets: Value, scale_grad_by_freq: bool = False,
    mode: int = 0, sparse: bool = False, per_sample_weights: Value | None = None,
    include_last_offset: bool = False, padding_idx: int = -1,
) -> tuple[Value, ...]:  # fmt: skip
    """The bags; each index's bag; each bag's size; each maximum's row."""
    bags = _bags(g, indices, offsets)
    count = g.shape[0]
    wide = g.wide(weight)
    looked_up = g.op("Gather", wide, indices, g.const(0, torch.int64))
    counted = _counted(g, indices, padding_idx)
    sizes = _per_bag(g, bags, counted, count)
    positions = None
    if mode == MAX:
        out, positions = _largest(g, looked_up, indices, bags, counted, sizes)
    else:
        if per_sample_weights is not None:
            share = g.cast(per_sample_weights, wide.dtype)
            looked_up = g.op("Mul", looked_up, g.unsqueeze(share, 1))
        looked_up = _without_padding(g, looked_up, indices, padding_idx)
        out = _per_bag(g, bags, looked_up, count)
        if mode == MEAN:
            divisor = g.op("Maximum", sizes, g.const(1, torch.int64))
            out = g.op("Div", out, g.unsqueeze(g.cast(divisor, wide.dtype), 1))
    results = [out, bags, sizes, positions if positions is not None else sizes]
    return tuple(
        g.cast(value, meta.dtype) if g.same_shape(value.shape, meta.shape)
        else g.full(list(meta.shape), 0, meta.dtype)
        for value, meta in zip(results, g.meta, strict=True)
    )  # fmt: skip


def _largest(
    g: Ops, rows: Value, indices: Value, bags: Value, counted: Value, sizes: Value
) -> tuple[Value, Value]:
    """Each bag's maxima, 0 for an empty bag, and the rows of the table that they come from.

    As in eager, which looks for larger values from a bag's first row on: NaN stays if it is there,
    and is passed over in later rows.
    """
    count, total, width = sizes.shape[0], rows.shape[0], rows.shape[1]
    shape, result = [total, width], [count, width]
    ranks, last = g.arange(total), g.number(total - 1, torch.int64)
    axis = g.const(0, torch.int64)
    counts = g.truth(counted)
    leaders = g.where(counts, ranks, total, torch.int64)
    behind = g.full([count], total, torch.int64)
    leaders = g.op("ScatterElements", behind, bags, leaders, axis=0, reduction="min")
    leading = g.op("Gather", rows, g.op("Minimum", leaders, last), axis)
    stays = g.op("IsNan", leading)

    real = g.op("LogicalAnd", g.along(counts, 0, shape), g.op("LogicalNot", g.op("IsNan", rows)))
    rows = g.where(real, rows, -math.inf, rows.dtype)
    where = g.along(bags, 0, shape)
    lowest = g.full(result, -math.inf, rows.dtype)
    found = g.op("ScatterElements", lowest, where, rows, axis=0, reduction="max")
    best = g.op("GatherElements", found, where, dim=0)
    hit = g.op("LogicalAnd", g.op("Equal", rows, best), real)
    place = g.where(hit, g.along(ranks, 0, shape), total, torch.int64)
    behind = g.full(result, total, torch.int64)
    first = g.op("ScatterElements", behind, where, place, axis=0, reduction="min")
    first = g.where(stays, g.along(leaders, 0, result), first, torch.int64)
    row = g.op("Gather", g.cast(indices, torch.int64), g.op("Minimum", first, last), axis)
    found = g.where(stays, leading, found, found.dtype)
    empty = g.along(g.op("Equal", sizes, g.const(0, torch.int64)), 0, result)
    return g.where(empty, 0.0, found, found.dtype), g.where(empty, 0, row, torch.int64)


@rule(aten._embedding_bag_backward.default)
def embedding_bag_backward(
    g: Ops, dy: Value, indices: Value, offsets: Value, offset2bag: Value, *rest: Any
) -> Value:
    # `offset2bag` is empty where forward did not need it: the bags are counted again
    sizes, positions, count, by_frequency, mode, sparse, *more = rest
    if sparse:
        raise NoRule("a sparse gradient")
    bags = _bags(g, indices, offsets)
    return _table_gradient(g, dy, indices, bags, sizes, positions, count, by_frequency, mode, *more)


@rule(aten._embedding_bag_dense_backward.default)
def _table_gradient(
    g: Ops, dy: Value, indices: Value, bags: Value, sizes: Value, positions: Value, count: Any,
    by_frequency: bool, mode: int, per_sample: Value | None, padding_idx: int = -1,
) -> Value:  # fmt: skip
    """Each bag's gradient, added to the rows of the table that the bag has read."""
    if by_frequency:
        raise NoRule("scale_grad_by_freq, by which eager's devices divide differently")
    wide = g.wide(dy)
    if mode == MAX:
        return g.cast(_to_maxima(g, wide, sizes, positions, count), dy.dtype)
    if mode == MEAN:
        divisor = g.op("Maximum", sizes, g.const(1, sizes.dtype))
        wide = g.op("Div", wide, g.unsqueeze(g.cast(divisor, wide.dtype), 1))
    spread = g.op("Gather", wide, bags, g.const(0, torch.int64))
    if per_sample is not None:
        spread = g.op("Mul", spread, g.unsqueeze(g.cast(per_sample, wide.dtype), 1))
    spread = _without_padding(g, spread, indices, padding_idx)
    return g.cast(_per_bag(g, indices, spread, count), dy.dtype)


def _to_maxima(g: Ops, dy: Value, sizes: Value, positions: Value, count: Any) -> Value:
    """Each gradient added where its maximum was; an empty bag has none."""
    full = g.op("Greater", sizes, g.const(0, sizes.dtype))
    dy = g.where(g.along(full, 0, dy.shape), dy, 0.0, dy.dtype)
    zeros = g.full([count, dy.shape[1]], 0, dy.dtype)
    places = g.cast(positions, torch.int64)
    return g.op("ScatterElements", zeros, places, dy, axis=0, reduction="add")


@rule(aten._embedding_bag_per_sample_weights_backward.default)
def per_sample_weights_backward(
    g: Ops, dy: Value, weight: Value, indices: Value, offsets: Value, offset2bag: Value, mode: int,
    padding_idx: int = -1,
) -> Value:  # fmt: skip
    """The product of each looked-up row and its bag's gradient."""
    axis = g.const(0, torch.int64)
    rows = g.op("Gather", g.wide(weight), indices, axis)
    spread = g.op("Gather", g.wide(dy), _bags(g, indices, offsets), axis)
    total = g.reduce("ReduceSum", g.op("Mul", rows, spread), [1], False)
    return g.cast(_without_padding(g, total, indices, padding_idx), g.dtype)
