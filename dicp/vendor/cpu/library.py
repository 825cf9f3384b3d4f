"""Matrix products by the libraries of PyTorch's wheel: oneDNN, where it is faster, and BLAS."""

from __future__ import annotations

from typing import Any

import torch

from dicp import operators
from dicp.loop.ir.index import Size
from dicp.loop.lowering import Lowering, RuleTable, Value
from dicp.loop.lowering.layout import is_dense
from dicp.loop.lowering.library import rows_of
from dicp.torch_private import ATTENTION_BACKWARD, ATTENTION_FORWARD
from dicp.vendor.cpu.calibration import has_kernels, has_onednn_linear
from dicp.vendor.cpu.toolchain import has_feature

aten = torch.ops.aten


CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, ATTENTION_FORWARD,
            ATTENTION_BACKWARD)  # fmt: skip


def in_float32() -> dict[Any, frozenset[torch.dtype]]:
    """Operators that are faster in float32 on this processor, and the dtypes of which they are.

    Products and attention in bfloat16 are our kernels'. On an AMD EPYC (Zen 3), one thread, the
    library's time over that in float32: convolutions and their gradients 5 to 60 in bfloat16 and
    float16; products in float16 6 to 130, attention 4.
    """
    if not has_feature("avx2"):
        return {}
    slow = {dtype for dtype in (torch.bfloat16, torch.float16) if not has_kernels(dtype)}
    found = {op: frozenset(slow) for op in CONVOLUTIONS}
    return found | {op: frozenset(slow - {torch.bfloat16}) for op in PRODUCTS}


ONEDNN_ACTIVATIONS = {"none": ("none", ""), "relu": ("relu", ""), "gelu": ("gelu", "none"),
                      "gelu_tanh": ("gelu", "tanh"), "silu": ("swish", ""), "tanh": ("tanh", ""),
                      "sigmoid": ("sigmoid", "")}  # fmt: skip
"""Activation -> oneDNN's name of it, and its approximation."""


def _onednn(
    lw: Lowering, x: Value, w: Value, bias: Value | None, activation: str = "none"
) -> Value:
    """activation(x @ w.T + bias) by oneDNN, which reads a bias as if it were contiguous."""
    name, approximation = ONEDNN_ACTIVATIONS[activation]
    added = None if bias is None else rows_of(lw, bias)
    return lw.call(
        torch.ops.mkldnn._linear_pointwise.default, (x, w, added, name, [], approximation)
    )[0]


def _is_onednn_faster(lw: Lowering, x: Value, w: Value, *bias: Value) -> bool:
    """Whether oneDNN takes these operands, and is faster than BLAS with their strides.

    Its kernels take dense weights; it multiplies others one number after another, in a thousand
    times the time of BLAS, which copies them, and with several times the rounding error. Measured
    in bfloat16: it saves copying the bias, and loses where it copies a transposed operand.
    """
    operands = (x, w, *bias)
    if not has_onednn_linear(x.dtype) or any(
        v.dtype != x.dtype or not _nonempty(v.shape) for v in operands
    ):
        return False
    if not is_dense(w.shape, lw.realize(w).strides):
        return False
    if x.dtype == torch.bfloat16:
        return bool(bias) and all(lw.realize(v).strides[-1] == 1 for v in (x, w))
    return x.dtype == torch.float32


def _nonempty(shape: tuple[Size, ...]) -> bool:
    return all(s != 0 for s in shape)


def mm(lw: Lowering, a: Value, b: Value, onednn: bool) -> Value:
    """a @ b; `onednn`: by oneDNN if it takes the operands."""
    transposed = lw.permute(b, [1, 0])
    if not (onednn and _is_onednn_faster(lw, a, transposed)):
        return lw.call(aten.mm.default, (a, b), out_variant=aten.mm.out)[0]
    return _onednn(lw, a, transposed, None)


def adds_row(bias: Value, b: Value, beta: Any, alpha: Any) -> bool:
    """Whether addmm is a @ b plus one row, unscaled: the bias of a linear layer."""
    return bias.ndim == 1 and bias.shape[0] == b.shape[1] and beta == 1 and alpha == 1


def addmm(
    lw: Lowering, bias: Value, a: Value, b: Value, beta: Any, alpha: Any, onednn: bool
) -> Value:
    """beta * bias + alpha * a @ b; `onednn`: by oneDNN if it takes the operands."""
    transposed = lw.permute(b, [1, 0])
    row = onednn and adds_row(bias, b, beta, alpha)
    if not (row and _is_onednn_faster(lw, a, transposed, bias)):
        scale = {"beta": beta, "alpha": alpha}
        return lw.call(aten.addmm.default, (bias, a, b), scale, out_variant=aten.addmm.out)[0]
    return _onednn(lw, a, transposed, bias)


def linear(lw: Lowering, x: Value, w: Value, bias: Value | None, activation: str) -> Value:
    """activation(x @ w.T + bias) by oneDNN, which fuses the activation, if it is faster."""
    known = activation in ONEDNN_ACTIVATIONS
    if not known or not _is_onednn_faster(lw, x, w, *([] if bias is None else [bias])):
        return eager_linear(lw, x, w, bias, activation)
    return _onednn(lw, x, w, bias, activation)


LIBRARIES = RuleTable()
"""Rules that call PyTorch's libraries for operators of our own."""


@LIBRARIES.register(operators.linear, kind="library")
def eager_linear(lw: Lowering, x: Value, w: Value, bias: Value | None, activation: str) -> Value:
    return lw.call(operators.linear, (x, w, bias, activation))[0]
