"""Running compiled graphs of a program in float64, and judging their kernels as they pass by.

While active, each graph gives the program what its captured operators give in float64, rounded to
the dtypes that the graph promises. The compiled graph's own kernels are judged, and their inputs
captured, on the first call of each graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import fx

from dicp.dynamo_bridge.inspection import InspectedGraph, inspected_by
from dicp.op_tools.autocompare import OpAutoCompare
from dicp.op_tools.capture import CAPTURES, OpCapture
from dicp.op_tools.compiled import COMPILED, copied_inputs
from dicp.op_tools.draws import GeneratorStates
from dicp.op_tools.frame import FRAME
from dicp.op_tools.graph_reference import Evaluator, named_inputs, placeholders
from dicp.origin import user_line
from dicp.torch_private import OpOverload, schema_of

CAPTURED_BYTES = 1 << 30
"""Of all kernels' inputs and results together."""


@dataclass
class Judged:
    """What the graphs of a program hold, and what is wrong with their kernels taken alone."""

    operators: dict[str, str] = field(default_factory=dict)
    """Operator -> the user's line that it was first called at."""
    kernels: dict[str, list[str]] = field(default_factory=dict)
    """Kernel -> its operators."""
    wrong: dict[str, float] = field(default_factory=dict)
    """Operator -> its largest error alone, where the fp64 rule does not hold."""
    captures: dict[str, str] = field(default_factory=dict)
    """Kernel -> the folder with its reproducer."""
    narrowest: str = ""
    """The floating dtype with the fewest digits among the graphs' values."""

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Judged:
        return cls(**plain)


class Float64Graphs:
    """An inspector of compiled graphs; nothing of it runs unless it is active."""

    def __init__(self, folder: Path) -> None:
        self.judged = Judged()
        self._seen: WeakSet[InspectedGraph] = WeakSet()
        self._compare = OpAutoCompare(quiet=True, rule="fp64")
        self._capture = OpCapture(quiet=True, folder=folder, max_bytes=CAPTURED_BYTES)

    @contextlib.contextmanager
    def active_if(self, wanted: bool) -> Iterator[None]:
        if not wanted:
            yield
            return
        with inspected_by(self):
            yield

    def active(self) -> bool:
        return True

    def outside(self) -> contextlib.AbstractContextManager[None]:
        return FRAME.unhooked()

    def run(self, graph: InspectedGraph, inputs: list[Any]) -> Any:
        with FRAME.unhooked(), torch.no_grad():
            if graph not in self._seen:
                self._seen.add(graph)
                self._inspect(graph, inputs)
            return float64_outputs(graph, inputs)

    def _inspect(self, graph: InspectedGraph, inputs: list[Any]) -> None:
        for node in graph.captured.graph.nodes:
            if isinstance(node.target, OpOverload):
                self.judged.operators.setdefault(str(node.target), user_line(node) or "")
                self._note_dtype(node)
        for kernel in graph.kernels:
            names = [origin.op for origin in kernel.origins]
            self.judged.kernels.setdefault(kernel.name, list(dict.fromkeys(names)))
        states = GeneratorStates.of(inputs)
        before = len(self._compare.results), len(self._capture.saved)
        given = copied_inputs(graph, inputs, every=True)
        outputs = graph.executable(copied_inputs(graph, inputs, every=True))
        states.restore()
        COMPILED.inspect(graph, given, outputs, [self._compare, self._capture])
        states.restore()
        for record in self._compare.results[before[0] :]:
            if record.kind == "operator" and not record.ok:
                worst = max(c.max_abs for c in record.comparisons)
                known = self.judged.wrong.get(record.operator, 0.0)
                self.judged.wrong[record.operator] = max(known, worst)
        for path in self._capture.saved[before[1] :]:
            name = path.parts[path.parts.index(CAPTURES) + 1]
            self.judged.captures.setdefault(name, str(path.parent))

    def _note_dtype(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
            known = getattr(torch, self.judged.narrowest or "float64")
            if torch.finfo(value.dtype).eps > torch.finfo(known).eps:
                self.judged.narrowest = str(value.dtype).removeprefix("torch.")


def float64_outputs(graph: InspectedGraph, inputs: list[Any]) -> list[Any]:
    """The results of the captured graph in float64, rounded; what it overwrites is overwritten."""
    given, real = placeholders(graph.captured), named_inputs(graph.captured, inputs)
    everything = [node.name for node in graph.captured.graph.nodes]
    wide = Evaluator(graph.captured, real, everything, widen=True)
    for node in graph.captured.graph.nodes:
        if node.op != "call_function":
            continue
        value = wide.value(node)  # in the graph's order, so that random operators draw in it
        schema = schema_of(node.target) if isinstance(node.target, OpOverload) else None
        if schema is not None and schema.is_mutable and node.args[0] in given:
            real[node.args[0].name].copy_(value)
    wanted: Any = graph.captured.graph.output_node().args[0]
    return [_rounded(node, wide) if isinstance(node, fx.Node) else node for node in wanted]


def _rounded(node: fx.Node, wide: Evaluator) -> Any:
    value, promised = wide.value(node), node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(promised, torch.Tensor):
        return value
    rounded = value.to(promised.dtype)
    if promised.layout != torch.strided or rounded.stride() == promised.stride():
        return rounded
    strides = [int(s) for s in promised.stride()]
    return torch.empty_strided(rounded.shape, strides, dtype=rounded.dtype).copy_(rounded)
