"""Shapes, slices, joins, indexing, and filled tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dicp.graphop.interpreter import Semantics


def strided_slice(x: Tensor, begin: list[int], end: list[int], strides: list[int]) -> Tensor:
    """One begin, end and stride per dimension; strides are positive."""
    for dim, (first, last, step) in enumerate(zip(begin, end, strides, strict=True)):
        x = torch.ops.aten.slice.Tensor(x, dim, first, last, step)
    return x


def pad(x: Tensor, paddings: list[int], fill: Tensor | None, mode: str = "constant") -> Tensor:
    """`paddings`: before and after each dimension, flattened; negative ones cut."""
    assert mode == "constant", mode
    pairs = [paddings[k : k + 2] for k in range(0, len(paddings), 2)]
    shape = [s + a + b for s, (a, b) in zip(x.shape, pairs, strict=True)]
    out = torch.zeros(shape, dtype=x.dtype) if fill is None else fill.expand(shape).clone()
    for dim, (before, after) in enumerate(pairs):
        size = x.shape[dim]
        if before < 0:
            x, before = x.narrow(dim, -before, size + before), 0
        if after < 0:
            x = x.narrow(dim, 0, x.shape[dim] + after)
    inner = out
    for dim, (before, _) in enumerate(pairs):
        start = before if before > 0 else 0
        inner = inner.narrow(dim, start, x.shape[dim])
    inner.copy_(x)
    return out


def as_strided(
    x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: Sequence[int]
) -> Tensor:
    """A window on row-major `x`, which itself may be a part of a longer tensor."""
    whole = x.contiguous()
    return whole.as_strided(size, stride, whole.storage_offset() + storage_offset[0])


def gather_v2(x: Tensor, indices: Tensor, axis: int, batch_dims: int = 0) -> Tensor:
    """Slices of `x` along `axis`, in the shape of `indices`."""
    assert batch_dims == 0
    flat = x.index_select(axis, indices.reshape(-1))
    return flat.reshape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])


def gather_nd(x: Tensor, indices: Tensor, negative_index_support: bool = False) -> Tensor:
    """x[i0, i1, ...] for each row of `indices`."""
    return x[tuple(indices.unbind(-1)) if negative_index_support else coordinates(indices)]


def coordinates(indices: Tensor) -> tuple[Tensor, ...]:
    """The coordinates in each row of `indices`, which count from 0 and never from the end.

    A negative one is put out of range for PyTorch to refuse: inference has no data to look at.
    """
    beyond = torch.iinfo(indices.dtype).max
    return tuple(indices.masked_fill(indices < 0, beyond).unbind(-1))


def _update(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return torch.index_put(x, coordinates(indices), updates)


def scatter_elements(
    data: Tensor, indices: Tensor, updates: Tensor, axis: int = 0, reduction: str = "none"
) -> Tensor:
    indices = indices.long()
    if reduction == "none":
        return torch.scatter(data, axis, indices, updates)
    if reduction == "add":
        return torch.scatter_add(data, axis, indices, updates)
    names = {"mul": "prod", "max": "amax", "min": "amin"}
    return torch.scatter_reduce(data, axis, indices, updates, names[reduction])


def roll(x: Tensor, shifts: list[int], dims: list[int] | None = None) -> Tensor:
    return torch.roll(x, shifts, dims or [])


def bitcast(x: Tensor, type: Any) -> Tensor:
    """The bits of `x` as another type: of a smaller one several along a new last dimension, of a
    larger one one for each slice along the last dimension."""
    x = x.contiguous()
    if type.itemsize > x.dtype.itemsize:
        return x.view(type).squeeze(-1)
    parts = x.dtype.itemsize // type.itemsize
    return x.view(type) if parts == 1 else x.unsqueeze(-1).view(type)


def fill(dims: list[int], value: Tensor) -> Tensor:
    return value.expand(dims).contiguous()


def unpack(x: Tensor, num: int, axis: int = 0) -> tuple[Tensor, ...]:
    return torch.unbind(x, axis)


def trans_data(src: Tensor, src_format: str, dst_format: str) -> Tensor:
    """`src` in another format. Blocked tensors are worked on with their plain sizes, those of an
    image in the order NCHW."""
    if src_format == "NHWC":
        src = src.permute(0, 3, 1, 2)
    return (src.permute(0, 2, 3, 1) if dst_format == "NHWC" else src).clone()


def split(x: Tensor, size_splits: list[int], split_dim: int, num_split: int) -> tuple[Tensor, ...]:
    if min(size_splits) < 1:
        raise ValueError(f"parts of {size_splits}: each has an element")
    return torch.split(x, size_splits, split_dim)


def register(semantics: Semantics) -> None:
    semantics.op("Reshape", host=("shape",))(lambda x, shape: x.reshape(shape))
    semantics.op("Transpose", host=("perm",))(lambda x, perm: x.permute(perm))
    semantics.op("BroadcastTo", host=("shape",))(lambda x, shape: x.expand(shape))
    semantics.op("Tile", host=("multiples",))(lambda x, multiples: x.repeat(multiples))
    semantics.op("ConcatD")(lambda x, concat_dim, N=1: torch.cat(x, concat_dim))
    semantics.op("Pack")(lambda x, N, axis=0: torch.stack(x, axis))
    semantics.op("SplitVD")(split)
    semantics.op("Unpack")(unpack)
    semantics.op("StridedSlice", host=("begin", "end", "strides"))(strided_slice)
    semantics.op("PadV3", host=("paddings",))(pad)
    semantics.op("ReverseV2", host=("axis",))(lambda x, axis: torch.flip(x, axis))
    semantics.op("Roll")(roll)
    semantics.op("Tril")(lambda x, diagonal=0: torch.tril(x, diagonal))
    semantics.op("Triu")(lambda x, diagonal=0: torch.triu(x, diagonal))
    semantics.op("AsStrided", host=("size", "stride", "storage_offset"))(as_strided)
    semantics.op("Fill", host=("dims",))(fill)
    semantics.op("Range", host=("start", "limit", "delta"))(
        lambda start, limit, delta: torch.arange(start, limit, delta)
    )
    semantics.op("Bitcast")(bitcast)
    semantics.op("TransData")(trans_data)
    semantics.op("GatherV2", host=("axis",))(gather_v2)
    semantics.op("GatherElements")(lambda x, index, dim=0: torch.gather(x, dim, index.long()))
    semantics.op("GatherNd")(gather_nd)
    semantics.op("TensorScatterUpdate")(_update)
    semantics.op("ScatterElements")(scatter_elements)
