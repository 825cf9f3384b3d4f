"""An activation times a gate."""

from __future__ import annotations

from collections.abc import Sequence

from dicp.graphop.builder import Builder
from dicp.graphop.program import Node, Value
from dicp.vendor.ascend.fuse.moves import both_ways, source_of


def swish_gate(g: Builder, node: Node) -> Sequence[Value] | None:
    # swish(first half of x) * second half of x = swi_glu(x)
    for gate, up in both_ways(node):
        if gate.node.kind != "Swish" or gate.node.attrs.get("scale", 1.0) != 1.0:
            continue
        half = source_of(gate)
        split = half.node
        if split.kind != "SplitVD" or up.node is not split or (half.index, up.index) != (0, 1):
            continue
        if len(split.outputs) == 2 and g.same_shape(half.shape, up.shape):
            return [g.op("SwiGlu", source_of(half), dim=split.attrs["split_dim"])]
    return None
