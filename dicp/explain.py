"""`dicp.explain(fn, *args)`: how a function is compiled, as an object and as text."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from dicp.discovery import target_name
from dicp.dynamo_bridge.backend import Backend
from dicp.dynamo_bridge.observe import GraphReport, breaks_text
from dicp.torch_private import GraphBreak, GraphBreaks, pytree


@dataclass(frozen=True)
class Explanation:
    """The graphs that one call of a function was compiled to, and what was not compiled."""

    reports: Sequence[GraphReport]
    breaks: Sequence[GraphBreak] = ()
    """What Dynamo left to Python, so that it never reached the backend."""

    @property
    def counts(self) -> dict[str, int]:
        """The number of operators of all graphs per decision."""
        total: Counter[str] = Counter()
        for report in self.reports:
            total.update(report.counts)
        return dict(total)

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {kind}" for kind, n in self.counts.items())
        head = f"{len(self.reports)} graphs: {counts}"
        breaks = breaks_text(self.breaks).splitlines()
        return "\n".join([head, *breaks, *(str(report) for report in self.reports)])


def explain(
    fn: Callable[..., Any],
    *args: Any,
    backend: str | None = None,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Explanation:
    """Compile `fn` for these arguments, run it once, and report the decision on every operator.

    The backward graph is compiled too where a result requires a gradient. `backend` is the name of
    a target or backend, by default that of the inputs' device. Nothing is read from the cache, so
    that every stage is shown. Existing compiled versions of the function are not affected.
    """
    breaks = GraphBreaks()
    target = None if backend in (None, "dicp") else target_name(backend)
    compiler = Backend(target, **{"cache": False, **(options or {})})
    compiled = torch.compile(fn, backend=compiler, dynamic=dynamic)
    results = compiled(*args, **kwargs)
    differentiable = [
        r for r in pytree.tree_leaves(results) if isinstance(r, torch.Tensor) and r.requires_grad
    ]
    if differentiable:
        grads = [torch.ones_like(r) for r in differentiable]
        inputs = [
            t for t in pytree.tree_leaves((args, kwargs, _parameters(fn)))
            if isinstance(t, torch.Tensor) and t.requires_grad
        ]  # fmt: skip
        if inputs:  # parameters of a module that a function closes over are not found
            torch.autograd.grad(differentiable, inputs, grads, allow_unused=True)
    return Explanation(list(compiler.reports), breaks.found())


def _parameters(fn: Callable[..., Any]) -> list[torch.Tensor]:
    return list(fn.parameters()) if isinstance(fn, torch.nn.Module) else []


class _CallableModule(ModuleType):
    """A callable module: once imported, `dicp.explain` is this module and not the function."""

    def __call__(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
        return explain(fn, *args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
