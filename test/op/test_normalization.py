"""Normalization: layer, group, instance, batch and RMS norm, with and without affine parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from dicp.testing import ALL_LAYOUTS, FLOATS, LAYOUTS, T, op

F32_F64 = (torch.float32, torch.float64)
REDUCED_FLOATS = (torch.float32, torch.bfloat16, torch.float64)
IMAGE = (3, 8, 5, 7)
aten = torch.ops.aten


def _batch_norm_training(x: Any, w: Any, b: Any, mean: Any, var: Any) -> Any:
    out = F.batch_norm(x, mean, var, w, b, training=True, momentum=0.2)
    return out, mean * 1, var * 1


CASES = [
    op(
        "layer_norm",
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
        (5, 6, 37),
        (37,),
        (37,),
        dtypes=FLOATS,
    ),
    *(
        op(
            f"weight_norm_{name}",
            lambda v, g, dim=dim: torch._weight_norm(v, g, dim),
            T(shape, grad=len(shape) > 1),  # the gradient of a vector's sign is 0: all rounding
            T(norms, low=0.5, high=2),
            dtypes=REDUCED_FLOATS,
            expect="native",
        )
        for name, shape, norms, dim in (
            ("rows", (6, 37), (6, 1), 0),
            ("kernel", (4, 5, 3), (4, 1, 1), 0),
            ("columns", (6, 37), (1, 37), 1),
            ("vector", (37,), (37,), 0),
        )
    ),
    op("layer_norm_plain", lambda x: F.layer_norm(x, x.shape[-1:]), (6, 37), layouts=LAYOUTS),
    op(
        "layer_norm_two_dims",
        lambda x, w: F.layer_norm(x, x.shape[-2:], w, eps=1e-3),
        (5, 6, 7),
        (6, 7),
        dtypes=F32_F64,
    ),
    op(
        "layer_norm_outputs",
        lambda x, w, b: aten.native_layer_norm.default(x, [37], w, b, 1e-5),
        (6, 37),
        (37,),
        (37,),
        dtypes=F32_F64,
        fixed=(37,),
    ),
    op(
        "layer_norm_backward",
        lambda g, x, m, r, w, b: aten.native_layer_norm_backward.default(
            g, x, [37], m, r, w, b, [True, True, True]
        ),
        (6, 37),
        (6, 37),
        (6, 1),
        T((6, 1), 0.5, 1),
        (37,),
        (37,),
        dtypes=F32_F64,
        fixed=(37,),
        layouts=("contiguous",),
        grad=False,
    ),
    op("rms_norm", lambda x, w: F.rms_norm(x, x.shape[-1:], w), (5, 6, 37), (37,)),
    op("rms_norm_eps", lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-3), (6, 37)),
    op(
        "rms_norm_by_hand",
        lambda x, w: (
            w
            * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        ),
        (6, 37),
        (37,),
        dtypes=REDUCED_FLOATS[:2],
    ),
    op(
        "group_norm",
        lambda x, w, b: F.group_norm(x, 4, w, b),
        IMAGE,
        (8,),
        (8,),
        layouts=ALL_LAYOUTS,
        fixed=(8,),
        dtypes=REDUCED_FLOATS,
        strides=False,
    ),
    op(
        "group_norm_of_wide_groups",
        lambda x, w, b: F.group_norm(x, 2, w, b),
        (2, 160, 3, 4),
        (160,),
        (160,),
        layouts=("channels_last",),
        fixed=(160,),
    ),
    op(
        "group_norm_plain",
        lambda x: F.group_norm(x, 2, eps=1e-3),
        (3, 8, 9),
        fixed=(8,),
        dtypes=F32_F64,
    ),
    op(
        "native_group_norm",
        lambda x, w, b: aten.native_group_norm.default(
            x, w, b, x.shape[0], 8, x.shape[2] * x.shape[3], 4, 1e-5
        ),
        IMAGE,
        (8,),
        (8,),
        fixed=(8,),
        dtypes=F32_F64,
        layouts=("contiguous",),
    ),
    op(
        "native_group_norm_backward",
        lambda g, x, m, r, w: aten.native_group_norm_backward.default(
            g, x, m, r, w, x.shape[0], 8, x.shape[2] * x.shape[3], 4, [True, True, True]
        ),
        IMAGE,
        IMAGE,
        (3, 4),
        T((3, 4), 0.5, 1),
        (8,),
        fixed=(8, 4),
        dtypes=F32_F64,
        layouts=("contiguous",),
        grad=False,
    ),
    op("instance_norm", lambda x: F.instance_norm(x), IMAGE, dtypes=F32_F64, fixed=(8,)),
    op(
        "batch_norm_inference",
        lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b, eps=1e-3),
        IMAGE,
        T((8,), grad=False),
        T((8,), 0.5, 2, grad=False),
        (8,),
        (8,),
        layouts=ALL_LAYOUTS,
        fixed=(8,),
        dtypes=F32_F64,
    ),
    op(
        "batch_norm_training",
        _batch_norm_training,
        IMAGE,
        (8,),
        (8,),
        T((8,), grad=False),
        T((8,), 0.5, 2, grad=False),
        fixed=(8,),
        dtypes=F32_F64,
        layouts=("contiguous", "transposed", "channels_last"),
    ),
    op(
        "batch_norm_bf16",
        lambda x, m, v: F.batch_norm(x, m, v, training=True),
        IMAGE,
        T((8,), dtype=torch.float32, grad=False),
        T((8,), 0.5, 2, dtype=torch.float32, grad=False),
        fixed=(8,),
        dtypes=(torch.bfloat16,),
        layouts=("contiguous",),
    ),
    op(
        "batch_norm_1d",
        lambda x, m, v: F.batch_norm(x, m, v, training=True),
        (6, 8),
        T((8,), grad=False),
        T((8,), 0.5, 2, grad=False),
        dtypes=F32_F64,
        fixed=(8,),
        layouts=("contiguous", "sliced"),
    ),
    op(
        "batch_norm_legit",
        lambda x, w, b, m, v: aten._native_batch_norm_legit.default(x, w, b, m, v, True, 0.1, 1e-5),
        IMAGE,
        (8,),
        (8,),
        T((8,), grad=False),
        T((8,), 0.5, 2, grad=False),
        fixed=(8,),
        dtypes=F32_F64,
        layouts=("contiguous",),
    ),
    op(
        "batch_norm_legit_no_stats",
        lambda x, w, b: aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5),
        IMAGE,
        (8,),
        (8,),
        fixed=(8,),
        dtypes=F32_F64,
        layouts=("contiguous",),
    ),
    op(
        "batch_norm_legit_no_training",
        lambda x, w, b, m, v: aten._native_batch_norm_legit_no_training.default(
            x, w, b, m, v, 0.1, 1e-5
        )[0],
        IMAGE,
        (8,),
        (8,),
        T((8,), grad=False),
        T((8,), 0.5, 2, grad=False),
        fixed=(8,),
        dtypes=F32_F64,
        layouts=("contiguous",),
    ),
    op(
        "add_layer_norm",
        lambda x, y, w, b: (x + y, F.layer_norm(x + y, x.shape[-1:], w, b)),
        (5, 6, 37),
        (5, 6, 37),
        (37,),
        (37,),
        dtypes=REDUCED_FLOATS,
    ),
    op("normalize", lambda x: F.normalize(x, dim=-1), (6, 37), dtypes=REDUCED_FLOATS),
    op(
        "local_response_norm",
        lambda x: F.local_response_norm(x, 3),
        IMAGE,
        dtypes=F32_F64,
        fixed=(8,),
    ),
    op(
        "cosine_similarity",
        lambda x, y: F.cosine_similarity(x, y, dim=1),
        (6, 37),
        (6, 37),
        dtypes=F32_F64,
    ),
    op("renorm", lambda x: torch.renorm(x, 2, 0, 1.0), (6, 37), dtypes=F32_F64),
]


def test_op(case: Any, check_op: Any) -> None:
    check_op(case)
