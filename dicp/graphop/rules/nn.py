"""Activations, softmax, convolutions and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dicp.graphop.operators import NoRule, Ops, Value, per_axis
from dicp.rules import RuleTable, of_vectors

aten = torch.ops.aten
RULES = RuleTable()
rule = RULES.register


# ---- activations ---------------------------------------------------------------------------------


@rule(aten.gelu.default)
def gelu(g: Ops, x: Value, *, approximate: str = "none") -> Value:
    if g.takes("Gelu", "x", x.dtype):
        return g.op("Gelu", x, approximate=approximate)
    wide = g.wide(x)
    return g.cast(g.mul(wide, _gelu_gate(g, wide, approximate)), x.dtype)


def _tanh_argument(g: Ops, x: Value) -> Value:
    """sqrt(2/pi) (x + 0.044715 x^3)"""
    cube = g.add(g.mul(g.op("Square", x), 0.044715), 1.0)
    return g.mul(g.mul(x, cube), math.sqrt(2 / math.pi))


def _gelu_gate(g: Ops, x: Value, approximate: str) -> Value:
    """The factor that GELU multiplies x by."""
    if approximate == "tanh":
        inner = g.op("Tanh", _tanh_argument(g, x))
    else:
        inner = g.op("Erf", g.mul(x, math.sqrt(0.5)))
    return g.mul(g.add(inner, 1.0), 0.5)


def _gelu_slope(g: Ops, x: Value, approximate: str) -> Value:
    """The derivative of the factor."""
    if approximate == "tanh":
        tanh = g.op("Tanh", _tanh_argument(g, x))
        steep = g.mul(g.add(g.mul(g.op("Square", x), 3 * 0.044715), 1.0), math.sqrt(2 / math.pi))
        return g.mul(g.mul(g.sub(1.0, g.op("Square", tanh)), steep), 0.5)
    return g.mul(g.op("Exp", g.mul(g.op("Square", x), -0.5)), 1 / math.sqrt(2 * math.pi))


@rule(aten.gelu_backward.default)
def gelu_backward(g: Ops, dy: Value, x: Value, *, approximate: str = "none") -> Value:
    if g.takes("GeluGrad", "dy", x.dtype):
        return g.op("GeluGrad", dy, x, approximate=approximate)
    wide = g.wide(x)
    slope = g.mul(wide, _gelu_slope(g, wide, approximate))
    return g.cast(g.mul(g.wide(dy), g.add(_gelu_gate(g, wide, approximate), slope)), x.dtype)


@rule(aten.silu.default)
def silu(g: Ops, x: Value) -> Value:
    if g.takes("Swish", "x", x.dtype):
        return g.op("Swish", x)
    return g.op("Mul", x, g.op("Sigmoid", x))


@rule(aten.silu_backward.default)
def silu_backward(g: Ops, dy: Value, x: Value) -> Value:
    if g.takes("SwishGrad", "x", x.dtype):
        return g.op("SwishGrad", dy, x, x)
    gate = g.op("Sigmoid", x)
    slope = g.add(g.mul(x, g.sub(1.0, gate)), 1.0)
    return g.mul(dy, g.mul(gate, slope))


@rule(aten.leaky_relu.default)
def leaky_relu(g: Ops, x: Value, negative_slope: float = 0.01) -> Value:
    if x.dtype == torch.float64:  # the attribute is printed with the digits of a float32
        scaled = g.mul(x, negative_slope)
        return g.op("Select", g.op("Greater", x, g.number(0, x.dtype)), x, scaled)
    return g.op("LeakyRelu", x, negative_slope=float(negative_slope))


@rule(aten.threshold_backward.default)
def threshold_backward(g: Ops, dy: Value, x: Value, threshold: float) -> Value:
    # not ReluGrad, which stops the gradient at NaN
    return g.where(_is_at_most(g, x, threshold), 0, dy, g.dtype)


@rule(aten.threshold.default)
def threshold(g: Ops, x: Value, threshold: Any, value: Any) -> Value:
    return g.where(_is_at_most(g, x, threshold), value, x, g.dtype)


def _is_at_most(g: Ops, x: Value, limit: Any) -> Value:
    """A limit as eager compares it: truncated for integers, unrounded for 16-bit floats."""
    if isinstance(limit, float) and not x.dtype.is_floating_point:
        limit = math.trunc(limit)
    wide = g.wide(x) if x.dtype.is_floating_point else x
    return g.op("LessEqual", wide, g.number(limit, wide.dtype))


RULES.update({
    aten.sigmoid_backward.default: lambda g, dy, y: g.op("SigmoidGrad", y, dy),
    aten.tanh_backward.default: lambda g, dy, y: g.op("TanhGrad", y, dy),
})  # fmt: skip


@rule(aten.hardswish.default)
def hardswish(g: Ops, x: Value) -> Value:
    if g.takes("HardSwish", "x", x.dtype):
        return g.op("HardSwish", x)
    gate = g.op("Minimum", g.op("Maximum", g.add(x, 3.0), g.number(0, x.dtype)),
                g.number(6, x.dtype))  # fmt: skip
    return g.div(g.mul(x, gate), 6.0)


@rule(aten.hardswish_backward.default)
def hardswish_backward(g: Ops, dy: Value, x: Value) -> Value:
    if g.takes("HardSwishGrad", "x", x.dtype):
        return g.op("HardSwishGrad", dy, x)
    middle = g.mul(dy, g.add(g.div(x, 3.0), 0.5))
    low = g.where(g.op("LessEqual", x, g.number(-3, x.dtype)), 0.0, middle, x.dtype)
    return g.op("Select", g.op("GreaterEqual", x, g.number(3, x.dtype)), dy, low)


@rule(aten.hardsigmoid_backward.default)
def hardsigmoid_backward(g: Ops, dy: Value, x: Value) -> Value:
    inside = g.op("LogicalAnd", g.op("Greater", x, g.number(-3, x.dtype)),
                  g.op("Less", x, g.number(3, x.dtype)))  # fmt: skip
    # 1/6 in float32, by which eager multiplies in float64, too
    return g.where(inside, g.mul(dy, 0.1666666716337204), 0.0, g.dtype)


@rule(aten.mish.default)
def mish(g: Ops, x: Value) -> Value:
    if g.takes("Mish", "x", x.dtype):
        return g.op("Mish", x)
    wide = g.wide(x)
    return g.cast(g.mul(wide, g.op("Tanh", _softplus_of(g, wide))), x.dtype)


def _softplus_of(g: Ops, x: Value) -> Value:
    """log(1 + e^x) = max(x, 0) + log(1 + e^-|x|)"""
    rest = g.op("Log1p", g.op("Exp", g.op("Neg", g.op("Abs", x))))
    return g.add(g.op("Relu", x), rest)


@rule(aten.softplus.default)
def softplus(g: Ops, x: Value, beta: Any = 1, threshold: Any = 20) -> Value:
    if g.takes("Softplus", "x", x.dtype):
        return g.op("Softplus", x, beta=float(beta), threshold=float(threshold))
    wide = g.wide(x)
    scaled = g.mul(wide, beta)
    soft = g.div(_softplus_of(g, scaled), beta)
    is_linear = g.op("Greater", scaled, g.number(threshold, wide.dtype))
    return g.cast(g.op("Select", is_linear, wide, soft), x.dtype)


# ---- softmax -------------------------------------------------------------------------------------


@rule(aten._softmax.default)
@of_vectors
def softmax(g: Ops, x: Value, dim: int, half_to_float: bool) -> Value:
    x = g.cast(x, g.dtype)
    return g.op("Softmax", x, axes=[dim % x.ndim])


@rule(aten._log_softmax.default)
@of_vectors
def log_softmax(g: Ops, x: Value, dim: int, half_to_float: bool) -> Value:
    x = g.cast(x, g.dtype)
    return g.op("LogSoftmax", x, axes=[dim % x.ndim])


@rule(aten._softmax_backward_data.default)
@of_vectors
def softmax_backward(g: Ops, dy: Value, y: Value, dim: int, dtype: torch.dtype) -> Value:
    if g.takes("SoftmaxGrad", "softmax", y.dtype):
        return g.cast(g.op("SoftmaxGrad", y, dy, axes=[dim % y.ndim]), g.dtype)
    y, dy = g.wide(y), g.wide(dy)  # y (dy - sum(y dy))
    total = g.reduce("ReduceSum", g.mul(y, dy), [dim], True)
    return g.cast(g.mul(y, g.sub(dy, total)), g.dtype)


@rule(aten._log_softmax_backward_data.default)
@of_vectors
def log_softmax_backward(g: Ops, dy: Value, y: Value, dim: int, dtype: torch.dtype) -> Value:
    if g.takes("LogSoftmaxGrad", "grad", y.dtype):
        return g.cast(g.op("LogSoftmaxGrad", dy, y, axis=[dim % y.ndim]), g.dtype)
    y, dy = g.wide(y), g.wide(dy)  # dy - exp(y) sum(dy)
    total = g.reduce("ReduceSum", dy, [dim], True)
    return g.cast(g.sub(dy, g.mul(g.op("Exp", y), total)), g.dtype)


# ---- convolutions --------------------------------------------------------------------------------


class Window:
    """A convolution's geometry as attributes; one spatial dimension becomes two."""

    def __init__(
        self, x: Value, stride: Any, padding: Any, dilation: Any, output_padding: Any, groups: int
    ) -> None:
        self.rank = x.ndim - 2
        if self.rank not in (1, 2, 3):
            raise NoRule(f"a convolution over {self.rank} dimensions")
        if any(isinstance(size, int) and size == 0 for size in x.shape):
            raise NoRule("a convolution of an empty tensor")
        if not isinstance(groups, int):
            raise NoRule("a symbolic number of groups")
        steps, more = (per_axis(v, self.rank) for v in (stride, output_padding))
        if any(extra >= step for extra, step in zip(more, steps, strict=True)):
            raise NoRule("a convolution of the result has other sizes than the operand")
        self.flat = self.rank == 1
        lead = [1] if self.flat else []
        zero = [0] if self.flat else []
        pads = zero + per_axis(padding, self.rank)
        apart = per_axis(dilation, self.rank)
        self.is_dense = set(apart) == {1}
        self.attrs = {
            "strides": [1, 1, *lead, *per_axis(stride, self.rank)],
            "pads": [p for pad in pads for p in (pad, pad)],
            "dilations": [1, 1, *lead, *apart],
            "groups": groups,
            "data_format": "NCDHW" if self.rank == 3 else "NCHW",
        }
        self.output_padding = [0, 0, *zero, *per_axis(output_padding, self.rank)]
        self.prefix = "Conv3D" if self.rank == 3 else "Conv2D"

    def widen(self, g: Ops, x: Value) -> Value:
        return g.unsqueeze(x, 2) if self.flat else x

    def narrow(self, g: Ops, x: Value) -> Value:
        return g.squeeze(x, [2]) if self.flat else x


