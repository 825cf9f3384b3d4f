"""Matrix products and attention of float32 tensors by kernels of our own.

They take operands as they lie in memory, and attention never writes its scores down. Used where
BLAS is measured to leave half of the machine unused (`library.fastest_linear`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from dicp import operators
from dicp.loop.index import Size, contiguous_strides, product
from dicp.loop.ir import Ref
from dicp.loop.lowering import Lowering, RuleTable, Value
from dicp.loop.lowering.library import plain
from dicp.vendor.cpu import library

aten = torch.ops.aten
FOLDER = Path(__file__).parent / "routines"
HEADERS = ("gemm.h", "product.h", "attention.h", "convolution.h")
MAX_HEAD = 256
"""The largest head size the attention kernels hold (`d_most_depth`)."""

ROUTINES = RuleTable()


def headers() -> dict[str, str]:
    """The C++ files that routines are made of, by name."""
    return {name: (FOLDER / name).read_text() for name in HEADERS}


BODIES = {
    "dicp_product": "  d_product(args, sizes, false);",
    "dicp_product_biased": "  d_product(args, sizes, true);",
    "dicp_convolution": "  d_convolve(args, sizes, false);",
    "dicp_convolution_biased": "  d_convolve(args, sizes, true);",
    "dicp_attention": "  d_attention_forward(args, sizes, false);",
    "dicp_attention_masked": "  d_attention_forward(args, sizes, true);",
    "dicp_attention_gradients": "  d_attention_backward(args, sizes, false);",
    "dicp_attention_gradients_masked": "  d_attention_backward(args, sizes, true);",
}
"""Routine -> the body of its entry point."""


def header_of(name: str) -> str:
    """The C++ file that routine `name` calls into; empty for a generated kernel."""
    if name not in BODIES:
        return ""
    return name.split("_")[1] + ".h"


def _is_float(*values: Value | Ref | None) -> bool:
    """All float32, and no axis known to be empty."""
    return all(
        v is None or v.dtype == torch.float32 and all(s != 0 for s in v.shape) for v in values
    )


def _rows(lw: Lowering, value: Value) -> Ref:
    """`value` in memory, the elements of a row one after another."""
    ref = lw.realize(value)
    return ref if ref.strides[-1] == 1 else lw.realize(value, contiguous_strides(value.shape))


ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid")
"""In the order of `d_activation`."""

MAX_WORK = 1 << 27
"""Multiplications up to which a call of oneDNN costs more than its faster kernel saves: measured
on shapes from 100x70x40 to 2048x512x512, about 15 microseconds a call beside 4% of the time."""
MAX_FACE = 1 << 18
"""The same where one size is unknown, as the product of the two others."""


def _is_light(rows: Size, columns: Size, depth: Size) -> bool:
    """Whether a product is better made here; with one size unknown, by the two that are known."""
    known = [n for n in (rows, columns, depth) if isinstance(n, int)]
    return (
        rows != 1 and len(known) > 1 and prod(known) <= (MAX_WORK if len(known) == 3 else MAX_FACE)
    )


def _product(
    lw: Lowering, a: Value, b: Value, out: Ref, bias: Value | None = None, activation: str = "none"
) -> Value:
    """activation(a @ b + bias) of two matrices, or of two batches of them."""
    refs = [lw.realize(a), lw.realize(b)]
    batch, step = (out.shape[0], out.strides[0]) if len(out.shape) == 3 else (1, 0)
    counts = (batch, *out.shape[-2:], a.shape[-1])
    return _multiplied(lw, refs, out, counts, (step, out.strides[-2]), bias, activation)


def _multiplied(
    lw: Lowering, refs: list[Ref], out: Ref, counts: Sequence[Size], steps: Sequence[Size],
    bias: Value | None = None, activation: str = "none",
) -> Value:  # fmt: skip
    """The product of matrices in memory; `steps` are those of a batch and of a row of `out`."""
    left, right = (r.strides if len(r.shape) == 3 else (0, *r.strides) for r in refs)
    name = "dicp_product" if bias is None else "dicp_product_biased"
    if bias is not None:
        refs.append(_rows(lw, bias))
    sizes = [*counts, ACTIVATIONS.index(activation), *left, *right, *steps]
    return lw.routine(name, BODIES[name], refs, (out,), sizes)[0]


@ROUTINES.register(aten.bmm.default, kind="library")
def bmm(lw: Lowering, a: Value, b: Value) -> Value:
    (out,) = lw.results()
    if not _is_float(a, b) or out.strides[-1] != 1:
        return lw.call(aten.bmm.default, (a, b), out_variant=aten.bmm.out)[0]
    return _product(lw, a, b, out)


def _fits_product(lw: Lowering, out: Ref, a: Value, b: Value, *more: Value | None) -> bool:
    light = _is_light(a.shape[0], b.shape[1], a.shape[1])
    return light and out.strides[-1] == 1 and _is_float(a, b, *more)


@ROUTINES.register(aten.mm.default, kind="library")
def mm(lw: Lowering, a: Value, b: Value) -> Value:
    (out,) = lw.results()
    return _product(lw, a, b, out) if _fits_product(lw, out, a, b) else library.mm(lw, a, b)


@ROUTINES.register(aten.addmm.default, kind="library")
def addmm(lw: Lowering, bias: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    (out,) = lw.results()
    row = bias.ndim == 1 and bias.shape[0] == b.shape[1] and beta == 1 and alpha == 1
    if not row or not _fits_product(lw, out, a, b, bias):
        return library.addmm(lw, bias, a, b, beta=beta, alpha=alpha)
    return _product(lw, a, b, out, bias)


@ROUTINES.register(operators.linear, kind="library")
def linear(lw: Lowering, x: Value, w: Value, bias: Value | None, activation: str) -> Value:
    (out,) = lw.results()
    if x.ndim != 2 or activation not in ACTIVATIONS:
        return library.linear(lw, x, w, bias, activation)
    turned = lw.permute(w, [1, 0])
    if not _fits_product(lw, out, x, turned, bias):
        return library.linear(lw, x, w, bias, activation)
    return _product(lw, x, turned, out, bias, activation)


# ---- convolution ----------------------------------------------------------------------------

MAX_CONVOLUTION = 3 << 23
"""Multiplications up to which oneDNN's call, and its reordering of images and filters, cost more
than its faster kernel saves, where filters are larger than one pixel."""


@ROUTINES.register(aten.convolution.default, kind="library")
def convolution(
    lw: Lowering, x: Value, w: Value, bias: Value | None, stride: Sequence[Size],
    padding: Sequence[Size], dilation: Sequence[Size], transposed: bool,
    output_padding: Sequence[Size], groups: int,
) -> Value:  # fmt: skip
    (out,) = lw.results()
    dims = x.ndim - 2
    if not transposed and _is_float(x, w, bias) and dims in (1, 2) and out.shape[0] != 0:
        sizes = zip(x.shape[2:], out.shape[2:], w.shape[2:], strict=True)
        axes = [(*s, *_at(i, stride, padding, dilation)) for i, s in enumerate(sizes)]
        pointwise = all(a[2:5] == (1, 1, 0) for a in axes)
        if _is_row_major(out) and _is_small(w, out):
            return _convolved(lw, x, w, bias, out, axes, groups, pointwise)
        if dims == 2 and pointwise and groups == 1 and _is_channels_last(out):
            return _by_pixel(lw, x, w, bias, out)
    return plain(aten.convolution.default)(
        lw, x, w, bias, stride, padding, dilation, transposed, output_padding, groups
    )


def _at(axis: int, *lists: Sequence[Size]) -> list[Size]:
    """The entry of each list for one axis; one entry stands for all."""
    return [values[axis] if len(values) > 1 else values[0] for values in lists]


def _is_row_major(out: Ref) -> bool:
    """Whether the pixels of an image lie one after another."""
    return out.strides[2:] == contiguous_strides(out.shape[2:])


def _is_channels_last(out: Ref) -> bool:
    pixels = (out.shape[3] * out.shape[1], out.shape[1])
    return out.strides[1:] == (1, *pixels) and out.strides[0] == out.shape[2] * pixels[0]


def _is_small(w: Value, out: Ref) -> bool:
    sizes = (*w.shape[1:], *out.shape)
    depthwise = w.shape[1] == 1 and out.shape[1] != 1
    known = not depthwise and all(isinstance(n, int) for n in sizes)
    return known and product(sizes) <= MAX_CONVOLUTION  # type: ignore[operator]


def _convolved(
    lw: Lowering, x: Value, w: Value, bias: Value | None, out: Ref,
    axes: list[tuple[Any, ...]], groups: int, pointwise: bool,
) -> Value:  # fmt: skip
    image = lw.realize(x)
    if not _pixels_in_rows(image):
        image = lw.realize(x, contiguous_strides(x.shape))
    if len(axes) == 1:
        axes = [(1, 1, 1, 1, 0, 1), *axes]
    step = image.strides[-2] if len(image.shape) == 4 else 0
    if pointwise:  # an image is one row
        axes = [(1, 1, 1, 1, 0, 1), (product(image.shape[2:]), product(out.shape[2:]), 1, 1, 0, 1)]
    refs = [image, lw.realize(w, contiguous_strides(w.shape))]
    name = "dicp_convolution" if bias is None else "dicp_convolution_biased"
    if bias is not None:
        refs.append(_rows(lw, bias))
    sizes = [x.shape[0], w.shape[1], w.shape[0] // groups, groups, *axes[0], *axes[1],
             *image.strides[:2], step, *out.strides[:2]]  # fmt: skip
    return lw.routine(name, BODIES[name], refs, (out,), sizes)[0]


def _pixels_in_rows(image: Ref) -> bool:
    return image.strides[2:] == contiguous_strides(image.shape[2:])


def _by_pixel(lw: Lowering, x: Value, w: Value, bias: Value | None, out: Ref) -> Value:
    """Filters of one pixel, channels last: a product of the pixels with the filters."""
    n, c, h, k = x.shape
    pixels = lw.reshape(lw.permute(x, [0, 2, 3, 1]), (n * h * k, c))
    filters = lw.permute(lw.reshape(w, (w.shape[0], c)), [1, 0])
    refs = [lw.realize(pixels), lw.realize(filters)]
    counts = (1, n * h * k, w.shape[0], c)
    return _multiplied(lw, refs, out, counts, (0, out.shape[1]), bias)


# ---- attention ------------------------------------------------------------------------------


def _number(value: float) -> int:
    """The bits of a double."""
    return int(struct.unpack("q", struct.pack("d", value))[0])


def _fits(q: Value, k: Value, v: Value, mask: Value | None, dropout: float) -> bool:
    """Whether the kernels take these operands."""
    if dropout or not _is_float(q, k, v, mask) or any(x.ndim != 4 for x in (q, k, v)):
        return False
    heads, depths = (q.shape[1], k.shape[1], v.shape[1]), (q.shape[3], k.shape[3], v.shape[3])
    if not all(isinstance(n, int) for n in (*heads, *depths)):
        return False
    fits = heads[1] == heads[2] and heads[0] % heads[1] == 0 and max(depths) <= MAX_HEAD  # type: ignore[operator, type-var]
    return fits and depths[0] == depths[1] and (mask is None or mask.ndim in (2, 4))


def _problem(q: Value, k: Value, v: Value, causal: bool, scale: float | None) -> list[Size]:
    factor = q.shape[3] ** -0.5 if scale is None else scale  # type: ignore[operator]
    return [*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3],
            int(causal), _number(factor)]  # fmt: skip


def _operands(
    lw: Lowering, q: Value, k: Value, v: Value, mask: Value | None
) -> tuple[list[Ref], list[Size]]:
    """q, k, v and the mask in memory, and their steps."""
    refs = [_rows(lw, x) for x in (q, k, v)]
    steps = [s for ref in refs for s in ref.strides[:3]]
    if mask is not None:
        refs.append(lw.realize(lw.expand(mask, (*q.shape[:3], k.shape[2]))))
        steps += refs[-1].strides
    return refs, steps


def _tag(name: str, mask: Value | None) -> str:
    return name if mask is None else f"{name}_masked"


FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@ROUTINES.register(FORWARD, kind="library")
def attention(
    lw: Lowering, q: Value, k: Value, v: Value, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Value | None = None, scale: Any = None,
) -> Any:  # fmt: skip
    outs = lw.results()
    plain_number = scale is None or isinstance(scale, (int, float))
    laid_out = outs[0].strides[-1] == 1 and outs[1].shape == q.shape[:3]
    if not (plain_number and laid_out and _fits(q, k, v, attn_mask, dropout_p)):
        kwargs = {"attn_mask": attn_mask, "scale": scale}
        return plain(FORWARD)(lw, q, k, v, dropout_p, is_causal, **kwargs)
    refs, steps = _operands(lw, q, k, v, attn_mask)
    sizes = [*_problem(q, k, v, is_causal, scale), *steps, *outs[0].strides[:3], *outs[1].strides]
    name = _tag("dicp_attention", attn_mask)
    return lw.routine(name, BODIES[name], refs, outs, sizes)


@ROUTINES.register(BACKWARD, kind="library")
def attention_gradients(
    lw: Lowering, grad: Value, q: Value, k: Value, v: Value, out: Value, sums: Value,
    dropout_p: float, is_causal: bool, *, attn_mask: Value | None = None, scale: Any = None,
) -> Any:  # fmt: skip
    outs = lw.results()
    plain_number = scale is None or isinstance(scale, (int, float))
    laid_out = all(o.strides[-1] == 1 for o in outs) and sums.shape == q.shape[:3]
    fits = plain_number and laid_out and _is_float(grad, out, sums)
    if not (fits and _fits(q, k, v, attn_mask, dropout_p)):
        kwargs = {"attn_mask": attn_mask, "scale": scale}
        args = (grad, q, k, v, out, sums, dropout_p, is_causal)
        return plain(BACKWARD)(lw, *args, **kwargs)
    refs, steps = _operands(lw, q, k, v, attn_mask)
    refs += [_rows(lw, grad), _rows(lw, out), lw.realize(sums)]
    sizes = [*_problem(q, k, v, is_causal, scale), *steps]
    sizes += [s for ref in (*refs[-3:], *outs) for s in ref.strides[:3]]
    name = _tag("dicp_attention_gradients", attn_mask)
    return lw.routine(name, BODIES[name], refs, outs, sizes)
