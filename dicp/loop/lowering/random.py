"""Random numbers: Philox 4x32-7 counters, one seed per run drawn from the default generator.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011: they find no failing
statistical test from seven rounds on. A Philox call gives four 32-bit words: elements 4k .. 4k+3
get one each, or elements 2k and 2k+1 two each. An element's number depends neither on the kernel
nor on its tiling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from dicp.dtypes import REDUCED_FLOATS, largest_below, significand_bits
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, apply, cast, const
from dicp.loop.ir.index import ZERO, Index, contiguous_strides, flatten
from dicp.loop.lowering.conditions import compare
from dicp.loop.lowering.core import Lowering, Value
from dicp.loop.lowering.layout import sizes_of
from dicp.loop.thresholds import MAX_RANDOM_RANGE
from dicp.rules import NoRule, RuleTable

aten = torch.ops.aten
RANDOM = RuleTable()
rule = RANDOM.register


def generated(
    lw: Lowering, op: str, dtype: torch.dtype, finish: Callable[[Expr, tuple[Index, ...]], Expr],
    output: int | None = None,
) -> Value:  # fmt: skip
    """The node's result (number `output` of several) from one random number per element."""
    if lw.context.config.fallback_random:
        raise NoRule("random numbers are left to eager by fallback_random")
    if lw.node.kwargs.get("generator") is not None:
        raise NoRule("draws from an explicit generator")
    meta = lw.meta(output)
    shape = sizes_of(meta.shape)
    seed, site = lw.seed()
    strides = contiguous_strides(shape)

    def body(idx: tuple[Index, ...]) -> Expr:
        counter = ir.index_value(flatten(idx, strides))
        key = ir.load(seed, (ZERO,))
        number = apply(op, dtype, key, const(site, torch.int64), counter)
        return finish(number, idx)

    value = lw.pointwise(shape, meta.dtype, body)
    lw.mark_realized(value.ref)
    return value


