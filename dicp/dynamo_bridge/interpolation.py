"""Interpolation: its decomposition, and calls in Dynamo's graph that keep their own gradient.

PyTorch decomposes interpolation before it differentiates: the gradient is then a scatter of every
neighbour of every result. Differentiated whole, it is one operator, which a target may have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dicp import torch_private
from dicp.dtypes import REDUCED_FLOATS
from dicp.dynamo_bridge.memory_formats import suggested_format
from dicp.torch_private import HOST, give_shapes

aten = torch.ops.aten

_MODES: dict[tuple[str, int], str] = {
    ("nearest", 4): "upsample_nearest2d",
    ("nearest-exact", 4): "_upsample_nearest_exact2d",
    ("linear", 3): "upsample_linear1d",
    ("bilinear", 4): "upsample_bilinear2d",
    ("trilinear", 5): "upsample_trilinear3d",
}
"""The operator of a mode for inputs of a rank. Others have no gradient that is faster for images
in channels last."""
_OF_BYTES = {"bilinear": "upsample_bilinear2d", "bicubic": "upsample_bicubic2d"}
"""Operators that eager computes in integers for uint8; PyTorch's decompositions round otherwise."""
GRADIENTS = {name: getattr(aten, f"{name}_backward").default for name in _MODES.values()}
FEW_CHANNELS = 16
"""With fewer, eager's results on GPUs are contiguous."""


def _like_gradient(grad: Tensor, _: Any, input_size: Sequence[Any], *others: Any) -> Tensor:
    """A tensor with the sizes and strides of a gradient, which PyTorch infers of plain sizes."""
    wanted = suggested_format(grad)
    return torch.empty(input_size, dtype=grad.dtype, device=grad.device, memory_format=wanted)


give_shapes(dict.fromkeys(GRADIENTS.values(), _like_gradient))


class _Interpolation(torch.autograd.Function):
    """An operator, by name, that is decomposed; its gradient is one operator."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, name: str, *numbers: Any) -> Any:
        if "linear" in name:
            return interpolate_linearly(input, *numbers)
        return getattr(aten, name).default(input, *numbers)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        input, ctx.name, *ctx.numbers = inputs
        ctx.shape = input.shape

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        output_size, *others = ctx.numbers
        found = GRADIENTS[ctx.name](grad, output_size, ctx.shape, *others)
        return found, *[None] * (1 + len(ctx.numbers))

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Any:
        return _Interpolation.apply(tangent, ctx.name, *ctx.numbers)


def interpolate(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """torch.nn.functional.interpolate, whose gradient is one operator where there is one."""
    of_bytes = input.dtype == torch.uint8
    name = _OF_BYTES.get(mode) if of_bytes else _MODES.get((mode, input.dim()))
    on_host = input.device.type == HOST
    if (
        name is None or antialias or not (input.is_floating_point() or of_bytes)
        or torch.are_deterministic_algorithms_enabled()
        or (not on_host and torch.is_autocast_enabled(input.device.type))
    ):  # fmt: skip
        return F.interpolate(
            input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
        )
    dims = input.shape[2:]
    factors: Sequence[Any] = [None] * len(dims)
    if size is not None:
        sizes = list(size) if isinstance(size, (tuple, list)) else [size] * len(dims)
    else:
        several = isinstance(scale_factor, (tuple, list))
        given = list(scale_factor) if several else [scale_factor] * len(dims)
        sizes = [_scaled(n, factor) for n, factor in zip(dims, given, strict=True)]
        factors = factors if recompute_scale_factor else given
    corners = () if mode.startswith("nearest") else (bool(align_corners),)
    if of_bytes:
        with torch_private.below_autograd():
            return getattr(aten, name).default(input, sizes, *corners, *factors)  # type: ignore
    return _Interpolation.apply(input, name, sizes, *corners, *factors)  # type: ignore[no-any-return]


def _scaled(size: Any, factor: Any) -> Any:
    """A size times a factor, rounded down; by a whole one without floating point, as shapes of
    symbolic sizes with it are slow to compare."""
    if isinstance(factor, (int, float)) and float(factor).is_integer():
        return size * int(factor)
    return torch.sym_int(size * factor)


def unless_of_bytes(rule: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's decomposition, which rounds uint8 otherwise than eager: those are left whole."""

    def cubic(input: Tensor, *numbers: Any, **named: Any) -> Any:
        return NotImplemented if input.dtype == torch.uint8 else rule(input, *numbers, **named)

    return cubic


def interpolate_linearly(
    input: Tensor, output_size: Sequence[Any], align_corners: bool, *factors: Any
) -> Any:
    """Interpolation along lines: the sum of two neighbours by their weights, for each dimension.

    PyTorch's decomposition adds a part of the difference of the neighbours, which is NaN beside an
    infinity.
    """
    if not input.is_floating_point():
        return NotImplemented
    dtype = torch.float32 if input.dtype in REDUCED_FLOATS else input.dtype
    rank = len(output_size)
    places: list[tuple[Tensor, Tensor]] = []
    weights: list[tuple[Tensor, Tensor]] = []
    dims = zip(input.shape[2:], output_size, (*factors, *[None] * rank), strict=False)
    for dim, (size, out, factor) in enumerate(dims):
        place = torch.arange(out, device=input.device).reshape(-1, *[1] * (rank - 1 - dim))
        if torch_private.statically_known_true(size == out):  # imports sympy
            first = second = place
            part = torch.zeros_like(place, dtype=dtype)
        else:
            source = _source(place.to(dtype), size, out, align_corners, factor).clamp(min=0.0)
            first = source.to(torch.int64)
            second = (first + 1).clamp(max=size - 1)
            part = (source - first).clamp(0.0, 1.0)
        places.append((first, second))
        weights.append((1 - part, part))
    corners = [
        aten._unsafe_index(input, [None, None, *index]).to(dtype)
        for index in itertools.product(*places)
    ]
    for before, after in reversed(weights):
        pairs = zip(corners[::2], corners[1::2], strict=True)
        corners = [first * before + second * after for first, second in pairs]
    result = corners[0].to(input.dtype)
    few_channels = input.device.type != HOST and input.shape[1] < FEW_CHANNELS
    wanted = torch.contiguous_format if few_channels else suggested_format(input)
    return result.contiguous(memory_format=wanted)


def _source(place: Tensor, size: Any, out: Any, align_corners: bool, factor: Any) -> Tensor:
    """Where results lie in the input, in elements."""
    if align_corners:
        return place * ((size - 1) / (out - 1) if out > 1 else 0)
    step = 1 / factor if factor is not None and factor > 0 else size / out
    return step * (place + 0.5) - 0.5
