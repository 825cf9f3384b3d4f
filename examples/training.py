"""Training beside eager: the loop, its losses and their table."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from examples import frame

Batch = tuple[Tensor, Tensor]
"""Images (N, 3, height, width) and classes (N)."""


@dataclass(frozen=True)
class Run:
    """The loss and the seconds of each optimizer step."""

    losses: list[float]
    seconds: list[float]


@dataclass(frozen=True)
class Result:
    """A compiled run and, where it was asked for, the run to compare with."""

    compiled: Run
    eager: Run | None = None


def train(
    loss_of: Callable[[Any], Tensor], optimizer: torch.optim.Optimizer, batches: Iterable[Any]
) -> Run:
    """One optimizer step for each batch."""

    def step(batch: Any) -> float:
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    steps = [frame.timed(step, batch) for batch in batches]
    return Run([loss for loss, _ in steps], [seconds for _, seconds in steps])


def momentum(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def train_classifier(
    model: nn.Module,
    batches: Sequence[Batch],
    rate: float,
    compiler: frame.Compiler | None = None,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
) -> Run:
    """Train a copy of an image classifier with momentum, compiled or, without a compiler, eager.

    wrap: makes the module that is called of the copy, such as DistributedDataParallel.
    """
    trained = copy.deepcopy(model).train()
    called = wrap(trained) if wrap else trained
    forward = compiler(called) if compiler else called
    device = next(trained.parameters()).device

    def loss_of(batch: Batch) -> Tensor:
        images, classes = (tensor.to(device) for tensor in batch)
        return F.cross_entropy(forward(_batch_symbolic(images)), classes)

    return train(loss_of, momentum(trained, rate), batches)


def random_batches(count: int, batch: int, size: int, classes: int) -> list[Batch]:
    """Images of noise with classes drawn for them."""
    return [
        (torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,)))
        for _ in range(count)
    ]


def first(batches: Iterable[Batch], count: int) -> list[Batch]:
    """The first batches of a loader, which starts over where it ends."""
    epochs: Iterator[Batch] = chain.from_iterable(repeat(batches))
    return [batch for _, batch in zip(range(count), epochs, strict=False)]


def load_state(model: nn.Module, folder: Path, holds: str) -> None:
    """Load the only checkpoint in a folder; raises ExampleError where there is none, or several."""
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.pth"), *folder.glob("*.pt")])
    if len(files) != 1:
        raise frame.ExampleError(f"{folder} holds {len(files)} checkpoints; expected {holds}")
    plain = files[0].suffix == ".safetensors"
    state = load_file(files[0]) if plain else torch.load(files[0], weights_only=True)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise frame.ExampleError(f"{files[0]} is of another model: {error}") from error


def show_losses(result: Result, beside: str = "eager") -> None:
    """Print the losses of both runs, and the median seconds of steps after the first."""
    runs = [run for run in (result.compiled, result.eager) if run]
    rows: list[list[Any]] = [
        [step + 1, *losses]
        for step, losses in enumerate(zip(*(r.losses for r in runs), strict=True))
    ]
    if result.eager:
        for row in rows:
            row.append(abs(row[1] - row[2]))
    names = ["compiled", beside, "difference"] if result.eager else ["compiled"]
    frame.show_table("loss", ["step", *names], rows)
    for name, run in zip(names, runs, strict=False):
        if steady := run.seconds[1:]:
            print(f"{name}: first step {run.seconds[0]:.2f} s, then {median(steady):.4f} s")


def _batch_symbolic(images: Tensor) -> Tensor:
    """With dynamic shapes, only the batch size of images is a symbol."""
    for dimension in range(1, images.dim()):
        torch._dynamo.mark_static(images, dimension)
    return images
