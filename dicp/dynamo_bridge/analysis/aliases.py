"""Aliases and effects in a graph: which nodes share storage with what the caller gets or gives.

A tensor that the caller sees may share storage with another one only where it did before: else a
write to one, by the caller or by the graph, would show in the other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import fx

from dicp.effects import is_view, may_write, op_name
from dicp.torch_private import expression_of

LEAVES = ("placeholder", "get_attr")


def is_input(node: fx.Node) -> bool:
    return node.op in LEAVES


def alias_root(node: fx.Node) -> fx.Node:
    """The node whose storage `node` may share: itself unless it is a chain of views."""
    while (source := _viewed(node)) is not None:
        node = source
    return node


def _viewed(node: fx.Node) -> fx.Node | None:
    """The node that `node` views, or takes as an item of a list of views (those of a split)."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    return source if is_view(source.target if _takes_item(node) else node.target) else None


def _takes_item(node: fx.Node) -> bool:
    return node.target is operator.getitem


def written_roots(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose storage an operator of the graph may write."""
    return {
        alias_root(argument)
        for node in graph.nodes
        if node.op == "call_function" and may_write(node.target)
        for argument in node.all_input_nodes
    }


def shared_by_results(root: fx.Node) -> bool:
    """Whether several results of the graph share the storage of `root`, which is no view."""
    sharing = reachable([root], lambda n: (user for user in n.users if _viewed(user) is n))
    return sum(any(user.op == "output" for user in node.users) for node in sharing) > 1


def reachable(
    start: Collection[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]
) -> set[fx.Node]:
    """The nodes of `start`, and those that repeated steps lead to."""
    found, waiting = set(start), list(start)
    while waiting:
        new = [node for node in step(waiting.pop()) if node not in found]
        found.update(new)
        waiting += new
    return found


class Aliases:
    """The nodes whose storage the caller may get, kept up to date while nodes are replaced.

    separate: whether a tensor must not start to share storage with any input or result, as in a
        joint graph: the caller may write to forward's results before backward reads what was saved.
    """

    def __init__(self, graph: fx.Graph, separate: bool = False) -> None:
        self._returned = set(graph.output_node().all_input_nodes)
        self._escaping = _chains(self._returned)
        self._separate = separate
        self._written = written_roots(graph)
        self._read_by_offset = any(
            node.op == "call_function" and op_name(node.target).startswith("as_strided")
            for node in graph.nodes
        )

    def stays_alone(self, node: fx.Node) -> bool:
        """Whether no other node may be replaced by `node`, nor `node` by another."""
        return self._separate and node in self._escaping

    def may_merge(self, node: fx.Node, equal: fx.Node) -> bool:
        """Whether readers of `node` may read `equal`, which computes the same, instead."""
        return node not in self._escaping or equal not in self._escaping

    def may_drop_copy(self, copy: fx.Node, source: fx.Node) -> bool:
        """Whether readers of a fresh copy may read its source instead."""
        root = alias_root(source)
        if root in self._written:
            return False
        if self._read_by_offset and (
            is_input(root) or storage_offset(copy) != storage_offset(source)
        ):  # nothing guards an input's offset
            return False
        is_seen = root in self._escaping or is_input(root)
        if self._separate:
            return not is_seen and copy not in self._escaping
        return not is_seen or copy not in self._escaping

    def may_drop_view(self, view: fx.Node, source: fx.Node) -> bool:
        """Whether readers of a view of all of `source` may read `source` instead."""
        return view not in self._returned or not (source in self._returned or is_input(source))

    def replaced(self, node: fx.Node, new: fx.Node) -> None:
        """Note that readers of `node` now read `new`."""
        if node in self._returned:
            self._returned.add(new)
        if node in self._escaping:
            self._escaping |= _chains([new])


def storage_offset(node: fx.Node) -> Any:
    """Where in its storage a tensor begins, which `as_strided` counts from."""
    value = node.meta.get("val")
    return expression_of(value.storage_offset()) if isinstance(value, torch.Tensor) else None


def _chains(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The tensors among `nodes` with everything that they view.

    An operator with several results counts as one of them: merged calls would share all of them.
    """
    found = set()
    for node in nodes:
        source = node if isinstance(node.meta.get("val"), torch.Tensor) else None
        while source is not None:
            found.add(source)
            if _takes_item(source):
                found.update(source.all_input_nodes)
            source = _viewed(source)
    return found
