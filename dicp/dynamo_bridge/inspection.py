"""How tools look into compiled graphs while they run, at no cost where no tool is active.

A graph that is compiled while an inspector is active keeps what it was compiled from, bypasses the
caches, and asks the inspector at every run. Any other graph has no trace of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import fx

from dicp.dynamo_bridge.aot_graph import GraphInfo
from dicp.dynamo_bridge.observe import GraphReport, Observer
from dicp.dynamo_bridge.stages import Stages
from dicp.target import Executable, KernelReport, Target


@dataclass(frozen=True, eq=False)
class InspectedGraph:
    """A compiled graph and what it was compiled from. Called like its executable.

    gm: the graph that was lowered. captured: a copy of it from before the passes.
    """

    gm: fx.GraphModule
    captured: fx.GraphModule
    info: GraphInfo
    kernels: tuple[KernelReport, ...]
    stages: Stages
    executable: Executable

    @property
    def target(self) -> Target:
        return self.stages.target

    def __call__(self, inputs: list[Any]) -> Any:
        inspector = active_inspector()
        if inspector is None:
            return self.executable(inputs)
        return inspector.run(self, inputs)

    def compile(self, gm: fx.GraphModule) -> tuple[Executable, tuple[KernelReport, ...]]:
        """A changed copy of the lowered graph, compiled by the same target and options."""
        report = GraphReport(self.info.kind, "inspected")
        silent = Observer(replace(self.stages.config, dump=None), report)
        _, run = self.stages.run(gm, self.info, silent)
        return run, tuple(report.kernels)


class Inspector(Protocol):
    """A tool that looks into compiled graphs."""

    def active(self) -> bool:
        """Whether it inspects what is compiled and run now."""

    def run(self, graph: InspectedGraph, inputs: list[Any]) -> Any:
        """Run and inspect the graph; returns what the graph returns."""

    def outside(self) -> AbstractContextManager[None]:
        """A context for PyTorch's code around the graphs of one call."""


_inspectors: list[Inspector] = []


def register_inspector(inspector: Inspector) -> None:
    """Register an inspector for the life of the process; `active` is called each time."""
    _inspectors.append(inspector)


@contextmanager
def inspected_by(inspector: Inspector) -> Iterator[None]:
    """A context in which this inspector takes precedence over all others."""
    _inspectors.insert(0, inspector)
    try:
        yield
    finally:
        _inspectors.remove(inspector)


def active_inspector() -> Inspector | None:
    return next((each for each in _inspectors if each.active()), None)


def around(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, in the inspector's context where one is active now."""
    if active_inspector() is None:
        return run

    def inspected(*inputs: Any) -> Any:
        inspector = active_inspector()
        if inspector is None:
            return run(*inputs)
        with inspector.outside():
            return run(*inputs)

    if getattr(run, "_boxed_call", False):
        inspected._boxed_call = True  # type: ignore[attr-defined]
    return inspected
