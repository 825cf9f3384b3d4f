"""What the partitioner must save when it splits a joint graph, and in which dtype."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from dicp.dynamo_bridge.analysis.aliases import alias_root
from dicp.dynamo_bridge.analysis.values import value_of
from dicp.torch_private import ATTENTION_FORWARD, do_not_recompute


def correct_log_sum_exps(graph: fx.Graph) -> None:
    """Infer the log-sum-exps of attention in float64, which backward reads, as float64.

    PyTorch 2.11 infers float32 for those of every dtype.
    """
    for attention in graph.find_nodes(op="call_function", target=ATTENTION_FORWARD):
        result, log_sum_exps = attention.meta["val"]
        if result.dtype is not torch.float64 or log_sum_exps.dtype is torch.float64:
            continue
        attention.meta["val"] = result, log_sum_exps.double()
        for user in attention.users:
            if user.target is operator.getitem and user.args[1] == 1:
                user.meta["val"] = attention.meta["val"][1]


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


def copy_overwritten_inputs(graph: fx.Graph, overwritten: Iterable[int]) -> None:
    """Have backward depend on copies of the inputs, given by index, that forward overwrites.

    The partitioner would save such an input and recompute values from it in backward, which
    reads it after forward has overwritten it.
    """
    placeholders = graph.find_nodes(op="placeholder")
    needed = _needed_by_backward(graph)
    for index in overwritten:
        source = placeholders[index]
        readers = [user for user in source.users if user in needed and _reads(user, source)]
        if not readers:
            continue
        with graph.inserting_after(placeholders[-1]):
            copy = graph.call_function(torch.ops.aten.clone.default, (source,))
        copy.meta["val"] = source.meta["val"].clone()
        do_not_recompute(copy)
        for user in readers:
            user.replace_input_with(source, copy)


def _reads(node: fx.Node, source: fx.Node) -> bool:
    """Whether `node` reads the value of `source`, not its size alone, and does not overwrite it."""
    if not isinstance(node.meta.get("val"), torch.Tensor | tuple | list):
        return False
    return node.target is not torch.ops.aten.copy_.default or node.args[0] is not source


def _needed_by_backward(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on gradients of outputs, and the values that these depend on."""
    inputs = graph.find_nodes(op="placeholder")
    backward = {node for node in inputs if node.name.startswith("tangents")}
    for node in graph.nodes:
        if node.op == "call_function" and not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not backward.isdisjoint(node.users):
            backward.add(node)
    return backward