def _width(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _unit(u: Expr, dtype: torch.dtype) -> Expr:
    """`u` from [0, 1) with no more bits than `dtype` holds, so that rounding cannot reach 1."""
    if dtype not in REDUCED_FLOATS:
        return u
    scale = 2.0 ** significand_bits(dtype)
    return apply("floor", u.dtype, u * scale) * (1 / scale)


def _sampler(op: str) -> Callable[..., Value]:
    def lowered(lw: Lowering, *args: Any, **kwargs: Any) -> Value:
        dtype = lw.meta().dtype
        if dtype.is_complex:
            raise NoRule("complex random numbers")
        uniform = op == "philox_uniform"
        return generated(
            lw, op, _width(dtype), lambda n, idx: cast(_unit(n, dtype) if uniform else n, dtype)
        )

    return lowered


for _op in (aten.rand.default, aten.rand.generator, aten.rand_like.default):
    RANDOM.add(_op, _sampler("philox_uniform"))
for _op in (aten.randn.default, aten.randn.generator, aten.randn_like.default):
    RANDOM.add(_op, _sampler("philox_normal"))


def _integers(lw: Lowering, low: Any, high: Any) -> Value:
    """Integers in [low, high), all equally likely: the range is far below the numbers' 63 bits."""
    if isinstance(low, int) and isinstance(high, int) and high - low > MAX_RANDOM_RANGE:
        raise NoRule("a range that is not far below that of the random numbers")
    dtype = lw.meta().dtype
    first, last = lw.scalar(low, torch.int64), lw.scalar(high, torch.int64)

    def body(bits: Expr, idx: tuple[Index, ...]) -> Expr:
        site = apply("remainder", torch.int64, bits, last - first)
        return cast(site + first, dtype)

    return generated(lw, "philox_bits", torch.int64, body)


@rule(aten.randint.default)
def randint(lw: Lowering, high: Any, size: Any, **kwargs: Any) -> Value:
    return _integers(lw, 0, high)


@rule(aten.randint_like.default)
def randint_like(lw: Lowering, x: Value, high: Any, **kwargs: Any) -> Value:
    return _integers(lw, 0, high)


@rule(aten.randint.low)
def randint_low(lw: Lowering, low: Any, high: Any, size: Any, **kwargs: Any) -> Value:
    return _integers(lw, low, high)


@rule(aten.randint_like.low_dtype)
def randint_like_low(lw: Lowering, x: Value, low: Any, high: Any, **kwargs: Any) -> Value:
    return _integers(lw, low, high)


@rule(aten.bernoulli.default)
def bernoulli(lw: Lowering, x: Value, *, generator: Any = None) -> Value:
    width = _width(x.dtype)
    return generated(
        lw, "philox_uniform", width,
        lambda u, idx: cast(compare("lt", u, cast(x.at(idx), width)), x.dtype),
    )  # fmt: skip


@rule(aten.bernoulli.p)
def bernoulli_p(lw: Lowering, x: Value, p: float = 0.5, *, generator: Any = None) -> Value:
    return generated(
        lw, "philox_uniform", torch.float32,
        lambda u, idx: cast(compare("lt", u, float(p)), lw.meta().dtype),
    )  # fmt: skip


@rule(aten.bernoulli.Tensor)
def bernoulli_tensor(lw: Lowering, x: Value, p: Value, *, generator: Any = None) -> Value:
    width = _width(p.dtype)
    return generated(
        lw, "philox_uniform", width,
        lambda u, idx: cast(compare("lt", u, cast(p.broadcast_at(idx), width)), lw.meta().dtype),
    )  # fmt: skip


@rule(aten.uniform.default)
def uniform(
    lw: Lowering, x: Value, low: float = 0.0, high: float = 1.0, *, generator: Any = None
) -> Value:
    start, end, width = float(low), float(high), _width(x.dtype)
    last = const(max(largest_below(end, x.dtype), start), width)  # rounded, it might be the end

    def scaled(u: Expr, idx: tuple[Index, ...]) -> Expr:
        value = _unit(u, x.dtype) * (end - start) + start
        return cast(apply("minimum", width, value, last), x.dtype)

    return generated(lw, "philox_uniform", width, scaled)


@rule(
    aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor,
    aten.normal.float_float,
)  # fmt: skip
def normal(lw: Lowering, mean: Any, std: Any = 1.0, *args: Any, **kwargs: Any) -> Value:
    dtype = lw.meta().dtype
    if dtype.is_complex:
        raise NoRule("complex random numbers")
    width = _width(dtype)

    def operand(value: Any, idx: tuple[Index, ...]) -> Expr:
        if isinstance(value, Value):
            return cast(value.broadcast_at(idx), width)
        return lw.scalar(float(value), width)

    return generated(
        lw, "philox_normal", width,
        lambda n, idx: cast(n * operand(std, idx) + operand(mean, idx), dtype),
    )  # fmt: skip


@rule(aten.normal_functional.default)
def normal_functional(
    lw: Lowering, x: Value, mean: float = 0.0, std: float = 1.0, *, generator: Any = None
) -> Value:
    return normal(lw, mean, std, generator=generator)


def _exponential(u: Expr, rate: float) -> Expr:
    """-log(1 - u) / rate, but never zero: programs often take the logarithm of it."""
    smallest = const(torch.finfo(u.dtype).eps / 2, u.dtype)
    return apply("maximum", u.dtype, -apply("log1p", u.dtype, -u), smallest) / rate


def _geometric(u: Expr, p: float) -> Expr:
    trials = apply("ceil", u.dtype, apply("log1p", u.dtype, -u) / math.log1p(-p))
    return apply("maximum", u.dtype, trials, const(1.0, u.dtype))


def _cauchy(u: Expr, median: float, sigma: float) -> Expr:
    return apply("tan", u.dtype, (u - 0.5) * math.pi) * sigma + median


def _log_normal(n: Expr, mean: float, std: float) -> Expr:
    return apply("exp", n.dtype, n * std + mean)


def _transformed(op: str, fn: Callable[..., Expr], *defaults: float) -> Callable[..., Value]:
    """A rule that applies `fn` to one uniform or normal number per element."""

    def lowered(lw: Lowering, x: Value, *args: Any, generator: Any = None) -> Value:
        parameters = [float(v) for v in (*args, *defaults[len(args) :])]
        return generated(lw, op, _width(x.dtype), lambda u, idx: cast(fn(u, *parameters), x.dtype))

    return lowered


RANDOM.add(aten.exponential.default, _transformed("philox_uniform", _exponential, 1.0))
RANDOM.add(aten.cauchy.default, _transformed("philox_uniform", _cauchy, 0.0, 1.0))
RANDOM.add(aten.log_normal.default, _transformed("philox_normal", _log_normal, 1.0, 2.0))


@rule(aten.geometric.default)
def geometric(lw: Lowering, x: Value, p: float, *, generator: Any = None) -> Value:
    return _transformed("philox_uniform", _geometric)(lw, x, p, generator=generator)


@rule(aten.native_dropout.default)
def native_dropout(lw: Lowering, x: Value, p: float, train: Any) -> tuple[Value, Value]:
    if train is False or p == 0:
        mask = lw.pointwise(x.shape, torch.bool, lambda idx: const(True, torch.bool))
        return lw.copy(x), mask
    mask = generated(
        lw, "philox_uniform", torch.float32, lambda u, idx: compare("ge", u, float(p)), output=1
    )
    scale = 0.0 if p >= 1 else 1 / (1 - float(p))

    # Products, as in eager: of -1 comes -0, of NaN NaN. They are chosen from, not the factors:
    # some compilers draw a second time for a choice between constants.
    def body(e: Expr, m: Expr) -> Expr:
        return apply("where", e.dtype, m, e * scale, e * 0.0)

    return lw.map(body, x, mask), mask
