"""Gathering and scattering by indices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dicp.graphop.operators import NoRule, Ops, Value
from dicp.rules import RuleTable

aten = torch.ops.aten
RULES = RuleTable()
rule = RULES.register


def from_start(g: Ops, index: Value, size: Any) -> Value:
    """Indices counted from the start: negative ones count from the end."""
    index = g.cast(index, torch.int64)
    end = g.add(index, g.number(size, torch.int64))
    return g.op("Select", g.op("Less", index, g.const(0, torch.int64)), end, index)


@rule(aten.embedding.default)
def embedding(
    g: Ops, weight: Value, indices: Value, padding_idx: Any = -1, *options: Any, **named: Any
) -> Value:
    return g.op("Gather", weight, indices, g.const(0, torch.int64))


@rule(aten.index_select.default)
def index_select(g: Ops, x: Value, dim: int, index: Value) -> Value:
    if x.ndim == 0:
        return g.op("Identity", x)
    flat = g.reshape(index, [math.prod(index.shape)])
    return g.op("Gather", x, flat, g.const(dim % x.ndim, torch.int64))


@rule(aten.gather.default)
def gather(g: Ops, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    if _is_empty(index):
        return g.full(index.shape, 0, x.dtype)
    if x.ndim == 0 or index.ndim == 0:
        return g.broadcast(g.reshape(x, [1] * index.ndim), index.shape)
    return g.op("GatherElements", x, index, dim=dim % x.ndim)


def _is_empty(index: Value) -> bool:
    """An empty index may have another number of dimensions than the indexed tensor."""
    return any(isinstance(size, int) and size == 0 for size in index.shape)


@rule(aten.take.default)
def take(g: Ops, x: Value, index: Value) -> Value:
    size = math.prod(x.shape)
    places = from_start(g, index, size)
    return g.op("Gather", g.reshape(x, [size]), places, g.const(0, torch.int64))


# ---- x[i, :, j] ----------------------------------------------------------------------------------


def _check_not_mask(index: Value) -> None:
    if index.dtype in (torch.bool, torch.uint8):
        raise NoRule("a mask as an index: the size of its result depends on data")


class Indexed:
    """The dimensions of `x` that are indexed, moved to the front, and the indices' common shape."""

    def __init__(self, g: Ops, x: Value, indices: Sequence[Value | None]) -> None:
        self.dims = [d for d, index in enumerate(indices) if index is not None]
        self.rest = [d for d in range(x.ndim) if d not in self.dims]
        given = [i for i in indices if i is not None]
        for index in given:
            _check_not_mask(index)
        self.shape = _broadcast_shape(g, given)
        self.order = [*self.dims, *self.rest]
        places = [from_start(g, i, x.shape[d]) for i, d in zip(given, self.dims, strict=True)]
        spread = tuple(g.broadcast(p, self.shape) for p in places)
        self.index = g.op("Stack", spread, axis=len(self.shape), N=len(spread))

    @property
    def adjacent(self) -> bool:
        return self.dims == list(range(self.dims[0], self.dims[0] + len(self.dims)))

    def result_order(self) -> list[int]:
        """The position of the indices' dimensions in eager's result, from (indices, rest)."""
        count = len(self.shape)
        if not self.adjacent:
            return list(range(count + len(self.rest)))
        before = [k for k, d in enumerate(self.rest) if d < self.dims[0]]
        after = [k for k, d in enumerate(self.rest) if d > self.dims[0]]
        return [*(count + k for k in before), *range(count), *(count + k for k in after)]


def _only(indices: Sequence[Value | None]) -> tuple[int, Value]:
    """The indexed dimension, if there is only one, and its index."""
    ((dim, index),) = [(d, index) for d, index in enumerate(indices) if index is not None]
    return dim, index


