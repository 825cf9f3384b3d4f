"""Train one model twice, eager and compiled: the same weights, batches and order."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

BATCH = 64
TEST_IMAGES = 357
SEED = 1


@dataclass(frozen=True)
class Digits:
    """Handwritten digits, split into training and test images with values from -1 to 1."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @classmethod
    def load(cls) -> Digits:
        data = load_digits()
        order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(SEED))
        images = (torch.tensor(data.images, dtype=torch.float32) / 8 - 1).unsqueeze(1)[order]
        labels = torch.tensor(data.target)[order]
        return cls(
            images[TEST_IMAGES:], labels[TEST_IMAGES:], images[:TEST_IMAGES], labels[:TEST_IMAGES]
        )

    def batches(self, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Full batches in an order that is the same on every call."""
        generator = torch.Generator().manual_seed(SEED)
        for _ in range(epochs):
            order = torch.randperm(len(self.labels), generator=generator)
            for start in range(0, len(order) - BATCH + 1, BATCH):
                chosen = order[start : start + BATCH]
                yield self.images[chosen], self.labels[chosen]

    def steps(self, epochs: int) -> int:
        return epochs * (len(self.labels) // BATCH)


@dataclass
class Learner:
    """One run of a model: its weights, optimizer, losses and step times in seconds."""

    name: str
    net: nn.Module
    forward: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    accuracy: float = 0.0

    def step(self, images: Tensor, labels: Tensor) -> None:
        """One optimizer step on one batch."""
        self.net.train()
        start = time.perf_counter()
        loss = F.cross_entropy(self.forward(images), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    def test(self, images: Tensor, labels: Tensor) -> None:
        """Set the share of test images that are classified correctly."""
        self.net.eval()
        with torch.no_grad():
            predicted = self.forward(images).argmax(1)
        self.accuracy = float((predicted == labels).float().mean())

    @property
    def step_time(self) -> float:
        return median(self.seconds[1:])

    @property
    def compile_time(self) -> float:
        """What the first step took longer than the others."""
        return self.seconds[0] - self.step_time


def learners(
    build: Callable[[], nn.Module],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    backend: Any,
) -> tuple[Learner, Learner]:
    """The eager and the compiled run of a model, from the same weights."""
    torch.manual_seed(SEED)
    plain = build()
    other = copy.deepcopy(plain)
    compiled = torch.compile(other, backend=backend, dynamic=False)
    return (
        Learner("eager", plain, plain, make_optimizer(plain.parameters())),
        Learner("compiled", other, compiled, make_optimizer(other.parameters())),
    )
