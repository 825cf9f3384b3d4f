"""Graphs with sizes and numbers known only at run time: nodes that depend on them run eagerly.

Every node has a level. The compiled nodes of a level become one region, which runs before the eager
nodes of that level. A node has the lowest level that its operands allow. An item of several
results (a `getitem`) belongs to the part that computes them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dicp.config import Config
from dicp.dynamo_bridge.analysis.aliases import LEAVES
from dicp.dynamo_bridge.analysis.run_time_numbers import RunTimeNumbers
from dicp.dynamo_bridge.aot_graph import GraphInfo
from dicp.effects import is_mutating, is_random, op_name
from dicp.operator_choice import check_eager
from dicp.origin import origin_of
from dicp.torch_private import (
    OpOverload,
    depends_on_data,
    free_symbols,
    is_plain_symbol,
    symbols_in,
)

_NO_CALLS = (*LEAVES, "output")
DATA_DEPENDENT = "depends on a size or number known only at run time"


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a graph as a graph of its own; node names identify its inputs and outputs."""

    gm: fx.GraphModule
    info: GraphInfo
    compiled: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def split_data_dependent(gm: fx.GraphModule, info: GraphInfo) -> list[Part]:
    """The parts of a graph in execution order; none where no node depends on data."""
    read = RunTimeNumbers()
    nodes = [node for node in gm.graph.nodes if node.op not in _NO_CALLS]
    eager = {node for node in nodes if read.includes(node) or _depends_on_data(node)}
    if not eager:
        return []
    eager |= {user for node in eager for user in node.users if user.target is operator.getitem}
    levels = _levels(gm.graph, eager)
    groups: dict[tuple[int, bool], list[fx.Node]] = {}
    for node, level in levels.items():
        groups.setdefault((level, node in eager), []).append(node)
    return [
        _part(gm, nodes, info, compiled=not is_eager)
        for (_, is_eager), nodes in sorted(groups.items(), key=lambda item: item[0])
    ]


def _depends_on_data(node: fx.Node) -> bool:
    return any(depends_on_data(n.meta.get("val")) for n in (node, *node.all_input_nodes))


def is_eager_operator(node: fx.Node) -> bool:
    """Whether a node of an eager part computes: neither a size nor a check of one."""
    name = op_name(node.target)
    return isinstance(node.target, OpOverload) and not name.startswith(("sym_", "_assert"))


def check_eager_parts(parts: Sequence[Part], config: Config, target: str) -> None:
    """Raises UnsupportedOperatorError where a part that runs eagerly must not."""
    nodes = (n for part in parts if not part.compiled for n in part.gm.graph.nodes)
    calls = [node for node in nodes if is_eager_operator(node)]
    for node in calls:
        others = [str(origin_of(other)) for other in calls if other is not node]
        rest = f" (as do {', '.join(others)})" if others else ""
        check_eager(node, DATA_DEPENDENT + rest, config, target)


def _levels(graph: fx.Graph, eager: set[fx.Node]) -> dict[fx.Node, int]:
    """The level of each node; writes stay ordered with all nodes, random draws among themselves."""
    levels: dict[fx.Node, int] = {}
    writes: list[fx.Node] = []
    draws: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in _NO_CALLS:
            continue
        before = [n for n in node.all_input_nodes if n in levels] + writes
        if is_mutating(node.target):
            before = list(levels)
            writes = [node]
        if is_random(node.target):
            before += draws
            draws = [node]
        levels[node] = max(
            (levels[n] + (n in eager and node not in eager) for n in before), default=0
        )
    return levels


def _part(gm: fx.GraphModule, nodes: Sequence[fx.Node], info: GraphInfo, compiled: bool) -> Part:
    own = set(nodes)
    given = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in own)
    constants = [n for n in given if n.op == "get_attr"]
    inputs = [n for n in given if n.op != "get_attr"]
    compiled = compiled and any(isinstance(n.meta.get("val"), torch.Tensor) for n in nodes)
    if compiled:
        inputs += _sizes(gm.graph, {*nodes, *inputs}, inputs)
        compiled = _symbols_of([*nodes, *inputs]) <= _bound_by(inputs)
    outputs = [n for n in nodes if any(user not in own for user in n.users)]

    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in (*constants, *nodes):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[n] for n in outputs))
    placeholders = gm.graph.find_nodes(op="placeholder")
    fixed = {placeholders[k] for k in info.static_inputs}
    static = tuple(k for k, node in enumerate(inputs) if node in fixed)
    return Part(
        fx.GraphModule(gm, graph), GraphInfo(info.kind, static), compiled,
        tuple(n.name for n in inputs), tuple(n.name for n in outputs),
    )  # fmt: skip


def _sizes(graph: fx.Graph, nodes: set[fx.Node], known: Sequence[fx.Node]) -> list[fx.Node]:
    """The graph's size inputs that define symbols in `nodes`, except those in `known`."""
    symbols = _symbols_of(nodes)
    sizes = [n for n in graph.find_nodes(op="placeholder") if is_plain_symbol(n.meta.get("val"))]
    return [n for n in sizes if n not in known and _symbols_of([n]) <= symbols]


def _symbols_of(nodes: Iterable[fx.Node]) -> set[Any]:
    return symbols_in([node.meta.get("val") for node in nodes])


def _bound_by(inputs: Sequence[fx.Node]) -> set[Any]:
    """The symbols whose values are an input or a size of an input."""
    values = [node.meta.get("val") for node in inputs]
    sizes = [s for v in values for s in (v.shape if isinstance(v, torch.Tensor) else (v,))]
    return {s for size in sizes if is_plain_symbol(size) for s in free_symbols(size)}
