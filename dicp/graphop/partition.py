"""Partition of a pool into as few graphs as the dependencies allow, with eager calls between them.

Graph operators run in even phases, eager calls in odd ones; each runs in the earliest phase that
its operands allow, so that operators which do not depend on each other share a phase. All graph
operators of a phase become one graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dicp.graphop.builder import Builder
from dicp.graphop.program import (
    LEAVES,
    EagerCall,
    Graph,
    IndexCheck,
    Item,
    Node,
    Operand,
    Restride,
    Result,
    Slot,
    Value,
    View,
)

Step = Graph | EagerCall | View | Restride | IndexCheck


def remove_dead(items: Sequence[Item], outputs: Sequence[object]) -> list[Item]:
    """The items that an output or a call with side effects depends on."""
    wanted: set[object] = {o for o in outputs if isinstance(o, Slot)}
    kept: list[Item] = []
    for item in reversed(items):
        if _is_needed(item, wanted):
            kept.append(item)
            wanted.update(_reads(item))
    return kept[::-1]


def _is_needed(item: Item, wanted: set[object]) -> bool:
    if isinstance(item, Node):
        return item in wanted
    if isinstance(item, EagerCall):
        return item.mutates or any(out in wanted for out in item.outs)
    if isinstance(item, IndexCheck) or isinstance(item, Result) and item.placement != "fresh":
        return True
    return item.slot in wanted


def _reads(item: Item) -> list[object]:
    if isinstance(item, Node):
        bound = item.attrs.get("bound")
        own = [v.node for v in item.operands()]
        return [*own, *item.after, *([bound.slot] if bound else [])]
    if isinstance(item, EagerCall):
        return list(item.reads)
    return [item.value.node] if isinstance(item, Result) else [item.source]


class Partition:
    """Assigns phases and collects the steps of the program."""

    def __init__(self, builder: Builder, items: Sequence[Item]) -> None:
        self.builder = builder
        self.items = items
        self.phase: dict[object, int] = {}
        self._random = -1
        self._crossing: dict[Value, Slot] = {}
        self._names = 0

    def steps(self) -> list[Step]:
        """Graphs and eager steps, in the order they run."""
        for item in self.items:
            self._place(item)
        last = max(self.phase.values(), default=0)
        graphs: dict[int, list[Node]] = {}
        eager: dict[int, list[Step]] = {}
        results: dict[int, list[Result]] = {}
        for item in self.items:
            if isinstance(item, Node) and item.kind in LEAVES:
                continue
            phase = self.phase[item]
            if isinstance(item, Node):
                graphs.setdefault(phase, []).append(item)
            elif isinstance(item, Result):
                results.setdefault(phase, []).append(item)
            else:
                eager.setdefault(phase, []).append(item)
        steps: list[Step] = []
        made = {p: _Cut(self, p, results).nodes(graphs.get(p, [])) for p in
                sorted({*graphs, *results})}  # fmt: skip
        for phase in range(-1, last + 1):
            if phase in made:
                steps.append(Graph(f"graph{self._number()}", made[phase], results[phase]))
            steps += eager.get(phase, [])
        return steps

    def _number(self) -> int:
        self._names += 1
        return self._names - 1

    def _place(self, item: Item) -> None:
        sources = [self.phase.get(read, -2) for read in _reads(item)]
        if isinstance(item, Node):
            if item.kind in LEAVES:
                self.phase[item] = max(sources, default=-2)
            else:
                self.phase[item] = _next(max(sources, default=0), even=True)
            return
        if isinstance(item, Result):
            self.phase[item] = _next(sources[0], even=True)
            if item.placement == "fresh":
                self.phase[item.slot] = self.phase[item]
            return
        earliest = _next(max(sources, default=-2), even=False)
        if isinstance(item, EagerCall):
            if item.mutates:
                earliest = max(earliest, _next(max(self.phase.values(), default=-2), even=False))
            if item.random:
                earliest = self._random = max(earliest, self._random)
            for slot in item.outs:
                self.phase[slot] = earliest
        elif not isinstance(item, IndexCheck):
            self.phase[item.slot] = earliest
        self.phase[item] = earliest

    def slot_of(self, value: Value, results: dict[int, list[Result]]) -> Slot:
        """The tensor in which a value is passed to a later graph."""
        if value not in self._crossing:
            slot = Slot(f"x{len(self._crossing)}", value.fake)
            order = tuple(range(value.ndim))
            results.setdefault(self.phase[value.node], []).append(Result(value, slot, order))
            self._crossing[value] = slot
        return self._crossing[value]


def _next(phase: int, even: bool) -> int:
    phase = max(phase, 0 if even else -1)
    return phase if (phase % 2 == 0) == even else phase + 1


class _Cut:
    """One graph's own copy of the leaves it reads, and inputs for values of earlier graphs."""

    def __init__(self, partition: Partition, phase: int, results: dict[int, list[Result]]) -> None:
        self.partition = partition
        self.phase = phase
        self.results = results
        self.leaves: dict[object, Value] = {}
        self.made: list[Node] = []

    def nodes(self, operators: Sequence[Node]) -> list[Node]:
        """`operators` with their operands in this graph, after the leaves they read."""
        for node in operators:
            node.inputs = {port: self._operand(operand) for port, operand in node.inputs.items()}
        for k, result in enumerate(self.results.get(self.phase, ())):
            value = self._value(result.value)
            self.results[self.phase][k] = replace(result, value=value)
        return [*self.made, *operators]

    def _operand(self, operand: Operand) -> Operand:
        if isinstance(operand, Value):
            return self._value(operand)
        return tuple(self._value(value) for value in operand)

    def _value(self, value: Value) -> Value:
        if value.node.kind in LEAVES:
            return self._leaf(value)
        if self.partition.phase[value.node] == self.phase:
            return value
        if value not in self.leaves:
            slot = self.partition.slot_of(value, self.results)
            leaf = self.partition.builder.input(slot, tuple(range(value.ndim)))
            self.leaves[value] = leaf
            self.made.append(leaf.node)
        return self.leaves[value]

    def _leaf(self, value: Value) -> Value:
        if value.node not in self.leaves:
            node = value.node
            copy = Node(node.name, node.kind, {}, node.attrs, node.origin)
            copy.outputs.append(Value(copy, 0, value.fake, value.known))
            self.leaves[node] = copy.outputs[0]
            self.made.append(copy)
        return self.leaves[value.node]
