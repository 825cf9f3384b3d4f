"""Indexing: gather, scatter, index, index_put, select, slices, masks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from dicp.testing import FLOATS, INTS, T, index, op

X = (6, 37)
ANY = (*FLOATS, *INTS)
F32 = (torch.float32,)
F32_F64 = (torch.float32, torch.float64)
MASK = T(X, dtype=torch.bool)


def in_place(name: str, fn: Any) -> Any:
    """A case of a tensor, three rows and their indices that updates the tensor."""
    indices = torch.tensor([5, 0, 3])
    return op(
        name, fn, (9, 5), (3, 5), indices, dtypes=(*F32_F64, torch.int64), grad=False, fixed=(3, 9),
        layouts=("contiguous", "transposed", "sliced"), strides=False,
    )  # fmt: skip


def _index_forms(x: Any, i: Any, j: Any) -> Any:
    return x[i], x[:, j], x[i, j], x[i[:, None], j], x[None, i], x[..., j]


def _computed_forms(x: Any, i: Any) -> Any:
    """Indices computed from sizes: in order, backwards, from the end, windows, clamped."""
    at = torch.arange(x.shape[0], device=x.device)
    return (
        x[at, i], x[at.flip(0)], x[-at - 1] * 2, x[at[:-2, None] + at[:3]].sum(1),
        x[:, (at + 3).clamp(max=6)], x.index_select(1, at[::2]), x[at, at],
        x.index_put((at, i), x[0]), torch.nn.functional.embedding(at[2:], x) + 1,
    )  # fmt: skip


def _set_forms(x: Any, i: Any, v: Any) -> Any:
    y = x.clone()
    y[i] = v
    y[0, 1] = 7
    y[-1] = y[0]
    return y


CASES = [
    op("slice_step", lambda x: (x[::2], x[:, 1::3], x[1:5:2, ::2]), X, dtypes=ANY, exact=True),
    op("slice_drop_last", lambda x: (x[:-1], x[:, :-1], x[-3:], x[1:]), X, dtypes=ANY, exact=True),
    op("slice_out_of_range", lambda x: (x[100:], x[:100], x[4:2], x[-100:3]), X, dtypes=F32),
    op("slice_values", lambda x: x[::2] * 2 + x[1::2], (6, 37), fixed=(6,)),
    op("select", lambda x: (x[0], x[-1], x.select(1, 2), x[2, 3]), X, dtypes=ANY, exact=True),
    op(
        "index",
        _index_forms,
        X,
        index((6,), 6),
        index((6,), 37),
        dtypes=(*FLOATS, torch.int64),
        strides=False,
    ),
    op("index_negative", lambda x, i: x[i], X, index((9,), 6, low=-6), dtypes=ANY),
    op("index_int32", lambda x, i: x[i], X, index((9,), 6, dtype=torch.int32), dtypes=F32),
    op("index_arange", _computed_forms, (7, 7), index((7,), 7), dtypes=(*FLOATS, torch.int64)),
    op("index_two_dims", lambda x, i: x[i], X, index((4, 5), 6), dtypes=ANY),
    op(
        "index_middle",
        lambda x, i, j: (x[:, i, :, j], x[:, i, j]),
        (4, 5, 6, 7),
        index((3,), 5),
        index((3,), 6),
        dtypes=F32_F64,
    ),
    op(
        "index_mask_unbacked",
        lambda x, m: x[m],
        X,
        MASK,
        dtypes=(*FLOATS, torch.int64),
        unbacked=True,
        layouts=("contiguous",),
    ),
    op(
        "index_mask",
        lambda x, m: x[m] * 2,
        X,
        MASK,
        dtypes=F32,
        fullgraph=False,
        graphs=6,
        layouts=("contiguous",),
    ),
    op(
        "masked_select",
        torch.masked_select,
        X,
        MASK,
        dtypes=F32,
        unbacked=True,
        layouts=("contiguous",),
    ),
    op(
        "nonzero",
        torch.nonzero,
        T(X, 0, 2),
        dtypes=(torch.int64, torch.bool, torch.float32),
        unbacked=True,
        grad=False,
        layouts=("contiguous", "transposed"),
    ),
    op(
        "index_select",
        lambda x, i: (x.index_select(0, i), x.index_select(1, i)),
        X,
        index((9,), 6),
        dtypes=ANY,
    ),
    op(  # distinct rows: which of several values an element gets is not defined
        "index_set",
        _set_forms,
        X,
        torch.tensor([4, 0, 2, 5]),
        (4, 37),
        dtypes=(torch.float32,),
        grad=False,
        fixed=(4, 6),
    ),
    op(
        "index_put",
        lambda x, i, v: x.index_put((i,), v),
        X,
        torch.tensor([4, 0, 2]),
        (3, 37),
        dtypes=(*FLOATS, torch.int64),
        fixed=(3, 6),
    ),
    op(
        "index_put_accumulate",
        lambda x, i, v: x.index_put((i,), v, accumulate=True),
        X,
        index((9,), 6),
        (9, 37),
        dtypes=(*F32_F64, torch.bfloat16, torch.int64),
    ),
    op(
        "index_put_pairs",
        lambda x, i, j, v: x.index_put((i, j), v, accumulate=True),
        X,
        index((9,), 6),
        index((9,), 37),
        (9,),
        dtypes=F32_F64,
    ),
    op(
        "index_put_mask",
        lambda x, m: x.index_put((m,), torch.zeros((), dtype=x.dtype)),
        X,
        MASK,
        dtypes=F32_F64,
    ),
    op(
        "index_put_in_place",
        lambda x, i, v: x.index_put_((i,), v),
        X,
        torch.tensor([4, 0, 2]),
        (3, 37),
        dtypes=F32,
        grad=False,
        layouts=("contiguous", "transposed", "sliced"),
        fixed=(3, 6),
    ),
    op(
        "index_add",
        lambda x, i, v: x.index_add(0, i, v, alpha=2),
        X,
        index((9,), 6),
        (9, 37),
        dtypes=(*F32_F64, torch.int64),
    ),
    op(
        "index_copy",
        lambda x, i, v: x.index_copy(0, i, v),
        X,
        torch.tensor([4, 0, 2]),
        (3, 37),
        dtypes=F32_F64,
        fixed=(3, 6),
    ),
    op(
        "index_fill",
        lambda x, i: x.index_fill(0, i, 1.5),
        X,
        torch.tensor([4, 0, 2]),
        dtypes=F32_F64,
        fixed=(3, 6),
    ),
    op("gather", lambda x, i: x.gather(1, i), X, index((6, 9), 37), dtypes=ANY),
    op(
        "gather_computed_in_blocks",
        lambda x, y, i: (x.gather(1, i) * y).exp() + x.gather(1, i),
        X,
        (6, 70),
        index((6, 70), 37),
        dtypes=FLOATS,
    ),
    op(
        "gather_selected_in_blocks",
        lambda x, y, i: torch.where(y > 0, x.gather(1, i), y).tanh(),
        X,
        (6, 300),
        index((6, 300), 37),
        dtypes=FLOATS,
    ),
    op(
        "gather_of_int64_in_blocks",
        lambda x, i, j: x[i.gather(0, j)].sigmoid(),
        X,
        index((40,), 6),
        index((90,), 40),
        dtypes=F32_F64,
    ),
    op(
        "gather_first_dim",
        lambda x, i: x.gather(0, i),
        X,
        index((4, 30), 6),
        dtypes=(torch.float32, torch.bfloat16),
    ),
    op(
        "take_along_dim",
        lambda x, i: torch.take_along_dim(x, i, 1),
        X,
        index((6, 9), 37),
        dtypes=F32_F64,
    ),
    op("take", lambda x, i: torch.take(x, i), X, index((9,), 37), dtypes=F32_F64),
    op(
        "scatter",
        lambda x, i, s: x.scatter(1, i, s),
        X,
        torch.tensor([[4, 0, 2], [1, 2, 3], [36, 5, 7]]),
        (3, 3),
        dtypes=ANY,
        fixed=(3,),
    ),
    op("scatter_value", lambda x, i: x.scatter(0, i, 1.5), X, index((4, 9), 6), dtypes=F32_F64),
    op(
        "scatter_add",
        lambda x, i, s: x.scatter_add(1, i, s),
        X,
        index((6, 20), 37),
        (6, 20),
        dtypes=(*F32_F64, torch.bfloat16, torch.int64),
    ),
    op(  # eager rounds these sums once
        "sums_at_few_places",
        lambda x, i, s: (
            x.scatter_add(1, i, s),
            x.scatter_reduce(1, i, s, "sum"),
            x.index_add(1, i[0], s),
        ),
        (6, 3),
        index((6, 100), 3),
        (6, 100),
        dtypes=(torch.bfloat16, torch.float16),
        layouts=("contiguous",),
        fixed=(3,),
    ),
    op(  # of a table that is not copied in float32
        "sums_into_few_rows",
        lambda x, i, s: (
            x.index_add(0, i, s),
            x.scatter_add(0, i[:, None].expand_as(s), s),
            x.scatter_reduce(0, i[:, None].expand_as(s), s.abs() + 0.5, "prod"),
        ),
        (500, 3),
        index((100,), 3),
        (100, 3),
        dtypes=(torch.bfloat16, torch.float16),
        layouts=("contiguous",),
        fixed=(3,),
        grad=False,
    ),
    *[
        op(
            f"scatter_reduce_{how}",
            lambda x, i, s, how=how: x.scatter_reduce(0, i, s, how),
            T(X, 0.5, 2),
            index((9, 37), 6),
            T((9, 37), 0.5, 2),
            dtypes=(*F32_F64, torch.bfloat16, torch.int64, torch.uint8),
            grad=how != "prod",
            layouts=("contiguous", "transposed"),
        )
        for how in ("sum", "mean", "amax", "amin", "prod")
    ],
    *[
        op(
            f"index_reduce_{how}",
            lambda x, i, s, how=how: x.index_reduce(0, i, s, how),
            T(X, 0.5, 2),
            index((9,), 6),
            T((9, 37), 0.5, 2),
            dtypes=(*F32_F64, torch.int64),
            grad=how != "prod",
            layouts=("contiguous", "transposed"),
        )
        for how in ("mean", "amax", "amin", "prod")
    ],
    *[
        op(
            f"scatter_reduce_no_self_{how}",
            lambda x, i, s, how=how: x.scatter_reduce(0, i, s, how, include_self=False),
            X,
            index((9, 37), 6),
            (9, 37),
            dtypes=F32_F64,
            layouts=("contiguous",),
        )
        for how in ("amax", "mean")
    ],
    op("masked_scatter", torch.masked_scatter, X, MASK, X, dtypes=(*F32_F64, torch.int64)),
    op("select_scatter", lambda x, s: torch.select_scatter(x, s, 1, 2), X, (6,), dtypes=ANY),
    op(
        "slice_scatter",
        lambda x, s: torch.slice_scatter(x, s, 1, 1, 7, 2),
        X,
        (6, 3),
        fixed=(3,),
        dtypes=ANY,
    ),
    *[
        op(
            f"slice_scatter_steps_of_{step}",
            lambda x, s, step=step: torch.slice_scatter(x, s, 1, 2, None, step),
            (6, size),
            (6, len(range(2, size, step))),
            fixed=(size, len(range(2, size, step))),
            dtypes=F32,
        )
        for step, size in ((3, 36), (3, 37), (5, 37))
    ],
    op(
        "slice_scatter_to_end",
        lambda x, s: torch.slice_scatter(x, s, 0, 2),
        (6, 37),
        (4, 37),
        fixed=(6, 4),
        dtypes=F32_F64,
    ),
    op("diagonal_scatter", torch.diagonal_scatter, (5, 5), (5,), dtypes=F32_F64),
    op(
        "slice_assign",
        lambda x, v: x[:, 2:5].copy_(v),
        X,
        (6, 3),
        fixed=(3,),
        dtypes=F32,
        grad=False,
        layouts=("contiguous", "transposed", "sliced"),
    ),
    op(
        "kv_cache_update",
        lambda cache, new, at: cache.index_copy_(2, at, new).sum(-1),
        (2, 3, 16, 8),
        (2, 3, 2, 8),
        torch.tensor([5, 6]),
        dtypes=F32,
        grad=False,
        layouts=("contiguous",),
        fixed=(2, 16),
    ),
    in_place(
        "rows_added_in_place",
        lambda x, rows, at: (x.sum(), x.index_add_(0, at, x[:3] * 2 + rows), x * 2)[::2],
    ),
    in_place(
        "old_rows_are_read_later",
        lambda x, rows, at: (old := x * 2, x.index_copy_(0, at, rows), old + x.sum())[2:],
    ),
    op(
        "argwhere",
        torch.argwhere,
        T((5, 7), 0, 2),
        dtypes=(torch.int64,),
        unbacked=True,
        layouts=("contiguous",),
    ),
    op("one_hot", lambda i: F.one_hot(i, 10), index((6, 5), 4), dtypes=(torch.int64,)),
    op(
        "bucketize",
        lambda x: (
            torch.bucketize(x, torch.tensor([-1.0, 0.0, 0.5, 2.0], device=x.device)),
            torch.bucketize(0.5, x[0].sort().values) + 1,
        ),
        X,
        dtypes=F32,
    ),
    op(
        "searchsorted",
        lambda x: torch.searchsorted(torch.arange(-2.0, 3.0, 0.5, device=x.device), x, right=True),
        X,
        dtypes=F32,
    ),
    op(
        "weighted_rows",
        lambda x, i, w: (x[i] * w[..., None]).sum(1),
        (5, 37),
        index((3, 2), 5),
        (3, 2),
    ),
    op(
        "isin",
        lambda x: torch.isin(x, torch.tensor([1, 3, 5], device=x.device)),
        X,
        dtypes=(torch.int64,),
    ),
    op(
        "tril_triu",
        lambda x: (x.tril(), x.triu(1), x.tril(-2), x.triu(-1)),
        (5, 7),
        dtypes=(*FLOATS, torch.int64, torch.bool),
    ),
]


def test_op(case: Any, check_op: Any) -> None:
    check_op(case)
