"""Reads at computed indices: gather, index, index_select, take, embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dicp.indices import UNSAFE_INDEXING, depends_on_sizes_alone
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, apply, cast, const
from dicp.loop.ir.index import ZERO, Index, Indirect, Size, normal, product
from dicp.loop.lowering.conditions import compare, select
from dicp.loop.lowering.core import Lowering, Value
from dicp.loop.lowering.layout import broadcast_shapes, sizes_of
from dicp.loop.lowering.views import wrap
from dicp.loop.thresholds import TABLE_USES
from dicp.rules import NoRule, RuleTable
from dicp.torch_private import HOST

aten = torch.ops.aten
INDEXING = RuleTable()
rule = INDEXING.register


def proven(at: Expr, size: Size) -> Index:
    """A computed coordinate that is in 0 .. size-1 by construction, so that it needs no check."""
    return Index(0, ((Indirect(at, size), 1),))


def clamped(at: Expr, size: Size) -> Index:
    """A computed coordinate clamped to 0 .. size-1."""
    return proven(_clamp(at, size), size)


def _clamp(at: Expr, size: Size) -> Expr:
    low = apply("maximum", torch.int64, at, const(0, torch.int64))
    return apply("minimum", torch.int64, low, ir.index_value(Index(normal(size - 1))))


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


class StoredIndices(Indices):
    """Indices that a loop of their own has brought into bounds."""

    def _place(self, index: Expr) -> Index:
        return proven(index, self.size)


class ComputedIndices(StoredIndices):
    """Indices that a decomposition computes from sizes alone: clamped, as rounding may be off.

    They are clamped where they are computed: many elements of the result read one of them.
    """

    def __init__(
        self, lw: Lowering, index: Value, size: Size, *, wrap: bool, count: Size | None = None
    ) -> None:
        def body(idx: tuple[Index, ...]) -> Expr:
            return _clamp(wrapped(lw, cast(index.at(idx), torch.int64), size), size)

        in_bounds = lw.indices_in_bounds.get((index, size))
        if in_bounds is None:
            in_bounds = lw.pointwise(index.shape, torch.int64, body)
            lw.indices_in_bounds[index, size] = in_bounds
        super().__init__(lw, in_bounds, size, wrap=wrap, count=count)


class CheckedBefore(StoredIndices):
    """Indices that many elements of the result read along a loop: checked once, in a loop of their
    own, as loops that may report an error are not vectorized."""

    def __init__(
        self, lw: Lowering, index: Value, size: Size, *, wrap: bool, count: Size | None = None
    ) -> None:
        def body(idx: tuple[Index, ...]) -> Expr:
            return checked(lw, index.at(idx), size, wrap=wrap)

        in_bounds = lw.value_of(lw.realize(lw.pointwise(index.shape, torch.int64, body)))
        super().__init__(lw, in_bounds, size, wrap=wrap, count=count)


def _of_columns(lw: Lowering, x: Value, dim: int) -> type[Indices]:
    """How indices along `dim` are kept in bounds: those of columns, before many rows of them."""
    like, rows = lw.meta(), product(x.shape[:dim])
    along = like.device.type == HOST and dim == x.ndim - 1 and like.stride(dim) == 1
    many = isinstance(rows, int) and rows >= TABLE_USES
    return CheckedBefore if along and many else Indices


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


def is_empty(index: Value) -> bool:
    """Whether there are no indices: then their rank may differ from the indexed tensor's."""
    return any(size == 0 for size in index.shape)


@rule(aten.index_select)
def index_select(lw: Lowering, x: Value, dim: int, index: Value) -> Value:
    if x.ndim == 0:
        place = Indices(lw, index, 1, wrap=False).along(ZERO)
        row = lw.unsqueeze(x, 0)
        return lw.pointwise((), x.dtype, lambda idx: row.at([place]))
    dim = wrap(dim, x.ndim)
    places = _of_columns(lw, x, dim)(lw, index, x.shape[dim], wrap=False)

    def body(idx: tuple[Index, ...]) -> Expr:
        return x.at([*idx[:dim], places.along(idx[dim]), *idx[dim + 1 :]])

    return lw.pointwise(sizes_of(lw.meta().shape), x.dtype, body)


@rule(aten.take.default)
def take(lw: Lowering, x: Value, index: Value) -> Value:
    size = product(x.shape)
    flat, places = lw.reshape(x, (size,)), Indices(lw, index, size, wrap=True)
    return lw.pointwise(index.shape, x.dtype, lambda idx: flat.at([places.at(idx)]))


@rule(aten.embedding.default)
def embedding(
    lw: Lowering, weight: Value, index: Value, padding_idx: int = -1,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Value:  # fmt: skip
    shape = (*index.shape, weight.shape[1])
    rows = Indices(lw, index, weight.shape[0], wrap=False)
    return lw.pointwise(shape, weight.dtype, lambda idx: weight.at([rows.at(idx[:-1]), idx[-1]]))


def index_layout(indices: Sequence[Value | None]) -> tuple[list[int], tuple[Size, ...], int]:
    """Indexed axes, the broadcast shape of the indices, and its first axis in the result."""
    axes = [k for k, i in enumerate(indices) if i is not None]
    shape = broadcast_shapes(*(i.shape for i in indices if i is not None))
    adjacent = axes == list(range(axes[0], axes[-1] + 1))
    return axes, shape, axes[0] if adjacent else 0


def index_coords(
    lw: Lowering, x: Value, indices: Sequence[Value | None]
) -> Callable[[Sequence[Index]], list[Index]]:
    """The coordinates in `x` of a result point of `x[indices]`."""
    _, shape, start = index_layout(indices)
    kinds = _kinds_of_indices(lw, len(indices))
    places = [
        None if index is None else kind(lw, index, x.shape[axis], wrap=True, count=product(shape))
        for axis, (index, kind) in enumerate(zip(indices, kinds, strict=True))
    ]
    places += [None] * (x.ndim - len(places))

    def coords(idx: Sequence[Index]) -> list[Index]:
        inner = idx[start : start + len(shape)]
        rest = iter([*idx[:start], *idx[start + len(shape) :]])
        return [next(rest) if at is None else at.broadcast_at(inner) for at in places]

    return coords


def _kinds_of_indices(lw: Lowering, count: int) -> list[type[Indices]]:
    """How each index of an indexing operator is kept in bounds: checked or clamped."""
    if lw.node.target not in UNSAFE_INDEXING:
        return [Indices] * count
    nodes = lw.node.args[1]
    assert isinstance(nodes, (list, tuple))
    return [ComputedIndices if depends_on_sizes_alone(n) else Indices for n in nodes]


def no_masks(indices: Sequence[Value | None]) -> None:
    """Raises NoRule for indices that are boolean masks, or where there are none."""
    if not any(i is not None for i in indices):
        raise NoRule("no index tensor is given")
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        raise NoRule("boolean mask indices give a data-dependent shape")


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index_tensor(lw: Lowering, x: Value, indices: Sequence[Value | None]) -> Value:
    no_masks(indices)
    coords = index_coords(lw, x, indices)
    return lw.pointwise(sizes_of(lw.meta().shape), x.dtype, lambda idx: x.at(coords(idx)))