def _around(x: Value, padding: Sequence[Any]) -> list[Any]:
    """The widths of a symbolic padding, before and after each dimension, which the operator Pad
    adds; none where the padding is constant."""
    if all(isinstance(p, int) for p in padding):
        return []
    listed = list(padding) * (x.ndim - 2) if len(padding) == 1 else list(padding)
    return [0, 0, 0, 0, *(p for pad in listed for p in (pad, pad))]


def _padded(g: Ops, x: Value, around: Sequence[Any]) -> Value:
    return g.op("Pad", x, g.ints(list(around)), g.number(0, x.dtype)) if around else x


@rule(aten.convolution.default)
def convolution(
    g: Ops, x: Value, weight: Value, bias: Value | None, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int,
) -> Value:  # fmt: skip
    if weight.ndim == x.ndim + 1:
        raise NoRule("a convolution without a batch")
    if bias is not None and bias.dtype in g.bias_apart:
        out = convolution(g, x, weight, None, stride, padding, dilation, transposed,
                          output_padding, groups)  # fmt: skip
        return _with_bias(g, out, bias)
    around = [] if transposed else _around(x, padding)
    x, padding = _padded(g, x, around), [0] if around else padding
    window = Window(x, stride, padding, dilation, output_padding, groups)
    wide, filters = window.widen(g, x), window.widen(g, weight)
    if not transposed:
        return window.narrow(g, g.op(window.prefix, wide, filters, bias, **window.attrs))
    shape = [*g.shape[:2], 1, *g.shape[2:]] if window.flat else list(g.shape)
    kind = f"{window.prefix}Transpose"
    if g.takes(kind, "x", x.dtype) and window.is_dense:
        out = g.op(kind, g.ints(shape), wide, filters, bias,
                   output_padding=window.output_padding, **window.attrs)  # fmt: skip
        return window.narrow(g, out)
    out = window.narrow(g, _input_gradient(g, window, shape, filters, wide))
    return out if bias is None else _with_bias(g, out, bias)


