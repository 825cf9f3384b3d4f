"""Decompositions of writes into views: scatters into tensors whose elements share memory."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dicp import torch_private
from dicp.torch_private import OpOverload

aten = torch.ops.aten


def as_strided_scatter(
    x: Tensor, source: Tensor, size: Any, stride: Any, storage_offset: Any = None
) -> Any:
    """Eager's operator, on a copy of `x` where elements of `x` share memory, as in eager.

    PyTorch's own decomposition keeps their strides, and takes a missing offset for 0. A contiguous
    part that covers all of `x` is `source` itself, as in the gradient of a global average pool.
    """
    if _covers(x, size, stride, storage_offset):
        return source.clone(memory_format=torch.contiguous_format).view(x.shape)
    shared = any(each == 0 and n != 1 for n, each in zip(x.shape, x.stride(), strict=True))
    if not shared or x.numel() == 0:
        return NotImplemented
    return aten.as_strided_scatter.default(x.clone(), source, size, stride, storage_offset)


def _covers(x: Tensor, size: Any, stride: Any, storage_offset: Any) -> bool:
    """Whether it is known that this part of `x` is all of it, in its order, and contiguous."""
    steps = itertools.accumulate(reversed(size), operator.mul, initial=1)
    pairs = [
        (math.prod(size), x.numel()),
        (x.storage_offset() if storage_offset is None else storage_offset, x.storage_offset()),
        *zip(reversed(stride), steps, strict=False),  # the last step is the number of elements
    ]
    return all(torch_private.statically_known_true(a == b) for a, b in pairs) and x.is_contiguous()


def _scatter_of(view: OpOverload) -> Callable[..., Any]:
    """The decomposition of a scatter into a view of a tensor whose elements share memory.

    Eager writes into a copy of that memory, and gives the same view of it. Where a stride is 0, or
    nothing is shared, rules write into a copy of the elements.
    """

    def rule(x: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _overlaps(x):
            return NotImplemented
        return _written(x, source, lambda whole: view(whole, *args, **kwargs))

    return rule


def _written(x: Tensor, source: Tensor, view: Callable[[Tensor], Tensor]) -> Tensor:
    """The tensor that lies as `x` in a copy of its memory, with `source` written into a view of it.

    The memory is read from wherever the `x` of a call begins: nothing guards an input's storage
    offset.
    """
    memory = aten.as_strided.default(x, [_extent(x)], [1])
    part = view(aten.as_strided.default(memory.clone(), x.shape, x.stride()))
    place = (part.shape, part.stride(), part.storage_offset())
    source = source.to(x.dtype).expand(part.shape)
    written = aten.as_strided_scatter.default(memory.clone(), source, *place)
    return aten.as_strided.default(written, x.shape, x.stride())


def _extent(x: Tensor) -> Any:
    """Elements of memory from the first to the last of a tensor, both included."""
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))


def _overlaps(x: Tensor) -> bool:
    """Whether elements share memory, as windows do, with no stride of 0.

    Of symbolic sizes, those of the traced call decide: to write into a copy of the memory is right
    for tensors that share none, too.
    """
    sizes, strides = (list(map(torch_private.hint_of, each)) for each in (x.shape, x.stride()))
    if 0 in sizes:
        return False
    steps = sorted((s, n) for n, s in zip(sizes, strides, strict=True) if n != 1)
    extents = itertools.accumulate(((n - 1) * s for s, n in steps), initial=0)
    return all(s for s, _ in steps) and any(
        s <= r for (s, _), r in zip(steps, extents, strict=False)
    )


VIEWS_WRITTEN: dict[Any, Callable[..., Any]] = {
    aten.select_scatter.default: aten.select.int,
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.diagonal_scatter.default: aten.diagonal.default,
}
"""Operator -> the view of its first operand that is replaced by the second."""
SCATTERS: dict[Any, Callable[..., Any]] = {
    **{op: _scatter_of(view) for op, view in VIEWS_WRITTEN.items()},
    aten.as_strided_scatter.default: as_strided_scatter,
}
"""Scatters into tensors whose elements share memory; others keep their operator."""


def undecomposed(*args: Any, **kwargs: Any) -> Any:
    """The rule of an operator that stays whole."""
    return NotImplemented
