"""Activation functions, a few losses and their gradients, one short expression each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from dicp.loop.ir.expr import Expr, apply, const
from dicp.loop.lowering.conditions import both, compare, either, maximum, minimum, select
from dicp.loop.lowering.core import Lowering, Value
from dicp.loop.lowering.layout import sizes_of
from dicp.loop.lowering.pointwise import clamp, elementwise
from dicp.loop.lowering.views import narrow, wrap
from dicp.rules import RuleTable

aten = torch.ops.aten
ACTIVATION = RuleTable()
rule = ACTIVATION.register


def unary(fn: Callable[[Expr], Expr]) -> Callable[..., Value]:
    """The rule of an operator that applies `fn` to each element."""

    def lowered(lw: Lowering, x: Value) -> Value:
        return elementwise(lw, (x,), fn)

    return lowered


def sigmoid_of(x: Expr) -> Expr:
    """1 / (1 + exp(-x))."""
    return apply("sigmoid", x.dtype, x)


def _exp(x: Expr) -> Expr:
    return apply("exp", x.dtype, x)


def _tanh_of_softplus(x: Expr) -> tuple[Expr, Expr]:
    """tanh(log(1 + exp(x))) and its derivative, fractions of u = exp(-|x|) without cancellation.

    With n = exp(x) * (exp(x) + 2) they are n / (n + 2) and 4 exp(x) * (1 + exp(x)) / (n + 2)^2.
    """
    u = _exp(-apply("abs", x.dtype, x))
    positive = compare("ge", x, const(0.0, x.dtype))
    scale = select(positive, u, const(1.0, x.dtype))  # fractions are multiplied by its square
    top = select(positive, 1.0 + u * 2.0, u * (u + 2.0))
    below = top + 2.0 * scale * scale
    return top / below, 4.0 * u * scale * (1.0 + u) / below / below


ACTIVATION.add(aten.relu, unary(lambda x: maximum(x, 0)))
ACTIVATION.add(aten.relu6, unary(lambda x: minimum(maximum(x, 0), 6)))
ACTIVATION.add(aten.silu, unary(lambda x: x / (_exp(-x) + 1.0)))
ACTIVATION.add(aten.hardswish, unary(lambda x: x * minimum(maximum(x + 3.0, 0.0), 6.0) * (1 / 6)))
ACTIVATION.add(aten.hardsigmoid, unary(lambda x: minimum(maximum(x + 3.0, 0.0), 6.0) * (1 / 6)))


@rule(aten.gelu)
def gelu(lw: Lowering, x: Value, approximate: str = "none") -> Value:
    return elementwise(lw, (x,), _gelu_tanh if approximate == "tanh" else _gelu_erf)


def _gelu_erf(x: Expr) -> Expr:
    return x * apply("normal_cdf", x.dtype, x)


def _gelu_tanh(x: Expr) -> Expr:
    return x * apply("normal_cdf_tanh", x.dtype, x)


@rule(aten.gelu_backward)
def gelu_backward(lw: Lowering, g: Value, x: Value, approximate: str = "none") -> Value:
    def erf_form(g: Expr, x: Expr) -> Expr:
        density = apply("exp", x.dtype, x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
        return g * (apply("normal_cdf", x.dtype, x) + x * density)

    def tanh_form(g: Expr, x: Expr) -> Expr:
        # 1 - tanh^2 far from zero is the difference of equal numbers; the function of -|x| is none.
        low = apply("normal_cdf_tanh", x.dtype, -apply("abs", x.dtype, x))
        high = 1.0 - low
        slope = (x * x * (3 * 0.044715) + 1.0) * math.sqrt(2 / math.pi)
        return g * (select(compare("lt", x, 0), low, high) + x * 2.0 * low * high * slope)

    return elementwise(lw, (g, x), tanh_form if approximate == "tanh" else erf_form)


@rule(aten.silu_backward)
def silu_backward(lw: Lowering, g: Value, x: Value) -> Value:
    def body(g: Expr, x: Expr) -> Expr:
        s = 1.0 / (_exp(-x) + 1.0)  # kernels that compute silu, too, share the exponential
        return g * s * (x * (1.0 - s) + 1.0)

    return elementwise(lw, (g, x), body)


@rule(aten.threshold_backward)
def threshold_backward(lw: Lowering, g: Value, x: Value, threshold: Any) -> Value:
    limit = lw.scalar(threshold, lw.meta().dtype)  # not rounded to a 16-bit float, as in eager
    return elementwise(lw, (g, x), lambda g, x: select(compare("le", x, limit), 0, g))


@rule(aten.leaky_relu)
def leaky_relu(lw: Lowering, x: Value, slope: Any = 0.01) -> Value:
    return elementwise(
        lw, (x,), lambda x: select(compare("gt", x, 0), x, x * lw.scalar(slope, x.dtype))
    )


@rule(aten.leaky_relu_backward)
def leaky_relu_backward(lw: Lowering, g: Value, x: Value, slope: Any, is_result: bool) -> Value:
    return elementwise(
        lw, (g, x), lambda g, x: select(compare("gt", x, 0), g, g * lw.scalar(slope, x.dtype))
    )


@rule(aten.elu)
def elu(lw: Lowering, x: Value, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Value:
    def body(x: Expr) -> Expr:
        low = apply("expm1", x.dtype, x * lw.real(input_scale, x.dtype))
        low = low * lw.real(alpha * scale, x.dtype)
        return select(compare("lt", x, 0), low, x * lw.real(scale, x.dtype))

    return elementwise(lw, (x,), body)


ACTIVATION.add(aten.mish.default, unary(lambda x: x * _tanh_of_softplus(x)[0]))


@rule(aten.mish_backward.default)
def mish_backward(lw: Lowering, g: Value, x: Value) -> Value:
    def body(g: Expr, x: Expr) -> Expr:
        t, slope = _tanh_of_softplus(x)
        return g * (t + x * slope)

    return elementwise(lw, (g, x), body)


@rule(aten.threshold.default)
def threshold(lw: Lowering, x: Value, limit: Any, value: Any) -> Value:
    dtype = x.dtype
    lw.round_elements(x)
    return elementwise(
        lw, (x,),
        # eager compares with the limit itself, not with one rounded to a 16-bit float
        lambda x: select(compare("le", x, lw.scalar(limit, dtype)), lw.element(value, dtype), x),
    )  # fmt: skip


@rule(aten.softplus.default)
def softplus(lw: Lowering, x: Value, beta: Any = 1, limit: Any = 20) -> Value:
    def body(x: Expr) -> Expr:
        z = x * lw.real(beta, x.dtype)
        soft = apply("log1p", x.dtype, _exp(z)) / lw.real(beta, x.dtype)
        return select(compare("gt", z, lw.real(limit, x.dtype)), x, soft)

    return elementwise(lw, (x,), body)


@rule(aten.softplus_backward.default)
def softplus_backward(lw: Lowering, g: Value, x: Value, beta: Any, limit: Any) -> Value:
    def body(g: Expr, x: Expr) -> Expr:
        z = x * lw.real(beta, x.dtype)
        return select(compare("gt", z, lw.real(limit, x.dtype)), g, g * sigmoid_of(z))

    return elementwise(lw, (g, x), body)


@rule(aten.log_sigmoid_forward.default)
def log_sigmoid(lw: Lowering, x: Value) -> tuple[Value, Value]:
    """The result, and the buffer eager saves for backward: exp(-|x|), or an empty tensor."""

    def tail(x: Expr) -> Expr:
        return _exp(-apply("abs", x.dtype, x))

    value = lw.map(lambda x: minimum(x, 0.0) - apply("log1p", x.dtype, tail(x)), x)
    kept = lw.meta(1)
    if sizes_of(kept.shape) == x.shape:
        return value, lw.map(tail, x)
    empty = lw.pointwise(sizes_of(kept.shape), kept.dtype, lambda idx: const(0.0, kept.dtype))
    return value, empty


ACTIVATION.update({
    aten.sigmoid_backward: lambda lw, g, y: elementwise(lw, (g, y), lambda g, y: g * (1.0 - y) * y),
    aten.tanh_backward: lambda lw, g, y: elementwise(lw, (g, y), lambda g, y: g * (1.0 - y * y)),
    aten.hardtanh: lambda lw, x, low=-1.0, high=1.0: clamp(lw, x, low, high),
    aten.log_sigmoid_backward.default:
        lambda lw, g, x, buffer: elementwise(lw, (g, x), lambda g, x: g * sigmoid_of(-x)),
    aten.glu.default:
        lambda lw, x, dim=-1: elementwise(lw, _halves(lw, x, dim), lambda a, b: a * sigmoid_of(b)),
})  # fmt: skip


@rule(aten.hardtanh_backward.default)
def hardtanh_backward(lw: Lowering, g: Value, x: Value, low: Any, high: Any) -> Value:
    def body(g: Expr, x: Expr) -> Expr:
        below = compare("le", x, lw.real(low, x.dtype))
        return select(either(below, compare("ge", x, lw.real(high, x.dtype))), 0.0, g)

    return elementwise(lw, (g, x), body)


@rule(aten.hardswish_backward.default)
def hardswish_backward(lw: Lowering, g: Value, x: Value) -> Value:
    def body(g: Expr, x: Expr) -> Expr:
        middle = select(compare("lt", x, 3.0), g * (x * (1 / 3) + 0.5), g)
        return select(compare("le", x, -3.0), 0.0, middle)

    return elementwise(lw, (g, x), body)


SIXTH = float(torch.tensor(1 / 6, dtype=torch.float32))
"""What eager's gradient of hardsigmoid multiplies by in float64, too."""


