"""The host CPU: loop kernels as C++ with OpenMP and vector math, built by g++ or clang++."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from dicp.cache import Cache, Entry
from dicp.config import Config
from dicp.errors import CompilerError, ToolchainError
from dicp.loop.ir.expr import Graph
from dicp.loop.ir.kernel import Kernel
from dicp.loop.lowering import RULES, RuleTable
from dicp.loop.runtime.device import Native
from dicp.loop.runtime.native import Libraries, NativeLibrary
from dicp.loop.schedule.fusion import CrossRow
from dicp.loop.target import KernelSources, LoopTarget
from dicp.target import Check, Facts
from dicp.toolchain import load_library
from dicp.vendor.cpu.library import ONEDNN, PLAIN, fastest_linear, linear_rates
from dicp.vendor.cpu.render.kernel import CppKernel, render
from dicp.vendor.cpu.render.scatter import without_zeros
from dicp.vendor.cpu.routines import LIBRARY_CALLS, ROUTINES, expected_groups, group_of
from dicp.vendor.cpu.toolchain import cache_bytes, compile_shared, find_toolchain, has_libmvec
from dicp.vendor.cpu.units import Begun, Units, identity_of, unit_text

OWN_RULES = RULES.merged(PLAIN, LIBRARY_CALLS)
PAST_BLAS = ONEDNN.merged(ROUTINES)
"""Rules that replace BLAS calls where BLAS is slower than oneDNN."""
RULES_PAST_BLAS = OWN_RULES.merged(PAST_BLAS)
_RUN = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p
)
"""Type of `dicp_run`, which launches the kernels of a segment."""
DTYPES = frozenset(
    {
        torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.uint8,
        torch.int8, torch.int16, torch.int32, torch.int64,
    }
)  # fmt: skip


class CpuTarget(LoopTarget):
    """Compiles for the machine it runs on."""

    name = "cpu"
    device_type = "cpu"
    facts = Facts(
        dtypes=DTYPES,
        symbolic_shapes=True,
        keep=OWN_RULES.ops(),
        fusions=frozenset({"attention", "layer_norm", "rms_norm", "gelu", "linear"}),
        frozen_fusions=frozenset({"conv_bn"}),
        conv_channels_last="depthwise",
        # Makes ResNet-50 in bfloat16 1.25 times as fast in training, 1.2 at inference.
        channels_last_dtypes=frozenset({torch.bfloat16}),
        # Saves a training step of Swin 7 MiB of 41, of Llama 6 of 63, in the same time.
        recomputes_operands=True,
    )
    rules = OWN_RULES
    cross_row = CrossRow()

    def __init__(self) -> None:
        super().__init__()
        self._libraries = Libraries()
        self._begun: Begun = {}

    # ---- from graph to source -------------------------------------------------------------------

    def rules_for(self, gm: fx.GraphModule, config: Config) -> RuleTable:
        """The rules; their matrix products call what is fastest on this machine."""
        if not any(PAST_BLAS.get(n.target) for n in gm.graph.nodes):
            return OWN_RULES
        return RULES_PAST_BLAS if _is_blas_slow(config) else OWN_RULES

    def schedule(
        self, gm: fx.GraphModule, graph: Graph, device: str, config: Config
    ) -> Sequence[Any]:
        return without_zeros(super().schedule(gm, graph, device, config))

    def render_kernel(self, step: Kernel, config: Config) -> CppKernel:
        return render(step, cache_bytes())

    def source_files(self, sources: KernelSources) -> Mapping[str, str]:
        own = {n: body for n, body in sources.texts.items() if group_of(n) is None}
        return {"kernels.cpp": unit_text("prelude.h", own, sources.comments())}

    # ---- from source to executable --------------------------------------------------------------

    def prepare(self, gm: fx.GraphModule, train: bool, cache: Cache, config: Config) -> None:
        groups = expected_groups(gm, train)
        if groups and _is_blas_slow(config):
            Units.open(config, cache, self._begun).begin(groups)

    def compile(self, sources: KernelSources, cache: Cache, config: Config) -> Mapping[str, str]:
        return Units.open(config, cache, self._begun).build(sources.texts, sources.comments())

    def runtime(self, sources: KernelSources, cache: Cache, config: Config) -> Native:
        units = sources.units
        libraries = self._loaded(units, lambda key: cache.get("unit", key))
        if units.values() - libraries.keys():
            # Units were removed from the cache after the program was stored. Load the entries built
            # here, not the cache's: other processes may be clearing it at the same time.
            made = Units.open(config, cache, self._begun)
            units = made.build(sources.texts, sources.comments())
            libraries = self._loaded(units, made.entries.__getitem__)
        functions = {
            name: libraries[key].address(name) for name, key in units.items() if name != "driver"
        }
        run = _RUN(libraries[units["driver"]].address("dicp_run"))
        return Native(functions, run, tuple(libraries.values()))

    def _loaded(
        self, units: Mapping[str, str], entry_of: Callable[[str], Entry | None]
    ) -> dict[str, NativeLibrary]:
        """Unit key -> its library, loaded before or now; units without an entry are missing."""
        found: dict[str, NativeLibrary] = {}
        for key in set(units.values()):
            library = self._libraries.find(key)
            entry = entry_of(key) if library is None else None
            if entry is not None:
                names = (name for name in units if units[name] == key)
                symbols = ["dicp_run" if name == "driver" else name for name in names]
                library = self._libraries.load(
                    key, partial(load_library, self.name, entry, symbols)
                )
            if library is not None:
                found[key] = library
        return found

    # ---- identity and health --------------------------------------------------------------------

    def fingerprint(self, config: Config) -> str:
        return identity_of(find_toolchain(config))

    def doctor(self, config: Config) -> list[Check]:
        try:
            toolchain = find_toolchain(config)
        except ToolchainError as error:
            return [Check("compiler", False, str(error), "Install g++ or set DICP_CXX.")]
        checks = [Check("compiler", True, f"{toolchain.compiler}: {toolchain.version}")]
        checks.append(Check("flags", True, " ".join(toolchain.flags)))
        detail = "libmvec" if has_libmvec() else "scalar (no libmvec in this C library)"
        checks.append(Check("vector math", True, detail))
        rates = ", ".join(
            f"{name} {rate:.0f} GFLOP/s" for name, rate in linear_rates(Cache.open(config)).items()
        )
        checks.append(Check("linear layers", True, rates))
        makers = "our own kernels" if _is_blas_slow(config) else "PyTorch's libraries"
        checks.append(Check("small products, attention", True, makers))
        checks.append(Check("threads", True, str(torch.get_num_threads())))
        try:
            compile_shared(toolchain, {"t.cpp": 'extern "C" int one() { return 1; }\n'}, "t.cpp")
            checks.append(Check("build", True, "a test kernel compiles"))
        except (CompilerError, ToolchainError) as error:
            checks.append(Check("build", False, str(error), "Repair the compiler installation."))
        return checks


def _is_blas_slow(config: Config) -> bool:
    """Whether this machine runs our own kernels, and oneDNN's, faster than BLAS."""
    return fastest_linear(Cache.open(config)) == "onednn"
