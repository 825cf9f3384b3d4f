"""The simulator's device: executables that the library hands over, run by torch on the CPU."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from dicp.graphop.simulator import Argument, SimulatorBase, leave, memory_of
from dicp.vendor.tops.simulator.compiler import Compiler, Model


class Simulator(SimulatorBase[Model]):
    """What runs instead of a device. `counts` has the graphs launched, the operators they ran and
    their transposes. `stated` are the types that dicp states for the next graph's operators."""

    stated: Sequence[str] = ()
    message = ""

    def compile(self, text: str, options: Any) -> Model:
        stated = self.stated if options is not None else ()
        return Compiler(json.loads(text), stated).compile()

    def summary(self, model: Model) -> str:
        """Numbers of inputs and outputs, each with their bytes."""
        sides = ([t.bytes for t in side] for side in (model.inputs, model.outputs))
        return " ".join(" ".join(map(str, (len(side), *side))) for side in sides)

    def execute(self, model: Model, given: Sequence[Argument], made: Sequence[Argument]) -> None:
        inputs = []
        for argument, declared in zip(given, model.inputs, strict=True):
            flat = memory_of(argument, declared.dtype)
            inputs.append(flat[: math.prod(declared.dims)].view(declared.dims))
        try:
            results = model.interpreter.run(inputs)
        except Exception as error:
            self.message = str(error)
            raise
        for argument, result in zip(made, results, strict=True):
            leave(argument, result.contiguous())
        self.counts["operators"] += len(model.kinds)
        self.counts["Transpose"] += model.kinds.count("Transpose")
