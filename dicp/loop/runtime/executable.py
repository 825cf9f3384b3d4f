"""Running a loop program, with an execution plan for each set of sizes and each concurrent run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from dicp.loop.runtime.device import DeviceRuntime, Pool
from dicp.loop.runtime.plan import ExecutionPlan, LoadedProgram, NativeCall
from dicp.loop.thresholds import MAX_PLANS
from dicp.serialize import bound_sizes, decode_constant
from dicp.torch_private import HOST


class LoopExecutable:
    """A loaded loop program: called with a list of inputs, returns a list of outputs."""

    def __init__(
        self,
        program: Mapping[str, Any],
        runtime: DeviceRuntime,
        pool: Pool,
        objects: Sequence[Any] = (),
        target: str = "",
    ) -> None:
        constants = {
            name: objects[c["object"]] if "object" in c else decode_constant(c)
            for name, c in program["constants"].items()
        }
        device = torch.device(program.get("device", HOST))
        self.loaded = LoadedProgram(program, runtime, pool, device, constants, objects, target)
        self._sources = list(program["symbols"].values())
        self._names = list(program["symbols"])
        self._plans: OrderedDict[tuple[int, ...], list[ExecutionPlan]] = OrderedDict()

    def draw_within(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Let runs draw random numbers within such a context."""
        self.loaded = replace(self.loaded, drawing=context)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        key = bound_sizes(self._sources, inputs) if self._sources else ()
        idle = self._plans.get(key) or self._idle(key)
        try:
            plan = idle.pop()
        except IndexError:
            plan = self._new_plan(key, inputs)
        try:
            return plan.run(inputs)
        finally:
            idle.append(plan)

    def prepare(self, inputs: Sequence[Any]) -> ExecutionPlan:
        """Make the plan for `inputs` now, so that a run allocates its results and workspace only.

        Raises what a run raises for inputs that eager rejects.
        """
        key = bound_sizes(self._sources, inputs)
        idle = self._idle(key)
        try:
            plan = idle.pop()
        except IndexError:
            plan = self._new_plan(key, inputs)
        idle.append(plan)
        return plan

    def watched(
        self, inputs: Sequence[Any], watch: Callable[[int], AbstractContextManager[Any]]
    ) -> Callable[[list[Any]], list[Any]]:
        """A function that runs inputs of these sizes, the program's k-th step within `watch(k)`."""
        key = bound_sizes(self._sources, inputs)
        return self._new_plan(key, inputs).watched(watch)

    def native_call(self, inputs: Sequence[Any]) -> NativeCall | None:
        """The run for `inputs` as one native call, if that is all it is."""
        return self.prepare(inputs).native_call()

    def _idle(self, key: tuple[int, ...]) -> list[ExecutionPlan]:
        """The plans for one set of sizes that no run uses now."""
        idle = self._plans.get(key)
        if idle is None:
            idle = self._plans[key] = []
            if len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)
        return idle

    def _new_plan(self, key: tuple[int, ...], inputs: Sequence[Any]) -> ExecutionPlan:
        """A new plan: each concurrent run needs its own, as threads may share an executable."""
        return ExecutionPlan(self.loaded, dict(zip(self._names, key, strict=True)), inputs)
