"""Random numbers: Philox 4x32-10 counters, one seed per run drawn from the default generator.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dicp.loop import ir
from dicp.loop.index import Index, ZERO, contiguous_strides, flatten
from dicp.loop.ir import Expr, apply, cast, const
from dicp.loop.lowering.core import Lowering, NoRule, RuleTable, Value, sizes_of
from dicp.loop.lowering.pointwise import compare

aten = torch.ops.aten
RANDOM = RuleTable()
rule = RANDOM.register


def generated(
    lw: Lowering, op: str, dtype: torch.dtype, finish: Callable[[Expr, tuple[Index, ...]], Expr]
) -> Value:
    """A tensor of the node's shape from one random number per element."""
    if lw.context.config.fallback_random:
        raise NoRule("random numbers are left to eager by fallback_random")
    meta = lw.meta()
    shape = sizes_of(meta.shape)
    seed, site = lw.seed()
    strides = contiguous_strides(shape)

    def body(idx: tuple[Index, ...]) -> Expr:
        counter = ir.index_value(flatten(idx, strides))
        key = ir.load(seed, (ZERO,))
        number = apply(op, dtype, key, const(site, torch.int64), counter)
        return finish(number, idx)

    value = lw.pointwise(shape, meta.dtype, body)
    assert isinstance(value.ref.producer, ir.Compute)
    value.ref.producer.realize = True
    return value


def _width(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _no_generator(kwargs: dict[str, Any]) -> None:
    if kwargs.get("generator") is not None:
        raise NoRule("an explicit generator keeps its own state")


def _sampler(op: str) -> Callable[..., Value]:
    def lowered(lw: Lowering, *args: Any, **kwargs: Any) -> Value:
        _no_generator(kwargs)
        dtype = lw.meta().dtype
        if dtype.is_complex:
            raise NoRule("complex random numbers")
        if op == "philox_uniform" and dtype in ir.LOW_PRECISION:
            # Rounding must not reach 1.0: keep as many bits as the dtype's significand.
            scale = float(2 ** (8 if dtype == torch.bfloat16 else 11))
            return generated(
                lw, op, torch.float32,
                lambda u, idx: cast(apply("floor", u.dtype, u * scale) / scale, dtype),
            )  # fmt: skip
        return generated(lw, op, _width(dtype), lambda u, idx: cast(u, dtype))

    return lowered


for _op in (aten.rand.default, aten.rand.generator, aten.rand_like.default):
    RANDOM.add(_op, _sampler("philox_uniform"))
for _op in (aten.randn.default, aten.randn.generator, aten.randn_like.default):
    RANDOM.add(_op, _sampler("philox_normal"))


def _integers(lw: Lowering, low: Any, high: Any) -> Value:
    dtype = lw.meta().dtype
    first, last = lw.scalar(low, torch.int64), lw.scalar(high, torch.int64)

    def body(bits: Expr, idx: tuple[Index, ...]) -> Expr:
        site = apply("remainder", torch.int64, bits, last - first)
        return cast(site + first, dtype)

    return generated(lw, "philox_bits", torch.int64, body)


@rule(aten.randint.default, aten.randint_like.default)
def randint(lw: Lowering, *args: Any, **kwargs: Any) -> Value:
    _no_generator(kwargs)
    high = args[1] if isinstance(args[0], Value) else args[0]
    return _integers(lw, 0, high)


@rule(aten.randint.low, aten.randint_like.low_dtype)
def randint_low(lw: Lowering, *args: Any, **kwargs: Any) -> Value:
    _no_generator(kwargs)
    low, high = args[1:3] if isinstance(args[0], Value) else args[:2]
    return _integers(lw, low, high)


@rule(aten.bernoulli.default)
def bernoulli(lw: Lowering, x: Value, *, generator: Any = None) -> Value:
    _no_generator({"generator": generator})
    width = _width(x.dtype)
    return generated(
        lw, "philox_uniform", width,
        lambda u, idx: cast(compare("lt", u, cast(x.at(idx), width)), x.dtype),
    )  # fmt: skip


@rule(aten.bernoulli.p)
def bernoulli_p(lw: Lowering, x: Value, p: float = 0.5, *, generator: Any = None) -> Value:
    _no_generator({"generator": generator})
    return generated(
        lw, "philox_uniform", torch.float64,
        lambda u, idx: cast(compare("lt", u, float(p)), lw.meta().dtype),
    )  # fmt: skip


@rule(aten.native_dropout.default)
def native_dropout(lw: Lowering, x: Value, p: float, train: Any) -> tuple[Value, Value]:
    if train is False or p == 0:
        mask = lw.pointwise(x.shape, torch.bool, lambda idx: const(True, torch.bool))
        return lw.map(lambda e: e, x), mask
    if lw.context.config.fallback_random:
        raise NoRule("random numbers are left to eager by fallback_random")
    seed, site = lw.seed()
    strides = contiguous_strides(x.shape)

    def keep(idx: tuple[Index, ...]) -> Expr:
        counter = ir.index_value(flatten(idx, strides))
        number = apply(
            "philox_uniform", torch.float32, ir.load(seed, (ZERO,)), const(site, torch.int64),
            counter,
        )  # fmt: skip
        return compare("ge", number, float(p))

    mask = lw.pointwise(x.shape, torch.bool, keep)
    assert isinstance(mask.ref.producer, ir.Compute)
    mask.ref.producer.realize = True
    scale = 0.0 if p >= 1 else 1 / (1 - float(p))

    def body(e: Expr, m: Expr) -> Expr:
        kept = apply("where", x.dtype, m, e * scale, const(0.0, x.dtype))
        return kept

    return lw.map(body, x, mask), mask
