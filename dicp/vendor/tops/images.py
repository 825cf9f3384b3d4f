"""Convolution and pooling: images NHWC, filters HWIO. `layout` cancels the conversions inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dicp.graphop.composed import Forms, known, registry
from dicp.graphop.program import Value
from dicp.graphop.prototype import ResultType
from dicp.vendor.tops.hlir import Hlir

IMAGES: Forms = {}
form = registry(IMAGES)
TO_NHWC, FROM_NHWC = (0, 2, 3, 1), (0, 3, 1, 2)
TO_HWIO, FROM_HWIO = (2, 3, 1, 0), (3, 2, 0, 1)


@form("Conv2D")
def conv_2d(
    g: Hlir, x: Value, filter: Value, bias: Value | None = None, *, strides: Sequence[int],
    pads: Sequence[int], dilations: Sequence[int], groups: int, data_format: str,
) -> Value:  # fmt: skip
    operands = [g.transpose(x, TO_NHWC), g.transpose(filter, TO_HWIO)]
    operands += [] if bias is None else [bias]
    y = g.hlir(
        "Conv2D", tuple(operands), group=groups, auto_pad="NOTSET", layout="NHWC",
        stride=strides[2:], pad=pads, dilation=dilations[2:],
    )  # fmt: skip
    return g.transpose(y, FROM_NHWC)


def _conv(
    g: Hlir, x: Value, filter: Value, dims: Sequence[Any], pads: Sequence[Any],
    strides: Sequence[int] = (1, 1), lhs_dilation: Sequence[int] = (1, 1),
    rhs_dilation: Sequence[int] = (1, 1), feature_groups: int = 1, batch_groups: int = 1,
) -> Value:  # fmt: skip
    return g.hlir(
        "Conv", x, filter, dims=dims, strides=strides, pads=pads, lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation, reversal=[], auto_pad="", feature_groups=feature_groups,
        batch_groups=batch_groups, precision=[],
    )  # fmt: skip


@form("Conv2DBackpropInput")
def conv_2d_input(
    g: Hlir, input_size: Value, filter: Value, grad: Value, strides: Sequence[int],
    pads: Sequence[int], dilations: Sequence[int], groups: int, data_format: str,
) -> Value:  # fmt: skip
    """The output's gradient, spread by the stride, convolved with the reversed filter."""
    sizes = known(input_size)
    around = []
    for axis in (0, 1):
        reach = (filter.shape[2 + axis] - 1) * dilations[2 + axis]
        spread = (grad.shape[2 + axis] - 1) * strides[2 + axis] + 1
        before = reach - pads[2 * axis]
        around.append([before, sizes[2 + axis] + reach - spread - before])
    weight = _swapped(g, filter, groups)
    hwio = g.transpose(weight, TO_HWIO)
    flipped = g.hlir("Reverse", hwio, dims=[0, 1], type=ResultType(hwio.dtype, hwio.shape))
    dims = [0, 3, [1, 2], 2, 3, [0, 1], 0, 3, [1, 2]]
    result = _conv(
        g, g.transpose(grad, TO_NHWC), flipped, dims, around, lhs_dilation=strides[2:],
        rhs_dilation=dilations[2:], feature_groups=groups,
    )  # fmt: skip
    return g.transpose(result, FROM_NHWC)


def _swapped(g: Hlir, filter: Value, groups: int) -> Value:
    """(out, in / groups, ...) as (in, out / groups, ...)."""
    out, part, *window = filter.shape
    if groups == 1:
        return g.transpose(filter, [1, 0, 2, 3])
    split = g.reshape(filter, [groups, out // groups, part, *window])
    swapped = g.transpose(split, [0, 2, 1, 3, 4])
    return g.reshape(swapped, [groups * part, out // groups, *window])


@form("Conv2DBackpropFilter")
def conv_2d_filter(
    g: Hlir, x: Value, filter_size: Value, grad: Value, strides: Sequence[int],
    pads: Sequence[int], dilations: Sequence[int], groups: int, data_format: str,
) -> Value:  # fmt: skip
    """The image convolved with the gradient; batch and channels change places."""
    sizes = known(filter_size)
    around = []
    for axis in (0, 1):
        covered = (grad.shape[2 + axis] - 1) * strides[2 + axis] + 1
        wanted = (sizes[2 + axis] - 1) * dilations[2 + axis] + covered
        before = pads[2 * axis]
        around.append([before, wanted - x.shape[2 + axis] - before])
    dims = [3, 0, [1, 2], 0, 3, [1, 2], 2, 3, [0, 1]]
    result = _conv(
        g, g.transpose(x, TO_NHWC), g.transpose(grad, TO_NHWC), dims, around,
        strides=dilations[2:], rhs_dilation=strides[2:], batch_groups=groups,
    )  # fmt: skip
    return g.transpose(result, FROM_HWIO)


@form("MaxPool2D")
def max_pool_2d(
    g: Hlir, x: Value, ksize: Sequence[int], strides: Sequence[int], padding_mode: str,
    pads: Sequence[int], data_format: str, ceil_mode: bool,
) -> Value:  # fmt: skip
    """Windows that reach beyond the image (ceil_mode) are windows of a wider padding."""
    around = list(pads)
    for axis in (0, 1):
        size = g.shape[-2 + axis]
        reach = (size - 1) * strides[2 + axis] + ksize[2 + axis]
        beyond = reach - x.shape[2 + axis] - pads[2 * axis]
        if ceil_mode:
            around[2 * axis + 1] = torch.sym_max(beyond, pads[2 * axis + 1])
    y = g.hlir(
        "MaxPool2D", g.transpose(x, TO_NHWC), ksize=ksize[2:], ceil_mode=False, indices=False,
        auto_pad="NOTSET", layout="NHWC", stride=strides[2:], pad=around, dilation=[],
    )  # fmt: skip
    return g.transpose(y, FROM_NHWC)
