"""Memory formats: a graph becomes channels-last where the target's convolutions are faster so.

Each convolution asks for channels-last operands. An operand that is channels-last already, or a
copy of such a tensor, costs nothing; otherwise the pass inserts one conversion, which all readers
share. Inference propagates the changed strides through the operators that follow (pointwise,
pooling, norms, residual sums), so that the next convolution usually finds its input converted. The
graph's results keep the strides of eager.

In training it must run on the joint graph, before the split: then the tensors that the forward part
saves have the layout that the backward part reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dicp.dynamo_bridge.analysis.static import STATIC, static_nodes
from dicp.dynamo_bridge.analysis.values import is_channels_last
from dicp.dynamo_bridge.passes.base import Pass, PassContext
from dicp.dynamo_bridge.passes.redundancy import remove_dead

aten = torch.ops.aten

_OPERANDS = {aten.convolution.default: (0, 1), aten.convolution_backward.default: (0, 1, 2)}
"""Positions of the tensors that a convolution wants channels-last."""


def assign_layouts(gm: fx.GraphModule, context: PassContext) -> bool:
    """Give the graph's convolutions channels-last operands; true if anything changed."""
    if not (context.config.layout and _pays(gm, context)):
        return False
    converted: dict[fx.Node, fx.Node] = {}
    static = static_nodes(gm, context.static_inputs)
    changed = False
    for node in list(gm.graph.nodes):
        if node.target not in _OPERANDS or not _wants(node):
            continue
        before = node.args
        operands = {i: _channels_last(node, i, converted, static, context) for i in
                    _OPERANDS[node.target]}  # fmt: skip
        after = tuple(operands.get(i, argument) for i, argument in enumerate(before))
        if after != before:
            node.args = after
            context.infer.update([node])
            changed = True
    if changed:
        remove_dead(gm.graph)
    return changed


def _pays(gm: fx.GraphModule, context: PassContext) -> bool:
    """Whether the target wants this graph's convolutions channels-last."""
    wanted = context.facts.conv_channels_last
    if any(_weight_type(n) in context.facts.channels_last_dtypes for n in gm.graph.nodes):
        return True
    if wanted == "depthwise":
        return any(_is_depthwise(n) for n in gm.graph.nodes)
    return wanted == "always"


def _weight_type(node: fx.Node) -> torch.dtype | None:
    """The dtype that a convolution computes in; None for other nodes."""
    if node.target not in _OPERANDS or not _wants(node):
        return None
    weight = _value(node.args[_OPERANDS[node.target][-1]])
    return None if weight is None else weight.dtype


def _is_depthwise(node: fx.Node) -> bool:
    """Whether `node` is a convolution each of whose groups reads one channel."""
    if node.target is not aten.convolution.default or not _wants(node):
        return False
    weight = _value(node.args[1])
    return weight is not None and weight.shape[1] == 1 and node.args[-1] != 1


def _wants(node: fx.Node) -> bool:
    """Whether a convolution is one of real 4-d tensors: image, weight and output gradient."""
    for index in _OPERANDS[node.target]:
        value = _value(node.args[index])
        if value is None or value.dim() != 4 or not value.dtype.is_floating_point:
            return False
    return True


def _value(argument: Any) -> torch.Tensor | None:
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _channels_last(
    user: fx.Node,
    index: int,
    converted: dict[fx.Node, fx.Node],
    static: set[fx.Node],
    context: PassContext,
) -> fx.Node:
    """Operand `index` of `user`, channels-last."""
    source = user.args[index]
    assert isinstance(source, fx.Node)
    original = source
    while True:
        value = _value(source)
        if value is not None and is_channels_last(value):
            return source
        copied = _copied(source)
        if copied is None:
            break
        source = copied
    if original in converted:
        return converted[original]
    node = context.infer.copy(user, original, torch.channels_last, (original,))
    if not node.meta.get("dicp_sources"):
        node.meta["dicp_sources"] = (f"{aten.clone.default} ({original.name}, channels last)",)
    if original in static:
        node.meta[STATIC] = True
        static.add(node)
    converted[original] = node
    return node


def _copied(node: fx.Node) -> fx.Node | None:
    """The source of a copy in another layout, values and shape unchanged."""
    if node.target is not aten.clone.default:
        return None
    source = node.args[0]
    return source if isinstance(source, fx.Node) else None


LAYOUT = Pass("layout", assign_layouts)
