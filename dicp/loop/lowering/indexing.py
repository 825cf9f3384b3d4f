"""Reads and writes at computed places: gather, index, embedding, scatter, index_put."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Compute, Expr, Ref, apply, cast, const
from dicp.loop.ir.index import ZERO, Index, Indirect, Size, domain, product
from dicp.loop.lowering.core import Lowering, Value
from dicp.loop.lowering.layout import broadcast_shapes, sizes_of
from dicp.loop.lowering.pointwise import compare, select
from dicp.loop.lowering.rules import NoRule, RuleTable
from dicp.loop.lowering.views import wrap

aten = torch.ops.aten
INDEXING = RuleTable()
rule = INDEXING.register


def place(
    lw: Lowering, index: Expr, size: Size, *, negative: bool = True, checked: bool = True
) -> Index:
    """A coordinate taken from a tensor of indices, checked against `size`."""
    index = cast(index, torch.int64)
    if negative:
        wrapped = index + lw.scalar(size, torch.int64)
        index = select(compare("lt", index, 0), wrapped, index)
    if checked and lw.context.config.check_bounds:
        limit = lw.scalar(size, torch.int64)
        index = Expr("check_index", torch.int64, (index, limit), lw.origin)
    return Index(0, ((Indirect(index, size), 1),))


@rule(aten.gather)
def gather(lw: Lowering, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    dim = wrap(dim, x.ndim)
    if x.ndim == 0:
        return lw.pointwise(index.shape, x.dtype, lambda idx: x.at(()))
    if index.ndim == 0:
        at = place(lw, index.at(()), x.shape[0], negative=False)
        return lw.pointwise((), x.dtype, lambda idx: x.at([at]))

    def body(idx: tuple[Index, ...]) -> Expr:
        coords = list(idx)
        coords[dim] = place(lw, index.at(idx), x.shape[dim], negative=False)
        return x.at(coords)

    return lw.pointwise(index.shape, x.dtype, body)


@rule(aten.index_select)
def index_select(lw: Lowering, x: Value, dim: int, index: Value) -> Value:
    if x.ndim == 0:
        return lw.pointwise(sizes_of(lw.meta().shape), x.dtype, lambda idx: x.at(()))
    dim = wrap(dim, x.ndim)
    shape = sizes_of(lw.meta().shape)

    def body(idx: tuple[Index, ...]) -> Expr:
        coords = list(idx)
        coords[dim] = place(lw, index.at([idx[dim]] if index.ndim else []), x.shape[dim])
        return x.at(coords)

    return lw.pointwise(shape, x.dtype, body)


@rule(aten.take.default)
def take(lw: Lowering, x: Value, index: Value) -> Value:
    size = product(x.shape)
    flat = lw.reshape(x, (size,))
    return lw.pointwise(index.shape, x.dtype, lambda idx: flat.at([place(lw, index.at(idx), size)]))


@rule(aten.put.default)
def put(lw: Lowering, x: Value, index: Value, source: Value, accumulate: bool = False) -> Value:
    size, count = product(x.shape), product(index.shape)
    flat, places, items = (
        lw.reshape(v, (n,)) for v, n in ((x, size), (index, count), (source, count))
    )
    result = scattered(
        lw, flat, (count,),
        lambda idx: cast(items.at(idx), x.dtype),
        lambda idx: [place(lw, places.at(idx), size)],
        "sum" if accumulate else "store",
    )  # fmt: skip
    return lw.reshape(result, x.shape)


@rule(aten.embedding.default)
def embedding(
    lw: Lowering, weight: Value, index: Value, padding_idx: int = -1,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Value:  # fmt: skip
    shape = (*index.shape, weight.shape[1])

    def body(idx: tuple[Index, ...]) -> Expr:
        row = place(lw, index.at(idx[:-1]), weight.shape[0], negative=False)
        return weight.at([row, idx[-1]])

    return lw.pointwise(shape, weight.dtype, body)


def index_layout(
    x: Value, indices: Sequence[Value | None]
) -> tuple[list[int], tuple[Size, ...], int]:
    """Indexed axes, the broadcast shape of the indices, and where it goes in the result."""
    axes = [k for k, i in enumerate(indices) if i is not None]
    shape = broadcast_shapes(*(i.shape for i in indices if i is not None))
    adjacent = axes == list(range(axes[0], axes[-1] + 1))
    return axes, shape, axes[0] if adjacent else 0


def index_coords(
    lw: Lowering, x: Value, indices: Sequence[Value | None], idx: Sequence[Index]
) -> list[Index]:
    """Coordinates in `x` of the result point `idx` of `x[indices]`."""
    axes, shape, start = index_layout(x, indices)
    inner = idx[start : start + len(shape)]
    rest = iter([*idx[:start], *idx[start + len(shape) :]])
    coords = []
    for axis in range(x.ndim):
        index = indices[axis] if axis < len(indices) else None
        if index is None:
            coords.append(next(rest))
        else:
            at = index.broadcast_at(inner)
            coords.append(place(lw, at, x.shape[axis], checked=not _is_unsafe(lw)))
    return coords


def _is_unsafe(lw: Lowering) -> bool:
    """Whether the operator promises that its indices are within bounds."""
    assert lw.node is not None
    return lw.node.target in (aten._unsafe_index.Tensor, aten._unsafe_index_put.default)


def _no_masks(indices: Sequence[Value | None]) -> None:
    if not any(i is not None for i in indices):
        raise NoRule("no index tensor is given")
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        raise NoRule("boolean mask indices give a data-dependent shape")


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index_tensor(lw: Lowering, x: Value, indices: Sequence[Value | None]) -> Value:
    _no_masks(indices)
    return lw.pointwise(
        sizes_of(lw.meta().shape), x.dtype, lambda idx: x.at(index_coords(lw, x, indices, idx))
    )


def scattered(
    lw: Lowering,
    base: Value,
    shape: Sequence[Size],
    body: Callable[[tuple[Index, ...]], Expr],
    target: Callable[[tuple[Index, ...]], Sequence[Index]],
    op: str = "store",
) -> Value:
    """A copy of `base` with `body` stored (or combined by `op`) at `target`, point by point."""
    wide = base.dtype if op == "store" else lw.combined_in(op, base.dtype)
    if wide != base.dtype:
        widened = scattered(
            lw, lw.cast(base, wide), shape, lambda idx: ir.opmath(body(idx), wide), target, op
        )
        return lw.cast(widened, base.dtype)
    out = lw.pointwise(base.shape, base.dtype, lambda idx: lw.combinable(op, base.at(idx)))
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


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    lw: Lowering, x: Value, indices: Sequence[Value | None], values: Value,
    accumulate: bool = False,
) -> Value:  # fmt: skip
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return _masked_put(lw, x, indices, values, accumulate)
    _no_masks(indices)
    axes, shape, start = index_layout(x, indices)
    rest = [s for k, s in enumerate(x.shape) if k not in axes]
    full = [*rest[:start], *shape, *rest[start:]]
    return scattered(
        lw, x, full,
        lambda idx: cast(values.broadcast_at(idx), x.dtype),
        lambda idx: index_coords(lw, x, indices, idx),
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

    def body(idx: tuple[Index, ...]) -> Expr:
        item = cast(values.at([ZERO] * values.ndim), x.dtype)
        old = x.at(idx)
        new = old + item if accumulate else item
        return apply("where", x.dtype, mask.at(idx[: mask.ndim]), new, old)

    return lw.pointwise(x.shape, x.dtype, body)


def _scatter(lw: Lowering, x: Value, dim: int, index: Value, source: Any, op: str) -> Value:
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
        return lw.scalar(source, x.dtype)

    def target(idx: tuple[Index, ...]) -> list[Index]:
        coords = list(idx)
        coords[dim] = place(lw, index.at(idx), x.shape[dim], negative=False)
        return coords

    return scattered(lw, x, index.shape, body, target, op)


@rule(aten.scatter.src, aten.scatter.value)
def scatter(lw: Lowering, x: Value, dim: int, index: Value, source: Any) -> Value:
    return _scatter(lw, x, dim, index, source, "store")


@rule(aten.scatter_add)
def scatter_add(lw: Lowering, x: Value, dim: int, index: Value, source: Value) -> Value:
    return _scatter(lw, x, dim, index, source, "sum")


_REDUCE = {"add": "sum", "multiply": "prod", "sum": "sum", "prod": "prod", "amax": "max",
           "amin": "min"}  # fmt: skip


@rule(aten.scatter.reduce, aten.scatter.value_reduce)
def scatter_mode(
    lw: Lowering, x: Value, dim: int, index: Value, source: Any, *, reduce: str
) -> Value:
    return _scatter(lw, x, dim, index, source, _REDUCE[reduce])


@rule(aten.scatter_reduce.two)
def scatter_reduce(
    lw: Lowering, x: Value, dim: int, index: Value, source: Value, reduce: str,
    *, include_self: bool = True,
) -> Value:  # fmt: skip
    if reduce not in _REDUCE or not include_self:
        raise NoRule("scatter_reduce by mean or without the old values")
    return _scatter(lw, x, dim, index, source, _REDUCE[reduce])


@rule(aten.index_add.default)
def index_add(
    lw: Lowering, x: Value, dim: int, index: Value, source: Value, *, alpha: Any = 1
) -> Value:
    def body(item: Expr) -> Expr:
        return item if alpha == 1 else item * lw.scalar(alpha, x.dtype)

    return _combined_at(lw, x, dim, index, source, body, "sum")


@rule(aten.index_reduce.default)
def index_reduce(
    lw: Lowering, x: Value, dim: int, index: Value, source: Value, reduce: str,
    *, include_self: bool = True,
) -> Value:  # fmt: skip
    if reduce not in _REDUCE or not include_self:
        raise NoRule("index_reduce by mean or without the old values")
    return _combined_at(lw, x, dim, index, source, lambda item: item, _REDUCE[reduce])


def _combined_at(
    lw: Lowering, x: Value, dim: int, index: Value, source: Value, body: Callable[[Expr], Expr],
    op: str,
) -> Value:  # fmt: skip
    """`x` with each slice of `source` along `dim` combined into the slice that `index` names."""
    if x.ndim == 0:
        raise NoRule("colliding slices of a 0-dim tensor")
    dim = wrap(dim, x.ndim)

    def target(idx: tuple[Index, ...]) -> list[Index]:
        coords = list(idx)
        coords[dim] = place(lw, index.at([idx[dim]] if index.ndim else []), x.shape[dim])
        return coords

    return scattered(
        lw, x, source.shape, lambda idx: body(cast(source.at(idx), x.dtype)), target, op
    )


@rule(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    lw: Lowering, g: Value, index: Value, num_weights: Size, padding_idx: int,
    scale_grad_by_freq: bool,
) -> Value:  # fmt: skip
    if scale_grad_by_freq:
        raise NoRule("gradient scaled by frequency")
    width = g.shape[-1]
    zeros = lw.pointwise((num_weights, width), g.dtype, lambda idx: const(0.0, g.dtype))

    def body(idx: tuple[Index, ...]) -> Expr:
        item = g.at(idx)
        if isinstance(padding_idx, int) and padding_idx < 0:
            return item
        padding = lw.scalar(padding_idx, torch.int64)
        skip = compare("eq", cast(index.at(idx[:-1]), torch.int64), padding)
        return select(skip, 0.0, item)

    def target(idx: tuple[Index, ...]) -> list[Index]:
        return [place(lw, index.at(idx[:-1]), num_weights, negative=False), idx[-1]]

    return scattered(lw, zeros, g.shape, body, target, "sum")


@rule(aten.nll_loss_forward.default)
def nll_loss_forward(
    lw: Lowering, x: Value, target: Value, weight: Any, reduction: int, ignore_index: int
) -> tuple[Value, Value]:
    from dicp.loop.lowering.reduction import total, wide

    dtype = wide(x.dtype)
    rows = x.shape[:-1]

    def picked(idx: tuple[Index, ...]) -> tuple[Expr, Expr]:
        label = target.at(idx if target.ndim else [])
        skip = compare("eq", label, ignore_index)
        at = place(lw, select(skip, 0, label), x.shape[-1], negative=False)
        scale = cast(weight.at([at]), dtype) if weight is not None else const(1.0, dtype)
        scale = select(skip, 0.0, scale)
        loss = select(skip, 0.0, -cast(x.at([*idx, at]), dtype) * scale)
        return loss, scale

    losses = lw.pointwise(rows, dtype, lambda idx: picked(idx)[0])
    scales = lw.pointwise(rows, dtype, lambda idx: picked(idx)[1])
    axes = list(range(len(rows)))
    out = lw.meta(0).dtype
    if reduction == 0 and rows:
        zero = lw.pointwise((), dtype, lambda idx: const(0.0, dtype))
        return lw.cast(losses, out), lw.cast(zero, lw.meta(1).dtype)
    weight_sum = lw.squeeze(total(lw, scales, axes, dtype), axes)
    loss_sum = lw.squeeze(total(lw, losses, axes, dtype), axes)
    if reduction == 1:
        loss_sum = lw.map(lambda a, b: a / b, loss_sum, weight_sum)
    return lw.cast(loss_sum, out), lw.cast(weight_sum, lw.meta(1).dtype)


@rule(aten.nll_loss_backward.default)
def nll_loss_backward(
    lw: Lowering, g: Value, x: Value, target: Value, weight: Any, reduction: int,
    ignore_index: int, total_weight: Value,
) -> Value:  # fmt: skip
    dtype = x.dtype

    def body(idx: tuple[Index, ...]) -> Expr:
        label = cast(target.at(idx[:-1] if target.ndim else []), torch.int64)
        grad = g.at(idx[:-1] if g.ndim else [])
        grad = (
            grad / cast(total_weight.at([ZERO] * total_weight.ndim), dtype)
            if (reduction == 1)
            else grad
        )
        skip = compare("eq", label, ignore_index)
        hit = compare("eq", label, ir.index_value(idx[-1]))
        hit = apply("bitwise_and", torch.bool, hit, apply("logical_not", torch.bool, skip))
        if weight is not None:
            grad = grad * weight.at([idx[-1]])
        return select(hit, -grad, 0.0)

    return lw.pointwise(x.shape, dtype, body)
