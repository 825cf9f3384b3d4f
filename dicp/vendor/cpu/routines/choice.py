"""Selects the kernels of a convolution and its gradients from dtypes and shapes alone.

Lowering passes the tensors of its graph; compilation of the routines, which starts long before,
passes those of Dynamo's. What a kernel can compute is judged by sizes as they are, symbolic ones
too; which kernel is faster, by the sizes of the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from dicp.loop.ir.index import Size, product
from dicp.loop.lowering import Lowering, Value
from dicp.target import is_depthwise
from dicp.vendor.cpu.routines import depthwise, patchify
from dicp.vendor.cpu.routines.common import UNIT_AXIS, Axis, Shaped
from dicp.vendor.cpu.thresholds import (
    CONVOLUTION_TILE,
    MAX_CONVOLUTION,
    MAX_IN_PLACE,
    MIN_CHANNEL_SHARE,
    MIN_CHANNELS,
    MIN_FILTERS,
    MIN_GRADIENT_COLUMNS,
    MIN_IMAGE_COLUMNS,
    MIN_IN_PLACE,
    MIN_TILE_SHARE,
    NARROW_CONVOLUTIONS,
    NHWC_FILTERS_PIXELS,
    NHWC_IMAGES_PIXELS,
    NHWC_PIXELS,
    NHWC_STRIDED_PIXELS,
    NHWC_TILE_PIXELS,
    NHWC_TILE_STRIDED_PIXELS,
    THIN_CHANNELS,
    THIN_PIXELS,
    TRANSPOSED_PIXELS,
    WIDE_CONVOLUTIONS,
    ConvolutionLimits,
)
from dicp.vendor.cpu.toolchain import has_feature, has_tiles


@dataclass(frozen=True)
class Planned:
    """The shape and dtype of a tensor that is not in the graph, or has other sizes there."""

    shape: Sequence[Size]
    dtype: torch.dtype


def in_first_call(lw: Lowering, value: Value) -> Planned:
    """`value` with its sizes in the first call."""
    return Planned(lw.first_sizes(value.shape), value.dtype)


class Layout(NamedTuple):
    """The memory formats of images: those of one pixel have both."""

    row_major: bool
    """Whether they are NCHW."""
    channels_last: bool
    """Whether they are NHWC."""


@dataclass(frozen=True)
class Options:
    """The arguments of a convolution after its tensors, in ATen's order."""

    stride: Sequence[Size]
    padding: Sequence[Size]
    dilation: Sequence[Size]
    transposed: bool
    output_padding: Sequence[Size]
    groups: int

    def fit(self, x: Shaped, w: Shaped) -> bool:
        """Whether it has one or two spatial axes and is neither transposed nor depthwise."""
        return not self.transposed and len(x.shape) in (3, 4) and not self.is_depthwise(w)

    def fits_depthwise(self, x: Shaped, w: Shaped) -> bool:
        return not self.transposed and len(x.shape) == 4 and depthwise.fits(w, self.groups)

    def is_depthwise(self, w: Shaped) -> bool:
        return is_depthwise(w.shape, self.groups)

    def slow_gradients(self, w: Shaped) -> tuple[bool, bool, bool]:
        """Which gradients (images, filters, bias) the library computes by naive loops in bfloat16.

        Measured for depthwise filters: the gradient of images at stride 2 takes 11.6 ms (float32:
        0.6), that of 5x5 filters 7.7 ms (float32: 2.0). Elsewhere bfloat16 is faster.
        """
        slow = w.dtype == torch.bfloat16 and self.is_depthwise(w) and not self.transposed
        large = any(isinstance(n, int) and n > 3 for n in w.shape[2:])
        return slow and any(s != 1 for s in self.stride), slow and large, False

    def leaves_taps(self, x: Shaped, w: Shaped, out: Sequence[Size]) -> bool:
        """Whether a tap of the filters sees only padding, or may, where sizes are symbols."""
        for axis in self.axes(x, w, out):
            if not axis.is_known():
                return True
            size, count, taps, stride, padding, dilation = axis
            image, count = (count, size) if self.transposed else (size, count)
            starts = range(-padding, count * stride - padding, stride)
            offsets = range(0, taps * dilation, dilation)
            if any(not any(0 <= start + tap < image for start in starts) for tap in offsets):
                return True
        return False

    def axes(self, x: Shaped, w: Shaped, out: Sequence[Size]) -> list[Axis]:
        sizes = zip(x.shape[2:], out[2:], w.shape[2:], strict=True)
        return [
            Axis(*s, *_at(k, self.stride, self.padding, self.dilation)) for k, s in enumerate(sizes)
        ]

    def of_single_pixels(self, x: Shaped, axes: Sequence[Axis]) -> bool:
        """Whether there are several images of one pixel each: the rows of one matrix."""
        single = all((axis.size, axis.out) == (1, 1) for axis in axes)
        return single and x.shape[0] != 1 and self.by_pixel(x, axes)

    def reads_few_pixels(self, x: Shaped, axes: Sequence[Axis]) -> bool:
        """Whether filters are 1x1, with strides, and the result has few pixels.

        Measured with 16 to 1024 channels: 0.35 to 0.86 of the library's time with up to 256 pixels,
        0.99 to 1.05 with 784 and 1024 of them, 0.97 to 1.22 with more.
        """
        images, channels = x.shape[:2]
        if len(x.shape) != 4 or self.groups != 1 or not patchify.reads_pixels(axes):
            return False
        if not (isinstance(images, int) and isinstance(channels, int)):
            return False
        return images * axes[0].out * axes[1].out <= NHWC_PIXELS and channels >= MIN_CHANNELS  # type: ignore[operator]

    def in_patches(self, x: Shaped, axes: Sequence[Axis]) -> bool:
        return len(x.shape) == 4 and self.groups == 1 and patchify.fit(axes)

    def makes_patches(self, x: Shaped, w: Shaped, out: Sequence[Size]) -> bool:
        """Whether a transposed convolution makes a patch of each pixel, of enough pixels."""
        fits = self.in_patches(x, self.axes(Planned(out, x.dtype), w, x.shape))
        return fits and w.dtype == torch.float32 and product(x.shape[2:]) >= TRANSPOSED_PIXELS  # type: ignore[operator]

    def by_pixel(self, x: Shaped, axes: Sequence[Axis]) -> bool:
        return len(x.shape) == 4 and self.groups == 1 and of_one_pixel(axes)


