"""Maxima over windows and their positions, their gradients, and unpooling.

In: a tensor with spatial axes and its windows (`windows.py`). Out: computes of the loop IR.
Gradients gather where the target's `gathers_windows` is set, and some on the host; others scatter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch

from dicp.dtypes import opmath_dtype
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, apply, cast, const
from dicp.loop.ir.index import (
    Index,
    Size,
    contiguous_strides,
    flatten,
    floordiv,
    mod,
    normal,
    product,
)
from dicp.loop.ir.ops import neutral_element
from dicp.loop.lowering.conditions import all_of, both, compare, either, is_nan, select
from dicp.loop.lowering.core import Lowering, Value
from dicp.loop.lowering.indexing import Indices, clamped, proven
from dicp.loop.lowering.layout import sizes_of
from dicp.loop.lowering.scatter import scattered
from dicp.loop.lowering.windows import (
    AnyWindow,
    Window,
    adaptive_of,
    constants,
    guarded,
    summed,
    windows_of,
)
from dicp.loop.thresholds import MAX_ARGMAX, MAX_CHAIN, MAX_GATHERED
from dicp.rules import NoRule, RuleTable
from dicp.torch_private import HOST

aten = torch.ops.aten
MAX_POOLING = RuleTable()


NO_INDEX = -2
"""An index that no window has: an empty window has -1."""

Found = tuple[Expr, Expr]
"""A partial maximum: its value and its index."""


def _tree(larger: Callable[[Found, Found], Found], parts: list[Found]) -> Found:
    """The largest of `parts` by a balanced tree: a chain as deep as the window is large would
    exceed the recursion limit in later passes."""
    while len(parts) > 1:
        pairs = [larger(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]


def _in_int32(sizes: Sequence[Size]) -> bool:
    """Whether flat indices into `sizes` fit int32."""
    points = product(sizes)
    return isinstance(points, int) and points <= torch.iinfo(torch.int32).max


def maximum_with_index(
    lw: Lowering, x: Value, windows: Sequence[AnyWindow], dtype: torch.dtype = torch.int64
) -> tuple[Value, Value]:
    """The maximum of each window and its flat spatial index, as `dtype`; as in ATen, the last NaN
    wins."""
    taps, n = [w.taps() for w in windows], len(windows)
    counts = [count for count in taps if isinstance(count, int)]
    exact = any(isinstance(w, Window) and w.dilation != 1 for w in windows)
    many = len(counts) == n and math.prod(counts) > MAX_ARGMAX
    if many and any(w.out != 1 for w in windows):
        raise NoRule("maxima over several large windows")
    if many or len(counts) < n:
        if exact or not x.dtype.is_floating_point:
            raise NoRule("maximum of integers, or with dilation, over a large or symbolic window")
        return maximum_by_reductions(lw, x, windows)
    strides = contiguous_strides(x.shape[-n:])
    start = neutral_element("max", x.dtype)
    narrow = torch.int32 if _in_int32(x.shape[-n:]) else dtype  # vectors hold twice as many

    def point(idx: Sequence[Index], k: Sequence[Index]) -> tuple[Expr, list[Index], Expr | None]:
        """The value at window point `k`, its coordinates, and the test that it is inside, if any.

        Without dilation, a point outside is clamped to the nearest one, which is in the window too.
        """
        lead, at = idx[:-n], idx[-n:]
        parts = list(zip(windows, at, k, strict=True))
        if not exact:
            places = [w.nearest(o, i) for w, o, i in parts]
            return x.at([*lead, *places]), places, None
        found = [w.at(o, i) for w, o, i in parts]
        places = [p for p, _ in found]
        test = all_of([t for _, tests in found for t in tests])
        return guarded(test, x.at([*lead, *places]), start), places, test

    def counted(idx: tuple[Index, ...], k: tuple[Index, ...]) -> Found:
        item, places, test = point(idx, k)
        here = ir.index_value(flatten(places, strides), narrow)
        return item, here if test is None else select(test, here, const(-1, narrow))

    def larger(a: Found, b: Found) -> Found:
        """The larger of two adjacent partial maxima (value, index); index -1 marks an empty one."""
        better = compare("gt", b[0], a[0])
        if x.dtype.is_floating_point:
            better = either(better, is_nan(b[0]))
        if exact:
            better = either(better, compare("lt", a[1], 0))
            better = both(better, compare("ge", b[1], 0))
        return select(better, b[0], a[0]), select(better, b[1], a[1])

    def running(idx: tuple[Index, ...]) -> Found:
        return _tree(larger, [counted(idx, k) for k in constants(counts)])

    shape = (*x.shape[:-n], *(w.out for w in windows))
    values = lw.pointwise(shape, x.dtype, lambda idx: running(idx)[0])
    return values, lw.pointwise(shape, dtype, lambda idx: cast(running(idx)[1], dtype))


def maximum_by_columns(lw: Lowering, x: Value, windows: Sequence[AnyWindow]) -> tuple[Value, Value]:
    """As `maximum_with_index`, along all axes but the last first: loops over columns fill vectors,
    while windows begin anywhere in a row. (Adaptive pooling of rows in memory.)"""
    *outer, last = windows
    counts = [count for count in (w.taps() for w in windows) if isinstance(count, int)]
    known = len(counts) == len(windows) and math.prod(counts) <= MAX_ARGMAX
    if not known or not _in_int32(x.shape[-len(windows) :]) or math.prod(counts[:-1]) == 1:
        return maximum_with_index(lw, x, windows)
    columns = [*outer, Window(1, 1, 0, 1, last.size, last.size)]
    found = maximum_with_index(lw, x, columns, torch.int32)
    largest, places = (lw.value_of(lw.realize(value)) for value in found)

    def larger(a: Found, b: Found) -> Found:
        """The larger of two maxima (value, index), of equal ones that with the lower index."""
        precedes = compare("lt", b[1], a[1])
        equal = both(compare("eq", b[0], a[0]), precedes)
        better = either(compare("gt", b[0], a[0]), equal)
        if x.dtype.is_floating_point:
            nan = is_nan(b[0])
            kept = both(is_nan(a[0]), precedes)
            better = select(nan, apply("logical_not", torch.bool, kept), better)
        return select(better, b[0], a[0]), select(better, b[1], a[1])

    def running(idx: tuple[Index, ...]) -> Found:
        parts = []
        for k in range(counts[-1]):
            at = [*idx[:-1], last.nearest(idx[-1], Index(k))]
            parts.append((largest.at(at), places.at(at)))
        chains = [parts[k : k + MAX_CHAIN] for k in range(0, len(parts), MAX_CHAIN)]
        return _tree(larger, [reduce(larger, chain) for chain in chains])

    shape = (*x.shape[: -len(windows)], *(w.out for w in windows))
    values = lw.pointwise(shape, x.dtype, lambda idx: running(idx)[0])
    return values, lw.pointwise(shape, torch.int64, lambda idx: cast(running(idx)[1], torch.int64))


def maximum_by_reductions(
    lw: Lowering, x: Value, windows: Sequence[AnyWindow]
) -> tuple[Value, Value]:
    """As `maximum_with_index`, by reductions over windows of many points, or of a symbolic number.

    In: floating-point `x`, windows without dilation.
    """
    n, taps = len(windows), [w.taps() for w in windows]
    shape = sizes_of(lw.meta(0).shape)
    rank, steps = len(shape), contiguous_strides(taps)

    def placed(idx: Sequence[Index], k: Sequence[Index]) -> list[Index]:
        parts = zip(windows, idx[rank - n : rank], k, strict=True)
        return [w.nearest(o, i) for w, o, i in parts]

    def split(flat: Index) -> list[Index]:
        rest, found = flat, []
        for step in steps:
            found.append(floordiv(rest, step))
            rest = mod(rest, step)
        return found

    def over_taps(op: str, dtype: torch.dtype, item: Callable[..., Expr]) -> Value:
        axes, whole = [rank], (*shape, product(taps))
        return lw.reduce(op, whole, axes, dtype, lambda idx: item(idx, idx[rank]), keepdim=False)

    def value(idx: Sequence[Index], flat: Index) -> Expr:
        return x.at([*idx[: rank - n], *placed(idx, split(flat))])

    def nan_position(idx: Sequence[Index], flat: Index) -> Expr:
        return select(is_nan(value(idx, flat)), ir.index_value(flat), const(-1, torch.int64))

    largest = over_taps("max", x.dtype, value)
    first = over_taps("argmax", torch.int64, value)
    last_nan = over_taps("max", torch.int64, nan_position)

    def chosen(idx: tuple[Index, ...]) -> Expr:
        nan = last_nan.at(idx)
        point = proven(select(compare("ge", nan, 0), nan, first.at(idx)), product(taps))
        strides = contiguous_strides(x.shape[-n:])
        return ir.index_value(flatten(placed(idx, split(point)), strides))

    return largest, lw.pointwise(shape, torch.int64, chosen)


def _max_pool(n: int) -> Callable[..., tuple[Value, Value]]:
    def lowered(
        lw: Lowering, x: Value, kernel: Any, stride: Any = (), padding: Any = 0,
        dilation: Any = 1, ceil_mode: bool = False,
    ) -> tuple[Value, Value]:  # fmt: skip
        lw.round_elements(x)
        outs = sizes_of(lw.meta(0).shape)[-n:]
        windows = windows_of(x.shape[-n:], outs, kernel, stride, padding, dilation)
        return maximum_with_index(lw, x, windows)

    return lowered


def _adaptive_max_pool(n: int) -> Callable[..., tuple[Value, Value]]:
    def lowered(lw: Lowering, x: Value, output_size: Any) -> tuple[Value, Value]:
        lw.round_elements(x)
        windows = adaptive_of(x.shape[-n:], sizes_of(lw.meta(0).shape)[-n:])
        like = lw.meta(0)
        in_rows = like.device.type == HOST and like.stride(-1) == 1
        return (maximum_by_columns if in_rows else maximum_with_index)(lw, x, windows)

    return lowered


def _chosen_windows(
    lw: Lowering, g: Value, x: Value, index: Value, windows: Sequence[Window]
) -> Value:
    """The gradient as a gather: each input point sums those of the windows whose maximum it is.

    No stores collide. An index outside of its window adds nothing, as in PyTorch's GPU kernels.
    """
    n = len(windows)
    dtype = opmath_dtype(g.dtype)
    strides = contiguous_strides(x.shape[-n:])
    if not lw.gathers_windows:  # vectors compare twice as many
        index = lw.value_of(lw.realize(lw.cast(index, torch.int32), lw.realize(index).strides))

    def term(idx: tuple[Index, ...], j: tuple[Index, ...]) -> Expr:
        lead, at = idx[:-n], idx[-n:]
        over = [w.over(i, k)[0] for w, i, k in zip(windows, at, j, strict=True)]
        inside = [
            compare(op, ir.index_value(o), ir.index_value(bound))
            for w, o in zip(windows, over, strict=True)
            for op, bound in (("ge", Index(0)), ("lt", Index(w.out)))
        ]
        at_windows = zip(windows, over, strict=True)
        o = [*lead, *(clamped(ir.index_value(o), w.out) for w, o in at_windows)]
        here = ir.index_value(flatten(at, strides), index.dtype)
        test = all_of(inside)
        assert test is not None
        # The test of the window doesn't depend on the channel: loops over channels compare once.
        expected = select(test, here, const(NO_INDEX, index.dtype))
        return select(compare("eq", index.at(o), expected), cast(g.at(o), dtype), 0)

    total = summed(lw, x.shape, [w.covering() for w in windows], dtype, term)
    return lw.cast(total, x.dtype)


def _gathers(lw: Lowering, windows: Sequence[Window]) -> bool:
    """Whether the gradient gathers: on the host, where few windows of channels-last images overlap,
    whose channels fill vectors."""
    if any(w.dilation != 1 for w in windows):
        return False
    like = lw.meta()
    few = math.prod(w.covering() for w in windows) <= MAX_GATHERED
    on_host = like.device.type == HOST and like.stride(1) == 1 and few
    return lw.gathers_windows or (on_host and _in_int32([w.size for w in windows]))


def scatter_to_chosen(
    lw: Lowering, g: Value, x: Value, index: Value, n: int, none: bool = False
) -> Value:
    """Gradients scatter-added to zeros at the flat indices `index`; if `none`, -1 is skipped."""
    lw.require_equal(g.shape, index.shape, "gradients do not fit the indices")
    if none:
        g = lw.map(lambda i, g: select(compare("eq", i, -1), 0, g), index, g, dtype=g.dtype)
        index = lw.map(lambda i: select(compare("eq", i, -1), 0, i), index)
    result = _at_flat_places(lw, g, index, x.shape, n, opmath_dtype(x.dtype), "sum")
    return lw.cast(result, x.dtype)


def _at_flat_places(
    lw: Lowering, x: Value, index: Value, shape: Sequence[Size], n: int, dtype: torch.dtype,
    op: str,
) -> Value:  # fmt: skip
    """`x` scattered by `op` into zeros of `shape`, at flat indices into the last `n` axes."""
    lead, size = shape[:-n], product(shape[-n:])
    places = Indices(lw, index, size, wrap=False)
    zeros = lw.pointwise((*lead, size), dtype, lambda idx: const(0, dtype))
    result = scattered(
        lw, zeros, x.shape,
        lambda idx: cast(x.at(idx), dtype),
        lambda idx: [*idx[:-n], places.at(idx)],
        op,
        strides=_strides_of_flat(lw, shape, n),
    )  # fmt: skip
    return lw.reshape(result, shape)


def _strides_of_flat(lw: Lowering, shape: Sequence[Size], n: int) -> tuple[Size, ...] | None:
    """The strides that the result has with its last `n` axes as one; None where these are not one
    in memory."""
    strides = lw.strides_of_result(shape)
    if strides is None:
        return None
    image = range(len(shape) - n, len(shape) - 1)
    merge = all(normal(strides[k + 1] * shape[k + 1]) == strides[k] for k in image)
    return (*strides[:-n], strides[-1]) if merge else None


def _max_unpool(n: int) -> Callable[..., Value]:
    def lowered(lw: Lowering, x: Value, index: Value, *sizes: Any) -> Value:
        shape = sizes_of(lw.meta().shape)
        lw.require_equal(x.shape, index.shape, "elements do not fit the indices")
        return _at_flat_places(lw, x, index, shape, n, x.dtype, "store")

    return lowered


def _max_pool_backward(n: int) -> Callable[..., Value]:
    def lowered(
        lw: Lowering, g: Value, x: Value, kernel: Any, stride: Any, padding: Any, dilation: Any,
        ceil_mode: bool, index: Value,
    ) -> Value:  # fmt: skip
        windows = windows_of(x.shape[-n:], g.shape[-n:], kernel, stride, padding, dilation)
        if _gathers(lw, windows):
            return _chosen_windows(lw, g, x, index, windows)
        return scatter_to_chosen(lw, g, x, index, n, none=True)

    return lowered


def _adaptive_max_pool_backward(n: int) -> Callable[..., Value]:
    def lowered(lw: Lowering, g: Value, x: Value, index: Value) -> Value:
        return scatter_to_chosen(lw, g, x, index, n)

    return lowered


MAX_POOLING.add(aten.max_pool2d_with_indices.default, _max_pool(2))
MAX_POOLING.add(aten.max_pool3d_with_indices.default, _max_pool(3))
MAX_POOLING.add(aten.max_pool2d_with_indices_backward.default, _max_pool_backward(2))
MAX_POOLING.add(aten.max_pool3d_with_indices_backward.default, _max_pool_backward(3))
MAX_POOLING.add(aten.adaptive_max_pool2d.default, _adaptive_max_pool(2))
MAX_POOLING.add(aten.adaptive_max_pool3d.default, _adaptive_max_pool(3))
MAX_POOLING.add(aten.adaptive_max_pool2d_backward.default, _adaptive_max_pool_backward(2))
MAX_POOLING.add(aten.adaptive_max_pool3d_backward.default, _adaptive_max_pool_backward(3))
MAX_POOLING.add(aten.max_unpool2d.default, _max_unpool(2))
MAX_POOLING.add(aten.max_unpool3d.default, _max_unpool(3))
