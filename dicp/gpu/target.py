"""The base class of targets that are GPUs: stream pools, captured graphs, attention's calls."""

from __future__ import annotations

import torch
from torch import fx

from dicp.cache import Cache
from dicp.config import Config
from dicp.fused_attention import HOST_LIBRARY_ATTENTION
from dicp.gpu import graph_capture
from dicp.gpu.launch import Device, StreamPool, index_of
from dicp.gpu.library import ATTENTION, DEVICE_LIBRARY, GPU_ATTENTION, OWN_RULES
from dicp.gpu.scalars import scalars_to_device
from dicp.loop.program import LoopProgram
from dicp.loop.runtime.device import OwnMemory, Pool
from dicp.loop.target import LoopTarget
from dicp.target import Artifact, Decision, Executable, Facts, LowerContext
from dicp.torch_private import HOST, record_on_device


def gpu_facts(device_type: str, dtypes: frozenset[torch.dtype]) -> Facts:
    """The facts of GPUs that PyTorch's libraries support, where kernels compute `dtypes`."""
    return Facts(
        dtypes=dtypes,
        symbolic_shapes=True,
        keep=OWN_RULES.ops(),
        fusions=frozenset({"layer_norm", "rms_norm", "gelu"}),
        attention={HOST: HOST_LIBRARY_ATTENTION, device_type: GPU_ATTENTION},
        frozen_fusions=frozenset({"conv_bn"}),
        channels_last=frozenset(t for t in dtypes if t.is_floating_point),
    )


class GpuTarget(LoopTarget):
    """A GPU that PyTorch knows; CPU tensors are for the vendor's simulator."""

    rules = OWN_RULES

    def __init__(self) -> None:
        super().__init__()
        self._pools: dict[int, StreamPool] = {}

    def unsupported(self, node: fx.Node) -> str:
        # dicp generates no code for attention's RNG state, nor for what libraries take as complex.
        if any(table.get(node.target) is not None for table in (ATTENTION, DEVICE_LIBRARY)):
            return ""
        return super().unsupported(node)

    def decide_on(self, device: str, node: fx.Node, config: Config) -> Decision:
        if ATTENTION.get(node.target) is not None:
            return self.decide(node)
        return super().decide_on(device, node, config)

    def lower(self, gm: fx.GraphModule, context: LowerContext) -> LoopProgram:
        device = self.device_of(gm)
        if device != HOST:
            scalars_to_device(gm, torch.device(device))
        return super().lower(gm, context)

    def pool(self, device: torch.device) -> Pool:
        if device.type == HOST:
            return self.host_pool
        return self._pools.setdefault(index_of(device), StreamPool(device))

    def load(self, artifact: Artifact, cache: Cache, config: Config) -> Executable:
        executable = self.executable(artifact, cache, config)
        program, device = artifact.program["program"], executable.loaded.device
        if device.type == HOST or config.mode not in graph_capture.MODES:
            return executable
        # A recording has its own workspaces, which are not lent to runs on other streams.
        recorded = self.executable(artifact, cache, config, OwnMemory(device))
        if isinstance(recorded.loaded.runtime, Device):
            recorded.loaded.runtime.outlives_captures = True
        return graph_capture.CapturedProgram(
            program, executable, program["static"], record_on_device, recorded
        )
