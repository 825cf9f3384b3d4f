"""Chooses the form of each kernel on the host, by the thresholds of this room.

In: a kernel of the loop IR's schedule. Out: the same kernel with its form, which renderers print.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dicp.loop.ir.expr import Masked, walk
from dicp.loop.ir.kernel import Kernel
from dicp.loop.schedule.form import exp_weights
from dicp.vendor.cpu.form import HostForm, Points
from dicp.vendor.cpu.schedule.chooser import Chooser
from dicp.vendor.cpu.schedule.inner_reduction import Inner
from dicp.vendor.cpu.schedule.outer_reduction import Outer
from dicp.vendor.cpu.schedule.pointwise import Pointwise
from dicp.vendor.cpu.schedule.scatter import Scatter
from dicp.vendor.cpu.thresholds import MOST_UNROLLED


def with_form(kernel: Kernel, non_temporal_bytes: float = math.inf) -> Kernel:
    """The kernel with its form; results of `non_temporal_bytes` and more are not kept in caches."""
    choosers: dict[str, type[Chooser]] = {
        "pointwise": Pointwise, "inner_reduction": Inner, "outer_reduction": Outer,
        "scatter": Scatter,
    }  # fmt: skip
    chosen = choosers[kernel.kind](kernel, non_temporal_bytes).choose()
    chosen = replace(chosen, scalar_rows=_has_short_masked_rows(kernel, chosen))
    return replace(kernel, form=chosen, variants=exp_weights(kernel))


def _has_short_masked_rows(kernel: Kernel, form: HostForm) -> bool:
    """Whether g++ may unroll the inner loops, vectorize the outer one, and permute masked loads.

    g++ 12 leaves out the permutation: `a[2 * i] = x[2 * i + 1], a[2 * i + 1] = x[2 * i]` with
    loads that are executed where a condition holds becomes a copy.
    """
    inner = [*kernel.parallel[1:], *kernel.reduction]
    short = any(isinstance(loop.size, int) and loop.size <= MOST_UNROLLED for loop in inner)
    parts = isinstance(form, Points) and len(form.strips) > 1
    values = (value for expr in kernel.exprs() for value in walk(expr))
    return bool(inner) and (short or parts) and any(isinstance(v, Masked) for v in values)
