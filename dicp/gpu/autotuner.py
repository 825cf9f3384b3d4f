"""Measures whether the library or a generated kernel with fused epilogue computes a product faster.

The library is the default. A generated kernel must have won a measurement: a row of a vendor's
table (`measured`) or, under `mode="max-autotune"`, autotuning on the device, whose result is cached
on disk. A vendor gives what its kernels need as `ProductKernels`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from dicp.cache import Cache, key_of
from dicp.errors import LaunchError, ToolchainError
from dicp.gpu.measured import Platform, Problem, Row, Table, by_table
from dicp.gpu.products import Chooser, Product, can_split_k, kernels_of, tiled
from dicp.gpu.thresholds import MARGIN, REPEATS, ROUNDS
from dicp.gpu.tiling import Tiling, candidates
from dicp.loop.ir.expr import Ref
from dicp.loop.ir.graph import Call, Graph
from dicp.loop.ir.kernel import Kernel
from dicp.loop.program import ProgramBuilder, RenderedKernel
from dicp.loop.schedule.kernels import Schedule, Step
from dicp.target import Executable
from dicp.torch_private import disable_current_modes, record_on_device

Program = tuple[Mapping[str, Any], Mapping[str, str]]
"""A serialized program and its kernels' texts."""


class ProductKernels(Protocol):
    """A vendor's kernels of products: how they are scheduled, rendered, built and loaded."""

    def with_form(self, kernel: Kernel) -> Kernel:
        """`kernel` with its form set."""

    def render(self, kernel: Kernel) -> RenderedKernel:
        """The text of a kernel."""

    def attempt(self, programs: Sequence[Program]) -> list[bool]:
        """Whether each program compiles, with the blocks that it was given."""

    def load(self, program: Program) -> Executable:
        """The program on its device.

        Raises LaunchError, ToolchainError.
        """


Timer = Callable[[Callable[[], Any], torch.device], float]
"""Seconds that a run takes on a device."""


@dataclass(frozen=True)
class Autotuner:
    """Measures a product's candidate tilings against the library followed by an epilogue kernel."""

    device: torch.device
    platform: Platform
    cache: Cache
    kernels: ProductKernels
    timer: Timer
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
        fitted, on = _candidates(product), self.platform
        text = self.kernels.render(tiled(product, fitted[0], on.tf32))
        layouts = [f"{r.dtype} {r.shape} {r.strides}" for r in text.args]
        return key_of(
            "gemm", on.chip, torch.__version__, on.libraries, on.compiler, text.body, layouts,
            [str(c) for c in fitted],
        )  # fmt: skip

    def _files(self, product: Product) -> dict[str, bytes]:
        tiling, seconds = self.measure(product)
        plain = {"tiling": None if tiling is None else astuple(tiling), "seconds": seconds}
        return {"choice.json": json.dumps(plain).encode()}

    def measure(self, product: Product) -> tuple[Tiling | None, dict[str, float]]:
        """The fastest tiling if it beats the library by the margin, and all times in seconds."""
        fitted = _candidates(product)
        steps: list[Step] = [product.call, *([product.epilogue] if product.epilogue else [])]
        sources, results = _sources(steps), [s.ref for s in product.stores]
        program = partial(self._program, sources=sources, results=results)
        programs = [program(self._kernels(product, tiling)) for tiling in fitted]
        built = self.kernels.attempt(programs)
        seconds = {"library": self._time(program(steps))}
        for tiling, candidate, works in zip(fitted, programs, built, strict=True):
            if not works:
                continue  # it does not compile, or needs too much shared memory
            try:
                seconds[str(tiling)] = self._time(candidate)
            except (LaunchError, ToolchainError, torch.OutOfMemoryError):
                continue
        best = min(fitted, key=lambda t: seconds.get(str(t), float("inf")), default=None)
        wins = seconds.get(str(best), float("inf")) < MARGIN * seconds["library"]
        return (best if wins else None), seconds

    def row(self, product: Product) -> Row | None:
        """The measurement as a row of the table; None if sizes are dynamic."""
        problem = Problem.of(product, self.platform)
        if problem is None:
            return None
        tiling, seconds = self.measure(product)
        library = seconds.pop("library")
        return Row(problem, tiling, library, min(seconds.values(), default=None))

    def _kernels(self, product: Product, tiling: Tiling) -> tuple[Kernel, ...]:
        return kernels_of(product, tiling, self.platform.tf32, self.kernels.with_form)

    def _program(
        self, steps: Sequence[Step], *, sources: Sequence[Ref], results: Sequence[Ref]
    ) -> Program:
        """A program of `steps` alone, with inputs `sources` and outputs `results`."""
        rendered = {k: self.kernels.render(s) for k, s in enumerate(steps) if isinstance(s, Kernel)}
        builder = ProgramBuilder(Schedule(Graph(), list(steps)))
        read = {builder.number(r.root) for r in sources}  # inputs are numbered first
        program = builder.build(rendered, [], str(self.device))
        made = {builder.number(r.root) for r in results}
        for slot in sorted(read):
            program.serialized["buffers"][slot]["role"] = "input"
            program.serialized["inputs"].append(slot)
        program.serialized["outputs"] = [{"ref": slot} for slot in sorted(made - read)]
        return program.serialized, program.kernel_texts

    def _time(self, program: Program) -> float:
        plain, _ = program
        with disable_current_modes():
            run = self.kernels.load(program)
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


def chooser(table: Table, platform: Platform, autotuner: Autotuner | None) -> Chooser:
    """Chooses how products are computed: by the table, else by the autotuner if there is one."""

    def choose(product: Product) -> Tiling | None:
        tiling = by_table(table, product, platform) if table else None
        return autotuner.choose(product) if autotuner is not None and tiling is None else tiling

    return choose


def _candidates(product: Product) -> list[Tiling]:
    batch, rows, columns, depth = product.shape
    found = candidates(rows, columns, depth, product.a.dtype, batch)
    return [t for t in found if t.parts == 1 or can_split_k(product)]


def _sources(steps: Sequence[Any]) -> list[Ref]:
    """What `steps` read that no earlier one of them has written."""
    made: set[Ref] = set()
    found: list[Ref] = []
    for step in steps:
        if isinstance(step, Call):
            reads, writes = step.reads(), list(step.outs)
        else:
            reads, writes = [x.ref for x in step.reads()], [s.ref for s in step.stores()]
        found += [r for r in reads if r.root not in made]
        made |= {r.root for r in writes}
    return found


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
    module: Any = torch.get_device_module(device)
    with module.device(device):
        for _ in range(ROUNDS):
            start, end = (module.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 1e3 / REPEATS)
    return best
