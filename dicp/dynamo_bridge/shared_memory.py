"""Inputs that share memory, in a graph that writes to its inputs.

AOTAutograd compiles such inputs as views of one tensor, and others as separate tensors. Neither
program is right for inputs that share memory otherwise, and PyTorch guards against that only where
inputs share memory while it compiles and sizes are symbolic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dicp.torch_private import sharing_inputs

InputMemory = tuple[int, int | None, int | None]
"""An input's position, its offset in elements and the bytes of its memory; None: symbolic."""


class SharedMemory:
    """How the inputs of a traced graph share memory."""

    def __init__(self, traced: Sequence[Any]) -> None:
        self.traced = _groups(traced)

    def differs(self, inputs: Sequence[Any]) -> bool:
        """Whether the inputs of a call share memory otherwise."""
        found = _groups(inputs)
        if not found and not self.traced:
            return False
        return len(found) != len(self.traced) or not all(map(_agree, found, self.traced))


def _groups(inputs: Sequence[Any]) -> list[list[InputMemory]]:
    return [[_memory_of(k, inputs[k]) for k in group] for group in sharing_inputs(inputs)]


def _memory_of(position: int, value: torch.Tensor) -> InputMemory:
    numbers = (value.storage_offset(), value.untyped_storage().nbytes())
    offset, size = (number if isinstance(number, int) else None for number in numbers)
    return position, offset, size


def _agree(found: Sequence[InputMemory], traced: Sequence[InputMemory]) -> bool:
    return len(found) == len(traced) and all(
        number is None or mine == number
        for memory, other in zip(found, traced, strict=True)
        for mine, number in zip(memory, other, strict=True)
    )
