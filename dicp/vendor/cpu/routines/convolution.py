"""Convolutions, and their gradients, by our kernels where these are faster than the library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dicp.loop.ir.expr import Ref
from dicp.loop.ir.index import Index, Size, contiguous_strides, normal, product
from dicp.loop.lowering import Lowering, RuleTable, Value, library
from dicp.loop.lowering.library import bias_gradient, library_rule
from dicp.torch_private import FloorDiv
from dicp.vendor.cpu.routines import choice, depthwise, nhwc, patchify
from dicp.vendor.cpu.routines.choice import Layout, Options, in_first_call, of_one_pixel
from dicp.vendor.cpu.routines.common import (
    LIBRARY_CALLS,
    UNIT_AXIS,
    Axis,
    are_supported,
    call,
    call_biased,
    in_float32,
    is_channels_last,
)
from dicp.vendor.cpu.routines.product import multiplied
from dicp.vendor.cpu.thresholds import (
    EAGER_IM2COL_PIXELS,
    MIN_CHANNELS,
    ONEDNN_PADDING,
    ONEDNN_TAPS,
)
from dicp.vendor.cpu.toolchain import has_feature

aten = torch.ops.aten
CONVOLUTIONS = RuleTable()


@CONVOLUTIONS.register(aten.convolution.default, kind="library")
def convolution(
    lw: Lowering, x: Value, w: Value, bias: Value | None, *options: Any, **named: Any
) -> Value:
    (out,) = lw.results()
    how = Options(*options, **named)
    layout = Layout(_is_row_major(out), len(out.shape) == 4 and is_channels_last(out))
    kind = None
    if are_supported(x, w, bias):
        kind = choice.result(how, x, w, out.shape, layout, lw.first_sizes)
    if how.transposed and kind == "product":
        return patchify.transposed(lw, x, w, bias, out)
    if how.transposed and kind == "nhwc":
        axes = replace(how, transposed=False).axes(out, w, x.shape)
        return nhwc.images_gradient(lw, x, w, bias, out, axes)
    axes = how.axes(x, w, out.shape)
    if kind == "depthwise":
        return depthwise.convolved(lw, x, w, bias, out, axes)
    if kind == "patchify":
        return patchify.convolved(lw, x, w, bias, out, axes)
    if kind == "product":
        return _by_pixel_row_major(lw, x, lw.reshape(w, w.shape[:2]), bias, out)
    if kind == "nhwc":
        return nhwc.convolved(lw, x, w, bias, out, axes)
    if kind is not None:
        skips = _skips_padding(x, w, axes, how.groups) if _in_own_kernel(axes[-1]) else 0
        return _convolved(lw, kind, x, w, bias, out, axes, how.groups, skips)
    result: Value = library_rule(aten.convolution.default)(lw, x, w, bias, *options, **named)
    return result


@CONVOLUTIONS.register(aten.convolution_backward.default, kind="library")
def convolution_backward(
    lw: Lowering, grad: Value, x: Value, w: Value, bias_sizes: Any, *rest: Any
) -> Any:
    """Each gradient by our kernel where it fits; the others by library calls."""
    *options, mask = rest
    how = Options(*options)
    metas = lw.node.meta["val"]
    results: list[Any] = [None, None, None]
    if how.fit(x, w) and are_supported(grad, x, w):
        axes = how.axes(x, w, grad.shape)
        images = lw.result(metas[0]) if mask[0] else None
        filters = lw.result(metas[1]) if mask[1] else None
        if how.in_patches(x, axes) and is_channels_last(images or lw.realize(x)):
            results[:2] = patchify.gradients(lw, grad, x, w, images, filters, axes)
        elif x.ndim == 3 or _is_row_major(lw.realize(grad), lw.realize(x)):
            results[:2] = _backward(lw, grad, x, w, images, filters, how)
        else:
            results[:2] = nhwc.gradients(lw, grad, x, w, images, filters, how)
            problem = how, in_first_call(lw, x), w, lw.first_sizes(grad.shape)
            if filters and results[1] is None and choice.has_few_pixels(*problem):
                row_major = lw.result(metas[1].contiguous())
                results[1] = _filters_gradient(lw, "im2col", grad, x, w, row_major, how)
    elif how.fits_depthwise(x, w) and are_supported(grad, x, w):
        axes = how.axes(x, w, grad.shape)
        if mask[0]:
            results[0] = depthwise.images_gradient(lw, grad, w, lw.result(metas[0]), axes)
        if mask[1]:
            results[1] = depthwise.filters_gradient(lw, grad, x, lw.result(metas[1]), axes)
    missing = [on and result is None for on, result in zip(mask, results, strict=True)]
    if mask[2]:
        results[2], missing[2] = bias_gradient(lw, grad), False
    slow = [on and is_slow for on, is_slow in zip(missing, how.slow_gradients(w), strict=True)]
    quick = [on and not is_slow for on, is_slow in zip(missing, slow, strict=True)]
    for backward, wanted in ((library_backward, quick), (_wide_backward, slow)):
        if any(wanted):
            others = backward(lw, grad, x, w, bias_sizes, *options, wanted)
            results = [o if on else r for r, o, on in zip(results, others, wanted, strict=True)]
    return results


@LIBRARY_CALLS.register(aten.convolution_backward.default, kind="library")
def library_backward(
    lw: Lowering, grad: Value, x: Value, w: Value, bias_sizes: Any, *rest: Any
) -> Any:
    """The library's gradients, for row-major copies where it would write past its buffer.

    oneDNN 3.12 does so, and the process crashes, for the gradient of 1x1 filters with a stride and
    channels-last images: it gathers 16 channels at a time and does not handle fewer. In bfloat16
    and with a stride it does not write the gradients of taps that see only padding, which are 0.
    """
    strides, (_, wanted, _), taps = rest[0], rest[-1], w.shape[2:]
    strided = any(step != 1 for step in strides)
    if wanted and strided and w.dtype == torch.bfloat16:
        if Options(*rest[:-1]).leaves_taps(x, w, grad.shape):
            return _wide_backward(lw, grad, x, w, bias_sizes, *rest)
    few = not isinstance(x.shape[1], int) or x.shape[1] < MIN_CHANNELS
    pixels = len(taps) == 2 and all(tap == 1 for tap in taps)
    row_major = wanted and few and pixels and strided
    if row_major:
        grad, x, w = (lw.value_of(_row_major(lw, v)) for v in (grad, x, w))
    return library.convolution_backward(lw, grad, x, w, bias_sizes, *rest, row_major=row_major)


def _wide_backward(
    lw: Lowering, grad: Value, x: Value, w: Value, bias_sizes: Any, *rest: Any
) -> list[Value]:
    """The library's gradients, computed in float32 and rounded."""
    metas, wanted = lw.node.meta["val"], rest[-1]
    given = [in_float32(lw, v) for v in (grad, x, w)]
    outs = [
        m.float() if on else metas[wanted.index(True)].new_empty((0,))
        for m, on in zip(metas, wanted, strict=True)
    ]
    found = lw.call(aten.convolution_backward.default, (*given, bias_sizes, *rest), outs=outs)
    return [lw.cast(value, grad.dtype) for value in found]


