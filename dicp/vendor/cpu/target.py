"""The host CPU: loop kernels as C++ with OpenMP and vector math, built by g++ or clang++."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import fx

from dicp.cache import Cache
from dicp.config import Config
from dicp.errors import CompilerError, ToolchainError
from dicp.loop.ir.expr import Call
from dicp.loop.lowering import RULES, Lowering, RuleTable
from dicp.loop.program import LoopProgram, ProgramBuilder
from dicp.loop.runtime.device import Native, WorkspacePool
from dicp.loop.runtime.executable import LoopExecutable
from dicp.loop.schedule.fusion import Across
from dicp.loop.schedule.kernels import schedule
from dicp.target import (
    Artifact,
    Check,
    Decision,
    DecisionKind,
    Executable,
    Facts,
    LowerContext,
    Source,
    Target,
)
from dicp.torch_private import OpOverload, disable_current_modes
from dicp.vendor.cpu.library import ONEDNN, PLAIN, fastest_linear, linear_rates
from dicp.vendor.cpu.render.kernel import render
from dicp.vendor.cpu.render.scatter import without_zeros
from dicp.vendor.cpu.routines import LIBRARY_CALLS, ROUTINES, expected_groups, group_of
from dicp.vendor.cpu.toolchain import cache_bytes, compile_shared, find_toolchain, has_libmvec
from dicp.vendor.cpu.units import Begun, Units, identity_of, sources_of, unit_text

OWN_RULES = RULES.merged(PLAIN, LIBRARY_CALLS)
PAST_BLAS = ONEDNN.merged(ROUTINES)
"""What is made otherwise where BLAS is the slower library."""
RULES_PAST_BLAS = OWN_RULES.merged(PAST_BLAS)
LARGEST_MAPPED = (32 << 20) - (8 << 10)
"""Bytes of a block that with its header and alignment just stays below glibc's bound."""
DTYPES = frozenset(
    {
        torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.uint8,
        torch.int8, torch.int16, torch.int32, torch.int64,
    }
)  # fmt: skip


