"""From ATen to the vocabulary of graph operators: one file per operator family."""

from dicp.graphop.rules import (
    attention,
    bags,
    creation,
    distance,
    elementwise,
    indexing,
    matmul,
    nn,
    norm,
    padding,
    pooling,
    reduction,
    resample,
    shape,
    special,
)
from dicp.graphop.rules.shape import VIEWS

RULES = elementwise.RULES.merged(
    shape.RULES, padding.RULES, reduction.RULES, matmul.RULES, nn.RULES, norm.RULES, pooling.RULES,
    indexing.RULES, creation.RULES, special.RULES, distance.RULES, bags.RULES, resample.RULES,
    attention.RULES,
).with_kind("view", VIEWS)  # fmt: skip
"""Every rule; a vendor merges its own over them."""
