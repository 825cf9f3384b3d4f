"""Normalization layers: of layers, root mean squares, batches and groups, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from dicp.dtypes import opmath_dtype
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, apply, cast
from dicp.loop.ir.index import Size, floordiv, mod, normal, quotient
from dicp.loop.lowering.core import Lowering, Value
from dicp.loop.lowering.layout import sizes_of
from dicp.loop.lowering.reduction import broadcast_in_memory, count_of, moments, total
from dicp.loop.thresholds import FEW_CHANNELS
from dicp.rules import RuleTable
from dicp.torch_private import HOST, floor_division, remainder

aten = torch.ops.aten
NORMALIZATION = RuleTable()
rule = NORMALIZATION.register


def _inverse_deviation(lw: Lowering, variance: Value, eps: float) -> Value:
    return lw.map(lambda v: apply("rsqrt", v.dtype, v + float(eps)), variance)


def _scale_shift(
    lw: Lowering, x: Value, mu: Value, inv: Value, weight: Any, bias: Any, out: torch.dtype
) -> Value:
    """(x - mean) * inverse deviation * weight + bias, in the statistics' dtype."""
    dtype = mu.dtype
    extra = [v for v in (weight, bias) if v is not None]

    def body(x: Expr, mu: Expr, inv: Expr, *rest: Expr) -> Expr:
        operands = [cast(r, dtype) for r in rest]
        y = (cast(x, dtype) - mu) * inv
        if weight is not None:
            y = y * operands.pop(0)
        if bias is not None:
            y = y + operands.pop(0)
        return cast(y, out)

    return lw.map(body, x, mu, inv, *extra, dtype=out)


def _mean_of(x: Value, axes: Sequence[int], saved: Value) -> Value:
    """The saved mean, or `x` itself for means of one element: the saved one is rounded to a 16-bit
    float, while `x`, if backward rematerializes it, may be unrounded or rounded otherwise."""
    return x if count_of(x, axes) == 1 else saved


@rule(aten.native_layer_norm)
def native_layer_norm(
    lw: Lowering, x: Value, shape: Sequence[Any], weight: Any, bias: Any, eps: float
) -> tuple[Value, Value, Value]:
    dtype = opmath_dtype(x.dtype)
    axes = list(range(x.ndim - len(shape), x.ndim))
    mu, v = moments(lw, x, axes, dtype)
    inv = _inverse_deviation(lw, v, eps)
    y = _scale_shift(lw, x, mu, inv, weight, bias, x.dtype)
    return y, lw.cast(mu, lw.meta(1).dtype), lw.cast(inv, lw.meta(2).dtype)


@rule(aten.native_layer_norm_backward)
def native_layer_norm_backward(
    lw: Lowering, g: Value, x: Value, shape: Sequence[Any], mu: Value, inv: Value,
    weight: Any, bias: Any, mask: Sequence[bool],
) -> list[Any]:  # fmt: skip
    """dx = inv * (gw - mean(gw) - xhat * mean(gw * xhat)); Ba et al., arXiv:1607.06450."""
    dtype = opmath_dtype(x.dtype)
    inner = list(range(x.ndim - len(shape), x.ndim))
    outer = list(range(x.ndim - len(shape)))
    count = lw.scalar(count_of(x, inner), dtype)
    middle = _mean_of(x, inner, mu)
    xhat = lw.map(
        lambda x, m, r: (cast(x, dtype) - cast(m, dtype)) * cast(r, dtype), x, middle, inv,
        dtype=dtype,
    )  # fmt: skip
    scale = [weight] if weight is not None else []

    def scaled(g: Expr, *w: Expr) -> Expr:
        return cast(g, dtype) * cast(w[0], dtype) if w else cast(g, dtype)

    result: list[Any] = [None, None, None]
    if mask[0]:
        gw = lw.map(scaled, g, *scale, dtype=dtype)
        gx = lw.map(lambda a, b: a * b, gw, xhat)
        mean1 = lw.map(lambda s: s / count, total(lw, gw, inner, dtype))
        mean2 = lw.map(lambda s: s / count, total(lw, gx, inner, dtype))
        result[0] = lw.map(
            lambda gw, m1, xh, m2, r: cast((gw - m1 - xh * m2) * cast(r, dtype), x.dtype),
            gw, mean1, xhat, mean2, inv, dtype=x.dtype,
        )  # fmt: skip
    if mask[1] and weight is not None:
        dw = lw.map(lambda g, xh: cast(g, dtype) * xh, g, xhat, dtype=dtype)
        result[1] = lw.cast(lw.squeeze(total(lw, dw, outer, dtype), outer), weight.dtype)
    if mask[2] and bias is not None:
        result[2] = lw.cast(lw.squeeze(total(lw, g, outer, dtype), outer), bias.dtype)
    return result