def _skips_padding(x: Value, w: Value, axes: Sequence[Axis], groups: int) -> Size:
    """Not 0 where eager skips padding, so that no infinity or NaN is multiplied by its zeros.

    oneDNN skips it, except for 1x1 filters, groups whose channels do not fill vectors, gradients of
    dilated filters, and where a pixel of the result would read only padding. Small single images
    are computed by im2col with zeros, and so is everything in float64.
    """
    taps = w.shape[2:]
    if not all(isinstance(n, int) for n in (*w.shape, groups)):
        return 1
    if all(tap == 1 for tap in taps) or any(axis.starts_in_padding() for axis in axes):
        return 0
    if groups > 1:
        channels, filters = w.shape[1], w.shape[0] // groups
        return int(channels % 16 == 0 and filters % 16 == 0)  # type: ignore[operator]
    if len(taps) > 1 and all(tap > 3 for tap in taps):  # type: ignore[operator]
        return 1
    return normal(x.shape[0] - 1 + FloorDiv(product(x.shape), EAGER_IM2COL_PIXELS + 1))


def _in_own_kernel(axis: Axis) -> bool:
    """Whether oneDNN's own kernel takes the columns of a convolution; else patches are multiplied.

    That for AVX2 has limits where the stride is not 1, and of the columns of padding.
    """
    taps, stride, padding = axis.taps, axis.stride, axis.padding
    if has_feature("avx512f") or not all(isinstance(n, int) for n in (taps, stride, padding)):
        return True
    return bool(padding <= ONEDNN_PADDING and (taps <= ONEDNN_TAPS or stride == 1))


def _problem(
    lw: Lowering, x: Value, w: Value, axes: Sequence[Axis], groups: int, out: Ref, skips: Size
) -> tuple[Ref, list[Size]]:
    """The images in memory, and the kernels' sizes; `out` has the result's shape and strides."""
    image = _row_major(lw, x)
    row = image.strides[-2] if len(image.shape) == 4 else 0
    if of_one_pixel(axes):  # all its pixels are one row
        axes = [UNIT_AXIS._replace(size=product(image.shape[2:]), out=product(out.shape[2:]))]
    axes = [UNIT_AXIS, *axes] if len(axes) == 1 else axes
    sizes = [x.shape[0], w.shape[1], w.shape[0] // groups, groups, *axes[0], *axes[1],
             *image.strides[:2], row, *out.strides[:2], skips]  # fmt: skip
    return image, sizes


