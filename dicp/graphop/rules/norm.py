"""Normalizations and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dicp.graphop.operators import Ops, Value
from dicp.graphop.rules.reduction import count_of, variance
from dicp.rules import RuleTable

aten = torch.ops.aten
RULES = RuleTable()
rule = RULES.register


@rule(aten.native_layer_norm.default)
def layer_norm(
    g: Ops, x: Value, shape: Sequence[Any], weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, Value, Value]:
    same = all(v is None or v.dtype == x.dtype for v in (weight, bias))
    y_type, mean_type = g.meta[0].dtype, g.meta[1].dtype
    if same and g.takes("LayerNorm", "x", x.dtype):
        sizes = g.ints(list(shape), torch.int32)
        y, mean, rstd = g.ops("LayerNorm", x, sizes, weight, bias, epsilon=float(eps))
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
    g: Ops, dy: Value, x: Value, shape: Sequence[Any], mean: Value, rstd: Value,
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
    g: Ops, x: Value, shape: Sequence[Any], weight: Value | None, eps: float | None
) -> tuple[Value, Value]:
    epsilon = torch.finfo(x.dtype).eps if eps is None else eps
    y_type, rstd_type = g.meta[0].dtype, g.meta[1].dtype
    if g.takes("RmsNorm", "x", x.dtype) and (weight is None or weight.dtype == x.dtype):
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
    g: Ops, x: Value, weight: Value | None, bias: Value | None, mean: Value, var: Value,
    momentum: float, eps: float,
) -> tuple[Value, Value | None, Value | None]:  # fmt: skip
    y = _batch_normalized(g, x, weight, bias, mean, _rstd(g, var, eps), var, eps)
    empty = [g.full([0], 0, m.dtype) for m in g.meta[1:]]
    return y, empty[0], empty[1]


def _rstd(g: Ops, var: Value, eps: float) -> Value:
    return g.op("Rsqrt", g.add(g.wide(var), eps))


def _batch_normalized(
    g: Ops, x: Value, weight: Value | None, bias: Value | None, mean: Value, rstd: Value,
    var: Value | None = None, eps: float = 0.0,
) -> Value:  # fmt: skip
    if var is not None and g.takes("BatchNormInference", "x", x.dtype):
        channels = [x.shape[1]]
        single = torch.float32
        scale = g.full(channels, 1, single) if weight is None else g.cast(weight, single)
        offset = g.full(channels, 0, single) if bias is None else g.cast(bias, single)
        running = (g.cast(mean, single), g.cast(var, single))
        return g.op("BatchNormInference", x, scale, offset, *running, epsilon=float(eps))
    shape = _channel_shape(x)
    wide = g.wide(x)
    mean, rstd = g.cast(mean, wide.dtype), g.cast(rstd, wide.dtype)
    y = g.mul(g.sub(wide, g.reshape(mean, shape)), g.reshape(rstd, shape))
    y = y if weight is None else g.mul(y, g.reshape(g.cast(weight, y.dtype), shape))
    y = y if bias is None else g.add(y, g.reshape(g.cast(bias, y.dtype), shape))
    return g.cast(y, x.dtype)


# ---- batch norm in training: the vendor's operators, or their composition ----------------------


def _as_image(g: Ops, x: Value) -> Value:
    """`x` with four dimensions, its channels still the second."""
    if x.ndim > 3:
        return x
    return g.reshape(x, [*x.shape[:2], *([1] * (4 - x.ndim)), *x.shape[2:]])


def _per_channel(g: Ops, x: Value, given: Value | None, default: float) -> Value:
    """A float32 number per channel."""
    if given is None:
        return g.full([x.shape[1]], default, torch.float32)
    return g.cast(given, torch.float32)


def _normalize(
    g: Ops, x: Value, weight: Value | None, bias: Value | None, old: Sequence[Value | None],
    momentum: float, eps: float,
) -> list[Value]:  # fmt: skip
    """The result, mean and reciprocal deviation of the batch, new running mean and variance."""
    if not g.takes("BatchNormTraining", "x", x.dtype):
        return _normalize_wide(g, x, weight, bias, old, momentum, eps)
    running = [_per_channel(g, x, v, d) for v, d in zip(old, (0, 1), strict=True)]
    running = [g.op("Copy", v) for v in running]  # the operator writes over them
    affine = (_per_channel(g, x, weight, 1), _per_channel(g, x, bias, 0))
    y, mean, var, saved, rstd = g.ops(
        "BatchNormTraining", _as_image(g, x), *affine, *running,
        epsilon=float(eps), momentum=float(momentum), is_training=True,
    )  # fmt: skip
    return [g.reshape(y, x.shape), saved, rstd, mean, var]


def _normalize_wide(
    g: Ops, x: Value, weight: Value | None, bias: Value | None, old: Sequence[Value | None],
    momentum: float, eps: float,
) -> list[Value]:  # fmt: skip
    axes = [d for d in range(x.ndim) if d != 1]
    var, mean = variance(g, x, axes, 0, False)
    rstd = _rstd(g, var, eps)
    y = _batch_normalized(g, x, weight, bias, mean, rstd)
    count = count_of(x, axes)
    unbiased = g.mul(g.mul(var, count), g.div(g.number(1.0, rstd.dtype), count - 1))
    running = [
        new
        if was is None
        else g.add(g.mul(new, momentum), g.mul(g.cast(was, new.dtype), 1 - momentum))
        for new, was in zip((mean, unbiased), old, strict=True)
    ]
    return [y, mean, rstd, *running]


@rule(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(
    g: Ops, x: Value, weight: Value | None, bias: Value | None, training: bool, momentum: float,
    eps: float,
) -> tuple[Value, Value, Value]:  # fmt: skip
    y, mean, rstd, *_ = _normalize(g, x, weight, bias, (None, None), momentum, eps)
    return y, g.cast(mean, g.meta[1].dtype), g.cast(rstd, g.meta[2].dtype)


@rule(aten._native_batch_norm_legit_functional.default)
def batch_norm_train(
    g: Ops, x: Value, weight: Value | None, bias: Value | None, mean: Value, var: Value,
    training: bool, momentum: float, eps: float,
) -> tuple[Value, ...]:  # fmt: skip
    """The result, the values saved for backward, and the new running mean and variance."""
    if not training:
        y = _batch_normalized(g, x, weight, bias, mean, _rstd(g, var, eps), var, eps)
        empty = [g.full([0], 0, m.dtype) for m in g.meta[1:3]]
        return y, *empty, g.op("Identity", mean), g.op("Identity", var)
    results = _normalize(g, x, weight, bias, (mean, var), momentum, eps)
    return tuple(g.cast(v, m.dtype) for v, m in zip(results, g.meta, strict=True))


@rule(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    g: Ops, dy: Value, x: Value, weight: Value | None, mean: Value | None, var: Value | None,
    saved_mean: Value | None, saved_rstd: Value | None, train: bool, eps: float,
    mask: Sequence[bool],
) -> list[Value | None]:  # fmt: skip
    if not (train and g.takes("BatchNormGrad", "dy", x.dtype)):
        results = _batch_gradients(
            g, g.wide(dy), g.wide(x), weight if weight is None else g.wide(weight), (mean, var),
            (saved_mean, saved_rstd), train, eps,
        )  # fmt: skip
    else:
        dx, dweight, dbias = g.ops(
            "BatchNormGrad", _as_image(g, g.cast(dy, x.dtype)), _as_image(g, x),
            _per_channel(g, x, weight, 1), _per_channel(g, x, mean, 0), _per_channel(g, x, var, 1),
            _per_channel(g, x, saved_mean, 0), _per_channel(g, x, saved_rstd, 1),
            is_training=True, epsilon=float(eps),
        )  # fmt: skip
        results = [g.reshape(dx, x.shape), dweight, dbias]
    return [
        g.cast(value, meta.dtype) if wanted else None
        for value, meta, wanted in zip(results, g.meta, mask, strict=True)
    ]


def _batch_gradients(
    g: Ops, dy: Value, x: Value, weight: Value | None, running: Sequence[Value | None],
    saved: Sequence[Value | None], train: bool, eps: float,
) -> list[Value]:  # fmt: skip
    """dx = weight rstd (dy - mean(dy) - n mean(dy n)), with n the normalized x."""
    axes = [d for d in range(x.ndim) if d != 1]
    shape = _channel_shape(x)
    center, rstd = saved if train else running
    assert center is not None and rstd is not None
    rstd = rstd if train else _rstd(g, rstd, eps)
    normal = g.mul(g.sub(x, g.reshape(center, shape)), g.reshape(rstd, shape))
    dbias = g.reduce("ReduceSum", dy, axes, False)
    dweight = g.reduce("ReduceSum", g.mul(dy, normal), axes, False)
    scale = rstd if weight is None else g.mul(rstd, weight)
    inner = dy
    if train:
        count = count_of(x, axes)
        inner = g.sub(dy, g.reshape(g.div(dbias, count), shape))
        inner = g.sub(inner, g.mul(normal, g.reshape(g.div(dweight, count), shape)))
    return [g.mul(inner, g.reshape(scale, shape)), dweight, dbias]


@rule(aten.native_group_norm.default)
def group_norm(
    g: Ops, x: Value, weight: Value | None, bias: Value | None, n: Any, c: Any, hw: Any,
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
    g: Ops, dy: Value, x: Value, mean: Value, rstd: Value, weight: Value | None, n: Any, c: Any,
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
