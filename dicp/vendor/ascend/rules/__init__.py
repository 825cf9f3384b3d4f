"""From ATen to GE: one file per operator family, one rule per operator."""

from dicp.vendor.ascend.rules import (
    attention,
    bags,
    creation,
    distance,
    elementwise,
    indexing,
    matmul,
    nn,
    norm,
    pooling,
    reduction,
    resample,
    shape,
    special,
)
from dicp.vendor.ascend.rules.shape import VIEWS

RULES = elementwise.RULES.merged(
    shape.RULES, reduction.RULES, matmul.RULES, attention.RULES, nn.RULES,
    norm.RULES, pooling.RULES, indexing.RULES, creation.RULES, special.RULES, distance.RULES,
    bags.RULES, resample.RULES,
).with_kind("view", VIEWS)  # fmt: skip

__all__ = ["RULES"]
