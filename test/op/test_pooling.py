"""Pooling: max with indices, average, adaptive; padding, dilation, ceil mode."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dicp.testing import ALL_LAYOUTS, T, op

X = (2, 3, 9, 11)
VOLUMES = (2, 3, 4, 6, 8)
F32 = (torch.float32,)
F32_F64 = (torch.float32, torch.float64)
WITH_HALF = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FORMATS = ("contiguous", "channels_last", "sliced", "expanded")
ONE = ("contiguous",)
aten = torch.ops.aten


def pool(name: str, fn: Any, *specs: Any, **options: Any) -> Any:
    options.setdefault("dtypes", F32_F64)
    options.setdefault("layouts", ONE)
    return op(name, fn, *specs, strides=False, **options)


def with_infinities(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(x > 1.3, math.inf).masked_fill(x < -1.5, -math.inf)


CASES = [
    pool("max_pool2d", lambda x: F.max_pool2d(x, 2), X, layouts=FORMATS, dtypes=WITH_HALF),
    pool(
        "max_pool2d_indices",
        lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
        X,
        layouts=FORMATS,
    ),
    pool(
        "max_pool2d_pads_with_minus_infinity",
        lambda x: F.max_pool2d(x, 3, 1, 1),
        T(X, -9, -5),
        layouts=FORMATS,
    ),
    pool(
        "max_pool2d_dilation",
        lambda x: F.max_pool2d(x, 3, 1, 1, dilation=(1, 2), return_indices=True),
        X,
    ),
    pool(
        "max_pool2d_ceil", lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True, return_indices=True), X
    ),
    pool("max_pool2d_ties", lambda x: F.max_pool2d(x.round(), 3, 2, 1, return_indices=True), X),
    pool("max_pool2d_ints", lambda x: F.max_pool2d(x, 3, 2, 1), X, dtypes=(torch.int64,)),
    pool(
        "max_pool_places_of_nans_and_infinities",
        lambda x: [
            pooled(
                x.masked_fill(x > most, float("nan")).masked_fill(x < 0, -float("inf")),
                *window,
                return_indices=True,
            )
            for most in (0.3, 2.5)
            for pooled, window in ((F.max_pool2d, (3, 2, 1)), (F.adaptive_max_pool2d, (3,)))
        ],
        X,
        dtypes=(torch.float32, torch.bfloat16),
    ),
    pool(
        "max_pool2d_nan",
        lambda x: F.max_pool2d(x.masked_fill(x > 1, float("nan")), 3, 2),
        X,
        dtypes=F32,
        grad=False,
    ),
    pool(
        "max_pool2d_backward",
        lambda g, x: aten.max_pool2d_with_indices_backward.default(
            g,
            x,
            [2, 2],
            [2, 2],
            [0, 0],
            [1, 1],
            False,
            aten.max_pool2d_with_indices.default(x, [2, 2], [2, 2])[1],
        ),
        (2, 3, 4, 5),
        (2, 3, 8, 10),
        fixed=(4, 5, 8, 10),
        grad=False,
    ),
    pool("max_pool1d", lambda x: F.max_pool1d(x, 3, 2, 1), (2, 3, 17)),
    pool("max_pool1d_indices", lambda x: F.max_pool1d(x, 3, 2, 1, return_indices=True), (2, 3, 17)),
    pool("max_pool3d", lambda x: F.max_pool3d(x, 2, 2, return_indices=True), (2, 3, 4, 6, 8)),
    pool(
        "max_unpool2d",
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
        (2, 3, 8, 10),
        fixed=(8, 10),
    ),
    pool("avg_pool2d", lambda x: F.avg_pool2d(x, 2), X, layouts=FORMATS, dtypes=WITH_HALF),
    pool("avg_pool2d_padding", lambda x: F.avg_pool2d(x, 3, 2, 1), X, layouts=FORMATS),
    pool(
        "avg_pool2d_exclude_padding", lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), X
    ),
    pool("avg_pool2d_ceil", lambda x: F.avg_pool2d(x, (3, 2), 2, ceil_mode=True), X),
    pool("avg_pool2d_divisor", lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5), X),
    pool(
        "avg_pool2d_backward",
        lambda g, x: aten.avg_pool2d_backward.default(
            g, x, [3, 3], [2, 2], [1, 1], False, True, None
        ),
        (2, 3, 5, 6),
        X,
        fixed=(5, 6, 9, 11),
        grad=False,
    ),
    pool(
        "avg_pool_of_large_integers",
        lambda x, y: (
            F.avg_pool2d(x, 3, 2, 1),
            F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
            F.avg_pool3d(y, 2, divisor_override=3),
        ),
        T(X, -(2**40), 2**40),
        T(VOLUMES, -(2**40), 2**40),
        dtypes=(torch.int64,),
    ),
    pool("avg_pool1d", lambda x: F.avg_pool1d(x, 3, 2, 1), (2, 3, 17)),
    pool("avg_pool3d", lambda x: F.avg_pool3d(x, 2, 2, count_include_pad=False), (2, 3, 4, 6, 8)),
    pool(
        "adaptive_avg_pool2d",
        lambda x: (F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool2d(x, (3, 4))),
        X,
        layouts=FORMATS,
        graphs=3,
    ),
    pool(
        "adaptive_avg_pool2d_larger",
        lambda x: F.adaptive_avg_pool2d(x, (12, 13)),
        X,
        graphs=3,
        fixed=(9, 11),
    ),
    pool(
        "adaptive_avg_pool2d_backward",
        lambda g, x: aten._adaptive_avg_pool2d_backward.default(g, x),
        (2, 3, 3, 4),
        X,
        grad=False,
        fixed=(3, 4, 9, 11),
    ),
    pool("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 4), (2, 3, 17), graphs=3),
    pool(
        "adaptive_avg_pool3d",
        lambda x: F.adaptive_avg_pool3d(x, (1, 2, 3)),
        (2, 3, 4, 6, 8),
        graphs=3,
    ),
    pool(
        "adaptive_avg_pool_of_infinities",
        lambda x, y: (
            F.adaptive_avg_pool2d(with_infinities(x), (4, 7)),
            F.adaptive_avg_pool3d(with_infinities(y), (2, 4, 3)),
        ),
        X,
        VOLUMES,
        dtypes=(torch.float32, torch.bfloat16),
        grad=False,
        graphs=3,
    ),
    pool(
        "gradients_of_adaptive_averages_that_are_infinite",
        lambda dx, dy, x, y: (
            aten._adaptive_avg_pool2d_backward.default(with_infinities(dx), x),
            aten._adaptive_avg_pool3d_backward.default(with_infinities(dy), y),
        ),
        (2, 3, 4, 7),
        (2, 3, 2, 4, 3),
        X,
        VOLUMES,
        dtypes=(torch.float32, torch.bfloat16),
        fixed=(2, 3, 4, 7, 9, 11),
        grad=False,
        graphs=3,
    ),
    pool(
        "adaptive_max_pool2d",
        lambda x: F.adaptive_max_pool2d(x, (3, 4), return_indices=True),
        X,
        graphs=3,
    ),
    pool(
        "adaptive_max_pool3d_ties",
        lambda x: F.adaptive_max_pool3d(
            x.round().masked_fill(x > 1.5, float("nan")), (2, 3, 4), return_indices=True
        ),
        (2, 3, 5, 7, 9),
        fixed=(7, 9),
        grad=False,
    ),
    pool(
        "max_of_large_windows",  # as deep an expression as there is
        lambda x: F.adaptive_max_pool3d(x, 1, return_indices=True),
        (2, 3, 4, 4, 8),
        fixed=(4, 8),
        layouts=("contiguous",),
    ),
    pool(
        "max_of_wide_windows",  # as many points of a row as there are
        lambda x: F.adaptive_max_pool2d(x, 1, return_indices=True),
        (2, 3, 2, 64),
        fixed=(2, 64),
        layouts=("contiguous",),
    ),
    pool(
        "max_of_whole_images",
        lambda x: F.adaptive_max_pool2d(
            x.round().masked_fill(x > 2.5, float("nan")), 1, return_indices=True
        ),
        (2, 3, 12, 13),
        fixed=(12, 13),
    ),
    pool(
        "max_of_whole_volumes",
        lambda x: F.adaptive_max_pool3d(
            x.round().masked_fill(x > 1, float("nan")), 1, return_indices=True
        ),
        (2, 3, 4, 5, 6),
        fixed=(4, 5, 6),
        layouts=("contiguous",),
    ),
    pool("lp_pool2d", lambda x: F.lp_pool2d(x, 2, 3), T(X, 0.5, 2)),
    pool(
        "pool_channels_last_chain",
        lambda x: F.relu(F.max_pool2d(x + 1, 2)).mean((2, 3)),
        X,
        layouts=ALL_LAYOUTS,
    ),
]


@pytest.mark.sweep
def test_op(case: Any, check_op: Any) -> None:
    check_op(case)
