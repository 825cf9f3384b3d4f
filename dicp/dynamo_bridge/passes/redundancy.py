"""Redundant nodes: equal computations, copies of unwritten tensors, calls without readers."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from dicp.dynamo_bridge.analysis.aliases import Aliases
from dicp.dynamo_bridge.analysis.values import difference
from dicp.dynamo_bridge.provenance import absorb
from dicp.effects import is_mutating, is_pure, is_removable
from dicp.torch_private import depends_on_data, expression_of


class EqualNodes:
    """Finds, in graph order, the earlier node that computes the same value as a node.

    Not equal: random and uninitialized values, nested graphs, values that depend on data, and reads
    on different sides of a write.
    """

    def __init__(self, aliases: Aliases) -> None:
        self._aliases = aliases
        self._first: dict[Any, fx.Node] = {}
        self._writes = 0

    def earlier(self, node: fx.Node) -> fx.Node | None:
        """The earlier node that readers of `node` may read instead; None if there is none."""
        if is_mutating(node.target):
            self._writes += 1
        if not is_pure(node.target) or self._aliases.stays_alone(node):
            return None
        key = (node.target, self._writes, _key(node.args), _key(node.kwargs))
        try:
            first = self._first.setdefault(key, node)
        except TypeError:  # an argument that cannot be hashed
            return None
        if first is node or not self._aliases.may_merge(node, first):
            return None
        return None if depends_on_data(node.meta.get("val")) else first


def _key(argument: Any) -> Any:
    """A hashable form in which 1, 1.0, True, 0.0 and -0.0 all differ."""
    if isinstance(argument, fx.Node):
        return argument
    if isinstance(argument, (list, tuple)):
        return tuple([_key(item) for item in argument])
    if isinstance(argument, dict):
        return tuple([(name, _key(item)) for name, item in sorted(argument.items())])
    if isinstance(argument, (float, complex)):
        return type(argument), repr(argument)
    return type(argument), expression_of(argument)


def merge_equal_nodes(graph: fx.Graph) -> bool:
    """Merge nodes of a joint graph that compute the same value; true if any were merged."""
    equal = EqualNodes(Aliases(graph, separate=True))
    merged = False
    for node in graph.nodes:
        if node.op == "call_function" and (earlier := equal.earlier(node)) is not None:
            _replace(node, earlier)
            merged = True
    return merged


def drop_copies(graph: fx.Graph) -> bool:
    """Replace copies in a joint graph that are laid out as their source; true if there were any.

    Otherwise both might be saved for backward.
    """
    aliases = Aliases(graph, separate=True)
    dropped = False
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        (source,) = node.args
        values = source.meta.get("val"), node.meta.get("val")
        if difference(*values) is None and aliases.may_drop_copy(node, source):
            _replace(node, source)
            dropped = True
    return dropped


def _replace(node: fx.Node, new: fx.Node) -> None:
    absorb(new, node)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def remove_dead(graph: fx.Graph) -> bool:
    """Erase the calls without users and without side effects."""
    removed = False
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            if node.op == "get_attr" or is_removable(node.target):
                graph.erase_node(node)
                removed = True
    return removed
