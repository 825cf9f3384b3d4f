"""Counts of floating-point operations per node of a graph, for the roofline of a report.

Products, convolutions and attention are counted by PyTorch's `torch.utils.flop_counter`. Any other
operator counts one operation per element of its result, or of its largest operand if that has more,
as in a reduction: an estimate, good enough to show that such operators are bound by memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from dicp.effects import is_view, op_name
from dicp.target import computes_size
from dicp.torch_private import OpOverload, disable_current_modes, number_at, pytree


def count_flops(gm: fx.GraphModule, sizes: Mapping[Any, int]) -> dict[str, int]:
    """Node -> its operations where symbols have `sizes`; nodes of unknown count are left out."""
    counts = {}
    with disable_current_modes():
        for node in gm.graph.nodes:
            if node.op == "call_function":
                count = _of(node, sizes)
                if count is not None:
                    counts[node.name] = count
    return counts


def _of(node: fx.Node, sizes: Mapping[Any, int]) -> int | None:
    op = node.target
    if computes_size(node) or is_view(op):
        return 0
    if not isinstance(op, OpOverload):
        return None
    try:
        given, result = (_at(part, sizes) for part in ((node.args, node.kwargs), node))
        formula = flop_registry.get(op.overloadpacket)
        if formula is not None:
            return int(formula(*given[0], **given[1], out_val=result))
        name = op_name(op)
        if name.startswith("_scaled_dot_product"):  # kernels of attention that have no formula
            shapes = [t.shape for t in given[0] if isinstance(t, torch.Tensor)]
            backward = "backward" in name
            return int(sdpa_backward_flop_count(*shapes[:4]) if backward
                       else sdpa_flop_count(*shapes[:3]))  # fmt: skip
        if op.namespace == "dicp":
            return None
        leaves = pytree.tree_leaves((given, result))
        return max((t.numel() for t in leaves if isinstance(t, torch.Tensor)), default=0)
    except Exception:  # a size known only at run time, or a formula that lacks a case
        return None


def _at(plain: Any, sizes: Mapping[Any, int]) -> Any:
    """Arguments with meta tensors instead of nodes, their sizes as numbers."""

    def value(leaf: Any) -> Any:
        val = leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf
        return pytree.tree_map(tensor, val)

    def tensor(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            shape = [int(number_at(size, sizes)) for size in leaf.shape]
            return torch.empty(shape, dtype=leaf.dtype, device="meta")
        return number_at(leaf, sizes)

    return pytree.tree_map(value, plain)
