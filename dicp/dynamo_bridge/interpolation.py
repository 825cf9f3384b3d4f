"""Interpolation: its decomposition, and calls in Dynamo's graph that keep their own gradient.

PyTorch decomposes interpolation before it differentiates: the gradient is then a scatter of every
neighbour of every result. Differentiated whole, it is one operator, which a target may have.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dicp import torch_private
from dicp.dtypes import opmath_dtype
from dicp.dynamo_bridge.memory_formats import suggested_format
from dicp.interpolation_taps import Tap, Taps, cubic_taps, linear_taps, taps_along
from dicp.torch_private import HOST, check_size, give_shapes

aten = torch.ops.aten

_MODES: dict[tuple[str, int], str] = {
    ("nearest", 3): "upsample_nearest1d",
    ("nearest", 4): "upsample_nearest2d",
    ("nearest-exact", 3): "_upsample_nearest_exact1d",
    ("nearest-exact", 4): "_upsample_nearest_exact2d",
    ("linear", 3): "upsample_linear1d",
    ("bilinear", 4): "upsample_bilinear2d",
    ("trilinear", 5): "upsample_trilinear3d",
    ("bicubic", 4): "upsample_bicubic2d",
}
"""The operator of a mode for inputs of a rank. Its gradient adds up fewer terms than that of its
decomposition."""
_OF_OTHERS = {
    **_MODES,
    ("nearest", 5): "upsample_nearest3d",
    ("nearest-exact", 5): "_upsample_nearest_exact3d",
}
"""The same for other numbers than floating point: eager computes linear and cubic ones of uint8 in
integers, where PyTorch's decompositions round otherwise, and refuses the rest."""
GRADIENTS = {name: getattr(aten, f"{name}_backward").default for name in _MODES.values()}
FEW_CHANNELS = 16
"""With fewer, eager's results on GPUs are contiguous."""
FEW_CORNERS = 8
"""Most neighbours of a result that one loop over channels reads, or half as many where each is
converted; more are added up axis by axis."""


def _like_gradient(grad: Tensor, _: Any, input_size: Sequence[Any], *others: Any) -> Tensor:
    """A tensor with a gradient's sizes and strides; PyTorch's own function takes plain sizes."""
    wanted = suggested_format(grad)
    return torch.empty(input_size, dtype=grad.dtype, device=grad.device, memory_format=wanted)


def _contiguous_gradient(grad: Tensor, _: Any, input_size: Sequence[Any], *others: Any) -> Tensor:
    """The same for cubic interpolation, whose gradient is contiguous."""
    return torch.empty(input_size, dtype=grad.dtype, device=grad.device)


give_shapes({
    **dict.fromkeys(GRADIENTS.values(), _like_gradient),
    GRADIENTS["upsample_bicubic2d"]: _contiguous_gradient,
})  # fmt: skip


