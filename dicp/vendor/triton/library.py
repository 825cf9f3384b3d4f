"""What goes to the framework's libraries on the device, and what the device cannot combine."""

from __future__ import annotations

from typing import Any

import torch

from dicp.loop.ir import Compute
from dicp.loop.lowering import RULES, Lowering, NoRule, RuleTable
from dicp.vendor.triton.spelling import ATOMIC_DTYPES

aten = torch.ops.aten
ATTENTION = RuleTable()


def _as_it_is(lw: Lowering, *args: Any, **kwargs: Any) -> Any:
    """The framework's call, its results wherever it puts them."""
    assert lw.node is not None
    return lw.eager(lw.node)


for _name in ("flash", "efficient", "cudnn"):
    for _suffix in ("", "_backward"):
        _op = getattr(aten, f"_scaled_dot_product_{_name}_attention{_suffix}", None)
        if _op is not None:
            ATTENTION.add(_op, _as_it_is, "library")

OWN_RULES = RULES.merged(ATTENTION)


class TritonLowering(Lowering):
    """Lowering that leaves to eager what the hardware's atomic operations cannot do."""

    def add(self, compute: Compute) -> Compute:
        if compute.kind == "scatter" and torch.are_deterministic_algorithms_enabled():
            raise NoRule("colliding stores come in any order, and deterministic ones are asked for")
        if compute.kind == "scatter" and compute.op != "store":
            if compute.out.dtype not in ATOMIC_DTYPES.get(compute.op, frozenset()):
                name = str(compute.out.dtype).removeprefix("torch.")
                raise NoRule(f"colliding {compute.op} of {name} has no atomic operation")
        return super().add(compute)
