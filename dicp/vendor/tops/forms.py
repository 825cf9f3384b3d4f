"""Operators of the vocabulary as HLIR's: elementwise, shapes, reductions, products, indices."""

from __future__ import annotations

from typing import Any

import torch

from dicp.graphop.composed import COMPOSED, Form, Forms, known, places_along, registry
from dicp.graphop.program import Value
from dicp.graphop.prototype import ResultType
from dicp.rules import NoRule
from dicp.vendor.tops.hlir import Hlir
from dicp.vendor.tops.images import IMAGES

FORMS: Forms = {}
form = registry(FORMS)


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


def _natural(kind: str) -> Form:
    def make(g: Hlir, x: Value, base: float = -1.0) -> Value:
        if base != -1.0:
            raise NoRule(f"HLIR has {kind} of base e alone")
        return g.hlir(kind, x)

    return make


FORMS |= {"Exp": _natural("Exp"), "Log": _natural("Log")}


@form("TruncateDiv")
def truncate_div(g: Hlir, x: Value, y: Value) -> Value:
    quotient = g.hlir("Div", x, y)
    return g.op("Trunc", quotient) if x.dtype.is_floating_point else quotient


FORMS |= {
    "Gelu": lambda g, x, approximate: g.hlir("Gelu", x, approximate=approximate == "tanh"),
    "GeluGrad":
        lambda g, dy, x, approximate: g.hlir("GeluGrad", dy, x, approximate=approximate == "tanh"),
    "HardSwishGrad":
        lambda g, dy, x: g.hlir("HardSwishGrad", dy, x, offset=3.0, threshold=6.0, scale=6.0),
}  # fmt: skip


# ---- shapes --------------------------------------------------------------------------------------


FORMS |= {
    "Cast": lambda g, x, dst_type: g.cast(x, dst_type),
    "Transpose": lambda g, x, perm: g.transpose(x, known(perm)),
    "Reshape": lambda g, x, shape: g.reshape(x, known(shape)),
    "BroadcastTo": lambda g, x, shape: g.broadcast(x, known(shape)),
    "Fill": lambda g, dims, value: g.broadcast(value, known(dims)),
    "Concat": lambda g, parts, concat_dim, N: g.concat(parts, concat_dim),
}


@form("StridedSlice")
def strided_slice(g: Hlir, x: Value, begin: Value, end: Value, strides: Value) -> Value:
    return g.hlir("Slice", x, start=known(begin), limit=known(end), stride=known(strides))


@form("Reverse")
def reverse(g: Hlir, x: Value, axes: Value) -> Value:
    return g.hlir("Reverse", x, dims=known(axes), type=ResultType(x.dtype, x.shape))


@form("Range")
def range_of(g: Hlir, start: Value, limit: Value, delta: Value) -> Value:
    if start.known != (0,) or delta.known != (1,) or limit.known is None:
        raise NoRule("a range that does not count from 0")
    return g.arange(limit.known[0], limit.dtype)


# ---- reductions ----------------------------------------------------------------------------------


def _reduction(kind: str) -> Form:
    def make(g: Hlir, x: Value, axes: Value, keep_dims: bool) -> Value:
        return g.hlir(kind, x, keepdim=keep_dims, axes=known(axes))

    return make


for _kind in ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"):
    FORMS[_kind] = _reduction(_kind)


def _position(kind: str) -> Form:
    def make(g: Hlir, x: Value, dimension: Value, dtype: torch.dtype) -> Value:
        axis = known(dimension)[0] % x.ndim
        return g.cast(g.hlir(kind, x, axis=axis, keepdim=False), dtype)

    return make


FORMS |= {"ArgMax": _position("ArgMax"), "ArgMin": _position("ArgMin")}


@form("TopK")
def top_k(g: Hlir, x: Value, k: Value, sorted: bool, dim: int, largest: bool) -> list[Value]:
    return g.own("TopK", x, k=known(k)[0], axis=dim, sorted=sorted, largest=largest)


FORMS |= {
    "Softmax": lambda g, x, axes: g.hlir("Softmax", x, axis=axes[0], accurate=True),
}


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


FORMS |= {
    "Gather": lambda g, x, indices, axis: _take(g, x, indices, known(axis)[0] % x.ndim),
    "ScatterNDUpdate": lambda g, x, indices, updates: _scatter(g, x, indices, updates, "none"),
    "ScatterNDAdd": lambda g, x, indices, updates: _scatter(g, x, indices, updates, "add"),
}


@form("GatherND")
def gather_nd(g: Hlir, x: Value, indices: Value) -> Value:
    """Slices that begin where the last dimension of `indices` says."""
    depth, count = int(indices.shape[-1]), indices.ndim - 1
    sizes = [1] * depth + list(x.shape[depth:])
    kind = ResultType(x.dtype, (*indices.shape[:-1], *x.shape[depth:]))
    front = list(range(depth))
    dims = [list(range(count, count + x.ndim - depth)), front, front, count]
    return g.hlir("Gather", x, indices, dims=dims, sizes=sizes, sorted=False, type=kind)


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
    return _scatter(g, x, places_along(g, index, axis), updates, reduction)


class Tops(Hlir):
    """Builds HLIR operators for the vocabulary of the rules."""

    forms = COMPOSED | FORMS | IMAGES
    random_bits = 31