def _broadcast_shape(g: Ops, values: Sequence[Value]) -> list[Any]:
    rank = max(v.ndim for v in values)
    shape: list[Any] = [1] * rank
    for value in values:
        for k, size in enumerate(value.shape, start=rank - value.ndim):
            if g.same(shape[k], 1):
                shape[k] = size
    return shape


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(g: Ops, x: Value, indices: Sequence[Value | None]) -> Value:
    if not any(i is not None for i in indices):
        return g.op("Identity", x)
    where = Indexed(g, x, indices)
    if len(where.dims) == 1 and where.adjacent:
        dim, place = _only(indices)
        return g.op("Gather", x, from_start(g, place, x.shape[dim]), g.const(dim, torch.int64))
    picked = g.op("GatherND", g.transpose(x, where.order), where.index)
    return g.transpose(picked, where.result_order())


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    g: Ops, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> Value:
    present = [i for i in indices if i is not None]
    if not present:
        raise NoRule("no index")
    if len(present) == 1 and present[0].dtype == torch.bool and values.ndim == 0:
        return _put_where(g, x, indices, values, accumulate)
    if len(present) == 1 and present[0].ndim == 1 and indices[0] is None:
        return _put_along(g, x, indices, values, accumulate)
    where = Indexed(g, x, indices)
    order = where.result_order()
    rest = [x.shape[d] for d in where.rest]
    front = [*where.shape, *rest]
    updates = g.broadcast(g.cast(values, x.dtype), [front[k] for k in order])
    updates = g.transpose(updates, [order.index(k) for k in range(len(order))])
    moved = g.transpose(x, where.order)
    out = _scatter_nd(g, moved, where.index, updates, accumulate)
    return g.transpose(out, [where.order.index(d) for d in range(x.ndim)])


def _put_along(
    g: Ops, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool
) -> Value:
    """Indices along one dimension, whose position in the result does not change."""
    dim, index = _only(indices)
    _check_not_mask(index)
    if accumulate and x.dtype == torch.bool:
        raise NoRule("booleans added at indices")
    shape = [*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :]]
    updates = g.broadcast(g.cast(values, x.dtype), shape)
    places = g.along(from_start(g, index, x.shape[dim]), dim, shape)
    reduction = "add" if accumulate else "none"
    return g.op("ScatterElements", x, places, updates, axis=dim, reduction=reduction)


def _scatter_nd(g: Ops, x: Value, index: Value, updates: Value, accumulate: bool) -> Value:
    if not accumulate:
        return g.op("ScatterNDUpdate", x, index, updates)
    if x.dtype == torch.bool:
        wide = _scatter_nd(g, g.cast(x, torch.int32), index, g.cast(updates, torch.int32), True)
        return g.cast(wide, torch.bool)
    if g.takes("ScatterNDAdd", "x", x.dtype):  # which may become an update in place
        return g.op("ScatterNDAdd", x, index, updates)
    depth = int(index.shape[-1])
    if depth == 1:
        count = math.prod(index.shape[:-1])
        rows = g.reshape(updates, [count, *x.shape[1:]])
        return add_rows(g, x, g.reshape(index, [count]), rows)
    rows, place = math.prod(x.shape[:depth]), None
    for axis in range(depth):
        part = g.squeeze(g.slice(index, index.ndim - 1, axis, axis + 1), [-1])
        place = part if place is None else g.add(g.mul(place, x.shape[axis]), part)
    assert place is not None
    count, width = math.prod(place.shape), math.prod(x.shape[depth:])
    out = add_rows(g, g.reshape(x, [rows, width]), g.reshape(place, [count]),
                   g.reshape(updates, [count, width]))  # fmt: skip
    return g.reshape(out, x.shape)


def add_rows(g: Ops, x: Value, index: Value, rows: Value) -> Value:
    """`rows` added to the rows of `x` at `index`."""
    places = g.along(index, 0, rows.shape)
    return g.op("ScatterElements", x, places, rows, axis=0, reduction="add")


