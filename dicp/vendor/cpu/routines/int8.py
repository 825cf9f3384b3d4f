"""Matrix products of bytes in int32, as of dynamically quantized activations and weights."""

from __future__ import annotations

import torch

from dicp.loop.lowering import Lowering, RuleTable, Value
from dicp.loop.lowering.library import library_rule
from dicp.vendor.cpu.routines.common import LIBRARY_CALLS, call
from dicp.vendor.cpu.toolchain import has_feature, has_tiles

int_mm = torch.ops.aten._int_mm.default
INT8 = RuleTable()
ROUTINES_BY_DTYPE = {torch.int8: "dicp_int8", torch.uint8: "dicp_uint8"}
"""Element type of the left operand -> the routine."""


def has_int8_tiles() -> bool:
    """Whether this process may multiply bytes by tile registers."""
    return has_tiles() and has_feature("amx_int8")


LIBRARY_CALLS.add(int_mm, library_rule(int_mm), "library")


@INT8.register(int_mm, kind="library")
def product(lw: Lowering, a: Value, b: Value) -> Value:
    """a @ b, by tile registers where b is column-major, as weights are."""
    (out,) = lw.results()
    name = ROUTINES_BY_DTYPE.get(a.dtype, "")
    left, right = lw.realize(a), lw.realize(b)
    fits = name and has_int8_tiles() and b.dtype == torch.int8
    if not fits or (left.strides[1], right.strides[0], out.strides[1]) != (1, 1, 1):
        return library_rule(int_mm)(lw, a, b)
    sizes = [*out.shape, a.shape[1], left.strides[0], right.strides[1], out.strides[0]]
    return call(lw, name, (left, right), (out,), sizes)[0]
