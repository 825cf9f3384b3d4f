"""Convolutions that are better made here than by the library, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dicp.loop.index import Index, Size, contiguous_strides, normal, product
from dicp.loop.ir import Ref
from dicp.loop.lowering import Lowering, RuleTable, Value, library
from dicp.loop.lowering.library import bias_gradient, plain
from dicp.vendor.cpu.routines import depthwise, pieces
from dicp.vendor.cpu.routines.common import call, in_float32, is_taken, rows_of
from dicp.vendor.cpu.routines.depthwise import is_channels_last
from dicp.vendor.cpu.routines.product import multiplied

aten = torch.ops.aten
CONVOLUTIONS = RuleTable()

LIGHT = 3 << 23
"""Multiplications up to which oneDNN's call, and its reordering of images and filters, cost more
than any kernel saves."""
MAX_CONVOLUTION = 1 << 32
"""Multiplications from which on that reordering is nothing beside its faster kernel."""
PANEL, MIN_SHARE = 32, 0.75
"""Pixels of a tile, and the share of them that must be used where there are several images: between
both bounds convolutions take 0.4 (one image of few pixels, 1x1 filters) to 1.05 of its time, with a
share of 0.67 1.25 times as much. A single image pays for all its reordering of filters."""
SMALL = 16
"""Pixels in a row up to which images are better convolved by their patches."""
LEAST_ROWS = 32
"""Filters that must read a patch to make up for its copy."""
FEW_PIXELS = 20480
"""Numbers of a single image up to which eager copies patches."""


@CONVOLUTIONS.register(aten.convolution.default, kind="library")
def convolution(
    lw: Lowering, x: Value, w: Value, bias: Value | None, *options: Any, **named: Any
) -> Value:
    (out,) = lw.results()
    how = Options(*options, **named)
    if how.fit(x, w) and is_taken(x, w, bias):
        axes = how.axes(x, w, out.shape)
        rows = _is_row_major(out) and not how.of_single_pixels(x, axes)
        skips = _skips_padding(x, w, how.groups)
        if rows and _is_by_patches(w, w.shape[0] // how.groups, out.shape, axes):
            return _convolved(lw, x, w, bias, out, axes, how.groups, skips, "dicp_patches")
        if rows and _is_better(w, out.shape, axes):
            if how.by_pixel(x, axes) and _pixels_in_rows(lw.realize(x)):
                return _by_pixel_in_rows(lw, x, lw.reshape(w, w.shape[:2]), bias, out)
            return _convolved(lw, x, w, bias, out, axes, how.groups, skips)
        if how.in_pieces(x, axes) and is_channels_last(out):
            return pieces.convolved(lw, x, w, bias, out, axes)
    elif how.fits_depthwise(x, w) and is_taken(x, w, bias):
        found = depthwise.convolved(lw, x, w, bias, out, how.axes(x, w, out.shape))
        if found is not None:
            return found
    result: Value = plain(aten.convolution.default)(lw, x, w, bias, *options, **named)
    return result


@CONVOLUTIONS.register(aten.convolution_backward.default, kind="library")
def convolution_backward(
    lw: Lowering, grad: Value, x: Value, w: Value, bias_sizes: Any, *rest: Any
) -> Any:
    """Each gradient here where it fits; the others by one call of the library."""
    *options, mask = rest
    how = Options(*options)
    assert lw.node is not None
    metas = lw.node.meta["val"]
    results: list[Any] = [None, None, None]
    if how.fit(x, w) and is_taken(grad, x, w):
        axes = how.axes(x, w, grad.shape)
        images = lw.result(metas[0]) if mask[0] else None
        filters = lw.result(metas[1]) if mask[1] else None
        if how.in_pieces(x, axes) and is_channels_last(images or lw.realize(x)):
            results[:2] = pieces.gradients(lw, grad, x, w, images, filters, axes)
        elif x.ndim == 3 or _pixels_in_rows(lw.realize(grad), lw.realize(x)):
            results[:2] = _backward(lw, grad, x, w, images, filters, axes, how.groups)
    elif how.fits_depthwise(x, w) and is_taken(grad, x, w):
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
    for backward, wanted in ((library.convolution_backward, quick), (_wide_backward, slow)):
        if any(wanted):
            others = backward(lw, grad, x, w, bias_sizes, *options, wanted)
            results = [o if on else r for r, o, on in zip(results, others, wanted, strict=True)]
    return results


def _wide_backward(
    lw: Lowering, grad: Value, x: Value, w: Value, bias_sizes: Any, *rest: Any
) -> list[Value]:
    """The library's gradients, computed in float32 and rounded."""
    assert lw.node is not None
    metas, wanted = lw.node.meta["val"], rest[-1]
    given = [in_float32(lw, v) for v in (grad, x, w)]
    outs = [
        m.float() if on else metas[wanted.index(True)].new_empty((0,))
        for m, on in zip(metas, wanted, strict=True)
    ]
    found = lw.call(aten.convolution_backward.default, (*given, bias_sizes, *rest), outs=outs)
    return [lw.cast(value, grad.dtype) for value in found]


