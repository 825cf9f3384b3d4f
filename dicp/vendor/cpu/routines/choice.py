"""By which routine a convolution and its gradients are made: told from types and shapes alone.

Lowering asks with the tensors of its graph, and compilation of routines, long before, with those
of Dynamo's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dicp.loop.ir.index import Size, product
from dicp.vendor.cpu.routines import depthwise, patchify
from dicp.vendor.cpu.routines.common import Axis, Shaped

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


@dataclass(frozen=True)
class Transposed:
    """Filters with inputs and outputs exchanged."""

    shape: Sequence[Size]
    dtype: torch.dtype

    @classmethod
    def of(cls, w: Shaped) -> Transposed:
        return cls((w.shape[1], w.shape[0], *w.shape[2:]), w.dtype)


@dataclass(frozen=True)
class Options:
    """The arguments of a convolution behind its tensors, as ATen orders them."""

    stride: Sequence[Size]
    padding: Sequence[Size]
    dilation: Sequence[Size]
    transposed: bool
    output_padding: Sequence[Size]
    groups: int

    def fit(self, x: Shaped, w: Shaped) -> bool:
        """Images of one or two dimensions, and filters that see more than one channel."""
        return not self.transposed and len(x.shape) in (3, 4) and not self.is_depthwise(w)

    def fits_depthwise(self, x: Shaped, w: Shaped) -> bool:
        return not self.transposed and len(x.shape) == 4 and depthwise.fits(w, self.groups)

    def is_depthwise(self, w: Shaped) -> bool:
        return w.shape[1] == 1 and self.groups != 1

    def slow_gradients(self, w: Shaped) -> tuple[bool, bool, bool]:
        """Which gradients (images, filters, bias) the library makes by plain loops in bfloat16.

        Measured for depthwise filters: those of images where the stride is 2 take 11.6 ms, in
        float32 0.6; those of 5x5 filters 7.7 ms, in float32 2.0. Elsewhere bfloat16 is the faster.
        """
        slow = w.dtype == torch.bfloat16 and self.is_depthwise(w) and not self.transposed
        large = any(isinstance(n, int) and n > 3 for n in w.shape[2:])
        return slow and any(s != 1 for s in self.stride), slow and large, False

    def axes(self, x: Shaped, w: Shaped, out: Sequence[Size]) -> list[Axis]:
        sizes = zip(x.shape[2:], out[2:], w.shape[2:], strict=True)
        return [
            (*s, *_at(k, self.stride, self.padding, self.dilation)) for k, s in enumerate(sizes)
        ]

    def of_single_pixels(self, x: Shaped, axes: Sequence[Axis]) -> bool:
        """Several images, each no more than its channels: a row of one matrix."""
        single = all(axis[:2] == (1, 1) for axis in axes)
        return single and x.shape[0] != 1 and self.by_pixel(x, axes)

    def in_patches(self, x: Shaped, axes: Sequence[Axis]) -> bool:
        return len(x.shape) == 4 and self.groups == 1 and patchify.fit(axes)

    def by_pixel(self, x: Shaped, axes: Sequence[Axis]) -> bool:
        return len(x.shape) == 4 and self.groups == 1 and of_one_pixel(axes)


def result(
    how: Options, x: Shaped, w: Shaped, out: Sequence[Size], rows: bool, last: bool
) -> str | None:
    """What makes a result that lies in rows of pixels, or channels last; None: the library.

    `rows` and `last`: which of both it does; an image of one pixel lies in rows and channels last.
    """
    axes = how.axes(x, w, out)
    if not how.fit(x, w):
        fits = last and how.fits_depthwise(x, w) and depthwise.is_better(w, out, axes)
        return "depthwise" if fits else None
    if rows and not how.of_single_pixels(x, axes):
        if _is_by_patches(w, w.shape[0] // how.groups, out, axes):
            return "patches"
        if _is_better(w, out, axes):
            return "product" if how.by_pixel(x, axes) else "convolution"
    return "pieces" if last and how.in_patches(x, axes) else None


def images_gradient(how: Options, x: Shaped, w: Shaped, out: Sequence[Size]) -> str | None:
    """What makes the gradient of images that lie in rows of pixels; None: the library."""
    axes, groups = how.axes(x, w, out), how.groups
    if not isinstance(groups, int) or not _is_at_most(MAX_CONVOLUTION, w, out):
        return None
    small = _is_by_patches(w, w.shape[1], x.shape, axes)
    if of_one_pixel(axes):  # a product reads filters as they lie
        small = small and product(x.shape[2:]) <= PANEL  # type: ignore[operator]
    if small or groups > 1 or any(axis[3] != 1 for axis in axes):
        dilated = any(axis[3] != 1 != axis[5] for axis in axes)
        few = w.shape[1] < LEAST_ROWS // 2  # type: ignore[operator]
        return None if dilated or few else "patches"
    if not _is_better(Transposed.of(w), x.shape, turned(axes)):
        return None
    return "product" if of_one_pixel(axes) else "convolution"


def filters_gradient(how: Options, x: Shaped, w: Shaped, out: Sequence[Size]) -> str | None:
    """What makes the gradient of filters from images in rows of pixels; None: the library."""
    axes = how.axes(x, w, out)
    rows = w.shape[0] // how.groups
    if _is_by_patches(w, rows, out, axes, few=True) or _is_thin(w, rows, out, axes):
        return "patches"
    return "convolution" if _is_better_gradient(w, out, axes) else None


def turned(axes: Sequence[Axis]) -> list[Axis]:
    """Those of the convolution, at steps of 1, that makes the gradient of images."""
    return [
        (out, size, taps, 1, dilation * (taps - 1) - padding, dilation)
        for size, out, taps, _, padding, dilation in axes
    ]


def of_one_pixel(axes: Sequence[Axis]) -> bool:
    return all(axis[2:5] == (1, 1, 0) for axis in axes)


def _at(axis: int, *lists: Sequence[Size]) -> list[Size]:
    """The entry of each list for one axis; one entry stands for all."""
    return [values[axis] if len(values) > 1 else values[0] for values in lists]


def _is_at_most(most: int, w: Shaped, out: Sequence[Size]) -> bool:
    """Of float32 and not too heavy; in bfloat16 oneDNN has the faster kernels."""
    sizes = (*w.shape[1:], *out)
    known = w.dtype == torch.float32 and all(isinstance(n, int) for n in sizes)
    return known and product(sizes) <= most  # type: ignore[operator]


def _is_better(w: Shaped, out: Sequence[Size], axes: Sequence[Axis]) -> bool:
    """Whether a convolution whose result has the shape `out` is better made here."""
    if not _is_at_most(MAX_CONVOLUTION, w, out):
        return False
    return out[0] == 1 or _is_at_most(LIGHT, w, out) or _share(axes) >= MIN_SHARE


def _is_better_gradient(w: Shaped, grad: Sequence[Size], axes: Sequence[Axis]) -> bool:
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
        of_one_pixel(axes) or axes[-1][1] >= enough
    )


def _is_by_patches(
    w: Shaped, rows: Size, out: Sequence[Size], axes: Sequence[Axis], few: bool = False
) -> bool:
    """Whether images of the shape `out` are so small that their patches are better copied.

    `rows`: filters that read a patch. `few`: the pixels are summed over; those of all images count.
    Measured on ResNet-50's and a U-Net's: 0.4 to 0.85 of the library's time, and 0.5 to 1.0 of the
    other kernel's up to these sizes; with 32 pixels in a row 1.05 to 1.4.
    """
    least = LEAST_ROWS // 2 if few else LEAST_ROWS
    if not isinstance(rows, int) or rows < least or not _is_at_most(MAX_CONVOLUTION, w, out):
        return False
    flat = of_one_pixel(axes) or len(axes) == 1
    if few:
        return product((out[0], *out[2:])) <= 256 or (not flat and out[-1] < SMALL)  # type: ignore[operator]
    return product(out[2:]) <= 64 if flat else out[-1] <= SMALL  # type: ignore[operator]


def _is_thin(w: Shaped, rows: Size, out: Sequence[Size], axes: Sequence[Axis]) -> bool:
    """Whether the gradient of filters of few channels, which fill no panel, is made from patches.

    Measured with 3 and 4: 0.75 of the library's time where patches do not overlap, 0.4 for 1024
    pixels, 1.5 and more for more pixels.
    """
    sizes = (rows, *w.shape[1:], *out)
    if w.dtype != torch.float32 or not all(isinstance(n, int) for n in sizes) or of_one_pixel(axes):
        return False
    enough = rows >= LEAST_ROWS // 2 and w.shape[1] <= PANEL // 8  # type: ignore[operator]
    return enough and (patchify.fit(axes) or product((out[0], *out[2:])) <= 1024)  # type: ignore[operator]


def _share(axes: Sequence[Axis]) -> float:
    """The share of places computed that are pixels; between rows of them lie some that are not."""
    (_, high, *_), (_, wide, taps, stride, _, dilation) = [(1, 1), *axes][-2:]
    apart = wide + (taps - 1) * dilation // stride
    places = high * wide if of_one_pixel(axes) else (high - 1) * apart + wide
    return float(high * wide / (-(-places // PANEL) * PANEL))
