"""Matrix products, convolutions, pooling, norms, softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dicp.graphop.interpreter import Semantics

aten = torch.ops.aten


def mat_mul(
    x1: Tensor, x2: Tensor, bias: Tensor | None, offset_w: None,
    transpose_x1: bool = False, transpose_x2: bool = False,
) -> Tensor:  # fmt: skip
    left, right = (x1.mT if transpose_x1 else x1), (x2.mT if transpose_x2 else x2)
    return left @ right if bias is None else torch.addmm(bias, left, right)


def batch_mat_mul(
    x1: Tensor, x2: Tensor, bias: Tensor | None, offset_w: None,
    adj_x1: bool = False, adj_x2: bool = False,
) -> Tensor:  # fmt: skip
    left, right = (x1.mT if adj_x1 else x1), (x2.mT if adj_x2 else x2)
    product = left @ right
    return product if bias is None else product + bias


# ---- convolutions: strides and dilations carry two leading ones ---------------------------------


def _pads(pads: list[int]) -> list[int]:
    assert pads[0::2] == pads[1::2], "padding is symmetric"
    return pads[0::2]


def convolve(
    x: Tensor, filter: Tensor, bias: Tensor | None, offset_w: None, strides: list[int],
    pads: list[int], dilations: list[int], groups: int, data_format: str,
) -> Tensor:  # fmt: skip
    return aten.convolution(
        x, filter, bias, strides[2:], _pads(pads), dilations[2:], False, [0] * (x.dim() - 2), groups
    )


def convolve_transposed(
    input_size: list[int], x: Tensor, filter: Tensor, bias: Tensor | None, offset_w: None,
    strides: list[int], pads: list[int], dilations: list[int], groups: int, data_format: str,
    output_padding: list[int],
) -> Tensor:  # fmt: skip
    if set(dilations) != {1}:
        raise ValueError(f"a transposed convolution has no dilations {dilations}")
    return aten.convolution(
        x, filter, bias, strides[2:], _pads(pads), dilations[2:], True, output_padding[2:], groups
    )


def convolve_input_grad(
    input_size: list[int], filter: Tensor, out_backprop: Tensor, strides: list[int],
    pads: list[int], dilations: list[int], groups: int, data_format: str,
) -> Tensor:  # fmt: skip
    rank = filter.dim() - 2
    x = torch.empty(1, dtype=filter.dtype).expand(input_size)
    return aten.convolution_backward(
        out_backprop, x, filter, None, strides[2:], _pads(pads), dilations[2:], False, [0] * rank,
        groups, [True, False, False],
    )[0]  # fmt: skip


def convolve_filter_grad(
    x: Tensor, filter_size: list[int], out_backprop: Tensor, strides: list[int],
    pads: list[int], dilations: list[int], groups: int, data_format: str,
) -> Tensor:  # fmt: skip
    rank = x.dim() - 2
    filter = torch.empty(1, dtype=x.dtype).expand(filter_size)
    return aten.convolution_backward(
        out_backprop, x, filter, None, strides[2:], _pads(pads), dilations[2:], False, [0] * rank,
        groups, [False, True, False],
    )[1].float()  # fmt: skip


# ---- pooling -------------------------------------------------------------------------------------


def check_window(ksize: Sequence[int], strides: Sequence[int], divisor: int = 0) -> None:
    """Raises ValueError beyond the limits of pooling."""
    if math.prod(ksize) > 255 or max(strides) > 63 or divisor > 255:
        raise ValueError(f"pooling of {ksize} by {strides} over {divisor} is beyond the limits")


def max_pool(
    x: Tensor, ksize: list[int], strides: list[int], pads: list[int], padding_mode: str,
    data_format: str, ceil_mode: bool = False,
) -> Tensor:  # fmt: skip
    assert padding_mode == "CALCULATED" and data_format == "NCHW"
    check_window(ksize, strides)
    return aten.max_pool2d_with_indices(x, ksize[2:], strides[2:], _pads(pads), 1, ceil_mode)[0]


def avg_pool(
    x: Tensor, ksize: list[int], strides: list[int], pads: list[int], padding_mode: str,
    data_format: str, ceil_mode: bool = False, exclusive: bool = True, divisor_override: int = 0,
) -> Tensor:  # fmt: skip
    assert padding_mode == "CALCULATED" and data_format == "NCHW"
    check_window(ksize, strides, divisor_override)
    return aten.avg_pool2d(
        x, ksize[2:], strides[2:], _pads(pads), ceil_mode, not exclusive, divisor_override or None
    )


def avg_pool_grad(
    orig_input_shape: list[int], input_grad: Tensor, ksize: list[int], strides: list[int],
    pads: list[int], padding_mode: str, data_format: str, ceil_mode: bool = False,
    exclusive: bool = True, divisor_override: int = 0,
) -> Tensor:  # fmt: skip
    assert padding_mode == "CALCULATED" and data_format == "NCHW"
    check_window(ksize, strides, divisor_override)
    x = torch.empty(orig_input_shape, dtype=input_grad.dtype)
    return aten.avg_pool2d_backward(
        input_grad, x, ksize[2:], strides[2:], _pads(pads), ceil_mode, not exclusive,
        divisor_override or None,
    )  # fmt: skip


def adaptive_avg_pool(x: Tensor, output_size: list[int]) -> Tensor:
    return aten._adaptive_avg_pool2d(x, output_size)


def adaptive_avg_pool_grad(input_grad: Tensor, orig_input_shape: list[int]) -> Tensor:
    x = torch.empty(orig_input_shape, dtype=input_grad.dtype)
    return aten._adaptive_avg_pool2d_backward(input_grad, x)


# ---- norms ---------------------------------------------------------------------------------------


def layer_norm(
    x: Tensor, normalized_shape: list[int], gamma: Tensor | None, beta: Tensor | None,
    epsilon: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Computed in float32; mean and reciprocal deviation keep the normalized dimensions as 1."""
    dims = list(range(x.dim() - len(normalized_shape), x.dim()))
    wide = x.float()
    variance, mean = torch.var_mean(wide, dims, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + epsilon)
    y = (wide - mean) * rstd
    y = y if gamma is None else y * gamma.float()
    y = y if beta is None else y + beta.float()
    return y.to(x.dtype), mean, rstd


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    dims = list(range(x.dim() - gamma.dim(), x.dim()))
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(dims, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(x.dtype), rstd


def batch_norm_infer(
    x: Tensor, scale: Tensor, offset: Tensor, mean: Tensor, variance: Tensor, epsilon: float
) -> Tensor:
    shape = [1, x.shape[1], *([1] * (x.dim() - 2))]
    factor = scale * torch.rsqrt(variance + epsilon)
    shifted = x.float() * factor.reshape(shape) + (offset - mean * factor).reshape(shape)
    return shifted.to(x.dtype)


def batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor,
    epsilon: float = 1e-5, momentum: float = 0.1, is_training: bool = True,
) -> tuple[Tensor, ...]:  # fmt: skip
    if not is_training:
        raise ValueError("the operator is for training")
    y, mean, rstd, new_mean, new_var = aten._native_batch_norm_legit_functional(
        x.float(), weight, bias, running_mean, running_var, is_training, momentum, epsilon
    )
    return y.to(x.dtype), new_mean, new_var, mean, rstd


