"""Interception of the calls of a program's outermost modules."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Run = Callable[..., Any]
"""`run(module, call, *args, **kwargs)`; `call()` is the module's own call."""


class _CallDepth(threading.local):
    def __init__(self) -> None:
        self.depth = 0


def around_outermost_calls(run: Run) -> Callable[[], None]:
    """Let `run` handle each call of a module that no other module's call encloses.

    Returns a function that restores the modules' own call. Nothing changes while Dynamo traces.
    """
    call = nn.Module.__call__
    inside = _CallDepth()

    def outermost(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if inside.depth or torch.compiler.is_compiling():
            return call(self, *args, **kwargs)
        inside.depth += 1
        try:
            return run(self, call, *args, **kwargs)
        finally:
            inside.depth -= 1

    nn.Module.__call__ = outermost  # type: ignore[method-assign]

    def undo() -> None:
        nn.Module.__call__ = call  # type: ignore[method-assign]

    return undo
