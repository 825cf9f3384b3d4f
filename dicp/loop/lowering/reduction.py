"""Reductions and what is built from them: extrema, norms, softmax and normalization layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch

from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, apply, cast, opmath
from dicp.loop.ir.index import Index, Size, floordiv, mod, normal, product, quotient
from dicp.loop.lowering.core import Lowering, Value
from dicp.loop.lowering.layout import sizes_of
from dicp.loop.lowering.pointwise import compare, elementwise, select
from dicp.loop.lowering.views import wrap
from dicp.rules import NoRule, RuleTable, of_vectors
from dicp.torch_private import floor_division, remainder

aten = torch.ops.aten
REDUCTION = RuleTable()
rule = REDUCTION.register


def axes_of(x: Value, dim: Any) -> list[int]:
    """Reduced axes; none given means all of them."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(x.ndim))
    dims = [dim] if isinstance(dim, int) else list(dim)
    return sorted({wrap(d, x.ndim) for d in dims} if x.ndim else set())


def count_of(x: Value, axes: Sequence[int]) -> Size:
    return product(x.shape[a] for a in axes)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The accumulator dtype for sums of `dtype`."""
    return torch.float32 if dtype in ir.LOW_PRECISION else dtype


def total(lw: Lowering, x: Value, axes: Sequence[int], dtype: torch.dtype, fn: Any = None) -> Value:
    """The sum of `fn(element)` along `axes` (kept with size 1), accumulated in `dtype`."""

    def body(idx: tuple[Index, ...]) -> Expr:
        e = cast(x.at(idx), dtype)
        return fn(e) if fn else e

    return lw.reduce("sum", x.shape, axes, dtype, body)


def finish(lw: Lowering, x: Value, axes: Sequence[int], keepdim: bool) -> Value:
    """`x` cast to the node's dtype, its reduced `axes` of size 1 dropped unless `keepdim`."""
    x = lw.cast(x, lw.meta().dtype)
    return x if keepdim else lw.squeeze(x, axes)


