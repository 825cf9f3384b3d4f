"""What GE's operators compute, as torch functions: one file per family, one line per operator."""

from dicp.graphop.interpreter import Semantics
from dicp.vendor.ascend.semantics import (
    attention,
    elementwise,
    fused,
    inplace,
    nn,
    random,
    reduction,
    shape,
    special,
)

SEMANTICS = Semantics()
for family in (
    elementwise, reduction, shape, nn, attention, fused, inplace, random, special,
):  # fmt: skip
    family.register(SEMANTICS)
