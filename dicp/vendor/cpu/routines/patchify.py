"""Convolutions that read each element once: products with the patches of images.

Filters are 1x1, or as large as the stride: downsampling between stages, and patch embeddings.
Images are channels last; transposed convolutions, for upsampling, have row-major ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from dicp.loop.ir.expr import Ref
from dicp.loop.ir.index import Size, contiguous_strides, product
from dicp.loop.lowering import Lowering, Value
from dicp.vendor.cpu.routines.common import Axis, is_channels_last
from dicp.vendor.cpu.routines.product import multiplied


def fit(axes: Sequence[Axis]) -> bool:
    """Whether images split into patches of the filters' size, without padding or remainder."""
    return all(_is_cut(axis) for axis in axes)


def _is_cut(axis: Axis) -> bool:
    size, out, taps, stride, padding, dilation = axis
    if (taps, stride, padding) == (1, 1, 0):
        return True
    return axis.is_known() and (stride, padding, dilation, size) == (taps, 0, 1, out * taps)


def reads_pixels(axes: Sequence[Axis]) -> bool:
    """Whether filters are 1x1, without padding, and all sizes are known."""
    return all(axis.is_known() and (axis.taps, axis.padding) == (1, 0) for axis in axes)


def pixels_read(lw: Lowering, x: Value, axes: Sequence[Axis]) -> tuple[Value, list[Axis]]:
    """The pixels that 1x1 filters read, and their axes at stride 1; others as they are."""
    if not reads_pixels(axes):
        return x, list(axes)
    shape = (*x.shape[:2], *(axis.out for axis in axes))
    steps = (1, 1, *(axis.stride for axis in axes))
    read = lw.view(x, shape, lambda idx: [i * step for i, step in zip(idx, steps, strict=True)])
    return read, [Axis(axis.out, axis.out, 1, 1, 0, 1) for axis in axes]


def convolved(
    lw: Lowering, x: Value, w: Value, bias: Value | None, out: Ref, axes: Sequence[Axis]
) -> Value:
    """The convolution as a product: a row of the left operand for each patch."""
    x, axes = pixels_read(lw, x, axes)
    filters = lw.permute(_filters(lw, w), [1, 0])
    refs = [lw.realize(_patchified(lw, x, axes)), lw.realize(filters)]
    counts = (1, _count(x, axes), w.shape[0], filters.shape[0])
    return multiplied(lw, refs, out, counts, (0, out.shape[1]), bias)


def gradients(
    lw: Lowering, grad: Value, x: Value, w: Value, images: Ref | None, filters: Ref | None,
    axes: Sequence[Axis],
) -> tuple[Value | None, Value | None]:  # fmt: skip
    """Gradients of images (a reduction over filters) and of filters (over patches).

    Each is computed if its buffer is given, that of filters if it is channels last; else None.
    """
    o, size, count = w.shape[0], product(w.shape[1:]), _count(x, axes)
    found: list[Value | None] = [None, None]
    grad_output = lw.reshape(lw.permute(grad, [0, 2, 3, 1]), (count, o))
    if images is not None:
        whole = all(axis.taps == 1 for axis in axes)
        into = images if whole else lw.temp((count, size), w.dtype)
        refs = [lw.realize(grad_output), lw.realize(_filters(lw, w))]
        made = multiplied(lw, refs, into, (1, count, size, o), (0, size))
        found[0] = made if whole else _joined(lw, made, x.shape, axes)
    if filters is not None and is_channels_last(filters):
        refs = [lw.realize(lw.permute(grad_output, [1, 0])), lw.realize(_patchified(lw, x, axes))]
        found[1] = multiplied(lw, refs, filters, (1, o, size, count), (0, size))
    return found[0], found[1]


def transposed(lw: Lowering, x: Value, w: Value, bias: Value | None, out: Ref) -> Value:
    """The transposed convolution of row-major images: each pixel becomes a patch of the result."""
    (c, o, *taps), (n, _, *sizes) = w.shape, x.shape
    patch, pixels = product(w.shape[1:]), product(sizes)
    filters = lw.permute(lw.reshape(w, (c, patch)), [1, 0])
    refs = [lw.realize(filters), lw.realize(lw.reshape(x, (n, c, pixels)))]
    patches = lw.temp((n, patch, pixels), w.dtype, contiguous_strides((n, patch, pixels)))
    if bias is not None:
        bias = lw.reshape(lw.expand(lw.reshape(bias, (o, 1, 1)), (o, *taps)), (patch,))
    counts, steps = (n, patch, pixels, c), patches.strides[:2]
    made = multiplied(lw, refs, patches, counts, steps, bias, by_row=True)
    split = lw.reshape(made, (n, o, *taps, *sizes))
    return lw.reshape(lw.permute(split, [0, 1, 4, 2, 5, 3]), out.shape)


def _count(x: Value, axes: Sequence[Axis]) -> Size:
    return product((x.shape[0], *(axis.out for axis in axes)))


def _patchified(lw: Lowering, x: Value, axes: Sequence[Axis]) -> Value:
    """A row for each patch: its pixels in order, channels last."""
    (n, c), (rows, columns) = x.shape[:2], axes
    split = lw.reshape(x, (n, c, rows.out, rows.taps, columns.out, columns.taps))
    size = product((rows.taps, columns.taps, c))
    return lw.reshape(lw.permute(split, [0, 2, 4, 3, 5, 1]), (_count(x, axes), size))


def _joined(lw: Lowering, made: Value, shape: Sequence[Size], axes: Sequence[Axis]) -> Value:
    """The images whose patches are the rows of `made`."""
    (n, c), (rows, columns) = shape[:2], axes
    split = lw.reshape(made, (n, rows.out, columns.out, rows.taps, columns.taps, c))
    return lw.reshape(lw.permute(split, [0, 5, 1, 3, 2, 4]), shape)


def _filters(lw: Lowering, w: Value) -> Value:
    """A row for each filter, its channels last."""
    return lw.reshape(lw.permute(w, [0, 2, 3, 1]), (w.shape[0], product(w.shape[1:])))
