"""Chooses PyTorch's library or a generated kernel with fused epilogue for a matrix product.

The library is the default. A generated kernel must have won a measurement: a row of the table
below or, under `mode="max-autotune"`, autotuning on the device, whose result is cached on disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any

import torch

from dicp.cache import Cache, key_of
from dicp.errors import CompilerError, LaunchError, ToolchainError
from dicp.gpu.build import Binary
from dicp.gpu.form import with_tile
from dicp.gpu.products import GeneratedProduct, Product, can_split_k, split_k
from dicp.gpu.tiling import Tiling, candidates
from dicp.loop.ir.expr import Ref
from dicp.loop.ir.graph import Call, Graph
from dicp.loop.ir.kernel import Kernel
from dicp.loop.program import ProgramBuilder, RenderedKernel
from dicp.loop.schedule.kernels import Schedule
from dicp.target import Executable
from dicp.torch_private import disable_current_modes, record_on_device
from dicp.vendor.triton.builder import Builder, Job, Plan, triton_version
from dicp.vendor.triton.facts import GPU
from dicp.vendor.triton.gemm import render_product
from dicp.vendor.triton.measured import FILE, Problem, Row, Table, read
from dicp.vendor.triton.render import render
from dicp.vendor.triton.thresholds import MARGIN, REPEATS, ROUNDS

# ---- the table -----------------------------------------------------------------------------------


TABLE: Table = read(FILE)


def by_table(product: Product, chip: str) -> Tiling | None:
    """The tiling that beat the library when measured on such a chip; None if none did."""
    problem = Problem.of(product, chip) if TABLE else None
    row = None if problem is None else TABLE.get(problem)
    return None if row is None else row.tiling


# ---- the autotuner -------------------------------------------------------------------------------

Timer = Callable[[Callable[[], Any], torch.device], float]
"""Seconds that a run takes on a device."""


@dataclass(frozen=True)
class Autotuner:
    """Measures a product's candidate tilings against the library followed by an epilogue kernel."""

    device: torch.device
    arch: int
    chip: str
    cache: Cache
    builder: Builder
    load: Callable[[Mapping[str, Any], Mapping[str, str]], Executable]
    timer: Timer
    tf32: bool
    known: dict[str, Tiling | None] = field(default_factory=dict)

    def choose(self, product: Product) -> Tiling | None:
        """The tiling that wins; None if the library wins or sizes are dynamic."""
        sizes = [s for r in (product.a, product.b) for s in (*r.shape, *r.strides)]
        if not all(isinstance(s, int) for s in (*sizes, *product.out.shape)):
            return None
        if not _candidates(product):
            return None
        key = self._key(product)
        if key not in self.known:
            entry = self.cache.get_or_build("gemm", key, lambda: self._files(product))
            found = json.loads(entry.read("choice.json"))["tiling"]
            self.known[key] = None if found is None else Tiling(*found)
        return self.known[key]

    def _key(self, product: Product) -> str:
        """A key of everything the outcome depends on; the kernel's text includes the epilogue."""
        fitted = _candidates(product)
        first = fitted[0]
        text = render_product(product, first, self.tf32)
        layouts = [f"{r.dtype} {r.shape} {r.strides}" for r in text.args]
        return key_of(
            "gemm", self.chip, torch.__version__, torch.version.cuda or "", triton_version(),
            text.body, layouts, [str(c) for c in fitted],
        )  # fmt: skip

    def _files(self, product: Product) -> dict[str, bytes]:
        tiling, seconds = self.measure(product)
        plain = {"tiling": None if tiling is None else astuple(tiling), "seconds": seconds}
        return {"choice.json": json.dumps(plain).encode()}

    def measure(self, product: Product) -> tuple[Tiling | None, dict[str, float]]:
        """The fastest tiling if it beats the library by the margin, and all times in seconds."""
        fitted = _candidates(product)
        steps: list[Any] = [product.call, *([product.epilogue] if product.epilogue else [])]
        sources, results = _sources(steps), [s.ref for s in product.stores]
        program = partial(self._program, sources=sources, results=results)
        programs = [program(*self._kernels(product, tiling)) for tiling in fitted]
        jobs = [Plan(plain, texts, self.arch).jobs() for plain, texts in programs]
        built = iter(self.builder.attempt([job for kernels in jobs for job in kernels]))
        rendered = {k: render(s) for k, s in enumerate(steps) if isinstance(s, Kernel)}
        seconds = {"library": self._time(*program(steps, rendered))}
        for tiling, candidate, wanted in zip(fitted, programs, jobs, strict=True):
            taken = list(map(_as_asked, wanted, built))  # a list: consumes every job's result
            if not all(taken):
                continue  # it does not compile, or needs too much shared memory
            try:
                seconds[str(tiling)] = self._time(*candidate)
            except (LaunchError, ToolchainError, torch.OutOfMemoryError):
                continue
        best = min(fitted, key=lambda t: seconds.get(str(t), float("inf")), default=None)
        wins = seconds.get(str(best), float("inf")) < MARGIN * seconds["library"]
        return (best if wins else None), seconds

    def row(self, product: Product) -> Row | None:
        """The measurement as a row of the table; None if sizes are dynamic."""
        problem = Problem.of(product, self.chip)
        if problem is None:
            return None
        tiling, seconds = self.measure(product)
        library = seconds.pop("library")
        return Row(problem, tiling, library, min(seconds.values(), default=None))

    def _kernels(
        self, product: Product, tiling: Tiling
    ) -> tuple[list[Any], dict[int, RenderedKernel]]:
        """The steps that compute `product` by `tiling`, and their texts."""
        steps = split_k(GeneratedProduct(product, tiling), partial(with_tile, facts=GPU))
        rendered: dict[int, RenderedKernel] = {
            k: render_product(s.product, tiling, self.tf32)
            if isinstance(s, GeneratedProduct)
            else render(s)
            for k, s in enumerate(steps)
        }
        return [s.product.kernel if isinstance(s, GeneratedProduct) else s for s in steps], rendered

    def _program(
        self, steps: Sequence[Any], rendered: Mapping[int, RenderedKernel], *,
        sources: Sequence[Ref], results: Sequence[Ref],
    ) -> tuple[dict[str, Any], dict[str, str]]:  # fmt: skip
        """A program of `steps` alone, with inputs `sources` and outputs `results`."""
        builder = ProgramBuilder(Schedule(Graph(), list(steps)))
        read = {builder.number(r.root) for r in sources}  # inputs are numbered first
        program = builder.build(rendered, [], str(self.device))
        made = {builder.number(r.root) for r in results}
        for slot in sorted(read):
            program.serialized["buffers"][slot]["role"] = "input"
            program.serialized["inputs"].append(slot)
        program.serialized["outputs"] = [{"ref": slot} for slot in sorted(made - read)]
        return program.serialized, program.kernel_texts

    def _time(self, plain: Mapping[str, Any], texts: Mapping[str, str]) -> float:
        with disable_current_modes():
            run = self.load(plain, texts)
            inputs = [self._filled(plain["buffers"][slot]) for slot in plain["inputs"]]
            return self.timer(lambda: run(list(inputs)), self.device)

    def _filled(self, buffer: Mapping[str, Any]) -> torch.Tensor:
        """A tensor of the buffer's layout, with values that overflow in no product."""
        dtype = getattr(torch, buffer["dtype"])
        tensor = torch.empty_strided(
            buffer["shape"], buffer["strides"], dtype=dtype, device=self.device
        )
        if not dtype.is_floating_point:
            return tensor.zero_()
        # A separate generator, so that the user's random state does not change.
        return tensor.uniform_(-0.5, 0.5, generator=torch.Generator(self.device).manual_seed(0))


