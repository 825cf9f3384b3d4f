"""What the partitioner must save when it splits a joint graph."""

from __future__ import annotations

import torch
from torch import fx

from dicp.dynamo_bridge.analysis.aliases import alias_root
from dicp.dynamo_bridge.analysis.values import value_of
from dicp.torch_private import do_not_recompute


def save_compared_floats(graph: fx.Graph) -> None:
    """Make the partitioner save floats that are compared for equality, or the comparison's result.

    The gradient of an extremum tests which elements equal it. An element that backward recomputes,
    in a differently fused kernel, may differ from the extremum in its last bit: then none would be
    equal, and the gradient would be 0 / 0.
    """
    for target in (torch.ops.aten.eq.Tensor, torch.ops.aten.ne.Tensor):
        for node in graph.find_nodes(op="call_function", target=target):
            for compared in node.all_input_nodes:
                if value_of(compared).is_floating_point():
                    do_not_recompute(alias_root(compared))
