"""Chooses the form of each kernel on the host, by the thresholds of this room.

In: a kernel of the loop IR's schedule. Out: the same kernel with its form, which renderers print.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dicp.loop.ir.kernel import Kernel
from dicp.loop.schedule.form import exp_weights
from dicp.vendor.cpu.schedule.chooser import Chooser
from dicp.vendor.cpu.schedule.inner_reduction import Inner
from dicp.vendor.cpu.schedule.outer_reduction import Outer
from dicp.vendor.cpu.schedule.pointwise import Pointwise
from dicp.vendor.cpu.schedule.scatter import Scatter


def with_form(kernel: Kernel, non_temporal_bytes: float = math.inf) -> Kernel:
    """The kernel with its form; results of `non_temporal_bytes` and more are not kept in caches."""
    choosers: dict[str, type[Chooser]] = {
        "pointwise": Pointwise, "inner_reduction": Inner, "outer_reduction": Outer,
        "scatter": Scatter,
    }  # fmt: skip
    chosen = choosers[kernel.kind](kernel, non_temporal_bytes).choose()
    return replace(kernel, form=chosen, variants=exp_weights(kernel))
