"""A residual sum and the norm after it as one operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dicp.graphop.builder import Builder
from dicp.graphop.program import Item, Node, Result, Value
from dicp.vendor.ascend.fuse.moves import source_of


def rms_norm(g: Builder, node: Node) -> Mapping[Value, Value] | None:
    # rms_norm(a + b) = add_rms_norm(a, b), which gives the sum too
    total = source_of(node.outputs[0])
    if total.node.kind != "Add" or not _is_plain_sum(g, total):
        return None
    operands = [total.node.inputs[port] for port in ("x1", "x2")]
    y, rstd, x = g.ops("AddRmsNorm", *operands, node.inputs["gamma"], **node.attrs)
    return {node.outputs[0]: y, node.outputs[1]: rstd, total: x}


def layer_norm(g: Builder, node: Node) -> Mapping[Value, Value] | None:
    # layer_norm(a + b) = add_layer_norm(a, b), which gives the sum too
    total = source_of(node.outputs[0])
    scale, shift = node.inputs.get("gamma"), node.inputs.get("beta")
    if not isinstance(scale, Value) or scale.ndim != 1 or not isinstance(shift, Value):
        return None
    if total.node.kind != "Add" or not _is_plain_sum(g, total):
        return None
    operands = [total.node.inputs[port] for port in ("x1", "x2")]
    y, mean, rstd, x = g.ops(
        "AddLayerNorm", *operands, scale, shift, additional_output=True, **node.attrs
    )
    return dict(zip([*node.outputs, total], [y, mean, rstd, x], strict=True))


def _is_plain_sum(g: Builder, total: Value) -> bool:
    """Of two tensors with the whole shape."""
    return all(g.same_shape(v.shape, total.shape) for v in total.node.operands())


def without_unread_sums(items: Sequence[Item]) -> list[Item]:
    """Sums that nothing reads are not asked for."""
    read: set[Value] = set()
    for item in items:
        if isinstance(item, Node):
            read.update(item.operands())
        elif isinstance(item, Result):
            read.add(item.value)
    for item in items:
        if isinstance(item, Node) and item.kind == "AddLayerNorm":
            wanted = item.outputs[3] in read
            item.attrs = {**item.attrs, "additional_output": wanted}
    return list(items)
