"""Every core ATen operator is exercised by a case of this folder; here those no other reaches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dicp.dynamo_bridge.conversion import core_overloads
from dicp.testing import T, index, op
from dicp.testing.coverage import all_cases, overloads_reached

aten = torch.ops.aten
X = (6, 37)
F32_F64 = (torch.float32, torch.float64)
ONE = ("contiguous",)
VARYING = ("contiguous", "transposed", "sliced")

CASES = [
    op("add.Scalar", lambda x: aten.add.Scalar(x, 2, 3), X),
    op("sub.Scalar", lambda x: aten.sub.Scalar(x, 2, 3), X),
    op("mul.Scalar", lambda x: aten.mul.Scalar(x, 2.5), X),
    op(
        "div.Scalar",
        lambda x: (aten.div.Scalar(x, 3), aten.div.Scalar_mode(x, 3, rounding_mode="floor")),
        X,
        grad=False,
    ),
    op(
        "atan2.out",
        lambda x, y: aten.atan2.out(x, y, out=torch.empty_like(x)),
        X,
        X,
        grad=False,
        dtypes=F32_F64,
        layouts=ONE,
    ),
    op(
        "bitwise.Scalar",
        lambda x: (
            aten.bitwise_and.Scalar(x, 6),
            aten.bitwise_or.Scalar(x, 6),
            aten.bitwise_xor.Scalar(x, 6),
        ),
        X,
        dtypes=(torch.int64,),
    ),
    # Strides left out: what FakeTensor infers for a tensor with holes is not what the kernel gives.
    op(
        "native_dropout_off",
        lambda x: aten.native_dropout.default(x, 0.0, True),
        X,
        dtypes=F32_F64,
        strides=False,
    ),
    op(
        "native_dropout_inference",
        lambda x: aten.native_dropout.default(x, 0.5, False)[0],
        X,
        dtypes=F32_F64,
        grad=False,
        strides=False,
    ),
    op(
        "embedding_bag",
        lambda w, i: aten._embedding_bag.default(w, i, torch.tensor([0, 3, 5], device=w.device))[0],
        (12, 8),
        index((9,), 12),
        dtypes=F32_F64,
        layouts=ONE,
        fixed=(9,),
    ),
    op(
        "_pdist_forward",
        lambda x: aten._pdist_forward.default(x, 2.0),
        (5, 7),
        dtypes=F32_F64,
        layouts=ONE,
        grad=False,
        fixed=(5,),
    ),
    op(
        "_fft_c2r",
        lambda x: aten._fft_c2r.default(x, [1], 0, 12),
        (6, 7),
        dtypes=(torch.complex64,),
        layouts=ONE,
        fixed=(7,),
    ),
    op(
        "_fft_r2c", lambda x: aten._fft_r2c.default(x, [1], 0, True), X, layouts=ONE, dtypes=F32_F64
    ),
    op("_to_copy", lambda x: aten._to_copy.default(x, dtype=torch.float64), X),
    op(
        "softmax_to_half",
        lambda x: (aten._softmax.default(x, 1, False), aten._log_softmax.default(x, 1, False)),
        X,
    ),
    op("pow.Scalar", lambda x: aten.pow.Scalar(1.5, x), X, dtypes=F32_F64, strides=False),
    op(
        "scatter.value",
        lambda x, i: aten.scatter.value(x, 1, i, 2.5),
        X,
        index((6, 9), 37),
        dtypes=F32_F64,
    ),
    op("max.dim", lambda x: (*aten.max.dim(x, 1), *aten.min.dim(x, 0)), X, dtypes=F32_F64),
    op("prod.dim_int", lambda x: aten.prod.dim_int(x, 1, True), T(X, 0.8, 1.2), dtypes=F32_F64),
    op("copy.default", lambda x, y: aten.copy.default(x, y), X, X, grad=False),
    op(
        "var.dim",
        lambda x: (aten.var.dim(x, [1]), aten.var.correction(x, [0], correction=2)),
        X,
        dtypes=F32_F64,
        layouts=VARYING,
    ),
    op(
        "empty",
        lambda x: (
            aten.empty.memory_format([2, 3], device=x.device).fill_(1.0) + x[0, 0],
            aten.empty_strided.default([2, 3], [1, 2], device=x.device).fill_(2.0),
        ),
        X,
        dtypes=(torch.float32,),
        layouts=ONE,
    ),
    op("squeeze", lambda x: (aten.squeeze.dim(x, 0), aten.squeeze.dims(x, [0, 2])), (1, 6, 1)),
    op("any.dims", lambda x: aten.any.dims(x, [0, 1]), X, grad=False),
    op(
        "resize_",
        lambda x: x.clone().resize_(3, 4) + 1,
        X,
        grad=False,
        layouts=ONE,
        dtypes=F32_F64,
        fullgraph=False,
        graphs=6,
    ),
    op("sum_of_size", lambda x: x.sum() * x.numel() + x.size(0), X, dtypes=F32_F64),
]

# Composites that dispatch to others, or reached only with symbolic sizes or scalars: what the
# recorder does not see, and the tests that exercise them.
ELSEWHERE = {
    "aten.sym_size.int": "every dynamic run",
    "aten.sym_numel.default": "sum_of_size, dynamic",
    "aten.sym_stride.int": "tensor_properties, dynamic",
    "aten.sym_storage_offset.default": "the sliced layout of every case, dynamic",
    "aten._local_scalar_dense.default": "test_robustness.test_item",
    "aten.sym_is_contiguous.default": "Dynamo, on every dynamic input",
    "aten.adaptive_avg_pool1d.default": "test_pooling: adaptive_avg_pool1d",
    "aten.avg_pool1d.default": "test_pooling: avg_pool1d",
    "aten.upsample_bilinear2d.vec": "test_upsample: bilinear_vec",
    "aten.upsample_nearest2d.vec": "test_upsample: bilinear_vec",
    "aten.var.dim": "var.dim in this file",
    "aten.rand.default": "test_random",
    "aten.randn.default": "test_random",
    "aten.randperm.default": "test_random",
}


def test_op(case: Any, check_op: Any) -> None:
    check_op(case)


def test_every_core_overload_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent))
    missing = set(map(str, core_overloads())) - overloads_reached(all_cases()) - set(ELSEWHERE)
    assert not missing, f"no case exercises {sorted(missing)}"
