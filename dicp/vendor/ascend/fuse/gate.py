"""An activation times a gate, both halves of one tensor."""

from __future__ import annotations

from collections.abc import Sequence

from dicp.graphop.builder import Builder
from dicp.graphop.program import Node, Value
from dicp.vendor.ascend.fuse.moves import along, both_ways, source_of


def swish_gate(g: Builder, node: Node) -> Sequence[Value] | None:
    # swish(first half of x) * second half of x = swi_glu(x)
    for gate, up in both_ways(node):
        if not _is_swish(gate):
            continue
        halves = _halved(g, source_of(gate), up)
        if halves is not None:
            return [g.op("SwiGlu", halves[0], dim=halves[1])]
    return None


def swish_gate_grad(g: Builder, node: Node) -> Sequence[Value] | None:
    # the gradients of both halves, joined = swi_glu_grad(dy, x)
    parts = node.operands()
    if len(parts) != 2 or parts[0].node.kind != "SwishGrad" or parts[1].node.kind != "Mul":
        return None
    slope, dup = parts[0].node, parts[1].node
    scaled, half = source_of(parts[0], "grad"), source_of(parts[0])
    if scaled.node.kind != "Mul" or slope.attrs.get("scale", 1.0) != 1.0:
        return None
    for dy, up in both_ways(scaled.node):
        halves = _halved(g, half, up)
        if halves is None or halves[1] != node.attrs["concat_dim"]:
            continue
        for other, gate in both_ways(dup):
            if other is dy and _is_swish(gate) and source_of(gate) is half:
                return [g.op("SwiGluGrad", dy, halves[0], dim=halves[1])]
    return None


def _is_swish(value: Value) -> bool:
    return value.node.kind == "Swish" and value.node.attrs.get("scale", 1.0) == 1.0


def _halved(g: Builder, first: Value, second: Value) -> tuple[Value, int] | None:
    """The tensor that both are the halves of, and the dimension that it is halved along."""
    if not g.same_shape(first.shape, second.shape):
        return None
    split = first.node
    if split.kind == "SplitVD":
        mine = second.node is split and (first.index, second.index) == (0, 1)
        whole = mine and len(split.outputs) == 2
        return (source_of(first), split.attrs["split_dim"]) if whole else None
    if split.kind != "StridedSlice" or second.node.kind != "StridedSlice":
        return None
    x = source_of(first)
    if source_of(second) is not x:
        return None
    for axis, size in enumerate(x.shape):
        left, right = along(g, first, axis), along(g, second, axis)
        if left is None or right is None or g.same(first.shape[axis], size):
            continue
        middle = g.same(left[1], right[0]) and g.same(left[0], 0) and g.same(right[1], size)
        return (x, axis) if middle else None
    return None
