"""Serialized steps: what is stored with the built graphs, and what the runtime runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dicp.graphop.lower import Lowering
from dicp.graphop.partition import Step
from dicp.graphop.program import (
    EagerCall,
    Graph,
    GraphProgram,
    IndexCheck,
    Node,
    Restride,
    Result,
    Slot,
)
from dicp.serialize import encode_argument, encode_constant, encode_operator, encode_size
from dicp.torch_private import HOST, expression_of


def plain_size(size: Any) -> int | str:
    """A size as a number or as text over the program's symbols."""
    return encode_size(expression_of(size))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def assemble(
    lowering: Lowering, steps: Sequence[Step], once: Sequence[Graph], static_sizes: bool
) -> GraphProgram:
    """The program that runs `steps`, and before its first run the graphs in `once`.

    `static_sizes`: the vendor compiles graphs for known sizes alone.
    """
    return _Assembler(lowering).build(steps, once, static_sizes)


class _Assembler:
    def __init__(self, lowering: Lowering) -> None:
        self.lowering = lowering
        self.slots: dict[Slot, int] = {}
        self.rows: list[dict[str, Any]] = []
        self.objects: list[Any] = []

    def build(
        self, steps: Sequence[Step], once: Sequence[Graph], static_sizes: bool
    ) -> GraphProgram:
        low = self.lowering
        inputs = [None if slot is None else self._slot(slot) for slot in low.inputs]
        constants = {str(self._slot(s)): self._constant(t) for s, t in low.constants.items()}
        plain = {
            "inputs": inputs,
            "symbols": low.symbols,
            "constants": constants,
            "once": [self._step(graph) for graph in once],
            "steps": [self._step(step) for step in steps],
            "outputs": [self.encode(output) for output in low.outputs],
            "slots": self.rows,
            "buckets": list(low.context.config.shape_buckets),
            "static_sizes": static_sizes,
        }
        graphs = [step for step in steps if isinstance(step, Graph)]
        return GraphProgram(plain, [*once, *graphs], low.reports, self.objects)

    def _slot(self, slot: Slot) -> int:
        if slot not in self.slots:
            self.slots[slot] = len(self.slots)
            fake = slot.fake
            strided = isinstance(fake, torch.Tensor) and fake.layout == torch.strided
            row: dict[str, Any] = {"name": slot.name}
            if strided:
                row |= {
                    "dtype": dtype_name(fake.dtype),
                    "shape": [plain_size(s) for s in fake.shape],
                    "strides": [plain_size(s) for s in fake.stride()],
                }
            self.rows.append(row)
        return self.slots[slot]

    def _constant(self, tensor: torch.Tensor) -> Any:
        plain = encode_constant(tensor)
        return self._object(tensor) if plain is None else plain

    def _object(self, value: Any) -> dict[str, int]:
        self.objects.append(value)
        return {"object": len(self.objects) - 1}

    def _step(self, step: Step) -> dict[str, Any]:
        if isinstance(step, Graph):
            written = step.written
            bounds = [node.attrs.get("bound") for node in step.inputs]
            return {
                "graph": step.name,
                "inputs": [self._graph_input(node) for node in step.inputs],
                "results": [self._result(result) for result in step.outputs],
                "device": next((str(r.slot.fake.device) for r in step.outputs), HOST),
                **({"buckets": True} if step.bucket_refusal is None else {}),
                "written": [k for k, b in enumerate(bounds) if b and b.slot in written],
                "origins": list(dict.fromkeys(n.origin for n in step.operators if n.origin)),
            }
        if isinstance(step, EagerCall):
            return self._call(step)
        if isinstance(step, IndexCheck):
            return self._check(step)
        if isinstance(step, Restride):
            return {"restride": self._slot(step.source), "into": self._slot(step.slot)}
        before, shown = (
            t.storage_offset() * t.itemsize for t in (step.source.fake, step.slot.fake)
        )
        return {
            "view": self._slot(step.source),
            "into": self._slot(step.slot),
            "offset": plain_size(shown - before),  # in bytes
        }

    def _graph_input(self, node: Node) -> dict[str, Any]:
        dtype = dtype_name(node.outputs[0].dtype)
        if node.kind == "seed":
            return {"seed": dtype}
        if node.kind == "sizes":
            sizes = node.attrs["sizes"]
            if isinstance(sizes, tuple):
                return {"sizes": [plain_size(s) for s in sizes], "dtype": dtype}
            return {"sizes": plain_size(sizes), "dtype": dtype}
        bound = node.attrs["bound"]
        return {"slot": self._slot(bound.slot), "order": list(bound.order)}

    def _result(self, result: Result) -> dict[str, Any]:
        fake = self.lowering.builder.stored(result.value)
        return {
            "slot": self._slot(result.slot),
            "shape": [plain_size(s) for s in fake.shape],
            "dtype": dtype_name(fake.dtype),
            "order": list(result.order),
            **({"into_input": True} if result.placement == "into_input" else {}),
        }

    def _call(self, call: EagerCall) -> dict[str, Any]:
        return {
            "call": encode_operator(call.op, self._object),
            "args": [self.encode(a) for a in call.args],
            "kwargs": {k: self.encode(v) for k, v in call.kwargs.items()},
            "outs": [self._slot(slot) for slot in call.outs],
            "origin": call.origin,
        }

    def _check(self, check: IndexCheck) -> dict[str, Any]:
        rows = [
            {"number": row.number, "size": plain_size(row.size), "count": plain_size(row.count),
             "wraps": row.wraps, "origin": row.origin, "divides": row.divides}
            for row in check.rows
        ]  # fmt: skip
        return {"check": self._slot(check.source), "rows": rows}

    def encode(self, value: Any) -> Any:
        """A serialized argument."""
        return encode_argument(value, self._leaf, self._object)

    def _leaf(self, value: Any) -> dict[str, Any] | None:
        if isinstance(value, Slot):
            return {"ref": self._slot(value)}
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return {"size": plain_size(value)}
        return None
