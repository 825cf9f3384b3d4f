"""Functions compiled for the Ascend simulator, held against eager in fp64."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dicp.compare import Rule, assert_matches
from dicp.dynamo_bridge.backend import Backend
from dicp.errors import SimulatorWarning

pytree = torch.utils._pytree


def compiled(fn: Callable[..., Any], *, dynamic: bool = False, **options: Any) -> Any:
    """`fn` compiled for the simulator, nothing kept on disk."""
    torch._dynamo.reset()
    backend = Backend("ascend", **{"runs_on": "simulator", "cache": False, **options})
    return torch.compile(fn, backend=backend, dynamic=dynamic)


def results(fn: Callable[..., Any], inputs: Sequence[Any]) -> list[Tensor]:
    """Outputs, then the gradients of all inputs that want one."""
    found = [x for x in pytree.tree_leaves(fn(*inputs)) if isinstance(x, Tensor)]
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    if not wanted:
        return found
    weights = [torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view(x.shape) for x in found]
    seeds = [w.to(x.dtype) for w, x in zip(weights, found, strict=True)]
    return [*found, *torch.autograd.grad(found, wanted, seeds)]


def again(inputs: Sequence[Any], dtype: torch.dtype | None = None) -> list[Any]:
    """Copies of the inputs, floating point ones in `dtype`."""

    def one(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        wide = dtype if x.dtype.is_floating_point else None
        return x.detach().clone().to(wide or x.dtype).requires_grad_(x.requires_grad)

    return [one(x) for x in inputs]


def check(
    fn: Callable[..., Any], *inputs: Any, dynamic: bool = False, rule: Rule | None = None,
    **options: Any,
) -> None:  # fmt: skip
    """Raise AssertionError unless outputs and gradients are as near to fp64 as eager's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SimulatorWarning)
        got = results(compiled(fn, dynamic=dynamic, **options), again(inputs))
    eager = results(fn, again(inputs))
    truth = results(fn, again(inputs, torch.float64))
    for k, (mine, theirs, real) in enumerate(zip(got, eager, truth, strict=True)):
        assert_matches(mine, theirs, real, name=f"result {k}", rule=rule or Rule(floor=4.0))
