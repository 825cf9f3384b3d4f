"""Scans: cumulative sums, products, extremes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dicp.testing import FLOATS, LAYOUTS, T, op

X = (6, 37)
NUMBERS = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)
F32_F64 = (torch.float32, torch.float64)

CASES = [
    op(
        "cumsum",
        lambda x: (x.cumsum(0), x.cumsum(-1)),
        X,
        dtypes=NUMBERS,
        layouts=(*LAYOUTS, "scalar", "empty"),
    ),
    op("cumsum_middle", lambda x: x.cumsum(1), (3, 7, 5), dtypes=(torch.float32,)),
    op(
        "cumsum_of_weighted_rows",
        lambda x, w: (x * w.unsqueeze(-1)).cumsum(1).flip(1) * w.unsqueeze(-1),
        (3, 20, 18),
        (3, 20),
        dtypes=(*FLOATS, torch.int64),
        layouts=LAYOUTS,
    ),
    op(
        "scans_of_rows_together",
        lambda x: (x.cumsum(-1), x.exp().cumprod(-1), x.cummax(-1).values + 1),
        (2, 8, 9),
        dtypes=(*F32_F64, torch.bfloat16),
        layouts=LAYOUTS,
    ),
    op(
        "cumsum_dtype",
        lambda x: (x.cumsum(1, dtype=torch.float64), x.cumsum(0, dtype=torch.int64)),
        X,
        dtypes=(torch.float32, torch.int32, torch.bool),
        grad=False,
    ),
    op("cumsum_fused", lambda x: (x.exp().cumsum(1) + 1).sum(0), X, dtypes=F32_F64),
    op(
        "cumprod",
        lambda x: x.cumprod(1),
        T((5, 7), 0.5, 1.5),
        dtypes=(torch.float32, torch.float64, torch.bfloat16),
    ),
    op("cumprod_ints", lambda x: x.cumprod(1), T((5, 7), 1, 3), dtypes=(torch.int64, torch.bool)),
    op("cummax", lambda x: x.cummax(1), X, dtypes=(torch.float32, torch.bfloat16, torch.int64)),
    op("cummin", lambda x: x.cummin(0), X, dtypes=(torch.float32, torch.bfloat16, torch.int64)),
    op("logcumsumexp", lambda x: x.logcumsumexp(1), X, dtypes=F32_F64),
    op(
        "diff",
        lambda x: (torch.diff(x), torch.diff(x, n=2, dim=0)),
        X,
        dtypes=(*FLOATS, torch.int64),
    ),
    op(
        "cumsum_mask_positions",
        lambda m: (m.cumsum(1) - 1).masked_fill(~m, 1),
        T(X, dtype=torch.bool),
        dtypes=(torch.bool,),
    ),
    # terms of both signs cancel, and each row's sum may be near zero
    op("trapezoid", lambda y: torch.trapezoid(y, dx=0.5), X, dtypes=F32_F64, floor=2.0),
]


@pytest.mark.sweep
def test_op(case: Any, check_op: Any) -> None:
    check_op(case)
