"""Embeddings and their gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dicp.testing import FLOATS, T, index, op

TABLE = (12, 8)
F32_F64 = (torch.float32, torch.float64)
aten = torch.ops.aten

CASES = [
    op("embedding", F.embedding, index((5, 7), 12), TABLE, dtypes=FLOATS),
    op("embedding_int32", F.embedding, index((5,), 12, dtype=torch.int32), TABLE),
    *(
        op(
            f"embedding_beside_another_{dim}",
            lambda i, j, w, p, dim=dim: torch.cat([F.embedding(i, w), F.embedding(j, p)], dim),
            index((5, 7), 12),
            index(shape, 12),
            TABLE,
            (12, width),
            dtypes=(*F32_F64, torch.bfloat16),
        )
        for dim, shape, width in ((0, (3, 7), 8), (1, (5, 3), 8), (2, (5, 7), 11))
    ),
    op(
        "embedding_repeated_indices",
        F.embedding,
        index((40,), 3),
        TABLE,
        dtypes=(*F32_F64, torch.bfloat16),
    ),
    op(
        "embedding_padding",
        lambda i, w: F.embedding(i, w, padding_idx=1),
        index((40,), 4),
        TABLE,
        dtypes=F32_F64,
    ),
    op(
        "embedding_negative_padding",
        lambda i, w: F.embedding(i, w, padding_idx=-1),
        index((40,), 12),
        TABLE,
        dtypes=F32_F64,
    ),
    op(
        "embedding_scale_grad",
        lambda i, w: F.embedding(i, w, scale_grad_by_freq=True),
        index((20,), 4),
        TABLE,
        expect="native",
    ),
    op("embedding_scalar_index", F.embedding, torch.tensor(3), TABLE, dtypes=F32_F64),
    op(
        "embedding_empty",
        F.embedding,
        index((0, 5), 12),
        TABLE,
        dtypes=F32_F64,
        layouts=("contiguous",),
    ),
    op(
        "embedding_sum",
        lambda i, j, w, p: F.embedding(i, w) + F.embedding(j, p),
        index((5, 7), 12),
        index((5, 7), 9),
        TABLE,
        (9, 8),
        dtypes=F32_F64,
    ),
    op(
        "embedding_dense_backward",
        lambda g, i: aten.embedding_dense_backward.default(g, i, 12, 2, False),
        (20, 8),
        index((20,), 5),
        grad=False,
        dtypes=F32_F64,
    ),
    op(
        "embedding_norm",
        lambda i, w, g: F.layer_norm(F.embedding(i, w), [8], g),
        index((5, 7), 12),
        TABLE,
        (8,),
        dtypes=F32_F64,
        fixed=(8,),
    ),
    *[
        op(
            f"embedding_bag_{mode}",
            lambda i, w, mode=mode: F.embedding_bag(i, w, mode=mode),
            index((5, 7), 12),
            TABLE,
            dtypes=F32_F64,
        )
        for mode in ("sum", "mean", "max")
    ],
    op(
        "embedding_bag_offsets",
        lambda i, w: F.embedding_bag(i, w, torch.tensor([0, 2, 2, 5], device=w.device), mode="sum"),
        index((9,), 12),
        TABLE,
        dtypes=F32_F64,
        fixed=(9,),
    ),
    op(
        "embedding_bag_weighted",
        lambda i, w, s: F.embedding_bag(i, w, per_sample_weights=s, mode="sum"),
        index((5, 7), 12),
        TABLE,
        T((5, 7), layout=False),
        dtypes=F32_F64,
    ),
    op(
        "embedding_bag_last_offset",
        lambda i, w: F.embedding_bag(
            i, w, torch.tensor([0, 2, 2, 9]), mode="mean", include_last_offset=True
        ),
        index((9,), 12),
        TABLE,
        dtypes=F32_F64,
        fixed=(9,),
    ),
    *[
        op(
            f"embedding_bag_padding_{mode}",
            lambda i, w, mode=mode: F.embedding_bag(i, w, mode=mode, padding_idx=3),
            index((5, 7), 12),
            TABLE,
            dtypes=F32_F64,
        )
        for mode in ("sum", "mean", "max")
    ],
    *[
        op(
            f"embedding_bag_infinite_padding_{mode}",
            lambda i, w, mode=mode: F.embedding_bag(
                i, torch.cat([w[:3], w[3:4].detach() / 0, w[4:]]), mode=mode, padding_idx=3
            ),
            index((5, 7), 12),
            TABLE,
            dtypes=F32_F64,
        )
        for mode in ("sum", "mean")
    ],
    op(
        "embedding_bag_infinite_padding_weighted",
        lambda i, w, s: F.embedding_bag(
            i,
            torch.cat([w[:3], w[3:4].detach() / 0, w[4:]]),
            per_sample_weights=s,
            mode="sum",
            padding_idx=3,
        ),
        index((5, 7), 12),
        TABLE,
        T((5, 7), layout=False),
        dtypes=F32_F64,
    ),
    op(
        "tied_weights",
        lambda i, w: F.embedding(i, w) @ w.t(),
        index((5, 7), 12),
        T(TABLE),
        dtypes=F32_F64,
    ),
]


def test_op(case: Any, check_op: Any) -> None:
    check_op(case)


@pytest.mark.parametrize("padding_idx", [None, 0])
def test_maxima_of_bags_with_nan(padding_idx: int | None, backend: Any) -> None:
    """NaN in a bag's first row that counts is its maximum; in later rows it is passed over."""
    nan, low = math.nan, -math.inf
    table = torch.tensor([[nan, 1.0, low], [3.0, nan, -1.0], [0.0, 5.0, nan], [nan, low, 7.0]])
    rows, starts = torch.tensor([1, 0, 2, 3, 2, 0, 2, 0]), torch.tensor([0, 2, 2, 3, 5, 7])

    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(rows, x, starts, mode="max", padding_idx=padding_idx)

    results = []
    for function in (torch.compile(fn, backend=backend), fn):
        x = table.clone().requires_grad_()
        value = function(x)
        grad = torch.arange(value.numel()).view_as(value) + 1.0
        results.append((value, *torch.autograd.grad(value, x, grad)))
    torch.testing.assert_close(*results, equal_nan=True)
