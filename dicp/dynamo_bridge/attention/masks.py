"""Simpler attention masks, for the fused operator and for its gradient.

A constant mask that hides exactly the keys after each query becomes the operator's causal flag.
The mask stays beside the flag where the target gives masks their effect on NaN and infinite scores
(`FusedAttention.exact_masks`).

The backward graph rematerializes a mask that booleans select (0 or -inf): forward saves the
booleans, which are smaller and which a target's fused gradient can read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dicp.dynamo_bridge.analysis.values import value_of
from dicp.dynamo_bridge.attention.forward import attention_on
from dicp.dynamo_bridge.attention.mask_values import is_causal_mask
from dicp.dynamo_bridge.passes.base import Pass, PassContext
from dicp.dynamo_bridge.passes.redundancy import remove_dead
from dicp.torch_private import (
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    disable_current_modes,
    recompute_in_backward,
    schema_of,
)

aten = torch.ops.aten

_FREE = frozenset({
    aten.expand.default, aten.view.default, aten.unsqueeze.default, aten.slice.Tensor,
    aten.scalar_tensor.default, aten.full.default,
})  # fmt: skip
"""Operators in masks, besides `where`, that cost nothing to rematerialize."""


def plain_masks(gm: fx.GraphModule, context: PassContext) -> bool:
    """Simplifies the masks of fused attention; true if a mask became the causal flag."""
    if not context.facts.attention or not context.config.fuse:
        return False
    changed = False
    for target in (ATTENTION_FORWARD, ATTENTION_BACKWARD):
        for node in gm.graph.find_nodes(op="call_function", target=target):
            mask = node.kwargs.get("attn_mask")
            if not isinstance(mask, fx.Node):
                continue
            exact = attention_on(context, node.args[_position(node, "query")]).exact_masks
            if _is_constant_causal(node, mask):
                changed |= _set_causal(node, keep_mask=exact)
            if "attn_mask" in node.kwargs and context.kind == "joint":
                _rematerialize(mask)
    if changed:
        remove_dead(gm.graph)
    return changed


def _is_constant_causal(node: fx.Node, mask: fx.Node) -> bool:
    position = _position(node, "query")
    q, k = node.args[position : position + 2]
    with disable_current_modes():
        return is_causal_mask(mask, q, k)


def _set_causal(node: fx.Node, keep_mask: bool) -> bool:
    """Sets the causal flag, in place of the mask or beside it; true if it was not set."""
    position = _position(node, "is_causal")
    if node.args[position:] == (True,):
        return False
    args: list[Any] = [*node.args[:position], *([0.0] * (position - len(node.args)))]
    node.args = (*args, True)
    if not keep_mask:
        node.kwargs = {name: v for name, v in node.kwargs.items() if name != "attn_mask"}
    return True


def _position(node: fx.Node, name: str) -> int:
    """The position of an argument of the node's operator."""
    return [argument.name for argument in schema_of(node.target).arguments].index(name)


def _rematerialize(mask: fx.Node) -> None:
    """Mark a `where` between two numbers, and views of it, for rematerialization in backward."""
    chain: list[fx.Node] = []
    node: Any = mask
    while isinstance(node, fx.Node) and node.target in _FREE:
        chain.append(node)
        node = node.args[0] if node.args else None
    if not isinstance(node, fx.Node) or node.target is not aten.where.self:
        return
    choices = node.args[1:]
    if all(isinstance(c, fx.Node) and value_of(c).dim() == 0 for c in choices):
        for made in (*chain, node):
            recompute_in_backward(made)


MASKS = Pass("masks", plain_masks)
