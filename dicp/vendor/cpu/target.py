"""The host CPU: loop kernels as C++ with OpenMP and vector math, built by g++ or clang++."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from dicp.cache import Cache, Entry
from dicp.config import Config
from dicp.errors import CompilerError, ToolchainError
from dicp.fused_attention import ANY_ATTENTION
from dicp.loop.ir.graph import Graph, refs_in
from dicp.loop.ir.kernel import Kernel
from dicp.loop.lowering import RULES, Lowering, RuleTable
from dicp.loop.program import RenderedKernel
from dicp.loop.runtime.device import Native
from dicp.loop.runtime.native import Libraries, NativeLibrary
from dicp.loop.schedule.groups import CrossRow
from dicp.loop.target import KernelSources, LoopTarget
from dicp.target import Check, Decision, Facts
from dicp.toolchain import load_library
from dicp.vendor.cpu.calibration import (
    PROBLEMS,
    ShapeClass,
    Verdict,
    kept,
    shape_class,
    tiles_key,
    verdict,
)
from dicp.vendor.cpu.epilogues import with_epilogues
from dicp.vendor.cpu.library import LIBRARIES, in_float32
from dicp.vendor.cpu.render.kernel import render
from dicp.vendor.cpu.routines import (
    LIBRARY_CALLS,
    ROUTINES,
    Products,
    are_attended,
    are_supported,
    expected_groups,
    group_of,
    has_int8_tiles,
    has_split_products,
    is_split,
    product_sizes,
)
from dicp.vendor.cpu.schedule import with_form
from dicp.vendor.cpu.thresholds import MAX_NARROW_ROWS
from dicp.vendor.cpu.toolchain import (
    cache_bytes,
    compile_shared,
    find_toolchain,
    has_feature,
    has_tiles,
    vector_functions,
)
from dicp.vendor.cpu.trial import Trial
from dicp.vendor.cpu.units import Begun, Units, build_key, unit_text
from dicp.vendor.cpu.zeros import without_zeros

LIBRARY_RULES = RULES.merged(LIBRARIES, LIBRARY_CALLS)
"""Rules that leave products, convolutions and attention to PyTorch's libraries."""
PRODUCTS = Products(frozenset()).rules()
WIDE_VECTORS = "avx2"
"""The feature that the routines' tiles need. Over whole models in float32 they take 0.4 to 0.8 of
the libraries' time on an AMD EPYC and an Intel Xeon with AVX-512, whatever the plain product. On an
AMD EPYC with AVX2 only it is 0.73 to 1.01 in float32, and 0.04 to 0.53 in bfloat16, in which oneDNN
has no kernels there. The library's gradients of attention read sums of exponentials rounded to
float32; ours do not."""
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


