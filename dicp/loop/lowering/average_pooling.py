"""Averages over windows, and their gradients: each input point sums over the windows that cover it.

In: a tensor with spatial axes and its windows (`windows.py`). Out: computes of the loop IR.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from dicp.dtypes import opmath_dtype
from dicp.loop.ir.expr import Expr, cast, const
from dicp.loop.ir.index import Index, Size, is_positive, normal
from dicp.loop.lowering.conditions import all_of
from dicp.loop.lowering.core import Lowering, Value
from dicp.loop.lowering.layout import sizes_of
from dicp.loop.lowering.windows import (
    AnyWindow,
    Window,
    adaptive_of,
    guarded,
    summed,
    windows_of,
)
from dicp.rules import NoRule, RuleTable

aten = torch.ops.aten
AVERAGE_POOLING = RuleTable()


def _divided(total: Expr, windows: Sequence[AnyWindow], o: Sequence[Index], include: bool,
             divisor: Any) -> Expr:  # fmt: skip
    if divisor is not None:
        return total / const(divisor, total.dtype)
    if all(isinstance(w, Window) and include and _whole(w) for w in windows):
        return total / const(math.prod(w.taps() for w in windows), total.dtype)
    counts = (window.count(at, include) for window, at in zip(windows, o, strict=True))
    return total / cast(reduce(operator.mul, counts), total.dtype)


def _whole(w: Window) -> bool:
    """Whether no window reaches beyond the padded input."""
    last = normal((w.out - 1) * w.stride + w.kernel)
    return is_positive(normal(w.size + 2 * w.padding - last + 1))


def average(
    lw: Lowering, x: Value, windows: Sequence[AnyWindow], include: bool, divisor: Any
) -> Value:
    """The mean of each window. `include`: padding counts; `divisor`: divided by, if given."""
    meta = lw.meta()
    dtype, n = opmath_dtype(x.dtype), len(windows)

    def term(idx: tuple[Index, ...], k: tuple[Index, ...]) -> Expr:
        lead, at = idx[:-n], idx[-n:]
        found = [w.at(o, i) for w, o, i in zip(windows, at, k, strict=True)]
        test = all_of([t for _, tests in found for t in tests])
        return guarded(test, cast(x.at([*lead, *(p for p, _ in found)]), dtype), 0)

    total = summed(lw, sizes_of(meta.shape), [w.taps() for w in windows], dtype, term)

    def mean(idx: tuple[Index, ...]) -> Expr:
        whole = total.at(idx) + 0.0  # Eager's sum starts from 0: that of numbers -0 is 0.
        return cast(_divided(whole, windows, idx[-n:], include, divisor), meta.dtype)

    return lw.pointwise(total.shape, meta.dtype, mean)


def average_backward(
    lw: Lowering, g: Value, x: Value, windows: Sequence[AnyWindow], include: bool, divisor: Any
) -> Value:
    """The gradient of `average` for input `x`: the sum over the windows that contain an element."""
    dtype, n = opmath_dtype(g.dtype), len(windows)
    lead = len(g.shape) - n
    lw.require_equal(g.shape[:-n], x.shape[:-n], "the gradient does not fit the input", eager=False)

    def share(idx: Sequence[Index]) -> Expr:
        return _divided(cast(g.at(idx), dtype), windows, idx[-n:], include, divisor)

    spread, shape, value = share, list(g.shape), None
    for axes in _by_overlap(windows):
        for axis in axes:
            shape[lead + axis] = x.shape[lead + axis]
        value = _spread(lw, shape, dtype, {lead + axis: windows[axis] for axis in axes}, spread)
        spread = value.at
    assert value is not None
    return lw.cast(value, x.dtype)


def _by_overlap(windows: Sequence[AnyWindow]) -> list[list[int]]:
    """The axes, last first, in groups that are summed together, each with one axis at most whose
    windows overlap: with two, the sums along one of them would be computed again for every element
    along the other."""
    groups: list[list[int]] = [[]]
    overlaps = 0
    for axis in reversed(range(len(windows))):
        overlaps += windows[axis].covering() != 1
        if overlaps > 1:
            groups.append([])
            overlaps = 1
        groups[-1].append(axis)
    return groups


def _spread(
    lw: Lowering, shape: Sequence[Size], dtype: torch.dtype, windows: Mapping[int, AnyWindow],
    share: Callable[[Sequence[Index]], Expr],
) -> Value:  # fmt: skip
    """For each element along the axes of `windows`, the sum of what the windows that contain it
    contribute (`share`, by the position of the window)."""

    def term(idx: tuple[Index, ...], j: tuple[Index, ...]) -> Expr:
        at, tests = list(idx), []
        for (axis, window), k in zip(windows.items(), j, strict=True):
            at[axis], inside = window.over(idx[axis], k)
            tests += inside
        return guarded(all_of(tests), share(at), 0)

    return summed(lw, shape, [w.covering() for w in windows.values()], dtype, term)


def _avg_pool(n: int) -> Callable[..., Value]:
    def lowered(
        lw: Lowering, x: Value, kernel: Any, stride: Any = (), padding: Any = 0,
        ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: Any = None,
    ) -> Value:  # fmt: skip
        if not x.dtype.is_floating_point:
            raise NoRule("integer average pooling")
        outs = sizes_of(lw.meta().shape)[-n:]
        windows = windows_of(x.shape[-n:], outs, kernel, stride, padding)
        return average(lw, x, windows, count_include_pad, divisor_override)

    return lowered


def _avg_pool_backward(n: int) -> Callable[..., Value]:
    def lowered(
        lw: Lowering, g: Value, x: Value, kernel: Any, stride: Any, padding: Any,
        ceil_mode: bool, count_include_pad: bool, divisor_override: Any = None,
    ) -> Value:  # fmt: skip
        windows = windows_of(x.shape[-n:], g.shape[-n:], kernel, stride, padding)
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


AVERAGE_POOLING.add(aten.avg_pool1d.default, _avg_pool(1))
AVERAGE_POOLING.add(aten.avg_pool2d.default, _avg_pool(2))
AVERAGE_POOLING.add(aten.avg_pool3d.default, _avg_pool(3))
AVERAGE_POOLING.add(aten.avg_pool2d_backward.default, _avg_pool_backward(2))
AVERAGE_POOLING.add(aten.avg_pool3d_backward.default, _avg_pool_backward(3))
AVERAGE_POOLING.add(aten.adaptive_avg_pool1d.default, _adaptive_avg_pool(1))
AVERAGE_POOLING.add(aten._adaptive_avg_pool2d.default, _adaptive_avg_pool(2))
AVERAGE_POOLING.add(aten._adaptive_avg_pool3d.default, _adaptive_avg_pool(3))
AVERAGE_POOLING.add(aten._adaptive_avg_pool2d_backward.default, _adaptive_avg_pool_backward(2))
AVERAGE_POOLING.add(aten._adaptive_avg_pool3d_backward.default, _adaptive_avg_pool_backward(3))
