"""Frozen parameters: values that depend on them alone are computed once, before the first run.

The user promises with `freeze` that parameters and buffers keep their values. The pass splits the
graph into a part that reads only them (folded weights, layout conversions, packed constants) and
the rest, which takes that part's results as further inputs.
"""

from __future__ import annotations

from torch import fx

from dicp.dynamo_bridge.analysis.aliases import (
    alias_root,
    is_input,
    reachable,
    written_roots,
)
from dicp.dynamo_bridge.analysis.static import static_nodes
from dicp.dynamo_bridge.aot_graph import GraphInfo
from dicp.dynamo_bridge.passes.base import PassContext
from dicp.effects import is_mutating, is_random, is_view

FROZEN = "dicp_frozen"
"""Key in `node.meta` of an input that is a result of the part computed once."""


def split_frozen(
    gm: fx.GraphModule, context: PassContext
) -> tuple[fx.GraphModule, fx.GraphModule] | None:
    """The part computed once and the part computed on every run; None where nothing is frozen.

    Both take the graph's inputs; the second also takes the first one's results, after them.
    """
    border = _border(gm, context)
    if not border:
        return None
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    wanted = reachable(border, lambda n: n.all_input_nodes) | set(placeholders)
    for node in gm.graph.nodes:
        if node in wanted:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[n] for n in border))
    once = fx.GraphModule(gm, graph)

    last = placeholders[-1]
    for node in border:
        with gm.graph.inserting_after(last):
            last = gm.graph.placeholder(f"frozen_{node.name}")
        last.meta.update(node.meta)
        last.meta[FROZEN] = True
        node.replace_all_uses_with(last)
    gm.graph.eliminate_dead_code()
    return once, gm


def static_positions(rest: fx.GraphModule, info: GraphInfo) -> tuple[int, ...]:
    """The inputs of the second part that never change: parameters, and the first part's results."""
    placeholders = [n for n in rest.graph.nodes if n.op == "placeholder"]
    results = (k for k, n in enumerate(placeholders) if n.meta.get(FROZEN))
    return (*info.static_inputs, *results)


def _border(gm: fx.GraphModule, context: PassContext) -> list[fx.Node]:
    """Computed nodes that depend on parameters alone and are read by nodes that do not.

    Every run recomputes the graph's results, to which the caller may write, and values that depend
    on a buffer that the graph itself writes.
    """
    static = static_nodes(gm, context.static_inputs) - _returned(gm) - _written(gm)
    computed: set[fx.Node] = set()
    border = []
    for node in gm.graph.nodes:
        if node not in static or node.op != "call_function":
            continue
        if (
            is_random(node.target)
            or is_mutating(node.target)
            or not hasattr(node.meta.get("val"), "dtype")
        ):
            continue
        if not is_view(node.target) or any(n in computed for n in node.all_input_nodes):
            computed.add(node)
        if node in computed and any(u not in static for u in node.users):
            border.append(node)
    return border


def _returned(gm: fx.GraphModule) -> set[fx.Node]:
    """The graph's results, and every node that may share storage with them."""
    roots = {alias_root(node) for node in gm.graph.output_node().all_input_nodes}
    return {node for node in gm.graph.nodes if alias_root(node) in roots and not is_input(node)}


def _written(gm: fx.GraphModule) -> set[fx.Node]:
    """The inputs that the graph writes, and every node computed from them."""
    found = written_roots(gm.graph)
    for node in gm.graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found