class CpuTarget(Target):
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
        # ResNet-50 in bfloat16: 1.25 times as fast in training, 1.2 at inference.
        channels_last_dtypes=frozenset({torch.bfloat16}),
        # A step of Swin needs 7 MiB less of 41, of Llama 6 of 63, in the same time.
        recomputes_operands=True,
    )

    def __init__(self) -> None:
        self._libraries: dict[str, ctypes.CDLL] = {}
        self._pool = WorkspacePool()
        self._begun: Begun = {}

    # ---- decisions --------------------------------------------------------------------------

    def decide(self, node: fx.Node) -> Decision:
        op = node.target
        if _computes_size(node):
            return Decision("view")
        if not isinstance(op, OpOverload):
            return Decision("eager", "not an ATen operator")
        entry = OWN_RULES.get(op)
        if entry is None:
            return Decision("eager", "no rule for this operator")
        reason = self._unsupported(node)
        return Decision("eager", reason) if reason else Decision(entry.kind)

    def rule_kind(self, op: Any) -> DecisionKind | None:
        entry = OWN_RULES.get(op)
        return entry.kind if entry else None

    def _unsupported(self, node: fx.Node) -> str:
        for val in _tensors_of(node):
            if val.layout != torch.strided:
                return f"{val.layout} tensor"
            if val.dtype not in DTYPES:
                return f"dtype {val.dtype} is not generated"
            if val.device.type != "cpu":
                return f"tensor on {val.device}"
        return ""

    # ---- lower, render, build, load -------------------------------------------------------------

    def lower(self, gm: fx.GraphModule, context: LowerContext) -> LoopProgram:
        lowering = Lowering(gm, context, self._rules(gm, context.config), self.decide)
        graph = lowering.run()
        plan = schedule(graph, context.config.fuse, across=Across())
        plan.steps = without_zeros(plan.steps)
        far = cache_bytes()
        rendered = {k: render(s, far) for k, s in enumerate(plan.steps) if not isinstance(s, Call)}
        return ProgramBuilder(plan).build(rendered, lowering.reports)

    def _rules(self, gm: fx.GraphModule, config: Config) -> RuleTable:
        """The rules, with the matrix products of the library that is fastest here."""
        if not any(PAST_BLAS.get(n.target) for n in gm.graph.nodes):
            return OWN_RULES
        return RULES_PAST_BLAS if _is_blas_slow(config) else OWN_RULES

    def render(self, program: LoopProgram, config: Config) -> Source:
        comments = {r.name: r.sources for r in program.reports}
        own = {n: body for n, body in program.kernel_texts.items() if group_of(n) is None}
        return Source({"kernels.cpp": unit_text("prelude.h", own, comments)})

    def prepare(self, gm: fx.GraphModule, train: bool, cache: Cache, config: Config) -> None:
        groups = expected_groups(gm, train)
        if groups and _is_blas_slow(config):
            Units.open(config, cache, self._begun).begin(groups)

    def build(self, program: LoopProgram, cache: Cache, config: Config) -> Artifact:
        units = Units.open(config, cache, self._begun)
        return Artifact(
            self.name,
            {"program": program.plain, "texts": program.kernel_texts},
            units.build(program.kernel_texts, sources_of(program.plain)),
            program.objects,
        )

    def load(self, artifact: Artifact, cache: Cache, config: Config) -> Executable:
        units = dict(artifact.units)
        if any(not self._load_unit(key, cache) for key in set(units.values())):
            units = self._rebuild(artifact, cache, config)
        functions = {
            name: _address(self._libraries[key], name)
            for name, key in units.items() if name != "driver"
        }  # fmt: skip
        run = self._libraries[units["driver"]].dicp_run
        run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
        run.restype = ctypes.c_int64
        program = artifact.program["program"]
        _keep_freed_memory()
        return LoopExecutable(program, Native(functions, run), self._pool, artifact.objects)

    def _load_unit(self, key: str, cache: Cache) -> bool:
        if key not in self._libraries:
            entry = cache.get("unit", key)
            if entry is None:
                return False
            self._libraries[key] = ctypes.CDLL(str(entry.path("unit.so")))
        return True

    def _rebuild(self, artifact: Artifact, cache: Cache, config: Config) -> dict[str, str]:
        """Units were removed from the cache since the program was stored: compile them again."""
        texts, plain = artifact.program["texts"], artifact.program["program"]
        units = Units.open(config, cache, self._begun).build(texts, sources_of(plain))
        for key in set(units.values()):
            if not self._load_unit(key, cache):
                raise ToolchainError(
                    "cpu", "the kernel cache", f"unit {key} cannot be stored or read",
                    "Point DICP_CACHE_DIR at a writable folder.",
                )  # fmt: skip
        return units

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
        makers = "our own kernels" if _is_blas_slow(config) else "the framework's libraries"
        checks.append(Check("small products, attention", True, makers))
        checks.append(Check("threads", True, str(torch.get_num_threads())))
        try:
            compile_shared(toolchain, {"t.cpp": 'extern "C" int one() { return 1; }\n'}, "t.cpp")
            checks.append(Check("build", True, "a test kernel compiles"))
        except CompilerError as error:
            checks.append(Check("build", False, str(error), "Repair the compiler installation."))
        return checks


def _is_blas_slow(config: Config) -> bool:
    """Whether this machine runs our own kernels, and oneDNN's, faster than BLAS."""
    return fastest_linear(Cache.open(config)) == "onednn"


def _keep_freed_memory() -> None:
    """Have the C library keep what a step frees, for the next step to take without page faults.

    glibc hands the end of its heap back once twice the largest block ever mapped and freed lies
    there unused, 256 KiB at first; a block is mapped by itself up to 32 MiB (mallopt(3),
    M_MMAP_THRESHOLD). Freeing one of that size, never written to, keeps up to 64 MiB. Other C
    libraries, and one whose thresholds the user has set, take no notice. A training step of Swin
    had 4000 page faults without, and takes 0.84 of the time.
    """
    with disable_current_modes():  # loading happens while the framework traces
        torch.empty(LARGEST_MAPPED, dtype=torch.uint8)


def _address(library: ctypes.CDLL, name: str) -> int:
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return address


def _tensors_of(node: fx.Node) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for item in [node, *node.all_input_nodes]:
        val = item.meta.get("val")
        for v in val if isinstance(val, (tuple, list)) else [val]:
            if isinstance(v, torch.Tensor):
                found.append(v)
    return found


def _computes_size(node: fx.Node) -> bool:
    """Arithmetic on sizes, or picking one result of an operator that has several."""
    if getattr(node.target, "__name__", "") == "getitem":
        return True
    val = node.meta.get("val")
    return isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))