def limits() -> ConvolutionLimits:
    """Those of this processor's vectors."""
    return WIDE_CONVOLUTIONS if has_feature("avx512f") else NARROW_CONVOLUTIONS


def result(
    how: Options, x: Shaped, w: Shaped, out: Sequence[Size], layout: Layout,
    first_sizes: Callable[[Sequence[Size]], Sequence[Size]] = tuple,
) -> str | None:  # fmt: skip
    """The kernel for a result with this layout; None: the library.

    `first_sizes` gives sizes as in the first call.
    """
    image, sizes = Planned(first_sizes(x.shape), x.dtype), first_sizes(out)
    if how.transposed:
        how, images = replace(how, transposed=False), Planned(sizes, x.dtype)
        if layout.row_major and how.makes_patches(image, w, sizes):
            return "product"
        fits = layout.channels_last and how.fit(x, w)
        by_nhwc = fits and is_images_gradient_by_nhwc(how, images, w, image.shape)
        return "nhwc" if by_nhwc else None
    axes = how.axes(x, w, out)
    if not how.fit(x, w):
        fits = layout.channels_last and how.fits_depthwise(x, w)
        return "depthwise" if fits and depthwise.is_better(w, out, axes) else None
    if layout.row_major and not how.of_single_pixels(x, axes):
        kind = _of_row_major(w, w.shape[0] // how.groups, sizes, how.axes(image, w, sizes))
        if kind is not None:
            return "product" if kind == "convolution" and how.by_pixel(x, axes) else kind
    if not layout.channels_last:
        return None
    if how.in_patches(x, axes) or how.reads_few_pixels(x, axes):
        return "patchify"
    return "nhwc" if _is_by_nhwc(how, image, w, sizes) else None


def images_gradient(how: Options, x: Shaped, w: Shaped, out: Sequence[Size]) -> str | None:
    """The kernel for the gradient of row-major (NCHW) images; None: the library."""
    axes, groups = how.axes(x, w, out), how.groups
    if not isinstance(groups, int) or not _is_at_most(limits().most, w, out):
        return None
    if not gradient_is_convolution(how):
        dilated = any(axis.stride != 1 != axis.dilation for axis in axes)
        few = w.shape[1] < MIN_FILTERS // 2  # type: ignore[operator]
        return None if dilated or few else "im2col"
    exchanged = Planned((w.shape[1], w.shape[0], *w.shape[2:]), w.dtype)
    kind = _of_row_major(exchanged, w.shape[1], x.shape, transposed(axes))
    if kind is None or not of_one_pixel(axes):
        return kind
    # A product reads filters in place; im2col joins the few pixels of several images.
    few = kind == "im2col" and product(x.shape[2:]) <= CONVOLUTION_TILE  # type: ignore[operator]
    return kind if few else "product"


def filters_gradient(how: Options, x: Shaped, w: Shaped, out: Sequence[Size]) -> str | None:
    """The kernel for the gradient of filters from row-major (NCHW) images; None: the library."""
    axes = how.axes(x, w, out)
    if _is_gradient_by_im2col(w, w.shape[0] // how.groups, out, axes):
        return "im2col"
    return "convolution" if _is_better_gradient(w, out, axes) else None


def has_few_pixels(how: Options, x: Shaped, w: Shaped, out: Sequence[Size]) -> bool:
    """Whether the gradient of filters from channels-last images is that of row-major copies.

    The library's, of 3x3 filters and float32, takes 2 to 10 times as long with channels-last images
    where the filters are larger than the images.
    """
    if not all(isinstance(n, int) for n in (*x.shape, *w.shape)):
        return False
    few = product(x.shape) < product(w.shape)  # type: ignore[operator]
    several = any(axis.taps != 1 for axis in how.axes(x, w, out))
    return few and several and filters_gradient(how, x, w, out) == "im2col"


def gradient_is_convolution(how: Options) -> bool:
    """Whether the gradient of row-major images is computed as a convolution of grad_output."""
    return how.groups == 1 and all(step == 1 for step in how.stride)


def transposed(axes: Sequence[Axis]) -> list[Axis]:
    """The axes of the convolution of grad_output, at stride 1, that is the gradient of images."""
    return [
        Axis(out, size, taps, 1, dilation * (taps - 1) - padding, dilation)
        for size, out, taps, _, padding, dilation in axes
    ]


def of_one_pixel(axes: Sequence[Axis]) -> bool:
    """Whether filters are 1x1, with stride 1 and no padding."""
    return all((axis.taps, axis.stride, axis.padding) == (1, 1, 0) for axis in axes)


def _at(axis: int, *lists: Sequence[Size]) -> list[Size]:
    """The entry of each list for one axis; one entry stands for all."""
    return [values[axis] if len(values) > 1 else values[0] for values in lists]


def _is_static_float32(w: Shaped, out: Sequence[Size]) -> bool:
    """Whether it is float32 and its sizes are no symbols; in bfloat16 oneDNN is faster."""
    return w.dtype == torch.float32 and all(isinstance(n, int) for n in (*w.shape[1:], *out))


def _is_at_most(most: int, w: Shaped, out: Sequence[Size]) -> bool:
    """Whether it is float32 of at most `most` multiplications."""
    return _is_static_float32(w, out) and product((*w.shape[1:], *out)) <= most  # type: ignore[operator]


def _is_better(w: Shaped, out: Sequence[Size], axes: Sequence[Axis]) -> bool:
    """Whether our kernel is faster for a convolution whose result has the shape `out`."""
    if not _is_at_most(limits().most, w, out):
        return False
    return out[0] == 1 or _is_at_most(limits().light, w, out) or _share(axes) >= MIN_TILE_SHARE


def _of_row_major(
    w: Shaped, filters: Size, out: Sequence[Size], axes: Sequence[Axis]
) -> str | None:
    """Our kernel for `filters` of a group and row-major images, if it is the faster one."""
    if _is_by_im2col(w, filters, out, axes):
        return "im2col"
    if not _is_better(w, out, axes):
        return None
    many = isinstance(filters, int) and filters >= limits().filters
    return "im2col" if many and any(axis.taps != 1 for axis in axes) else "convolution"


def _is_better_gradient(w: Shaped, grad: Sequence[Size], axes: Sequence[Axis]) -> bool:
    """Whether our kernel is faster for the gradient of filters: with enough channels and pixels."""
    _, channels, *taps = w.shape
    if not _is_at_most(limits().most if of_one_pixel(axes) else MAX_CONVOLUTION, w, grad):
        return False
    padded = -(-channels // CONVOLUTION_TILE) * CONVOLUTION_TILE  # type: ignore[operator]
    if product((*taps, *grad)) * padded <= limits().light:  # type: ignore[operator]
        return True
    enough = MIN_IMAGE_COLUMNS if grad[0] == 1 else MIN_GRADIENT_COLUMNS
    return channels >= MIN_CHANNEL_SHARE * padded and (  # type: ignore[operator]
        of_one_pixel(axes) or axes[-1].out >= enough
    )


def _is_by_im2col(w: Shaped, filters: Size, out: Sequence[Size], axes: Sequence[Axis]) -> bool:
    """Whether im2col is faster: `filters` of a group make small images, of the shape `out`."""
    many = isinstance(filters, int) and filters >= MIN_FILTERS
    if not many or not _is_at_most(MAX_CONVOLUTION, w, out):
        return False
    if of_one_pixel(axes) or len(axes) == 1:
        return product(out[2:]) <= limits().flat_pixels  # type: ignore[operator]
    return out[-1] <= limits().columns  # type: ignore[operator]


def _is_gradient_by_im2col(
    w: Shaped, filters: Size, grad: Sequence[Size], axes: Sequence[Axis]
) -> bool:
    """Whether im2col is faster for the gradient of filters, of which `filters` read a patch.

    It sums over pixels, so those of all images count. Few channels do not fill a panel: with 3 and
    4 of them, it takes 0.75 of the library's time where patches do not overlap.
    """
    many = isinstance(filters, int) and filters >= MIN_FILTERS // 2
    if not many or not _is_static_float32(w, grad):
        return False
    pixels, limit, single = product((grad[0], *grad[2:])), limits(), of_one_pixel(axes)
    if _is_at_most(MAX_CONVOLUTION, w, grad):
        short = not single and len(axes) == 2 and grad[-1] < limit.reduced_columns  # type: ignore[operator]
        if short or pixels <= limit.reduced_pixels:  # type: ignore[operator]
            return True
    thin = not single and w.shape[1] <= THIN_CHANNELS  # type: ignore[operator]
    return thin and (patchify.fit(axes) or pixels <= THIN_PIXELS)  # type: ignore[operator]


def _nhwc_pixels(how: Options, x: Shaped, w: Shaped, out: Sequence[Size]) -> int | None:
    """The pixels of `out`, if our kernels for channels-last bfloat16 images compute it.

    The library reorders filters at each call, which costs more than its kernels save where filters
    are large beside the images.
    """
    sizes = (*x.shape, *w.shape, *out, how.groups)
    if w.dtype != torch.bfloat16 or not all(isinstance(n, int) for n in sizes):
        return None
    fits = len(x.shape) == 4 and how.groups == 1 and has_feature("avx512_bf16")
    pixels = product((out[0], *out[2:]))
    return pixels if fits and MIN_CHANNELS <= w.shape[1] else None  # type: ignore[operator, return-value]


def _is_by_nhwc(how: Options, x: Shaped, w: Shaped, out: Sequence[Size]) -> bool:
    pixels = _nhwc_pixels(how, x, w, out)
    if pixels is None or not has_tiles():
        return pixels is not None and pixels <= NHWC_PIXELS
    return pixels <= NHWC_TILE_PIXELS or _reads_in_place(w.shape[1], w, how.axes(x, w, out))


def _reads_in_place(channels: Size, w: Shaped, axes: Sequence[Axis]) -> bool:
    """Whether patches of so many channels are read in place on tile registers: `reads_in_place`.

    Such convolutions take 0.57 to 0.88 of the library's time, whatever the number of pixels
    (NHWC_TILE_PIXELS).
    """
    columns = axes[-1]
    fits = all(axis.stride == 1 for axis in axes) and columns.dilation == 1 and columns.taps > 1
    few = product(w.shape) <= MAX_IN_PLACE  # type: ignore[operator]
    return fits and few and channels % 32 == 0 and columns.out >= MIN_IN_PLACE  # type: ignore[operator]


def is_images_gradient_by_nhwc(how: Options, x: Shaped, w: Shaped, out: Sequence[Size]) -> bool:
    """Whether our kernel is faster for the gradient of channels-last images."""
    pixels, axes = _nhwc_pixels(how, x, w, out), how.axes(x, w, out)
    if pixels is None or any(axis.stride != 1 != axis.dilation for axis in axes):
        return False
    if all(axis.stride == 1 for axis in axes):
        few = pixels <= NHWC_IMAGES_PIXELS * w.shape[0]  # type: ignore[operator]
        if has_tiles():
            in_place = _reads_in_place(w.shape[0], w, transposed(axes))
            few = in_place or pixels <= NHWC_TILE_PIXELS
    else:
        most = NHWC_TILE_STRIDED_PIXELS if has_tiles() else NHWC_STRIDED_PIXELS
        few = pixels <= most or patchify.reads_pixels(axes)
    return few and all(axis.padding >= 0 for axis in transposed(axes))


def is_filters_gradient_by_nhwc(how: Options, x: Shaped, w: Shaped, out: Sequence[Size]) -> bool:
    """Whether our kernel is faster for the gradient of filters from channels-last images."""
    pixels = _nhwc_pixels(how, x, w, out)
    strided = any(axis.stride != 1 for axis in how.axes(x, w, out))
    most = 2 * NHWC_FILTERS_PIXELS if strided and has_tiles() else NHWC_FILTERS_PIXELS
    return pixels is not None and pixels <= most * w.shape[0]  # type: ignore[operator]


def _share(axes: Sequence[Axis]) -> float:
    """The share of computed positions that are pixels: tiles include positions between rows."""
    rows, columns = [UNIT_AXIS, *axes][-2:]
    apart = columns.out + (columns.taps - 1) * columns.dilation // columns.stride
    pixels = rows.out * columns.out
    places = pixels if of_one_pixel(axes) else (rows.out - 1) * apart + columns.out
    return float(pixels / (-(-places // CONVOLUTION_TILE) * CONVOLUTION_TILE))
