"""Distances between rows, and products of three tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dicp.graphop.operators import NoRule, Ops, Value
from dicp.graphop.rules.matmul import product
from dicp.rules import RuleTable

aten = torch.ops.aten
RULES = RuleTable()
rule = RULES.register


def _norm(g: Ops, difference: Value, p: float) -> Value:
    """The p-norm along the last dimension."""
    axes, size = [difference.ndim - 1], g.op("Abs", difference)
    if p == math.inf:
        return g.reduce("ReduceMax", size, axes, False)
    if p == 0:
        return g.reduce("ReduceSum", g.cast(g.truth(size), size.dtype), axes, False)
    if p == 1:
        return g.reduce("ReduceSum", size, axes, False)
    if p == 2:
        return g.op("Sqrt", g.reduce("ReduceSum", g.op("Square", size), axes, False))
    powers = g.op("Pow", size, g.number(p, size.dtype))
    total = g.reduce("ReduceSum", powers, axes, False)
    return g.op("Pow", total, g.number(1 / p, size.dtype))


def _slope(g: Ops, difference: Value, distance: Value, p: float) -> Value:
    """The derivative of the p-norm by each element; 0 where the norm is."""
    sign = g.op("Sign", difference)
    if p == 0:
        return g.mul(sign, 0.0)
    if p == 1:
        return sign
    size = g.op("Abs", difference)
    if p == math.inf:
        largest = g.op("Equal", size, g.broadcast(distance, size.shape))
        return g.mul(sign, g.cast(largest, sign.dtype))
    nothing = g.op("Equal", distance, g.number(0, distance.dtype))
    divisor = g.where(nothing, 1.0, distance, distance.dtype)
    ratio = g.op("Div", size, g.broadcast(divisor, size.shape))
    if p == 2:
        return g.op("Mul", sign, ratio)
    if p < 1:  # the power of 0 is infinite, and its sign does not matter
        ratio = g.where(g.op("Equal", size, g.number(0, size.dtype)), 1.0, ratio, size.dtype)
    return g.op("Mul", sign, g.op("Pow", ratio, g.number(p - 1, size.dtype)))


def _differences(g: Ops, x: Value, y: Value) -> Value:
    """(..., rows of x, rows of y, width)"""
    return g.op("Sub", g.unsqueeze(x, x.ndim - 1), g.unsqueeze(y, y.ndim - 2))


RULES.update({
    aten._cdist_forward.default:
        lambda g, x, y, p, compute_mode: _norm(g, _differences(g, x, y), p),
    aten._pdist_forward.default: lambda g, x, p=2.0: g.op("Pdist", x, p=float(p)),
})  # fmt: skip


@rule(aten._cdist_backward.default)
def cdist_backward(g: Ops, dy: Value, x: Value, y: Value, p: float, distance: Value) -> Value:
    difference = _differences(g, x, y)
    slope = _slope(g, difference, g.unsqueeze(distance, distance.ndim), p)
    total = g.reduce("ReduceSum", g.op("Mul", slope, g.unsqueeze(dy, dy.ndim)), [-2], False)
    return g.broadcast(total, g.shape)


@rule(aten._pdist_backward.default)
def pdist_backward(g: Ops, dy: Value, x: Value, p: float, distance: Value) -> Value:
    """Every ordered pair of rows reads the unordered pair's entry of forward; a row and itself read
    any entry, as their difference is 0."""
    rows = x.shape[0]
    if any(g.same(rows, few) for few in (0, 1)):
        raise NoRule("there is no pair of rows")
    one, other = g.reshape(g.arange(rows), [rows, 1]), g.reshape(g.arange(rows), [1, rows])
    low, high = g.op("Minimum", one, other), g.op("Maximum", one, other)
    half = g.op("FloorDiv", g.op("Mul", low, g.add(low, 3)), g.const(2, torch.int64))
    place = g.add(g.sub(g.add(g.mul(low, rows), high), half), -1)
    place = g.where(g.op("Equal", one, other), 0, place, torch.int64)
    distances, steps = (
        g.unsqueeze(g.op("Gather", v, place, g.const(0, torch.int64)), 2) for v in (distance, dy)
    )
    slope = _slope(g, _differences(g, x, x), distances, p)
    return g.reduce("ReduceSum", g.op("Mul", slope, steps), [1], False)


# ---- products of three ---------------------------------------------------------------------------


def _contracted(
    g: Ops, x: Value, dims: Sequence[int], y: Value, others: Sequence[int], keep: set[int]
) -> tuple[Value, list[int]]:
    """x times y, summed over the dimensions not in `keep`; `dims` and `others` number theirs.

    Returns the product and its dimensions' numbers.
    """
    shared = [d for d in dims if d in others]
    batch = [d for d in shared if d in keep]
    inner = [d for d in shared if d not in keep]
    left = [d for d in dims if d not in others]
    right = [d for d in others if d not in dims]
    sizes = dict(zip(others, y.shape, strict=True)) | dict(zip(dims, x.shape, strict=True))

    def matrices(value: Value, own: Sequence[int], *groups: list[int]) -> Value:
        transposed = g.transpose(value, [own.index(d) for group in groups for d in group])
        return g.reshape(transposed, [math.prod([sizes[d] for d in group]) for group in groups])

    rows, columns = matrices(x, dims, batch, left, inner), matrices(y, others, batch, inner, right)
    result = [*batch, *left, *right]
    return g.reshape(product(g, rows, columns), [sizes[d] for d in result]), result


@rule(aten._trilinear.default)
def trilinear(
    g: Ops, x: Value, y: Value, z: Value, expand1: Sequence[int], expand2: Sequence[int],
    expand3: Sequence[int], sumdim: Sequence[int], unroll_dim: int = 1,
) -> Value:  # fmt: skip
    """Each input lacks the dimensions it is expanded by; those of `sumdim` are summed over."""
    rank = x.ndim + len(expand1)
    dims = [
        [d for d in range(rank) if d not in {e % rank for e in expand}]
        for expand in (expand1, expand2, expand3)
    ]
    summed = {d % rank for d in sumdim}
    kept = set(range(rank)) - summed
    pair, numbers = _contracted(g, x, dims[0], y, dims[1], kept | set(dims[2]))
    alone = [d for d in numbers if d in summed and d not in dims[2]]
    if alone:
        pair = g.reduce("ReduceSum", pair, [numbers.index(d) for d in alone], False)
        numbers = [d for d in numbers if d not in alone]
    out, numbers = _contracted(g, pair, numbers, z, dims[2], kept)
    alone = [d for d in numbers if d in summed]
    if alone:
        out = g.reduce("ReduceSum", out, [numbers.index(d) for d in alone], False)
        numbers = [d for d in numbers if d not in alone]
    return g.transpose(out, [numbers.index(d) for d in sorted(numbers)])