def _with_bias(g: Ops, out: Value, bias: Value) -> Value:
    return g.add(out, g.reshape(bias, [1, -1, *[1] * (out.ndim - 2)]))


def _input_gradient(
    g: Ops, window: Window, shape: Sequence[Any], filters: Value, grad: Value
) -> Value:
    """The gradient of a convolution's input of these sizes."""
    kind = f"{window.prefix}BackpropInput"
    return g.op(kind, _window_sizes(g, shape), filters, grad, **window.attrs)


def _window_sizes(g: Ops, shape: Sequence[Any]) -> Value:
    """The sizes of a convolution's gradient. Raises NoRule where they have to be constants."""
    if g.constant_sizes and not all(isinstance(size, int) for size in shape):
        raise NoRule("the sizes of a convolution's gradient change from run to run")
    return g.ints(list(shape), torch.int32)


@rule(aten.convolution_backward.default)
def convolution_backward(
    g: Ops, dy: Value, x: Value, weight: Value, bias_sizes: Any, stride: Any, padding: Any,
    dilation: Any, transposed: bool, output_padding: Any, groups: int, mask: Sequence[bool],
) -> list[Value | None]:  # fmt: skip
    around = [] if transposed else _around(x, padding)
    x, padding = _padded(g, x, around), [0] if around else padding
    window = Window(x, stride, padding, dilation, output_padding, groups)
    wide, filters, wide_dy = (window.widen(g, v) for v in (x, weight, dy))
    results: list[Value | None] = [None, None, None]
    prefix, attrs = window.prefix, window.attrs
    # a transposed convolution is the gradient of a convolution: input and gradient are exchanged
    source, grad = (wide_dy, wide) if transposed else (wide, wide_dy)
    if mask[0]:
        if transposed:
            dx = g.op(prefix, wide_dy, filters, **attrs)
        else:
            dx = _input_gradient(g, window, wide.shape, filters, wide_dy)
        dx = window.narrow(g, dx)
        for axis, before in enumerate(around[::2]):
            dx = g.slice(dx, axis, before, before + g.meta[0].shape[axis])
        results[0] = dx
    if mask[1]:
        sizes = _window_sizes(g, filters.shape)
        dweight = g.op(f"{prefix}BackpropFilter", source, sizes, grad, **attrs)
        results[1] = g.cast(window.narrow(g, dweight), weight.dtype)
    if mask[2]:
        axes = [d for d in range(dy.ndim) if d != 1]
        results[2] = g.cast(g.reduce("ReduceSum", g.wide(dy), axes, False), dy.dtype)
    return results
