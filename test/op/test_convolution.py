"""Convolutions: 1-, 2- and 3-d, strides, padding, dilation, groups, transposed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from dicp.testing import T, op

X, W, BIAS = (2, 4, 9, 11), (6, 4, 3, 3), (6,)
FIX = (4, 6, 3, 2, 1)
F32 = (torch.float32,)
F32_F64 = (torch.float32, torch.float64)
WITH_BF16 = (torch.float32, torch.float64, torch.bfloat16)
FORMATS = ("contiguous", "channels_last", "sliced")
ONE = ("contiguous",)
aten = torch.ops.aten


def conv(name: str, fn: Any, *specs: Any, **options: Any) -> Any:
    options.setdefault("dtypes", F32_F64)
    options.setdefault("layouts", ONE)
    options.setdefault("fixed", FIX)
    return op(name, fn, *specs, strides=False, **options)


CASES = [
    conv("conv2d", F.conv2d, X, W, BIAS, dtypes=WITH_BF16, layouts=FORMATS),
    conv("conv2d_plain", F.conv2d, X, W),
    conv(
        "conv2d_stride",
        lambda x, w, b: F.conv2d(x, w, b, stride=(2, 1), padding=(1, 0)),
        X,
        W,
        BIAS,
        layouts=FORMATS,
    ),
    conv("conv2d_dilation", lambda x, w: F.conv2d(x, w, dilation=(1, 3)), X, W, layouts=FORMATS),
    conv(
        "conv2d_dilation_rows", lambda x, w: F.conv2d(x, w, dilation=(3, 1), padding=(2, 1)), X, W
    ),
    conv("conv2d_groups", lambda x, w: F.conv2d(x, w, groups=2), X, (6, 2, 3, 3), layouts=FORMATS),
    conv(
        "conv2d_depthwise",
        lambda x, w: F.conv2d(x, w, padding=1, groups=4),
        X,
        (4, 1, 3, 3),
        layouts=FORMATS,
    ),
    conv("conv2d_1x1", lambda x, w, b: F.conv2d(x, w, b), X, (6, 4, 1, 1), BIAS, layouts=FORMATS),
    conv("conv2d_same", lambda x, w: F.conv2d(x, w, padding="same"), X, W),
    conv(
        "conv2d_asymmetric_kernel",
        lambda x, w: F.conv2d(x, w, padding=(0, 2)),
        X,
        (6, 4, 1, 5),
        fixed=(4, 6, 5, 1, 2),
    ),
    conv("conv2d_unbatched", F.conv2d, (4, 9, 11), W, BIAS),
    conv("conv2d_empty_batch", F.conv2d, (0, 4, 9, 11), W, dtypes=F32),
    conv(
        "conv2d_relu",
        lambda x, w, b: F.relu(F.conv2d(x, w, b, padding=1)),
        X,
        W,
        BIAS,
        layouts=FORMATS,
    ),
    conv(
        "conv_bn_relu",
        lambda x, w, m, v, g: F.relu(F.batch_norm(F.conv2d(x, w, padding=1), m, v, g)),
        X,
        W,
        T((6,), grad=False),
        T((6,), 0.5, 2, grad=False),
        (6,),
        layouts=FORMATS[:2],
    ),
    conv(
        "conv_add_relu",
        lambda x, w: F.relu(F.conv2d(x, w, padding=1) + x),
        X,
        (4, 4, 3, 3),
        layouts=FORMATS[:2],
    ),
    conv(
        "conv_chain_channels_last",
        lambda x, w, v: F.conv2d(F.gelu(F.conv2d(x, w, padding=1)), v).sum((2, 3)),
        X,
        W,
        (3, 6, 1, 1),
        layouts=FORMATS[:2],
    ),
    conv(
        "conv1d",
        lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1, dilation=2),
        (2, 4, 19),
        (6, 4, 3),
        BIAS,
        dtypes=WITH_BF16,
        layouts=("contiguous", "transposed"),
    ),
    conv(
        "conv1d_chain",
        lambda x, w, v: F.conv1d(F.gelu(F.conv1d(x, w, padding=1)), v, stride=3).transpose(1, 2),
        (1, 4, 19),
        (6, 4, 3),
        (3, 6, 2),
        dtypes=WITH_BF16,
    ),
    conv(
        "conv1d_causal_depthwise",
        lambda x, w: F.conv1d(F.pad(x, (2, 0)), w, groups=4),
        (2, 4, 19),
        (4, 1, 3),
        dtypes=WITH_BF16,
    ),
    conv(
        "conv1d_depthwise_twice",
        lambda x, w, b: F.conv1d(
            F.silu(F.conv1d(x, w, b, padding=2, groups=4)), w, b, 2, 1, 3, groups=4
        ),
        (1, 4, 19),
        (4, 1, 4),
        (4,),
        dtypes=WITH_BF16,
        layouts=("contiguous", "transposed"),
    ),
    conv(
        "conv3d",
        lambda x, w, b: F.conv3d(x, w, b, padding=(1, 0, 1)),
        (2, 4, 5, 7, 8),
        (6, 4, 3, 3, 3),
        BIAS,
        fixed=(4, 6, 3, 2),
    ),
    conv(
        "conv_transpose1d",
        lambda x, w: F.conv_transpose1d(x, w, stride=2, output_padding=1),
        (2, 4, 9),
        (4, 6, 3),
        dtypes=WITH_BF16,
    ),
    conv(
        "conv_transpose2d",
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1),
        X,
        (4, 6, 3, 3),
        BIAS,
        layouts=FORMATS,
    ),
    conv(
        "conv_transpose2d_groups",
        lambda x, w: F.conv_transpose2d(x, w, groups=2, dilation=(1, 2)),
        X,
        (4, 3, 3, 3),
    ),
    conv(
        "conv_transposes_padded_by_more_than_their_stride",
        lambda x, y, v, w: (
            F.conv_transpose1d(x, v, padding=1, output_padding=2, dilation=3),
            F.conv_transpose2d(y, w, padding=1, output_padding=(1, 0), dilation=2),
        ),
        (2, 4, 7),
        (2, 4, 5, 6),
        (4, 6, 3),
        (4, 6, 3, 3),
        dtypes=F32,
    ),
    conv(
        "conv_transpose3d",
        lambda x, w: F.conv_transpose3d(x, w, stride=2),
        (2, 4, 3, 5, 5),
        (4, 6, 3, 3, 3),
        fixed=(4, 6, 3, 2),
    ),
    conv(
        "convolution_backward",
        lambda g, x, w: aten.convolution_backward.default(
            g, x, w, [6], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
        ),
        (2, 6, 9, 11),
        X,
        W,
        grad=False,
    ),
    conv(
        "convolution_backward_input_only",
        lambda g, x, w: aten.convolution_backward.default(
            g, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False]
        )[0],
        (2, 6, 9, 11),
        X,
        W,
        grad=False,
    ),
    conv("frozen_weight", F.conv2d, T(X), T(W, grad=False), BIAS),
]


def test_op(case: Any, check_op: Any) -> None:
    check_op(case)
