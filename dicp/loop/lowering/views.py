"""Views and data movement: pure index arithmetic, no memory is touched here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch

from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Ref
from dicp.loop.ir.graph import Call
from dicp.loop.ir.index import (
    ZERO,
    Index,
    Size,
    is_nonnegative,
    is_positive,
    mod,
    normal,
)
from dicp.loop.lowering.conditions import all_of, both, compare
from dicp.loop.lowering.core import Lowering, Value
from dicp.loop.lowering.layout import sizes_of, strides_of
from dicp.loop.thresholds import MAX_CONCATENATED
from dicp.rules import NoRule, RuleTable

aten = torch.ops.aten
VIEWS = RuleTable()
view_rule = VIEWS.register


def wrap(axis: int, rank: int) -> int:
    """`axis` counted from the first. Raises NoRule for what is none: eager raises its own error."""
    if not -max(rank, 1) <= axis < max(rank, 1):
        raise NoRule(f"dimension {axis} of a tensor of {rank}, which eager refuses")
    return axis % rank if rank else 0


@view_rule(aten.view.default, aten.reshape, aten._unsafe_view, kind="view")
def view(lw: Lowering, x: Value, shape: Sequence[Any]) -> Value:
    return lw.reshape(x, sizes_of(lw.meta().shape))


@view_rule(aten.permute, kind="view")
def permute(lw: Lowering, x: Value, dims: Sequence[int]) -> Value:
    return lw.permute(x, dims)


@view_rule(aten.transpose.int, kind="view")
def transpose(lw: Lowering, x: Value, a: int, b: int) -> Value:
    order = list(range(x.ndim))
    if order:
        order[a], order[b] = order[b], order[a]
    return lw.permute(x, order)


@view_rule(aten.t, kind="view")
def t(lw: Lowering, x: Value) -> Value:
    return lw.permute(x, list(reversed(range(x.ndim))))


@view_rule(aten.expand, aten.broadcast_to, kind="view")
def expand(lw: Lowering, x: Value, shape: Sequence[Any], *, implicit: bool = False) -> Value:
    return lw.expand(x, sizes_of(lw.meta().shape))


@view_rule(aten.squeeze, kind="view")
def squeeze(lw: Lowering, x: Value, dims: Any = None) -> Value:
    if dims is None:
        dims = range(x.ndim)
    axes = [dims] if isinstance(dims, int) else list(dims)
    axes = [a for a in (wrap(d, x.ndim) for d in axes) if x.ndim and x.shape[a] == 1]
    return lw.squeeze(x, axes)


@view_rule(aten.unsqueeze, kind="view")
def unsqueeze(lw: Lowering, x: Value, dim: int) -> Value:
    return lw.unsqueeze(x, dim % (x.ndim + 1))


@view_rule(aten.alias, aten.detach, kind="view")
def alias(lw: Lowering, x: Value) -> Value:
    return x


@view_rule(aten.select.int, kind="view")
def select(lw: Lowering, x: Value, dim: int, index: Size) -> Value:
    dim = wrap(dim, x.ndim)
    if not isinstance(index, (int, sympy.Basic)):
        raise NoRule("select by a tensor index")
    at = Index(from_start(lw, x.shape[dim], index))
    shape = [s for i, s in enumerate(x.shape) if i != dim]
    return lw.view(x, shape, lambda idx: [*idx[:dim], at, *idx[dim:]])


def narrow(lw: Lowering, x: Value, dim: int, start: Size, step: int, size: Size) -> Value:
    """`size` elements along axis `dim` from `start` on, `step` apart, as a view."""
    shape = [*x.shape[:dim], size, *x.shape[dim + 1 :]]
    return lw.view(
        x, shape, lambda idx: [i * step + start if k == dim else i for k, i in enumerate(idx)]
    )


def from_start(lw: Lowering, size: Size, index: Any) -> Size:
    """`index` along an axis of `size`, counted from the end where it is negative."""
    index = normal(index)
    if lw.proves(index >= 0):
        return index
    lw.require(index < 0, "an index of unknown sign")
    return normal(size + index)


def slice_start(lw: Lowering, size: Size, start: Any) -> Size:
    """The first index of `x[start:]`, clamped as Python slices are."""
    start = 0 if start is None else from_start(lw, size, start)
    if not lw.proves(start >= 0):
        start = normal(sympy.Max(0, start))
    return start if lw.proves(start <= size) else normal(sympy.Min(start, size))


@view_rule(aten.slice.Tensor, kind="view")
def slice_(
    lw: Lowering, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Value:
    dim = wrap(dim, x.ndim)
    size = sizes_of(lw.meta().shape)[dim]
    return narrow(lw, x, dim, slice_start(lw, x.shape[dim], start), step, size)


@view_rule(aten.narrow.default, kind="view")
def narrow_rule(lw: Lowering, x: Value, dim: int, start: Size, length: Size) -> Value:
    dim = wrap(dim, x.ndim)
    return narrow(lw, x, dim, slice_start(lw, x.shape[dim], start), 1, normal(length))


@view_rule(aten.split.Tensor, aten.split_with_sizes, kind="view")
def split(lw: Lowering, x: Value, sizes: Any, dim: int = 0) -> list[Value]:
    dim = wrap(dim, x.ndim)
    parts, start = [], 0
    for meta in lw.node.meta["val"]:
        size = sizes_of(meta.shape)[dim]
        parts.append(narrow(lw, x, dim, start, 1, size))
        start = normal(start + size)  # type: ignore[assignment]
    return parts


@view_rule(aten.unbind.int, kind="view")
def unbind(lw: Lowering, x: Value, dim: int = 0) -> list[Value]:
    dim = wrap(dim, x.ndim)
    size = x.shape[dim]
    if not isinstance(size, int):
        raise NoRule("unbind of a dynamic axis")
    return [select(lw, x, dim, i) for i in range(size)]


@view_rule(aten.diagonal, kind="view")
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


@view_rule(aten.unfold, kind="view")
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

    return lw.copy(lw.view(x, x.shape, coords))


@view_rule(aten.roll)
def roll(lw: Lowering, x: Value, shifts: Sequence[int], dims: Sequence[int] = ()) -> Value:
    if not dims:
        flat = lw.reshape(x, [normal(sympy.prod(x.shape)) if x.ndim else 1])
        return lw.reshape(roll(lw, flat, shifts, [0]), x.shape)
    moves = {wrap(d, x.ndim): 0 for d in dims}
    for d, s in zip(dims, shifts, strict=True):
        moves[wrap(d, x.ndim)] += s
    if any(x.shape[d] == 0 for d in moves):
        return lw.copy(x)

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


@view_rule(aten.as_strided.default, kind="view")
def as_strided(
    lw: Lowering, x: Value, size: Sequence[Any], stride: Sequence[Any], offset: Any = None
) -> Value:
    """A view of the storage: the tensor is realized and aliased.

    Left to eager unless the view provably stays inside the tensor: the size of an input's storage
    and the input's offset in it are known only at run time.
    """
    source = lw.node.args[0].meta["val"]  # type: ignore[union-attr]
    ref = lw.realize(x, strides_of(source))
    shift = normal(0 if offset is None else offset - sizes_of([source.storage_offset()])[0])
    *views, root = _chain(ref)
    sizes, strides = sizes_of(size), sizes_of(stride)
    if root.role in ("input", "alias") and offset is not None:
        raise NoRule("an offset into the storage of an input")
    start = normal(shift + sum(r.offset for r in views))
    room = normal(_extent(root.shape, root.strides) - _extent(sizes, strides) - start)
    if not (is_positive(normal(start + 1)) and is_positive(normal(room + 1))):
        raise NoRule("a view that may reach past the tensor")
    alias_ref = Ref(lw._name("v"), sizes, x.dtype, strides, "alias", shift, base=ref)
    return lw.value_of(alias_ref)


def _chain(ref: Ref) -> Iterator[Ref]:
    """A buffer and its chain of bases, up to an input, a fresh result or a call's result."""
    while ref.base is not None and not isinstance(ref.producer, Call):
        yield ref
        ref = ref.base
    yield ref


