"""The outline of a graph-operator program: its operators and calls, and the values between them.

The vendor's compiler plans the memory inside of a graph; there, a value counts as alive from the
operator that computes it to the last one that reads it, in the order of the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dicp.graphop.assemble import plain_size
from dicp.graphop.program import LEAVES, Graph, GraphProgram, Node, Value, node_text
from dicp.outline import Access, MemoryOwner, Outline, OutlineStep, StepKind, Tensor
from dicp.serialize import evaluate_size


def outline(program: GraphProgram, sizes: Mapping[str, int]) -> Outline:
    """The outline of a program where its symbols have `sizes`.

    Raises NameError for a size that is known only at run time.
    """
    return _Outliner(program, sizes).outline()


class _Outliner:
    def __init__(self, program: GraphProgram, sizes: Mapping[str, int]) -> None:
        self.program, self.sizes = program, sizes
        self.steps: list[OutlineStep] = []
        self.rows: list[dict[str, Any]] = []
        """The fields of each Tensor of the outline."""
        self.slots: dict[int, int] = {}
        """Slot of the program -> number of its tensor; a view has that of its base."""

    def outline(self) -> Outline:
        plain = self.program.serialized
        for slot in plain["inputs"]:
            if slot is not None:
                self._slot(slot, "caller")
        for slot in plain["constants"]:
            self._slot(int(slot), "constant")
        graphs = iter(self.program.graphs)
        for launch, step in enumerate((*plain["once"], *plain["steps"])):
            if "graph" in step:
                self._graph(next(graphs), step, launch)
            elif "call" in step:
                self._call(step, launch)
            elif "restride" in step:
                self._restride(step, launch)
            elif "view" in step:
                self.slots[step["into"]] = self._slot(step["view"], "call")
        for slot in _slots_of(plain["outputs"]):
            self.rows[self._slot(slot, "call")]["result"] = True
        return Outline(self.steps, [self._tensor(row) for row in self.rows])

    def _tensor(self, row: Mapping[str, Any]) -> Tensor:
        outlives = row["result"] or row["place"] in ("caller", "constant")
        return Tensor(**{**row, "last": len(self.steps) if outlives else row["last"]})

    def _number(self, name: str, dtype: str, shape: Iterable[Any], place: MemoryOwner) -> int:
        sizes = tuple(evaluate_size(size, self.sizes) for size in shape)
        count = torch.Size(sizes).numel() if sizes else 1
        nbytes = count * getattr(torch, dtype).itemsize if dtype else 0
        first = -1 if place in ("caller", "constant") else len(self.steps)
        self.rows.append({
            "name": name, "dtype": dtype, "shape": sizes, "nbytes": nbytes, "place": place,
            "first": first, "last": max(first, 0), "result": False,
        })  # fmt: skip
        return len(self.rows) - 1

    def _slot(self, slot: int, place: MemoryOwner) -> int:
        if slot not in self.slots:
            row = self.program.serialized["slots"][slot]
            number = self._number(row["name"], row.get("dtype", ""), row.get("shape", ()), place)
            self.slots[slot] = number
        return self.slots[slot]

    # ---- steps ----------------------------------------------------------------------------------

    def _add(
        self, name: str, kind: StepKind, launch: int, reads: Iterable[int], writes: Iterable[int],
        origin: Any, text: str = "", group: str = "",
    ) -> None:  # fmt: skip
        read, written = ([Access(n, self.rows[n]["nbytes"]) for n in dict.fromkeys(numbers)]
                         for numbers in (reads, writes))  # fmt: skip
        for access in (*read, *written):
            self.rows[access.tensor]["last"] = len(self.steps)
        origins = (origin,) if origin is not None else ()
        made = OutlineStep(name, kind, launch, tuple(read), tuple(written), origins, text, group)
        self.steps.append(made)

    def _call(self, step: Mapping[str, Any], launch: int) -> None:
        reads = [self._slot(s, "call") for s in _slots_of((step["args"], step["kwargs"]))]
        writes = [self._slot(slot, "call") for slot in step["outs"]]
        name = step["call"] if isinstance(step["call"], str) else "subgraph"
        self._add(name, "eager", launch, reads, writes, step["origin"])

    def _restride(self, step: Mapping[str, Any], launch: int) -> None:
        source = self._slot(step["restride"], "call")
        self._add("copy", "copy", launch, [source], [self._slot(step["into"], "allocation")], None)

    def _graph(self, graph: Graph, step: Mapping[str, Any], launch: int) -> None:
        values: dict[Value, int] = {}
        bounds = {}
        for node, given in zip(graph.inputs, step["inputs"], strict=True):
            if "slot" in given:
                number = values[node.outputs[0]] = self._slot(given["slot"], "call")
                bounds[node.attrs["bound"].slot] = number
            else:
                values[node.outputs[0]] = self._value(node.outputs[0], "constant")
        leaving: dict[Value, list[int]] = {}
        for result, given in zip(graph.outputs, step["results"], strict=True):
            leaving.setdefault(result.value, []).append(self._slot(given["slot"], "allocation"))
        for slot, result in graph.written.items():
            leaving.setdefault(result.value, []).append(bounds[slot])
        for node in graph.nodes:
            if node.kind == "const":
                values[node.outputs[0]] = self._value(node.outputs[0], "constant")
            elif node.kind not in LEAVES:
                self._operator(node, graph, launch, values, leaving)

    def _operator(
        self, node: Node, graph: Graph, launch: int, values: dict[Value, int],
        leaving: Mapping[Value, list[int]],
    ) -> None:  # fmt: skip
        writes: list[int] = []
        for value in node.outputs:
            into = leaving.get(value) or [self._value(value, "vendor")]
            values[value] = into[0]
            writes += into
        reads = [values[value] for value in node.operands()]
        reads = [number for number in reads if number not in writes]
        self._add(node.kind, "operator", launch, reads, writes, node.origin,
                  node_text(node), graph.name)  # fmt: skip

    def _value(self, value: Value, place: MemoryOwner) -> int:
        shape = [plain_size(size) for size in value.shape]
        name = value.node.name + (f":{value.index}" if value.index else "")
        return self._number(name, str(value.dtype).removeprefix("torch."), shape, place)


def _slots_of(plain: Any) -> list[int]:
    if isinstance(plain, Mapping):
        return [plain["ref"]] if "ref" in plain else [
            slot for value in plain.values() for slot in _slots_of(value)
        ]  # fmt: skip
    if isinstance(plain, (list, tuple)):
        return [slot for value in plain for slot in _slots_of(value)]
    return []
