"""Operators that write to a tensor they are given, and hand it on."""

from __future__ import annotations

import torch
from torch import Tensor

from dicp.graphop.interpreter import Semantics
from dicp.vendor.ascend.semantics.shape import coordinates


def assign(ref: Tensor, value: Tensor, validate_shape: bool = True) -> Tensor:
    assert not validate_shape or ref.shape == value.shape, "the shapes are the same"
    return ref.copy_(value)


def strided_slice_assign(
    var: Tensor, begin: list[int], end: list[int], strides: list[int], input_value: Tensor
) -> Tensor:
    """The value has the sizes of the slice: it is not broadcast."""
    part = var
    for dim, (first, last, step) in enumerate(zip(begin, end, strides, strict=True)):
        part = torch.ops.aten.slice.Tensor(part, dim, first, last, step)
    assert part.shape == input_value.shape, "the value has the sizes of the slice"
    part.copy_(input_value)
    return var


def scatter_elements(
    var: Tensor, indices: Tensor, updates: Tensor, axis: int = 0, reduction: str = "none"
) -> Tensor:
    if reduction == "none":
        return var.scatter_(axis, indices.long(), updates)
    names = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    return var.scatter_reduce_(axis, indices.long(), updates, names[reduction])


def scatter_nd_update(var: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return var.index_put_(coordinates(indices), updates)


def register(semantics: Semantics) -> None:
    semantics.update({
        "Assign": assign, "ScatterElementsV2": scatter_elements,
        "ScatterNdUpdate": scatter_nd_update,
    })  # fmt: skip
    semantics.op("StridedSliceAssign", host=("begin", "end", "strides"))(strided_slice_assign)
