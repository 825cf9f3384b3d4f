"""The errors of compiled models against float64, beside eager's own.

Every model runs three times on the same weights and inputs: in float64 (the reference), eager, and
compiled. `dicp.testing.accuracy.Error` has the rule for each tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dicp.testing.accuracy import Error, InDouble, errors, named_tensors, to_double

LossOf = Callable[[nn.Module, Any], Tensor]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class Trained:
    """What a training run leaves behind."""

    losses: dict[str, Tensor]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


def inference_errors(
    model: nn.Module, double: nn.Module, compiled: Callable[..., Any], batch: Mapping[str, Any]
) -> list[Error]:
    """The errors of the outputs for keyword inputs, without gradients; `double`: the float64 model.

    Raises AssertionError where names, shapes, dtypes, strides or the values of integers differ.
    """
    with torch.no_grad():
        with InDouble():
            reference = named_tensors(double(**to_double(batch)))
        eager = named_tensors(model(**batch))
        got = named_tensors(compiled(**batch))
    found = errors(got, eager, reference)
    for name, t in eager.items():
        assert got[name].stride() == t.stride(), f"{name}: not the strides of eager"
    return found


def training_errors(
    model: nn.Module,
    loss_of: LossOf,
    compiled_loss: LossOf,
    batches: Sequence[Any],
    make_optimizer: MakeOptimizer = sgd,
) -> list[Error]:
    """The errors of every loss, of the last gradients and of the state after the last step.

    Raises AssertionError as `inference_errors` does.
    """
    compiled_model, double = copy.deepcopy(model), copy.deepcopy(model).double()
    with InDouble():
        reference = train(double, loss_of, to_double(batches), make_optimizer)
    eager = train(model, loss_of, batches, make_optimizer)
    got = train(compiled_model, compiled_loss, batches, make_optimizer, steady=True)
    found = errors(got.losses, eager.losses, reference.losses)
    found += errors(got.gradients, eager.gradients, reference.gradients)
    return found + errors(got.state, eager.state, reference.state)


def train(
    model: nn.Module,
    loss_of: LossOf,
    batches: Sequence[Any],
    make_optimizer: MakeOptimizer,
    steady: bool = False,
) -> Trained:
    """One optimizer step per batch; with `steady`, compiling again after the first is an error."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(list(trainable.values()))
    losses, gradients = {}, {}
    for step, batch in enumerate(batches):
        with no_recompile(steady and step > 0):
            loss = loss_of(model, batch)
        loss.backward()
        losses[f"loss of step {step}"] = loss.detach()
        gradients = {
            f"gradient of {n}": p.grad.clone() for n, p in trainable.items() if p.grad is not None
        }
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, gradients, dict(model.state_dict()))


def no_recompile(wanted: bool) -> Any:
    """A context in which compiling again is an error."""
    return torch.compiler.set_stance("fail_on_recompile") if wanted else nullcontext()
