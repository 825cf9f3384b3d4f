"""Grouped matrix products, where each group of rows has its own matrix: mixtures of experts.

The operators are ATen's and those that the transformers library registers for its models; that
library is not imported here.
"""

from __future__ import annotations

from typing import Any

import torch

from dicp.loop.ir.expr import Ref
from dicp.loop.ir.index import contiguous_strides
from dicp.loop.lowering import Lowering, RuleTable, Value
from dicp.loop.lowering.library import library_rule
from dicp.vendor.cpu.routines.common import LIBRARY_CALLS, are_supported, call

aten = torch.ops.aten
GROUPED = RuleTable()
FORWARD = "transformers::grouped_mm_fallback"
BACKWARD = "transformers::grouped_mm_fallback_backward"


def _library(lw: Lowering, *args: Any, **named: Any) -> Any:
    return library_rule(lw.node.target)(lw, *args, **named)


for _name in (FORWARD, BACKWARD):
    LIBRARY_CALLS.add_named(_name, _library, "library")
LIBRARY_CALLS.add(aten._grouped_mm.default, _library, "library")


def _product(lw: Lowering, x: Value, w: Value, ends: Value, transposed: bool, out: Ref) -> Value:
    """Each group of rows of x times its matrix of w (or its transpose)."""
    a, b = lw.realize(x), lw.realize(lw.permute(w, [0, 2, 1]) if transposed else w)
    limits = lw.realize(ends, contiguous_strides(ends.shape))
    sizes = [ends.shape[0], x.shape[0], b.shape[2], b.shape[1], int(ends.dtype.itemsize == 8),
             *a.strides, *b.strides, out.strides[0]]  # fmt: skip
    return call(lw, "dicp_product_grouped", (a, b, limits), (out,), sizes)[0]


def _weights(lw: Lowering, x: Value, grad: Value, ends: Value, out: Ref) -> Value:
    """x.T @ grad over each group's rows; grad.T @ x if the matrices of `out` are column-major."""
    steps = out.strides[:2]
    if out.strides[2] != 1:
        x, grad, steps = grad, x, (out.strides[0], out.strides[2])
    a, b = lw.realize(x), lw.realize(grad)
    limits = lw.realize(ends, contiguous_strides(ends.shape))
    sizes = [ends.shape[0], x.shape[0], grad.shape[1], x.shape[1], int(ends.dtype.itemsize == 8),
             *a.strides, *b.strides, *steps]  # fmt: skip
    return call(lw, "dicp_product_grouped_weights", (a, b, limits), (out,), sizes)[0]


@GROUPED.register(aten._grouped_mm.default, kind="library")
def grouped(
    lw: Lowering, a: Value, b: Value, ends: Value | None = None, bias: Value | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    (out,) = lw.results()
    if ends is not None and bias is None and are_supported(a, b, out) and out.strides[-1] == 1:
        if (a.ndim, b.ndim) == (2, 3):
            return _product(lw, a, b, ends, False, out)
        if (a.ndim, b.ndim) == (2, 2):
            return _weights(lw, lw.permute(a, [1, 0]), b, ends, out)
    return _library(lw, a, b, ends, bias, out_dtype)


def forward(lw: Lowering, x: Value, w: Value, ends: Value) -> Any:
    """Rows of each group times the group's matrix; `ends`: where groups end."""
    (out,) = lw.results()
    if not are_supported(x, w) or out.strides[1] != 1:
        return _library(lw, x, w, ends)
    return _product(lw, x, w, ends, False, out)


def backward(lw: Lowering, x: Value, w: Value, ends: Value, grad: Value) -> Any:
    """Gradients of rows and of matrices of a grouped product."""
    rows, weights = lw.results()
    if not are_supported(x, w, grad) or rows.strides[1] != 1 or 1 not in weights.strides[1:]:
        return _library(lw, x, w, ends, grad)
    first = _product(lw, grad, w, ends, True, rows)
    return first, _weights(lw, x, grad, ends, weights)


GROUPED.add_named(FORWARD, forward, "library")
GROUPED.add_named(BACKWARD, backward, "library")