def _put_where(
    g: Ops, x: Value, indices: Sequence[Value | None], value: Value, accumulate: bool
) -> Value:
    """One number written where a mask is true."""
    position, mask = _only(indices)
    after = x.ndim - position - mask.ndim
    if not g.same_shape(mask.shape, x.shape[position : position + mask.ndim]):
        raise NoRule("the mask is not known to have the sizes of what it selects from")
    mask = g.reshape(mask, [*([1] * position), *mask.shape, *([1] * after)])
    new = g.cast(value, x.dtype)
    new = g.op("Add", x, new) if accumulate else new
    return g.op("Select", mask, g.broadcast(new, x.shape), x)


# ---- scatter -------------------------------------------------------------------------------------


def _scatter(
    g: Ops, x: Value, dim: int, index: Value, source: Value, reduction: str = "none"
) -> Value:
    if reduction != "none" and x.dtype == torch.bool:
        raise NoRule("booleans added or multiplied at indices")
    if _is_empty(index):
        return g.op("Identity", x)
    if x.ndim == 0 or index.ndim == 0:
        shape = [1]
        x, index, source = (g.reshape(v, shape) for v in (x, index, source))
        return g.reshape(_scatter(g, x, 0, index, source, reduction), g.shape)
    if not all(g.same(a, b) for a, b in zip(source.shape, index.shape, strict=True)):
        for d, size in enumerate(index.shape):
            source = g.slice(source, d, 0, size)
    return g.op("ScatterElements", x, index, source, axis=dim % x.ndim, reduction=reduction)


RULES.update({
    aten.scatter.src: lambda g, x, dim, index, src: _scatter(g, x, dim, index, src),
    aten.scatter_add.default: lambda g, x, dim, index, src: _scatter(g, x, dim, index, src, "add"),
})  # fmt: skip


@rule(aten.scatter.value)
def scatter_value(g: Ops, x: Value, dim: int, index: Value, value: Any) -> Value:
    return _scatter(g, x, dim, index, g.full(index.shape, value, x.dtype))


_REDUCTIONS = {"add": "add", "multiply": "mul"}


@rule(aten.scatter.reduce)
def scatter_reduce_src(
    g: Ops, x: Value, dim: int, index: Value, src: Value, *, reduce: str
) -> Value:
    return _scatter(g, x, dim, index, src, _REDUCTIONS[reduce])


@rule(aten.scatter.value_reduce)
def scatter_value_reduce(
    g: Ops, x: Value, dim: int, index: Value, value: Any, *, reduce: str
) -> Value:
    source = g.full(index.shape, value, x.dtype)
    return _scatter(g, x, dim, index, source, _REDUCTIONS[reduce])


@rule(aten.scatter_reduce.two)
def scatter_reduce(
    g: Ops, x: Value, dim: int, index: Value, src: Value, reduce: str, *, include_self: bool = True
) -> Value:
    names = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min", "mean": "add"}
    if x.dtype == torch.bool:
        raise NoRule("booleans reduced at indices")
    start = x
    if not include_self:
        start = _scatter(g, x, dim, index, g.full(src.shape, _neutral(reduce, x.dtype), x.dtype))
    out = _scatter(g, start, dim, index, src, names[reduce])
    if reduce != "mean":
        return out
    ones = g.full(src.shape, 1, x.dtype)
    first = 1 if include_self else 0
    count = _scatter(g, g.full(x.shape, first, x.dtype), dim, index, ones, "add")
    count = g.op("Maximum", count, g.number(1, x.dtype))
    return g.op("Div" if x.dtype.is_floating_point else "FloorDiv", out, count)


def _neutral(reduce: str, dtype: torch.dtype) -> Any:
    if reduce in ("sum", "mean"):
        return 0
    if reduce == "prod":
        return 1
    if dtype.is_floating_point:
        return -math.inf if reduce == "amax" else math.inf
    info = torch.iinfo(dtype)
    return info.min if reduce == "amax" else info.max


