"""The description of a measured model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor]


def itself(output: Tensor) -> Tensor:
    return output


def random_classes(output: Tensor) -> Tensor:
    """A class for every row of scores."""
    return torch.randint(0, output.shape[-1], output.shape[:-1], device=output.device)


def random_values(output: Tensor) -> Tensor:
    return torch.randn_like(output)


@dataclass(frozen=True)
class Model:
    """One model: how to build it, its keyword inputs, the tensor to train on, and its target."""

    name: str
    kind: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    output: Callable[[Any], Tensor]
    labels: Callable[[Tensor], Tensor]

    def loss(self, model: nn.Module, batch: Batch, labels: Tensor) -> Tensor:
        """Cross-entropy where the labels are classes, squared error where they are values."""
        predicted = self.output(model(**batch))
        if labels.is_floating_point():
            return F.mse_loss(predicted, labels)
        return F.cross_entropy(predicted.flatten(0, -2), labels.flatten())


def without_dropout(model: nn.Module) -> nn.Module:
    """Set every dropout probability to 0, so that two runs of a training step agree."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or isinstance(module, nn.Dropout)):
                setattr(module, name, 0.0)
    return model