def _candidates(product: Product) -> list[Tiling]:
    batch, rows, columns, depth = product.shape
    found = candidates(rows, columns, depth, product.a.dtype, batch)
    return [t for t in found if t.parts == 1 or can_split_k(product)]


def _as_asked(job: Job, built: Binary | CompilerError) -> bool:
    return isinstance(built, Binary) and dict(built.blocks) == job.blocks()


def _sources(steps: Sequence[Any]) -> list[Ref]:
    """What `steps` read that no earlier one of them has written."""
    made: set[Ref] = set()
    found: list[Ref] = []
    for step in steps:
        if isinstance(step, Call):
            reads, writes = step.reads(), list(step.outs)
        else:
            reads, writes = _kernel_refs(step)
        found += [r for r in reads if r.root not in made]
        made |= {r.root for r in writes}
    return found


def _kernel_refs(kernel: Kernel) -> tuple[list[Ref], list[Ref]]:
    reads = [item.ref for item in kernel.reads()]
    writes = [s.ref for s in kernel.stores()]
    return reads, writes


def device_seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds per run: the best of ROUNDS replays of REPEATS recorded runs, without launch cost."""
    run()

    def row() -> list[Any]:
        for _ in range(REPEATS):  # each run reuses the memory that the previous one freed
            run()
        return []

    replay, _ = record_on_device(row, device)
    replay()
    best = float("inf")
    with torch.cuda.device(device):
        for _ in range(ROUNDS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 1e3 / REPEATS)
    return best