@rule(aten.hardsigmoid_backward.default)
def hardsigmoid_backward(lw: Lowering, g: Value, x: Value) -> Value:
    def body(g: Expr, x: Expr) -> Expr:
        inside = both(compare("gt", x, -3.0), compare("lt", x, 3.0))
        return select(inside, g * SIXTH, 0.0)

    return elementwise(lw, (g, x), body)


@rule(aten.elu_backward.default)
def elu_backward(
    lw: Lowering, g: Value, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: Value
) -> Value:
    def body(g: Expr, x: Expr) -> Expr:
        negative, positive, inner, curve = (
            lw.real(n, x.dtype)
            for n in (alpha * scale, scale, input_scale, input_scale * (alpha * scale))
        )
        slope = (x + negative) * inner if is_result else _exp(x * inner) * curve
        return g * select(compare("le", x, 0.0), slope, positive)

    return elementwise(lw, (g, x), body)


def _halves(lw: Lowering, x: Value, dim: int) -> tuple[Value, Value]:
    axis = wrap(dim, x.ndim)
    half = sizes_of(lw.meta().shape)[axis]
    return narrow(lw, x, axis, 0, 1, half), narrow(lw, x, axis, half, 1, half)


@rule(aten._prelu_kernel.default)
def prelu(lw: Lowering, x: Value, weight: Value) -> Value:
    return elementwise(lw, (x, weight), lambda x, w: select(compare("gt", x, 0.0), x, x * w))


@rule(aten._prelu_kernel_backward.default)
def prelu_backward(lw: Lowering, g: Value, x: Value, weight: Value) -> tuple[Value, Value]:
    return (
        lw.map(lambda g, x, w: select(compare("gt", x, 0.0), g, g * w), g, x, weight),
        lw.map(lambda g, x: select(compare("gt", x, 0.0), 0.0, g * x), g, x),
    )
