"""Transposes become flags, inverse moves cancel, broadcasts are left to the operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dicp.graphop.builder import Builder
from dicp.graphop.program import LEAVES, Node, Value
from dicp.vendor.ascend.rules.core import Ge

FLAGS = {"MatMulV2": ("transpose_x1", "transpose_x2"), "BatchMatMulV2": ("adj_x1", "adj_x2")}

HEADS_BACK = [0, 2, 1, 3]
"""From (batch, heads, rows, width) to (batch, rows, heads, width), and back."""

BROADCASTING = frozenset({
    "Add", "Sub", "Mul", "RealDiv", "Maximum", "Minimum", "Pow", "Equal", "NotEqual", "Less",
    "LessEqual", "Greater", "GreaterEqual", "LogicalAnd", "LogicalOr", "SelectV2", "FloorDiv",
    "FloorMod", "AxpyV2",
})  # fmt: skip


def order_of(value: Value) -> list[int] | None:
    """The permutation, if the value is a transpose."""
    if value.node.kind != "Transpose":
        return None
    perm = value.node.inputs["perm"]
    assert isinstance(perm, Value) and perm.known is not None
    return [int(d) for d in perm.known]


def source_of(value: Value, port: str = "x") -> Value:
    source = value.node.inputs[port]
    assert isinstance(source, Value)
    return source


def _swaps_matrix(value: Value) -> bool:
    """Whether the value is a transpose of its last two dimensions alone."""
    order = order_of(value)
    rank = value.ndim
    return order is not None and order == [*range(rank - 2), rank - 1, rank - 2]


def matrix_product(g: Builder, node: Node) -> Sequence[Value] | None:
    # matmul(transpose(a), b) = matmul(a, b; transpose_x1)
    operands = [node.inputs[port] for port in ("x1", "x2")]
    attrs: dict[str, Any] = dict(node.attrs)
    changed = False
    for k, flag in enumerate(FLAGS[node.kind]):
        operand = operands[k]
        assert isinstance(operand, Value)
        if _swaps_matrix(operand):
            operands[k] = source_of(operand)
            attrs[flag] = not attrs.get(flag, False)
            changed = True
    if not changed:
        return None
    return [g.op(node.kind, *operands, node.inputs.get("bias"), **attrs)]


def transpose(g: Builder, node: Node) -> Sequence[Value] | None:
    # transpose(transpose(x, p), q) = transpose(x, p[q]); moving dimensions of size 1 is a reshape
    assert isinstance(g, Ge)
    value = node.outputs[0]
    order, source = order_of(value), source_of(value)
    assert order is not None
    inner = order_of(source)
    if inner is not None:
        order, source = [inner[d] for d in order], source_of(source)
        if order == sorted(order):
            return [source]
    moving = [d for d in order if not g.same(source.shape[d], 1)]
    if moving == sorted(moving):
        return [g.reshape(source, value.shape)]
    return [g.transpose(source, order)] if inner is not None else None


def reshape(g: Builder, node: Node) -> Sequence[Value] | None:
    # reshape(reshape(x)) = reshape(x);  reshape(x, x.shape) = x
    assert isinstance(g, Ge)
    value = node.outputs[0]
    source = source_of(value)
    if g.same_shape(source.shape, value.shape):
        return [source]
    if source.node.kind != "Reshape":
        return None
    return [g.reshape(source_of(source), value.shape)]


def along(g: Builder, part: Value, axis: int) -> tuple[Any, Any] | None:
    """Begin and end of a slice along `axis` alone, in steps of 1; None for anything else."""
    if part.node.kind != "StridedSlice":
        return None
    begin, end, steps = (source_of(part, port).known for port in ("begin", "end", "strides"))
    if begin is None or end is None or steps is None or set(steps) != {1}:
        return None
    for dim, size in enumerate(source_of(part).shape):
        if dim != axis and not (g.same(begin[dim], 0) and g.same(end[dim], size)):
            return None
    return begin[axis], end[axis]


def identity(g: Builder, node: Node) -> Sequence[Value] | None:
    # identity(x) = x; a graph does not return its own inputs
    source = source_of(node.outputs[0])
    return None if source.node.kind in LEAVES else [source]


def reshaped(g: Ge, value: Value, shape: Sequence[Any]) -> Value:
    """`value` in `shape`, whatever reshapes it went through."""
    while value.node.kind == "Reshape":
        value = source_of(value)
    return g.reshape(value, shape)


def elementwise(g: Builder, node: Node) -> Sequence[Value] | None:
    # add(broadcast(x), y) = add(x, y), where y has the whole shape
    inputs = dict(node.inputs)
    shape = node.outputs[0].shape
    changed = False
    for port, operand in inputs.items():
        if not isinstance(operand, Value) or operand.node.kind != "BroadcastTo":
            continue
        others = [v for p, v in inputs.items() if p != port and isinstance(v, Value)]
        if any(_spans(g, other, shape) for other in others):
            inputs[port] = source_of(operand)
            changed = True
    if changed:
        node.inputs = inputs
    return None


def _spans(g: Builder, value: Value, shape: Sequence[Any]) -> bool:
    return g.same_shape(value.shape, shape)


def both_ways(node: Node) -> list[tuple[Value, Value]]:
    left, right = node.operands()
    return [(left, right), (right, left)]