@rule(aten.index_add.default)
def index_add(g: Ops, x: Value, dim: int, index: Value, source: Value, *, alpha: Any = 1) -> Value:
    if x.dtype == torch.bool:
        raise NoRule("booleans added at indices")
    if x.ndim == 0:
        flat = [g.reshape(v, [1]) for v in (x, index, source)]
        out = g.op("ScatterElements", flat[0], flat[1], _times(g, flat[2], alpha), axis=0,
                   reduction="add")  # fmt: skip
        return g.reshape(out, [])
    dim %= x.ndim
    if not g.same_shape(source.shape, [*x.shape[:dim], source.shape[dim], *x.shape[dim + 1 :]]):
        raise NoRule("slices of other sizes, which eager refuses")
    places = g.along(index, dim, source.shape)
    return _scatter(g, x, dim, places, _times(g, source, alpha), "add")


@rule(aten.index_copy.default)
def index_copy(g: Ops, x: Value, dim: int, index: Value, source: Value) -> Value:
    if x.ndim == 0 or source.ndim != x.ndim:
        raise NoRule("slices of a 0-dim tensor")
    dim %= x.ndim
    return _scatter(g, x, dim, g.along(index, dim, source.shape), source)


@rule(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(g: Ops, x: Value, dim: int, index: Value, value: Any) -> Value:
    if x.ndim == 0:
        raise NoRule("slices of a 0-dim tensor")
    dim %= x.ndim
    shape = [*x.shape[:dim], math.prod(index.shape), *x.shape[dim + 1 :]]
    places = g.along(from_start(g, index, x.shape[dim]), dim, shape)
    return _scatter(g, x, dim, places, g.full(shape, value, x.dtype))


def _max_unpool(n: int) -> Any:
    def apply(g: Ops, x: Value, index: Value, *sizes: Any) -> Value:
        """Zeros with `x` at flat positions of the last `n` dimensions."""
        lead = list(x.shape[:-n])
        flat = [*lead, math.prod(x.shape[-n:])]
        zeros = g.full([*lead, math.prod(g.shape[-n:])], 0, x.dtype)
        out = _scatter(g, zeros, len(lead), g.reshape(index, flat), g.reshape(x, flat))
        return g.reshape(out, g.shape)

    return apply


RULES.add(aten.max_unpool2d.default, _max_unpool(2))
RULES.add(aten.max_unpool3d.default, _max_unpool(3))


def _times(g: Ops, x: Value, alpha: Any) -> Value:
    return x if alpha == 1 else g.binary("Mul", x, alpha)


@rule(aten.put.default)
def put(g: Ops, x: Value, index: Value, source: Value, accumulate: bool = False) -> Value:
    size = math.prod(x.shape)
    count = math.prod(index.shape)
    places = g.reshape(from_start(g, index, size), [count, 1])
    flat = g.reshape(source, [count])
    out = _scatter_nd(g, g.reshape(x, [size]), places, flat, accumulate)
    return g.reshape(out, x.shape)


@rule(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    g: Ops, dy: Value, indices: Value, num_weights: Any, padding_idx: Any, by_freq: bool
) -> Value:
    """Each gradient added to its row; rows of the padding index get none."""
    count = math.prod(indices.shape)
    width = dy.shape[-1]
    flat = g.reshape(g.cast(indices, torch.int64), [count])
    rows = g.reshape(g.wide(dy), [count, width])
    if not (isinstance(padding_idx, int) and padding_idx < 0):
        skipped = g.op("Equal", flat, g.number(padding_idx, torch.int64))
        rows = g.where(g.unsqueeze(skipped, 1), 0.0, rows, rows.dtype)
    if by_freq:
        zeros = g.full([num_weights], 0, rows.dtype)
        ones = g.full([count], 1, rows.dtype)
        counts = add_rows(g, zeros, flat, ones)
        own = g.op("Gather", counts, flat, g.const(0, torch.int64))
        rows = g.op("Div", rows, g.unsqueeze(own, 1))
    zeros = g.full([num_weights, width], 0, rows.dtype)
    return g.cast(add_rows(g, zeros, flat, rows), g.dtype)
