"""Convolutions of channels-last (NHWC) bfloat16 images, and their gradients, by nhwc.h."""

from __future__ import annotations

from collections.abc import Sequence

from dicp.loop.ir.expr import Ref
from dicp.loop.ir.index import Size, contiguous_strides, product
from dicp.loop.lowering import Lowering, Value
from dicp.vendor.cpu.routines import choice
from dicp.vendor.cpu.routines.choice import Options, in_first_call
from dicp.vendor.cpu.routines.common import (
    Axis,
    call,
    call_biased,
    channels_last,
    is_channels_last,
)
from dicp.vendor.cpu.thresholds import MAX_ORDERED_TAPS
from dicp.vendor.cpu.toolchain import has_tiles


def convolved(
    lw: Lowering, x: Value, w: Value, bias: Value | None, out: Ref, axes: Sequence[Axis]
) -> Value:
    """Channels-last images and result; the filters are packed as they lie."""
    refs = [channels_last(lw, x), lw.realize_to_read(w, contiguous_strides(w.shape))]
    return call_biased(lw, "dicp_nhwc", refs, bias, out, _sizes(refs[0], w.shape[0], axes))


def gradients(
    lw: Lowering, grad: Value, x: Value, w: Value, images: Ref | None, filters: Ref | None,
    how: Options,
) -> tuple[Value | None, Value | None]:  # fmt: skip
    """Of channels-last images, and of filters whose gradient is channels last.

    On tile registers the gradient of filters is row-major where it would only be copied to be so.
    """
    found: list[Value | None] = [None, None]
    axes = how.axes(x, w, grad.shape)
    problem = how, in_first_call(lw, x), w, lw.first_sizes(grad.shape)
    if images is not None and is_channels_last(images):
        if choice.is_images_gradient_by_nhwc(*problem):
            found[0] = images_gradient(lw, grad, w, None, images, axes)
    if filters is not None and is_channels_last(filters):
        if choice.is_filters_gradient_by_nhwc(*problem):
            refs = [channels_last(lw, x), channels_last(lw, grad)]
            if _has_ordered_taps(w) and lw.is_made_contiguous(1):
                filters = lw.result(lw.meta(1).contiguous())
            sizes = _sizes(refs[0], w.shape[0], axes, filters)
            found[1] = call(lw, "dicp_nhwc_filters", refs, (filters,), sizes)[0]
    return found[0], found[1]


def _has_ordered_taps(w: Value) -> bool:
    """Whether the kernels on tile registers read and write such filters in row-major order.

    On an Intel Xeon (Emerald Rapids) a gradient of images that reads 512x512x3x3 row-major filters
    takes 1.24 ms instead of 0.82, and copying them to channels last 1.8 ms; a gradient of filters
    1.6 ms instead of 2.6, and its copy 1.5 ms.
    """
    return has_tiles() and 1 < product(w.shape[2:]) <= MAX_ORDERED_TAPS  # type: ignore[operator]


def images_gradient(
    lw: Lowering, grad: Value, w: Value, bias: Value | None, images: Ref, axes: Sequence[Axis]
) -> Value:
    """The gradient of a convolution's images; with a bias, a transposed convolution."""
    name = "dicp_nhwc_strided"
    if all(axis.stride == 1 for axis in axes):  # a convolution at stride 1
        name, axes = "dicp_nhwc", choice.transposed(axes)
    refs = [channels_last(lw, grad)]
    row_major = _has_ordered_taps(w) and lw.in_memory_to_read(w, contiguous_strides(w.shape))
    refs.append(row_major or channels_last(lw, w))
    sizes = _sizes(refs[0], w.shape[1], axes, refs[1], reversed=True)
    return call_biased(lw, name, refs, bias, images, sizes)


def _sizes(
    images: Ref, filters: Size, axes: Sequence[Axis], weights: Ref | None = None,
    reversed: bool = False,
) -> list[Size]:  # fmt: skip
    """The kernels' sizes for channels-last images.

    `weights`: the filters of a gradient of images, which is `reversed`, or their gradient.
    """
    image, _, row, pixel = images.strides
    # Padding is left out as oneDNN does in bfloat16, of small images too; with tile registers it
    # does so only in gradients and for images of one pixel.
    padded = has_tiles() and weights is None and any(axis.size != 1 for axis in axes)
    skips = not padded and any(axis.taps != 1 for axis in axes)
    steps: Sequence[Size] = (0, 0, 0, 1)
    if weights is not None:
        step = weights.strides[1] if any(axis.taps != 1 for axis in axes) else 1
        steps = (weights.strides[0], *weights.strides[2:], step)
    layout = (image, row, pixel, int(skips), int(reversed), *steps)
    return [*images.shape[:2], filters, *axes[0], *axes[1], *layout]
