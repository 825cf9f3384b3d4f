"""Activations, norms, softmax, convolutions and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dicp.graphop.rules import RuleTable
from dicp.vendor.ascend.rules.core import Ge, NoRule, Value
from dicp.vendor.ascend.rules.reduction import count_of, variance

aten = torch.ops.aten
RULES = RuleTable()
rule = RULES.rule


# ---- activations ---------------------------------------------------------------------------------


@rule(aten.gelu.default)
def gelu(g: Ge, x: Value, *, approximate: str = "none") -> Value:
    if x.dtype == torch.float64:
        return g.mul(x, _gelu_gate(g, x, approximate))
    return g.op("GeluV2", x, approximate=approximate)


def _tanh_argument(g: Ge, x: Value) -> Value:
    """sqrt(2/pi) (x + 0.044715 x^3)"""
    cube = g.add(g.mul(g.op("Square", x), 0.044715), 1.0)
    return g.mul(g.mul(x, cube), math.sqrt(2 / math.pi))


def _gelu_gate(g: Ge, x: Value, approximate: str) -> Value:
    """What GELU multiplies x by."""
    if approximate == "tanh":
        inner = g.op("Tanh", _tanh_argument(g, x))
    else:
        inner = g.op("Erf", g.mul(x, math.sqrt(0.5)))
    return g.mul(g.add(inner, 1.0), 0.5)


def _gelu_slope(g: Ge, x: Value, approximate: str) -> Value:
    """The gate's own slope."""
    if approximate == "tanh":
        tanh = g.op("Tanh", _tanh_argument(g, x))
        steep = g.mul(g.add(g.mul(g.op("Square", x), 3 * 0.044715), 1.0), math.sqrt(2 / math.pi))
        return g.mul(g.mul(g.sub(1.0, g.op("Square", tanh)), steep), 0.5)
    return g.mul(g.op("Exp", g.mul(g.op("Square", x), -0.5)), 1 / math.sqrt(2 * math.pi))


@rule(aten.gelu_backward.default)
def gelu_backward(g: Ge, dy: Value, x: Value, *, approximate: str = "none") -> Value:
    if x.dtype == torch.float64:
        gate = _gelu_gate(g, x, approximate)
        return g.mul(dy, g.add(gate, g.mul(x, _gelu_slope(g, x, approximate))))
    return g.op("GeluGradV2", dy, x, approximate=approximate)


@rule(aten.silu.default)
def silu(g: Ge, x: Value) -> Value:
    if x.dtype == torch.float64:
        return g.op("Mul", x, g.op("Sigmoid", x))
    return g.op("Swish", x)


@rule(aten.silu_backward.default)
def silu_backward(g: Ge, dy: Value, x: Value) -> Value:
    if x.dtype != torch.float64:
        return g.op("SwishGrad", dy, x, x)
    gate = g.op("Sigmoid", x)
    slope = g.add(g.mul(x, g.sub(1.0, gate)), 1.0)
    return g.mul(dy, g.mul(gate, slope))


@rule(aten.leaky_relu.default)
def leaky_relu(g: Ge, x: Value, negative_slope: float = 0.01) -> Value:
    if x.dtype == torch.float64:  # the attribute has the digits of a float32
        scaled = g.mul(x, negative_slope)
        return g.op("SelectV2", g.op("Greater", x, g.number(0, x.dtype)), x, scaled)
    return g.op("LeakyRelu", x, negative_slope=float(negative_slope))


@rule(aten.threshold_backward.default)
def threshold_backward(g: Ge, dy: Value, x: Value, threshold: float) -> Value:
    # not ReluGrad, which stops the gradient at NaN
    return g.where(g.op("LessEqual", x, g.number(threshold, x.dtype)), 0, dy, g.dtype)


@rule(aten.sigmoid_backward.default)
def sigmoid_backward(g: Ge, dy: Value, y: Value) -> Value:
    return g.op("SigmoidGrad", y, dy)


