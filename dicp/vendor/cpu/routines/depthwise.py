"""The gradient of filters that see one channel each.

The library takes filters of more than three taps along an axis for full ones: its scratch memory is
256 times their size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dicp.loop.index import Size, contiguous_strides
from dicp.loop.ir import Ref
from dicp.loop.lowering import Lowering, Value
from dicp.vendor.cpu.routines.common import call, in_float32, is_taken

MIN_CHANNELS = 16
"""Channels that fill the widest vector."""


def fits(w: Value, groups: int) -> bool:
    channels, inner, *taps = w.shape
    known = isinstance(channels, int) and all(isinstance(t, int) for t in taps)
    return known and channels == groups and inner == 1 and groups >= MIN_CHANNELS


def filters_gradient(
    lw: Lowering, grad: Value, x: Value, filters: Ref, axes: Sequence[Sequence[Size]]
) -> Value | None:
    """The gradient in `filters`, of images that are laid out channels last; None for others."""
    images = [lw.realize(v) for v in (x, grad)]
    if not is_taken(*images) or not all(map(is_channels_last, images)):
        return None
    wide = filters.dtype == torch.float32
    into = (
        filters
        if wide
        else lw.temp(filters.shape, torch.float32, contiguous_strides(filters.shape))
    )
    taps = into.shape[2:]
    if into.strides[0] != taps[0] * taps[1] or into.strides[2:] != (taps[1], 1):
        return None
    if not wide:  # the kernel reads float32
        images = [in_float32(lw, v) for v in (x, grad)]
    sizes = [x.shape[0], x.shape[1], *axes[0], *axes[1]]
    (found,) = call(lw, "dicp_depthwise_filters", images, (into,), sizes)
    return lw.cast(found, filters.dtype)


def is_channels_last(image: Ref) -> bool:
    """Images of a single pixel are, whatever their strides along it say."""
    n, c, h, k = image.shape
    if h == 1 and k == 1:
        return image.strides[1] == 1 and (n == 1 or image.strides[0] == c)
    return image.strides[1:] == (1, k * c, c) and (n == 1 or image.strides[0] == h * k * c)
