"""Composite operators forced to the CPU: PyTorch takes them apart before the device sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dicp.device.dispatcher import Dispatcher
from dicp.device.patterns import Patterns
from dicp.device.schemas import name_of
from dicp.device.thresholds import MAX_OPERATORS
from dicp.torch_private import OpOverload, dispatches_alone, overloads_of


class ForcedComposites:
    """Lets the parts of a composite operator that a pattern names run on the CPU."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.library = torch.library.Library("aten", "IMPL")
        self.known: set[str] = set()

    def update(self, patterns: Patterns) -> None:
        """Intercept the composite operators that `patterns` name."""
        if not patterns:
            return
        found = [op for op in _composites() if patterns.match(name_of(op))]
        if len(found) > MAX_OPERATORS:
            return
        for op in found:
            if name_of(op) not in self.known:
                self.known.add(name_of(op))
                self.library.impl(op, self._forced(op), "AutogradPrivateUse1")

    def _forced(self, op: OpOverload) -> Callable[..., Any]:
        name, dispatcher = name_of(op), self.dispatcher

        def run(*args: Any, **kwargs: Any) -> Any:
            if not dispatcher.forced.match(name):
                return op.decompose(*args, **kwargs)
            dispatcher.say_once(f"force fallback has been set, {name} will be fallback to cpu")
            dispatcher.counts.add(name, "forced")
            with dispatcher.forcing():
                return op.decompose(*args, **kwargs)

        return run


def _composites() -> list[OpOverload]:
    return [
        op
        for op in overloads_of("aten")
        if dispatches_alone(op, "CompositeImplicitAutograd")
        and not dispatches_alone(op, "PrivateUse1")
    ]
