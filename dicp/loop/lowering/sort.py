"""Sorting, order statistics and searches, all lowered to PyTorch library calls."""

from __future__ import annotations

import torch

from dicp.loop.lowering.library import library_rule
from dicp.rules import RuleTable

aten = torch.ops.aten
SORT = RuleTable()

for _op in (
    aten.sort.default, aten.sort.stable, aten.topk.default, aten.kthvalue.default,
    aten.median.default, aten.median.dim, aten.nanmedian.default, aten.nanmedian.dim,
    aten.mode.default, aten.cummax.default, aten.cummin.default, aten.logcumsumexp.default,
    aten.searchsorted.Tensor, aten.searchsorted.Scalar,
    aten.bucketize.Tensor, aten.bucketize.Scalar,
):  # fmt: skip
    SORT.add(_op, library_rule(_op), "library")
