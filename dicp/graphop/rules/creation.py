"""Filled tensors, ranges, random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dicp.dtypes import largest_below, opmath_dtype
from dicp.effects import UNINITIALIZED, uninitialized_value
from dicp.graphop.operators import NoRule, Ops, Value
from dicp.rules import RuleTable

aten = torch.ops.aten
prims = torch.ops.prims
RULES = RuleTable()
rule = RULES.register
PHILOX = 1
"""The random number algorithm that the operators are called with."""


@rule(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default,
      aten._efficientzerotensor.default)  # fmt: skip
def zeros(g: Ops, *args: Any, **options: Any) -> Value:
    return g.full(g.shape, 0, g.dtype)


@rule(aten.fill.Scalar, aten.fill.Tensor)
def fill(g: Ops, x: Value, value: Any) -> Value:
    if not isinstance(value, Value):
        return g.full(g.shape, value, g.dtype)
    return g.broadcast(g.cast(value, g.dtype), g.shape)


@rule(aten.arange.start_step)
def arange(g: Ops, start: Any, end: Any, step: Any = 1, **options: Any) -> Value:
    """start + k step for k below the known number of elements."""
    dtype = g.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    work = wide if dtype.is_floating_point else torch.int64
    places = g.arange(g.shape[0], work)
    if not g.same(step, 1):
        places = g.op("Mul", places, g.number(step, work))
    if not g.same(start, 0):
        places = g.op("Add", places, g.number(start, work))
    return g.cast(places, dtype)


RULES.update({
    UNINITIALIZED:
        lambda g, *args, **options: g.full(g.shape, uninitialized_value(g.dtype), g.dtype),
    (aten.full.default, aten.full_like.default):
        lambda g, like, value, **options: g.full(g.shape, value, g.dtype),
    aten.new_full.default: lambda g, x, size, value, **options: g.full(g.shape, value, g.dtype),
    (aten.ones.default, aten.ones_like.default, aten.new_ones.default):
        lambda g, *args, **options: g.full(g.shape, 1, g.dtype),
    aten.scalar_tensor.default:
        lambda g, value, **options: g.op("Identity", g.number(value, g.dtype)),
    aten.arange.default: lambda g, end, **options: arange(g, 0, end, 1),
    aten.arange.start: lambda g, start, end, **options: arange(g, start, end, 1),
    prims.iota.default: lambda g, length, *, start, step, **options: arange(g, start, None, step),
})  # fmt: skip


# ---- random --------------------------------------------------------------------------------------


def uniform_of(g: Ops, shape: Sequence[Any], dtype: torch.dtype) -> Value:
    """Uniform in [0, 1)."""
    return _draw(g, "RandomUniform", shape, dtype)


def normal_of(g: Ops, shape: Sequence[Any], dtype: torch.dtype) -> Value:
    return _draw(g, "RandomNormal", shape, dtype)


def _draw(g: Ops, kind: str, shape: Sequence[Any], dtype: torch.dtype) -> Value:
    counter = g.const([0, 0], torch.uint64)
    algorithm = g.const(PHILOX, torch.int32)
    return g.op(kind, g.ints(list(shape)), g.seed(), counter, algorithm, dtype=dtype)


@rule(aten.uniform.default)
def uniform(g: Ops, x: Value, start: float = 0.0, end: float = 1.0, **options: Any) -> Value:
    drawn = uniform_of(g, g.shape, opmath_dtype(g.dtype))
    result = g.add(g.mul(drawn, end - start), start)
    if isinstance(start, float) and isinstance(end, float):  # rounded, it might be the end
        last = max(largest_below(end, g.dtype), start)
        result = g.op("Minimum", result, g.number(last, result.dtype))
    return g.cast(result, g.dtype)


@rule(aten.normal_functional.default)
def normal(g: Ops, x: Value, mean: float = 0.0, std: float = 1.0, **options: Any) -> Value:
    drawn = normal_of(g, g.shape, opmath_dtype(g.dtype))
    return g.cast(g.add(g.mul(drawn, std), mean), g.dtype)


@rule(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor)
def normal_tensors(g: Ops, mean: Any, std: Any = 1.0, **options: Any) -> Value:
    drawn = normal_of(g, g.shape, g.dtype)
    return g.binary("Add", g.binary("Mul", drawn, std), mean)


@rule(aten.bernoulli.p)
def bernoulli_p(g: Ops, x: Value, p: float = 0.5, **options: Any) -> Value:
    drawn = uniform_of(g, g.shape, torch.float32)
    return g.cast(g.op("Less", drawn, g.number(p, torch.float32)), g.dtype)


@rule(aten.bernoulli.Tensor)
def bernoulli_tensor(g: Ops, x: Value, p: Value, **options: Any) -> Value:
    if not p.dtype.is_floating_point:
        raise NoRule("probabilities that are integers")
    wide = g.wide(p)
    drawn = uniform_of(g, g.shape, wide.dtype)
    return g.cast(g.op("Less", drawn, wide), g.dtype)


@rule(aten.native_dropout.default)
def native_dropout(g: Ops, x: Value, p: float, train: bool | None = True) -> tuple[Value, Value]:
    if not train:
        return g.op("Identity", x), g.full(x.shape, True, torch.bool)
    drawn = uniform_of(g, x.shape, torch.float32)
    kept = g.op("GreaterEqual", drawn, g.number(p, torch.float32))
    scale = 1.0 / (1.0 - p) if p < 1 else 0.0
    # products, as in eager: of -1 comes -0, of NaN NaN
    return g.binary("Mul", g.op("Mul", x, g.cast(kept, x.dtype)), scale), kept


def _integers(g: Ops, low: Any, high: Any) -> Value:
    """Integers in [low, high), all equally likely: the range is far below a double's bits."""
    span = high - low
    if isinstance(span, int) and span > 2**g.random_bits:
        raise NoRule("a range with more integers than there are random numbers")
    drawn = uniform_of(g, g.shape, torch.float64)
    scaled = g.op("Mul", drawn, g.number(span, torch.float64))
    whole = g.cast(g.op("Floor", scaled), torch.int64)
    whole = g.op("Minimum", whole, g.number(span - 1, torch.int64))
    return g.cast(g.op("Add", whole, g.number(low, torch.int64)), g.dtype)