@rule(aten.tanh_backward.default)
def tanh_backward(g: Ge, dy: Value, y: Value) -> Value:
    return g.op("TanhGrad", y, dy)


@rule(aten.hardswish.default)
def hardswish(g: Ge, x: Value) -> Value:
    if x.dtype != torch.float64:
        return g.op("HardSwish", x)
    gate = g.op("Minimum", g.op("Maximum", g.add(x, 3.0), g.number(0, x.dtype)),
                g.number(6, x.dtype))  # fmt: skip
    return g.div(g.mul(x, gate), 6.0)


@rule(aten.hardswish_backward.default)
def hardswish_backward(g: Ge, dy: Value, x: Value) -> Value:
    if x.dtype != torch.float64:
        return g.op("HardSwishGrad", dy, x)
    middle = g.mul(dy, g.add(g.div(x, 3.0), 0.5))
    low = g.where(g.op("LessEqual", x, g.number(-3, x.dtype)), 0.0, middle, x.dtype)
    return g.op("SelectV2", g.op("GreaterEqual", x, g.number(3, x.dtype)), dy, low)


@rule(aten.mish.default)
def mish(g: Ge, x: Value) -> Value:
    if x.dtype == torch.float64:
        return g.mul(x, g.op("Tanh", _softplus64(g, x)))
    return g.op("Mish", x)


def _softplus64(g: Ge, x: Value) -> Value:
    """log(1 + e^x) = max(x, 0) + log(1 + e^-|x|)"""
    rest = g.op("Log1p", g.op("Exp", g.op("Neg", g.op("Abs", x))))
    return g.add(g.op("Relu", x), rest)


@rule(aten.softplus.default)
def softplus(g: Ge, x: Value, beta: Any = 1, threshold: Any = 20) -> Value:
    if x.dtype != torch.float64:
        return g.op("SoftplusV2", x, beta=float(beta), threshold=float(threshold))
    scaled = g.mul(x, beta)
    soft = g.div(_softplus64(g, scaled), beta)
    return g.op("SelectV2", g.op("Greater", scaled, g.number(threshold, x.dtype)), x, soft)


# ---- softmax -------------------------------------------------------------------------------------


@rule(aten._softmax.default)
def softmax(g: Ge, x: Value, dim: int, half_to_float: bool) -> Value:
    x = g.cast(x, g.dtype)
    return g.full([], 1, g.dtype) if x.ndim == 0 else g.op("SoftmaxV2", x, axes=[dim % x.ndim])


@rule(aten._log_softmax.default)
def log_softmax(g: Ge, x: Value, dim: int, half_to_float: bool) -> Value:
    x = g.cast(x, g.dtype)
    return g.full([], 0, g.dtype) if x.ndim == 0 else g.op("LogSoftmaxV2", x, axes=[dim % x.ndim])


@rule(aten._softmax_backward_data.default)
def softmax_backward(g: Ge, dy: Value, y: Value, dim: int, dtype: torch.dtype) -> Value:
    if y.ndim == 0:
        return g.full([], 0, g.dtype)
    return g.cast(g.op("SoftmaxGrad", y, dy, axes=[dim % y.ndim]), g.dtype)


@rule(aten._log_softmax_backward_data.default)
def log_softmax_backward(g: Ge, dy: Value, y: Value, dim: int, dtype: torch.dtype) -> Value:
    if y.ndim == 0:
        return g.full([], 0, g.dtype)
    return g.cast(g.op("LogSoftmaxGrad", dy, y, axis=[dim % y.ndim]), g.dtype)


# ---- norms ---------------------------------------------------------------------------------------


