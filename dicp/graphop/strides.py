"""Which tensors are row-major once their dimensions are reordered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dicp.graphop.builder import Builder
from dicp.torch_private import hint_of


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes `order`."""
    return tuple(sorted(range(len(order)), key=lambda k: order[k]))


def dense_order(builder: Builder, fake: torch.Tensor) -> tuple[int, ...] | None:
    """Dimensions from the largest stride to the smallest if the tensor is dense, else None."""
    plain = tuple(range(fake.dim()))
    if any(builder.same(size, 0) for size in fake.shape) or _is_dense(builder, fake, plain):
        return plain
    order = tuple(
        sorted(plain, key=lambda d: (-hint_of(fake.stride(d)), -hint_of(fake.shape[d]), d))
    )
    return order if _is_dense(builder, fake, order) else None


def _is_dense(builder: Builder, fake: torch.Tensor, order: Sequence[int]) -> bool:
    expected: Any = 1
    for dim in reversed(order):
        size, stride = fake.shape[dim], fake.stride(dim)
        if builder.same(size, 1):
            continue
        if hint_of(stride) != hint_of(expected) or not builder.same(stride, expected):
            return False
        expected = expected * size
    return True
