"""Pooling: maxima and averages over windows, and their gradients as sums over covering windows.

A `Window` maps one spatial axis of the output to the input; the rules are written once for one,
two and three spatial axes. Gradients gather: each input point sums over the windows that cover it
(those of maxima scatter, unless the target's `gathers_windows` is set).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, apply, cast, const, masked
from dicp.loop.ir.index import (
    Index,
    Size,
    contiguous_strides,
    flatten,
    floordiv,
    is_positive,
    mod,
    normal,
    product,
    quotient,
)
from dicp.loop.lowering.core import Lowering, Value
from dicp.loop.lowering.indexing import Indices, clamped, proven, scattered
from dicp.loop.lowering.layout import sizes_of
from dicp.loop.lowering.pointwise import compare, select
from dicp.loop.thresholds import MAX_ARGMAX, MAX_UNROLLED
from dicp.rules import NoRule, RuleTable
from dicp.torch_private import floor_division

aten = torch.ops.aten
POOLING = RuleTable()
rule = POOLING.register


@dataclass(frozen=True)
class Window:
    """Output position o covers input positions o * stride - padding + k * dilation."""

    kernel: int
    stride: int
    padding: int
    dilation: int
    size: Size
    out: Size

    def start(self, o: Index) -> Index:
        return o * self.stride + -self.padding

    def taps(self) -> int:
        return self.kernel

    def at(self, o: Index, k: Index) -> tuple[Index, list[Expr]]:
        """The input position of window point `k`, and the tests that it lies inside the input."""
        place = self.start(o) + k * self.dilation
        tests = []
        if self.padding:
            tests.append(compare("ge", ir.index_value(place), 0))
        last = place.maximum() if not self.padding else self._last(k)
        if last is None or not is_positive(normal(self.size - last)):
            tests.append(compare("lt", ir.index_value(place), ir.index_value(Index(self.size))))
        return place, tests

    def nearest(self, o: Index, k: Index) -> Index:
        """The input position of window point `k`, clamped to the input (dilation 1)."""
        place, tests = self.at(o, k)
        return clamped(ir.index_value(place), self.size) if tests else place

    def _last(self, k: Index) -> Size | None:
        top = k.maximum()
        if top is None:
            return None
        return normal((self.out - 1) * self.stride - self.padding + top * self.dilation)

    def covering(self) -> int:
        """The largest number of windows that cover one input position."""
        return -(-self.kernel // self.stride)

    def over(self, i: Index, j: Index) -> tuple[Index, list[Expr]]:
        """The j-th window, from the last, that may cover input position `i`, and tests that it does
        (dilation 1)."""
        o = floordiv(i + self.padding, self.stride) + j * -1
        here, begin = ir.index_value(o), ir.index_value(self.start(o))
        tests = [
            compare("ge", here, 0),
            compare("lt", here, ir.index_value(Index(self.out))),
            compare("lt", ir.index_value(i), begin + self.kernel),
        ]
        return o, tests

    def count(self, o: Index, include_padding: bool) -> Expr:
        """The divisor of the average: the number of points in the window."""
        start = ir.index_value(self.start(o))
        size = ir.index_value(Index(normal(self.size + self.padding)))
        end = apply("minimum", torch.int64, start + self.kernel, size)
        if include_padding:
            return end - start
        start = apply("maximum", torch.int64, start, const(0, torch.int64))
        end = apply("minimum", torch.int64, end, ir.index_value(Index(self.size)))
        return end - start


@dataclass(frozen=True)
class Adaptive:
    """Output position o covers input positions o * size // out .. ceil((o + 1) * size / out)."""

    size: Size
    out: Size

    def taps(self) -> Size:
        """The largest number of points in a window; where sizes are symbolic, one more perhaps."""
        exact = quotient(self.size, self.out)
        if exact is not None:
            return exact
        if isinstance(self.size, int) and isinstance(self.out, int):
            return -(-self.size // self.out) + 1
        return normal(floor_division(self.size + self.out - 1, self.out) + 1)

    def start(self, o: Index) -> Index:
        return floordiv(o * self.size, self.out)

    def end(self, o: Index) -> Index:
        return floordiv(o * self.size + (self.size + self.out - 1), self.out)

    def at(self, o: Index, k: Index) -> tuple[Index, list[Expr]]:
        place = self.start(o) + k
        if quotient(self.size, self.out) is not None:
            return place, []
        return place, [compare("lt", ir.index_value(place), ir.index_value(self.end(o)))]

    def nearest(self, o: Index, k: Index) -> Index:
        place, tests = self.at(o, k)
        if not tests:
            return place
        last = ir.index_value(self.end(o)) + -1
        return proven(apply("minimum", torch.int64, ir.index_value(place), last), self.size)

    def count(self, o: Index, include_padding: bool) -> Expr:
        return ir.index_value(self.end(o)) - ir.index_value(self.start(o))

    def covering(self) -> Size:
        return Adaptive(self.out, self.size).taps()

    def over(self, i: Index, j: Index) -> tuple[Index, list[Expr]]:
        return Adaptive(self.out, self.size).at(i, j)


AnyWindow = Window | Adaptive


def _static(values: Any, count: int, default: Sequence[int] | None = None) -> list[int]:
    values = list(values) if isinstance(values, (list, tuple)) else [values]
    if not values and default is not None:
        return list(default)
    values = values * count if len(values) == 1 else values
    if not all(isinstance(v, int) for v in values):
        raise NoRule("a window of dynamic size")
    return values


def windows_of(
    lw: Lowering, sizes: Sequence[Size], outs: Sequence[Size], kernel: Any, stride: Any,
    padding: Any, dilation: Any = 1,
) -> list[Window]:  # fmt: skip
    n = len(sizes)
    kernels = _static(kernel, n)
    strides, paddings = _static(stride, n, kernels), _static(padding, n)
    dilations = _static(dilation, n)
    parts = zip(kernels, strides, paddings, dilations, sizes, outs, strict=True)
    return [Window(*part) for part in parts]


def adaptive_of(sizes: Sequence[Size], outs: Sequence[Size]) -> list[AnyWindow]:
    """Equal windows where the sizes divide, else windows that overlap."""
    found: list[AnyWindow] = []
    for size, out in zip(sizes, outs, strict=True):
        if not isinstance(out, int):
            raise NoRule("adaptive pooling to a dynamic size")
        if size == 0 or out == 0:
            raise NoRule("adaptive pooling of an empty axis")
        found.append(Adaptive(size, out))
    return found


def both(tests: Sequence[Expr]) -> Expr | None:
    result: Expr | None = None
    for test in tests:
        result = test if result is None else apply("bitwise_and", torch.bool, result, test)
    return result


def guarded(test: Expr | None, value: Expr, otherwise: float) -> Expr:
    return value if test is None else select(test, masked(test, value), otherwise)


def constants(counts: Sequence[int]) -> list[tuple[Index, ...]]:
    return [tuple(Index(k) for k in ks) for ks in itertools.product(*map(range, counts))]


def summed(
    lw: Lowering, shape: Sequence[Size], counts: Sequence[Size], dtype: torch.dtype,
    term: Callable[[tuple[Index, ...], tuple[Index, ...]], Expr],
) -> Value:  # fmt: skip
    """The sum over window points `k` of `term(position, k)`."""
    known = [count for count in counts if isinstance(count, int)]
    if len(known) == len(counts) and math.prod(known) <= MAX_UNROLLED:

        def body(idx: tuple[Index, ...]) -> Expr:
            total: Expr | None = None
            for k in constants(known):
                item = term(idx, k)
                total = item if total is None else total + item
            assert total is not None
            return total

        return lw.pointwise(shape, dtype, body)
    rank = len(shape)
    value = lw.reduce(
        "sum", (*shape, *counts), range(rank, rank + len(counts)), dtype,
        lambda idx: term(idx[:rank], idx[rank:]), keepdim=False,
    )  # fmt: skip
    return value


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in ir.LOW_PRECISION else dtype


# ---- averages ------------------------------------------------------------------------------------


def _divided(total: Expr, windows: Sequence[AnyWindow], o: Sequence[Index], include: bool,
             divisor: Any) -> Expr:  # fmt: skip
    if divisor is not None:
        return total / const(divisor, total.dtype)
    if all(isinstance(w, Window) and include and _whole(w) for w in windows):
        return total / const(math.prod(w.taps() for w in windows), total.dtype)
    count: Expr | None = None
    for window, at in zip(windows, o, strict=True):
        c = window.count(at, include)
        count = c if count is None else count * c
    assert count is not None
    return total / cast(count, total.dtype)


def _whole(w: Window) -> bool:
    """Whether no window reaches beyond the padded input."""
    last = normal((w.out - 1) * w.stride + w.kernel)
    return is_positive(normal(w.size + 2 * w.padding - last + 1))


def average(
    lw: Lowering, x: Value, windows: Sequence[AnyWindow], include: bool, divisor: Any
) -> Value:
    meta = lw.meta()
    dtype, n = _accumulator(x.dtype), len(windows)

    def term(idx: tuple[Index, ...], k: tuple[Index, ...]) -> Expr:
        lead, at = idx[:-n], idx[-n:]
        found = [w.at(o, i) for w, o, i in zip(windows, at, k, strict=True)]
        test = both([t for _, tests in found for t in tests])
        return guarded(test, cast(x.at([*lead, *(p for p, _ in found)]), dtype), 0)

    total = summed(lw, sizes_of(meta.shape), [w.taps() for w in windows], dtype, term)
    return lw.pointwise(
        total.shape, meta.dtype,
        lambda idx: cast(_divided(total.at(idx), windows, idx[-n:], include, divisor), meta.dtype),
    )  # fmt: skip


def average_backward(
    lw: Lowering, g: Value, x: Value, windows: Sequence[AnyWindow], include: bool, divisor: Any
) -> Value:
    dtype, n = _accumulator(g.dtype), len(windows)
    lw.require_equal(g.shape[:-n], x.shape[:-n], "the gradient does not fit the input", eager=False)

    def term(idx: tuple[Index, ...], j: tuple[Index, ...]) -> Expr:
        lead, at = idx[:-n], idx[-n:]
        found = [w.over(i, k) for w, i, k in zip(windows, at, j, strict=True)]
        test = both([t for _, tests in found for t in tests])
        o = [p for p, _ in found]
        share = _divided(cast(g.at([*lead, *o]), dtype), windows, o, include, divisor)
        return guarded(test, share, 0)

    total = summed(lw, x.shape, [w.covering() for w in windows], dtype, term)
    return lw.cast(total, x.dtype)


def _avg_pool(n: int) -> Callable[..., Value]:
    def lowered(
        lw: Lowering, x: Value, kernel: Any, stride: Any = (), padding: Any = 0,
        ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: Any = None,
    ) -> Value:  # fmt: skip
        if not x.dtype.is_floating_point:
            raise NoRule("integer average pooling")
        outs = sizes_of(lw.meta().shape)[-n:]
        windows = windows_of(lw, x.shape[-n:], outs, kernel, stride, padding)
        return average(lw, x, windows, count_include_pad, divisor_override)

    return lowered


def _avg_pool_backward(n: int) -> Callable[..., Value]:
    def lowered(
        lw: Lowering, g: Value, x: Value, kernel: Any, stride: Any, padding: Any,
        ceil_mode: bool, count_include_pad: bool, divisor_override: Any = None,
    ) -> Value:  # fmt: skip
        windows = windows_of(lw, x.shape[-n:], g.shape[-n:], kernel, stride, padding)
        return average_backward(lw, g, x, windows, count_include_pad, divisor_override)

    return lowered


def _adaptive_avg_pool(n: int) -> Callable[..., Value]:
    def lowered(lw: Lowering, x: Value, output_size: Any) -> Value:
        if not x.dtype.is_floating_point:
            raise NoRule("integer average pooling")
        windows = adaptive_of(x.shape[-n:], sizes_of(lw.meta().shape)[-n:])
        return average(lw, x, windows, True, None)

    return lowered


def _adaptive_avg_pool_backward(n: int) -> Callable[..., Value]:
    def lowered(lw: Lowering, g: Value, x: Value) -> Value:
        return average_backward(lw, g, x, adaptive_of(x.shape[-n:], g.shape[-n:]), True, None)

    return lowered


POOLING.add(aten.avg_pool1d.default, _avg_pool(1))
POOLING.add(aten.avg_pool2d.default, _avg_pool(2))
POOLING.add(aten.avg_pool3d.default, _avg_pool(3))
POOLING.add(aten.avg_pool2d_backward.default, _avg_pool_backward(2))
POOLING.add(aten.avg_pool3d_backward.default, _avg_pool_backward(3))
POOLING.add(aten.adaptive_avg_pool1d.default, _adaptive_avg_pool(1))
POOLING.add(aten._adaptive_avg_pool2d.default, _adaptive_avg_pool(2))
POOLING.add(aten._adaptive_avg_pool3d.default, _adaptive_avg_pool(3))
POOLING.add(aten._adaptive_avg_pool2d_backward.default, _adaptive_avg_pool_backward(2))
POOLING.add(aten._adaptive_avg_pool3d_backward.default, _adaptive_avg_pool_backward(3))


# ---- maxima --------------------------------------------------------------------------------------


def maximum_with_index(lw: Lowering, x: Value, windows: Sequence[AnyWindow]) -> tuple[Value, Value]:
    """The maximum of each window and its flat spatial index; as in ATen, the last NaN wins."""
    taps, n = [w.taps() for w in windows], len(windows)
    counts = [count for count in taps if isinstance(count, int)]
    if len(counts) < n:
        return maximum_of_symbolic(lw, x, windows)
    if math.prod(counts) > MAX_ARGMAX:
        raise NoRule("maximum over a large window")
    strides = contiguous_strides(x.shape[-n:])
    floating = x.dtype.is_floating_point
    start = -math.inf if floating else _lowest(x.dtype)

    exact = any(isinstance(w, Window) and w.dilation != 1 for w in windows)

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
        test = both([t for _, tests in found for t in tests])
        return guarded(test, x.at([*lead, *places]), start), places, test

    def counted(idx: tuple[Index, ...], k: tuple[Index, ...]) -> tuple[Expr, Expr]:
        item, places, test = point(idx, k)
        here = ir.index_value(flatten(places, strides))
        return item, here if test is None else select(test, here, const(-1, torch.int64))

    def larger(a: tuple[Expr, Expr], b: tuple[Expr, Expr]) -> tuple[Expr, Expr]:
        """The larger of two adjacent partial maxima (value, index); index -1 marks an empty one."""
        better = compare("gt", b[0], a[0])
        if floating:
            better = apply("bitwise_or", torch.bool, better, apply("isnan", torch.bool, b[0]))
        if exact:
            better = apply("bitwise_or", torch.bool, better, compare("lt", a[1], 0))
            better = apply("bitwise_and", torch.bool, better, compare("ge", b[1], 0))
        return select(better, b[0], a[0]), select(better, b[1], a[1])

    def running(idx: tuple[Index, ...]) -> tuple[Expr, Expr]:
        # A balanced tree: a chain as deep as the window is large would exceed the recursion
        # limit in later passes.
        parts = [counted(idx, k) for k in constants(counts)]
        while len(parts) > 1:
            pairs = [larger(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
            parts = pairs + parts[2 * len(pairs) :]
        return parts[0]

    shape = sizes_of(lw.meta(0).shape)
    values = lw.pointwise(shape, x.dtype, lambda idx: running(idx)[0])
    return values, lw.pointwise(shape, torch.int64, lambda idx: running(idx)[1])


def maximum_of_symbolic(
    lw: Lowering, x: Value, windows: Sequence[AnyWindow]
) -> tuple[Value, Value]:
    """As `maximum_with_index`, by reductions over windows whose number of points is symbolic."""
    n, taps = len(windows), [w.taps() for w in windows]
    shape = sizes_of(lw.meta(0).shape)
    rank, steps = len(shape), contiguous_strides(taps)
    floating = x.dtype.is_floating_point
    if not floating:
        raise NoRule("maximum of integers over a window of dynamic size")

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

    def is_nan(idx: Sequence[Index], flat: Index) -> Expr:
        test = apply("isnan", torch.bool, value(idx, flat))
        return select(test, ir.index_value(flat), const(-1, torch.int64))

    largest = over_taps("max", x.dtype, value)
    first = over_taps("argmax", torch.int64, value)
    last_nan = over_taps("max", torch.int64, is_nan)

    def chosen(idx: tuple[Index, ...]) -> Expr:
        nan = last_nan.at(idx)
        point = proven(select(compare("ge", nan, 0), nan, first.at(idx)), product(taps))
        strides = contiguous_strides(x.shape[-n:])
        return ir.index_value(flatten(placed(idx, split(point)), strides))

    return largest, lw.pointwise(shape, torch.int64, chosen)


def _lowest(dtype: torch.dtype) -> int:
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _max_pool(n: int) -> Callable[..., tuple[Value, Value]]:
    def lowered(
        lw: Lowering, x: Value, kernel: Any, stride: Any = (), padding: Any = 0,
        dilation: Any = 1, ceil_mode: bool = False,
    ) -> tuple[Value, Value]:  # fmt: skip
        outs = sizes_of(lw.meta(0).shape)[-n:]
        windows = windows_of(lw, x.shape[-n:], outs, kernel, stride, padding, dilation)
        return maximum_with_index(lw, x, windows)

    return lowered


def _adaptive_max_pool(n: int) -> Callable[..., tuple[Value, Value]]:
    def lowered(lw: Lowering, x: Value, output_size: Any) -> tuple[Value, Value]:
        return maximum_with_index(lw, x, adaptive_of(x.shape[-n:], sizes_of(lw.meta(0).shape)[-n:]))

    return lowered


def _chosen_windows(
    lw: Lowering, g: Value, x: Value, index: Value, windows: Sequence[Window]
) -> Value:
    """The gradient as a gather: each input point sums those of the windows whose maximum it is.

    No stores collide. An index outside of its window adds nothing, as in PyTorch's GPU kernels.
    """
    n = len(windows)
    dtype = _accumulator(g.dtype)
    strides = contiguous_strides(x.shape[-n:])

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
        here = ir.index_value(flatten(at, strides))
        hit = both([*inside, apply("eq", torch.bool, index.at(o), here)])
        assert hit is not None
        return select(hit, cast(g.at(o), dtype), 0)

    total = summed(lw, x.shape, [w.covering() for w in windows], dtype, term)
    return lw.cast(total, x.dtype)


def scatter_to_chosen(
    lw: Lowering, g: Value, x: Value, index: Value, n: int, none: bool = False
) -> Value:
    """Gradients scatter-added to zeros at the flat indices `index`; if `none`, -1 is skipped."""
    lw.require_equal(g.shape, index.shape, "gradients do not fit the indices")
    if none:
        g = lw.map(lambda i, g: select(compare("eq", i, -1), 0, g), index, g, dtype=g.dtype)
        index = lw.map(lambda i: select(compare("eq", i, -1), 0, i), index)
    result = _at_flat_places(lw, g, index, x.shape, n, _accumulator(x.dtype), "sum")
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
    )  # fmt: skip
    return lw.reshape(result, shape)


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
        windows = windows_of(lw, x.shape[-n:], g.shape[-n:], kernel, stride, padding, dilation)
        if lw.gathers_windows and all(w.dilation == 1 for w in windows):
            return _chosen_windows(lw, g, x, index, windows)
        return scatter_to_chosen(lw, g, x, index, n, none=True)

    return lowered


def _adaptive_max_pool_backward(n: int) -> Callable[..., Value]:
    def lowered(lw: Lowering, g: Value, x: Value, index: Value) -> Value:
        return scatter_to_chosen(lw, g, x, index, n)

    return lowered


POOLING.add(aten.max_pool2d_with_indices.default, _max_pool(2))
POOLING.add(aten.max_pool3d_with_indices.default, _max_pool(3))
POOLING.add(aten.max_pool2d_with_indices_backward.default, _max_pool_backward(2))
POOLING.add(aten.max_pool3d_with_indices_backward.default, _max_pool_backward(3))
POOLING.add(aten.adaptive_max_pool2d.default, _adaptive_max_pool(2))
POOLING.add(aten.adaptive_max_pool3d.default, _adaptive_max_pool(3))
POOLING.add(aten.adaptive_max_pool2d_backward.default, _adaptive_max_pool_backward(2))
POOLING.add(aten.adaptive_max_pool3d_backward.default, _adaptive_max_pool_backward(3))
POOLING.add(aten.max_unpool2d.default, _max_unpool(2))
POOLING.add(aten.max_unpool3d.default, _max_unpool(3))


__all__ = ["POOLING", "Window"]
