"""Matrix products, single and in batches, with bias and activation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dicp import operators
from dicp.loop.ir.expr import Ref
from dicp.loop.ir.index import Size
from dicp.loop.lowering import Lowering, RuleTable, Value
from dicp.vendor.cpu import library
from dicp.vendor.cpu.routines.common import call, is_few, is_taken, rows_of

aten = torch.ops.aten
PRODUCTS = RuleTable()

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid")
"""In the order of `d_activation`."""

MAX_TURNED = 1 << 30
"""Multiplications in bfloat16 up to which our kernel is faster though it packs a column-major left
operand, as in gradients of weights; beyond, the library's is up to a tenth faster."""
MAX_PACKING = 1 << 19
"""Elements of the second operand, per row of the first, up to which packing it pays off."""


def _is_better(rows: Size, columns: Size, depth: Size, turned: bool) -> bool:
    """Whether our kernel is faster than oneDNN's.

    Measured in float32 on shapes from 2x512x512 to 2048x2048x2048: 0.9 to 2.5 times as fast, 1.3 in
    the geometric mean; in bfloat16 1.0 to 2.7 times. `turned`: the left operand is
    bfloat16 and column-major.
    """
    if rows == 1:
        return False
    if not (isinstance(rows, int) and isinstance(columns, int) and isinstance(depth, int)):
        return True
    light = not turned or rows * columns * depth <= MAX_TURNED
    return light and columns * depth <= rows * MAX_PACKING


def _product(
    lw: Lowering, a: Value, b: Value, out: Ref, bias: Value | None = None, activation: str = "none"
) -> Value:
    """activation(a @ b + bias) of two matrices, or of two batches of them."""
    refs = [lw.realize(a), lw.realize(b)]
    batch, step = (out.shape[0], out.strides[0]) if len(out.shape) == 3 else (1, 0)
    counts = (batch, *out.shape[-2:], a.shape[-1])
    return multiplied(lw, refs, out, counts, (step, out.strides[-2]), bias, activation)


def multiplied(
    lw: Lowering, refs: list[Ref], out: Ref, counts: Sequence[Size], steps: Sequence[Size],
    bias: Value | None = None, activation: str = "none", by_row: bool = False,
) -> Value:  # fmt: skip
    """The product of matrices in memory; `steps`: the strides of a batch and of a row of `out`.

    `by_row`: the bias has an element for each row of the result, else for each column.
    """
    left, right = (r.strides if len(r.shape) == 3 else (0, *r.strides) for r in refs)
    name = "dicp_product" if bias is None else "dicp_product_biased"
    if bias is not None:
        refs.append(rows_of(lw, bias))
    sizes = [*counts, ACTIVATIONS.index(activation), *left, *right, *steps, int(by_row)]
    return call(lw, name, refs, (out,), sizes)[0]


@PRODUCTS.register(aten.bmm.default, kind="library")
def bmm(lw: Lowering, a: Value, b: Value) -> Value:
    (out,) = lw.results()
    if not is_taken(a, b) or out.strides[-1] != 1 or is_few(a.shape[1]):
        return lw.call(aten.bmm.default, (a, b), out_variant=aten.bmm.out)[0]
    return _product(lw, a, b, out)


def _fits_product(lw: Lowering, out: Ref, a: Value, b: Value, *more: Value | None) -> bool:
    if not is_taken(a, b, *more) or out.strides[-1] != 1:
        return False
    turned = a.dtype == torch.bfloat16 and lw.realize(a).strides[-1] != 1
    return _is_better(a.shape[0], b.shape[1], a.shape[1], turned)


@PRODUCTS.register(aten.mm.default, kind="library")
def mm(lw: Lowering, a: Value, b: Value) -> Value:
    (out,) = lw.results()
    return _product(lw, a, b, out) if _fits_product(lw, out, a, b) else library.mm(lw, a, b)


@PRODUCTS.register(aten.addmm.default, kind="library")
def addmm(lw: Lowering, bias: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    (out,) = lw.results()
    row = bias.ndim == 1 and bias.shape[0] == b.shape[1] and beta == 1 and alpha == 1
    if not row or not _fits_product(lw, out, a, b, bias):
        return library.addmm(lw, bias, a, b, beta=beta, alpha=alpha)
    return _product(lw, a, b, out, bias)


@PRODUCTS.register(operators.linear, kind="library")
def linear(lw: Lowering, x: Value, w: Value, bias: Value | None, activation: str) -> Value:
    (out,) = lw.results()
    if x.ndim != 2 or activation not in ACTIVATIONS:
        return library.linear(lw, x, w, bias, activation)
    turned = lw.permute(w, [1, 0])
    if not _fits_product(lw, out, x, turned, bias):
        return library.linear(lw, x, w, bias, activation)
    return _product(lw, x, turned, out, bias, activation)