@rule(aten.randperm.default)
def randperm(g: Ops, n: Any, **options: Any) -> Value:
    drawn = uniform_of(g, g.shape, torch.float64)
    bits = g.op("Bitcast", drawn, type=torch.int64)  # non-negative floats order as their bits do
    return g.cast(g.ops("Sort", bits, axis=-1, stable=True)[1], g.dtype)


def _open_uniform(g: Ops) -> Value:
    """Uniform in (0, 1], so that logarithms are finite."""
    drawn = uniform_of(g, g.shape, opmath_dtype(g.dtype))
    return g.op("Sub", g.number(1, drawn.dtype), drawn)


@rule(aten.exponential.default)
def exponential(g: Ops, x: Value, lambd: float = 1.0, **options: Any) -> Value:
    """-log(u) / rate, but never zero: programs often take the logarithm of it."""
    drawn = g.op("Neg", g.op("Log", _open_uniform(g)))
    smallest = g.number(torch.finfo(drawn.dtype).eps / 2, drawn.dtype)
    return g.cast(g.div(g.op("Maximum", drawn, smallest), lambd), g.dtype)


@rule(aten.geometric.default)
def geometric(g: Ops, x: Value, p: float, **options: Any) -> Value:
    drawn = uniform_of(g, g.shape, torch.float32)
    inverse = g.op("Sub", g.number(1, torch.float32), drawn)
    count = g.op("Ceil", g.div(g.op("Log", inverse), math.log1p(-p)))
    return g.cast(g.op("Maximum", count, g.number(1, torch.float32)), g.dtype)


@rule(aten.log_normal.default)
def log_normal(g: Ops, x: Value, mean: float = 1.0, std: float = 2.0, **options: Any) -> Value:
    drawn = normal_of(g, g.shape, opmath_dtype(g.dtype))
    return g.cast(g.op("Exp", g.add(g.mul(drawn, std), mean)), g.dtype)


@rule(aten.cauchy.default)
def cauchy(g: Ops, x: Value, median: float = 0.0, sigma: float = 1.0, **options: Any) -> Value:
    drawn = uniform_of(g, g.shape, opmath_dtype(g.dtype))
    angle = g.mul(g.add(drawn, -0.5), math.pi)
    return g.cast(g.add(g.mul(g.op("Tan", angle), sigma), median), g.dtype)


RULES.update({
    (aten.rand.default, aten.rand.generator, aten.rand_like.default):
        lambda g, *args, **options: uniform_of(g, g.shape, g.dtype),
    (aten.randn.default, aten.randn.generator, aten.randn_like.default):
        lambda g, *args, **options: normal_of(g, g.shape, g.dtype),
    aten.normal.float_float: lambda g, mean, std, *args, **options: normal_tensors(g, mean, std),
    aten.bernoulli.default: lambda g, p, **options: bernoulli_tensor(g, p, p),
    aten.randint.default: lambda g, high, *args, **options: _integers(g, 0, high),
    aten.randint.low: lambda g, low, high, *args, **options: _integers(g, low, high),
    aten.randint_like.default: lambda g, x, high, **options: _integers(g, 0, high),
    aten.randint_like.low_dtype: lambda g, x, low, high, **options: _integers(g, low, high),
})  # fmt: skip
