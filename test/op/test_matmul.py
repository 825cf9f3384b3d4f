"""Matrix products, with the epilogues that fuse into them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from dicp.testing import LAYOUTS, T, op

A, B = (5, 37), (37, 11)
STRIDED = ("contiguous", "transposed", "sliced", "expanded", "empty")
F32 = (torch.float32,)
F32_F64 = (torch.float32, torch.float64)
F32_BF16 = (torch.float32, torch.bfloat16, torch.float64)

CASES = [
    op("mm", torch.mm, A, B, layouts=STRIDED),
    op("mm_ints", torch.mm, A, B, dtypes=(torch.int64, torch.int32)),
    op("mm_empty_inner", torch.mm, (5, 0), (0, 11), dtypes=F32, layouts=("contiguous",)),
    op("mm_vectors", lambda x, y: (x @ y, y @ x), (1, 37), (37, 1)),
    op(
        "mm_transposed",
        lambda x, y: (x @ y.t(), x.t() @ y.t().t()[: x.shape[0]]),
        A,
        (11, 37),
        dtypes=F32_BF16,
    ),
    op("mv", torch.mv, A, (37,)),
    op("dot", torch.dot, (37,), (37,)),
    op("outer", torch.outer, (5,), (7,)),
    op("addmm", torch.addmm, (11,), A, B),
    op(
        "addmm_scaled",
        lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2),
        (5, 11),
        A,
        B,
        dtypes=F32_BF16,
    ),
    op(
        "addmm_beta_zero",
        lambda c, a, b: torch.addmm(c * float("nan"), a, b, beta=0),
        (5, 11),
        A,
        B,
        dtypes=F32,
        grad=False,
    ),
    op(
        "scaled_products_beyond_float16",
        lambda c, a, b: (
            torch.addmm(c, a * 300, b * 300, alpha=1e-3),
            torch.baddbmm(c[None], a[None] * 300, b[None] * 300, alpha=1e-3),
            torch.addbmm(c, a[None] * 300, b[None] * 300, alpha=1e-3),
            torch.addmv(c[:, 0], a * 300, b[:, 0] * 300, alpha=1e-3),
            torch.addr(c, a[:, 0] * 300, b[0] * 300, alpha=1e-3),
        ),
        (5, 11),
        A,
        B,
        dtypes=(torch.float16, torch.bfloat16),
        fixed=(5, 37, 11),
        grad=False,
    ),
    op("addmv", torch.addmv, (5,), A, (37,), dtypes=F32_F64),
    op("bmm", torch.bmm, (3, 5, 37), (3, 37, 11), layouts=STRIDED),
    op(
        "baddbmm",
        lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2),
        (3, 5, 11),
        (3, 5, 37),
        (3, 37, 11),
        dtypes=F32_BF16,
    ),
    op("addbmm", torch.addbmm, (5, 11), (3, 5, 37), (3, 37, 11), dtypes=F32_F64),
    op("matmul_broadcast", torch.matmul, (2, 1, 5, 37), (3, 37, 11), dtypes=F32_BF16),
    op("matmul_vector", lambda a, v: (a @ v, v @ a.mT), (3, 5, 37), (37,), dtypes=F32_F64),
    op("matmul_3d_2d", torch.matmul, (3, 5, 37), B),
    op("linear", F.linear, (3, 5, 37), (11, 37), (11,)),
    op("linear_plain", F.linear, A, (11, 37), layouts=STRIDED),
    *[
        op(
            f"linear_{act.__name__}",
            lambda x, w, b, act=act: act(F.linear(x, w, b)),
            (6, 37),
            (11, 37),
            (11,),
            dtypes=F32_BF16,
            floor=2.0,  # 1 - tanh^2 cancels
            layouts=("contiguous", "transposed"),
        )
        for act in (F.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid)
    ],
    op(
        "linear_relu_strided_bias",
        lambda x, w, b, c: (
            F.relu(F.linear(x, w, b[:, 1])),
            F.relu(F.linear(x, w, c.expand(w.shape[0]))),
        ),
        (6, 37),
        (11, 37),
        (11, 3),
        (1,),
        dtypes=F32,
        layouts=("contiguous",),
        grad=False,
    ),
    op(
        "linear_add_residual",
        lambda x, w, b, r: F.linear(x, w, b) + r,
        (6, 37),
        (11, 37),
        (11,),
        (6, 11),
        dtypes=F32_BF16,
    ),
    op(
        "swiglu",
        lambda x, g, u, d: (F.silu(x @ g) * (x @ u)) @ d,
        (6, 16),
        (16, 24),
        (16, 24),
        (24, 16),
        dtypes=F32_BF16,
        layouts=("contiguous",),
    ),
    op(
        "geglu",
        lambda x, w: torch.mul(*(x @ w).chunk(2, -1)),
        (6, 16),
        (16, 24),
        fixed=(24, 16),
        dtypes=F32_F64,
        layouts=("contiguous",),
    ),
    op("shared_weight", lambda x, y, w: (x @ w, y @ w), (6, 16), (3, 16), (16, 11), dtypes=F32_F64),
    op(
        "einsum_batch",
        lambda x, y: torch.einsum("bij,bjk->bik", x, y),
        (3, 5, 7),
        (3, 7, 4),
        dtypes=F32_F64,
    ),
    op(
        "einsum_contract",
        lambda x, y: torch.einsum("bhqd,bhkd->bhqk", x, y),
        (2, 3, 5, 8),
        (2, 3, 7, 8),
        dtypes=F32_F64,
    ),
    op("einsum_outer", lambda x, y: torch.einsum("i,j->ij", x, y), (5,), (7,), dtypes=F32_F64),
    op("tensordot", lambda x, y: torch.tensordot(x, y, 2), (3, 4, 5), (4, 5, 6), dtypes=F32_F64),
    op("cdist", torch.cdist, (5, 7), (6, 7), dtypes=F32_F64, layouts=("contiguous",)),
    op(
        "cdist_forward",
        lambda x, y: torch.ops.aten._cdist_forward.default(x, y, 1.5, 2),
        (5, 7),
        (6, 7),
        dtypes=F32_F64,
        layouts=("contiguous",),
    ),
    op("pdist", F.pdist, (5, 7), dtypes=F32_F64, layouts=("contiguous",), fixed=(5,)),
    *[
        op(
            f"cdist_p{p}",
            lambda x, y, p=p: torch.cdist(x, y, p=p),
            (2, 5, 7),
            (2, 6, 7),
            dtypes=F32_F64,
            layouts=("contiguous",),
        )
        for p in (0.0, 0.5, 1.0, 3.0, float("inf"))
    ],
    op("pdist_p3", lambda x: F.pdist(x, 3.0), (5, 7), dtypes=F32_F64, layouts=("contiguous",)),
    op("bilinear", F.bilinear, (5, 4), (5, 3), T((6, 4, 3), layout=False), dtypes=F32_F64),
    op(
        "chain",
        lambda x, a, b: torch.relu(x @ a).sum(0, keepdim=True) @ b,
        (6, 16),
        (16, 12),
        (12, 5),
        dtypes=F32_F64,
        layouts=LAYOUTS,
    ),
    op(
        "matmul_of_half",
        lambda x, y: (x.float() @ y.float()).to(x.dtype),
        A,
        B,
        dtypes=(torch.bfloat16, torch.float16),
    ),
]


def test_op(case: Any, check_op: Any) -> None:
    check_op(case)
