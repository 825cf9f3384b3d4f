"""Operators of the vocabulary as HLIR's: elementwise, shapes, reductions, products, indices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dicp.graphop.program import Value
from dicp.graphop.prototype import ResultType
from dicp.rules import NoRule
from dicp.vendor.tops.hlir import Hlir, known

Form = Callable[..., Any]
FORMS: dict[str, Form] = {}


def form(*kinds: str) -> Callable[[Form], Form]:
    """Registers what makes operators of the vocabulary."""

    def add(function: Form) -> Form:
        FORMS.update(dict.fromkeys(kinds, function))
        return function

    return add


# ---- elementwise ---------------------------------------------------------------------------------


def _as(kind: str, **attrs: Any) -> Form:
    return lambda g, *operands: g.hlir(kind, *operands, **attrs)


for _kind in ("Abs", "Atan", "Cos", "Erf", "Floor", "HardSwish", "Neg", "Reciprocal", "Relu",
              "Rsqrt", "Sigmoid", "Sin", "Sqrt", "Square", "Tanh", "Add", "Div", "Mul", "Pow",
              "Sub"):  # fmt: skip
    FORMS[_kind] = _as(_kind)
FORMS |= {
    "LogicalAnd": _as("And"), "LogicalOr": _as("Or"), "LogicalNot": _as("Not"),
    "Maximum": _as("Max"), "Minimum": _as("Min"), "Select": _as("Select"),
}  # fmt: skip
for _kind, _direction in (("Equal", "EQ"), ("NotEqual", "NE"), ("Less", "LT"), ("LessEqual", "LE"),
                          ("Greater", "GT"), ("GreaterEqual", "GE")):  # fmt: skip
    FORMS[_kind] = _as("Compare", direction=_direction)


@form("Identity", "Copy")
def identity(g: Hlir, x: Value) -> Value:
    return x


def _natural(kind: str) -> Form:
    def make(g: Hlir, x: Value, base: float = -1.0) -> Value:
        if base != -1.0:
            raise NoRule(f"HLIR has {kind} of base e alone")
        return g.hlir(kind, x)

    return make


FORMS |= {"Exp": _natural("Exp"), "Log": _natural("Log")}


@form("Axpy")
def axpy(g: Hlir, x: Value, y: Value, alpha: Value) -> Value:
    return g.hlir("Add", x, g.hlir("Mul", y, alpha))


@form("Addcmul")
def addcmul(g: Hlir, x: Value, y: Value, z: Value, value: Value) -> Value:
    return g.hlir("Add", x, g.hlir("Mul", g.hlir("Mul", y, value), z))


@form("Addcdiv")
def addcdiv(g: Hlir, x: Value, y: Value, z: Value, value: Value) -> Value:
    return g.hlir("Add", x, g.hlir("Mul", g.hlir("Div", y, z), value))


@form("IsNan")
def is_nan(g: Hlir, x: Value) -> Value:
    return g.compare(x, x, "NE")


@form("IsInf")
def is_inf(g: Hlir, x: Value) -> Value:
    return g.compare(g.hlir("Abs", x), math.inf, "EQ")


@form("Ceil")
def ceil(g: Hlir, x: Value) -> Value:
    return g.hlir("Neg", g.hlir("Floor", g.hlir("Neg", x)))


@form("Trunc")
def trunc(g: Hlir, x: Value) -> Value:
    return g.hlir("Select", g.compare(x, 0, "LT"), ceil(g, x), g.hlir("Floor", x))


@form("Sign")
def sign(g: Hlir, x: Value) -> Value:
    positive, negative = (g.cast(g.compare(x, 0, d), x.dtype) for d in ("GT", "LT"))
    return g.hlir("Sub", positive, negative)


@form("Invert")
def invert(g: Hlir, x: Value) -> Value:
    return g.hlir("Sub", g.number(-1, x.dtype) if x.dtype.is_signed else g.number(255, x.dtype), x)


@form("TruncateDiv")
def truncate_div(g: Hlir, x: Value, y: Value) -> Value:
    quotient = g.hlir("Div", x, y)
    return trunc(g, quotient) if x.dtype.is_floating_point else quotient


@form("FloorDiv")
def floor_div(g: Hlir, x: Value, y: Value) -> Value:
    if x.dtype.is_floating_point:
        raise NoRule("HLIR has no exact remainder of floating point")
    quotient = g.hlir("Div", x, y)  # cut towards zero
    if not x.dtype.is_signed:
        return quotient
    rest = g.hlir("Sub", x, g.hlir("Mul", quotient, y))
    below = g.hlir("Compare", g.compare(rest, 0, "LT"), g.compare(y, 0, "LT"), direction="NE")
    cut = g.hlir("And", g.compare(rest, 0, "NE"), below)
    return g.hlir("Sub", quotient, g.cast(cut, x.dtype))


@form("FloorMod")
def floor_mod(g: Hlir, x: Value, y: Value) -> Value:
    return g.hlir("Sub", x, g.hlir("Mul", floor_div(g, x, y), y))


@form("Mod")
def mod(g: Hlir, x: Value, y: Value) -> Value:
    if x.dtype.is_floating_point:
        raise NoRule("HLIR has no exact remainder of floating point")
    return g.hlir("Sub", x, g.hlir("Mul", g.hlir("Div", x, y), y))


@form("SigmoidGrad")
def sigmoid_grad(g: Hlir, y: Value, dy: Value) -> Value:
    return g.mul(dy, g.mul(y, g.sub(1.0, y)))


@form("TanhGrad")
def tanh_grad(g: Hlir, y: Value, dy: Value) -> Value:
    return g.mul(dy, g.sub(1.0, g.hlir("Square", y)))


@form("LeakyRelu")
def leaky_relu(g: Hlir, x: Value, negative_slope: float) -> Value:
    return g.hlir("Select", g.compare(x, 0, "GT"), x, g.mul(x, negative_slope))


@form("Gelu")
def gelu(g: Hlir, x: Value, approximate: str) -> Value:
    return g.hlir("Gelu", x, approximate=approximate == "tanh")


@form("GeluGrad")
def gelu_grad(g: Hlir, dy: Value, x: Value, approximate: str) -> Value:
    return g.hlir("GeluGrad", dy, x, approximate=approximate == "tanh")


@form("HardSwishGrad")
def hard_swish_grad(g: Hlir, dy: Value, x: Value) -> Value:
    return g.hlir("HardSwishGrad", dy, x, offset=3.0, threshold=6.0, scale=6.0)


# ---- shapes --------------------------------------------------------------------------------------


@form("Cast")
def cast(g: Hlir, x: Value, dst_type: torch.dtype) -> Value:
    return g.cast(x, dst_type)


@form("Transpose")
def transpose(g: Hlir, x: Value, perm: Value) -> Value:
    return g.transpose(x, known(perm))


@form("Reshape")
def reshape(g: Hlir, x: Value, shape: Value) -> Value:
    return g.reshape(x, known(shape))


@form("BroadcastTo")
def broadcast_to(g: Hlir, x: Value, shape: Value) -> Value:
    return g.broadcast(x, known(shape))


@form("Fill")
def fill(g: Hlir, dims: Value, value: Value) -> Value:
    return g.broadcast(value, known(dims))


@form("Concat")
def concat(g: Hlir, parts: Sequence[Value], concat_dim: int, N: int) -> Value:
    return g.concat(parts, concat_dim)


@form("Stack")
def stack(g: Hlir, parts: Sequence[Value], axis: int, N: int) -> Value:
    return g.concat([g.unsqueeze(part, axis) for part in parts], axis)


@form("Split")
def split(
    g: Hlir, x: Value, size_splits: Sequence[int], split_dim: int, num_split: int
) -> list[Value]:
    ends = [sum(size_splits[: k + 1]) for k in range(num_split)]
    starts = [0, *ends[:-1]]
    return [g.slice(x, split_dim, a, b) for a, b in zip(starts, ends, strict=True)]


@form("StridedSlice")
def strided_slice(g: Hlir, x: Value, begin: Value, end: Value, strides: Value) -> Value:
    return g.hlir("Slice", x, start=known(begin), limit=known(end), stride=known(strides))


@form("Tile")
def tile(g: Hlir, x: Value, multiples: Value) -> Value:
    times = known(multiples)
    spread = [size for pair in zip(times, x.shape, strict=True) for size in pair]
    apart = [size for old in x.shape for size in (1, old)]
    wide = g.broadcast(g.reshape(x, apart), spread)
    return g.reshape(wide, [n * size for n, size in zip(times, x.shape, strict=True)])


@form("Pad")
def pad(g: Hlir, x: Value, paddings: Value, value: Value | None = None) -> Value:
    widths = known(paddings)
    fill = g.number(0, x.dtype) if value is None else value
    for axis in range(x.ndim):
        parts: list[Value | None] = [None, x, None]
        for k, width in ((0, widths[2 * axis]), (2, widths[2 * axis + 1])):
            if not g.same(width, 0):
                parts[k] = g.broadcast(fill, [*x.shape[:axis], width, *x.shape[axis + 1 :]])
        x = g.concat([part for part in parts if part is not None], axis)
    return x


@form("Reverse")
def reverse(g: Hlir, x: Value, axes: Value) -> Value:
    return g.hlir("Reverse", x, dims=known(axes), type=ResultType(x.dtype, x.shape))


@form("Roll")
def roll(g: Hlir, x: Value, shifts: Sequence[int], dims: Sequence[int]) -> Value:
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        if g.same(size, 0):
            return x
        cut = -shift % size
        x = g.concat([g.slice(x, dim, cut, size), g.slice(x, dim, 0, cut)], dim)
    return x


@form("Range")
def range_of(g: Hlir, start: Value, limit: Value, delta: Value) -> Value:
    if start.known != (0,) or delta.known != (1,) or limit.known is None:
        raise NoRule("a range that does not count from 0")
    return g.arange(limit.known[0], limit.dtype)


def _triangle(direction: str) -> Form:
    def make(g: Hlir, x: Value, diagonal: int) -> Value:
        sizes = x.shape[-2:]
        gap = g.sub(g.iota(sizes, 1), g.iota(sizes, 0))
        zero = g.number(0, x.dtype)
        return g.hlir("Select", g.compare(gap, diagonal, direction), x, zero)

    return make


FORMS |= {"Tril": _triangle("LE"), "Triu": _triangle("GE")}


@form("AsStrided")
def as_strided(g: Hlir, x: Value, size: Value, stride: Value, storage_offset: Value) -> Value:
    """Elements of flat `x` at places that are counted from the strides."""
    shape, places = known(size), g.full(known(size), known(storage_offset)[0], torch.int64)
    for dim, step in enumerate(known(stride)):
        places = g.add(places, g.mul(g.iota(shape, dim), step))
    return _take(g, g.reshape(x, [math.prod(x.shape)]), places, 0)


# ---- reductions ----------------------------------------------------------------------------------


def _reduction(kind: str) -> Form:
    def make(g: Hlir, x: Value, axes: Value, keep_dims: bool) -> Value:
        return g.hlir(kind, x, keepdim=keep_dims, axes=known(axes))

    return make


for _kind in ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"):
    FORMS[_kind] = _reduction(_kind)


def _truth(kind: str) -> Form:
    def make(g: Hlir, x: Value, axes: Value, keep_dims: bool) -> Value:
        number = g.hlir(kind, g.cast(x, torch.int32), keepdim=keep_dims, axes=known(axes))
        return g.compare(number, 0, "NE")

    return make


FORMS |= {"ReduceAny": _truth("ReduceMax"), "ReduceAll": _truth("ReduceMin")}


def _position(kind: str) -> Form:
    def make(g: Hlir, x: Value, dimension: Value, dtype: torch.dtype) -> Value:
        axis = known(dimension)[0] % x.ndim
        return g.cast(g.hlir(kind, x, axis=axis, keepdim=False), dtype)

    return make


FORMS |= {"ArgMax": _position("ArgMax"), "ArgMin": _position("ArgMin")}


@form("TopK")
def top_k(g: Hlir, x: Value, k: Value, sorted: bool, dim: int, largest: bool) -> list[Value]:
    return g.own("TopK", x, k=known(k)[0], axis=dim, sorted=sorted, largest=largest)


@form("Softmax")
def softmax(g: Hlir, x: Value, axes: Sequence[int]) -> Value:
    return g.hlir("Softmax", x, axis=axes[0], accurate=True)


@form("LogSoftmax")
def log_softmax(g: Hlir, x: Value, axes: Sequence[int]) -> Value:
    """x - m - log sum exp(x - m), with m the maximum."""
    wide = g.wide(x)
    shifted = g.sub(wide, g.reduce("ReduceMax", wide, axes, True))
    total = g.reduce("ReduceSum", g.hlir("Exp", shifted), axes, True)
    return g.cast(g.sub(shifted, g.hlir("Log", total)), x.dtype)


# ---- products ------------------------------------------------------------------------------------


@form("MatMul", "BatchMatMul")
def product(g: Hlir, x: Value, y: Value, bias: Value | None = None) -> Value:
    """A matrix product of equal batches; transposes of its operands become its dimensions."""
    if not x.dtype.is_floating_point:
        terms = g.mul(g.unsqueeze(x, x.ndim), g.unsqueeze(y, y.ndim - 2))
        return g.reduce("ReduceSum", terms, [x.ndim - 1], False)
    last = x.ndim - 1
    left, contracted = _untransposed(x, last)
    right, rows = _untransposed(y, last - 1)
    batch = list(range(last - 1))
    dims = [batch, batch, [contracted], [rows]]
    result = g.hlir("DotGeneral", left, right, dims=dims)
    return result if bias is None else g.hlir("Add", result, bias)


def _untransposed(x: Value, axis: int) -> tuple[Value, int]:
    """What `x` is the transpose of, and where its dimension `axis` is there."""
    node = x.node
    if node.kind != "Transpose":
        return x, axis
    order = list(range(x.ndim))
    order[-2:] = [x.ndim - 1, x.ndim - 2]
    if list(node.attrs["perm"]) != order:
        return x, axis
    return node.operands()[0], order[axis]


# ---- indices -------------------------------------------------------------------------------------


def _take(g: Hlir, x: Value, indices: Value, axis: int) -> Value:
    """Slices of `x` along an axis; their dimensions stand where the axis stood."""
    sizes = [1 if d == axis else size for d, size in enumerate(x.shape)]
    count = indices.ndim
    offset = [*range(axis), *range(axis + count, x.ndim - 1 + count)]
    shape = [*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]]
    kind = ResultType(x.dtype, tuple(shape))
    dims = [offset, [axis], [axis], count]
    return g.hlir("Gather", x, indices, dims=dims, sizes=sizes, sorted=False, type=kind)


@form("Gather")
def gather(g: Hlir, x: Value, indices: Value, axis: Value) -> Value:
    return _take(g, x, indices, known(axis)[0] % x.ndim)


@form("GatherND")
def gather_nd(g: Hlir, x: Value, indices: Value) -> Value:
    """Slices that begin where the last dimension of `indices` says."""
    depth, count = int(indices.shape[-1]), indices.ndim - 1
    sizes = [1] * depth + list(x.shape[depth:])
    kind = ResultType(x.dtype, (*indices.shape[:-1], *x.shape[depth:]))
    front = list(range(depth))
    dims = [list(range(count, count + x.ndim - depth)), front, front, count]
    return g.hlir("Gather", x, indices, dims=dims, sizes=sizes, sorted=False, type=kind)


def _places(g: Hlir, index: Value, axis: int) -> Value:
    """(..., rank): where in a tensor each element of `index` stands, but for `axis`, where it
    says so itself."""
    shape = list(index.shape)
    own = g.cast(index, torch.int64)
    parts = [own if d == axis else g.iota(shape, d) for d in range(index.ndim)]
    return g.concat([g.unsqueeze(part, index.ndim) for part in parts], index.ndim)


@form("GatherElements")
def gather_elements(g: Hlir, x: Value, index: Value, dim: int) -> Value:
    return gather_nd(g, x, _places(g, index, dim))


ACTIONS = {"none": "update", "add": "add", "mul": "mul", "max": "max", "min": "min"}


def _scatter(g: Hlir, x: Value, places: Value, updates: Value, reduction: str) -> Value:
    """Slices combined into `x` at the places that the last dimension of `places` has."""
    depth, count = int(places.shape[-1]), places.ndim - 1
    front = list(range(depth))
    dims = [list(range(count, updates.ndim)), front, front, count]
    region = f"{ACTIONS[reduction]}_{str(x.dtype).removeprefix('torch.')}"
    return g.hlir("Scatter", x, places, updates, dims=dims, regions=[region])


@form("ScatterElements")
def scatter_elements(
    g: Hlir, x: Value, index: Value, updates: Value, axis: int, reduction: str = "none"
) -> Value:
    return _scatter(g, x, _places(g, index, axis), updates, reduction)


@form("ScatterNDUpdate")
def scatter_nd_update(g: Hlir, x: Value, indices: Value, updates: Value) -> Value:
    return _scatter(g, x, indices, updates, "none")


@form("ScatterNDAdd")
def scatter_nd_add(g: Hlir, x: Value, indices: Value, updates: Value) -> Value:
    return _scatter(g, x, indices, updates, "add")


# ---- random numbers ------------------------------------------------------------------------------

PRIME = 2**31 - 1
MULTIPLIERS = (48271, 69621, 39373)


def _rest(g: Hlir, x: Value) -> Value:
    """`x` modulo the prime, for x >= 0."""
    return g.sub(x, g.mul(g.hlir("Div", x, g.number(PRIME, torch.int64)), PRIME))


def _uniform(g: Hlir, shape: Sequence[Any], seed: Value, dtype: torch.dtype, stream: int) -> Value:
    """Numbers in [0, 1) that depend on the seed and the element's place: x -> x^2 + a p + s modulo
    2^31 - 1, several times, with p the place and s a part of the seed. The builder's own random
    numbers do not follow the host's seed."""
    place = _rest(g, g.add(g.iota([math.prod(shape)], 0), stream * 1000003))
    parts = [_rest(g, seed), _rest(g, g.hlir("Div", seed, g.number(PRIME, torch.int64)))]
    x = _rest(g, g.hlir("Add", g.mul(place, MULTIPLIERS[0]), parts[0]))
    for k in range(4):
        step = g.hlir("Add", g.mul(place, MULTIPLIERS[k % 3]), parts[k % 2])
        x = _rest(g, g.hlir("Add", g.hlir("Square", x), step))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bits = g.hlir("Div", x, g.number(2**7 if wide == torch.float32 else 1, torch.int64))
    unit = g.mul(g.cast(bits, wide), 2.0**-24 if wide == torch.float32 else 1 / PRIME)
    return g.reshape(g.cast(unit, dtype), shape)


@form("RandomUniform")
def random_uniform(
    g: Hlir, shape: Value, key: Value, counter: Value, alg: Value, dtype: torch.dtype
) -> Value:
    return _uniform(g, known(shape), key, dtype, 0)


@form("RandomNormal")
def random_normal(
    g: Hlir, shape: Value, key: Value, counter: Value, alg: Value, dtype: torch.dtype
) -> Value:
    """sqrt(-2 ln(1 - u)) cos(2 pi v)"""
    sizes = known(shape)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    u, v = (_uniform(g, sizes, key, wide, k) for k in (0, 1))
    radius = g.hlir("Sqrt", g.mul(g.hlir("Log", g.sub(1.0, u)), -2.0))
    return g.cast(g.mul(radius, g.hlir("Cos", g.mul(v, 2 * math.pi))), dtype)