def _convolved(
    lw: Lowering, kind: str, x: Value, w: Value, bias: Value | None, out: Ref,
    axes: Sequence[Axis], groups: int, skips: Size,
) -> Value:  # fmt: skip
    image, sizes = _problem(lw, x, w, axes, groups, out, skips)
    refs = [image, lw.realize_to_read(w, contiguous_strides(w.shape))]
    return call_biased(lw, f"dicp_{kind}", refs, bias, out, sizes)


def _row_major(lw: Lowering, x: Value) -> Ref:
    """Images in memory, row-major."""
    image = lw.realize(x)
    return image if _is_row_major(image) else lw.realize(x, contiguous_strides(x.shape))


def _is_row_major(*images: Ref) -> bool:
    """Whether the pixels of each channel are contiguous, row by row."""
    return all(i.strides[2:] == contiguous_strides(i.shape[2:]) for i in images)


def _by_pixel_row_major(
    lw: Lowering, x: Value, filters: Value, bias: Value | None, out: Ref
) -> Value:
    """1x1 filters and row-major images: a product of the filters with each image's channels."""
    n, c, *sizes = x.shape
    pixels = product(sizes)
    refs = [lw.realize(filters), lw.realize(lw.reshape(x, (n, c, pixels)))]
    counts = (n, filters.shape[0], pixels, c)
    return multiplied(lw, refs, out, counts, out.strides[:2], bias, by_row=True)


# ---- gradients ------------------------------------------------------------------------------


def _backward(
    lw: Lowering, grad: Value, x: Value, w: Value, images: Ref | None, filters: Ref | None,
    how: Options,
) -> tuple[Value | None, Value | None]:  # fmt: skip
    found: list[Value | None] = [None, None]
    if images is not None and _is_row_major(images):
        found[0] = _images_gradient(lw, grad, x, w, images, how)
    if filters is None or filters.strides != contiguous_strides(filters.shape):
        return found[0], None
    kind = choice.filters_gradient(how, in_first_call(lw, x), w, lw.first_sizes(grad.shape))
    if kind is not None:
        found[1] = _filters_gradient(lw, kind, grad, x, w, filters, how)
    return found[0], found[1]


def _filters_gradient(
    lw: Lowering, kind: str, grad: Value, x: Value, w: Value, filters: Ref, how: Options
) -> Value:
    """The gradient in `filters`, which are contiguous."""
    grad_output, axes = _row_major(lw, grad), how.axes(x, w, grad.shape)
    skips = (
        _skips_padding(x, w, axes, how.groups) if all(axis.dilation == 1 for axis in axes) else 0
    )
    image, sizes = _problem(lw, x, w, axes, how.groups, grad_output, skips)
    return call(lw, f"dicp_{kind}_filters", (image, grad_output), (filters,), sizes)[0]


def _images_gradient(
    lw: Lowering, grad: Value, x: Value, w: Value, images: Ref, how: Options
) -> Value | None:
    """grad_output convolved with the filters; None where the library is faster."""
    kind = choice.images_gradient(how, in_first_call(lw, x), w, lw.first_sizes(grad.shape))
    axes = how.axes(x, w, grad.shape)
    if kind is None:
        return None
    if kind == "product":
        filters = lw.permute(lw.reshape(w, w.shape[:2]), [1, 0])
        return _by_pixel_row_major(lw, grad, filters, None, images)
    if choice.gradient_is_convolution(how):
        transposed = choice.transposed(axes)
        return _convolved(lw, kind, grad, _transposed(lw, w), None, images, transposed, 1, skips=1)
    grad_output, sizes = _problem(lw, grad, w, axes, how.groups, images, skips=1)
    weights = lw.realize_to_read(w, contiguous_strides(w.shape))
    return call(lw, "dicp_im2col_images", (grad_output, weights), (images,), sizes)[0]


def _transposed(lw: Lowering, w: Value) -> Value:
    """Filters with input and output channels exchanged and taps reversed."""

    def place(idx: tuple[Index, ...]) -> list[Index]:
        taps = zip(idx[2:], w.shape[2:], strict=True)
        return [idx[1], idx[0], *(i * -1 + normal(size - 1) for i, size in taps)]

    return lw.view(w, (w.shape[1], w.shape[0], *w.shape[2:]), place)
