"""Static values: parameters, buffers, and what is computed from them alone."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

STATIC = "dicp_static"
"""Key in `node.meta` of a value that depends on parameters alone, which a target may cache."""


def static_nodes(gm: fx.GraphModule, static_inputs: Iterable[int]) -> set[fx.Node]:
    """Placeholders of parameters and buffers, and what is computed from them alone."""
    static: set[fx.Node] = set()
    placeholders = gm.graph.find_nodes(op="placeholder")
    static.update(placeholders[index] for index in static_inputs)
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            static.add(node)
        elif node.op == "call_function" and node.all_input_nodes:
            if static.issuperset(node.all_input_nodes):
                static.add(node)
    return static
