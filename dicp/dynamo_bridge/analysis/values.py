"""Inferred values of nodes: their sizes and strides, compared without adding a guard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from dicp.torch_private import expression_of, hint_of


def expressions(sizes: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(expression_of(size) for size in sizes)


def shape_of(value: torch.Tensor) -> tuple[Any, ...]:
    return expressions(value.shape)


def strides_of(value: torch.Tensor) -> tuple[Any, ...] | None:
    """The strides, or None for a tensor without strides (sparse, nested)."""
    return expressions(value.stride()) if value.layout == torch.strided else None


def same_strides(left: torch.Tensor, right: torch.Tensor) -> bool:
    return _same_field(strides_of(left), strides_of(right))


def is_contiguous(value: torch.Tensor) -> bool:
    """Row-major by its symbolic strides; never adds a guard (unknown counts as no)."""
    return _is_ordered(value, range(value.dim()))


def is_channels_last(value: torch.Tensor) -> bool:
    """A 4-d tensor whose strides order it batch, height, width, channel."""
    return value.dim() == 4 and _is_ordered(value, (0, 2, 3, 1))


def _is_ordered(value: torch.Tensor, order: Sequence[int]) -> bool:
    """Dense, with the dimensions from the largest stride to the smallest in `order`."""
    expected, hint = 1, 1
    for dim in reversed(order):
        size, stride = value.shape[dim], value.stride(dim)
        if expression_of(size) == 1:
            continue
        if hint_of(stride) != hint or not equal_sizes(expression_of(stride), expected):
            return False
        expected, hint = expected * expression_of(size), hint * hint_of(size)
    return True


def is_dense(value: Any) -> bool:
    """Whether the elements of a tensor fill its memory in the order of its strides."""
    return not isinstance(value, torch.Tensor) or _is_ordered(value, stride_order(value))


def equal_sizes(left: Any, right: Any) -> bool:
    """Whether expressions are equal, also after expanding their products."""
    if left == right:
        return True
    symbolic = getattr(left, "free_symbols", None) and getattr(right, "free_symbols", None)
    return bool(symbolic) and sympy.expand(left - right) == 0


def value_of(arg: Any) -> Any:
    """The inferred value of an argument: a node's `meta["val"]`, or the argument itself."""
    return arg.meta.get("val") if isinstance(arg, fx.Node) else arg


def difference(expected: Any, got: Any, strides: bool = True) -> tuple[str, Any, Any] | None:
    """The first (field, expected, got) in which two inferred values differ, or None."""
    if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor):
        fields: list[tuple[str, Any, Any]] = [
            ("shape", shape_of(expected), shape_of(got)),
            ("dtype", expected.dtype, got.dtype),
            ("device", expected.device, got.device),
            ("layout", expected.layout, got.layout),
            ("conjugate bit", expected.is_conj(), got.is_conj()),
            ("negative bit", expected.is_neg(), got.is_neg()),
        ]
        if strides:
            fields.append(("strides", strides_of(expected), strides_of(got)))
        return next((field for field in fields if not _same_field(*field[1:])), None)
    if isinstance(expected, (list, tuple)) and isinstance(got, (list, tuple)):
        if len(expected) != len(got):
            return ("number of results", len(expected), len(got))
        pairs = zip(expected, got, strict=True)
        return next((d for e, g in pairs if (d := difference(e, g, strides))), None)
    left, right = expression_of(expected), expression_of(got)
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor) or left != right:
        return ("value", left, right)
    return None


def _same_field(left: Any, right: Any) -> bool:
    if left == right:
        return True
    if not isinstance(left, tuple) or not isinstance(right, tuple) or len(left) != len(right):
        return False
    return all(equal_sizes(a, b) for a, b in zip(left, right, strict=True))


def stride_order(value: torch.Tensor) -> list[int]:
    """Dimensions from the largest stride to the smallest; symbolic sizes count as their hints."""
    if is_contiguous(value):
        return list(range(value.dim()))
    hints = [hint_of(stride) for stride in value.stride()]
    sizes = [hint_of(size) for size in value.shape]
    return sorted(range(value.dim()), key=lambda dim: (-hints[dim], sizes[dim] == 1, dim))


def sizes_of(node: Any) -> tuple[Any, ...] | None:
    """The symbolic sizes of a tensor node."""
    value = value_of(node)
    return shape_of(value) if isinstance(value, torch.Tensor) else None


def same_sizes(*nodes: Any) -> bool:
    return all(sizes_of(node) == sizes_of(nodes[0]) for node in nodes)
