"""Products of groups of rows with a matrix of their own each: mixtures of experts.

The operators are those that the transformers library registers for its models; it is not imported
here.
"""

from __future__ import annotations

from typing import Any

from dicp.loop.index import contiguous_strides
from dicp.loop.lowering import Lowering, RuleTable, Value
from dicp.loop.lowering.library import plain
from dicp.vendor.cpu.routines.common import call, is_taken

GROUPED = RuleTable()
FORWARD = "transformers::grouped_mm_fallback"
BACKWARD = "transformers::grouped_mm_fallback_backward"


def _library(lw: Lowering, *args: Value) -> Any:
    assert lw.node is not None
    return plain(lw.node.target)(lw, *args)


LIBRARY_CALLS = RuleTable()
"""The operators as calls, where products are not made here."""
for _name in (FORWARD, BACKWARD):
    LIBRARY_CALLS.add_named(_name, _library, "library")


def _product(lw: Lowering, x: Value, w: Value, ends: Value, transposed: bool, out: Any) -> Value:
    """Each group of rows of x times its matrix of w (or its transpose)."""
    a, b = lw.realize(x), lw.realize(lw.permute(w, [0, 2, 1]) if transposed else w)
    limits = lw.realize(ends, contiguous_strides(ends.shape))
    sizes = [ends.shape[0], x.shape[0], b.shape[2], b.shape[1], int(ends.dtype.itemsize == 8),
             *a.strides, *b.strides, out.strides[0]]  # fmt: skip
    name = "dicp_product_grouped"
    return call(lw, name, (a, b, limits), (out,), sizes)[0]


def forward(lw: Lowering, x: Value, w: Value, ends: Value) -> Any:
    (out,) = lw.results()
    if not is_taken(x, w) or out.strides[1] != 1:
        return _library(lw, x, w, ends)
    return _product(lw, x, w, ends, False, out)


def backward(lw: Lowering, x: Value, w: Value, ends: Value, grad: Value) -> Any:
    rows, weights = lw.results()
    if not is_taken(x, w, grad) or rows.strides[1] != 1 or weights.strides[2] != 1:
        return _library(lw, x, w, ends, grad)
    first = _product(lw, grad, w, ends, True, rows)
    a, b = lw.realize(x), lw.realize(grad)
    limits = lw.realize(ends, contiguous_strides(ends.shape))
    sizes = [ends.shape[0], x.shape[0], grad.shape[1], x.shape[1], int(ends.dtype.itemsize == 8),
             *a.strides, *b.strides, *weights.strides[:2]]  # fmt: skip
    name = "dicp_product_grouped_weights"
    return first, *call(lw, name, (a, b, limits), (weights,), sizes)


GROUPED.add_named(FORWARD, forward, "library")
GROUPED.add_named(BACKWARD, backward, "library")
