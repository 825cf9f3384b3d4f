"""Rows of equal numbers, whose mean is that number and whose variance is 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dicp.graphop.target import GraphTarget
from dicp.target import find_target
from dicp.testing import op

F32 = (torch.float32,)
F32_F64 = (torch.float32, torch.float64)
REDUCED_FLOATS = (torch.float32, torch.bfloat16, torch.float64)
IMAGE = (3, 8, 5, 7)
X = (6, 37)
VARYING = ("contiguous", "transposed", "sliced")


def _constant_rows(x: Any) -> Any:
    """Rows of equal numbers, whose mean and variance eager computes exactly."""
    return x[..., :1].expand_as(x).contiguous()


def _constant_channels(x: Any) -> Any:
    """Channels of equal numbers, whose mean eager rounds in float32."""
    return x.transpose(0, 1)[:, :1].flatten(1)[:, 0].reshape(-1, *[1] * (x.ndim - 2)) + x * 0


def _with_gradient(value: Any, x: Any) -> Any:
    """`value`, whose gradient is `x`'s."""
    return value.detach() + (x - x.detach())


def _moments_of_extremes(x: Any) -> Any:
    """Of rows whose sum overflows, and of subnormal numbers."""
    values = torch.tensor([0.1, 1e4, -3e38, 3e26, 1e-40], dtype=x.dtype)
    rows = values[:, None] + x[:1] * 0
    return (*torch.var_mean(rows, 1), *torch.var_mean(rows[:, :2], 1))


CASES = [
    op(
        "layer_norm_constant_rows",
        lambda x, w, b: F.layer_norm(_constant_rows(x), x.shape[-1:], w, b),
        (6, 37),
        (37,),
        (37,),
        grad=False,
        fixed=(37,),
    ),
    op(
        "layer_norm_long_constant_rows",
        lambda x: F.layer_norm(_constant_rows(x), x.shape[-1:]),
        (3, 4097),
        dtypes=REDUCED_FLOATS,
        grad=False,
    ),
    op(
        "group_norm_constant_groups",
        lambda x: F.group_norm(_constant_rows(x.flatten(1)).reshape(x.shape), 4),
        IMAGE,
        dtypes=F32_F64,
        grad=False,
        fixed=(8,),
    ),
    op(
        "instance_norm_constant_channels",
        lambda x: F.instance_norm(_constant_rows(x.flatten(2)).reshape(x.shape)),
        IMAGE,
        dtypes=F32,
        grad=False,
        fixed=(8,),
    ),
    op(
        "batch_norm_constant_channels",
        lambda x: F.batch_norm(_constant_channels(x), None, None, training=True),
        IMAGE,
        dtypes=F32,
        layouts=("contiguous", "sliced"),
        grad=False,
        fixed=(8,),
    ),
    op(
        "gradients_of_constant_rows",
        lambda x, w: (
            F.layer_norm(_with_gradient(_constant_rows(x), x), x.shape[-1:], w),
            F.group_norm(_with_gradient(_constant_rows(x), x), 1),
            F.batch_norm(_with_gradient(_constant_channels(x), x), None, None, w, training=True),
        ),
        (6, 37),
        (37,),
        dtypes=F32,
        layouts=("contiguous", "sliced"),
        fixed=(37,),
    ),
    op(
        "moments_of_constant_rows",
        lambda x: (
            *torch.var_mean(x[:, :1].expand_as(x).contiguous(), 1),
            *torch.std_mean(x[:1].expand_as(x).contiguous(), 0),
        ),
        X,
        dtypes=F32_F64,
        grad=False,
        layouts=VARYING,
    ),
    op(
        "moments_of_long_constant_rows",
        lambda x: (x[:, :1].expand_as(x).contiguous().std(1), *_moments_of_extremes(x)),
        (3, 4097),
        dtypes=F32_F64,
        grad=False,
    ),
    op(
        "std_gradient_of_constant_rows",
        lambda x: (x - x.detach() + x[:, :1].detach()).std(1),
        X,
        dtypes=F32_F64,
        layouts=VARYING,
    ),
]


def test_op(case: Any, check_op: Any, backend_name: str) -> None:
    if isinstance(find_target(backend_name.removesuffix("graph")), GraphTarget):
        pytest.skip("the mean is the vendor's operator, which rounds it")
    check_op(case)