def batch_norm_grad(
    dy: Tensor, x: Tensor, weight: Tensor, running_mean: Tensor, running_var: Tensor,
    save_mean: Tensor, save_rstd: Tensor, is_training: bool = True, epsilon: float = 1e-5,
) -> tuple[Tensor, ...]:  # fmt: skip
    # PyTorch's gradient is wrong where a size of 1 gives both memory formats to one of these alone.
    wide = [each.float().contiguous() for each in (dy, x)]
    dx, dweight, dbias = aten.native_batch_norm_backward(
        *wide, weight, running_mean, running_var, save_mean, save_rstd,
        is_training, epsilon, [True, True, True],
    )  # fmt: skip
    return dx.to(x.dtype), dweight, dbias


# ---- softmax and fused activations ---------------------------------------------------------------


def softmax(x: Tensor, axes: list[int], half_to_float: bool = False) -> Tensor:
    assert len(axes) == 1
    return torch.softmax(x, axes[0], dtype=torch.float32 if half_to_float else None)


def softmax_grad(y: Tensor, dy: Tensor, axes: list[int]) -> Tensor:
    assert len(axes) == 1
    return aten._softmax_backward_data(dy, y, axes[0], y.dtype)


def log_softmax(logits: Tensor, axes: list[int]) -> Tensor:
    assert len(axes) == 1
    return torch.log_softmax(logits, axes[0])


def log_softmax_grad(grad: Tensor, y: Tensor, axis: list[int]) -> Tensor:
    assert len(axis) == 1
    return aten._log_softmax_backward_data(grad, y, axis[0], y.dtype)


def swi_glu(x: Tensor, dim: int = -1) -> Tensor:
    gate, up = x.chunk(2, dim)
    return F.silu(gate) * up


def rotary_mul(x: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
    """x r1 + (-second half of x, first half of x) r2"""
    first, second = x.chunk(2, -1)
    return x * r1 + torch.cat([-second, first], -1) * r2


def add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of the sum, the reciprocal deviation, and the sum."""
    x = x1 + x2
    return *rms_norm(x, gamma, epsilon), x


def register(semantics: Semantics) -> None:
    semantics.update({
        "MatMulV2": mat_mul, "BatchMatMulV2": batch_mat_mul, "Conv2D": convolve,
        "Conv3D": convolve, "MaxPoolV3": max_pool,
        "AvgPoolV2": avg_pool, "AdaptiveAvgPool2d": adaptive_avg_pool,
        "AdaptiveAvgPool2dGrad": adaptive_avg_pool_grad, "RmsNorm": rms_norm,
        "BNInfer": batch_norm_infer, "BatchNormV3": batch_norm,
        "BatchNormGradV3": batch_norm_grad, "SoftmaxV2": softmax, "SoftmaxGrad": softmax_grad,
        "LogSoftmaxV2": log_softmax, "LogSoftmaxGrad": log_softmax_grad,
        "SwiGlu": swi_glu, "RotaryMul": rotary_mul, "AddRmsNorm": add_rms_norm,
    })  # fmt: skip
    hosted: dict[str, tuple[str, Any]] = {
        "Conv2DTranspose": ("input_size", convolve_transposed),
        "Conv3DTranspose": ("input_size", convolve_transposed),
        "Conv2DBackpropInput": ("input_size", convolve_input_grad),
        "Conv3DBackpropInput": ("input_size", convolve_input_grad),
        "Conv2DBackpropFilter": ("filter_size", convolve_filter_grad),
        "Conv3DBackpropFilter": ("filter_size", convolve_filter_grad),
        "LayerNormV4": ("normalized_shape", layer_norm),
        "AvgPoolV2Grad": ("orig_input_shape", avg_pool_grad),
    }
    for kind, (port, function) in hosted.items():
        semantics.op(kind, host=(port,))(function)