Axis = tuple[Any, ...]
"""Input size, output size, taps, stride, padding, dilation: a `d_axis`."""


@dataclass(frozen=True)
class Options:
    """The arguments of a convolution behind its tensors, as ATen orders them."""

    stride: Sequence[Size]
    padding: Sequence[Size]
    dilation: Sequence[Size]
    transposed: bool
    output_padding: Sequence[Size]
    groups: int

    def fit(self, x: Value, w: Value) -> bool:
        """Images of one or two dimensions, and filters that see more than one channel."""
        return not self.transposed and x.ndim in (3, 4) and not self.is_depthwise(w)

    def fits_depthwise(self, x: Value, w: Value) -> bool:
        return not self.transposed and x.ndim == 4 and depthwise.fits(w, self.groups)

    def is_depthwise(self, w: Value) -> bool:
        return w.shape[1] == 1 and self.groups != 1

    def slow_gradients(self, w: Value) -> tuple[bool, bool, bool]:
        """Which gradients (images, filters, bias) the library makes by plain loops in bfloat16.

        Measured for depthwise filters: those of images where the stride is 2 take 11.6 ms, in
        float32 0.6; those of 5x5 filters 7.7 ms, in float32 2.0. Elsewhere bfloat16 is the faster.
        """
        slow = w.dtype == torch.bfloat16 and self.is_depthwise(w) and not self.transposed
        large = any(isinstance(n, int) and n > 3 for n in w.shape[2:])
        return slow and any(s != 1 for s in self.stride), slow and large, False

    def axes(self, x: Value, w: Value, out: Sequence[Size]) -> list[Axis]:
        sizes = zip(x.shape[2:], out[2:], w.shape[2:], strict=True)
        return [
            (*s, *_at(k, self.stride, self.padding, self.dilation)) for k, s in enumerate(sizes)
        ]

    def of_single_pixels(self, x: Value, axes: Sequence[Axis]) -> bool:
        """Several images, each no more than its channels: a row of one matrix."""
        single = all(axis[:2] == (1, 1) for axis in axes)
        return single and x.shape[0] != 1 and self.by_pixel(x, axes)

    def in_pieces(self, x: Value, axes: Sequence[Axis]) -> bool:
        return x.ndim == 4 and self.groups == 1 and pieces.fit(axes)

    def by_pixel(self, x: Value, axes: Sequence[Axis]) -> bool:
        return x.ndim == 4 and self.groups == 1 and _of_one_pixel(axes)


def _of_one_pixel(axes: Sequence[Axis]) -> bool:
    return all(axis[2:5] == (1, 1, 0) for axis in axes)


def _at(axis: int, *lists: Sequence[Size]) -> list[Size]:
    """The entry of each list for one axis; one entry stands for all."""
    return [values[axis] if len(values) > 1 else values[0] for values in lists]


def _is_row_major(out: Ref) -> bool:
    """Whether the pixels of an image lie one after another."""
    return out.strides[2:] == contiguous_strides(out.shape[2:])


def _is_at_most(most: int, w: Value, out: Sequence[Size]) -> bool:
    """Of float32 and not too heavy; in bfloat16 oneDNN has the faster kernels."""
    sizes = (*w.shape[1:], *out)
    known = w.dtype == torch.float32 and all(isinstance(n, int) for n in sizes)
    return known and product(sizes) <= most  # type: ignore[operator]


def _is_better(w: Value, out: Sequence[Size], axes: Sequence[Axis]) -> bool:
    """Whether a convolution whose result has the shape `out` is better made here."""
    if not _is_at_most(MAX_CONVOLUTION, w, out):
        return False
    return out[0] == 1 or _is_at_most(LIGHT, w, out) or _share(axes) >= MIN_SHARE


