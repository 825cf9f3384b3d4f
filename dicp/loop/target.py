"""The base class of targets that generate kernels: the stages from a graph to an executable.

A vendor states facts and writes three methods: `render_kernel` (a scheduled kernel -> source text),
`compile` (source texts -> what the cache holds) and `runtime` (what launches the kernels), with
`fingerprint` and `doctor` of every target. It overrides the other methods where it differs.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from dicp.cache import Cache
from dicp.config import Config
from dicp.errors import SimulatorForbiddenError
from dicp.loop.ir.graph import Call, Graph
from dicp.loop.ir.kernel import Kernel
from dicp.loop.lowering import RULES, Lowering
from dicp.loop.outline import outline
from dicp.loop.program import LoopProgram, ProgramBuilder, RenderedKernel, sources_of
from dicp.loop.runtime.device import DeviceRuntime, Native, OwnMemory, Pool
from dicp.loop.runtime.executable import LoopExecutable
from dicp.loop.runtime.host_memory import HostMemory
from dicp.loop.schedule.groups import CrossRow
from dicp.loop.schedule.kernels import Schedule, Step, schedule
from dicp.outline import Outline
from dicp.rule_errors import naming_operators, result_of
from dicp.rules import RuleTable
from dicp.target import (
    Artifact,
    Decision,
    Executable,
    LowerContext,
    RuleTarget,
    Source,
    computes_size,
    tensors_of,
)
from dicp.torch_private import HOST, disable_current_modes


@dataclass(frozen=True)
class KernelSources:
    """A program's kernels as source text, in this or another process."""

    program: Mapping[str, Any]
    """The serialized program, `LoopProgram.serialized`."""
    texts: Mapping[str, str]
    """Kernel name -> body, as `render_kernel` wrote it."""
    units: Mapping[str, Any] = field(default_factory=dict)
    """What `LoopTarget.compile` returned; empty while it runs."""

    @property
    def device(self) -> torch.device:
        """The device that the program was compiled for."""
        return torch.device(self.program["device"])

    def comments(self) -> dict[str, list[str]]:
        """Kernel name -> what it computes: operator, graph node, user line."""
        return sources_of(self.program)


