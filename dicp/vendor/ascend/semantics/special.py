"""Special functions, masks, counts, sampling, pooling to a given size."""

from __future__ import annotations

import torch
from torch import Tensor

from dicp.graphop.interpreter import Semantics

aten = torch.ops.aten

_INTERPOLATION = {"bilinear": 0, "nearest": 1, "bicubic": 2}
_PADDING = {"zeros": 0, "border": 1, "reflection": 2}


def histogram(x: Tensor, bins: int = 100, min: float = 0.0, max: float = 0.0) -> Tensor:
    return torch.histc(x, bins, min, max)


def pdist(x: Tensor, p: float = 2.0) -> Tensor:
    """The distance of each two rows; computed in float32."""
    return aten._pdist_forward(x.float().contiguous(), p).to(x.dtype)


def grid_sampler(
    x: Tensor, grid: Tensor, interpolation_mode: str = "bilinear", padding_mode: str = "zeros",
    align_corners: bool = False,
) -> Tensor:  # fmt: skip
    modes = _INTERPOLATION[interpolation_mode], _PADDING[padding_mode]
    return aten.grid_sampler_2d(x.float(), grid.float(), *modes, align_corners).to(x.dtype)


def grid_sampler_grad(
    grad: Tensor, x: Tensor, grid: Tensor, interpolation_mode: str = "bilinear",
    padding_mode: str = "zeros", align_corners: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    dx, dgrid = aten.grid_sampler_2d_backward(
        grad.float(), x.float(), grid.float(), _INTERPOLATION[interpolation_mode],
        _PADDING[padding_mode], align_corners, [True, True],
    )  # fmt: skip
    return dx.to(x.dtype), dgrid.to(grid.dtype)


def adaptive_max_pool2d(x: Tensor, output_size: list[int]) -> tuple[Tensor, Tensor]:
    """The maxima, and where they stand in their image."""
    y, places = aten.adaptive_max_pool2d(x, output_size)
    return y, places.to(torch.int32)


def register(semantics: Semantics) -> None:
    semantics.update({
        "Ndtri": torch.special.ndtri, "Igamma": torch.igamma, "Igammac": torch.igammac,
        "MaskedScatter": torch.masked_scatter, "Histogram": histogram, "Pdist": pdist,
        "GridSampler2D": grid_sampler, "GridSampler2DGrad": grid_sampler_grad,
        "AdaptiveMaxPool2d": adaptive_max_pool2d,
    })  # fmt: skip
