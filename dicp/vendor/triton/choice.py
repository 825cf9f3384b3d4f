"""Which matrix products generated kernels compute: the table, and what the autotuner needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dicp.errors import CompilerError
from dicp.gpu.autotuner import Program
from dicp.gpu.build import Binary
from dicp.gpu.form import with_tile
from dicp.gpu.measured import Platform, Table, read
from dicp.loop.ir.kernel import Kernel
from dicp.loop.program import RenderedKernel
from dicp.target import Executable
from dicp.vendor.triton.builder import Builder, Job, Plan, triton_version
from dicp.vendor.triton.facts import GPU
from dicp.vendor.triton.render.kernel import render

FILE = Path(__file__).parent / "products.json"
TABLE: Table = read(FILE)


def tf32_allowed() -> bool:
    """Whether PyTorch itself would round float32 operands of a product to TF32."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def platform(chip: str) -> Platform:
    """A chip with the versions and the precision that products are computed with."""
    return Platform(chip, triton_version(), torch.version.cuda or "", tf32_allowed())


@dataclass(frozen=True)
class TritonProducts:
    """Triton's kernels of products, for chips of compute capability `arch`."""

    arch: int
    builder: Builder
    load: Callable[[Program], Executable]

    def with_form(self, kernel: Kernel) -> Kernel:
        return with_tile(kernel, GPU)

    def render(self, kernel: Kernel) -> RenderedKernel:
        return render(kernel)

    def attempt(self, programs: Sequence[Program]) -> list[bool]:
        jobs = [
            (k, job)
            for k, (plain, texts) in enumerate(programs)
            for job in Plan(plain, texts, self.arch).jobs()
        ]
        built = self.builder.attempt([job for _, job in jobs])
        failed = {k for (k, job), one in zip(jobs, built, strict=True) if not _as_asked(job, one)}
        return [k not in failed for k in range(len(programs))]


def _as_asked(job: Job, built: Binary | CompilerError) -> bool:
    return isinstance(built, Binary) and dict(built.blocks) == job.blocks()
