"""Depthwise convolution of channels-last images, and its gradients.

For small images the library's call costs more than the work. Filters of more than three taps along
an axis it treats as full ones, whose gradient needs 256 times their size in scratch memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dicp.loop.ir.expr import Ref
from dicp.loop.ir.index import Size, contiguous_strides, product
from dicp.loop.lowering import Lowering, Value
from dicp.vendor.cpu.routines.common import (
    DEPTHWISE_TAPS,
    Axis,
    Shaped,
    are_supported,
    call,
    call_biased,
    channels_last,
    is_channels_last,
)
from dicp.vendor.cpu.thresholds import MAX_DEPTHWISE, MIN_CHANNELS


def fits(w: Shaped, groups: int) -> bool:
    """Whether each channel has one filter of its own."""
    channels, inner, *taps = w.shape
    known = isinstance(channels, int) and all(isinstance(t, int) for t in taps)
    return known and channels == groups and inner == 1 and groups >= MIN_CHANNELS


def columns_of(axes: Sequence[Axis]) -> int | None:
    """The filters' width, which is part of the routine's name; None where there is no kernel."""
    axis = axes[1]
    fits = axis.taps in DEPTHWISE_TAPS and axis.stride in (1, 2) and axis.dilation == 1
    return axis.taps if fits and isinstance(axis.taps, int) else None


def is_better(w: Shaped, out: Sequence[Size], axes: Sequence[Axis]) -> bool:
    """Whether our kernel is faster for the result, given that `fits` holds."""
    return columns_of(axes) is not None and not _is_large(w.dtype, out, axes)


def convolved(
    lw: Lowering, x: Value, w: Value, bias: Value | None, out: Ref, axes: Sequence[Axis]
) -> Value:
    """The convolution of channels-last images, each channel with its filter."""
    image = channels_last(lw, x)
    name, refs = f"dicp_depthwise_{columns_of(axes)}", [image, _filters(lw, w)]
    return call_biased(lw, name, refs, bias, out, _sizes(image, axes))


def images_gradient(
    lw: Lowering, grad: Value, w: Value, images: Ref, axes: Sequence[Axis]
) -> Value | None:
    """The gradient, in the buffer `images`; None where the library is to compute it.

    In bfloat16 at a stride the library uses naive loops, so our kernel is used at any size.
    """
    taps = columns_of(axes)
    if taps is None or not is_channels_last(images):
        return None
    if _is_large(w.dtype, images.shape, axes) and all(axis.stride == 1 for axis in axes):
        return None
    refs = (channels_last(lw, grad), _filters(lw, w))
    return call(lw, f"dicp_depthwise_images_{taps}", refs, (images,), _sizes(images, axes))[0]


def filters_gradient(
    lw: Lowering, grad: Value, x: Value, filters: Ref, axes: Sequence[Axis]
) -> Value | None:
    """The gradient, in the buffer `filters`, for channels-last images; None for others.

    Also None where pixels of the result read padding alone: eager multiplies them by its zeros.
    """
    if any(axis.starts_in_padding() for axis in axes):
        return None
    images = [lw.realize(v) for v in (x, grad)]
    if not are_supported(*images) or not all(map(is_channels_last, images)):
        return None
    wide = filters.dtype == torch.float32
    steps = contiguous_strides(filters.shape)
    into = filters if wide else lw.temp(filters.shape, torch.float32, steps)
    rows, columns = into.shape[2:]
    if into.strides[0] != rows * columns or into.strides[2:] != (columns, 1):
        return None
    taps = columns_of(axes)
    name = f"dicp_depthwise_filters{'' if taps is None else f'_{taps}'}"
    (found,) = call(lw, name, images, (into,), _sizes(images[0], axes))
    return lw.cast(found, filters.dtype)


def _is_large(dtype: torch.dtype, images: Sequence[Size], axes: Sequence[Axis]) -> bool:
    if dtype == torch.float32 or axes[1].taps != DEPTHWISE_TAPS[0]:
        return False
    size = product(images)
    return isinstance(size, int) and size > MAX_DEPTHWISE


def _sizes(images: Ref, axes: Sequence[Axis]) -> list[Any]:
    return [*images.shape[:2], *axes[0], *axes[1]]


def _filters(lw: Lowering, w: Value) -> Ref:
    return lw.realize_to_read(w, contiguous_strides(w.shape))
