"""Operators that depend on constants and frozen inputs alone run once, in graphs of their own.

The vendor's passes add operators that no ATen call asked for: conversions of weights to a memory
format, casts, filled constants. Those that read only values that never change between runs move
into graphs that run before the first one; their results are saved.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dicp.graphop.builder import Builder
from dicp.graphop.partition import Step
from dicp.graphop.program import LEAVES, Graph, Node, Result, Slot, Value


def static_nodes(
    graph: Graph, static: Collection[Slot], excluded: Collection[Node] = ()
) -> set[Node]:
    """The nodes of a graph that read only slots in `static`, and no sizes; without `excluded` nodes
    and all that read these."""
    found: set[Node] = set()
    constants: set[Node] = set()
    for node in graph.nodes:
        if node.kind == "const":
            constants.add(node)
        elif node.kind in LEAVES:
            if node.kind == "input" and node.attrs["bound"].slot in static:
                found.add(node)
        elif node not in excluded:
            sources = {value.node for value in node.operands()}
            if sources & found and sources <= found | constants:
                found.add(node)
    return found


def hoisted(
    builder: Builder, steps: Sequence[Step], static: Collection[Slot]
) -> tuple[list[Graph], list[Step]]:
    """The graphs to run once, and the steps of every run."""
    once: list[Graph] = []
    every: list[Step] = []
    for step in steps:
        graph = _split(builder, step, static, once) if isinstance(step, Graph) else step
        every.append(graph)
    return once, every


def _split(builder: Builder, graph: Graph, static: Collection[Slot], once: list[Graph]) -> Graph:
    returned = {result.value.node for result in graph.results}
    fixed = {n for n in static_nodes(graph, static, returned) if n.kind not in LEAVES}
    if not fixed:
        return graph
    crossing: dict[Value, Value] = {}
    results: list[Result] = []
    for node in graph.operators:
        if node in fixed:
            continue
        for value in node.operands():
            if value.node in fixed and value not in crossing:
                slot = Slot(f"kept{len(once)}_{len(crossing)}", builder.stored(value))
                crossing[value] = builder.received(value, slot)
                results.append(Result(value, slot, tuple(range(slot.fake.dim()))))
    moved = [node for node in graph.nodes if node in fixed]
    once.append(Graph(f"once{len(once)}", [*_leaves_of(moved, graph), *moved], results))
    rest = [node for node in graph.nodes if node not in fixed]
    for node in rest:
        node.rename(crossing)
    received = [value.node for value in crossing.values()]
    kept = [node for node in rest if node.kind not in LEAVES]
    return Graph(graph.name, [*received, *_leaves_of(kept, graph, graph.results), *kept],
                 graph.results)  # fmt: skip


def _leaves_of(
    operators: Sequence[Node], graph: Graph, results: Sequence[Result] = ()
) -> list[Node]:
    """The leaves of `graph` that some of its operators, or its results, read."""
    read = {value.node for node in operators for value in node.operands()}
    read |= {result.value.node for result in results}
    return [node for node in graph.nodes if node.kind in LEAVES and node in read]
