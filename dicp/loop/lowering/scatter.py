"""Writes at computed indices: scatter, index_put, index_add, put, the gradient of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dicp.dtypes import REDUCED_FLOATS, opmath_dtype
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, Ref, apply, cast, const, is_zero
from dicp.loop.ir.graph import Compute
from dicp.loop.ir.index import ZERO, Index, Size, domain, is_positive, product
from dicp.loop.ir.ops import neutral_element
from dicp.loop.lowering.conditions import compare, maximum, select
from dicp.loop.lowering.core import Lowering, Value
from dicp.loop.lowering.indexing import (
    Indices,
    index_coords,
    index_layout,
    is_empty,
    no_masks,
    proven,
)
from dicp.loop.lowering.value import Body, Coordinates
from dicp.loop.lowering.views import wrap
from dicp.loop.thresholds import MIN_SCATTER_RATIO
from dicp.rules import NoRule, RuleTable

aten = torch.ops.aten
SCATTER = RuleTable()
rule = SCATTER.register


def scattered(
    lw: Lowering,
    base: Value,
    shape: Sequence[Size],
    body: Body,
    target: Coordinates,
    op: str = "store",
    wide: torch.dtype | None = None,
    strides: Sequence[Size] | None = None,
) -> Value:
    """A copy of `base`, with `strides` if given, and with each `body(idx)` stored (or combined by
    `op`) at `target(idx)`, which is rounded once where the target combines in a wider dtype or
    `wide` is given."""
    if wide is None:
        wide = base.dtype if op == "store" else lw.combined_in(base.dtype)
    if wide != base.dtype:
        widened = scattered(
            lw, lw.cast(base, wide), shape, lambda idx: ir.opmath(body(idx), wide), target, op,
            strides=strides,
        )  # fmt: skip
        return lw.cast(widened, base.dtype)
    out = lw.pointwise(base.shape, base.dtype, lambda idx: lw.combinable(op, base.at(idx)), strides)
    start = out.ref.producer
    assert isinstance(start, Compute)
    start.realize = True
    result = Ref(
        lw._name("t"), out.ref.shape, out.ref.dtype, out.ref.strides, "alias", base=out.ref
    )
    idx = domain(tuple(shape))
    compute = Compute(
        result, tuple(shape), lw.combinable(op, body(idx)), "scatter", op=op,
        target=tuple(target(idx)),
        after=(start,), realize=True,
    )  # fmt: skip
    lw.add(compute)
    return Value(result, base.shape, domain(base.shape))


def _scattered_along(
    lw: Lowering, x: Value, dim: int, shape: Sequence[Size], body: Body,
    place: Callable[[Sequence[Index]], Index], op: str,
) -> Value:  # fmt: skip
    """`scattered` at `place` along `dim`; 16-bit floats are combined in float32, as in eager."""

    def target(idx: tuple[Index, ...]) -> Sequence[Index]:
        return [*idx[:dim], place(idx), *idx[dim + 1 :]]

    if op not in ("sum", "prod") or lw.combined_in(x.dtype) not in REDUCED_FLOATS:
        return scattered(lw, x, shape, body, target, op)
    rounded = lw.rounds_sums and dim == 0 and _is_zeros(x)  # in one pass over the result
    if not rounded and _copies_slices_only(x, shape) and _is_same_along(place, dim, shape):
        return _in_slices(lw, x, dim, shape, body, target, op)
    return scattered(lw, x, shape, body, target, op, torch.float32)


def _is_zeros(x: Value) -> bool:
    """Whether all elements are zeros, as of a tensor that gradients are added to."""
    fill = x.ref.producer
    return isinstance(fill, Compute) and fill.kind == "pointwise" and is_zero(fill.body)


def _copies_slices_only(x: Value, shape: Sequence[Size]) -> bool:
    """Whether slices of float32 for each source cost less than a copy of `x` in float32."""
    own, source = product(x.shape), product(shape)
    return isinstance(own, int) and isinstance(source, int) and own > MIN_SCATTER_RATIO * source


def _is_same_along(
    place: Callable[[Sequence[Index]], Index], dim: int, shape: Sequence[Size]
) -> bool:
    """Whether whole slices along `dim` have one place, as of an expanded index."""
    idx = domain(tuple(shape))
    return place(idx) == place([idx[k] if k == dim else ZERO for k in range(len(idx))])


def _in_slices(
    lw: Lowering, x: Value, dim: int, shape: Sequence[Size], body: Body, target: Coordinates,
    op: str,
) -> Value:  # fmt: skip
    """`x` with slices combined into it in float32, without a copy of `x` in float32: one of the
    slices with the same place, its leader, holds their sum, beginning with that of `x`."""
    count, zero = shape[dim], [ZERO] * len(shape)

    def place(i: Index) -> Index:
        return target((*zero[:dim], i, *zero[dim + 1 :]))[dim]

    numbers = lw.pointwise((x.shape[dim],), torch.int64, lambda idx: const(0, torch.int64))
    leaders = scattered(
        lw, numbers, (count,), lambda idx: ir.index_value(idx[0]), lambda idx: [place(idx[0])]
    )
    leader = lw.pointwise((count,), torch.int64, lambda idx: leaders.at([place(idx[0])]))

    def at_first_of_group(idx: tuple[Index, ...]) -> Sequence[Index]:
        return [*idx[:dim], proven(leader.at([idx[dim]]), count), *idx[dim + 1 :]]

    copies = lw.pointwise(shape, torch.float32, lambda idx: cast(x.at(target(idx)), torch.float32))
    totals = scattered(
        lw, copies, shape,
        lambda idx: ir.opmath(body(idx), torch.float32), at_first_of_group, op,
    )  # fmt: skip
    sums = lw.pointwise(
        shape, x.dtype, lambda idx: cast(totals.at(at_first_of_group(idx)), x.dtype)
    )
    lw.mark_realized(sums.ref)  # a kernel with both indices would run along them
    return scattered(lw, x, shape, sums.at, target)


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    lw: Lowering, x: Value, indices: Sequence[Value | None], values: Value,
    accumulate: bool = False,
) -> Value:  # fmt: skip
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return _masked_put(lw, x, indices, values, accumulate)
    no_masks(indices)
    axes, shape, start = index_layout(indices)
    rest = [s for k, s in enumerate(x.shape) if k not in axes]
    full = [*rest[:start], *shape, *rest[start:]]
    if values.ndim > len(full):
        raise NoRule("values with more axes than are indexed")
    sizes = [(s, t) for s, t in zip(values.shape[::-1], full[::-1], strict=False) if s != 1]
    lw.require_equal([s for s, _ in sizes], [t for _, t in sizes], "values do not fit the indices")
    return scattered(
        lw, x, full,
        lambda idx: cast(values.broadcast_at(idx), x.dtype),
        index_coords(lw, x, indices),
        "sum" if accumulate else "store",
    )  # fmt: skip


def _masked_put(
    lw: Lowering, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool
) -> Value:
    """x[mask] = one value, as a select."""
    mask = indices[0]
    only = len(indices) == 1 and mask is not None and mask.dtype == torch.bool
    if not only or any(s != 1 for s in values.shape):
        raise NoRule("several values stored through a boolean mask")
    assert mask is not None
    lw.require_equal(mask.shape, x.shape[: mask.ndim], "the mask does not fit the tensor")

    def body(idx: tuple[Index, ...]) -> Expr:
        item = cast(values.at([ZERO] * values.ndim), x.dtype)
        old = x.at(idx)
        new = old + item if accumulate else item
        return apply("where", x.dtype, mask.at(idx[: mask.ndim]), new, old)

    return lw.pointwise(x.shape, x.dtype, body)


@rule(aten.put.default)
def put(lw: Lowering, x: Value, index: Value, source: Value, accumulate: bool = False) -> Value:
    size, count = product(x.shape), product(index.shape)
    lw.require_equal([count], [product(source.shape)], "numbers of indices and elements differ")
    flat, flat_index, items = (
        lw.reshape(v, (n,)) for v, n in ((x, size), (index, count), (source, count))
    )
    places = Indices(lw, flat_index, size, wrap=True)
    result = scattered(
        lw, flat, (count,),
        lambda idx: cast(items.at(idx), x.dtype),
        lambda idx: [places.at(idx)],
        "sum" if accumulate else "store",
    )  # fmt: skip
    return lw.reshape(result, x.shape)


def _scatter(lw: Lowering, x: Value, dim: int, index: Value, source: Any, op: str) -> Value:
    if is_empty(index):
        return lw.copy(x)
    if x.ndim == 0 or index.ndim == 0:
        lifted = [
            lw.unsqueeze(v, 0) if isinstance(v, Value) and v.ndim == 0 else v
            for v in (x, index, source)
        ]
        return lw.reshape(_scatter(lw, lifted[0], 0, lifted[1], lifted[2], op), x.shape)
    dim = wrap(dim, x.ndim)

    def body(idx: tuple[Index, ...]) -> Expr:
        if isinstance(source, Value):
            return cast(source.at(idx), x.dtype)
        return lw.element(source, x.dtype)

    places = Indices(lw, index, x.shape[dim], wrap=False)
    return _scattered_along(lw, x, dim, index.shape, body, places.at, op)


SCATTER.update({
    (aten.scatter.src, aten.scatter.value):
        lambda lw, x, dim, index, source: _scatter(lw, x, dim, index, source, "store"),
    aten.scatter_add: lambda lw, x, dim, index, source: _scatter(lw, x, dim, index, source, "sum"),
})  # fmt: skip


_REDUCE = {"add": "sum", "multiply": "prod", "sum": "sum", "prod": "prod", "amax": "max",
           "amin": "min"}  # fmt: skip


@rule(aten.scatter.reduce, aten.scatter.value_reduce)
def scatter_mode(
    lw: Lowering, x: Value, dim: int, index: Value, source: Any, *, reduce: str
) -> Value:
    return _scatter(lw, x, dim, index, source, _REDUCE[reduce])


def _reduced(
    lw: Lowering, x: Value, reduce: str, include_self: bool,
    put: Callable[[Value, float | None, str], Value],
) -> Value:  # fmt: skip
    """`x` with values combined into it by `reduce`.

    `put(x, number, op)` combines the values into `x`, or in place of each of them that number.
    """
    op = _REDUCE.get(reduce, "sum")
    if reduce != "mean" and include_self:
        return put(x, None, op)
    total = put(x if include_self else put(x, neutral_element(op, x.dtype), "store"), None, op)
    if reduce != "mean":
        return total
    first = const(int(include_self), x.dtype)
    count = put(lw.pointwise(x.shape, x.dtype, lambda idx: first), 1, "sum")
    divide = "div" if x.dtype.is_floating_point else "floor_div"
    return lw.map(lambda t, n: apply(divide, x.dtype, t, maximum(n, 1)), total, count)


@rule(aten.scatter_reduce.two)
def scatter_reduce(
    lw: Lowering, x: Value, dim: int, index: Value, source: Value, reduce: str,
    *, include_self: bool = True,
) -> Value:  # fmt: skip
    def put(x: Value, number: float | None, op: str) -> Value:
        return _scatter(lw, x, dim, index, source if number is None else number, op)

    return _reduced(lw, x, reduce, include_self, put)


@rule(aten.index_add.default)
def index_add(
    lw: Lowering, x: Value, dim: int, index: Value, source: Value, *, alpha: Any = 1
) -> Value:
    def body(item: Expr) -> Expr:
        return item if alpha == 1 else item * lw.scalar(alpha, x.dtype)

    # Eager checks no index if `x` is empty.
    count = product(index.shape) if all(map(is_positive, x.shape)) else 0
    return _slices_at(lw, x, dim, index, source, body, "sum", count)


@rule(aten.index_reduce.default)
def index_reduce(
    lw: Lowering, x: Value, dim: int, index: Value, source: Value, reduce: str,
    *, include_self: bool = True,
) -> Value:  # fmt: skip
    def put(x: Value, number: float | None, op: str) -> Value:
        def body(item: Expr) -> Expr:
            return item if number is None else const(number, x.dtype)

        return _slices_at(lw, x, dim, index, source, body, op, product(index.shape))

    return _reduced(lw, x, reduce, include_self, put)


@rule(aten.index_copy.default)
def index_copy(lw: Lowering, x: Value, dim: int, index: Value, source: Value) -> Value:
    return _slices_at(lw, x, dim, index, source, lambda v: v, "store", product(source.shape))


def _slices_at(
    lw: Lowering, x: Value, dim: int, index: Value, source: Value, body: Callable[[Expr], Expr],
    op: str, count: Size,
) -> Value:  # fmt: skip
    """`x` with slice i of `source` along `dim` combined by `op` into its slice `index[i]`."""
    if x.ndim == 0 or source.ndim != x.ndim:
        raise NoRule("slices of a 0-dim tensor")
    dim = wrap(dim, x.ndim)
    slices = [*x.shape[:dim], product(index.shape), *x.shape[dim + 1 :]]
    lw.require_equal(source.shape, slices, "slices do not fit the tensor and the indices")
    places = Indices(lw, index, x.shape[dim], wrap=False, count=count)
    return _scattered_along(
        lw, x, dim, source.shape, lambda idx: body(cast(source.at(idx), x.dtype)),
        lambda idx: places.along(idx[dim]), op,
    )  # fmt: skip


@rule(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(lw: Lowering, x: Value, dim: int, index: Value, value: Any) -> Value:
    if x.ndim == 0:
        raise NoRule("slices of a 0-dim tensor")
    dim = wrap(dim, x.ndim)
    shape = (*x.shape[:dim], product(index.shape), *x.shape[dim + 1 :])
    places = Indices(lw, index, x.shape[dim], wrap=True, count=product(shape))

    def body(idx: tuple[Index, ...]) -> Expr:
        if isinstance(value, Value):
            return cast(value.at(()), x.dtype)
        return lw.scalar(value, x.dtype)

    return scattered(
        lw, x, shape, body, lambda idx: [*idx[:dim], places.along(idx[dim]), *idx[dim + 1 :]]
    )


@rule(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    lw: Lowering, g: Value, index: Value, num_weights: Size, padding_idx: int,
    scale_grad_by_freq: bool,
) -> Value:  # fmt: skip
    lw.require_equal(g.shape[:-1], index.shape, "gradients do not fit the indices")
    width = g.shape[-1]
    zeros = lw.pointwise((num_weights, width), g.dtype, lambda idx: const(0.0, g.dtype))

    # Checked here too: where only the gradient is used, the forward lookup is not run.
    rows = Indices(lw, index, num_weights, wrap=False)
    counts = _occurrences(lw, index, rows, num_weights) if scale_grad_by_freq else None

    def body(idx: tuple[Index, ...]) -> Expr:
        item = g.at(idx)
        if counts is not None:
            exact = opmath_dtype(g.dtype)
            count = cast(counts.at([rows.at(idx[:-1])]), exact)
            item = cast(apply("div", exact, ir.opmath(item, exact), count), g.dtype)
        if isinstance(padding_idx, int) and padding_idx < 0:
            return item
        padding = lw.scalar(padding_idx, torch.int64)
        skip = compare("eq", cast(index.at(idx[:-1]), torch.int64), padding)
        return select(skip, 0.0, item)

    def target(idx: tuple[Index, ...]) -> list[Index]:
        return [rows.at(idx[:-1]), idx[-1]]

    exact = torch.float32 if g.dtype in REDUCED_FLOATS else None
    return scattered(lw, zeros, g.shape, body, target, "sum", exact)


def _occurrences(lw: Lowering, index: Value, rows: Indices, size: Size) -> Value:
    """How often each number below `size` occurs among the indices."""
    zeros = lw.pointwise((size,), torch.int32, lambda idx: const(0, torch.int32))
    return scattered(
        lw, zeros, index.shape, lambda idx: const(1, torch.int32), lambda idx: [rows.at(idx)], "sum"
    )
