"""Reductions: sums, means, extremes and their positions, norms, variance, logical reductions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dicp.testing import ALL_LAYOUTS, FLOATS, LAYOUTS, T, op

X = (6, 37)
X3 = (5, 7, 33)
VARYING = ("contiguous", "transposed", "sliced")  # equal values have no variance to compare
NUMBERS = (*FLOATS, torch.int64, torch.int32, torch.uint8)
WITH_BOOL = (*NUMBERS, torch.bool)
F32_F64 = (torch.float32, torch.float64)

CASES = [
    op("sum", torch.sum, X, dtypes=WITH_BOOL, layouts=(*LAYOUTS, "scalar", "empty")),
    op(
        "sum_dims",
        lambda x: (x.sum(0), x.sum(1), x.sum(-1, keepdim=True), x.sum((0, 2))),
        X3,
        dtypes=NUMBERS,
        layouts=(*LAYOUTS, "empty"),
    ),
    op(
        "sum_dtype",
        lambda x: (x.sum(1, dtype=torch.float64), x.sum(dtype=torch.float32)),
        X,
        dtypes=(torch.bfloat16, torch.float16, torch.int64, torch.bool),
    ),
    op("sum_to_size", lambda x: x.sum_to_size(1, x.shape[1]), X),
    op(
        "sum_channels_last",
        lambda x: (x.sum((2, 3)), x.sum((0, 2, 3)), x.sum(1)),
        (2, 5, 6, 7),
        layouts=ALL_LAYOUTS,
        dtypes=(torch.float32,),
    ),
    op("sum_long", lambda x: (x.sum(-1), x.sum(0)), (3, 5000), dtypes=FLOATS, fixed=(5000,)),
    op("mean", torch.mean, X, layouts=(*LAYOUTS, "scalar")),
    op("mean_dims", lambda x: (x.mean(0), x.mean(-1, keepdim=True), x.mean((0, 1))), X3),
    op("mean_of_nothing", torch.mean, (6, 37), layouts=("empty",), dtypes=(torch.float32,)),
    op("mean_dtype", lambda x: x.mean(1, dtype=torch.float32), X, dtypes=(torch.int64, torch.half)),
    op("nansum", lambda x: x.masked_fill(x > 1, float("nan")).nansum(1), X, grad=False),
    op("prod", torch.prod, (3, 5), dtypes=(*F32_F64, torch.int64, torch.bool)),
    op(
        "prod_dim",
        lambda x: (x.prod(1), x.prod(0, keepdim=True)),
        T((5, 7), 0.5, 1.5),
        dtypes=(*F32_F64, torch.bfloat16),
    ),
    op(
        "prod_beyond_float16_on_the_way",
        lambda x: (x.prod(), x.prod(0), x.prod(1)),
        torch.tensor([[300.0, 400.0, 1e-3], [1e-4, 1e-4, 300.0]], dtype=torch.float16),
        dtypes=F32_F64[:1],
        layouts=("contiguous",),
    ),
    op(
        "amax_amin",
        lambda x: (x.amax(1), x.amin(0), x.amax((0, 1)), x.amin(-1, keepdim=True)),
        X3,
        dtypes=WITH_BOOL,
    ),
    op(
        "max_min_all",
        lambda x: (x.max(), x.min()),
        X,
        dtypes=WITH_BOOL,
        layouts=(*LAYOUTS, "scalar"),
    ),
    op("max_dim", lambda x: x.max(1), X, dtypes=NUMBERS),
    op("min_dim", lambda x: x.min(0, keepdim=True), X, dtypes=NUMBERS),
    op(
        "max_with_nan",
        lambda x: (x.max(1), x.amin(0), x.argmax(1), x.max()),
        torch.tensor(
            [
                [1.0, float("nan"), 3.0],
                [float("inf"), 2.0, -1.0],
                [float("-inf"), float("-inf"), float("-inf")],
            ]
        ),
        dtypes=(torch.float32,),
        layouts=("contiguous",),
    ),
    op(
        "extrema_of_what_is_computed",  # the gradient asks which elements are equal to them
        lambda x: (
            x.log1p().amax(1),
            x.tan().amin(0),
            torch.linalg.vector_norm(x.sinh(), math.inf),
        ),
        T((13, 37), 0.1, 0.9),
        dtypes=(torch.float32,),
        layouts=("contiguous",),
    ),
    op("aminmax", lambda x: tuple(torch.aminmax(x, dim=1)), X, grad=False),
    op("argmax", lambda x: (x.argmax(), x.argmax(0), x.argmax(1, keepdim=True)), X, dtypes=NUMBERS),
    op("argmin", lambda x: (x.argmin(), x.argmin(0), x.argmin(-1)), X, dtypes=NUMBERS),
    op(
        "places_in_long_rows",
        lambda x: (x.argmax(1), x.argmin(1), *x.max(1), x.relu().argmax(1)),
        (5, 700),
        dtypes=NUMBERS,
        layouts=("contiguous", "sliced"),
        fixed=(700,),
        grad=False,
    ),
    op(
        "argmax_first_of_equals",
        lambda x: (x.argmax(1), x.argmin(0)),
        T(X, 0, 2),
        dtypes=(torch.int64, torch.uint8),
    ),
    op(
        "first_of_equals_in_another_order",
        lambda x: (
            x.transpose(0, 1).reshape(35, 40).argmax(0),
            x.permute(2, 0, 1).reshape(40, 35).argmin(1),
            x.transpose(0, 2).argmax(),
        ),
        T((5, 7, 40), 0, 3),
        dtypes=(torch.float32, torch.int64),
        layouts=("contiguous",),
        fixed=(5, 7, 40),
        grad=False,
    ),
    op(
        "any_all",
        lambda x: (x.any(), x.all(), x.any(0), x.all(1), x.any(-1, keepdim=True)),
        T(X, 0, 2),
        dtypes=WITH_BOOL,
        layouts=(*LAYOUTS, "empty"),
        grad=False,
    ),
    op("is_all_true", torch._is_all_true, T(X, 0, 2), dtypes=(torch.bool,), grad=False),
    op(
        "any_dims",
        lambda x: (torch.any(x, dim=(0, 2)), torch.all(x, dim=(0, 2))),
        X3,
        dtypes=(torch.bool, torch.float32),
        grad=False,
    ),
    op(
        "any_no_dims",
        lambda x: (torch.any(x, dim=()), torch.all(x, dim=(), keepdim=True)),
        T(X, 0, 2),
        dtypes=(torch.bool, torch.float32, torch.uint8),
        layouts=("contiguous", "scalar", "empty"),
        grad=False,
    ),
    op(
        "count_nonzero",
        lambda x: (torch.count_nonzero(x, 1), torch.count_nonzero(x)),
        T(X, 0, 2),
        dtypes=(torch.int64, torch.bool, torch.float32),
        grad=False,
    ),
    op(
        "var",
        lambda x: (x.var(), x.var(1), x.var(0, unbiased=False), x.var((0, 1), keepdim=True)),
        X3,
        layouts=VARYING,
    ),
    op(
        "var_correction",
        lambda x: (torch.var(x, 1, correction=2), torch.std(x, 0, correction=0)),
        X,
        dtypes=F32_F64,
        layouts=VARYING,
    ),
    op(
        "var_mean",
        lambda x: (*torch.var_mean(x, 1), *torch.std_mean(x, 0)),
        X,
        dtypes=F32_F64,
        layouts=VARYING,
    ),
    op(
        "var_of_large_offset",
        lambda x: (x + 1000).var(1),
        X,
        dtypes=F32_F64,
        layouts=VARYING,
        floor=64.0,  # float64 has no finer reference; a mean of 1000 is off by units of 1000
    ),
    op("var_of_one", lambda x: x.var(1), (5, 1), dtypes=(torch.float32,), grad=False),
    op(
        "var_mean_far_from_zero",
        lambda x: torch.var_mean(x + 1000.0, 1),
        (6, 640),
        dtypes=(torch.float32,),
        grad=False,
    ),
    op("std", lambda x: (x.std(), x.std(1)), X),
    op(
        "norm",
        lambda x: (
            torch.linalg.vector_norm(x),
            torch.linalg.vector_norm(x, 1, 0),
            torch.linalg.vector_norm(x, float("inf"), 1),
        ),
        X,
    ),
    op(
        "norm_orders",
        lambda x: (
            torch.linalg.vector_norm(x, 3, 1),
            torch.norm(x, 2, 0),
            torch.linalg.vector_norm(x, 0, 1),
        ),
        X,
        dtypes=F32_F64,
    ),
    op("logsumexp", lambda x: (torch.logsumexp(x, 1), torch.logsumexp(x, (0, 1))), X),
    op(
        "logsumexp_of_infinities",
        lambda x: torch.logsumexp(x, 1),
        torch.tensor([[float("-inf"), float("-inf")], [float("inf"), 1.0], [1.0, float("-inf")]]),
        dtypes=(torch.float32,),
        layouts=("contiguous",),
    ),
    op("logsumexp_of_nothing", lambda x: torch.logsumexp(x[:, :0], 1), X),
    op("softmax", lambda x: (torch.softmax(x, -1), torch.softmax(x, 0)), X),
    op("softmax_of_line", lambda x: (torch.softmax(x, -1), torch.log_softmax(x, 0)), (7,)),
    op("softmax_middle", lambda x: torch.softmax(x, 1), X3),
    op(
        "softmax_to_float",
        lambda x: torch.softmax(x, -1, dtype=torch.float32),
        X,
        dtypes=(torch.bfloat16, torch.float16),
    ),
    op("softmax_large_values", lambda x: torch.softmax(x * 1000, -1), X, dtypes=(torch.float32,)),
    op(
        "softmax_masked_row",
        lambda x: torch.softmax(x, -1),
        torch.tensor([[float("-inf"), float("-inf")], [0.0, float("-inf")]]),
        dtypes=(torch.float32,),
        layouts=("contiguous",),
    ),
    *(
        op(
            f"softmax_of_number_{number}",
            lambda x: (
                torch.softmax(x, 0),
                torch.log_softmax(x, 0),
                torch.ops.aten._safe_softmax(x, 0),
            ),
            torch.tensor(number),
            dtypes=(torch.float32,),
            layouts=("contiguous",),
        )
        for number in (1.5, math.nan, math.inf, -math.inf)
    ),
    op("log_softmax", lambda x: (torch.log_softmax(x, -1), torch.log_softmax(x, 0)), X),
    op("softmin", lambda x: torch.nn.functional.softmin(x, -1), X, dtypes=F32_F64),
    op("median", lambda x: (x.median(), *x.median(1)), X, dtypes=(torch.float32, torch.int64)),
    op("mode", lambda x: x.mode(1), T(X, 0, 4), dtypes=(torch.int64,)),
    op("mode_values", lambda x: x.mode(1)[0], T(X, 0, 4), dtypes=(torch.int64, torch.uint8)),
    op("dist", torch.dist, X, X, dtypes=F32_F64),
    op("trace", torch.trace, (5, 7), dtypes=(*F32_F64, torch.int64)),
    op(
        "bincount",
        lambda i: torch.bincount(i, minlength=10),
        T((37,), 0, 10, dtype=torch.int64),
        dtypes=(torch.int64,),
        layouts=("contiguous",),
        static_only=True,
        fullgraph=False,
        graphs=3,
    ),
    op("histc", lambda x: torch.histc(x, 8, -2.0, 2.0), X, dtypes=(torch.float32,), grad=False),
    op("fused_softmax_of_sum", lambda x, y: torch.softmax((x + y) * 0.5, -1).sum(0), X, (37,)),
    op("reduce_then_broadcast", lambda x: (x - x.mean(1, keepdim=True)) / (x.amax(0) + 9), X),
    op("reduce_then_reduce", lambda x: x.exp().sum(1).log().mean(), X),
]


@pytest.mark.sweep
def test_op(case: Any, check_op: Any) -> None:
    check_op(case)


@pytest.mark.parametrize(
    "values", [[1.0, math.nan, 3.0], [0.0, math.nan, 2.0], [math.inf, 0.0], [0.0, 0.0, math.inf]]
)
def test_the_gradient_of_a_product_with_nan_is_pytorchs(
    values: list[float], backend_name: str
) -> None:
    """AOTAutograd's derivative differs from eager's there: compiling nothing gives the same."""

    def gradient(backend: str) -> torch.Tensor:
        torch.compiler.reset()
        x = torch.tensor(values, requires_grad=True)
        return torch.autograd.grad(torch.compile(torch.prod, backend=backend)(x), x)[0]

    torch.testing.assert_close(gradient(backend_name), gradient("aot_eager"), equal_nan=True)
