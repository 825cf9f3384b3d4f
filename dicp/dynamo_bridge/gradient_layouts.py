"""Gradients that an optimizer reads, of which Dynamo guards neither dtype nor strides.

Compiled code reads them as they were traced. Others run in eager.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from dicp.torch_private import unguarded_gradients


class GradientLayouts:
    """Dtypes, sizes and strides of the gradients of a graph of Dynamo's with inputs `traced`."""

    def __init__(self, graph: fx.Graph, traced: Sequence[Any]) -> None:
        self.traced = [(k, _layout(traced[k])) for k in unguarded_gradients(graph)]

    def __bool__(self) -> bool:
        return bool(self.traced)

    def differ(self, inputs: Sequence[Any]) -> bool:
        """Whether a call has to run in eager."""
        return not all(_agree(layout, _layout(inputs[k])) for k, layout in self.traced)


def _layout(gradient: torch.Tensor) -> tuple[Any, ...]:
    if gradient.layout != torch.strided:
        return gradient.dtype, gradient.layout
    return gradient.dtype, gradient.layout, *gradient.shape, *gradient.stride()


def _agree(traced: Sequence[Any], found: Sequence[Any]) -> bool:
    """Symbolic sizes agree with any: those of the parameters determine them."""
    return len(traced) == len(found) and all(
        isinstance(one, torch.SymInt) or one == other
        for one, other in zip(traced, found, strict=True)
    )
