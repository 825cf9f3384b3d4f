"""How blocked tensors lie in memory: cut into blocks, the last ones filled up with zeros.

A value keeps its logical sizes in every format; what crosses a graph's border is its storage. A
block's row has 16 elements in all the dtypes that are blocked here (CANN's manual on data formats).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

BLOCK = 16

IMAGE = "NC1HWC0"
FILTER = "FRACTAL_Z"
MATRIX = "FRACTAL_NZ"
BLOCKED = frozenset({IMAGE, FILTER, MATRIX})


def storage_dims(fmt: str, dims: Sequence[Any]) -> list[Any]:
    """The sizes of a tensor's storage; `dims` are its logical sizes, and may be symbolic."""
    if fmt == IMAGE:
        n, c, h, w = dims
        return [n, _blocks(c), h, w, BLOCK]
    if fmt == FILTER:
        n, c, h, w = dims
        return [_blocks(c) * h * w, _blocks(n), BLOCK, BLOCK]
    if fmt == MATRIX:
        *lead, m, n = dims
        return [*lead, _blocks(n), _blocks(m), BLOCK, BLOCK]
    return list(dims)


def _blocks(size: Any) -> Any:
    return (size + BLOCK - 1) // BLOCK


def is_whole(fmt: str, dims: Sequence[Any]) -> bool:
    """Whether all blocks of an image or a matrix are full."""
    cut = dims[1:2] if fmt == IMAGE else dims[-2:]
    return all(isinstance(size, int) and size % BLOCK == 0 for size in cut)


def packed(x: Tensor, fmt: str) -> Tensor:
    """The storage of `x`."""
    if fmt == IMAGE:
        return _cut(x, 1).permute(0, 1, 3, 4, 2).contiguous()
    if fmt == FILTER:
        blocks = _cut(_cut(x, 1), 0)  # N1 N0 C1 C0 H W
        transposed = blocks.permute(2, 4, 5, 0, 1, 3)
        return transposed.reshape(storage_dims(fmt, x.shape)).contiguous()
    if fmt == MATRIX:
        blocks = _cut(_cut(x, x.dim() - 1), x.dim() - 2)  # M1 M0 N1 N0
        return blocks.movedim(-2, -4).contiguous()
    return x


def unpacked(storage: Tensor, fmt: str, dims: Sequence[int]) -> Tensor:
    """The tensor with sizes `dims` that lies in `storage`."""
    if fmt == IMAGE:
        return storage.permute(0, 1, 4, 2, 3).flatten(1, 2)[:, : dims[1]]
    if fmt == FILTER:
        n, c, h, w = dims
        blocks = storage.reshape(-1, h, w, storage.shape[1], BLOCK, BLOCK)
        return blocks.permute(3, 4, 0, 5, 1, 2).flatten(2, 3).flatten(0, 1)[:n, :c]
    if fmt == MATRIX:
        rows = storage.movedim(-4, -2).flatten(-2, -1).flatten(-3, -2)
        return rows[..., : dims[-2], : dims[-1]]
    return storage


def _cut(x: Tensor, dim: int) -> Tensor:
    """`x` with dimension `dim` cut into blocks: two dimensions, zeros behind the last element."""
    behind = x.dim() - 1 - dim
    return F.pad(x, [0, 0] * behind + [0, -x.shape[dim] % BLOCK]).unflatten(dim, (-1, BLOCK))