class _Interpolation(torch.autograd.Function):
    """An operator, by name, that is decomposed; its gradient is one operator."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, name: str, *numbers: Any) -> Any:
        if "linear" in name:
            return interpolate_linearly(input, *numbers)
        if "cubic" in name:
            return interpolate_cubically(input, *numbers)
        result = getattr(aten, name).default(input, *numbers)
        return result.contiguous() if input.dim() == 3 else result

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


def gradients_of(mode: str) -> list[Any]:
    """The operators of which one is the gradient of `interpolate`."""
    return [GRADIENTS[name] for (each, _), name in _MODES.items() if each == mode]


def interpolate(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
    whole_gradient: bool = True,
) -> Tensor:
    """torch.nn.functional.interpolate, whose gradient is one operator where there is one, if it is
    not to be that of the decomposition (`whole_gradient`)."""
    dims = input.shape[2:]
    factors: Sequence[Any] = [None] * len(dims)
    given: Sequence[Any] = factors
    if size is not None:
        sizes = list(size) if isinstance(size, (tuple, list)) else [size] * len(dims)
    else:
        several = isinstance(scale_factor, (tuple, list))
        given = list(scale_factor) if several else [scale_factor] * len(dims)
        sizes = [_scaled(n, factor) for n, factor in zip(dims, given, strict=True)]
        factors = factors if recompute_scale_factor else given
    if mode != "area":
        _check_sizes(input, sizes, given)
    floating = input.is_floating_point()
    name = (_MODES if floating else _OF_OTHERS).get((mode, input.dim()))
    on_host = input.device.type == HOST
    if (
        name is None or antialias or (input.dtype == torch.uint8 and mode.startswith("nearest"))
        or torch.are_deterministic_algorithms_enabled()
        or (not on_host and torch.is_autocast_enabled(input.device.type))
    ):  # fmt: skip
        return F.interpolate(
            input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
        )
    corners = () if mode.startswith("nearest") else (bool(align_corners),)
    if not floating:
        with torch_private.below_autograd():
            return getattr(aten, name).default(input, sizes, *corners, *factors)  # type: ignore
    run: Any = _Interpolation.apply if whole_gradient else _Interpolation.forward
    return run(input, name, sizes, *corners, *factors)  # type: ignore[no-any-return]


def _check_sizes(input: Tensor, sizes: Sequence[Any], factors: Sequence[Any]) -> None:
    """Raises eager's errors of empty images, which PyTorch's decompositions lack. Sizes that grow
    by a known factor are not checked: their guards would be slow."""

    def message() -> str:
        axes = "DHW"[-len(sizes) :]
        sides = (input.shape[2:], sizes)
        before, after = (
            ", ".join(f"{axis}: {size}" for axis, size in zip(axes, side, strict=True))
            for side in sides
        )
        return (
            "Input and output sizes should be greater than 0, but got input "
            f"({before}) output ({after})"
        )

    check_size(
        input.shape[1] > 0,
        lambda: (
            f"Non-empty {input.dim()}D data tensor expected but got a tensor with sizes "
            f"{list(input.shape)}"
        ),
    )
    for before, after, factor in zip(input.shape[2:], sizes, factors, strict=True):
        check_size(before > 0, message)
        if not isinstance(factor, (int, float)) or factor < 1:
            check_size(after > 0, message)


def _scaled(size: Any, factor: Any) -> Any:
    """A size times a factor, rounded down; by a whole one without floating point, as shapes of
    symbolic sizes with it are slow to compare."""
    if isinstance(factor, (int, float)) and float(factor).is_integer():
        return size * int(factor)
    return torch.sym_int(size * factor)


def interpolation(taps: Taps) -> Callable[..., Any]:
    """The decomposition of interpolation by `taps`: weighted sums along one dimension after the
    other. Integers are left whole.

    PyTorch's linear one adds a part of the difference of the neighbours, which is NaN beside an
    infinity.
    """

    def rule(input: Tensor, output_size: Sequence[Any], align_corners: bool, *factors: Any) -> Any:
        if not input.is_floating_point():
            return NotImplemented
        dtype = opmath_dtype(input.dtype)
        rest = (None,) * (len(output_size) - len(factors))
        axes = [
            taps_along(
                taps, size, out, align_corners, factor,
                torch_private.statically_known_true(size == out), dtype, input.device,
            )
            for size, out, factor in zip(
                input.shape[2:], output_size, (*factors, *rest), strict=True
            )
        ]  # fmt: skip
        on_host = input.device.type == HOST
        plain = not on_host and input.shape[1] < FEW_CHANNELS
        wanted = torch.contiguous_format if plain else suggested_format(input)
        corners = math.prod(map(len, axes)) * (1 if dtype == input.dtype else 2)
        few = wanted != torch.contiguous_format and corners <= FEW_CORNERS
        grows = (size <= out for size, out in zip(input.shape[2:-1], output_size[:-1], strict=True))
        if on_host and not few and all(map(torch_private.statically_known_true, grows)):
            result = _along_each_axis(input.to(dtype), axes, wanted)
        else:
            result = _between_corners(input, dtype, axes)
        return result.to(input.dtype).contiguous(memory_format=wanted)

    return rule


interpolate_linearly, interpolate_cubically = map(interpolation, (linear_taps, cubic_taps))


def _weighted(values: Sequence[Tensor], taps: Sequence[Tap], trailing: int) -> Tensor:
    """The sum of `values` by weights along the axis that `trailing` others follow."""
    weights = (weight.reshape(-1, *[1] * trailing) for _, weight in taps)
    return functools.reduce(operator.add, map(operator.mul, values, weights))


def _along_each_axis(
    result: Tensor, axes: Sequence[Sequence[Tap]], wanted: torch.memory_format
) -> Tensor:
    """Interpolated along one axis after the other. Neighbours along the last axis are gathered
    first, once for each row of the input; along the others, whole rows are added up as vectors (or
    channels, where these are contiguous)."""
    for dim, taps in reversed(list(enumerate(axes))):
        lead = [None] * (2 + dim)
        values = [aten._unsafe_index(result, [*lead, place]) for place, _ in taps]
        result = _weighted(values, taps, len(axes) - 1 - dim).contiguous(memory_format=wanted)
    return result


def _between_corners(input: Tensor, dtype: torch.dtype, axes: Sequence[Sequence[Tap]]) -> Tensor:
    """Interpolated along all axes at once: for fewer rows than the input has, and where vectors run
    along channels."""
    last = len(axes) - 1
    places = [
        [place.reshape(-1, *[1] * (last - dim)) for place, _ in taps]
        for dim, taps in enumerate(axes)
    ]
    corners = [
        aten._unsafe_index(input, [None, None, *corner]).to(dtype)
        for corner in itertools.product(*places)
    ]
    for dim, taps in reversed(list(enumerate(axes))):
        n = len(taps)
        corners = [
            _weighted(corners[k : k + n], taps, last - dim) for k in range(0, len(corners), n)
        ]
    return corners[0]
