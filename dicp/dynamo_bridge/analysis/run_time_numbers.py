"""Numbers that are read from tensors while a graph runs."""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten

_NUMBERS = (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat)


def is_number(node: fx.Node) -> bool:
    """Whether a node computes one number, symbolic or known."""
    return isinstance(node.meta.get("val"), _NUMBERS)


class RunTimeNumbers:
    """The nodes that read a number from a tensor, compute with it, or check it.

    What a program checks may make the number known when the graph is compiled. The check still has
    to read it.
    """

    def __init__(self) -> None:
        self._nodes: set[fx.Node] = set()

    def includes(self, node: fx.Node) -> bool:
        """Whether a node is one of them; asked of a graph's nodes in their order."""
        if node.meta.get("val") is not None and not is_number(node):
            return False
        reads = node.target is aten._local_scalar_dense.default
        if not reads and self._nodes.isdisjoint(node.all_input_nodes):
            return False
        self._nodes.add(node)
        return True
