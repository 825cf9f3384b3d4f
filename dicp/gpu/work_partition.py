"""Cross-row sums fused into inner reductions whose rows do not split evenly among programs.

sum over r of f(r, w) = sum over p of (sum over the rows r of share p of f(r, w))

Each program loops over a share of the rows, the last programs over fewer or none; another kernel
adds up their partial sums. The number of shares is fixed, so that any number of rows works, and it
may be dynamic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dicp.gpu.products import GeneratedProduct
from dicp.gpu.split import PartitionedSum, chunk_of
from dicp.loop.ir.expr import Call
from dicp.loop.ir.index import Size, Var, product, variable
from dicp.loop.ir.kernel import Kernel, Store
from dicp.loop.schedule.kernels import Step


@dataclass(frozen=True, eq=False)
class PartitionedKernel:
    """An inner reduction each of whose programs loops over a share of the rows."""

    kernel: Kernel
    part: Var
    """The index of the share: the sums' store indices contain it, but no loop runs over it."""
    chunk: Size
    """Rows per share."""


def cross_row_stores(kernel: Kernel) -> list[Store]:
    """The stores of the cross-row sums that are fused into a kernel."""
    if kernel.kind != "inner_reduction":
        return []
    return [s for p in kernel.phases for s in p.stmts if isinstance(s, Store) and s.op]


def all_fused(steps: Sequence[Step], partitions: Sequence[PartitionedSum]) -> bool:
    """Whether each of the sums is fused into an inner reduction of its rows."""
    found = {s.ref for step in steps if not isinstance(step, Call) for s in cross_row_stores(step)}
    return {s.whole.out for s in partitions} <= found


def partitioned(
    step: Step | GeneratedProduct, partitions: Sequence[PartitionedSum]
) -> Step | GeneratedProduct | PartitionedKernel:
    """The step, its rows partitioned among programs if a sum of `partitions` is fused into it."""
    parts = {s.whole.out: s.parts for s in partitions}
    sums = [s for s in cross_row_stores(step) if s.ref in parts] if isinstance(step, Kernel) else []
    if not isinstance(step, Kernel) or not sums:
        return step
    count = parts[sums[0].ref]
    part = Var(1 + max(v.position for v in (*step.parallel, *step.reduction)), count)
    moved = variable(part) * product(v.size for v in step.reduction)
    left = {id(s): replace(s, index=s.index + moved) for s in sums}
    phases = tuple(
        replace(p, stmts=tuple(left.get(id(s), s) for s in p.stmts)) for p in step.phases
    )
    chunk = chunk_of(product(v.size for v in step.parallel), count)
    return PartitionedKernel(replace(step, phases=phases), part, chunk)
