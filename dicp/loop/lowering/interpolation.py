"""Gradients of linear and cubic interpolation: an input point sums over the results that read it.

In: grad_output, and sizes that are numbers. Out: a sum along one spatial axis after the other,
since weights are products of one per axis. Which results read a point, and by which weights, are
constants of the graph. Gradients of symbolic sizes are library calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dicp.dtypes import opmath_dtype
from dicp.interpolation_taps import Tap, Taps, cubic_taps, linear_taps, taps_along
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, cast
from dicp.loop.ir.index import Index, dense_strides
from dicp.loop.lowering.conditions import compare, select
from dicp.loop.lowering.core import Lowering, Value
from dicp.loop.lowering.indexing import proven
from dicp.loop.lowering.library import library_rule
from dicp.loop.lowering.windows import summed
from dicp.rules import RuleTable
from dicp.torch_private import disable_current_modes

aten = torch.ops.aten
INTERPOLATION = RuleTable()


class _Readers(NamedTuple):
    """The results that read each input point along an axis, as tables of readers by points."""

    results: Tensor
    weights: Tensor
    counts: Tensor
    """Readers of each point; the tables are padded to the most."""
    fewest: int

    @classmethod
    def of(cls, taps: Sequence[Tap], size: int) -> _Readers:
        places, weights = (torch.stack(each, -1).flatten() for each in zip(*taps, strict=True))
        order = places.argsort(stable=True)
        counts = torch.bincount(places, minlength=size)
        point = places[order]
        number = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[point]
        shape = int(counts.max()), size
        results, padded = places.new_zeros(shape), weights.new_zeros(shape)
        results[number, point] = order // len(taps)
        padded[number, point] = weights[order]
        return cls(results, padded, counts, int(counts.min()))


def _gathered(lw: Lowering, g: Value, axis: int, out: int, readers: _Readers) -> Value:
    """For each input point along `axis`, the weighted sum of the results that read it."""
    results, weights, counts = map(lw.constant, readers[:3])
    count, size = readers.results.shape

    def term(idx: tuple[Index, ...], k: tuple[Index, ...]) -> Expr:
        (reader,), point = k, idx[axis]
        at = (*idx[:axis], proven(results.at([reader, point]), out), *idx[axis + 1 :])
        value = cast(g.at(at), weights.dtype) * weights.at([reader, point])
        last = reader.maximum()
        if last is not None and last < readers.fewest:
            return value
        return select(compare("lt", ir.index_value(reader), counts.at([point])), value, 0)

    shape = (*g.shape[:axis], size, *g.shape[axis + 1 :])
    strides = dense_strides(shape, _order_in_memory(lw.meta()))
    return summed(lw, shape, [count], weights.dtype, term, strides)


def _order_in_memory(images: Tensor) -> Sequence[int]:
    """The axes, the contiguous one last."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    axes = range(images.ndim)
    if images.is_contiguous() or images.ndim not in formats:
        return axes
    last = images.is_contiguous(memory_format=formats[images.ndim])
    return [0, *axes[2:], 1] if last else axes


def _backward(op: Any, taps: Taps) -> Callable[..., Any]:
    library = library_rule(op)

    def lowered(
        lw: Lowering, g: Value, output_size: Sequence[Any], input_size: Sequence[Any],
        align_corners: bool, *factors: Any,
    ) -> Any:  # fmt: skip
        sizes = (*output_size, *input_size[2:], *factors)
        known = all(isinstance(each, (int, float, type(None))) for each in sizes)
        if not known or 0 in sizes:  # eager refuses empty images
            return library(lw, g, output_size, input_size, align_corners, *factors)
        value = lw.cast(g, opmath_dtype(g.dtype))
        if taps is cubic_taps and list(output_size) == list(input_size[2:]):
            return lw.cast(value, g.dtype)
        device = lw.meta().device
        factors += (None,) * (len(output_size) - len(factors))
        for axis, (size, out, factor) in enumerate(
            zip(input_size[2:], output_size, factors, strict=True), start=2
        ):
            with disable_current_modes():  # of fake tensors: the tables are real
                found = taps_along(
                    taps, size, out, align_corners, factor, size == out, value.dtype, device
                )
                readers = _Readers.of(found, size)
            value = _gathered(lw, value, axis, out, readers)
        return lw.cast(value, g.dtype)

    return lowered


for _op, _taps in (
    (aten.upsample_linear1d_backward.default, linear_taps),
    (aten.upsample_bilinear2d_backward.default, linear_taps),
    (aten.upsample_trilinear3d_backward.default, linear_taps),
    (aten.upsample_bicubic2d_backward.default, cubic_taps),
):
    INTERPOLATION.add(_op, _backward(_op, _taps))
