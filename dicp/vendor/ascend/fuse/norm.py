"""A residual sum and the norm after it as one operator."""

from __future__ import annotations

from collections.abc import Mapping

from dicp.graphop.builder import Builder
from dicp.graphop.program import Node, Value
from dicp.vendor.ascend.fuse.moves import source_of


def rms_norm(g: Builder, node: Node) -> Mapping[Value, Value] | None:
    # rms_norm(a + b) = add_rms_norm(a, b), which gives the sum too
    total = source_of(node.outputs[0])
    if total.node.kind != "Add" or not _is_plain_sum(g, total):
        return None
    operands = [total.node.inputs[port] for port in ("x1", "x2")]
    y, rstd, x = g.ops("AddRmsNorm", *operands, node.inputs["gamma"], **node.attrs)
    return {node.outputs[0]: y, node.outputs[1]: rstd, total: x}


def _is_plain_sum(g: Builder, total: Value) -> bool:
    """Of two tensors with the whole shape."""
    return all(g.same_shape(v.shape, total.shape) for v in total.node.operands())
