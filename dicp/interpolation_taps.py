"""The input points that interpolated results read along an axis, and by which weights.

All functions compute with tensors in the precision of eager's: real ones, or those of a trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CUBIC = -0.75
"""The parameter of cubic convolution: Keys, "Cubic Convolution Interpolation for Digital Image
Processing" (1981)."""

Tap = tuple[Tensor, Tensor]
"""For each result, a point of the input and its weight."""
Taps = Callable[[Tensor, Any], list[Tap]]
"""The taps of results, by where they lie in the input and the input's size."""


def taps_along(
    taps: Taps, size: Any, out: Any, align_corners: bool, factor: Any, same: bool,
    dtype: torch.dtype, device: torch.device,
) -> list[Tap]:  # fmt: skip
    """The taps of `out` results along an axis of `size` points, with weights of `dtype`.

    `same`: whether there are known to be as many results as points.
    """
    places = torch.arange(out, device=device)
    if same and taps is linear_taps:
        return _same_taps(places, dtype)
    return taps(_sources(places.to(dtype), size, out, align_corners, factor), size)


def _sources(places: Tensor, size: Any, out: Any, align_corners: bool, factor: Any) -> Tensor:
    """Where the results at `places`, of `out` along the axis, lie in its input, in elements."""
    if align_corners:
        return places * ((size - 1) / (out - 1) if out > 1 else 0)
    step = 1 / factor if factor is not None and factor > 0 else size / out
    return step * (places + 0.5) - 0.5


def linear_taps(source: Tensor, size: Any) -> list[Tap]:
    source = source.clamp(min=0.0)
    first = source.to(torch.int64)
    part = (source - first).clamp(0.0, 1.0)
    return [(first, 1 - part), ((first + 1).clamp(max=size - 1), part)]


def _same_taps(places: Tensor, dtype: torch.dtype) -> list[Tap]:
    """Linear taps where results and inputs are as many: eager multiplies the second one by 0."""
    none = torch.zeros_like(places, dtype=dtype)
    return [(places, 1 - none), (places, none)]


def cubic_taps(source: Tensor, size: Any) -> list[Tap]:
    floor = source.floor()
    first, t = floor.to(torch.int64), (source - floor).clamp(0.0, 1.0)
    weights = _far(t + 1), _near(t), _near(1 - t), _far(2 - t)
    return [((first + k).clamp(0, size - 1), w) for k, w in enumerate(weights, start=-1)]


def _near(x: Tensor) -> Tensor:
    """The weight of a point at most one element away."""
    return ((CUBIC + 2) * x - (CUBIC + 3)) * x * x + 1


def _far(x: Tensor) -> Tensor:
    return ((CUBIC * x - 5 * CUBIC) * x + 8 * CUBIC) * x - 4 * CUBIC
