"""From ATen to GE: one file per operator family, one rule per operator."""

from dicp.graphop.rules import RuleTable
from dicp.vendor.ascend.rules import (
    attention,
    creation,
    elementwise,
    indexing,
    matmul,
    nn,
    pooling,
    reduction,
    shape,
)
from dicp.vendor.ascend.rules.shape import VIEWS

RULES = RuleTable(
    elementwise.RULES, shape.RULES, reduction.RULES, matmul.RULES, attention.RULES, nn.RULES,
    pooling.RULES, indexing.RULES, creation.RULES,
)  # fmt: skip

__all__ = ["RULES", "VIEWS"]
