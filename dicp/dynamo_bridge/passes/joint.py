"""Rewrites of the joint graph before it is split: common subexpressions, copies, comparisons."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from dicp import torch_private
from dicp.dynamo_bridge.analysis.inference import difference, value_of
from dicp.dynamo_bridge.provenance import absorb
from dicp.effects import is_view

_UNINITIALIZED = frozenset(
    {
        torch.ops.aten.empty,
        torch.ops.aten.empty_like,
        torch.ops.aten.empty_permuted,
        torch.ops.aten.empty_strided,
        torch.ops.aten.new_empty,
        torch.ops.aten.new_empty_strided,
    }
)


def merge_equal_nodes(graph: fx.Graph) -> bool:
    """Merges nodes that compute the same value. Returns whether any were merged.

    The graph is functional: it writes to its inputs at most. Not merged: random and uninitialized
    values, operators that write to a tensor, nested graphs, values that depend on data, and tensors
    that share memory with an output (eager returns separate ones). Reads on different sides of a
    write are different values.
    """
    kept_storages = _storages(graph.output_node().all_input_nodes)
    first: dict[Any, fx.Node] = {}
    writes = 0
    merged = False
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if _writes(node):
            writes += 1
        if not _mergeable(node) or _storage(node) in kept_storages:
            continue
        key = (writes, *_computation(node))
        try:
            twin = first.setdefault(key, node)
        except TypeError:  # an argument without a hash
            continue
        if twin is not node:
            absorb(twin, node)
            node.replace_all_uses_with(twin)
            graph.erase_node(node)
            merged = True
    return merged


def drop_copies(graph: fx.Graph) -> bool:
    """Replaces copies of the same layout by their source. Returns whether there were any.

    Otherwise both might be saved for backward. The graph is functional, so nothing writes to a
    computed tensor; tensors that share memory with an input or an output stay.
    """
    seen = _storages([*graph.find_nodes(op="placeholder"), *graph.output_node().all_input_nodes])
    dropped = False
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        (source,) = node.args
        values = source.meta.get("val"), node.meta.get("val")
        if difference(*values) is None and seen.isdisjoint(_storages([source, node])):
            absorb(source, node)
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            dropped = True
    return dropped


def keep_compared(graph: fx.Graph) -> None:
    """Has the partitioner save floats that are compared for equality, or the comparison's result.

    The gradient of an extremum tests which elements equal it. An element that backward recomputes,
    in a differently fused kernel, may differ from the extremum in its last bit: then none would be
    equal, and the gradient would be 0 / 0.
    """
    for target in (torch.ops.aten.eq.Tensor, torch.ops.aten.ne.Tensor):
        for node in graph.find_nodes(op="call_function", target=target):
            for compared in node.all_input_nodes:
                if value_of(compared).is_floating_point():
                    torch_private.do_not_recompute(_viewed(compared))


def _viewed(node: fx.Node) -> fx.Node:
    """The tensor that `node` views, or `node` itself."""
    while is_view(node.target):
        node = node.all_input_nodes[0]
    return node


def _computation(node: fx.Node) -> tuple[Any, ...]:
    """A key for what `node` computes, with types: 1, 1.0 and True are equal but not the same."""
    leaves, spec = torch_private.pytree.tree_flatten((node.args, node.kwargs))
    return node.target, tuple(map(_plain, leaves)), tuple(map(type, leaves)), str(spec)


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
        return leaf.node.expr
    return repr(leaf) if isinstance(leaf, float | complex) else leaf  # 0.0 is not -0.0


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch_private.OpOverload) and node.target._schema.is_mutable


def _mergeable(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, torch_private.HigherOrderOperator):
        return False
    if isinstance(target, torch_private.OpOverload):
        if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
            return False
        if target.overloadpacket in _UNINITIALIZED:
            return False
        if target.namespace not in ("aten", "prims"):
            return False
    value = node.meta.get("val")
    symbolic = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
    return not (symbolic and torch_private.free_unbacked_symbols(value))


def _storages(nodes: Iterable[fx.Node]) -> set[Any]:
    return {storage for node in nodes if (storage := _storage(node)) is not None}


def _storage(node: fx.Node) -> Any:
    """The storage of a node's tensor; None for other values."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return torch_private.StorageWeakRef(value.untyped_storage())
    except NotImplementedError:  # sparse tensors have several
        return None
