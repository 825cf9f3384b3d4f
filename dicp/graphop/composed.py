"""Operators of the vocabulary composed from simpler ones, for vendors whose language lacks them.

A vendor takes them into its `Ops.forms`, followed by its own forms, which override them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dicp.dtypes import opmath_dtype, significand_bits
from dicp.graphop.operators import Ops
from dicp.graphop.program import Value
from dicp.rules import NoRule

Form = Callable[..., Any]
Forms = dict[str, Form]


def registry(forms: Forms) -> Callable[..., Callable[[Form], Form]]:
    """A decorator that registers the composition of operators of the vocabulary."""

    def form(*kinds: str) -> Callable[[Form], Form]:
        def add(function: Form) -> Form:
            forms.update(dict.fromkeys(kinds, function))
            return function

        return add

    return form


COMPOSED: Forms = {}
form = registry(COMPOSED)


def known(value: Value) -> list[Any]:
    """The known contents of an operand that determines sizes. Raises NoRule where they depend on
    data."""
    if value.known is None:
        raise NoRule("sizes that depend on data")
    return list(value.known)


def _against(g: Ops, kind: str, x: Value, number: float) -> Value:
    """A comparison with a number."""
    return g.op(kind, x, g.number(number, x.dtype))


# ---- elementwise ---------------------------------------------------------------------------------


@form("Identity", "Copy")
def identity(g: Ops, x: Value) -> Value:
    return x


def _rounded_once(combine: Callable[..., Value]) -> Callable[..., Value]:
    """16-bit floats are combined in float32, as eager's."""

    def rounded(g: Ops, x: Value, *others: Value) -> Value:
        wide = opmath_dtype(x.dtype)
        return g.cast(combine(g, *(g.as_type(v, wide) for v in (x, *others))), x.dtype)

    return rounded


@form("Ceil")
def ceil(g: Ops, x: Value) -> Value:
    return g.op("Neg", g.op("Floor", g.op("Neg", x)))


@form("Sign")
def sign(g: Ops, x: Value) -> Value:
    positive, negative = (g.cast(_against(g, kind, x, 0), x.dtype) for kind in ("Greater", "Less"))
    return g.sub(positive, negative)


@form("FloorDiv")
def floor_div(g: Ops, x: Value, y: Value) -> Value:
    """The truncated quotient, minus one where the remainder and the divisor have opposite signs."""
    if x.dtype.is_floating_point:
        raise NoRule(f"{g.dialect.name} has no exact remainder of floating point")
    quotient = g.op("TruncateDiv", x, y)
    if not x.dtype.is_signed:
        return quotient
    rest = g.sub(x, g.mul(quotient, y))
    signs = _against(g, "Less", rest, 0), _against(g, "Less", y, 0)
    cut = g.op("LogicalAnd", g.truth(rest), g.op("NotEqual", *signs))
    return g.sub(quotient, g.cast(cut, x.dtype))


@form("Mod")
def mod(g: Ops, x: Value, y: Value) -> Value:
    if x.dtype.is_floating_point:
        raise NoRule(f"{g.dialect.name} has no exact remainder of floating point")
    return g.sub(x, g.mul(g.op("TruncateDiv", x, y), y))


@form("LeakyRelu")
def leaky_relu(g: Ops, x: Value, negative_slope: float) -> Value:
    return g.op("Select", _against(g, "Greater", x, 0), x, g.mul(x, negative_slope))


COMPOSED |= {
    "Axpy": _rounded_once(lambda g, x, y, alpha: g.add(x, g.mul(y, alpha))),
    "Addcmul": _rounded_once(lambda g, x, y, z, value: g.add(x, g.mul(g.mul(y, value), z))),
    "Addcdiv": _rounded_once(lambda g, x, y, z, value: g.add(x, g.mul(g.div(y, z), value))),
    "IsNan": lambda g, x: g.op("NotEqual", x, x),
    "IsInf": lambda g, x: _against(g, "Equal", g.op("Abs", x), math.inf),
    "Trunc": lambda g, x: g.op("Select", _against(g, "Less", x, 0), ceil(g, x), g.op("Floor", x)),
    "Invert": lambda g, x: g.sub(-1 if x.dtype.is_signed else torch.iinfo(x.dtype).max, x),
    "FloorMod": lambda g, x, y: g.sub(x, g.mul(floor_div(g, x, y), y)),
    "SigmoidGrad": lambda g, y, dy: g.mul(dy, g.mul(y, g.sub(1.0, y))),
    "TanhGrad": lambda g, y, dy: g.mul(dy, g.sub(1.0, g.op("Square", y))),
}