@rule(aten.native_layer_norm.default)
def layer_norm(
    g: Ge, x: Value, shape: Sequence[Any], weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, Value, Value]:
    same = all(v is None or v.dtype == x.dtype for v in (weight, bias))
    y_type, mean_type = g.meta[0].dtype, g.meta[1].dtype
    if x.dtype != torch.float64 and same:
        sizes = g.ints(list(shape))
        y, mean, rstd = g.ops("LayerNormV4", x, sizes, weight, bias, epsilon=float(eps))
        return y, g.cast(mean, mean_type), g.cast(rstd, mean_type)
    axes = list(range(x.ndim - len(shape), x.ndim))
    spread, mean = variance(g, x, axes, 0, True)
    rstd = g.op("Rsqrt", g.add(spread, eps))
    y = g.mul(g.sub(g.wide(x), mean), rstd)
    y = y if weight is None else g.mul(y, g.cast(weight, y.dtype))
    y = y if bias is None else g.add(y, g.cast(bias, y.dtype))
    return g.cast(y, y_type), g.cast(mean, mean_type), g.cast(rstd, mean_type)


@rule(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    g: Ge, dy: Value, x: Value, shape: Sequence[Any], mean: Value, rstd: Value,
    weight: Value | None, bias: Value | None, mask: Sequence[bool],
) -> list[Value | None]:  # fmt: skip
    """dx = rstd (d - mean(d) - n mean(d n)), with d = dy weight and n the normalized x."""
    axes = list(range(x.ndim - len(shape), x.ndim))
    rest = list(range(x.ndim - len(shape)))
    wide = g.wide(x)
    mean, rstd, wide_dy = (g.cast(v, wide.dtype) for v in (mean, rstd, dy))
    normal = g.mul(g.sub(wide, mean), rstd)
    scaled = wide_dy if weight is None else g.mul(wide_dy, g.cast(weight, wide.dtype))
    results: list[Value | None] = [None, None, None]
    if mask[0]:
        first = g.reduce("ReduceMean", scaled, axes, True)
        second = g.reduce("ReduceMean", g.mul(scaled, normal), axes, True)
        inner = g.sub(g.sub(scaled, first), g.mul(normal, second))
        results[0] = g.cast(g.mul(inner, rstd), g.meta[0].dtype)
    if mask[1] and weight is not None:
        dweight = g.reduce("ReduceSum", g.mul(wide_dy, normal), rest, False)
        results[1] = g.cast(dweight, g.meta[1].dtype)
    if mask[2] and bias is not None:
        results[2] = g.cast(g.reduce("ReduceSum", wide_dy, rest, False), g.meta[2].dtype)
    return results


@rule(aten._fused_rms_norm.default)
def rms_norm(
    g: Ge, x: Value, shape: Sequence[Any], weight: Value | None, eps: float | None
) -> tuple[Value, Value]:
    epsilon = torch.finfo(x.dtype).eps if eps is None else eps
    y_type, rstd_type = g.meta[0].dtype, g.meta[1].dtype
    if x.dtype != torch.float64 and (weight is None or weight.dtype == x.dtype):
        weight = g.full(list(shape), 1, x.dtype) if weight is None else weight
        y, rstd = g.ops("RmsNorm", x, weight, epsilon=float(epsilon))
        return y, g.cast(rstd, rstd_type)
    axes = list(range(x.ndim - len(shape), x.ndim))
    wide = g.wide(x)
    mean = g.reduce("ReduceMean", g.op("Square", wide), axes, True)
    rstd = g.op("Rsqrt", g.add(mean, epsilon))
    y = g.mul(wide, rstd)
    y = y if weight is None else g.mul(y, g.cast(weight, y.dtype))
    return g.cast(y, y_type), g.cast(rstd, rstd_type)


def _channel_shape(x: Value) -> list[Any]:
    return [1, x.shape[1], *([1] * (x.ndim - 2))]


@rule(aten._native_batch_norm_legit_no_training.default)
def batch_norm_infer(
    g: Ge, x: Value, weight: Value | None, bias: Value | None, mean: Value, var: Value,
    momentum: float, eps: float,
) -> tuple[Value, Value | None, Value | None]:  # fmt: skip
    y = _batch_normalized(g, x, weight, bias, mean, _rstd(g, var, eps), var, eps)
    empty = [g.full([0], 0, m.dtype) for m in g.meta[1:]]
    return y, empty[0], empty[1]


