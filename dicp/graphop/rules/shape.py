"""Views, slices, joins: operators that move elements and do not change them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dicp.graphop.operators import NoRule, Ops, Value
from dicp.graphop.rules.padding import pad
from dicp.graphop.strides import dense_order, inverse
from dicp.rules import RuleTable
from dicp.torch_private import statically_known_true

aten = torch.ops.aten
prims = torch.ops.prims
RULES = RuleTable()
rule = RULES.register


RULES.update({
    (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.squeeze.default,
     aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default):
        lambda g, x, *sizes, **options: g.reshape(x, g.shape),
    (aten.expand.default, aten.broadcast_to.default):
        lambda g, x, *sizes, **options: g.broadcast(x, g.shape),
    (aten.alias.default, aten.detach.default, aten.lift_fresh.default, aten.contiguous.default):
        lambda g, x, *args, **options: x,
    (aten.clone.default, aten.lift_fresh_copy.default):
        lambda g, x, *args, **options: g.op("Identity", x),
    aten.copy.default:
        lambda g, x, source, non_blocking=False: g.broadcast(g.cast(source, g.dtype), g.shape),
    (aten.permute.default, prims.transpose.default):
        lambda g, x, dims: g.transpose(x, [d % x.ndim for d in dims]),
})  # fmt: skip


@rule(aten.transpose.int)
def transpose(g: Ops, x: Value, first: int, second: int) -> Value:
    order = list(range(x.ndim))
    if x.ndim:
        first, second = first % x.ndim, second % x.ndim
        order[first], order[second] = second, first
    return g.transpose(x, order)


@rule(aten.t.default)
def t(g: Ops, x: Value) -> Value:
    return g.transpose(x, list(range(x.ndim))[::-1])


# ---- slices --------------------------------------------------------------------------------------


def from_start(g: Ops, index: Any, size: Any) -> Any:
    """`index` along a dimension of `size`, counted from the end where it is negative."""
    if g.proves(index >= 0):
        return index
    if not g.proves(index < 0):
        raise NoRule("an index of unknown sign")
    return size + index


def clamped(g: Ops, index: Any, size: Any, default: Any) -> Any:
    """A slice's start or end as Python clamps it, within 0 and `size`."""
    if index is None or (isinstance(index, int) and index >= 2**62):
        return default if index is None else size
    index = from_start(g, index, size)
    if not g.proves(index >= 0):
        index = torch.sym_max(index, 0)
    return index if g.proves(index <= size) else torch.sym_min(index, size)