# ---- shapes --------------------------------------------------------------------------------------


@form("Split")
def split(
    g: Ops, x: Value, size_splits: Sequence[int], split_dim: int, num_split: int
) -> list[Value]:
    ends = [sum(size_splits[: k + 1]) for k in range(num_split)]
    return [g.slice(x, split_dim, a, b) for a, b in zip([0, *ends], ends, strict=False)]


@form("Tile")
def tile(g: Ops, x: Value, multiples: Value) -> Value:
    times = known(multiples)
    spread = [size for pair in zip(times, x.shape, strict=True) for size in pair]
    apart = [size for old in x.shape for size in (1, old)]
    wide = g.broadcast(g.reshape(x, apart), spread)
    return g.reshape(wide, [n * size for n, size in zip(times, x.shape, strict=True)])


@form("Pad")
def pad(g: Ops, x: Value, paddings: Value, value: Value | None = None) -> Value:
    widths = known(paddings)
    fill = g.number(0, x.dtype) if value is None else value
    for axis in range(x.ndim):
        parts: list[Value | None] = [None, x, None]
        for k, width in ((0, widths[2 * axis]), (2, widths[2 * axis + 1])):
            if not g.same(width, 0):
                parts[k] = g.broadcast(fill, [*x.shape[:axis], width, *x.shape[axis + 1 :]])
        x = g.concat([part for part in parts if part is not None], axis)
    return x


@form("Roll")
def roll(g: Ops, x: Value, shifts: Sequence[int], dims: Sequence[int]) -> Value:
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        if g.same(size, 0):
            return x
        cut = -shift % size
        x = g.concat([g.slice(x, dim, cut, size), g.slice(x, dim, 0, cut)], dim)
    return x


def _triangle(kind: str) -> Form:
    def make(g: Ops, x: Value, diagonal: int) -> Value:
        sizes = x.shape[-2:]
        gap = g.sub(g.iota(sizes, 1), g.iota(sizes, 0))
        return g.op("Select", _against(g, kind, gap, diagonal), x, g.number(0, x.dtype))

    return make


COMPOSED |= {
    "Tril": _triangle("LessEqual"), "Triu": _triangle("GreaterEqual"),
    "Stack": lambda g, parts, axis, N: g.concat([g.unsqueeze(part, axis) for part in parts], axis),
}  # fmt: skip


@form("AsStrided")
def as_strided(g: Ops, x: Value, size: Value, stride: Value, storage_offset: Value) -> Value:
    """Elements of flat `x` at positions computed from the strides."""
    shape, places = known(size), g.full(known(size), known(storage_offset)[0], torch.int64)
    for dim, step in enumerate(known(stride)):
        places = g.add(places, g.mul(g.iota(shape, dim), step))
    return g.op("Gather", g.reshape(x, [math.prod(x.shape)]), places, g.const(0, torch.int64))


# ---- reductions and indices ----------------------------------------------------------------------


def _truth(kind: str) -> Form:
    def make(g: Ops, x: Value, axes: Value, keep_dims: bool) -> Value:
        return g.truth(g.op(kind, g.cast(x, torch.int32), axes, keep_dims=keep_dims))

    return make


COMPOSED |= {"ReduceAny": _truth("ReduceMax"), "ReduceAll": _truth("ReduceMin")}


def _scan(kind: str) -> Form:
    """y[k] = x[0] + ... + x[k] in log2(n) steps, which combine elements 1, 2, 4, ... positions
    apart (Hillis, Steele: Data parallel algorithms, 1986)."""

    def make(g: Ops, x: Value, axis: Value) -> Value:
        dim, y = known(axis)[0], g.wide(x)
        size, gap = x.shape[dim], 1
        if not isinstance(size, int):
            return g.cast(_triangular_scan(g, kind, y, dim), x.dtype)
        while gap < size:
            later, sooner = g.slice(y, dim, gap, size), g.slice(y, dim, 0, size - gap)
            y = g.concat([g.slice(y, dim, 0, gap), g.op(kind, sooner, later)], dim)
            gap *= 2
        return g.cast(y, x.dtype)

    return make


