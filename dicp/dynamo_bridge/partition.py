"""Graphs with sizes and numbers known only at run time: nodes that depend on them run eagerly.

Every node has a level. The compiled nodes of a level become one region, which runs before the eager
nodes of that level. A node has the lowest level that its operands allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dicp.dynamo_bridge.aot import GraphInfo
from dicp.effects import is_mutating, is_random
from dicp.target import Executable
from dicp.torch_private import free_symbols, free_unbacked_symbols, is_plain_symbol, pytree

_SYMBOLIC = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_LEAVES = ("placeholder", "get_attr")


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
    eager = {node for node in gm.graph.nodes if node.op not in _LEAVES and _depends_on_data(node)}
    eager.discard(gm.graph.output_node())
    if not eager:
        return []
    levels = _levels(gm.graph, eager)
    groups: dict[tuple[int, bool], list[fx.Node]] = {}
    for node, level in levels.items():
        groups.setdefault((level, node in eager), []).append(node)
    return [
        _part(gm, nodes, info, compiled=not is_eager)
        for (_, is_eager), nodes in sorted(groups.items(), key=lambda item: item[0])
    ]


def _depends_on_data(node: fx.Node) -> bool:
    return any(_is_unbacked(n.meta.get("val")) for n in (node, *node.all_input_nodes))


def _is_unbacked(val: Any) -> bool:
    leaves = pytree.tree_leaves(val)
    return any(isinstance(x, _SYMBOLIC) and free_unbacked_symbols(x) for x in leaves)


def _levels(graph: fx.Graph, eager: set[fx.Node]) -> dict[fx.Node, int]:
    """The level of each node; writes stay ordered with all nodes, random draws among themselves."""
    levels: dict[fx.Node, int] = {}
    writes: list[fx.Node] = []
    draws: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in (*_LEAVES, "output"):
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
        fx.GraphModule(gm, graph), GraphInfo(info.kind, static, len(outputs)), compiled,
        tuple(n.name for n in inputs), tuple(n.name for n in outputs),
    )  # fmt: skip


def _sizes(graph: fx.Graph, nodes: set[fx.Node], known: Sequence[fx.Node]) -> list[fx.Node]:
    """The graph's size inputs that define symbols in `nodes`, except those in `known`."""
    symbols = _symbols_of(nodes)
    sizes = [n for n in graph.find_nodes(op="placeholder") if is_plain_symbol(n.meta.get("val"))]
    return [n for n in sizes if n not in known and _symbols_of([n]) <= symbols]


def _symbols_of(nodes: Iterable[fx.Node]) -> set[Any]:
    leaves = [x for node in nodes for x in pytree.tree_leaves(node.meta.get("val"))]
    return {s for x in leaves if isinstance(x, _SYMBOLIC) for s in free_symbols(x)}


def _bound_by(inputs: Sequence[fx.Node]) -> set[Any]:
    """The symbols whose values are an input or a size of one."""
    values = [node.meta.get("val") for node in inputs]
    sizes = [s for v in values for s in (v.shape if isinstance(v, torch.Tensor) else (v,))]
    return {s for size in sizes if is_plain_symbol(size) for s in free_symbols(size)}


class PartitionedExecutable:
    """Runs the parts of a graph in order and frees each value after its last reader."""

    def __init__(
        self, gm: fx.GraphModule, parts: Sequence[Part], executables: Sequence[Executable]
    ) -> None:
        self._inputs = [n.name for n in gm.graph.find_nodes(op="placeholder")]
        self._outputs = [
            (n.name, None) if isinstance(n, fx.Node) else ("", n)
            for n in gm.graph.output_node().args[0]  # type: ignore[union-attr]
        ]
        kept = {name for name, _ in self._outputs}
        steps = []
        for part, run in zip(reversed(parts), reversed(executables), strict=True):
            dead = (set(part.inputs) | set(part.outputs)) - kept
            kept |= dead
            steps.append((part, run, sorted(dead)))
        self._steps = steps[::-1]

    def __call__(self, inputs: list[Any]) -> list[Any]:
        values = dict(zip(self._inputs, inputs, strict=True))
        inputs.clear()
        for part, run, dead in self._steps:
            given = [values[name] for name in part.inputs]
            values.update(zip(part.outputs, run(given), strict=True))
            for name in dead:
                del values[name]
        return [values[name] if name else value for name, value in self._outputs]
