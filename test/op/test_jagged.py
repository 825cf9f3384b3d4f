"""Modules that take nested tensors of the jagged layout, whose lengths change from call to call."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

WIDTH = 16
BATCHES = ((3, 5, 2), (7, 1), (4, 4, 4, 9))
"""The lengths of the sequences of each call."""


class Padded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nested.to_padded_tensor(x, 0.5)


MODULES = {
    "feed_forward": lambda: nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
    ),
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "softmax": lambda: nn.Softmax(-1),
    "padded": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Padded()),
}


def _values(x: Tensor) -> Tensor:
    return x.values() if x.is_nested else x


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("stored", [False, True])
def test_lengths_change(name: str, stored: bool, backend_name: str) -> None:
    """The graphs are compiled, or loaded as in another process."""
    eager = MODULES[name]()
    if stored:
        _check(copy.deepcopy(eager), backend_name)
        torch._dynamo.reset()
    _check(eager, backend_name)


def _check(eager: nn.Module, backend_name: str) -> None:
    module = copy.deepcopy(eager)
    compiled = torch.compile(module, backend=backend_name, fullgraph=True)
    for lengths in BATCHES:
        rows = [torch.randn(length, WIDTH) for length in lengths]
        results = []
        for step in (eager, compiled):
            x = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
            result = _values(step(x))
            result.square().sum().backward()
            results.append([result, x.grad.values()])
        torch.testing.assert_close(*results)
    torch.testing.assert_close(
        [p.grad for p in eager.parameters()], [p.grad for p in module.parameters()]
    )
