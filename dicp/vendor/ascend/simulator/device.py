"""The simulator's device: models that the library hands over, run by torch on the CPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch

from dicp.graphop.simulator import Argument, Refused, SimulatorBase, leave, memory_of
from dicp.vendor.ascend.blocked import packed, storage_dims, unpacked
from dicp.vendor.ascend.simulator.compiler import Compiler, Model, Tensor


class Simulator(SimulatorBase[Model]):
    """What runs instead of a device. `counts` has the models run, the operators they launched,
    and among them those that only move data."""

    ports: Mapping[tuple[str, str], str] = {}
    """By operator and port of the prototype table: what graphs call the port."""

    def compile(self, text: str, options: Mapping[str, str] | None) -> Model:
        return Compiler(with_own_names(text, self.ports), options).compile()

    def check_load(self, model: Model, with_memory: bool) -> None:
        if with_memory and model.is_dynamic:
            raise Refused("a model of changing sizes manages its memory itself")

    def execute(self, model: Model, given: Sequence[Argument], made: Sequence[Argument]) -> None:
        addresses = {p.data: k for k, p in enumerate(given) if p.size}
        for k, argument in enumerate(made):
            if argument.data in addresses and argument.size:
                model.check_shared(addresses[argument.data], k)
                self.counts["results over inputs"] += 1
        inputs = [_tensor(p, t) for p, t in zip(given, model.inputs, strict=True)]
        results = model.interpreter.run(inputs)
        for argument, result, declared in zip(made, results, model.outputs, strict=True):
            leave(argument, packed(result, declared.format))
        self.counts["operators"] += len(model.kinds)
        for kind in ("Transpose", "TransData", "Cast"):
            self.counts[kind] += model.kinds.count(kind)


def with_own_names(text: str, ports: Mapping[tuple[str, str], str]) -> str:
    """A recorded graph with its ports named as in the prototype table."""
    if not ports:
        return text
    own = {(kind, called): name for (kind, name), called in ports.items()}
    graph = json.loads(text)
    kinds = {op["name"]: op["type"] for op in graph["ops"]}
    for op in graph["ops"]:
        kind = op["type"]
        op["inputs"] = [
            (own.get((kind, port), port), index, source, own.get((kinds[source], output), output))
            for port, index, source, output in op["inputs"]
        ]
        for part in ("descs", "counts"):
            op[part] = [
                (direction, own.get((kind, port), port), rest) for direction, port, rest in op[part]
            ]
    return json.dumps(graph)


def _tensor(argument: Argument, declared: Tensor) -> torch.Tensor:
    assert declared.dims is not None
    stored = storage_dims(declared.format, declared.dims)
    dims = list(argument.dims[: argument.rank]) if argument.rank >= 0 else list(stored)
    if len(dims) != len(stored) or any(d not in (-1, s) for d, s in zip(stored, dims, strict=True)):
        raise ValueError(f"an input has sizes {dims}, the model takes {stored}")
    if not argument.size:
        return torch.empty(dims, dtype=declared.dtype)
    return unpacked(memory_of(argument, declared.dtype).view(dims), declared.format, declared.dims)
