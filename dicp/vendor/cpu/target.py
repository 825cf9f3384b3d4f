"""The host CPU: loop kernels as C++ with OpenMP and vector math, built by g++ or clang++."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import fx

from dicp.cache import Cache, key_of
from dicp.config import Config
from dicp.errors import CompilerError, ToolchainError
from dicp.loop.cpp import render
from dicp.loop.ir import Call
from dicp.loop.lowering import RULES, Lowering, RuleTable
from dicp.loop.program import LoopProgram, ProgramBuilder
from dicp.loop.runtime import Launch, LoopExecutable, Native, WorkspacePool
from dicp.loop.schedule import schedule
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
from dicp.template import render_template
from dicp.torch_private import OpOverload
from dicp.vendor.cpu.library import ONEDNN, PLAIN, fastest_linear, linear_rates
from dicp.vendor.cpu.routines import LIBRARY_CALLS, ROUTINES, header_of, headers
from dicp.vendor.cpu.toolchain import Toolchain, compile_shared, find_toolchain, has_libmvec

FOLDER = Path(__file__).parent
MAX_ARGS = 1024
UNIT_TEXT = 24_000
"""Characters of kernel text that justify a translation unit of its own."""

OWN_RULES = RULES.merged(PLAIN, LIBRARY_CALLS)
Sources: TypeAlias = Mapping[str, Sequence[str]]
"""Kernel name -> the graph nodes it computes, for comments and messages."""

PAST_BLAS = ONEDNN.merged(ROUTINES)
"""What is made otherwise where BLAS is the slower library."""
RULES_PAST_BLAS = OWN_RULES.merged(PAST_BLAS)
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
    )

    def __init__(self) -> None:
        self._libraries: dict[str, ctypes.CDLL] = {}
        self._pool = WorkspacePool()

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
        plan = schedule(graph, context.config.fuse, across=True)
        rendered = {k: render(s) for k, s in enumerate(plan.steps) if not isinstance(s, Call)}
        return ProgramBuilder(plan).build(rendered, lowering.reports)

    def _rules(self, gm: fx.GraphModule, config: Config) -> RuleTable:
        """The rules, with the matrix products of the library that is fastest here."""
        if not any(PAST_BLAS.get(n.target) for n in gm.graph.nodes):
            return OWN_RULES
        fastest = fastest_linear(Cache.open(config))
        return RULES_PAST_BLAS if fastest == "onednn" else OWN_RULES

    def render(self, program: LoopProgram, config: Config) -> Source:
        comments = {r.name: r.sources for r in program.reports}
        kernels = _kernels(program.kernel_texts, comments)
        own = [k for k in kernels if not header_of(k["name"])]
        text = render_template(FOLDER / "unit.cpp.jinja", kernels=own, header="prelude.h")
        return Source({"kernels.cpp": text})

    def build(self, program: LoopProgram, cache: Cache, config: Config) -> Artifact:
        toolchain = find_toolchain(config)
        units = self._build_kernels(
            program.kernel_texts, _sources(program.plain), toolchain, cache, config
        )
        units["driver"] = self._driver_key(toolchain, cache)
        return Artifact(
            self.name,
            {"program": program.plain, "texts": program.kernel_texts},
            units,
            program.objects,
        )

    def _build_kernels(
        self,
        texts: Mapping[str, str],
        sources: Sources,
        toolchain: Toolchain,
        cache: Cache,
        config: Config,
    ) -> dict[str, str]:
        """Kernel name -> key of the unit that holds it; only unknown kernels are compiled."""
        units: dict[str, str] = {}
        missing: dict[str, str] = {}
        for name, body in texts.items():
            entry = cache.get("kernel", self._kernel_key(name, toolchain))
            if entry is None:
                missing[name] = body
            else:
                units[name] = entry.read("unit").decode()
        groups = [{name: body} for name, body in missing.items() if header_of(name)]
        groups += _balanced({n: t for n, t in missing.items() if not header_of(n)}, config.jobs)
        with ThreadPoolExecutor(max(len(groups), 1)) as pool:
            keys = list(pool.map(lambda g: self._build_unit(g, sources, toolchain, cache), groups))
        for group, key in zip(groups, keys, strict=True):
            for name in group:
                cache.put("kernel", self._kernel_key(name, toolchain), {"unit": key.encode()})
                units[name] = key
        return units

    def _kernel_key(self, name: str, toolchain: Toolchain) -> str:
        return key_of(name, toolchain.identity, *_headers().values())

    def _build_unit(
        self, texts: Mapping[str, str], sources: Sources, toolchain: Toolchain, cache: Cache
    ) -> str:
        key = key_of(sorted(texts), toolchain.identity, *_headers().values())
        header = header_of(next(iter(texts)))
        if header:
            toolchain = toolchain.contracting()

        def build() -> dict[str, bytes]:
            text = render_template(
                FOLDER / "unit.cpp.jinja",
                kernels=_kernels(texts, sources),
                header=header or "prelude.h",
            )
            files = {"unit.cpp": text, **_headers()}
            return {"unit.so": compile_shared(toolchain, files, "unit.cpp"),
                    "unit.cpp": text.encode()}  # fmt: skip

        cache.get_or_build("unit", key, build)
        return key

    def _driver_key(self, toolchain: Toolchain, cache: Cache) -> str:
        text = render_template(FOLDER / "driver.cpp.jinja", max_args=MAX_ARGS)
        key = key_of("driver", text, toolchain.identity)
        cache.get_or_build(
            "unit",
            key,
            lambda: {"unit.so": compile_shared(toolchain, {"driver.cpp": text}, "driver.cpp")},
        )
        return key

    def load(self, artifact: Artifact, cache: Cache, config: Config) -> Executable:
        units = dict(artifact.units)
        if any(not self._load_unit(key, cache) for key in set(units.values())):
            units = self._rebuild(artifact, cache, config)
        functions = {
            name: _address(self._libraries[key], name)
            for name, key in units.items() if name != "driver"
        }  # fmt: skip
        run = self._libraries[units["driver"]].dicp_run
        run.argtypes = [
            ctypes.POINTER(Launch), ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p),
            ctypes.POINTER(ctypes.c_int64),
        ]  # fmt: skip
        run.restype = ctypes.c_int64
        program = artifact.program["program"]
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
        toolchain = find_toolchain(config)
        texts, sources = artifact.program["texts"], _sources(artifact.program["program"])
        for name in texts:
            entry = cache.get("kernel", self._kernel_key(name, toolchain))
            if entry is not None and cache.get("unit", entry.read("unit").decode()) is None:
                cache.put(
                    "kernel",
                    self._kernel_key(name, toolchain),
                    {
                        "unit": self._build_unit(
                            {name: texts[name]}, sources, toolchain, cache
                        ).encode()
                    },
                )
        units = self._build_kernels(texts, sources, toolchain, cache, config)
        units["driver"] = self._driver_key(toolchain, cache)
        for key in set(units.values()):
            if not self._load_unit(key, cache):
                raise ToolchainError(
                    "cpu", "the kernel cache", f"unit {key} cannot be stored or read",
                    "Point DICP_CACHE_DIR at a writable folder.",
                )  # fmt: skip
        return units

    # ---- identity and health --------------------------------------------------------------------

    def fingerprint(self, config: Config) -> str:
        return key_of(find_toolchain(config).identity, *_headers().values())

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
        own = fastest_linear(Cache.open(config)) == "onednn"
        makers = "our own kernels" if own else "the framework's libraries"
        checks.append(Check("small products, attention", True, makers))
        checks.append(Check("threads", True, str(torch.get_num_threads())))
        try:
            compile_shared(toolchain, {"t.cpp": 'extern "C" int one() { return 1; }\n'}, "t.cpp")
            checks.append(Check("build", True, "a test kernel compiles"))
        except CompilerError as error:
            checks.append(Check("build", False, str(error), "Repair the compiler installation."))
        return checks


def _sources(plain: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """Kernel name -> what it computes, from a program in plain form."""
    return {s["kernel"]: s["origins"] for s in reversed(plain["steps"]) if "kernel" in s}


@lru_cache(maxsize=1)
def _headers() -> dict[str, str]:
    """The C++ files a unit may include, by name."""
    return {"prelude.h": (FOLDER / "prelude.h").read_text(), **headers()}


def _kernels(
    texts: Mapping[str, str], comments: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    return [
        {"name": name, "body": body, "comments": [_one_line(c) for c in comments.get(name, ())]}
        for name, body in texts.items()
    ]


def _one_line(text: str) -> str:
    return json.dumps(text, ensure_ascii=True)[1:-1].rstrip("\\")


def _balanced(texts: Mapping[str, str], jobs: int) -> list[dict[str, str]]:
    """Kernels split into at most `jobs` units of about equal text."""
    total = sum(len(t) for t in texts.values())
    count = max(1, min(jobs, -(-total // UNIT_TEXT))) if texts else 0
    groups: list[dict[str, str]] = [{} for _ in range(count)]
    loads = [0] * count
    for name, text in sorted(texts.items(), key=lambda item: -len(item[1])):
        k = loads.index(min(loads))
        groups[k][name] = text
        loads[k] += len(text)
    return [g for g in groups if g]


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
