"""`flex_attention`, written out as the products, pointwise functions and softmax of its definition.

Fusion then sees attention as it does any other: scores that only a mask changes become one fused
operator, others two products around one kernel. (`torch.nn.attention.flex_attention` documents the
operator. Which blocks its mask says to be empty is no part of the result, and not read.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from dicp import torch_private


def expose_flex_attention(gm: fx.GraphModule) -> None:
    """Rewrites each `flex_attention` of Dynamo's graph and of the graphs nested in it."""
    operator = torch.ops.higher_order.flex_attention
    for graph_module in [m for m in gm.modules() if isinstance(m, fx.GraphModule)]:
        calls = graph_module.graph.find_nodes(op="call_function", target=operator)
        for node in calls:
            node.target = _flex_attention
        if calls:
            graph_module.recompile()


def _flex_attention(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and the log-sum-exp and the maximum of each row; the last has no gradient."""
    out, log_sum_exp, maximum = torch_private.flex_attention_by_definition(*args)
    return out, log_sum_exp, maximum.detach()
