"""The parts of SyncBatchNorm, for which PyTorch has no host kernels and no decompositions.

Statistics of several processes are combined as in Chan, Golub and LeVeque, "Updating formulae and a
pairwise algorithm for computing sample variances" (1979).
"""

from __future__ import annotations

import torch


def register(library: torch.library.Library) -> None:
    """Register the operators for the device in a library of ATen's implementations."""
    for function in (
        batch_norm_stats,
        batch_norm_elemt,
        batch_norm_gather_stats_with_counts,
        batch_norm_backward_reduce,
        batch_norm_backward_elemt,
    ):
        library.impl(function.__name__, function, "PrivateUse1")


def _others(input: torch.Tensor) -> list[int]:
    return [d for d in range(input.dim()) if d != 1]


def _channels(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A value for each channel, shaped to combine with a tensor whose dimension 1 they are."""
    return value.view([-1 if d == 1 else 1 for d in range(like.dim())])


def batch_norm_stats(input: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and inverse standard deviation of each channel."""
    wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    mean = wide.mean(_others(input))
    variance = (wide - _channels(mean, input)).square().mean(_others(input))
    return mean, (variance + eps).rsqrt()


def batch_norm_elemt(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    result = (input - _channels(mean, input)) * _channels(invstd, input)
    if weight is not None:
        result = result * _channels(weight, input)
    if bias is not None:
        result = result + _channels(bias, input)
    return result.to(input.dtype)


def batch_norm_gather_stats_with_counts(
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and inverse standard deviation over all processes, one row of `mean` for each."""
    weights = counts.to(mean.dtype).view(-1, 1)
    total = weights.sum()
    whole = (weights * mean).sum(0) / total
    variances = invstd.pow(-2) - eps + (mean - whole).square()
    variance = (weights * variances).sum(0) / total
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(whole.to(running_mean.dtype) * momentum)
    if running_var is not None:
        unbiased = variance * total / (total - 1)
        running_var.mul_(1 - momentum).add_(unbiased.to(running_var.dtype) * momentum)
    return whole, (variance + eps).rsqrt()


def batch_norm_backward_reduce(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums over one process of the gradient, and of it times the centred input."""
    wide = grad_out.to(mean.dtype)
    sum_dy = wide.sum(_others(input))
    sum_dy_xmu = (wide * (input - _channels(mean, input))).sum(_others(input))
    kind = mean.dtype if weight is None else weight.dtype
    return sum_dy, sum_dy_xmu, (sum_dy_xmu * invstd).to(kind), sum_dy.to(kind)


def batch_norm_backward_elemt(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    sum_dy: torch.Tensor,
    sum_dy_xmu: torch.Tensor,
    count: torch.Tensor,
) -> torch.Tensor:
    total = count.sum().to(mean.dtype)
    centred = (input - _channels(mean, input)) * _channels(invstd.square(), input)
    slope = invstd if weight is None else invstd * weight
    inner = (
        grad_out - _channels(sum_dy / total, input) - centred * _channels(sum_dy_xmu / total, input)
    )
    return (inner * _channels(slope, input)).to(input.dtype)