def _rstd(g: Ge, var: Value, eps: float) -> Value:
    return g.op("Rsqrt", g.add(g.wide(var), eps))


def _batch_normalized(
    g: Ge, x: Value, weight: Value | None, bias: Value | None, mean: Value, rstd: Value,
    var: Value | None = None, eps: float = 0.0,
) -> Value:  # fmt: skip
    if x.dtype != torch.float64 and var is not None:
        channels = [x.shape[1]]
        single = torch.float32
        scale = g.full(channels, 1, single) if weight is None else g.cast(weight, single)
        offset = g.full(channels, 0, single) if bias is None else g.cast(bias, single)
        return g.op("BNInfer", x, scale, offset, g.cast(mean, single), g.cast(var, single),
                    epsilon=float(eps))  # fmt: skip
    shape = _channel_shape(x)
    wide = g.wide(x)
    mean, rstd = g.cast(mean, wide.dtype), g.cast(rstd, wide.dtype)
    y = g.mul(g.sub(wide, g.reshape(mean, shape)), g.reshape(rstd, shape))
    y = y if weight is None else g.mul(y, g.reshape(g.cast(weight, y.dtype), shape))
    y = y if bias is None else g.add(y, g.reshape(g.cast(bias, y.dtype), shape))
    return g.cast(y, x.dtype)


def _batch_statistics(g: Ge, x: Value) -> tuple[Value, Value]:
    """Variance and mean per channel."""
    return variance(g, x, [d for d in range(x.ndim) if d != 1], 0, False)


