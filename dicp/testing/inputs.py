"""Inputs of operator cases: what to draw, in which dtype, laid out how in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

SPECIAL_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 60.0, -60.0, 1e-3)
NON_FINITE = (float("nan"), float("inf"), float("-inf"))


@dataclass(frozen=True)
class T:
    """One tensor input.

    Values are normal, or uniform in [low, high) where these are given; integers are uniform in
    [-9, 10). `dtype=None` takes the dtype of the variant being run. `layout=False` keeps the tensor
    contiguous in every variant. In dynamic runs, `high` follows the sizes where `index` is set.
    """

    shape: tuple[int, ...]
    low: float | None = None
    high: float | None = None
    dtype: torch.dtype | None = None
    grad: bool = True
    layout: bool = True
    index: bool = False


def index(shape: tuple[int, ...], high: int, low: int = 0, dtype: torch.dtype = torch.int64) -> T:
    """Indices into a dimension of size `high`; with a dynamic size they follow it."""
    return T(shape, low, high, dtype=dtype, grad=False, layout=False, index=True)


Sizes = Mapping[int, int]


def resized(shape: tuple[int, ...], sizes: Sizes) -> tuple[int, ...]:
    return tuple(sizes.get(dim, dim) for dim in shape)


def draw(spec: T, dtype: torch.dtype, sizes: Sizes, gen: torch.Generator) -> torch.Tensor:
    """A contiguous tensor of `spec` with the sizes replaced as `sizes` says."""
    dtype = spec.dtype or dtype
    shape = resized(spec.shape, sizes)
    low, high = spec.low, spec.high
    if spec.index and high is not None:
        high = sizes.get(int(high), int(high))
    if dtype is torch.bool:
        return torch.rand(shape, generator=gen) > 0.5
    if dtype.is_floating_point or dtype.is_complex:
        if low is None and high is None:
            wide = torch.complex128 if dtype.is_complex else torch.float64
            return torch.randn(shape, generator=gen, dtype=wide).to(dtype)
        low, high = low or 0.0, 1.0 if high is None else high
        uniform = torch.rand(shape, generator=gen, dtype=torch.float64)
        return (uniform * (high - low) + low).to(dtype)
    first = -9 if low is None else int(low)
    last = 10 if high is None else int(high)
    if not dtype.is_signed:
        first = max(first, 0)
    return torch.randint(first, max(last, first + 1), shape, generator=gen).to(dtype)


def _transposed(value: torch.Tensor) -> torch.Tensor:
    return value.mT.contiguous().mT if value.ndim >= 2 else value


def _sliced(value: torch.Tensor) -> torch.Tensor:
    """Every other element of a longer last dimension, from an offset."""
    if value.ndim == 0:
        return value
    base = value.new_zeros((*value.shape[:-1], value.shape[-1] * 2 + 1))
    view = base[..., 1::2]
    view.copy_(value)
    return view


def _expanded(value: torch.Tensor) -> torch.Tensor:
    return value[:1].expand(value.shape) if value.ndim else value


def _channels_last(value: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(value.ndim)
    return value.contiguous(memory_format=wanted) if wanted else value


def _offset(value: torch.Tensor) -> torch.Tensor:
    """Contiguous, but starting one element into its storage: unaligned for vector loads."""
    base = value.new_zeros(value.numel() + 1)
    view = base[1:].view(value.shape)
    view.copy_(value)
    return view


LAYOUT_OF: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda value: value,
    "transposed": _transposed,
    "sliced": _sliced,
    "expanded": _expanded,
    "channels_last": _channels_last,
    "offset": _offset,
}


def map_specs(spec: Any, build: Callable[[T], torch.Tensor]) -> Any:
    """Build every tensor of an input spec: a T, a shape, a list of specs, or a plain value."""
    if isinstance(spec, T):
        return build(spec)
    if isinstance(spec, tuple) and all(type(dim) is int for dim in spec):
        return build(T(spec))
    if isinstance(spec, list) and spec and all(isinstance(s, T | tuple) for s in spec):
        return [map_specs(s, build) for s in spec]
    return spec.clone() if isinstance(spec, torch.Tensor) else spec


def special_columns(count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """`count` vectors that together hold every combination of the special values of a dtype."""
    if dtype.is_floating_point:
        values: tuple[float, ...] = SPECIAL_FLOATS + NON_FINITE
    else:
        info = torch.iinfo(dtype)
        values = tuple(v for v in (0, 1, 2, -1, -3, info.max, info.min) if v >= info.min)
    rows = list(itertools.product(values, repeat=count))
    return [torch.tensor([row[i] for row in rows], dtype=dtype) for i in range(count)]


def clone_exactly(value: torch.Tensor, device: str | None = None) -> torch.Tensor:
    """A copy with its own storage and the same sizes, strides and offset, on `device` if given."""
    if value.layout is not torch.strided or value.is_quantized:
        copy = value.detach().clone()
        return copy if device is None else copy.to(device)
    value = value.resolve_conj().resolve_neg()
    storage = value.detach().untyped_storage().clone()
    if device is not None and torch.device(device).type != value.device.type:
        storage = storage.to(device=torch.device(device))
    with torch.no_grad():
        copy = torch.empty(0, dtype=value.dtype, device=storage.device)
        copy.set_(storage, value.storage_offset(), value.shape, value.stride())
    return copy
