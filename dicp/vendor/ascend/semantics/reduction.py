"""Reductions, scans, sorting and searching."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dicp.graphop.interpreter import Semantics


def reduce_sum(x: Tensor, axes: list[int], keep_dims: bool = False) -> Tensor:
    return torch.sum(x, axes, keep_dims, dtype=x.dtype) if axes else x.clone()


def reduce_mean(x: Tensor, axes: list[int], keep_dims: bool = False) -> Tensor:
    return torch.mean(x, axes, keep_dims) if axes else x.clone()


def reduce_max(x: Tensor, axes: list[int], keep_dims: bool = False) -> Tensor:
    return torch.amax(x, axes, keep_dims) if axes else x.clone()


def reduce_min(x: Tensor, axes: list[int], keep_dims: bool = False) -> Tensor:
    return torch.amin(x, axes, keep_dims) if axes else x.clone()


def _axis_by_axis(reduce: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def function(x: Tensor, axes: list[int], keep_dims: bool = False) -> Tensor:
        result = x.clone()
        for axis in sorted((a % max(x.dim(), 1) for a in axes), reverse=True):
            result = reduce(result, axis, keep_dims)
        return result

    return function


def _prod(x: Tensor, axis: int, keep_dims: bool) -> Tensor:
    return torch.prod(x, axis, keep_dims, dtype=x.dtype)


def arg_max(x: Tensor, dimension: int, dtype: Any = torch.int64) -> Tensor:
    return torch.argmax(x, dimension).to(dtype)


def arg_min(x: Tensor, dimension: int, dtype: Any = torch.int64) -> Tensor:
    return torch.argmin(x, dimension).to(dtype)


def top_k(
    x: Tensor, k: int, sorted: bool = True, dim: int = -1, largest: bool = True
) -> tuple[Tensor, Tensor]:
    values, indices = torch.topk(x, k, dim, largest, sorted)
    return values, indices.to(torch.int32)


def sort(
    x: Tensor, axis: int = -1, descending: bool = False, stable: bool = False
) -> tuple[Tensor, Tensor]:
    if axis not in (-1, x.dim() - 1):
        raise ValueError(f"it sorts along the last of {x.dim()} axes, not along {axis}")
    values, indices = torch.sort(x, dim=axis, descending=descending, stable=stable)
    return values, indices.to(torch.int32)


def _scan(scan: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    def function(x: Tensor, axis: int, exclusive: bool = False, reverse: bool = False) -> Tensor:
        assert not exclusive
        if not reverse:
            return scan(x, axis)
        return scan(x.flip(axis), axis).flip(axis)

    return function


def search_sorted(
    sequence: Tensor, values: Tensor, sorter: None, dtype: Any = torch.int64, right: bool = False
) -> Tensor:
    return torch.searchsorted(sequence, values, right=right).to(dtype)


def _narrow_places(found: Any) -> tuple[Tensor, Tensor]:
    values, places = found
    return values, places.int()


def register(semantics: Semantics) -> None:
    axes = {
        "ReduceSum": reduce_sum, "ReduceMean": reduce_mean, "ReduceMax": reduce_max,
        "ReduceMin": reduce_min, "ReduceProd": _axis_by_axis(_prod),
        "ReduceAny": _axis_by_axis(torch.any), "ReduceAll": _axis_by_axis(torch.all),
    }  # fmt: skip
    for kind, function in axes.items():
        semantics.op(kind, host=("axes",))(function)
    scans: dict[str, Callable[[Tensor, int], Tensor]] = {
        "Cumsum": lambda x, axis: torch.cumsum(x, axis, dtype=x.dtype),
        "Cumprod": lambda x, axis: torch.cumprod(x, axis, dtype=x.dtype),
        "CumulativeLogsumexp": torch.logcumsumexp,
    }
    for kind, scan in scans.items():
        semantics.op(kind, host=("axis",))(_scan(scan))
    semantics.op("ArgMaxV2", host=("dimension",))(arg_max)
    semantics.op("ArgMin", host=("dimension",))(arg_min)
    semantics.op("TopKV2", host=("k",))(top_k)
    semantics.op("Sort")(sort)
    semantics.op("Cummax")(lambda x, dim: _narrow_places(torch.cummax(x, dim)))
    semantics.op("Cummin")(lambda x, axis: _narrow_places(torch.cummin(x, axis)))
    semantics.op("SearchSorted")(search_sorted)