@rule(aten.sum.default, aten.sum.dim_IntList)
def sum_(
    lw: Lowering, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    out = lw.meta().dtype
    axes = axes_of(x, dim)
    if not axes:
        return lw.cast(lw.map(lambda e: e, x), out)
    if wide(out) == out:
        return lw.reduce("sum", x.shape, axes, out, lambda idx: cast(x.at(idx), out), keepdim)
    return finish(lw, total(lw, x, axes, wide(out)), axes, keepdim)


@rule(aten.mean.default, aten.mean.dim)
def mean(
    lw: Lowering, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    out = lw.meta().dtype
    axes = axes_of(x, dim)
    return finish(lw, average(lw, x, axes, wide(out)), axes, keepdim)


def average(lw: Lowering, x: Value, axes: Sequence[int], dtype: torch.dtype) -> Value:
    count = lw.scalar(count_of(x, axes), dtype)
    return lw.map(lambda s: s / count, total(lw, x, axes, dtype))


@rule(aten.prod.default, aten.prod.dim_int)
def prod(
    lw: Lowering, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    out = lw.meta().dtype
    axes, acc = axes_of(x, dim), wide(out)
    if not axes:
        return lw.cast(lw.map(lambda e: e, x), out)
    value = lw.reduce("prod", x.shape, axes, acc, lambda idx: cast(x.at(idx), acc))
    return finish(lw, value, axes, keepdim)


def _extremum(lw: Lowering, op: str, x: Value, axes: Sequence[int], keepdim: bool) -> Value:
    if any(x.shape[a] == 0 for a in axes):
        raise NoRule("extremum over an empty axis")
    if x.dtype == torch.bool:
        op = {"max": "any", "min": "all"}[op]
    return lw.reduce(op, x.shape, axes, x.dtype, x.at, keepdim)


@rule(aten.amax.default)
def amax(lw: Lowering, x: Value, dim: Any = (), keepdim: bool = False) -> Value:
    return _extremum(lw, "max", x, axes_of(x, dim), keepdim)


@rule(aten.amin.default)
def amin(lw: Lowering, x: Value, dim: Any = (), keepdim: bool = False) -> Value:
    return _extremum(lw, "min", x, axes_of(x, dim), keepdim)


@rule(aten.max.default)
def max_all(lw: Lowering, x: Value) -> Value:
    return amax(lw, x)


@rule(aten.min.default)
def min_all(lw: Lowering, x: Value) -> Value:
    return amin(lw, x)


def arg_extremum(lw: Lowering, op: str, x: Value, axis: int | None, keepdim: bool = False) -> Value:
    """The index of the extremum along `axis` (of the flattened tensor where None)."""
    if axis is None:
        flat = lw.reshape(x, [product(x.shape)])
        value = arg_extremum(lw, op, flat, 0)
        return lw.reshape(value, [1] * x.ndim if keepdim else [])
    if x.ndim == 0:
        return lw.pointwise((), torch.int64, lambda idx: ir.const(0, torch.int64))
    if x.shape[axis] == 0:
        raise NoRule("extremum over an empty axis")
    return lw.reduce(op, x.shape, [axis], torch.int64, x.at, keepdim)


@rule(aten.argmax.default)
def argmax(lw: Lowering, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    return arg_extremum(lw, "argmax", x, None if dim is None else wrap(dim, x.ndim), keepdim)


@rule(aten.argmin.default)
def argmin(lw: Lowering, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    return arg_extremum(lw, "argmin", x, None if dim is None else wrap(dim, x.ndim), keepdim)


@rule(aten.max.dim)
def max_dim(lw: Lowering, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    if x.ndim == 0:
        return lw.map(lambda e: e, x), arg_extremum(lw, "argmax", x, 0)
    d = wrap(dim, x.ndim)
    return _extremum(lw, "max", x, [d], keepdim), arg_extremum(lw, "argmax", x, d, keepdim)


@rule(aten.min.dim)
def min_dim(lw: Lowering, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    if x.ndim == 0:
        return lw.map(lambda e: e, x), arg_extremum(lw, "argmin", x, 0)
    d = wrap(dim, x.ndim)
    return _extremum(lw, "min", x, [d], keepdim), arg_extremum(lw, "argmin", x, d, keepdim)


def _truth(lw: Lowering, op: str, x: Value, axes: list[int], keepdim: bool) -> Value:
    value = lw.reduce(
        op, x.shape, axes, torch.bool, lambda idx: cast(x.at(idx), torch.bool), keepdim
    )
    return lw.cast(value, lw.meta().dtype)


@rule(aten.any.default, aten.any.dim, aten.any.dims)
def any_(lw: Lowering, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return _truth(lw, "any", x, axes_of(x, dim), keepdim)


@rule(aten.all.default, aten.all.dim, aten.all.dims)
def all_(lw: Lowering, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return _truth(lw, "all", x, axes_of(x, dim), keepdim)


MAX_CANCELLED = 2.0**-6
"""The largest share of a sum of squares that may be taken for its rounding errors."""
LEAST_SHIFT = 4.0
"""The smallest error of a mean that is corrected, in rounding errors of the standard deviation."""


def moments(
    lw: Lowering, x: Value, axes: Sequence[int], dtype: torch.dtype, correction: Any = 0
) -> tuple[Value, Value]:
    """Mean and variance along `axes` (kept with size 1), by the corrected two-pass algorithm.

    The sum of the distances from the quotient of sum and count corrects both: the mean of equal
    numbers is that number, and their variance 0.

    Source: Chan, Golub and LeVeque, Algorithms for Computing the Sample Variance, 1983.
    """
    size, quotient = lw.scalar(count_of(x, axes), dtype), average(lw, x, axes, dtype)
    eps = torch.finfo(dtype).eps

    def distance(idx: tuple[Index, ...]) -> Expr:
        return cast(x.at(idx), dtype) - quotient.broadcast_at(idx)

    rest = lw.reduce("sum", x.shape, axes, dtype, distance)
    squares = lw.reduce("sum", x.shape, axes, dtype, lambda idx: distance(idx) * distance(idx))
    freedom = size
    if correction != 0:
        freedom = freedom - lw.real(correction, dtype)
    freedom = apply("maximum", dtype, freedom, ir.const(0.0, dtype))
    share = apply("minimum", dtype, (size + 4.0) * eps, ir.const(MAX_CANCELLED, dtype))

    def mean(quotient: Expr, rest: Expr, squares: Expr) -> Expr:
        # Below that, what is left is the error of its own sum; NaN beside infinities.
        shifted = compare("ge", rest * (rest / size), squares * (LEAST_SHIFT * eps) ** 2)
        return select(shifted, quotient + rest / size, quotient)

    def variance(squares: Expr, rest: Expr) -> Expr:
        excess = rest * (rest / size)
        left = squares - excess
        left = select(compare("lt", left, squares * share), 0.0, left)  # infinite ones stay
        # Squares that overflow are infinite, whatever the excess.
        return select(compare("lt", excess, math.inf), left, squares) / freedom

    return lw.map(mean, quotient, rest, squares), lw.map(variance, squares, rest)


def _correction(correction: Any) -> Any:
    return 1.0 if correction is None else correction


@rule(aten.var.correction, aten.var.dim, aten.var.default)
def var(
    lw: Lowering, x: Value, dim: Any = None, unbiased: Any = None, keepdim: bool = False,
    *, correction: Any = None,
) -> Value:  # fmt: skip
    axes = axes_of(None or x, dim if not isinstance(dim, bool) else None)
    free = _correction(correction) if unbiased is None else float(unbiased)
    if isinstance(dim, bool):
        free = float(dim)
    _, v = moments(lw, x, axes, wide(x.dtype), free)
    return finish(lw, v, axes, keepdim)


@rule(aten.std.correction)
def std(
    lw: Lowering, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Value:
    axes = axes_of(x, dim)
    _, v = moments(lw, x, axes, wide(x.dtype), _correction(correction))
    return finish(lw, lw.map(lambda e: apply("sqrt", e.dtype, e), v), axes, keepdim)


def _pair(lw: Lowering, x: Value, axes: Sequence[int], keepdim: bool) -> Value:
    x = lw.cast(x, lw.meta(0).dtype)
    return x if keepdim else lw.squeeze(x, axes)


@rule(aten.var_mean.correction)
def var_mean(
    lw: Lowering, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Value, Value]:
    axes = axes_of(x, dim)
    mu, v = moments(lw, x, axes, wide(x.dtype), _correction(correction))
    return _pair(lw, v, axes, keepdim), _pair(lw, mu, axes, keepdim)


@rule(aten.std_mean.correction)
def std_mean(
    lw: Lowering, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Value, Value]:
    axes = axes_of(x, dim)
    mu, v = moments(lw, x, axes, wide(x.dtype), _correction(correction))
    s = lw.map(lambda e: apply("sqrt", e.dtype, e), v)
    return _pair(lw, s, axes, keepdim), _pair(lw, mu, axes, keepdim)


@rule(aten.logsumexp)
def logsumexp(lw: Lowering, x: Value, dim: Any, keepdim: bool = False) -> Value:
    dtype = wide(lw.meta().dtype)
    axes = axes_of(x, dim)
    if any(x.shape[a] == 0 for a in axes) or not axes:
        raise NoRule("logsumexp over an empty axis")
    top = lw.reduce("max", x.shape, axes, dtype, lambda idx: cast(x.at(idx), dtype))
    finite = lw.map(lambda m: select(compare("eq", apply("abs", dtype, m), math.inf), 0.0, m), top)

    def body(idx: tuple[Index, ...]) -> Expr:
        return apply("exp", dtype, cast(x.at(idx), dtype) - finite.broadcast_at(idx))

    sums = lw.reduce("sum", x.shape, axes, dtype, body)
    result = lw.map(lambda s, m: apply("log", dtype, s) + m, sums, finite)
    return finish(lw, result, axes, keepdim)


# ---- softmax ------------------------------------------------------------------------------


def _shifted(lw: Lowering, x: Value, axis: int, dtype: torch.dtype) -> tuple[Value, Value]:
    top = lw.reduce("max", x.shape, [axis], dtype, lambda idx: cast(x.at(idx), dtype))
    moved = lw.map(lambda e, m: cast(e, dtype) - m, x, top, dtype=dtype)
    return moved, top


@rule(aten._softmax.default, aten._safe_softmax.default)
@of_vectors
def softmax(lw: Lowering, x: Value, dim: int, half_to_float: Any = False) -> Value:
    assert lw.node is not None
    out = lw.meta().dtype
    dtype = wide(out)
    if any(s == 0 for s in x.shape):
        return lw.pointwise(x.shape, out, lambda idx: ir.const(1.0, out))
    axis = wrap(dim, x.ndim)
    moved, top = _shifted(lw, x, axis, dtype)
    e = lw.map(lambda v: apply("exp", dtype, v), moved)
    s = total(lw, e, [axis], dtype)
    result = lw.map(lambda e, s: e / s, e, s)
    if lw.node.target is aten._safe_softmax.default:
        empty = -math.inf
        result = lw.map(lambda r, m: select(compare("eq", m, empty), 0.0, r), result, top)
    return lw.cast(result, out)


@rule(aten._log_softmax.default)
@of_vectors
def log_softmax(lw: Lowering, x: Value, dim: int, half_to_float: bool = False) -> Value:
    out = lw.meta().dtype
    dtype = wide(out)
    if any(s == 0 for s in x.shape):
        return lw.pointwise(x.shape, out, lambda idx: ir.const(0.0, out))
    axis = wrap(dim, x.ndim)
    moved, _ = _shifted(lw, x, axis, dtype)
    s = total(lw, moved, [axis], dtype, lambda v: apply("exp", dtype, v))
    lse = lw.map(lambda s: apply("log", dtype, s), s)
    return lw.map(lambda v, s: cast(v - s, out), moved, lse, dtype=out)


@rule(aten._softmax_backward_data)
@of_vectors
def softmax_backward(lw: Lowering, g: Value, y: Value, dim: int, input_dtype: Any) -> Value:
    out = lw.meta().dtype
    dtype = wide(g.dtype)
    axis = wrap(dim, y.ndim)
    lw.require_equal(g.shape, y.shape, "the gradient does not fit the result")
    gy = lw.map(lambda g, y: cast(g, dtype) * cast(y, dtype), g, y, dtype=dtype)
    s = total(lw, gy, [axis], dtype)
    return lw.map(lambda p, y, s: cast(p - cast(y, dtype) * s, out), gy, y, s, dtype=out)


@rule(aten._log_softmax_backward_data)
@of_vectors
def log_softmax_backward(lw: Lowering, g: Value, y: Value, dim: int, input_dtype: Any) -> Value:
    out = lw.meta().dtype
    dtype = wide(g.dtype)
    lw.require_equal(g.shape, y.shape, "the gradient does not fit the result")
    s = total(lw, g, [wrap(dim, y.ndim)], dtype)

    def body(g: Expr, y: Expr, s: Expr) -> Expr:
        return cast(cast(g, dtype) - apply("exp", dtype, cast(y, dtype)) * s, out)

    return lw.map(body, g, y, s, dtype=out)


# ---- normalization layers -------------------------------------------------------------------


def _affine(lw: Lowering, dtype: torch.dtype, weight: Any, bias: Any) -> tuple[Any, Any]:
    def widen(v: Any) -> Any:
        return None if v is None else lw.map(lambda e: cast(e, dtype), v, dtype=dtype)

    return widen(weight), widen(bias)


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


@rule(aten.native_layer_norm)
def native_layer_norm(
    lw: Lowering, x: Value, shape: Sequence[Any], weight: Any, bias: Any, eps: float
) -> tuple[Value, Value, Value]:
    dtype = wide(x.dtype)
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
    dtype = wide(x.dtype)
    inner = list(range(x.ndim - len(shape), x.ndim))
    outer = list(range(x.ndim - len(shape)))
    count = lw.scalar(count_of(x, inner), dtype)
    xhat = lw.map(
        lambda x, m, r: (cast(x, dtype) - cast(m, dtype)) * cast(r, dtype), x, mu, inv, dtype=dtype
    )
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
    dtype = wide(x.dtype)
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


def channel_shape(x: Value) -> list[Size]:
    return [1, x.shape[1], *[1] * (x.ndim - 2)]


def per_channel(lw: Lowering, v: Any, x: Value) -> Any:
    return None if v is None else lw.reshape(v, channel_shape(x))


def _batch_axes(x: Value) -> list[int]:
    return [i for i in range(x.ndim) if i != 1]


def _batch_norm(
    lw: Lowering, x: Value, weight: Any, bias: Any, mean_in: Any, var_in: Any,
    training: bool, momentum: float, eps: float,
) -> tuple[Value, Value, Value, Any, Any]:  # fmt: skip
    """Normalized output, saved mean and inverse deviation, new running statistics."""
    dtype = wide(x.dtype)
    axes = _batch_axes(x)
    w, b = (per_channel(lw, v, x) for v in (weight, bias))
    if not training:
        mu = lw.cast(per_channel(lw, mean_in, x), dtype)
        inv = _inverse_deviation(lw, lw.cast(per_channel(lw, var_in, x), dtype), eps)
        return _scale_shift(lw, x, mu, inv, w, b, x.dtype), mu, inv, mean_in, var_in
    mu, v = moments(lw, x, axes, dtype)
    inv = _inverse_deviation(lw, v, eps)
    y = _scale_shift(lw, x, mu, inv, w, b, x.dtype)
    count = lw.scalar(count_of(x, axes), dtype)
    new_mean = _running(lw, mean_in, mu, axes, momentum)
    unbias = count / (count - 1.0)
    new_var = _running(lw, var_in, lw.map(lambda v: v * unbias, v), axes, momentum)
    return y, mu, inv, new_mean, new_var


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
    dtype = wide(x.dtype)
    axes = _batch_axes(x)
    if train:
        mu, inv = (lw.cast(per_channel(lw, v, x), dtype) for v in (saved_mean, saved_inv))
    else:
        mu = lw.cast(per_channel(lw, mean_in, x), dtype)
        inv = _inverse_deviation(lw, lw.cast(per_channel(lw, var_in, x), dtype), eps)
    w = None if weight is None else lw.cast(per_channel(lw, weight, x), dtype)
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
    dtype = wide(x.dtype)
    grouped, w, b = _grouped(lw, x, weight, bias, n, c, hw, groups)
    mu, v = moments(lw, grouped, [2, 3], dtype)
    inv = _inverse_deviation(lw, v, eps)
    y = _scale_shift(lw, grouped, mu, inv, w, b, x.dtype)
    shape = (n, groups)
    return (
        _ungrouped(lw, y, x.shape),
        lw.cast(lw.reshape(mu, shape), lw.meta(1).dtype),
        lw.cast(lw.reshape(inv, shape), lw.meta(2).dtype),
    )


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
    whole = lw.view(
        rows, (n, groups, each, hw), lambda i: (i[0], i[1] * each + i[2], i[3])
    )  # fmt: skip
    w, b = (
        None if v is None
        else lw.view(v, (1, groups, each, 1), lambda i: (i[1] * each + i[2],))
        for v in (weight, bias)
    )  # fmt: skip
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
    dtype = wide(x.dtype)
    xg, w, _ = _grouped(lw, x, weight, None, n, c, hw, groups)
    gg, _, _ = _grouped(lw, g, None, None, n, c, hw, groups)
    stats = (n, groups, 1, 1)
    m, r = (lw.cast(lw.reshape(v, stats), dtype) for v in (mu, inv))
    xhat = lw.map(lambda x, m, r: (cast(x, dtype) - m) * r, xg, m, r, dtype=dtype)
    scale = [] if w is None else [w]
    gw = lw.map(
        lambda g, *w: cast(g, dtype) * cast(w[0], dtype) if w else cast(g, dtype),
        gg, *scale, dtype=dtype,
    )  # fmt: skip
    result: list[Any] = [None, None, None]
    if mask[0]:
        count = lw.scalar(count_of(xg, [2, 3]), dtype)
        m1 = lw.map(lambda s: s / count, total(lw, gw, [2, 3], dtype))
        gx = lw.map(lambda a, b: a * b, gw, xhat)
        m2 = lw.map(lambda s: s / count, total(lw, gx, [2, 3], dtype))
        dx = lw.map(
            lambda gw, m1, xh, m2, r: cast((gw - m1 - xh * m2) * r, x.dtype),
            gw, m1, xhat, m2, r, dtype=x.dtype,
        )  # fmt: skip
        result[0] = _ungrouped(lw, dx, x.shape)
    if mask[1]:
        gx = lw.map(lambda g, xh: cast(g, dtype) * xh, gg, xhat, dtype=dtype)
        dw = lw.reshape(_ungrouped(lw, total(lw, gx, [0, 3], dtype), (1, c, 1)), (c,))
        result[1] = lw.cast(dw, weight.dtype if weight is not None else x.dtype)
    if mask[2]:
        db = lw.reshape(_ungrouped(lw, total(lw, gg, [0, 3], dtype), (1, c, 1)), (c,))
        result[2] = lw.cast(db, weight.dtype if weight is not None else x.dtype)
    # PyTorch's inference promotes a gradient to float32 where the weight is.
    return [v if v is None else lw.cast(v, lw.meta(k).dtype) for k, v in enumerate(result)]


__all__ = ["REDUCTION", "axes_of", "elementwise", "opmath", "total", "wide"]
