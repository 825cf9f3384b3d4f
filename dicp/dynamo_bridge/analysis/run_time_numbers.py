"""Numbers that are read from tensors while a graph runs."""

from __future__ import annotations

import torch
from torch import fx

from dicp.target import is_number

aten = torch.ops.aten


class RunTimeNumbers:
    """The nodes that read a number from a tensor, compute with it, or check it.

    What a program checks may make the number known when the graph is compiled. The check still has
    to read it.
    """

    def __init__(self) -> None:
        self._nodes: set[fx.Node] = set()

    def includes(self, node: fx.Node) -> bool:
        """Whether a node is one of them; asked of a graph's nodes in their order."""
        value = node.meta.get("val")
        if value is not None and not is_number(value):
            return False
        reads = node.target is aten._local_scalar_dense.default
        if not reads and self._nodes.isdisjoint(node.all_input_nodes):
            return False
        self._nodes.add(node)
        return True
