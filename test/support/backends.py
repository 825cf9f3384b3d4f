"""The backend a test run was asked for, with the graphs it compiled counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
import torch.fx as fx
from torch._dynamo.utils import counters


def find_backend(name: str) -> Callable[..., Any]:
    """A dynamo backend by its registered name, else a dicp target's backend by the target's name.

    Raises LookupError, naming what exists, when there is neither.
    """
    known = torch._dynamo.list_backends(exclude_tags=())
    if name in known:
        found: Callable[..., Any] = torch._dynamo.lookup_backend(name)
        return found
    from dicp.dynamo_bridge.backend import Backend
    from dicp.target import discover

    targets = discover()
    if name not in targets:
        raise LookupError(f"no backend {name!r}; backends: {known}, targets: {sorted(targets)}")
    return Backend(name)


class BackendUnderTest:
    """A dynamo backend that counts the graphs it is given and passes them on.

    Dynamo calls a backend anew when it restarts its analysis of a function, so `graphs` may be more
    than `frames()`, the number of times that a function was compiled.
    """

    def __init__(self, name: str, device: str = "cpu") -> None:
        self.name = name
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

    def reports(self, since: int = 0) -> list[Any]:
        """The graph reports from number `since` on; empty for a backend that keeps none."""
        return list(getattr(self.inner, "reports", []))[since:]

    def frames(self) -> int:
        """How many functions (or parts between graph breaks) were compiled since `start_over`."""
        return int(counters["frames"]["ok"])

    def start_over(self) -> None:
        """Forget every compiled graph, in Dynamo and in the counters."""
        torch._dynamo.reset()
        counters.clear()
        self.graphs = 0
        reports = getattr(self.inner, "reports", None)
        if hasattr(reports, "clear"):
            reports.clear()
