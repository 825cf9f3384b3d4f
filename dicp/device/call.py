"""A call of an operator, and the error of one that is not compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dicp.torch_private import pytree


class NotCompiled(Exception):
    """The target does not compile this operator, or not with these arguments; the text says why.

    `transient`: the next call may be compiled, as where there was no space on a disk.
    """

    def __init__(self, reason: str, transient: bool = False) -> None:
        super().__init__(reason)
        self.transient = transient


@dataclass(frozen=True)
class Call:
    """A functional operator, or a function that computes it, and arguments on the host."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dtypes: tuple[torch.dtype | None, ...] = ()
    """The dtypes of given results, to which what the operator returns is converted."""

    def leaves(self) -> tuple[list[Any], Any]:
        return pytree.tree_flatten((self.args, dict(self.kwargs)))