class LoopTarget(RuleTarget):
    """A target whose programs are loop kernels between library calls.

    A graph without tensors on a device of type `device_type` is compiled for the CPU. A vendor of
    other hardware simulates it there.
    """

    rules: RuleTable = RULES
    lowering: type[Lowering] = Lowering
    cross_row: CrossRow | None = None
    """Which cross-row reductions are fused into inner reductions; None: `render_kernel` need not
    know stores with `op` outside of scatters."""
    transposes = False
    """Whether operands that a reduction's innermost loops would stride are copied first."""
    bakes_lines = False
    """Whether compiled kernels contain the user's lines, for the messages of runtime checks."""

    def __init__(self) -> None:
        self.host_pool: Pool = HostMemory()

    # ---- what a vendor writes -------------------------------------------------------------------

    @abc.abstractmethod
    def render_kernel(self, kernel: Kernel, config: Config) -> RenderedKernel:
        """The source text and launch arguments of a kernel, an item of `schedule`."""

    @abc.abstractmethod
    def compile(self, sources: KernelSources, cache: Cache, config: Config) -> Mapping[str, Any]:
        """Compile what the cache lacks; returns JSON values by which `runtime` finds the results.

        Tensors made here and in `runtime` have numbers, although PyTorch is tracing.
        Raises CompilerError and ToolchainError.
        """

    @abc.abstractmethod
    def runtime(self, sources: KernelSources, cache: Cache, config: Config) -> DeviceRuntime:
        """What launches the compiled kernels; compiles again what has left the cache."""

    # ---- what a vendor may override -------------------------------------------------------------

    def rules_for(self, gm: fx.GraphModule, config: Config) -> RuleTable:
        """The rules for one graph."""
        return self.rules

    def decide_on(self, device: str, node: fx.Node, config: Config) -> Decision:
        """As `decide`, for a graph whose kernels run on `device`."""
        decision = self.decide(node)
        if decision.kind == "eager" or computes_size(node):
            return decision
        external = [t.device for t in tensors_of(node) if not _is_on(device, t.device)]
        if not external:
            return decision
        return Decision("eager", f"tensor on {external[0]} in a graph on {device}")

    def schedule(
        self, gm: fx.GraphModule, graph: Graph, device: str, config: Config
    ) -> Sequence[Step]:
        """The Calls and the kernels for `render_kernel` in the order they run."""
        return schedule(graph, config.fuse, self.cross_row, self.with_form, self.transposes).steps

    def with_form(self, kernel: Kernel) -> Kernel:
        """The kernel with the form that its loops take on this target, for `render_kernel`."""
        return kernel

    def source_files(self, sources: KernelSources) -> Mapping[str, str]:
        """The program's source as files to read, for dumps and `explain`."""
        return {f"{name}.txt": text for name, text in sources.texts.items()}

    def pool(self, device: torch.device) -> Pool:
        """The memory for intermediate results of programs on `device`."""
        return self.host_pool if device.type == HOST else OwnMemory(device)

    # ---- the stages -----------------------------------------------------------------------------

    def lower(self, gm: fx.GraphModule, context: LowerContext) -> LoopProgram:
        config, device = context.config, self.device_of(gm)
        if self.simulates(device):
            self.allow_simulator(config)
        decide = partial(self.decide_on, device, config=config)
        lowering = self.lowering(gm, context, self.rules_for(gm, config), decide)
        graph = lowering.run()
        steps = list(self.schedule(gm, graph, device, config))
        rendered = {
            k: self._rendered(step, config)
            for k, step in enumerate(steps) if not isinstance(step, Call)
        }  # fmt: skip
        builder = ProgramBuilder(Schedule(graph, steps))
        program = builder.build(rendered, lowering.reports, device)
        program.serialized["static"] = sorted(context.static_inputs)
        builder.release()
        return program

    def _rendered(self, kernel: Kernel, config: Config) -> RenderedKernel:
        with naming_operators(self, kernel.origins):
            rendered = self.render_kernel(kernel, config)
        return result_of(self, "render_kernel", rendered, RenderedKernel)

    def render(self, program: LoopProgram, config: Config) -> Source:
        sources = KernelSources(program.serialized, program.kernel_texts)
        return Source(sources.texts, lambda: self.source_files(sources))

    def build(self, program: LoopProgram, source: Source, cache: Cache, config: Config) -> Artifact:
        with disable_current_modes():
            made = self.compile(KernelSources(program.serialized, source.texts), cache, config)
        keys = result_of(self, "compile", made, Mapping)
        units = {name: result_of(self, "compile", key, str) for name, key in keys.items()}
        steps = program.serialized["steps"] if self.bakes_lines else ()
        baked = tuple(at for step in steps for _, at in step.get("sites", ()) if at)
        plain = {"program": program.serialized, "texts": source.texts}
        return Artifact(self.name, plain, units, program.objects, baked)

    def load(self, artifact: Artifact, cache: Cache, config: Config) -> Executable:
        return self.executable(artifact, cache, config)

    def executable(
        self, artifact: Artifact, cache: Cache, config: Config, pool: Pool | None = None
    ) -> LoopExecutable:
        """The loaded program, with its intermediate results in `pool` if one is given."""
        program, texts = artifact.program["program"], artifact.program["texts"]
        sources = KernelSources(program, texts, artifact.units)
        with disable_current_modes():
            runtime = self.runtime(sources, cache, config)
        result_of(self, "runtime", runtime, (DeviceRuntime, Native))
        memory = self.pool(sources.device) if pool is None else pool
        return LoopExecutable(program, runtime, memory, artifact.objects, self.name)

    def outline(self, program: LoopProgram, sizes: Mapping[str, int]) -> Outline:
        return outline(program.serialized, sizes)

    # ---- devices and simulators -----------------------------------------------------------------

    def device_of(self, gm: fx.GraphModule, values: str = "val") -> str:
        """The device of the graph's tensors, which nodes hold in their meta under key `values`."""
        for node in gm.graph.nodes:
            val = node.meta.get(values)
            for item in val if isinstance(val, (tuple, list)) else [val]:
                if isinstance(item, torch.Tensor) and item.device.type == self.device_type:
                    return str(item.device)
        return HOST

    def simulates(self, device: str) -> bool:
        """Whether kernels for `device` run on this target's simulator."""
        return device == HOST and self.device_type != HOST

    def untimed(self, program: LoopProgram, config: Config) -> str:
        simulates = self.simulates(program.serialized["device"])
        return f"{self.name} runs on a simulator here" if simulates else ""

    def allow_simulator(self, config: Config) -> None:
        """Raises SimulatorForbiddenError where `runs_on` is "device"."""
        if config.runs_on == "device":
            fix = f"Move the model and its inputs to a device of type {self.device_type!r}"
            raise SimulatorForbiddenError(self.name, fix)


def _is_on(device: str, other: torch.device) -> bool:
    """Whether a tensor on `other` is on the graph's device; the host has one."""
    return other.type == device if device == HOST else str(other) == device
