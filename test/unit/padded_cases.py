"""Functions whose first size is padded to a shape bucket, and those that take no padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Any]
Case = tuple[Function, Callable[[int], list[Tensor]]]


def rand(rows: int, *shape: int) -> Tensor:
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(rows))


def mark(inputs: list[Tensor], n: int) -> None:
    """Sizes that are `n` change from run to run."""
    for x in inputs:
        for dim, size in enumerate(x.shape):
            (torch._dynamo.mark_dynamic if size == n else torch._dynamo.mark_static)(x, dim)


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Norm, product, activation, and heads taken apart and put together."""
    y = F.gelu(F.linear(F.layer_norm(x + 1, (12,), b, b), w))
    return (y.unflatten(-1, (2, 6)).softmax(-1).flatten(1) * x.sum(1, keepdim=True)).mean(-1)


def looked_up(ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(ids, table) + torch.arange(ids.shape[0])[:, None]


TAKEN: dict[str, Case] = {
    "layer": (layer, lambda n: [rand(n, 12), rand(12, 12), rand(12)]),
    "looked_up": (looked_up, lambda n: [torch.arange(n) % 5, rand(9, 6)]),
    "batched_product": (lambda x, y: x @ y, lambda n: [rand(n, 3, 4), rand(n, 4, 5)]),
}
REFUSED: dict[str, tuple[Function, list[Tensor]]] = {
    "sum": (lambda x: x.sum(0), [rand(5, 3)]),
    "softmax": (lambda x: x.softmax(0), [rand(5, 3)]),
    "number": (lambda x: x * x.shape[0], [rand(5, 3)]),
    "contracted": (lambda x: x.t() @ x, [rand(5, 3)]),
    "joined": (lambda x: torch.cat([x, x]), [rand(5, 3)]),
    "part": (lambda x: x[1:] * 2, [rand(5, 3)]),
    "flip": (lambda x: x.flip(0) + 1, [rand(5, 3)]),
    "middle": (lambda x: x.transpose(0, 1).reshape(-1) * 2, [rand(5, 3)]),
    "divided": (lambda x: 12 // x, [torch.arange(1, 6)]),
}
