"""Operators of our own that passes put into a graph, with eager and fake implementations.

They are ordinary `torch.library` operators in the namespace `dicp`: a target that has no kernel for
one can run it as an eager call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from dicp.errors import NarrowingError

ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
"""The values of `dicp::linear`'s argument `activation`, and their functions."""

torch.library.define(
    "dicp::linear",
    "(Tensor input, Tensor weight, Tensor? bias, str activation) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl("dicp::linear", "CompositeExplicitAutograd")
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """`activation(input @ weight.T + bias)`; input (..., k), weight (n, k), bias (n,)."""
    return ACTIVATIONS[activation](F.linear(input, weight, bias))


@torch.library.register_fake("dicp::linear")
def _linear_fake(input: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    assert activation in ACTIVATIONS, activation
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


linear = torch.ops.dicp.linear.default

torch.library.define(
    "dicp::narrow",
    "(Tensor self, ScalarType dtype, str operator) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl("dicp::narrow", "CompositeExplicitAutograd")
def _narrow(self: Tensor, dtype: torch.dtype, operator: str) -> Tensor:
    """Integers as `dtype`, for `operator`. One pass over them finds the extremes.

    Raises NarrowingError.
    """
    check_all_fit(self, dtype, operator)
    return self.to(dtype)


@torch.library.register_fake("dicp::narrow")
def _narrow_fake(self: Tensor, dtype: torch.dtype, operator: str) -> Tensor:
    return self.to(dtype)


def check_fits(value: int, dtype: torch.dtype, operator: str) -> None:
    """Raises NarrowingError for a number that `dtype` does not hold."""
    info = torch.iinfo(dtype)
    if not info.min <= value <= info.max:
        raise NarrowingError(operator, value, dtype)


def check_all_fit(values: Tensor, dtype: torch.dtype, operator: str) -> None:
    """Raises NarrowingError for an element that `dtype` does not hold."""
    for extreme in map(int, values.aminmax()) if values.numel() else ():
        check_fits(extreme, dtype, operator)


narrow = torch.ops.dicp.narrow.default
