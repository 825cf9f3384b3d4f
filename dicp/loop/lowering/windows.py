"""Windows: how a spatial axis of a pooling's output maps to its input.

In: kernel sizes, strides and paddings, or the sizes of an adaptive pooling. Out: a window per axis,
written once for one, two and three spatial axes: the input positions that an output position
covers, the windows that cover an input position, tests that a position lies inside, divisors.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, apply, const, masked
from dicp.loop.ir.index import Index, Size, floordiv, is_positive, normal, quotient
from dicp.loop.lowering.conditions import compare, select
from dicp.loop.lowering.core import Lowering, Value
from dicp.loop.lowering.indexing import clamped, proven
from dicp.loop.thresholds import MAX_UNROLLED
from dicp.rules import NoRule
from dicp.torch_private import floor_division


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
    sizes: Sequence[Size], outs: Sequence[Size], kernel: Any, stride: Any, padding: Any,
    dilation: Any = 1,
) -> list[Window]:  # fmt: skip
    """The windows along each axis, of attributes with one number for all axes or one for each."""
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


def guarded(test: Expr | None, value: Expr, otherwise: float) -> Expr:
    """`value` where `test` holds, computed only there, else `otherwise`."""
    return value if test is None else select(test, masked(test, value), otherwise)


def constants(counts: Sequence[int]) -> list[tuple[Index, ...]]:
    """Every point of a loop nest with these counts, row-major, as constant coordinates."""
    return [tuple(Index(k) for k in ks) for ks in itertools.product(*map(range, counts))]


def summed(
    lw: Lowering, shape: Sequence[Size], counts: Sequence[Size], dtype: torch.dtype,
    term: Callable[[tuple[Index, ...], tuple[Index, ...]], Expr],
    strides: Sequence[Size] | None = None,
) -> Value:  # fmt: skip
    """The sum over window points `k` of `term(position, k)`; `strides` if the sum is unrolled."""
    known = [count for count in counts if isinstance(count, int)]
    if len(known) == len(counts) and math.prod(known) <= MAX_UNROLLED:

        def body(idx: tuple[Index, ...]) -> Expr:
            return reduce(operator.add, (term(idx, k) for k in constants(known)))

        return lw.pointwise(shape, dtype, body, strides)
    rank = len(shape)
    return lw.reduce(
        "sum", (*shape, *counts), range(rank, rank + len(counts)), dtype,
        lambda idx: term(idx[:rank], idx[rank:]), keepdim=False,
    )  # fmt: skip
