"""Sorting and selection by rank."""

from __future__ import annotations

from typing import Any

import torch

from dicp.testing import FLOATS, LAYOUTS, T, op
from dicp.torch_private import release_of

X = (6, 37)
NUMBERS = (*FLOATS, torch.int64, torch.uint8)
F32_F64 = (torch.float32, torch.float64)

CASES = [
    op("sort", lambda x: x.sort(1), X, dtypes=F32_F64, layouts=(*LAYOUTS, "empty")),
    op(
        "sort_stable",
        lambda x: torch.sort(x, dim=1, stable=True),
        T(X, 0, 9),
        dtypes=(torch.int64, torch.uint8, torch.bool),
    ),
    op(
        "sort_halves",
        lambda x: torch.sort(x, dim=-1, stable=True),
        X,
        dtypes=(torch.bfloat16, torch.float16),
    ),
    op(
        "sort_descending",
        lambda x: torch.sort(x, dim=0, descending=True, stable=True),
        X,
        dtypes=NUMBERS,
    ),
    op(
        "sort_nan_last",
        lambda x: torch.sort(x, stable=True),
        torch.tensor([3.0, float("nan"), -1.0, float("inf"), float("-inf"), 0.0]),
        dtypes=(torch.float32,),
        layouts=("contiguous",),
    ),
    op("argsort", lambda x: x.argsort(stable=True, dim=1), X, dtypes=NUMBERS),
    op("msort", torch.msort, X, dtypes=F32_F64),
    op("topk", lambda x: x.topk(5, 1), X, dtypes=F32_F64),
    op("topk_smallest", lambda x: x.topk(3, 0, largest=False), X, dtypes=F32_F64),
    op("topk_values", lambda x: x.topk(4)[0], T(X, 0, 100), dtypes=(*FLOATS, torch.int64)),
    op("kthvalue", lambda x: x.kthvalue(3, 1), X, dtypes=F32_F64),
    op(
        "unique",
        lambda x: torch.unique(x),
        T((37,), 0, 9),
        dtypes=(torch.int64,),
        unbacked=True,
        layouts=("contiguous",),
    ),
    op(
        "quantile",
        lambda x: torch.quantile(x, 0.3, dim=1),
        X,
        dtypes=F32_F64,
        **({} if release_of(torch.__version__) >= (2, 13) else {"fullgraph": False, "graphs": 64}),
    ),
    op(
        "top_p_filter",
        lambda x: x.sort(-1, descending=True)[0].softmax(-1).cumsum(-1) < 0.9,
        X,
        dtypes=F32_F64,
    ),
]


def test_op(case: Any, check_op: Any) -> None:
    check_op(case)