@rule(aten._fused_rms_norm.default)
def rms_norm(
    lw: Lowering, x: Value, shape: Sequence[Any], weight: Any, eps: float | None
) -> tuple[Value, Value]:
    dtype = opmath_dtype(x.dtype)
    axes = list(range(x.ndim - len(shape), x.ndim))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    squares = total(lw, x, axes, dtype, lambda e: e * e)
    count = lw.scalar(count_of(x, axes), dtype)
    inv = lw.map(lambda s: apply("rsqrt", dtype, s / count + float(eps)), squares)
    weights = [weight] if weight is not None else []

    def body(x: Expr, r: Expr, *w: Expr) -> Expr:
        y = cast(x, dtype) * r
        return cast(y * cast(w[0], dtype) if w else y, lw.meta(0).dtype)

    y = lw.map(body, x, inv, *weights, dtype=lw.meta(0).dtype)
    return y, lw.cast(inv, lw.meta(1).dtype)


def _per_channel(lw: Lowering, v: Any, x: Value) -> Any:
    return None if v is None else lw.reshape(v, [1, x.shape[1], *[1] * (x.ndim - 2)])


def _batch_axes(x: Value) -> list[int]:
    return [i for i in range(x.ndim) if i != 1]


def _batch_norm(
    lw: Lowering, x: Value, weight: Any, bias: Any, mean_in: Any, var_in: Any,
    training: bool, momentum: float, eps: float,
) -> tuple[Value, Value, Value, Any, Any]:  # fmt: skip
    """Normalized output, saved mean and inverse deviation, new running statistics."""
    dtype = opmath_dtype(x.dtype)
    axes = _batch_axes(x)
    w, b = (_per_channel(lw, v, x) for v in (weight, bias))
    if not training:
        mu = lw.cast(_per_channel(lw, mean_in, x), dtype)
        inv = _inverse_deviation(lw, lw.cast(_per_channel(lw, var_in, x), dtype), eps)
        linear = lw.meta(0).device.type == HOST
        y = _linear(lw, x, mu, inv, w, b) if linear else _scale_shift(lw, x, mu, inv, w, b, x.dtype)
        return y, mu, inv, mean_in, var_in
    mu, v = moments(lw, x, axes, dtype)
    inv = _inverse_deviation(lw, v, eps)
    y = _scale_shift(lw, x, mu, inv, w, b, x.dtype)
    count = lw.scalar(count_of(x, axes), dtype)
    new_mean = _running(lw, mean_in, mu, axes, momentum)
    unbias = count / (count - 1.0)
    new_var = _running(lw, var_in, lw.map(lambda v: v * unbias, v), axes, momentum)
    return y, mu, inv, new_mean, new_var


def _linear(lw: Lowering, x: Value, mu: Value, inv: Value, weight: Any, bias: Any) -> Value:
    """x * scale + shift, as eager on the host, both of which are computed once for each channel."""
    dtype = mu.dtype
    scale = inv if weight is None else lw.map(lambda r, w: r * cast(w, dtype), inv, weight)
    extra = [] if bias is None else [bias]

    def moved(m: Expr, s: Expr, *b: Expr) -> Expr:
        return (cast(b[0], dtype) if b else ir.const(0.0, dtype)) - m * s

    shift = lw.map(moved, mu, scale, *extra)
    scale, shift = (lw.value_of(lw.realize(v)) for v in (scale, shift))
    return lw.map(
        lambda x, s, t: cast(cast(x, dtype) * s + t, x.dtype), x, scale, shift, dtype=x.dtype
    )


def _running(lw: Lowering, old: Any, new: Value, axes: Sequence[int], momentum: float) -> Any:
    if old is None:
        return None
    fresh = lw.squeeze(new, axes)
    m = float(momentum)
    return lw.map(
        lambda o, n: cast(cast(o, n.dtype) * (1.0 - m) + n * m, old.dtype),
        old, fresh, dtype=old.dtype,
    )  # fmt: skip


def _saved(lw: Lowering, v: Value, like: torch.Tensor) -> Value:
    if like.numel() == 0:
        return lw.pointwise(sizes_of(like.shape), like.dtype, lambda idx: ir.const(0, like.dtype))
    return lw.cast(lw.reshape(v, sizes_of(like.shape)), like.dtype)


