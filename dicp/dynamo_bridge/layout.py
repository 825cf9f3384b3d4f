"""Memory formats: a graph becomes channels-last where the target's convolutions are faster so.

Each convolution asks for channels-last operands. An operand that is channels-last already, or a
copy of such a tensor, costs nothing; otherwise the pass inserts one conversion, which all readers
share. Inference propagates the changed strides through the operators that follow (pointwise,
pooling, norms, residual sums), so that the next convolution usually finds its input converted. The
graph's results keep the strides of eager.

Where a 1-d convolution is faster as a 2-d one, the pass makes it one, of images of one row.

In training it must run on the joint graph, before the split: then the tensors that the forward part
saves have the layout that the backward part reads.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from dicp.dynamo_bridge.analysis.static import STATIC, static_nodes
from dicp.dynamo_bridge.analysis.values import is_channels_last
from dicp.dynamo_bridge.fuse.engine import substitute
from dicp.dynamo_bridge.passes.base import Pass, PassContext
from dicp.dynamo_bridge.passes.redundancy import remove_dead
from dicp.target import options_of_one_row
from dicp.torch_private import depends_on_data

aten = torch.ops.aten

_OPERANDS = {aten.convolution.default: (0, 1), aten.convolution_backward.default: (0, 1, 2)}
"""Positions of the tensors that a convolution wants channels-last; the last one is the weight."""


def assign_layouts(gm: fx.GraphModule, context: PassContext) -> bool:
    """Give the graph's convolutions channels-last operands; true if anything changed."""
    if not context.config.layout:
        return False
    images, facts = _convolutions(gm, 4), context.facts
    pays = any(facts.wants_channels_last(*_weight_and_groups(n)) for n in images)
    wanted = images if pays else []
    views: dict[fx.Node, fx.Node] = {}
    rows = [n for n in _convolutions(gm, 3) if facts.is_conv2d(*_weight_and_groups(n))]
    wanted = [*wanted, *(_as_conv2d(node, views, context) for node in rows)]
    converted: dict[fx.Node, fx.Node] = {}
    static = static_nodes(gm, context.static_inputs)
    changed = bool(rows)
    for node in wanted:
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


def _convolutions(gm: fx.GraphModule, rank: int) -> list[fx.Node]:
    """Convolutions of real tensors of a rank, and their gradients.

    Those of sizes that depend on data are left out: PyTorch's inference knows no formats of theirs.
    """

    def fits(node: fx.Node) -> bool:
        values = [_value(node.args[index]) for index in _OPERANDS[node.target]]
        return not depends_on_data(values) and all(
            v is not None and v.dim() == rank and v.is_floating_point() for v in values
        )

    return [node for node in gm.graph.nodes if node.target in _OPERANDS and fits(node)]


def _options(node: fx.Node) -> int:
    """The position of the stride, which five other options follow; tensors and bias precede it."""
    return _OPERANDS[node.target][-1] + 2


def _weight_and_groups(node: fx.Node) -> tuple[torch.Tensor, Any]:
    return node.args[_OPERANDS[node.target][-1]].meta["val"], node.args[_options(node) + 5]  # type: ignore[union-attr]


def _as_conv2d(node: fx.Node, views: dict[fx.Node, fx.Node], context: PassContext) -> fx.Node:
    """Replace a 1-d convolution, or its gradients, by a 2-d one of one row; return that one."""
    emit, args, first = context.infer.emit, list(node.args), _options(node)
    for index in _OPERANDS[node.target]:
        source: Any = args[index]
        if source not in views:
            views[source] = emit(node, aten.unsqueeze.default, (source, 2), None, (source,))
        args[index] = views[source]
    args[first : first + 6] = options_of_one_row(*args[first : first + 6])
    new = emit(node, node.target, tuple(args), None, (node,))
    if node.target is aten.convolution.default:
        substitute(node, emit(node, aten.squeeze.dim, (new, 2), None, (node,)), context)
        return new
    for item in list(node.users):
        result = emit(item, operator.getitem, (new, item.args[1]), None, (item,))
        if result.meta["val"].dim() > 1:  # not the bias
            result = emit(item, aten.squeeze.dim, (result, 2), None, (item,))
        substitute(item, result, context)
    return new


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
