"""MetaX GPUs: kernels in MACA C++, compiled for the chip, or emulated where there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from dicp.cache import Cache, key_of
from dicp.config import BOOLEAN, COUNT, Config, vendor_option
from dicp.errors import CompilerError, ToolchainError
from dicp.gpu.library import ATTENTION, OWN_RULES, GpuLowering
from dicp.gpu.scalars import scalars_to_device
from dicp.gpu.split import split_reductions, split_unfused
from dicp.loop.ir.expr import Graph
from dicp.loop.ir.kernel import Kernel
from dicp.loop.program import LoopProgram
from dicp.loop.runtime.device import DeviceRuntime
from dicp.loop.schedule.kernels import schedule
from dicp.loop.target import KernelSources, LoopTarget
from dicp.target import Check, Decision, Facts, LowerContext
from dicp.torch_private import first_sizes
from dicp.vendor.maca.facts import DTYPES, GPU
from dicp.vendor.maca.render.kernel import MacaKernel, render
from dicp.vendor.maca.simulator import HostUnits, Simulator
from dicp.vendor.maca.units import unit_text


class MacaLowering(GpuLowering):
    """Lowering for MetaX GPUs."""

    device_facts = GPU


class MacaTarget(LoopTarget):
    """Compiles for the GPU the tensors lie on; CPU tensors go through the emulation."""

    name = "maca"
    device_type = "cuda"
    facts = Facts(
        dtypes=DTYPES,
        symbolic_shapes=True,
        keep=OWN_RULES.ops(),
        fusions=frozenset({"attention", "layer_norm", "rms_norm", "gelu"}),
        frozen_fusions=frozenset({"conv_bn"}),
        conv_channels_last="always",
    )
    rules = OWN_RULES
    lowering = MacaLowering
    options = (
        vendor_option("checked", BOOLEAN, "DICP_MACA_CHECKED",
                      "whether the emulation looks for data races and accesses out of range",
                      default=False),
        vendor_option("wave", COUNT, "DICP_MACA_WAVE",
                      "lanes of the emulation's waves: 64, or 32", default=GPU.lanes),
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self._simulator = Simulator()

    def unsupported(self, node: fx.Node) -> str:
        if ATTENTION.get(node.target) is not None:  # dicp generates no code for its RNG state
            return ""
        return super().unsupported(node)

    def decide_on(self, device: str, node: fx.Node) -> Decision:
        if ATTENTION.get(node.target) is not None:
            return self.decide(node)
        return super().decide_on(device, node)

    # ---- from graph to source -------------------------------------------------------------------

    def lower(self, gm: fx.GraphModule, context: LowerContext) -> LoopProgram:
        device = self.device_of(gm)
        if device != "cpu":
            scalars_to_device(gm, torch.device(device))
        return super().lower(gm, context)

    def schedule(
        self, gm: fx.GraphModule, graph: Graph, device: str, config: Config
    ) -> Sequence[Any]:
        inputs = gm.graph.find_nodes(op="placeholder")
        first = first_sizes(n.meta.get("val") for n in inputs)
        split_unfused(graph, first, split_reductions(graph, first, GPU), GPU)
        return schedule(graph, config.fuse).steps

    def render_kernel(self, step: Kernel, config: Config) -> MacaKernel:
        return render(step)

    def source_files(self, sources: KernelSources) -> Mapping[str, str]:
        return {"kernels.maca": unit_text(sources.texts, sources.comments())}

    # ---- from source to executable --------------------------------------------------------------

    def compile(self, sources: KernelSources, cache: Cache, config: Config) -> Mapping[str, Any]:
        return HostUnits.open(config, cache).build(sources)

    def runtime(self, sources: KernelSources, cache: Cache, config: Config) -> DeviceRuntime:
        self.warn_of_simulator("an emulation of the GPU")
        return self._simulator.runtime(sources, cache, config)

    # ---- identity and health --------------------------------------------------------------------

    def fingerprint(self, config: Config) -> str:
        deterministic = torch.are_deterministic_algorithms_enabled()
        return key_of(HostUnits.open(config, Cache.open(config)).identity, str(deterministic))

    def doctor(self, config: Config) -> list[Check]:
        try:
            HostUnits.open(config, Cache.open(config))
        except (CompilerError, ToolchainError) as error:
            return [Check("compiler", False, str(error), "Install g++ or set DICP_CXX.")]
        return [Check("compiler", True, "")]
