"""The backend a test run was asked for, with the graphs it compiled counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.fx as fx

from dicp.discovery import SUFFIX, discover
from dicp.dynamo_bridge.backend import Backend, target_for_devices
from dicp.target import Target, find_target
from dicp.torch_private import backend_registry, dynamo_counters


def name_of(requested: str, device: str = "cpu") -> str:
    """The name of the backend `requested`, by default that of the target for CPU tensors, and for
    those of another `device` the backend that finds their target itself."""
    if requested or device != "cpu":
        return requested or "dicp"
    return target_for_devices(set()).name + SUFFIX


def find_backend(name: str) -> Callable[..., Any]:
    """A dynamo backend by its registered name, else a dicp target's backend by the target's name.

    Raises LookupError, naming what exists, when there is neither.
    """
    known = torch.compiler.list_backends(exclude_tags=())
    if name in known:
        found: Callable[..., Any] = backend_registry.lookup_backend(name)
        return found
    targets = discover()
    if name not in targets:
        raise LookupError(f"no backend {name!r}; backends: {known}, targets: {sorted(targets)}")
    return Backend(name)


class BackendUnderTest:
    """A dynamo backend that counts the graphs it is given and passes them on.

    Dynamo calls a backend anew when it restarts its analysis of a function, so `graphs` may be more
    than `frames()`, the number of times that a function was compiled.
    """

    def __init__(self, name: str, device: str = "cpu", allow_eager: bool = False) -> None:
        self.name = name
        self.allow_eager = allow_eager
        """Whether operators without a rule may run eagerly in cases that expect compiled ones."""
        self.device = device
        """Where the tests' tensors lie."""
        self.inner = find_backend(name)
        self.graphs = 0

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any
    ) -> Callable[..., Any]:
        self.graphs += 1
        compiled: Callable[..., Any] = self.inner(gm, example_inputs, **options)
        return compiled

    def __repr__(self) -> str:
        return f"backend {self.name}"

    @property
    def is_dicp(self) -> bool:
        """Whether the backend keeps reports of what it compiled."""
        return hasattr(self.inner, "reports")

    @cached_property
    def target(self) -> Target | None:
        """The target that the backend's name says; None where it says none."""
        name = self.name.removesuffix(SUFFIX)
        return find_target(name) if name in discover() else None

    @cached_property
    def limits(self) -> tuple[str, ...]:
        """How the reasons begin for which the target may leave a call to eager in any case."""
        return tuple(self.target.limits) if self.target is not None else ()

    def reports(self, since: int = 0) -> list[Any]:
        """The graph reports from number `since` on; empty for a backend that keeps none."""
        return list(getattr(self.inner, "reports", []))[since:]

    def frames(self) -> int:
        """How many functions (or parts between graph breaks) were compiled since `start_over`."""
        return int(dynamo_counters["frames"]["ok"])

    def start_over(self) -> None:
        """Forget every compiled graph, in Dynamo and in the counters."""
        torch.compiler.reset()
        dynamo_counters.clear()
        self.graphs = 0
        reports = getattr(self.inner, "reports", None)
        if reports is not None:
            reports.clear()
