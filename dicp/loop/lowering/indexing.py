"""Reads and writes at computed indices: gather, index, embedding, scatter, index_put."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, Ref, apply, cast, const
from dicp.loop.ir.graph import Compute
from dicp.loop.ir.index import ZERO, Index, Indirect, Size, domain, is_positive, normal, product
from dicp.loop.lowering.core import Lowering, Value
from dicp.loop.lowering.layout import broadcast_shapes, sizes_of
from dicp.loop.lowering.pointwise import compare, select
from dicp.loop.lowering.views import wrap
from dicp.rules import NoRule, RuleTable

aten = torch.ops.aten
INDEXING = RuleTable()
rule = INDEXING.register


def proven(at: Expr, size: Size) -> Index:
    """A computed coordinate that is in 0 .. size-1 by construction, so that it needs no check."""
    return Index(0, ((Indirect(at, size), 1),))


def clamped(at: Expr, size: Size) -> Index:
    """A computed coordinate clamped to 0 .. size-1."""
    low = apply("maximum", torch.int64, at, const(0, torch.int64))
    last = ir.index_value(Index(normal(size - 1)))
    return proven(apply("minimum", torch.int64, low, last), size)


def wrapped(lw: Lowering, index: Expr, size: Size) -> Expr:
    """An index whose negative values count from the end."""
    return select(compare("lt", index, 0), index + lw.scalar(size, torch.int64), index)


def checked(lw: Lowering, index: Expr, size: Size, *, wrap: bool) -> Expr:
    """An index from memory that must lie below `size`; negative ones count from the end if `wrap`.

    The run raises IndexOutOfBoundsError before anything is read or written there.
    """
    index = cast(index, torch.int64)
    if not lw.context.config.check_bounds:
        return wrapped(lw, index, size) if wrap else index
    limit = lw.scalar(size, torch.int64)
    op = "wrap_index" if wrap else "check_index"
    return ir.checked_index(op, index, limit, lw.origin)


class Indices:
    """A tensor of indices into a dimension of `size`, each checked where it is read.

    `wrap`: negative ones count from the end. `count`: how many eager checks, if not all; into an
    empty dimension there may be none.
    """

    def __init__(
        self, lw: Lowering, index: Value, size: Size, *, wrap: bool, count: Size | None = None
    ) -> None:
        self.lw, self.index, self.size, self.wrap = lw, index, size, wrap
        lw.require_indexable(size, product(index.shape) if count is None else count)

    def at(self, idx: Sequence[Index]) -> Index:
        return self._place(self.index.at(idx))

    def broadcast_at(self, idx: Sequence[Index]) -> Index:
        return self._place(self.index.broadcast_at(idx))

    def along(self, position: Index) -> Index:
        """The coordinate read at `position` from indices with one axis or none."""
        return self.at([position] if self.index.ndim else [])

    def _place(self, index: Expr) -> Index:
        return proven(checked(self.lw, index, self.size, wrap=self.wrap), self.size)


class ComputedIndices(Indices):
    """Indices that a decomposition computes from sizes alone: clamped, as rounding may be off."""

    def _place(self, index: Expr) -> Index:
        return clamped(wrapped(self.lw, cast(index, torch.int64), self.size), self.size)


@rule(aten.gather)
def gather(lw: Lowering, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    x = x if x.ndim else lw.unsqueeze(x, 0)
    if index.ndim == 0:
        place = Indices(lw, index, x.shape[0], wrap=False).at(())
        return lw.pointwise((), x.dtype, lambda idx: x.at([place]))
    if index.ndim != x.ndim:
        raise NoRule("indices of another rank, which only empty ones may have")
    dim = wrap(dim, x.ndim)
    places = Indices(lw, index, x.shape[dim], wrap=False)

    def body(idx: tuple[Index, ...]) -> Expr:
        return x.at([*idx[:dim], places.at(idx), *idx[dim + 1 :]])

    return lw.pointwise(index.shape, x.dtype, body)


def _is_empty(index: Value) -> bool:
    """Whether there are no indices: then their rank may differ from the indexed tensor's."""
    return any(size == 0 for size in index.shape)


