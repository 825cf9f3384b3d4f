"""MetaX GPUs: kernels in MACA C++, compiled for the chip, or emulated where there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from dicp.cache import Cache, key_of
from dicp.config import Config
from dicp.errors import CompilerError, ToolchainError
from dicp.gpu.launch import Device, index_of
from dicp.gpu.library import GpuLowering
from dicp.gpu.module_driver import ModuleDriver, open_driver
from dicp.gpu.split import cross_row_sums
from dicp.gpu.target import GpuTarget, gpu_facts
from dicp.gpu.threads import with_threads
from dicp.loop.ir.graph import Graph
from dicp.loop.ir.kernel import Kernel
from dicp.loop.program import RenderedKernel
from dicp.loop.runtime.device import DeviceRuntime
from dicp.loop.schedule.kernels import schedule
from dicp.loop.target import KernelSources
from dicp.target import Check
from dicp.torch_private import first_sizes
from dicp.vendor.maca.builder import Builder, Plan
from dicp.vendor.maca.facts import DTYPES, GPU, facts_for
from dicp.vendor.maca.render.kernel import render
from dicp.vendor.maca.simulator import OPTIONS as SIMULATOR_OPTIONS
from dicp.vendor.maca.simulator import Simulator, host_compiler
from dicp.vendor.maca.toolchain import OPTIONS as DEVICE_OPTIONS
from dicp.vendor.maca.toolchain import device_compiler, driver_api
from dicp.vendor.maca.units import Units, unit_text


class MacaLowering(GpuLowering):
    """Lowering for MetaX GPUs."""

    atomic_dtypes = GPU.atomic_dtypes


class MacaTarget(GpuTarget):
    """Compiles for the GPU the tensors lie on; CPU tensors go through the emulation."""

    name = "maca"
    device_type = "cuda"
    platform = "metax"
    chips = ("MetaX C500",)
    facts = gpu_facts(device_type, DTYPES)
    lowering = MacaLowering
    options = (*SIMULATOR_OPTIONS, *DEVICE_OPTIONS)

    def __init__(self) -> None:
        super().__init__()
        # Both targets run on what PyTorch calls "cuda": this one where that is MetaX's.
        self.priority = 1 if "metax" in torch.__version__ else -1
        self._simulator = Simulator()
        self._drivers: dict[str, ModuleDriver] = {}

    def allow_simulator(self, config: Config) -> None:
        if config.runs_on == "device":
            device_compiler(config)
            self._driver(config)  # each names what is missing
        super().allow_simulator(config)

    # ---- from graph to source -------------------------------------------------------------------

    def schedule(
        self, gm: fx.GraphModule, graph: Graph, device: str, config: Config
    ) -> Sequence[Any]:
        facts = facts_for(config.vendor.get("maca_nvidia", 0))
        sums = cross_row_sums(graph, first_sizes(gm), facts)
        return schedule(graph, config.fuse, sums, partial(with_threads, facts=facts)).steps

    def render_kernel(self, kernel: Kernel, config: Config) -> RenderedKernel:
        return render(kernel)

    def source_files(self, sources: KernelSources) -> Mapping[str, str]:
        return {"kernels.maca": unit_text(sources.texts, sources.comments())}

    # ---- from source to executable --------------------------------------------------------------

    def compile(self, sources: KernelSources, cache: Cache, config: Config) -> Mapping[str, Any]:
        if sources.device.type == "cpu":
            units = Units(host_compiler(config), cache, config.jobs)
            return units.build(sources.texts, sources.comments())
        Builder(cache, config).build(Plan(sources.program, sources.texts, 0).jobs())
        return {}

    def runtime(self, sources: KernelSources, cache: Cache, config: Config) -> DeviceRuntime:
        if sources.device.type == "cpu":
            self.warn_of_simulator("an emulation of the GPU")
            return self._simulator.runtime(sources, cache, config)
        plan = Plan(sources.program, sources.texts, 0)
        return Device(plan, Builder(cache, config), self._driver(config), index_of(sources.device))

    def _driver(self, config: Config) -> ModuleDriver:
        choice = driver_api(config)
        if choice.arch not in self._drivers:
            self._drivers[choice.arch] = open_driver(*choice)
        return self._drivers[choice.arch]

    # ---- identity and health --------------------------------------------------------------------

    def simulated(self, config: Config) -> bool:
        return config.runs_on == "simulator" or not torch.cuda.is_available()

    def fingerprint(self, config: Config) -> str:
        # Graphs on the host run on the emulation beside a GPU, too: either compiler may be missing.
        found = [_checked("host", lambda: host_compiler(config).identity).detail]
        if not self.simulated(config):
            found.append(_checked("device", lambda: device_compiler(config).identity).detail)
        return key_of(*found)

    def doctor(self, config: Config) -> list[Check]:
        compiler = "NVRTC" if config.vendor["maca_nvidia"] else "mxcc"
        checks = [
            _checked(compiler, lambda: device_compiler(config).version),
            _checked("runtime library", lambda: self._driver(config).api.launch),
        ]
        if not self.simulated(config):
            return [*checks, Check("device", True, torch.cuda.get_device_name())]
        allowed = config.runs_on != "device"
        detail = "CPU tensors are run by an emulation, which needs the host's compiler alone"
        missing = [Check(c.name, allowed, c.detail, c.fix) for c in checks]
        return [
            *missing, Check("simulator", allowed, detail, "Set runs_on=auto (DICP_RUNS_ON)."),
            _checked("build", partial(_test_build, config)),
        ]  # fmt: skip


def _checked(name: str, find: Callable[[], str]) -> Check:
    try:
        return Check(name, True, find())
    except (CompilerError, ToolchainError) as error:
        fix = error.fix if isinstance(error, ToolchainError) else "Repair the compiler."
        return Check(name, False, str(error), fix)


def _test_build(config: Config) -> str:
    host_compiler(config).compile(unit_text({"test": TEST_KERNEL}, {}), ["test"])
    return "a test kernel compiles"


TEST_KERNEL = """D_KERNEL void KERNEL(d_global<float> a0) { a0[d_thread()] = 1; }
#ifdef D_HOST
D_LAUNCHER(KERNEL) { d_run_together({1}, {64}, [&] { KERNEL((float*)args[0]); }); }
#endif"""
"""The kernel that `doctor` builds."""
