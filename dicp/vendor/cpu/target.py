"""The host CPU: loop kernels as C++ with OpenMP and vector math, built by g++ or clang++."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import fx

from dicp.cache import Cache, Entry
from dicp.config import Config
from dicp.errors import CompilerError, ToolchainError
from dicp.loop.ir.expr import Call
from dicp.loop.lowering import RULES, Lowering, RuleTable
from dicp.loop.program import LoopProgram, ProgramBuilder, sources_of
from dicp.loop.runtime.device import Native, WorkspacePool
from dicp.loop.runtime.executable import LoopExecutable
from dicp.loop.runtime.native import Libraries, NativeLibrary
from dicp.loop.schedule.fusion import CrossRow
from dicp.loop.schedule.kernels import schedule
from dicp.target import (
    Artifact,
    Check,
    Executable,
    Facts,
    LowerContext,
    RuleTarget,
    Source,
    tensors_of,
)
from dicp.toolchain import load_library
from dicp.vendor.cpu.library import ONEDNN, PLAIN, fastest_linear, linear_rates
from dicp.vendor.cpu.render.kernel import render
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


class CpuTarget(RuleTarget):
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

    def __init__(self) -> None:
        self._libraries = Libraries()
        self._pool = WorkspacePool()
        self._begun: Begun = {}

    def unsupported(self, node: fx.Node) -> str:
        external = (t.device for t in tensors_of(node) if t.device.type != self.device_type)
        return super().unsupported(node) or next((f"tensor on {d}" for d in external), "")

    # ---- lower, render, build, load -------------------------------------------------------------

    def lower(self, gm: fx.GraphModule, context: LowerContext) -> LoopProgram:
        lowering = Lowering(gm, context, self._rules(gm, context.config), self.decide)
        graph = lowering.run()
        plan = schedule(graph, context.config.fuse, cross_row=CrossRow())
        plan.steps = without_zeros(plan.steps)
        non_temporal = cache_bytes()
        rendered = {
            k: render(s, non_temporal) for k, s in enumerate(plan.steps) if not isinstance(s, Call)
        }
        builder = ProgramBuilder(plan)
        program = builder.build(rendered, lowering.reports)
        builder.release()
        return program

    def _rules(self, gm: fx.GraphModule, config: Config) -> RuleTable:
        """The rules; their matrix products call what is fastest on this machine."""
        if not any(PAST_BLAS.get(n.target) for n in gm.graph.nodes):
            return OWN_RULES
        return RULES_PAST_BLAS if _is_blas_slow(config) else OWN_RULES

    def render(self, program: LoopProgram, config: Config) -> Source:
        texts = program.kernel_texts
        own = {n: body for n, body in texts.items() if group_of(n) is None}
        comments = sources_of(program.plain)
        return Source(texts, lambda: {"kernels.cpp": unit_text("prelude.h", own, comments)})

    def prepare(self, gm: fx.GraphModule, train: bool, cache: Cache, config: Config) -> None:
        groups = expected_groups(gm, train)
        if groups and _is_blas_slow(config):
            Units.open(config, cache, self._begun).begin(groups)

    def build(self, program: LoopProgram, source: Source, cache: Cache, config: Config) -> Artifact:
        units = Units.open(config, cache, self._begun)
        return Artifact(
            self.name,
            {"program": program.plain, "texts": source.texts},
            units.build(source.texts, sources_of(program.plain)),
            program.objects,
        )

    def load(self, artifact: Artifact, cache: Cache, config: Config) -> Executable:
        units, program = dict(artifact.units), artifact.program["program"]
        libraries = self._loaded(units, lambda key: cache.get("unit", key))
        if units.values() - libraries.keys():
            # Units were removed from the cache after the program was stored. Load the entries built
            # here, not the cache's: other processes may be clearing it at the same time.
            made = Units.open(config, cache, self._begun)
            units = made.build(artifact.program["texts"], sources_of(program))
            libraries = self._loaded(units, made.entries.__getitem__)
        functions = {
            name: libraries[key].address(name) for name, key in units.items() if name != "driver"
        }
        run = _RUN(libraries[units["driver"]].address("dicp_run"))
        machine = Native(functions, run, tuple(libraries.values()))
        return LoopExecutable(program, machine, self._pool, artifact.objects)

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