@rule(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(
    lw: Lowering, x: Value, weight: Any, bias: Any, mean_in: Any, var_in: Any,
    training: bool, momentum: float, eps: float,
) -> tuple[Any, ...]:  # fmt: skip
    y, mu, inv, new_mean, new_var = _batch_norm(
        lw, x, weight, bias, mean_in, var_in, training, momentum, eps
    )
    # PyTorch's inference promotes the running statistics; eager keeps their dtype.
    running = (lw.cast(v, lw.meta(k).dtype) for k, v in ((3, new_mean), (4, new_var)))
    return y, _saved(lw, mu, lw.meta(1)), _saved(lw, inv, lw.meta(2)), *running


@rule(aten._native_batch_norm_legit_no_training.default)
def batch_norm_inference(
    lw: Lowering, x: Value, weight: Any, bias: Any, mean_in: Any, var_in: Any,
    momentum: float, eps: float,
) -> tuple[Any, ...]:  # fmt: skip
    y, mu, inv, *_ = _batch_norm(lw, x, weight, bias, mean_in, var_in, False, momentum, eps)
    return y, _saved(lw, mu, lw.meta(1)), _saved(lw, inv, lw.meta(2))


@rule(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(
    lw: Lowering, x: Value, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, ...]:
    y, mu, inv, *_ = _batch_norm(lw, x, weight, bias, None, None, True, momentum, eps)
    return y, _saved(lw, mu, lw.meta(1)), _saved(lw, inv, lw.meta(2))


@rule(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    lw: Lowering, g: Value, x: Value, weight: Any, mean_in: Any, var_in: Any,
    saved_mean: Any, saved_inv: Any, train: bool, eps: float, mask: Sequence[bool],
) -> list[Any]:  # fmt: skip
    """Gradients of batch normalization; Ioffe and Szegedy, arXiv:1502.03167."""
    dtype = opmath_dtype(x.dtype)
    axes = _batch_axes(x)
    if train:
        mu, inv = (lw.cast(_per_channel(lw, v, x), dtype) for v in (saved_mean, saved_inv))
    else:
        mu = lw.cast(_per_channel(lw, mean_in, x), dtype)
        inv = _inverse_deviation(lw, lw.cast(_per_channel(lw, var_in, x), dtype), eps)
    w = None if weight is None else lw.cast(_per_channel(lw, weight, x), dtype)
    g_sum = total(lw, g, axes, dtype)
    centred = lw.map(lambda g, x, m: cast(g, dtype) * (cast(x, dtype) - m), g, x, mu, dtype=dtype)
    dot = total(lw, centred, axes, dtype)
    result: list[Any] = [None, None, None]
    if mask[0]:
        scale = inv if w is None else lw.map(lambda r, w: r * w, inv, w)
        if train:
            count = lw.scalar(count_of(x, axes), dtype)
            mean_g = lw.map(lambda s: s / count, g_sum)
            slope = lw.map(lambda d, r: d / count * r * r, dot, inv)
            result[0] = lw.map(
                lambda g, x, m, k, a, s: cast(
                    (cast(g, dtype) - a - (cast(x, dtype) - m) * k) * s, x.dtype
                ),
                g, x, mu, slope, mean_g, scale, dtype=x.dtype,
            )  # fmt: skip
        else:
            result[0] = lw.map(lambda g, s: cast(cast(g, dtype) * s, x.dtype), g, scale,
                               dtype=x.dtype)  # fmt: skip
    if mask[1]:
        dw = lw.squeeze(lw.map(lambda d, r: d * r, dot, inv), axes)
        result[1] = lw.cast(dw, weight.dtype if weight is not None else dtype)
    if mask[2]:
        result[2] = lw.cast(lw.squeeze(g_sum, axes), weight.dtype if weight is not None else dtype)
    return result


@rule(aten.native_group_norm.default)
def native_group_norm(
    lw: Lowering, x: Value, weight: Any, bias: Any, n: Size, c: Size, hw: Size, groups: int,
    eps: float,
) -> tuple[Value, Value, Value]:  # fmt: skip
    dtype = opmath_dtype(x.dtype)
    grouped, w, b = _grouped(lw, x, weight, bias, n, c, hw, groups)
    each = grouped.shape[2]
    few = isinstance(each, int) and each < FEW_CHANNELS
    by_channel = few and _is_channels_last(lw.meta(0))
    mu, v = moments(lw, grouped, [2, 3], dtype, first=3 if by_channel else None)
    inv = _inverse_deviation(lw, v, eps)
    shape = (n, groups)
    center, scale = mu, inv
    if by_channel:
        if w is not None:
            scale, w = lw.map(lambda r, w: r * cast(w, dtype), inv, w, dtype=dtype), None
        center, scale = (
            broadcast_in_memory(lw, v, (*grouped.shape[:3], 1)) for v in (center, scale)
        )
    y = _scale_shift(lw, grouped, center, scale, w, b, x.dtype)
    return (
        _ungrouped(lw, y, x.shape),
        lw.cast(lw.reshape(mu, shape), lw.meta(1).dtype),
        lw.cast(lw.reshape(inv, shape), lw.meta(2).dtype),
    )


def _is_channels_last(like: torch.Tensor) -> bool:
    """Whether the channels lie side by side on the host, where sums of each fill vectors."""
    innermost = like.dim() > 2 and like.stride(1) == 1 and like.stride(-1) != 1
    return innermost and like.device.type == HOST


def _grouped(
    lw: Lowering, x: Value, weight: Any, bias: Any, n: Size, c: Size, hw: Size, groups: int
) -> tuple[Value, Any, Any]:
    """`x` as (n, groups, channels of a group, hw), weight and bias to match."""
    each = quotient(c, groups)
    if each is not None:
        affine = (1, groups, each, 1)
        w, b = (None if v is None else lw.reshape(v, affine) for v in (weight, bias))
        return lw.reshape(x, (n, groups, each, hw)), w, b
    # Eager refuses channels that do not divide, and PyTorch's inference makes that a guard.
    lw.require(sympy.Eq(remainder(c, groups), 0), "the channels may not divide into groups")
    each = normal(floor_division(c, groups))
    rows = lw.reshape(x, (n, c, hw))
    whole = lw.view(rows, (n, groups, each, hw), lambda i: (i[0], i[1] * each + i[2], i[3]))
    w, b = (
        None if v is None else lw.view(v, (1, groups, each, 1), lambda i: (i[1] * each + i[2],))
        for v in (weight, bias)
    )
    return whole, w, b


def _ungrouped(lw: Lowering, value: Value, shape: Sequence[Size]) -> Value:
    """A result of `_grouped` as a tensor of `shape`, (n, channels, ...)."""
    n, groups, each, hw = value.shape
    channels = shape[1]
    if quotient(channels, groups) is not None:
        return lw.reshape(value, shape)
    rows = lw.view(
        value, (n, channels, hw),
        lambda i: (i[0], floordiv(i[1], each), mod(i[1], each), i[2]),
    )  # fmt: skip
    return lw.reshape(rows, shape)


@rule(aten.native_group_norm_backward.default)
def native_group_norm_backward(
    lw: Lowering, g: Value, x: Value, mu: Value, inv: Value, weight: Any, n: Size, c: Size,
    hw: Size, groups: int, mask: Sequence[bool],
) -> list[Any]:  # fmt: skip
    """Gradients of group normalization; Wu and He, arXiv:1803.08494."""
    dtype = opmath_dtype(x.dtype)
    xg, w, _ = _grouped(lw, x, weight, None, n, c, hw, groups)
    gg, _, _ = _grouped(lw, g, None, None, n, c, hw, groups)
    stats = (n, groups, 1, 1)
    m, r = (lw.cast(lw.reshape(v, stats), dtype) for v in (mu, inv))
    first = mask[0] and _is_channels_last(lw.meta(0))
    if first:
        m, r = (broadcast_in_memory(lw, v, (*xg.shape[:3], 1)) for v in (m, r))
    middle = lw.cast(_mean_of(xg, [2, 3], m), dtype)
    scale = [] if w is None else [w]

    def normalized() -> Value:
        """A value of its own for each use: one that several kernels read would be stored."""
        return lw.map(lambda x, m, r: (cast(x, dtype) - m) * r, xg, middle, r, dtype=dtype)

    def scaled(g: Value) -> Value:
        return lw.map(
            lambda g, *w: cast(g, dtype) * cast(w[0], dtype) if w else cast(g, dtype),
            g, *scale, dtype=dtype,
        )  # fmt: skip

    gx = lw.map(lambda g, xh: cast(g, dtype) * xh, gg, normalized(), dtype=dtype)
    sums = [total(lw, each, [3], dtype) for each in (gg, gx)]  # of each channel
    result: list[Any] = [None, None, None]
    if mask[0]:
        count = lw.scalar(count_of(xg, [2, 3]), dtype)
        means = [lw.map(lambda s: s / count, total(lw, scaled(v), [2], dtype)) for v in sums]
        if first:
            means = [broadcast_in_memory(lw, mean, (*xg.shape[:3], 1)) for mean in means]
        dx = lw.map(
            lambda gw, m1, xh, m2, r: cast((gw - m1 - xh * m2) * r, x.dtype),
            scaled(gg), means[0], normalized(), means[1], r, dtype=x.dtype,
        )  # fmt: skip
        result[0] = _ungrouped(lw, dx, x.shape)
    for k in (1, 2):  # of the weight, of the bias
        if mask[k]:
            summed = _ungrouped(lw, total(lw, sums[2 - k], [0], dtype), (1, c, 1))
            result[k] = lw.cast(
                lw.reshape(summed, (c,)), weight.dtype if weight is not None else x.dtype
            )
    # PyTorch's inference promotes a gradient to float32 where the weight is.
    return [v if v is None else lw.cast(v, lw.meta(k).dtype) for k, v in enumerate(result)]