def _triangular_scan(g: Ops, kind: str, x: Value, dim: int) -> Value:
    """y[k] = sum of x[j] where j <= k: for sizes whose number of steps is unknown."""
    shape = [*x.shape[: dim + 1], *x.shape[dim:]]
    before = g.op("LessEqual", g.iota(shape, dim + 1), g.iota(shape, dim))
    wide = g.broadcast(g.unsqueeze(x, dim), shape)
    kept = g.where(before, wide, 0 if kind == "Add" else 1, x.dtype)
    return g.reduce("ReduceSum" if kind == "Add" else "ReduceProd", kept, [dim + 1], False)


COMPOSED |= {
    "Cumsum": _scan("Add"), "Cumprod": _scan("Mul"),
    "GatherElements": lambda g, x, index, dim: g.op("GatherND", x, places_along(g, index, dim)),
}  # fmt: skip


@form("LogSoftmax")
def log_softmax(g: Ops, x: Value, axes: Sequence[int]) -> Value:
    """x - m - log sum exp(x - m), with m the maximum."""
    wide = g.wide(x)
    shifted = g.sub(wide, g.reduce("ReduceMax", wide, axes, True))
    total = g.reduce("ReduceSum", g.op("Exp", shifted), axes, True)
    return g.cast(g.sub(shifted, g.op("Log", total)), x.dtype)


def places_along(g: Ops, index: Value, axis: int) -> Value:
    """(..., rank): the coordinates of each element of `index`, its own value along `axis`."""
    shape = list(index.shape)
    own = g.cast(index, torch.int64)
    parts = [own if d == axis else g.iota(shape, d) for d in range(index.ndim)]
    return g.concat([g.unsqueeze(part, index.ndim) for part in parts], index.ndim)


# ---- random numbers ------------------------------------------------------------------------------

PRIME = 2**31 - 1
MULTIPLIERS = (48271, 69621, 39373)


def _quotient(g: Ops, x: Value, divisor: int) -> Value:
    return g.op("TruncateDiv", x, g.number(divisor, torch.int64))


def _modulo(g: Ops, x: Value) -> Value:
    """`x` modulo the prime, for x >= 0."""
    return g.sub(x, g.mul(_quotient(g, x, PRIME), PRIME))


def _uniform(g: Ops, shape: Sequence[Any], seed: Value, dtype: torch.dtype, stream: int) -> Value:
    """Numbers in [0, 1) that depend on the seed and the element's position: x -> x^2 + a p + s
    modulo 2^31 - 1, several times, with p the position and s a part of the seed. A vendor's own
    random numbers may not follow the host's seed.

    Streams differ in their factors a: with shifted positions, one would repeat the other's numbers.
    """
    place = _modulo(g, g.iota([math.prod(shape)], 0))
    parts = [_modulo(g, seed), _modulo(g, _quotient(g, seed, PRIME))]
    x = _modulo(g, g.add(g.mul(place, MULTIPLIERS[stream]), parts[0]))
    for k in range(4):
        step = g.add(g.mul(place, MULTIPLIERS[(stream + k) % 3]), parts[k % 2])
        x = _modulo(g, g.add(g.op("Square", x), step))
    if dtype == torch.float64:
        return g.reshape(g.mul(g.cast(x, dtype), 1 / PRIME), shape)
    bits = significand_bits(dtype)
    unit = g.mul(g.cast(_quotient(g, x, 2 ** (31 - bits)), torch.float32), 2.0**-bits)
    return g.reshape(g.cast(unit, dtype), shape)


COMPOSED |= {
    "RandomUniform":
        lambda g, shape, key, counter, alg, dtype: _uniform(g, known(shape), key, dtype, 0),
}  # fmt: skip


@form("RandomNormal")
def random_normal(
    g: Ops, shape: Value, key: Value, counter: Value, alg: Value, dtype: torch.dtype
) -> Value:
    """sqrt(-2 ln(1 - u)) cos(2 pi v)"""
    sizes = known(shape)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    u, v = (_uniform(g, sizes, key, wide, k) for k in (0, 1))
    radius = g.op("Sqrt", g.mul(g.op("Log", g.sub(1.0, u)), -2.0))
    return g.cast(g.mul(radius, g.op("Cos", g.mul(v, 2 * math.pi))), dtype)
