"""The gradient of filters that see one channel each.

The library takes filters of more than three taps along an axis for full ones: its scratch memory is
256 times their size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dicp.loop.index import Size
from dicp.loop.ir import Ref
from dicp.loop.lowering import Lowering, Value
from dicp.vendor.cpu.routines.common import call, is_taken

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
    seen, reached = lw.realize(x), lw.realize(grad)
    taps = filters.shape[2:]
    in_rows = filters.strides[0] == taps[0] * taps[1] and filters.strides[2:] == (taps[1], 1)
    taken = x.dtype == torch.float32 and is_taken(x, grad) and in_rows
    if not taken or not all(map(is_channels_last, (seen, reached))):
        return None
    sizes = [x.shape[0], x.shape[1], *axes[0], *axes[1]]
    return call(lw, "dicp_depthwise_filters", (seen, reached), (filters,), sizes)[0]


def is_channels_last(image: Ref) -> bool:
    n, c, h, k = image.shape
    return image.strides[1:] == (1, k * c, c) and (n == 1 or image.strides[0] == h * k * c)
