"""NVIDIA GPUs: Triton kernels, compiled for the chip, or interpreted where there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from dicp.cache import Cache, key_of
from dicp.config import Config
from dicp.errors import ToolchainError
from dicp.gpu.autotuner import Autotuner, Program, chooser, device_seconds
from dicp.gpu.build import Variant
from dicp.gpu.form import with_tile
from dicp.gpu.launch import Device, index_of
from dicp.gpu.library import GpuLowering
from dicp.gpu.products import Chooser, place_products
from dicp.gpu.split import cross_row_sums
from dicp.gpu.target import GpuTarget, gpu_facts
from dicp.loop.ir.graph import Graph
from dicp.loop.ir.kernel import Kernel
from dicp.loop.program import RenderedKernel
from dicp.loop.runtime.device import DeviceRuntime, OwnMemory
from dicp.loop.runtime.executable import LoopExecutable
from dicp.loop.schedule.kernels import Step, schedule
from dicp.loop.target import KernelSources
from dicp.target import Artifact, Check
from dicp.template import render_template
from dicp.torch_private import first_sizes
from dicp.vendor.triton.builder import Builder, Job, Plan, Workers, device_functions, triton_version
from dicp.vendor.triton.choice import TABLE, TritonProducts, platform, tf32_allowed
from dicp.vendor.triton.driver import find_driver
from dicp.vendor.triton.facts import GPU
from dicp.vendor.triton.render.kernel import render
from dicp.vendor.triton.render.spelling import ELEMENT

FOLDER = Path(__file__).parent


class TritonLowering(GpuLowering):
    """Lowering for NVIDIA GPUs."""

    atomic_dtypes = GPU.atomic_dtypes


class TritonTarget(GpuTarget):
    """Compiles for the GPU the tensors lie on; CPU tensors are run by Triton's interpreter."""

    name = "triton"
    device_type = "cuda"
    platform = "nvidia"
    chips = ("NVIDIA",)
    facts = gpu_facts(device_type, frozenset(ELEMENT))
    lowering = TritonLowering
    bakes_lines = True

    def __init__(self) -> None:
        super().__init__()
        self._workers = Workers()

    # ---- from graph to source -------------------------------------------------------------------

    def schedule(
        self, gm: fx.GraphModule, graph: Graph, device: str, config: Config
    ) -> Sequence[Step]:
        cross_row = cross_row_sums(graph, first_sizes(gm), GPU)
        steps = schedule(graph, config.fuse, cross_row, self.with_form).steps
        choose = self.chooser(device, config)
        return place_products(steps, graph.outputs, choose, self.with_form, tf32_allowed())

    def with_form(self, kernel: Kernel) -> Kernel:
        return with_tile(kernel, GPU)

    def render_kernel(self, kernel: Kernel, config: Config) -> RenderedKernel:
        return render(kernel)

    def source_files(self, sources: KernelSources) -> Mapping[str, str]:
        return {"kernels.py": kernel_file(sources)}

    def chooser(self, name: str, config: Config) -> Chooser:
        """Chooses how products are computed: by the table, else by the autotuner if asked for."""
        device = torch.device(name)
        on_chip = device.type == "cuda" and torch.cuda.is_available()
        chip = torch.cuda.get_device_name(device) if on_chip and TABLE else ""
        asked = on_chip and config.mode.startswith("max-autotune")
        autotuner = self.autotuner(device, config) if asked else None
        return chooser(TABLE, platform(chip), autotuner)

    def autotuner(self, device: torch.device, config: Config) -> Autotuner:
        """The autotuner that measures products on `device`."""
        cache, on = Cache.open(config), platform(torch.cuda.get_device_name(device))
        load = partial(self._loaded, cache, config)
        builder = self._builder(cache, config)
        kernels = TritonProducts(architecture(device), builder, load)
        return Autotuner(device, on, cache, kernels, device_seconds)

    def _loaded(self, cache: Cache, config: Config, program: Program) -> LoopExecutable:
        """A program on its device that allocates its own workspaces for each run."""
        plain, texts = program
        artifact = Artifact(self.name, {"program": plain, "texts": texts})
        return self.executable(artifact, cache, config, OwnMemory(torch.device(plain["device"])))

    # ---- from source to executable --------------------------------------------------------------

    def prepare(self, gm: fx.GraphModule, train: bool, cache: Cache, config: Config) -> None:
        if self.device_of(gm, "example_value") != "cpu":
            self._workers.warm_up(config.jobs)

    def compile(self, sources: KernelSources, cache: Cache, config: Config) -> Mapping[str, Any]:
        if sources.device.type != "cpu":
            plan = Plan(sources.program, sources.texts, architecture(sources.device))
            self._builder(cache, config).build(plan.jobs())
        return {}

    def runtime(self, sources: KernelSources, cache: Cache, config: Config) -> DeviceRuntime:
        if sources.device.type == "cpu":
            from dicp.vendor.triton.simulator import Simulator  # imports a second Triton

            self.warn_of_simulator("Triton's interpreter")
            return Simulator(sources.texts, sources.program["buffers"])
        plan = Plan(sources.program, sources.texts, architecture(sources.device))
        index = index_of(sources.device)
        return Device(plan, self._builder(cache, config), find_driver(), index)

    def _builder(self, cache: Cache, config: Config) -> Builder:
        return Builder(cache, self._workers, config.jobs)

    def simulated(self, config: Config) -> bool:
        return not torch.cuda.is_available()

    # ---- identity and health --------------------------------------------------------------------

    def fingerprint(self, config: Config) -> str:
        tuned = TABLE or config.mode.startswith("max-autotune")
        chips = _chips() if tuned else []
        measured = [str(row) for row in TABLE.values()]
        return key_of(
            triton_version(),
            device_functions(),
            tf32_allowed(),
            chips,
            measured,
        )

    def doctor(self, config: Config) -> list[Check]:
        try:
            checks = [Check("triton", True, triton_version())]
        except ToolchainError as error:
            return [Check("triton", False, error.detail, error.fix)]
        if torch.cuda.is_available():
            checks.append(Check("device", True, ", ".join(_chips())))
        else:
            detail = "no GPU: CPU tensors are run by the interpreter"
            allowed = config.runs_on != "device"
            checks.append(Check("simulator", allowed, detail, "Set runs_on=auto (DICP_RUNS_ON)."))
        workers = Workers()
        try:
            answer = workers.compile(TEST_JOB.request(TEST_JOB.blocks()))
        finally:
            workers.close()
        trouble = answer.get("error", "")
        checks.append(
            Check("build", not trouble, trouble or "a test kernel compiles for sm_90",
                  "Reinstall triton: pip install --force-reinstall --no-deps triton.")
        )  # fmt: skip
        return checks


TEST_JOB = Job(
    "test",
    "(a0, INDEX: tl.constexpr, XBLOCK: tl.constexpr):\n"
    "    tl.store(a0 + tl.arange(0, XBLOCK), 1.0)",
    {"elements": ["fp32"], "axes": {"x": {"block": 32}}, "warps": 1, "checks": False,
     "whole": False},
    0,
    Variant(90, False, (True,)),
)  # fmt: skip
"""The kernel that `doctor` builds."""


def architecture(device: torch.device) -> int:
    """The compute capability of a GPU, as 90."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _chips() -> list[str]:
    """The names of this machine's GPUs, in order."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_name(k) for k in range(count)]


def kernel_file(sources: KernelSources) -> str:
    """The kernels as a Python file, each below comments that list the operators it computes."""
    return render_template(
        FOLDER / "kernels.py.jinja", kernels=sources.texts, comments=sources.comments()
    )