def _marks_hidden_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether our kernel computes their attention. PyTorch's gives 0 for NaN scores of fewer keys
    than a vector has lanes, and for infinite ones in 16 bits; its second result is 0 there."""
    return has_feature(WIDE_VECTORS) and are_supported(q, k, v) and are_attended(q, k, v)


ATTENTION = replace(ANY_ATTENTION, exact_masks=True, marks_hidden_rows=_marks_hidden_rows)


class CpuLowering(Lowering):
    """Lowering for the host, whose threads divide the destinations of colliding stores."""

    atomic_dtypes = DTYPES
    wide_variance = True
    rounds_sums = True
    overwrites = True


class CpuTarget(LoopTarget):
    """Compiles for the machine it runs on."""

    name = "cpu"
    device_type = "cpu"
    platform = "cpu"
    chips = ("host CPU",)
    facts = Facts(
        dtypes=DTYPES,
        symbolic_shapes=True,
        keep=LIBRARY_RULES.ops(),
        in_float32=in_float32(),
        narrow_rows=MAX_NARROW_ROWS,
        fusions=frozenset({"layer_norm", "rms_norm", "gelu", "linear", "int8"}),
        attention={"cpu": ATTENTION},
        fast_signed_int8=has_int8_tiles(),
        frozen_fusions=frozenset({"conv_bn"}),
        # Makes ResNet-50 in bfloat16 1.25 times as fast in training, 1.2 at inference.
        channels_last=frozenset({torch.bfloat16}),
        # In float16 and float64 the library's take 2 to 7 times as long as with row-major tensors.
        channels_last_depthwise=frozenset({torch.float32, torch.bfloat16}),
        conv1d_as_conv2d=True,
        # Saves a training step of Swin 7 MiB of 41, of Llama 6 of 63, in the same time.
        recomputes_operands=True,
    )
    rules = LIBRARY_RULES
    lowering = CpuLowering
    cross_row = CrossRow()
    transposes = True

    def __init__(self) -> None:
        super().__init__()
        self._libraries = Libraries()
        self._begun: Begun = {}
        self._tiles: dict[tuple[Path, str], Verdict] = {}

    # ---- from graph to source -------------------------------------------------------------------

    def rules_for(self, gm: fx.GraphModule, config: Config) -> RuleTable:
        """The rules; matrix products, convolutions and attention call what is fastest here."""
        if not any(PRODUCTS.get(n.target) or ROUTINES.get(n.target) for n in gm.graph.nodes):
            return LIBRARY_RULES
        cache = Cache.open(config)
        classes = _classes(gm, torch.float32)
        past_blas = frozenset(c for c in classes if verdict(cache, c).library == "onednn")
        tiled = _classes(gm, torch.bfloat16) if has_tiles() else ()
        own = frozenset(c for c in tiled if self._on_tiles(cache, c, config).library == "own")
        return rules_by(past_blas, own)

    def _on_tiles(self, cache: Cache, which: ShapeClass, config: Config) -> Verdict:
        """Whether our kernel multiplies tiles of bfloat16 faster than oneDNN; measured once."""

        def measure() -> Verdict:
            return Trial(which, Units.open(config, cache, self._begun), self._libraries).verdict()

        key = tiles_key(which, build_key(find_toolchain(config)))
        known = config.cache_dir, key
        if known not in self._tiles:  # an unstable verdict is not in the cache
            self._tiles[known] = kept(cache, key, measure)
        return self._tiles[known]

    def decide_on(self, device: str, node: fx.Node, config: Config) -> Decision:
        """The decision; of a plain product also what was measured to be faster."""
        decision, cache = super().decide_on(device, node, config), Cache.open(config)
        if decision.kind != "library":
            return decision
        if sizes := product_sizes(node):
            if is_split(torch.float32, *sizes):
                reason = "our kernel: float32 split into bfloat16 for tile registers"
                return replace(decision, reason=reason)
            return replace(decision, reason=str(verdict(cache, shape_class(*sizes))))
        if has_tiles() and (sizes := product_sizes(node, torch.bfloat16)):
            found = self._on_tiles(cache, shape_class(*sizes), config)
            return replace(decision, reason=str(found))
        return decision

    def schedule(
        self, gm: fx.GraphModule, graph: Graph, device: str, config: Config
    ) -> Sequence[Any]:
        steps = super().schedule(gm, graph, device, config)
        outputs = {ref.root for ref in refs_in(graph.outputs)}
        return without_zeros(with_epilogues(steps, outputs, cache_bytes()))

    def with_form(self, kernel: Kernel) -> Kernel:
        return with_form(kernel, cache_bytes())

    def render_kernel(self, kernel: Kernel, config: Config) -> RenderedKernel:
        return render(kernel)

    def source_files(self, sources: KernelSources) -> Mapping[str, str]:
        own = {n: body for n, body in sources.texts.items() if group_of(n) is None}
        return {"kernels.cpp": unit_text("prelude.h", own, sources.comments())}

    # ---- from source to executable --------------------------------------------------------------

    def prepare(self, gm: fx.GraphModule, train: bool, cache: Cache, config: Config) -> None:
        def past_blas(which: ShapeClass) -> bool:
            return verdict(cache, which).library == "onednn"

        groups = expected_groups(gm, train, self.facts, past_blas)
        ours = groups and (has_feature(WIDE_VECTORS) or past_blas("medium"))
        Units.open(config, cache, self._begun).begin(groups if ours else ())

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
        faults: list[ToolchainError] = []
        for key in set(units.values()):
            library = self._libraries.find(key)
            entry = entry_of(key) if library is None else None
            if entry is not None:
                names = (name for name in units if units[name] == key)
                symbols = ["dicp_run" if name == "driver" else name for name in names]
                try:
                    library = self._libraries.load(
                        key, partial(load_library, self.name, entry, symbols)
                    )
                except ToolchainError as fault:  # the others are tried too: bad ones are removed
                    faults.append(fault)
            if library is not None:
                found[key] = library
        if faults:
            raise faults[0]
        return found

    # ---- identity and health --------------------------------------------------------------------

    def fingerprint(self, config: Config) -> str:
        # Which products are split depends on the number of threads.
        threads = torch.get_num_threads() if has_split_products(torch.float32) else ""
        return f"{build_key(find_toolchain(config))} {threads}"

    def doctor(self, config: Config) -> list[Check]:
        try:
            toolchain = find_toolchain(config)
        except ToolchainError as error:
            return [Check("compiler", False, str(error), "Install g++ or set DICP_CXX.")]
        checks = [Check("compiler", True, f"{toolchain.compiler}: {toolchain.version}")]
        checks.append(Check("flags", True, " ".join(toolchain.flags)))
        some = "libmvec, in part (glibc 2.40 has all functions that kernels use)"
        known = {0: "scalar (no libmvec in this C library)", 240: "libmvec"}
        detail = known.get(vector_functions(), some)
        checks.append(Check("vector math", True, detail))
        cache = Cache.open(config)
        for which in PROBLEMS:
            checks.append(Check(f"products, {which}", True, str(verdict(cache, which))))
            if has_tiles():
                found = str(self._on_tiles(cache, which, config))
                checks.append(Check(f"products in bfloat16, {which}", True, found))
        own = rules_by(frozenset()) is not LIBRARY_RULES
        makers = "our own kernels" if own else "PyTorch's libraries"
        checks.append(Check("attention, convolutions", True, makers))
        checks.append(Check("threads", True, str(torch.get_num_threads())))
        try:
            compile_shared(toolchain, {"t.cpp": 'extern "C" int one() { return 1; }\n'}, "t.cpp")
            checks.append(Check("build", True, "a test kernel compiles"))
        except (CompilerError, ToolchainError) as error:
            checks.append(Check("build", False, str(error), "Repair the compiler installation."))
        return checks


def _classes(gm: fx.GraphModule, dtype: torch.dtype) -> set[ShapeClass]:
    """The classes of the graph's products that are measured; those of batches count as medium."""
    found: set[ShapeClass] = set()
    for node in gm.graph.nodes:
        if sizes := product_sizes(node, dtype):
            found.add(shape_class(*sizes))
        elif node.target is torch.ops.aten.bmm.default:
            if node.meta["val"].dtype == dtype:
                found.add("medium")
    return found


@lru_cache(maxsize=8)
def rules_by(
    past_blas: frozenset[ShapeClass], own_tiles: frozenset[ShapeClass] = frozenset()
) -> RuleTable:
    """The rules of a machine whose BLAS is the slower library for these classes of products.

    `own_tiles`: the classes whose products we compute faster with tile registers, if it has any.
    """
    if not (past_blas or has_feature(WIDE_VECTORS)):
        return LIBRARY_RULES
    return LIBRARY_RULES.merged(ROUTINES, Products(past_blas, own_tiles).rules())