def _is_better_gradient(w: Value, grad: Sequence[Size], axes: Sequence[Axis]) -> bool:
    """Whether the gradient of filters is better made here: of enough channels and pixels in a row.

    Measured on ResNet-50's and a U-Net's: 0.55 to 0.8 of the library's time from 16 pixels on, 1.06
    with 8 of them in four images and 0.5 in one, 1.4 with 4; for filters of one pixel 0.5 to 0.9.
    """
    _, channels, *taps = w.shape
    if not _is_at_most(MAX_CONVOLUTION, w, grad):
        return False
    padded = -(-channels // PANEL) * PANEL  # type: ignore[operator]
    if product((*taps, *grad)) * padded <= LIGHT:  # type: ignore[operator]
        return True
    enough = 7 if grad[0] == 1 else 12
    return 4 * channels >= 3 * padded and (  # type: ignore[operator]
        _of_one_pixel(axes) or axes[-1][1] >= enough
    )


def _is_by_patches(
    w: Value, rows: Size, out: Sequence[Size], axes: Sequence[Axis], few: bool = False
) -> bool:
    """Whether images of the shape `out` are so small that their patches are better copied.

    `rows`: filters that read a patch. `few`: the pixels are summed over; those of all images count.
    Measured on ResNet-50's and a U-Net's: 0.4 to 0.85 of the library's time, and 0.5 to 1.0 of the
    other kernel's up to these sizes; with 32 pixels in a row 1.05 to 1.4.
    """
    least = LEAST_ROWS // 2 if few else LEAST_ROWS
    if not isinstance(rows, int) or rows < least or not _is_at_most(MAX_CONVOLUTION, w, out):
        return False
    flat = _of_one_pixel(axes) or len(axes) == 1
    if few:
        return product((out[0], *out[2:])) <= 256 or (not flat and out[-1] < SMALL)  # type: ignore[operator]
    return product(out[2:]) <= 64 if flat else out[-1] <= SMALL  # type: ignore[operator]


def _share(axes: Sequence[Axis]) -> float:
    """The share of places computed that are pixels; between rows of them lie some that are not."""
    (_, high, *_), (_, wide, taps, stride, _, dilation) = [(1, 1), *axes][-2:]
    apart = wide + (taps - 1) * dilation // stride
    places = high * wide if _of_one_pixel(axes) else (high - 1) * apart + wide
    return float(high * wide / (-(-places // PANEL) * PANEL))


def _skips_padding(x: Value, w: Value, groups: int) -> bool:
    """Whether eager leaves out what lies around an image: infinities and NaN meet no zeros there.

    oneDNN does, but for filters of one pixel, groups of channels that fill no vectors, and
    gradients of dilated filters. Small single images are computed from patches with zeros, and so
    is everything in float64.
    """
    taps = w.shape[2:]
    if not all(isinstance(n, int) for n in (*x.shape, *w.shape, groups)):
        return True
    if all(tap == 1 for tap in taps):
        return False
    if groups > 1:
        channels, filters = w.shape[1], w.shape[0] // groups
        return channels % 16 == 0 and filters % 16 == 0
    large = len(taps) > 1 and all(tap > 3 for tap in taps)  # type: ignore[operator]
    return large or x.shape[0] > 1 or product(x.shape) > FEW_PIXELS  # type: ignore[operator]


def _problem(
    lw: Lowering, x: Value, w: Value, axes: Sequence[Axis], groups: int, out: Ref, skips: bool
) -> tuple[Ref, list[Size]]:
    """The images in memory, and the sizes the kernels take; `out` has the form of the result."""
    image = _in_rows(lw, x)
    row = image.strides[-2] if len(image.shape) == 4 else 0
    one = (1, 1, 1, 1, 0, 1)
    if _of_one_pixel(axes):  # an image is one row
        axes = [(product(image.shape[2:]), product(out.shape[2:]), 1, 1, 0, 1)]
    axes = [one, *axes] if len(axes) == 1 else axes
    sizes = [x.shape[0], w.shape[1], w.shape[0] // groups, groups, *axes[0], *axes[1],
             *image.strides[:2], row, *out.strides[:2], int(skips)]  # fmt: skip
    return image, sizes


def _convolved(
    lw: Lowering,
    x: Value,
    w: Value,
    bias: Value | None,
    out: Ref,
    axes: Sequence[Axis],
    groups: int,
    skips: bool,
    name: str = "dicp_convolution",
) -> Value:
    image, sizes = _problem(lw, x, w, axes, groups, out, skips)
    refs = [image, lw.realize(w, contiguous_strides(w.shape))]
    if bias is not None:
        name, refs = f"{name}_biased", [*refs, rows_of(lw, bias)]
    return call(lw, name, refs, (out,), sizes)[0]


def _in_rows(lw: Lowering, x: Value) -> Ref:
    """Images in memory with their pixels in rows."""
    image = lw.realize(x)
    return image if _pixels_in_rows(image) else lw.realize(x, contiguous_strides(x.shape))


def _pixels_in_rows(*images: Ref) -> bool:
    return all(i.strides[2:] == contiguous_strides(i.shape[2:]) for i in images)


def _by_pixel_in_rows(
    lw: Lowering, x: Value, filters: Value, bias: Value | None, out: Ref
) -> Value:
    """Filters of one pixel, pixels in rows: a product of the filters with each image's channels."""
    n, c, *sizes = x.shape
    pixels = product(sizes)
    refs = [lw.realize(filters), lw.realize(lw.reshape(x, (n, c, pixels)))]
    counts = (n, filters.shape[0], pixels, c)
    return multiplied(lw, refs, out, counts, out.strides[:2], bias, by_row=True)


# ---- gradients ------------------------------------------------------------------------------


def _backward(
    lw: Lowering, grad: Value, x: Value, w: Value, images: Ref | None, filters: Ref | None,
    axes: Sequence[Axis], groups: int,
) -> tuple[Value | None, Value | None]:  # fmt: skip
    found: list[Value | None] = [None, None]
    if images is not None:
        found[0] = _images_gradient(lw, grad, w, images, axes, groups)
    if filters is None or filters.strides != contiguous_strides(filters.shape):
        return found[0], None
    if _is_by_patches(w, w.shape[0] // groups, grad.shape, axes, few=True):
        name = "dicp_patches_filters"
    elif _is_better_gradient(w, grad.shape, axes):
        name = "dicp_convolution_filters"
    else:
        return found[0], None
    reached = _in_rows(lw, grad)
    skips = _skips_padding(x, w, groups) and all(axis[5] == 1 for axis in axes)
    image, sizes = _problem(lw, x, w, axes, groups, reached, skips)
    (found[1],) = call(lw, name, (image, reached), (filters,), sizes)
    return found[0], found[1]


def _images_gradient(
    lw: Lowering, grad: Value, w: Value, images: Ref, axes: Sequence[Axis], groups: int
) -> Value | None:
    """The result's gradient convolved with the filters; None where the library is faster."""
    known = isinstance(groups, int) and _is_at_most(MAX_CONVOLUTION, w, grad.shape)
    if not known or not _is_row_major(images):
        return None
    small = _is_by_patches(w, w.shape[1], images.shape, axes)
    if _of_one_pixel(axes):  # a product reads filters as they lie
        small = small and product(images.shape[2:]) <= PANEL  # type: ignore[operator]
    if small or groups > 1 or any(axis[3] != 1 for axis in axes):
        dilated = any(axis[3] != 1 != axis[5] for axis in axes)
        if dilated or w.shape[1] < LEAST_ROWS // 2:  # type: ignore[operator]
            return None
        reached, sizes = _problem(lw, grad, w, axes, groups, images, skips=True)
        weights = lw.realize(w, contiguous_strides(w.shape))
        return call(lw, "dicp_patches_images", (reached, weights), (images,), sizes)[0]
    turned = [
        (out, size, taps, 1, dilation * (taps - 1) - padding, dilation)
        for size, out, taps, _, padding, dilation in axes
    ]
    around = _turned(lw, w)
    if not _is_better(around, images.shape, turned):
        return None
    if _of_one_pixel(axes):
        filters = lw.permute(lw.reshape(w, w.shape[:2]), [1, 0])
        return _by_pixel_in_rows(lw, grad, filters, None, images)
    return _convolved(lw, grad, around, None, images, turned, 1, skips=True)


def _turned(lw: Lowering, w: Value) -> Value:
    """Filters with inputs and outputs exchanged, their taps in opposite order."""

    def place(idx: tuple[Index, ...]) -> list[Index]:
        taps = zip(idx[2:], w.shape[2:], strict=True)
        return [idx[1], idx[0], *(i * -1 + normal(size - 1) for i, size in taps)]

    return lw.view(w, (w.shape[1], w.shape[0], *w.shape[2:]), place)