@rule(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(
    g: Ge, x: Value, weight: Value | None, bias: Value | None, training: bool, momentum: float,
    eps: float,
) -> tuple[Value, Value, Value]:  # fmt: skip
    var, mean = _batch_statistics(g, x)
    rstd = _rstd(g, var, eps)
    y = _batch_normalized(g, x, weight, bias, mean, rstd)
    return y, g.cast(mean, g.meta[1].dtype), g.cast(rstd, g.meta[2].dtype)


@rule(aten._native_batch_norm_legit_functional.default)
def batch_norm_train(
    g: Ge, x: Value, weight: Value | None, bias: Value | None, mean: Value, var: Value,
    training: bool, momentum: float, eps: float,
) -> tuple[Value, ...]:  # fmt: skip
    """The result, what backward needs, and the new running mean and variance."""
    if not training:
        y = _batch_normalized(g, x, weight, bias, mean, _rstd(g, var, eps), var, eps)
        empty = [g.full([0], 0, m.dtype) for m in g.meta[1:3]]
        return y, *empty, g.op("Identity", mean), g.op("Identity", var)
    batch_var, batch_mean = _batch_statistics(g, x)
    rstd = _rstd(g, batch_var, eps)
    y = _batch_normalized(g, x, weight, bias, batch_mean, rstd)
    count = count_of(x, [d for d in range(x.ndim) if d != 1])
    unbiased = g.mul(g.mul(batch_var, count), g.div(g.number(1.0, rstd.dtype), count - 1))
    new = [
        g.cast(g.add(g.mul(g.cast(new, rstd.dtype), momentum),
                     g.mul(g.cast(old, rstd.dtype), 1 - momentum)), old.dtype)
        for new, old in ((batch_mean, mean), (unbiased, var))
    ]  # fmt: skip
    saved = [g.cast(v, m.dtype) for v, m in zip((batch_mean, rstd), g.meta[1:3], strict=True)]
    return y, *saved, *new


@rule(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    g: Ge, dy: Value, x: Value, weight: Value | None, mean: Value | None, var: Value | None,
    saved_mean: Value | None, saved_rstd: Value | None, train: bool, eps: float,
    mask: Sequence[bool],
) -> list[Value | None]:  # fmt: skip
    """dx = weight rstd (dy - mean(dy) - n mean(dy n)), with n the normalized x."""
    axes = [d for d in range(x.ndim) if d != 1]
    shape = _channel_shape(x)
    wide, wide_dy = g.wide(x), g.wide(dy)
    if train:
        assert saved_mean is not None and saved_rstd is not None
        center, rstd = g.cast(saved_mean, wide.dtype), g.cast(saved_rstd, wide.dtype)
    else:
        assert mean is not None and var is not None
        center, rstd = g.cast(mean, wide.dtype), g.cast(_rstd(g, var, eps), wide.dtype)
    normal = g.mul(g.sub(wide, g.reshape(center, shape)), g.reshape(rstd, shape))
    dbias = g.reduce("ReduceSum", wide_dy, axes, False)
    dweight = g.reduce("ReduceSum", g.mul(wide_dy, normal), axes, False)
    results: list[Value | None] = [None, None, None]
    if mask[0]:
        scale = rstd if weight is None else g.mul(rstd, g.cast(weight, rstd.dtype))
        inner = wide_dy
        if train:
            count = count_of(x, axes)
            inner = g.sub(wide_dy, g.reshape(g.div(dbias, count), shape))
            inner = g.sub(inner, g.mul(normal, g.reshape(g.div(dweight, count), shape)))
        results[0] = g.cast(g.mul(inner, g.reshape(scale, shape)), g.meta[0].dtype)
    if mask[1]:
        results[1] = g.cast(dweight, g.meta[1].dtype)
    if mask[2]:
        results[2] = g.cast(dbias, g.meta[2].dtype)
    return results


@rule(aten.native_group_norm.default)
def group_norm(
    g: Ge, x: Value, weight: Value | None, bias: Value | None, n: Any, c: Any, hw: Any,
    groups: int, eps: float,
) -> tuple[Value, Value, Value]:  # fmt: skip
    grouped = g.reshape(g.wide(x), [n, groups, c * hw // groups])
    spread, mean = variance(g, grouped, [2], 0, True)
    rstd = g.op("Rsqrt", g.add(spread, eps))
    y = g.reshape(g.mul(g.sub(grouped, mean), rstd), x.shape)
    shape = _channel_shape(x)
    y = y if weight is None else g.mul(y, g.reshape(g.cast(weight, y.dtype), shape))
    y = y if bias is None else g.add(y, g.reshape(g.cast(bias, y.dtype), shape))
    saved = [g.cast(g.squeeze(v, [2]), g.meta[1].dtype) for v in (mean, rstd)]
    return g.cast(y, g.dtype), saved[0], saved[1]


@rule(aten.native_group_norm_backward.default)
def group_norm_backward(
    g: Ge, dy: Value, x: Value, mean: Value, rstd: Value, weight: Value | None, n: Any, c: Any,
    hw: Any, groups: int, mask: Sequence[bool],
) -> list[Value | None]:  # fmt: skip
    """As for layer norm, over the elements of a group."""
    wide = g.wide(x)
    flat = [n, groups, c * hw // groups]
    center, scale = (g.reshape(g.cast(v, wide.dtype), [n, groups, 1]) for v in (mean, rstd))
    normal = g.mul(g.sub(g.reshape(wide, flat), center), scale)
    wide_dy = g.reshape(g.cast(dy, wide.dtype), [n, c, hw])
    scaled = wide_dy
    if weight is not None:
        scaled = g.mul(wide_dy, g.reshape(g.cast(weight, wide.dtype), [1, c, 1]))
    results: list[Value | None] = [None, None, None]
    if mask[0]:
        grouped = g.reshape(scaled, flat)
        first = g.reduce("ReduceMean", grouped, [2], True)
        second = g.reduce("ReduceMean", g.mul(grouped, normal), [2], True)
        inner = g.sub(g.sub(grouped, first), g.mul(normal, second))
        results[0] = g.cast(g.reshape(g.mul(inner, scale), x.shape), g.meta[0].dtype)
    if mask[1]:
        products = g.mul(wide_dy, g.reshape(normal, [n, c, hw]))
        results[1] = g.cast(g.reduce("ReduceSum", products, [0, 2], False), g.meta[1].dtype)
    if mask[2]:
        results[2] = g.cast(g.reduce("ReduceSum", wide_dy, [0, 2], False), g.meta[2].dtype)
    return results


# ---- convolutions --------------------------------------------------------------------------------


def _per_dimension(values: Sequence[Any], rank: int) -> list[int]:
    listed = list(values) * rank if len(values) == 1 else list(values)
    if not all(isinstance(v, int) for v in listed):
        raise NoRule("symbolic strides or padding")
    return listed


class Window:
    """A convolution's geometry as GE wants it; one spatial dimension is taken as two."""

    def __init__(
        self, x: Value, stride: Any, padding: Any, dilation: Any, output_padding: Any, groups: int
    ) -> None:
        self.rank = x.ndim - 2
        if self.rank not in (1, 2, 3):
            raise NoRule(f"a convolution over {self.rank} dimensions")
        self.flat = self.rank == 1
        lead = [1] if self.flat else []
        zero = [0] if self.flat else []
        pads = zero + _per_dimension(padding, self.rank)
        self.attrs = {
            "strides": [1, 1, *lead, *_per_dimension(stride, self.rank)],
            "pads": [p for pad in pads for p in (pad, pad)],
            "dilations": [1, 1, *lead, *_per_dimension(dilation, self.rank)],
            "groups": groups,
            "data_format": "NCDHW" if self.rank == 3 else "NCHW",
        }
        self.output_padding = [0, 0, *zero, *_per_dimension(output_padding, self.rank)]
        self.prefix = "Conv3D" if self.rank == 3 else "Conv2D"

    def widen(self, g: Ge, x: Value) -> Value:
        return g.unsqueeze(x, 2) if self.flat else x

    def narrow(self, g: Ge, x: Value) -> Value:
        return g.squeeze(x, [2]) if self.flat else x


@rule(aten.convolution.default)
def convolution(
    g: Ge, x: Value, weight: Value, bias: Value | None, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int,
) -> Value:  # fmt: skip
    if weight.ndim == x.ndim + 1:
        raise NoRule("a convolution without a batch")
    window = Window(x, stride, padding, dilation, output_padding, groups)
    wide, filters = window.widen(g, x), window.widen(g, weight)
    if not transposed:
        return window.narrow(g, g.op(window.prefix, wide, filters, bias, **window.attrs))
    shape = [*g.shape[:2], 1, *g.shape[2:]] if window.flat else list(g.shape)
    out = g.op(
        f"{window.prefix}Transpose", g.ints(shape), wide, filters, bias,
        output_padding=window.output_padding, **window.attrs,
    )  # fmt: skip
    return window.narrow(g, out)


@rule(aten.convolution_backward.default)
def convolution_backward(
    g: Ge, dy: Value, x: Value, weight: Value, bias_sizes: Any, stride: Any, padding: Any,
    dilation: Any, transposed: bool, output_padding: Any, groups: int, mask: Sequence[bool],
) -> list[Value | None]:  # fmt: skip
    window = Window(x, stride, padding, dilation, output_padding, groups)
    wide, filters, wide_dy = (window.widen(g, v) for v in (x, weight, dy))
    results: list[Value | None] = [None, None, None]
    prefix, attrs = window.prefix, window.attrs
    # a transposed convolution is the gradient of a plain one: their roles change places
    source, grad = (wide_dy, wide) if transposed else (wide, wide_dy)
    if mask[0]:
        if transposed:
            dx = g.op(prefix, wide_dy, filters, **attrs)
        else:
            dx = g.op(f"{prefix}BackpropInput", g.ints(wide.shape), filters, wide_dy, **attrs)
        results[0] = window.narrow(g, dx)
    if mask[1]:
        sizes = g.ints(filters.shape)
        dweight = g.op(f"{prefix}BackpropFilter", source, sizes, grad, **attrs)
        results[1] = window.narrow(g, dweight)
    if mask[2]:
        axes = [d for d in range(dy.ndim) if d != 1]
        results[2] = g.cast(g.reduce("ReduceSum", g.wide(dy), axes, False), dy.dtype)
    return results
