"""The networks of needle's course, trained a few steps by SGD with momentum and by Adam."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .needle_models import MLPResNet, ResNet9, Transformer, lstm, rnn

CLASSES, VOCABULARY, LENGTH = 5, 23, 5

sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)
# Adam divides by the gradient's size: beside an eps of 1e-8, rounding of the smallest is a step.
adam = partial(torch.optim.Adam, lr=1e-2, weight_decay=1e-3, eps=1e-4)

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, classes = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), classes.flatten())


def classified(*shape: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """A function of a number that gives four times as many inputs of a shape, with classes."""
    return lambda n: (torch.randn(4 * n, *shape), torch.randint(0, CLASSES, (4 * n,)))


def texts(n: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (n, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize(
    ("norm", "optimizer", "steps"), [(nn.BatchNorm1d, sgd, 5), (nn.LayerNorm, adam, 3)]
)
def test_mlp_resnet(
    against_eager, norm: Callable[[int], nn.Module], optimizer: Optimizer, steps: int
):
    model = MLPResNet(12, hidden=16, blocks=2, norm=norm, classes=CLASSES)
    against_eager.training(model, loss_of, classified(12), steps, optimizer)


@pytest.mark.sweep
def test_resnet9(against_eager):
    model = ResNet9(channels=3, width=4, first_stride=1, classes=CLASSES)
    against_eager.training(model, loss_of, classified(16, 16, 3), 2, sgd)


@pytest.mark.parametrize(
    ("build", "optimizer"),
    [
        (partial(rnn, nonlinearity="tanh"), adam),
        (partial(rnn, nonlinearity="relu"), sgd),
        (lstm, adam),
        (partial(Transformer, length=LENGTH), adam),
    ],
    ids=["rnn_tanh", "rnn_relu", "lstm", "transformer"],
)
def test_language_model(
    against_eager, build: Callable[[int, int], nn.Module], optimizer: Optimizer
):
    against_eager.training(build(VOCABULARY, 8), loss_of, texts, 3, optimizer)
