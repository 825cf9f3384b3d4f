"""Sizes and strides of PyTorch tensors as symbolic expressions, and predicates on layouts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch

from dicp.loop.ir.index import Size, normal
from dicp.torch_private import size_expression


def as_size(value: Any) -> Size:
    """A Python int or the sympy expression of a SymInt."""
    return normal(size_expression(value) if isinstance(value, torch.SymInt) else value)


def sizes_of(values: Iterable[Any]) -> tuple[Size, ...]:
    """PyTorch's sizes, symbolic ones too, as sizes of the IR."""
    return tuple(as_size(v) for v in values)


def strides_of(tensor: torch.Tensor) -> tuple[Size, ...]:
    """Strides with PyTorch's max(1, size) replaced by size: only those of empty tensors differ."""
    return tuple(
        s if isinstance(s, int) else normal(s.replace(_is_at_least_one, _other_than_one))
        for s in sizes_of(tensor.stride())
    )


def _is_at_least_one(size: sympy.Expr) -> bool:
    return type(size).__name__ == "Max" and len(size.args) == 2 and sympy.S.One in size.args


def _other_than_one(size: sympy.Expr) -> sympy.Expr:
    return next(a for a in size.args if a != 1)


def broadcast_shapes(*shapes: Sequence[Size]) -> tuple[Size, ...]:
    """The shape that tensors of these shapes are broadcast to."""
    rank = max((len(s) for s in shapes), default=0)
    result: list[Size] = []
    for axis in range(rank):
        sizes = [s[axis - rank + len(s)] for s in shapes if axis - rank + len(s) >= 0]
        wide = [s for s in sizes if s != 1]
        result.append(wide[0] if wide else 1)
    return tuple(result)


def is_dense(shape: Sequence[Size], strides: Sequence[Size]) -> bool:
    """Whether a tensor covers its memory without holes or overlap (any order of axes)."""
    if any(s == 0 for s in shape):
        return True
    pairs = [(st, s) for s, st in zip(shape, strides, strict=True) if s != 1]
    expected: Size = 1
    while pairs:
        found = next((p for p in pairs if p[0] == expected), None)
        if found is None:
            return False
        pairs.remove(found)
        expected = normal(expected * found[1])
    return True


def is_injective(shape: Sequence[Size], strides: Sequence[Size]) -> bool:
    """Whether no two elements share memory; holes are allowed."""
    if is_dense(shape, strides):
        return True
    numbers = [n for n in (*shape, *strides) if isinstance(n, int)]
    if len(numbers) != 2 * len(shape):
        # Symbolic strides are those of a tensor that eager allocated: only an expanded axis
        # (stride 0) could overlap.
        return all(s == 1 or t != 0 for s, t in zip(shape, strides, strict=True))
    sizes = numbers[: len(shape)]
    extent = 1
    for stride, size in sorted(zip(numbers[len(shape) :], sizes, strict=True)):
        if size != 1 and stride < extent:
            return False
        extent += (size - 1) * stride
    return True


def same_layout(shape: Sequence[Size], a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Whether both strides address the elements of `shape` alike; axes of size 1 do not count."""
    if any(s == 0 for s in shape):
        return True
    return all(s == 1 or x == y for s, x, y in zip(shape, a, b, strict=True))


def normalized_strides(shape: Sequence[Size], strides: Sequence[Size]) -> tuple[Size, ...]:
    """`strides`, with those of size-1 axes set to the extent of the axes after them.

    PyTorch tells channels-last tensors from others by these, too.
    """
    result = list(strides)
    extent: Size = 1
    for axis in range(len(shape) - 1, -1, -1):
        if shape[axis] == 1:
            result[axis] = extent
        elif result[axis] != 0:
            extent = _larger(extent, normal(result[axis] * shape[axis]), result[axis])
    return tuple(result)


def _larger(extent: Size, outer: Size, stride: Size) -> Size:
    """The extent with an axis more; channels of unknown size do not span the pixels after them."""
    if isinstance(extent, int) and isinstance(outer, int):
        return max(extent, outer)
    return extent if stride == 1 != extent else outer