@rule(aten.index_select)
def index_select(lw: Lowering, x: Value, dim: int, index: Value) -> Value:
    if x.ndim == 0:
        place = Indices(lw, index, 1, wrap=False).along(ZERO)
        row = lw.unsqueeze(x, 0)
        return lw.pointwise((), x.dtype, lambda idx: row.at([place]))
    dim = wrap(dim, x.ndim)
    places = Indices(lw, index, x.shape[dim], wrap=False)

    def body(idx: tuple[Index, ...]) -> Expr:
        return x.at([*idx[:dim], places.along(idx[dim]), *idx[dim + 1 :]])

    return lw.pointwise(sizes_of(lw.meta().shape), x.dtype, body)


@rule(aten.take.default)
def take(lw: Lowering, x: Value, index: Value) -> Value:
    size = product(x.shape)
    flat, places = lw.reshape(x, (size,)), Indices(lw, index, size, wrap=True)
    return lw.pointwise(index.shape, x.dtype, lambda idx: flat.at([places.at(idx)]))


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


@rule(aten.embedding.default)
def embedding(
    lw: Lowering, weight: Value, index: Value, padding_idx: int = -1,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Value:  # fmt: skip
    shape = (*index.shape, weight.shape[1])
    rows = Indices(lw, index, weight.shape[0], wrap=False)
    return lw.pointwise(shape, weight.dtype, lambda idx: weight.at([rows.at(idx[:-1]), idx[-1]]))


def index_layout(
    x: Value, indices: Sequence[Value | None]
) -> tuple[list[int], tuple[Size, ...], int]:
    """Indexed axes, the broadcast shape of the indices, and its first axis in the result."""
    axes = [k for k, i in enumerate(indices) if i is not None]
    shape = broadcast_shapes(*(i.shape for i in indices if i is not None))
    adjacent = axes == list(range(axes[0], axes[-1] + 1))
    return axes, shape, axes[0] if adjacent else 0


def index_coords(
    lw: Lowering, x: Value, indices: Sequence[Value | None]
) -> Callable[[Sequence[Index]], list[Index]]:
    """The coordinates in `x` of a result point of `x[indices]`."""
    _, shape, start = index_layout(x, indices)
    kinds = _kinds_of_indices(lw, len(indices))
    places = [
        None if index is None
        else kind(lw, index, x.shape[axis], wrap=True, count=product(shape))
        for axis, (index, kind) in enumerate(zip(indices, kinds, strict=True))
    ]  # fmt: skip
    places += [None] * (x.ndim - len(places))

    def coords(idx: Sequence[Index]) -> list[Index]:
        inner = idx[start : start + len(shape)]
        rest = iter([*idx[:start], *idx[start + len(shape) :]])
        return [next(rest) if at is None else at.broadcast_at(inner) for at in places]

    return coords


def _kinds_of_indices(lw: Lowering, count: int) -> list[type[Indices]]:
    """How each index of an indexing operator is kept in bounds: checked or clamped.

    `_unsafe_index` promises indices in bounds, but some decompositions pass it the user's indices.
    """
    assert lw.node is not None
    if lw.node.target not in (aten._unsafe_index.Tensor, aten._unsafe_index_put.default):
        return [Indices] * count
    nodes = lw.node.args[1]
    assert isinstance(nodes, (list, tuple))
    return [ComputedIndices if _is_computed(n) else Indices for n in nodes]


def _is_computed(node: Any) -> bool:
    """Whether a value depends on sizes at most, and on no tensor's elements."""
    pending, seen = [node] if isinstance(node, fx.Node) else [], set()
    while pending:
        here = pending.pop()
        if here in seen:
            continue
        seen.add(here)
        is_tensor = isinstance(here.meta.get("val"), torch.Tensor)
        if here.op != "call_function" and is_tensor:
            return False
        pending += here.all_input_nodes
    return True


def _no_masks(indices: Sequence[Value | None]) -> None:
    if not any(i is not None for i in indices):
        raise NoRule("no index tensor is given")
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        raise NoRule("boolean mask indices give a data-dependent shape")


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index_tensor(lw: Lowering, x: Value, indices: Sequence[Value | None]) -> Value:
    _no_masks(indices)
    coords = index_coords(lw, x, indices)
    return lw.pointwise(sizes_of(lw.meta().shape), x.dtype, lambda idx: x.at(coords(idx)))


def scattered(
    lw: Lowering,
    base: Value,
    shape: Sequence[Size],
    body: Callable[[tuple[Index, ...]], Expr],
    target: Callable[[tuple[Index, ...]], Sequence[Index]],
    op: str = "store",
) -> Value:
    """A copy of `base` with each `body(idx)` stored (or combined by `op`) at `target(idx)`."""
    wide = base.dtype if op == "store" else lw.combined_in(base.dtype)
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


def _scatter(lw: Lowering, x: Value, dim: int, index: Value, source: Any, op: str) -> Value:
    if _is_empty(index):
        return lw.map(lambda e: e, x)
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
    return scattered(
        lw, x, index.shape, body, lambda idx: [*idx[:dim], places.at(idx), *idx[dim + 1 :]], op
    )


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

    # Eager checks no index if `x` is empty.
    count = product(index.shape) if all(map(is_positive, x.shape)) else 0
    return _slices_at(lw, x, dim, index, source, body, "sum", count)


@rule(aten.index_reduce.default)
def index_reduce(
    lw: Lowering, x: Value, dim: int, index: Value, source: Value, reduce: str,
    *, include_self: bool = True,
) -> Value:  # fmt: skip
    if reduce not in _REDUCE or not include_self:
        raise NoRule("index_reduce by mean or without the old values")
    count = product(index.shape)
    return _slices_at(lw, x, dim, index, source, lambda v: v, _REDUCE[reduce], count)


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
    return scattered(
        lw, x, source.shape,
        lambda idx: body(cast(source.at(idx), x.dtype)),
        lambda idx: [*idx[:dim], places.along(idx[dim]), *idx[dim + 1 :]],
        op,
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
    if scale_grad_by_freq:
        raise NoRule("gradient scaled by frequency")
    lw.require_equal(g.shape[:-1], index.shape, "gradients do not fit the indices")
    width = g.shape[-1]
    zeros = lw.pointwise((num_weights, width), g.dtype, lambda idx: const(0.0, g.dtype))

    # Checked here too: where only the gradient is used, the forward lookup is not run.
    rows = Indices(lw, index, num_weights, wrap=False)

    def body(idx: tuple[Index, ...]) -> Expr:
        item = g.at(idx)
        if isinstance(padding_idx, int) and padding_idx < 0:
            return item
        padding = lw.scalar(padding_idx, torch.int64)
        skip = compare("eq", cast(index.at(idx[:-1]), torch.int64), padding)
        return select(skip, 0.0, item)

    def target(idx: tuple[Index, ...]) -> list[Index]:
        return [rows.at(idx[:-1]), idx[-1]]

    return scattered(lw, zeros, g.shape, body, target, "sum")


@rule(aten.nll_loss_forward.default)
def nll_loss_forward(
    lw: Lowering, x: Value, target: Value, weight: Any, reduction: int, ignore_index: int
) -> tuple[Value, Value]:
    from dicp.loop.lowering.reduction import total, wide

    dtype = wide(x.dtype)
    rows = x.shape[:-1]
    if x.shape[-1] == 0:
        raise NoRule("no class to pick from")

    def picked(idx: tuple[Index, ...]) -> tuple[Expr, Expr]:
        label = target.at(idx if target.ndim else [])
        skip = compare("eq", label, lw.scalar(ignore_index, label.dtype))
        label = checked(lw, select(skip, 0, label), x.shape[-1], wrap=False)
        at = proven(label, x.shape[-1])
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
        skip = compare("eq", label, lw.scalar(ignore_index, torch.int64))
        label = checked(lw, select(skip, 0, label), x.shape[-1], wrap=False)
        hit = compare("eq", label, ir.index_value(idx[-1]))
        hit = apply("bitwise_and", torch.bool, hit, apply("logical_not", torch.bool, skip))
        if weight is not None:
            grad = grad * weight.at([idx[-1]])
        return select(hit, -grad, 0.0)

    return lw.pointwise(x.shape, dtype, body)
