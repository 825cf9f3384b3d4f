"""Executables of several programs of a graph: partitioned, frozen, per set of sizes, interpreted.

Each is called with a list of inputs, which it may clear, and returns a sequence of outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from dicp.dynamo_bridge.partition import Part
from dicp.dynamo_bridge.specialize import Sizes, Sources, specialized
from dicp.dynamo_bridge.thresholds import MAX_SIZES
from dicp.serialize import bound_sizes
from dicp.specializations import Specializations
from dicp.target import Executable


def interpreted(gm: fx.GraphModule) -> Executable:
    """Runs the graph operator by operator."""
    gm.recompile()

    def run(inputs: list[Any]) -> Any:
        args = list(inputs)
        inputs.clear()
        return gm(*args)

    return run


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
        live = {name for name, _ in self._outputs}
        steps = []
        for part, run in zip(reversed(parts), reversed(executables), strict=True):
            dead = (set(part.inputs) | set(part.outputs)) - live
            live |= dead
            steps.append((part, run, sorted(dead)))
        self._steps = steps[::-1]

    def __call__(self, inputs: list[Any]) -> list[Any]:
        values = dict(zip(self._inputs, inputs, strict=True))
        inputs.clear()
        for part, run, dead in self._steps:
            arguments = [values[name] for name in part.inputs]
            values.update(zip(part.outputs, run(arguments), strict=True))
            for name in dead:
                del values[name]
        return [values[name] if name else value for name, value in self._outputs]


@dataclass
class FrozenExecutable:
    """Runs the first part once, keeps its results, and the second part on every call."""

    once: Executable
    rest: Executable
    results: list[Any] | None = field(default=None)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        if self.results is None:
            self.results = self.once(list(inputs))
        return self.rest([*inputs, *self.results])


class PerSizeExecutable:
    """Runs the program for the sizes of its inputs, compiled when they first occur.

    compile: makes an executable of `graph_for` these sizes.
    """

    def __init__(
        self, gm: fx.GraphModule, sources: Sources, compile: Callable[[Sizes], Executable]
    ) -> None:
        self._gm = gm
        self._sources = dict(sources)
        self._compile = compile
        self._programs: Specializations[Sizes, Executable] = Specializations(
            MAX_SIZES, map(str, sources)
        )

    def __call__(self, inputs: list[Any]) -> list[Any]:
        sizes = bound_sizes(self._sources.values(), inputs)
        return self._programs.find(sizes, lambda: self._compile(sizes))(inputs)

    def graph_for(self, sizes: Sizes) -> fx.GraphModule:
        """The graph specialized to these sizes."""
        return specialized(self._gm, dict(zip(self._sources, sizes, strict=True)))

    def keep(self, sizes: Sizes, program: Executable) -> None:
        """Use `program` for these sizes."""
        self._programs.keep(sizes, program)