def _extent(shape: Sequence[Size], strides: Sequence[Size]) -> Size:
    """Elements of memory from the first to the last, both included."""
    if any(s == 0 for s in shape):
        return 0
    return normal(1 + sum((s - 1) * t for s, t in zip(shape, strides, strict=True)))


@view_rule(aten.clone, aten.lift_fresh_copy.default, aten.contiguous.default)
def clone(lw: Lowering, x: Value, **kwargs: Any) -> Value:
    return x if lw.is_only_copied(x) else lw.copy(x)


@view_rule(aten.lift_fresh.default, kind="view")
def lift_fresh(lw: Lowering, x: Value) -> Value:
    return x


@view_rule(aten._to_copy.default, torch.ops.prims.convert_element_type.default)
def to_copy(lw: Lowering, x: Value, dtype: torch.dtype | None = None, **kwargs: Any) -> Value:
    dtype = lw.meta().dtype
    if kwargs.get("dtype") is not None:
        dtype = kwargs["dtype"]
    if not dtype.is_floating_point:
        lw.round_elements(x)
    return lw.pointwise(x.shape, dtype, lambda idx: ir.rounded(x.at(idx), dtype))


@view_rule(aten.cat)
def cat(lw: Lowering, tensors: Sequence[Value], dim: int = 0) -> Value:
    meta = lw.meta()
    shape = sizes_of(meta.shape)
    parts = [p for p in tensors if not (p.ndim == 1 and p.shape[0] == 0 and len(shape) != 1)]
    dim = wrap(dim, len(shape))
    if len(parts) == 1:
        return lw.cast(lw.copy(parts[0]), meta.dtype)
    return concatenate(lw, parts, dim, shape, meta.dtype)