@rule(aten.slice.Tensor)
def slice(
    g: Ops, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Value:
    dim %= x.ndim
    size = x.shape[dim]
    first = clamped(g, start, size, 0)
    last = clamped(g, end, size, size)
    if step == 1 and g.same(g.shape[dim], size):
        return x
    count = g.shape[dim]
    if step == 1:
        last = first + count
    elif isinstance(first, int) and isinstance(last, int):
        last = max(first, last)
    return g.slice(x, dim, first, last, step)


@rule(aten.narrow.default)
def narrow(g: Ops, x: Value, dim: int, start: Any, length: Any) -> Value:
    start = from_start(g, start, x.shape[dim])
    return g.slice(x, dim % x.ndim, start, start + length)


@rule(aten.select.int)
def select(g: Ops, x: Value, dim: int, index: Any) -> Value:
    dim %= x.ndim
    index = from_start(g, index, x.shape[dim])
    return g.reshape(g.slice(x, dim, index, index + 1), g.shape)


@rule(aten.slice_scatter.default)
def slice_scatter(
    g: Ops, x: Value, source: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Value:
    """Three parts where the step is 1, else the source written at its places."""
    dim %= x.ndim
    size = x.shape[dim]
    first, last = clamped(g, start, size, 0), clamped(g, end, size, size)
    source = g.cast(source, x.dtype)
    count = source.shape[dim]
    if g.same(count, 0):
        return g.op("Identity", x)
    if step != 1:
        places = g.add(g.mul(g.arange(count), step), g.number(first, torch.int64))
        return _put_at(g, x, dim, places, source)
    parts = []
    if not g.same(first, 0):
        parts.append(g.slice(x, dim, 0, first))
    parts.append(source)
    if not g.same(last, size):
        parts.append(g.slice(x, dim, last, size))
    return g.concat(parts, dim)


def _put_at(g: Ops, x: Value, dim: int, places: Value, source: Value) -> Value:
    """`x` with `source` at `places` (a vector) of dimension `dim`."""
    return g.op("ScatterElements", x, g.along(places, dim, source.shape), source, axis=dim)


@rule(aten.select_scatter.default)
def select_scatter(g: Ops, x: Value, source: Value, dim: int, index: Any) -> Value:
    dim %= x.ndim
    index = from_start(g, index, x.shape[dim])
    source = g.unsqueeze(g.cast(source, x.dtype), dim)
    return slice_scatter(g, x, source, dim, index, index + 1)


# ---- diagonals and strided views -----------------------------------------------------------------


def _row_major(shape: Sequence[Any]) -> list[Any]:
    strides: list[Any] = []
    expected: Any = 1
    for size in reversed(shape):
        strides.insert(0, expected)
        expected = expected * size
    return strides


def as_strided_of(
    g: Ops, x: Value, shape: Sequence[Any], strides: Sequence[Any], offset: Any
) -> Value:
    """A window on row-major `x`."""
    sizes = (g.ints(list(shape)), g.ints(list(strides)), g.ints([offset]))
    return g.op("AsStrided", x, *sizes)


def _in_memory(g: Ops, x: Value) -> tuple[Value, tuple[int, ...], Any]:
    """The first argument in its memory's order, that order of its dimensions, and its offset.

    Raises NoRule for an argument with gaps, in which other tensors may be.
    """
    fake = g.sources[0]
    assert fake is not None
    order = dense_order(g, fake)
    if order is None:
        raise NoRule("a view of the memory between a tensor's elements")
    return g.transpose(x, order), order, fake.storage_offset()


def _check_inside(
    g: Ops, x: Value, shape: Sequence[Any], strides: Sequence[Any], offset: Any
) -> None:
    """Raises NoRule for a window that may reach beyond the tensor."""
    fake = g.sources[0]
    assert fake is not None
    if g.same(fake.untyped_storage().nbytes(), math.prod(x.shape) * x.dtype.itemsize):
        return  # nothing is beyond it
    last = offset + sum((s - 1) * t for s, t in zip(shape, strides, strict=True))
    inside = [offset >= 0, last < math.prod(x.shape)]
    if not all(test is True or statically_known_true(test) for test in inside):
        raise NoRule("a view of memory around the tensor")


@rule(aten.as_strided.default)
def as_strided(
    g: Ops, x: Value, shape: Sequence[Any], strides: Sequence[Any], offset: Any = None
) -> Value:
    memory, _, start = _in_memory(g, x)
    offset = 0 if offset is None else offset - start
    _check_inside(g, x, shape, strides, offset)
    return as_strided_of(g, memory, shape, strides, offset)


@rule(aten.as_strided_scatter.default, prims.as_strided_scatter.default)
def as_strided_scatter(
    g: Ops,
    x: Value,
    source: Value,
    shape: Sequence[Any],
    strides: Sequence[Any],
    offset: Any = None,
) -> Value:
    memory, order, start = _in_memory(g, x)
    offset = 0 if offset is None else offset - start
    _check_inside(g, x, shape, strides, offset)
    count = math.prod(x.shape)
    places = as_strided_of(g, g.arange(count), shape, strides, offset)
    flat = g.op("ScatterNDUpdate", g.reshape(memory, [count]), g.unsqueeze(places, places.ndim),
                g.cast(source, x.dtype))  # fmt: skip
    return g.transpose(g.reshape(flat, memory.shape), inverse(order))


RULES.add(prims.copy_strided.default, lambda g, x, strides: g.op("Identity", x))


@rule(aten.diagonal.default)
def diagonal(g: Ops, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    dim1, dim2 = dim1 % x.ndim, dim2 % x.ndim
    strides = _row_major(x.shape)
    kept = [d for d in range(x.ndim) if d not in (dim1, dim2)]
    start = offset * strides[dim2] if offset >= 0 else -offset * strides[dim1]
    if g.same(g.shape[-1], 0):
        start = 0
    steps = [*(strides[d] for d in kept), strides[dim1] + strides[dim2]]
    return as_strided_of(g, x, g.shape, steps, start)


@rule(aten.unfold.default)
def unfold(g: Ops, x: Value, dimension: int, size: int, step: int) -> Value:
    if x.ndim == 0:
        return g.reshape(x, g.shape)
    dimension %= x.ndim
    strides = _row_major(x.shape)
    steps = [s * step if d == dimension else s for d, s in enumerate(strides)]
    return as_strided_of(g, x, g.shape, [*steps, strides[dimension]], 0)


@rule(aten.diagonal_scatter.default)
def diagonal_scatter(
    g: Ops, x: Value, source: Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Value:
    """The source where row and column differ by `offset`, `x` elsewhere."""
    dim1, dim2 = dim1 % x.ndim, dim2 % x.ndim
    rows, columns = x.shape[dim1], x.shape[dim2]
    with g.inferring():
        expected = x.fake.diagonal(offset, dim1, dim2).shape
    if not g.same_shape(source.shape, expected):
        raise NoRule("the source is not known to have the diagonal's sizes")
    if g.same(source.shape[-1], 0):  # the diagonal lies outside
        return g.op("Identity", x)
    gap = g.sub(g.reshape(g.arange(columns), [1, columns]), g.reshape(g.arange(rows), [rows, 1]))
    mask = g.op("Equal", gap, g.const(offset, torch.int64))
    spread = _spread_diagonal(g, g.cast(source, x.dtype), rows, columns, offset)
    order = [d for d in range(x.ndim) if d not in (dim1, dim2)] + [dim1, dim2]
    moved = g.transpose(x, order)
    result = g.op("Select", mask, spread, moved)
    return g.transpose(result, [order.index(d) for d in range(x.ndim)])


def _spread_diagonal(g: Ops, source: Value, rows: Any, columns: Any, offset: int) -> Value:
    """(..., n) as (..., rows, columns), each row filled with its own element."""
    before = max(-offset, 0)
    after = rows - before - source.shape[-1]
    padded = pad(g, source, [before, after])
    wide = g.unsqueeze(padded, padded.ndim)
    return g.broadcast(wide, [*padded.shape, columns])


# ---- joining and taking apart --------------------------------------------------------------------


@rule(aten.cat.default)
def cat(g: Ops, tensors: Sequence[Value], dim: int = 0) -> Value:
    rank = len(g.shape)
    parts = [g.cast(x, g.dtype) for x in tensors if not (x.ndim == 1 and rank != 1)]
    parts = [x for x in parts if not g.same(x.shape[dim % rank], 0)] or parts[:1]
    if len(parts) == 1:
        return g.op("Identity", parts[0])
    return g.concat(parts, dim % rank)


@rule(aten.stack.default)
def stack(g: Ops, tensors: Sequence[Value], dim: int = 0) -> Value:
    parts = tuple(g.cast(x, g.dtype) for x in tensors)
    return g.op("Stack", parts, axis=dim % (parts[0].ndim + 1), N=len(parts))


RULES.update({
    aten.split.Tensor:
        lambda g, x, size, dim=0: split_sizes(g, x, [part.shape[dim] for part in g.meta], dim),
    aten.split_with_sizes.default: lambda g, x, sizes, dim=0: split_sizes(g, x, list(sizes), dim),
})  # fmt: skip


def split_sizes(g: Ops, x: Value, sizes: Sequence[Any], dim: int) -> list[Value]:
    dim %= x.ndim
    if all(isinstance(size, int) for size in (*sizes, x.shape[dim])):
        if len(sizes) == 1:
            return [x]
        if min(sizes) >= 1:
            return g.ops("Split", x, size_splits=list(sizes), split_dim=dim, num_split=len(sizes))
    parts, start = [], 0
    for size in sizes:
        parts.append(g.slice(x, dim, start, start + size))
        start = start + size
    return parts


@rule(aten.unbind.int)
def unbind(g: Ops, x: Value, dim: int = 0) -> list[Value]:
    dim %= x.ndim
    count = x.shape[dim]
    if not isinstance(count, int):
        raise NoRule("the number of results depends on the sizes")
    if count == 0:
        return []
    return g.unpack(x, dim, count)


@rule(aten.repeat.default)
def repeat(g: Ops, x: Value, repeats: Sequence[Any]) -> Value:
    x = g.reshape(x, [*[1] * (len(repeats) - x.ndim), *x.shape])
    return g.op("Tile", x, g.ints(list(repeats))) if repeats else g.op("Identity", x)


@rule(aten.flip.default)
def flip(g: Ops, x: Value, dims: Sequence[int]) -> Value:
    if not dims or x.ndim == 0:
        return g.op("Identity", x)
    return g.op("Reverse", x, g.ints([d % x.ndim for d in dims]))


@rule(aten.roll.default)
def roll(g: Ops, x: Value, shifts: Sequence[Any], dims: Sequence[int] = ()) -> Value:
    if not all(isinstance(s, int) for s in shifts):
        raise NoRule("symbolic shifts")
    if not dims:
        flat = g.reshape(x, [math.prod(x.shape)])
        return g.reshape(g.op("Roll", flat, shifts=list(shifts), dims=[0]), x.shape)
    return g.op("Roll", x, shifts=list(shifts), dims=[d % x.ndim for d in dims])


# ---- triangles -----------------------------------------------------------------------------------


RULES.update({
    aten.tril.default: lambda g, x, diagonal=0: _triangle(g, "Tril", x, diagonal),
    aten.triu.default: lambda g, x, diagonal=0: _triangle(g, "Triu", x, diagonal),
})  # fmt: skip


def _triangle(g: Ops, kind: str, x: Value, diagonal: Any) -> Value:
    if not isinstance(diagonal, int):
        raise NoRule("a symbolic diagonal")
    return g.op(kind, x, diagonal=diagonal)


@rule(aten.view.dtype)
def view_dtype(g: Ops, x: Value, dtype: torch.dtype) -> Value:
    if x.dtype == torch.bool or dtype == torch.bool:
        raise NoRule("a view of booleans in another dtype, or of numbers as booleans")
    if not all(g.takes("Bitcast", "x", each) for each in (x.dtype, dtype)):
        raise NoRule(f"no operator takes {x.dtype} for {dtype}")
    if dtype.itemsize > x.dtype.itemsize:  # what becomes one element is a dimension of its own
        whole = dtype.itemsize // x.dtype.itemsize
        x = g.reshape(x, [*x.shape[:-1], x.shape[-1] // whole, whole])
    return g.reshape(g.op("Bitcast", x, type=dtype), g.shape)


VIEWS = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
    aten.permute.default, aten.transpose.int, aten.t.default, aten.slice.Tensor, aten.select.int,
    aten.alias.default, aten.detach.default, aten.lift_fresh.default, aten.diagonal.default,
    aten.unfold.default, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int,
    aten.narrow.default, aten.broadcast_to.default, aten.as_strided.default,
})  # fmt: skip
"""Operators whose result is a view in eager."""
