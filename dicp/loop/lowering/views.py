"""Views and data movement: pure index arithmetic, no memory is touched here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Ref
from dicp.loop.ir.index import (
    ZERO,
    Index,
    Size,
    Var,
    domain,
    floordiv,
    is_positive,
    mod,
    normal,
    variable,
)
from dicp.loop.lowering.core import Lowering, Value
from dicp.loop.lowering.layout import sizes_of, strides_of
from dicp.loop.lowering.rules import NoRule, RuleTable

aten = torch.ops.aten
VIEWS = RuleTable()
view_rule = VIEWS.register


def wrap(axis: int, rank: int) -> int:
    return axis % rank if rank else 0


@view_rule(aten.view.default, aten.reshape, aten._unsafe_view, aten.view_copy.default, kind="view")
def view(lw: Lowering, x: Value, shape: Sequence[Any]) -> Value:
    return lw.reshape(x, sizes_of(lw.meta().shape))


@view_rule(aten.permute, aten.permute_copy, kind="view")
def permute(lw: Lowering, x: Value, dims: Sequence[int]) -> Value:
    return lw.permute(x, dims)


@view_rule(aten.transpose.int, aten.transpose_copy.int, kind="view")
def transpose(lw: Lowering, x: Value, a: int, b: int) -> Value:
    order = list(range(x.ndim))
    if order:
        order[a], order[b] = order[b], order[a]
    return lw.permute(x, order)


@view_rule(aten.t, aten.t_copy, kind="view")
def t(lw: Lowering, x: Value) -> Value:
    return lw.permute(x, list(reversed(range(x.ndim))))


@view_rule(aten.expand, aten.expand_copy, aten.broadcast_to, kind="view")
def expand(lw: Lowering, x: Value, shape: Sequence[Any], *, implicit: bool = False) -> Value:
    return lw.expand(x, sizes_of(lw.meta().shape))


@view_rule(aten.squeeze, aten.squeeze_copy, kind="view")
def squeeze(lw: Lowering, x: Value, dims: Any = None) -> Value:
    if dims is None:
        dims = range(x.ndim)
    axes = [dims] if isinstance(dims, int) else list(dims)
    axes = [a for a in (wrap(d, x.ndim) for d in axes) if x.ndim and x.shape[a] == 1]
    return lw.squeeze(x, axes)


@view_rule(aten.unsqueeze, aten.unsqueeze_copy, kind="view")
def unsqueeze(lw: Lowering, x: Value, dim: int) -> Value:
    return lw.unsqueeze(x, dim % (x.ndim + 1))


@view_rule(aten.alias, aten.detach, aten.alias_copy, aten.detach_copy, kind="view")
def alias(lw: Lowering, x: Value) -> Value:
    return x


@view_rule(aten.select.int, aten.select_copy.int, kind="view")
def select(lw: Lowering, x: Value, dim: int, index: Size) -> Value:
    dim = wrap(dim, x.ndim)
    if not isinstance(index, (int, sympy.Basic)):
        raise NoRule("select by a tensor index")
    if isinstance(index, int) and index < 0:
        index = normal(x.shape[dim] + index)
    elif not isinstance(index, int) and not index.is_nonnegative:
        raise NoRule("select at an index of unknown sign")
    at = Index(normal(index))
    shape = [s for i, s in enumerate(x.shape) if i != dim]
    return lw.view(x, shape, lambda idx: [*idx[:dim], at, *idx[dim:]])


def narrow(lw: Lowering, x: Value, dim: int, start: Size, step: int, size: Size) -> Value:
    shape = [*x.shape[:dim], size, *x.shape[dim + 1 :]]
    return lw.view(
        x, shape, lambda idx: [i * step + start if k == dim else i for k, i in enumerate(idx)]
    )


def slice_start(size: Size, start: Any) -> Size:
    """The first index of `x[start:]`, clamped as Python slices are."""
    if start is None:
        return 0
    start = normal(start)
    if isinstance(start, int) and isinstance(size, int):
        return min(max(start + size, 0), size) if start < 0 else min(start, size)
    if isinstance(start, int) and start < 0:
        moved = normal(size + start)
        return moved if is_positive(normal(moved + 1)) else normal(sympy.Max(0, moved))
    if start == 0 or is_positive(normal(size - start + 1)):
        return start
    return normal(sympy.Min(start, size))


@view_rule(aten.slice.Tensor, aten.slice_copy.Tensor, kind="view")
def slice_(
    lw: Lowering, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Value:
    dim = wrap(dim, x.ndim)
    size = sizes_of(lw.meta().shape)[dim]
    return narrow(lw, x, dim, slice_start(x.shape[dim], start), step, size)


@view_rule(aten.narrow.default, kind="view")
def narrow_rule(lw: Lowering, x: Value, dim: int, start: Size, length: Size) -> Value:
    dim = wrap(dim, x.ndim)
    return narrow(lw, x, dim, slice_start(x.shape[dim], start), 1, normal(length))


@view_rule(
    aten.split.Tensor,
    aten.split_with_sizes,
    aten.split_copy.Tensor,
    aten.split_with_sizes_copy,
    kind="view",
)
def split(lw: Lowering, x: Value, sizes: Any, dim: int = 0) -> list[Value]:
    dim = wrap(dim, x.ndim)
    pieces, start = [], 0
    assert lw.node is not None
    for meta in lw.node.meta["val"]:
        size = sizes_of(meta.shape)[dim]
        pieces.append(narrow(lw, x, dim, start, 1, size))
        start = normal(start + size)  # type: ignore[assignment]
    return pieces


@view_rule(aten.unbind.int, aten.unbind_copy.int, kind="view")
def unbind(lw: Lowering, x: Value, dim: int = 0) -> list[Value]:
    dim = wrap(dim, x.ndim)
    size = x.shape[dim]
    if not isinstance(size, int):
        raise NoRule("unbind of a dynamic axis")
    return [select(lw, x, dim, i) for i in range(size)]


@view_rule(aten.diagonal, aten.diagonal_copy, kind="view")
def diagonal(lw: Lowering, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    a, b = wrap(dim1, x.ndim), wrap(dim2, x.ndim)
    shape = sizes_of(lw.meta().shape)
    rest = [i for i in range(x.ndim) if i not in (a, b)]

    def coords(idx: tuple[Index, ...]) -> list[Index]:
        at = {axis: idx[k] for k, axis in enumerate(rest)}
        at[a] = idx[-1] + max(-offset, 0)
        at[b] = idx[-1] + max(offset, 0)
        return [at[i] for i in range(x.ndim)]

    return lw.view(x, shape, coords)


@view_rule(aten.unfold, aten.unfold_copy, kind="view")
def unfold(lw: Lowering, x: Value, dim: int, size: int, step: int) -> Value:
    dim = wrap(dim, x.ndim)
    shape = sizes_of(lw.meta().shape)
    if x.ndim == 0:
        return lw.view(x, shape, lambda idx: [])
    return lw.view(
        x,
        shape,
        lambda idx: [i * step + idx[-1] if k == dim else i for k, i in enumerate(idx[:-1])],
    )


@view_rule(aten.flip, kind="view")
def flip(lw: Lowering, x: Value, dims: Sequence[int]) -> Value:
    axes = {wrap(d, x.ndim) for d in dims}

    def coords(idx: tuple[Index, ...]) -> list[Index]:
        return [
            i * -1 + normal(s - 1) if k in axes else i
            for k, (i, s) in enumerate(zip(idx, x.shape, strict=True))
        ]

    moved = lw.view(x, x.shape, coords)
    return lw.pointwise(x.shape, x.dtype, moved.at)


@view_rule(aten.roll)
def roll(lw: Lowering, x: Value, shifts: Sequence[int], dims: Sequence[int] = ()) -> Value:
    if not dims:
        flat = lw.reshape(x, [normal(sympy.prod(x.shape)) if x.ndim else 1])
        return lw.reshape(roll(lw, flat, shifts, [0]), x.shape)
    moves = {wrap(d, x.ndim): 0 for d in dims}
    for d, s in zip(dims, shifts, strict=True):
        moves[wrap(d, x.ndim)] += s
    if any(x.shape[d] == 0 for d in moves):
        return x

    def coords(idx: tuple[Index, ...]) -> list[Index]:
        result = list(idx)
        for axis, shift in moves.items():
            size = x.shape[axis]
            back = -shift % size if isinstance(size, int) else normal(sympy.Mod(-shift, size))
            result[axis] = mod(idx[axis] + back, size)
        return result

    return lw.pointwise(x.shape, x.dtype, lambda idx: x.at(coords(idx)))


@view_rule(aten.repeat)
def repeat(lw: Lowering, x: Value, repeats: Sequence[Any]) -> Value:
    shape = sizes_of(lw.meta().shape)
    lead = len(shape) - x.ndim

    def body(idx: tuple[Index, ...]) -> ir.Expr:
        return x.at([ZERO if s == 1 else mod(idx[k + lead], s) for k, s in enumerate(x.shape)])

    return lw.pointwise(shape, x.dtype, body)


@view_rule(aten.as_strided.default, aten.as_strided_copy, kind="view")
def as_strided(
    lw: Lowering, x: Value, size: Sequence[Any], stride: Sequence[Any], offset: Any = None
) -> Value:
    """A view of the storage: the tensor is put into memory and aliased."""
    assert lw.node is not None
    source = lw.node.args[0].meta["val"]  # type: ignore[union-attr]
    ref = lw.realize(x, strides_of(source))
    shift = normal(0 if offset is None else offset - sizes_of([source.storage_offset()])[0])
    alias_ref = Ref(
        lw._name("v"), sizes_of(size), x.dtype, sizes_of(stride), "alias", shift, base=ref
    )
    return lw.value_of(alias_ref)


def _copy(lw: Lowering, x: Value, **kwargs: Any) -> Value:
    return lw.pointwise(x.shape, x.dtype, x.at)


VIEWS.add(aten.clone, _copy)
VIEWS.add(aten.lift_fresh_copy.default, _copy)
VIEWS.add(aten.contiguous.default, _copy)


@view_rule(aten.lift_fresh.default, kind="view")
def lift_fresh(lw: Lowering, x: Value) -> Value:
    return x


@view_rule(aten._to_copy.default, torch.ops.prims.convert_element_type.default)
def to_copy(lw: Lowering, x: Value, dtype: torch.dtype | None = None, **kwargs: Any) -> Value:
    dtype = lw.meta().dtype
    if kwargs.get("dtype") is not None:
        dtype = kwargs["dtype"]
    return lw.pointwise(x.shape, dtype, lambda idx: ir.rounded(x.at(idx), dtype))


@view_rule(aten.cat)
def cat(lw: Lowering, tensors: Sequence[Value], dim: int = 0) -> Value:
    """One kernel per piece, each storing into its part of the result."""
    meta = lw.meta()
    shape = sizes_of(meta.shape)
    pieces = [p for p in tensors if not (p.ndim == 1 and p.shape[0] == 0 and len(shape) != 1)]
    dim = wrap(dim, len(shape))
    if len(pieces) == 1:
        return lw.cast(lw.map(lambda e: e, pieces[0]), meta.dtype)
    return concatenate(lw, pieces, dim, shape, meta.dtype)


def concatenate(
    lw: Lowering, pieces: Sequence[Value], dim: int, shape: tuple[Size, ...], dtype: torch.dtype
) -> Value:
    """Nested selects for a few pieces read once each: a load is only made where it applies."""
    starts: list[Size] = [0]
    for piece in pieces:
        starts.append(normal(starts[-1] + piece.shape[dim]))

    def body(idx: tuple[Index, ...]) -> ir.Expr:
        at = idx[dim]
        position = ir.index_value(at)
        result: ir.Expr | None = None
        for k in range(len(pieces) - 1, -1, -1):
            place = list(idx)
            place[dim] = at + normal(-1 * starts[k])
            low = ir.index_value(Index(starts[k]))
            reached = ir.apply("ge", torch.bool, position, low)
            value = ir.cast(pieces[k].at(place), dtype)
            if result is None:
                result = value if k == 0 else ir.masked(reached, value)
                continue
            before_end = ir.apply("lt", torch.bool, position, ir.index_value(Index(starts[k + 1])))
            here = ir.apply("bitwise_and", torch.bool, reached, before_end) if k else before_end
            result = ir.Expr("where", dtype, (before_end, ir.masked(here, value), result))
        assert result is not None
        return result

    return lw.pointwise(shape, dtype, body)


@view_rule(aten.stack)
def stack(lw: Lowering, tensors: Sequence[Value], dim: int = 0) -> Value:
    meta = lw.meta()
    shape = sizes_of(meta.shape)
    dim = wrap(dim, len(shape))
    return concatenate(lw, [lw.unsqueeze(p, dim) for p in tensors], dim, shape, meta.dtype)


@view_rule(aten.constant_pad_nd)
def constant_pad_nd(lw: Lowering, x: Value, pad: Sequence[Any], value: Any = 0) -> Value:
    shape = sizes_of(lw.meta().shape)
    low: list[Size] = [0] * x.ndim
    for k in range(len(pad) // 2):
        low[x.ndim - 1 - k] = normal(pad[2 * k])

    def body(idx: tuple[Index, ...]) -> ir.Expr:
        place = [i + normal(-1 * p) for i, p in zip(idx, low, strict=True)]
        inside = inside_bounds(place, x.shape, shape)
        item = x.at(place)
        if inside is None:
            return item
        filler = lw.scalar(value, x.dtype)
        return ir.Expr("where", x.dtype, (inside, ir.masked(inside, item), filler))

    return lw.pointwise(shape, x.dtype, body)


def inside_bounds(
    place: Sequence[Index], shape: Sequence[Size], outer: Sequence[Size]
) -> ir.Expr | None:
    """Whether `place` lies inside `shape`; None where every point does."""
    test: ir.Expr | None = None
    for at, size, wide in zip(place, shape, outer, strict=True):
        if size == wide and at.const == 0:
            continue
        position = ir.index_value(at)
        low = ir.apply("ge", torch.bool, position, ir.const(0, torch.int64))
        high = ir.apply("lt", torch.bool, position, ir.index_value(Index(size)))
        both = ir.apply("bitwise_and", torch.bool, low, high)
        test = both if test is None else ir.apply("bitwise_and", torch.bool, test, both)
    return test


def _replaced(lw: Lowering, x: Value, dim: int, inside: Any, source: Any) -> Value:
    """x with the points where `inside(idx)` holds read from `source(idx)`."""

    def body(idx: tuple[Index, ...]) -> ir.Expr:
        test = inside(idx)
        return ir.Expr("where", x.dtype, (test, ir.masked(test, source(idx)), x.at(idx)))

    return lw.pointwise(x.shape, x.dtype, body)


@view_rule(aten.select_scatter)
def select_scatter(lw: Lowering, x: Value, src: Value, dim: int, index: int) -> Value:
    dim = wrap(dim, x.ndim)
    at = normal(x.shape[dim] + index) if isinstance(index, int) and index < 0 else normal(index)

    def inside(idx: tuple[Index, ...]) -> ir.Expr:
        here = ir.index_value(idx[dim])
        return ir.apply("eq", torch.bool, here, ir.index_value(Index(at)))

    return _replaced(
        lw, x, dim, inside, lambda idx: ir.cast(src.at([*idx[:dim], *idx[dim + 1 :]]), x.dtype)
    )


@view_rule(aten.slice_scatter)
def slice_scatter(
    lw: Lowering, x: Value, src: Value, dim: int = 0, start: Any = None, end: Any = None,
    step: int = 1,
) -> Value:  # fmt: skip
    dim = wrap(dim, x.ndim)
    first = slice_start(x.shape[dim], start)
    last = normal(first + (src.shape[dim] - 1) * step)

    def inside(idx: tuple[Index, ...]) -> ir.Expr:
        here = ir.index_value(idx[dim])
        test = ir.apply("ge", torch.bool, here, ir.index_value(Index(first)))
        high = ir.apply("le", torch.bool, here, ir.index_value(Index(last)))
        test = ir.apply("bitwise_and", torch.bool, test, high)
        if step != 1:
            phase = ir.index_value(mod(idx[dim] + normal(-1 * first), step))
            zero = ir.apply("eq", torch.bool, phase, ir.const(0, torch.int64))
            test = ir.apply("bitwise_and", torch.bool, test, zero)
        return test

    def source(idx: tuple[Index, ...]) -> ir.Expr:
        place = list(idx)
        place[dim] = floordiv(idx[dim] + normal(-1 * first), step)
        return ir.cast(src.at(place), x.dtype)

    return _replaced(lw, x, dim, inside, source)


@view_rule(aten.diagonal_scatter)
def diagonal_scatter(
    lw: Lowering, x: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Value:
    a, b = wrap(dim1, x.ndim), wrap(dim2, x.ndim)

    def inside(idx: tuple[Index, ...]) -> ir.Expr:
        here = ir.index_value(idx[a] + offset)
        return ir.apply("eq", torch.bool, here, ir.index_value(idx[b]))

    def source(idx: tuple[Index, ...]) -> ir.Expr:
        rest = [i for k, i in enumerate(idx) if k not in (a, b)]
        return ir.cast(src.at([*rest, idx[a] + min(offset, 0)]), x.dtype)

    return _replaced(lw, x, a, inside, source)


__all__ = ["VIEWS", "Var", "domain", "inside_bounds", "variable", "wrap"]