def concatenate(
    lw: Lowering, parts: Sequence[Value], dim: int, shape: tuple[Size, ...], dtype: torch.dtype
) -> Value:
    """Concatenation as nested selects; only the selected tensor's load is executed.

    More than MAX_CONCATENATED tensors are a library call, which copies them one by one.
    """
    if len(parts) > MAX_CONCATENATED:
        return lw.call(aten.cat.default, (parts, dim), out_variant=aten.cat.out)[0]
    starts: list[Size] = [0]
    for part in parts:
        starts.append(normal(starts[-1] + part.shape[dim]))

    def body(idx: tuple[Index, ...]) -> ir.Expr:
        at = idx[dim]
        position = ir.index_value(at)
        result: ir.Expr | None = None
        for k in range(len(parts) - 1, -1, -1):
            place = list(idx)
            place[dim] = at + normal(-1 * starts[k])
            low = ir.index_value(Index(starts[k]))
            from_low = compare("ge", position, low)
            value = ir.cast(parts[k].at(place), dtype)
            if result is None:
                result = value if k == 0 else ir.masked(from_low, value)
                continue
            before_end = compare("lt", position, ir.index_value(Index(starts[k + 1])))
            here = both(from_low, before_end) if k else before_end
            result = ir.apply("where", dtype, before_end, ir.masked(here, value), result)
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
        inside = inside_bounds(place, x.shape)
        item = x.at(place)
        if inside is None:
            return item
        filler = lw.element(value, x.dtype)
        return ir.apply("where", x.dtype, inside, ir.masked(inside, item), filler)

    return lw.pointwise(shape, x.dtype, body)


def inside_bounds(place: Sequence[Index], shape: Sequence[Size]) -> ir.Expr | None:
    """Whether `place` lies inside `shape`; None where every point does."""
    tests = []
    for at, size in zip(place, shape, strict=True):
        position, last = ir.index_value(at), at.maximum()
        if not is_nonnegative(at.const):
            tests.append(compare("ge", position, 0))
        if last is None or not is_positive(normal(size - last)):
            tests.append(compare("lt", position, ir.index_value(Index(size))))
    return all_of(tests)
