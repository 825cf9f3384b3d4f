"""Compare compiled models with eager ones by the fp64 rule.

Every model runs three times on the same weights and inputs: in float64 (the reference), eager, and
compiled. The compiled error may be at most twice eager's own error plus a few roundings of the
largest value: `|compiled - ref64| <= 2 * |eager - ref64| + floor`, for the largest and for the
root-mean-square error of each tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dicp.testing.accuracy import Error, errors
from dicp.testing.model_errors import (
    LossOf,
    MakeOptimizer,
    inference_errors,
    no_recompile,
    sgd,
    training_errors,
)
from dicp.torch_private import pytree


def check_tensors(
    compiled: Mapping[str, Tensor], eager: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> None:
    """Apply the fp64 rule to tensors of one kind; their largest value sets the common floor."""
    check_errors(errors(compiled, eager, reference))


def check_errors(found: Sequence[Error]) -> None:
    """Raise AssertionError with what is beyond the rule."""
    wrong = [error for error in found if not error.ok]
    lines = "\n".join(str(error) for error in wrong[:20])
    assert not wrong, f"{len(wrong)} errors in {len({e.name for e in found})} tensors:\n{lines}"


def _mark_common_sizes_static(tensors: Sequence[Tensor]) -> None:
    for dimension, sizes in enumerate(zip(*(t.shape for t in tensors), strict=True)):
        if len(set(sizes)) == 1:
            for tensor in tensors:
                torch._dynamo.mark_static(tensor, dimension)


@dataclass(frozen=True)
class AgainstEager:
    """Run models compiled by one backend, and compare them with eager."""

    backend: Any
    dynamic: bool
    device: str = "cpu"

    def put(self, value: Any) -> Any:
        """A model, or a tree of tensors, on the device under test."""
        if isinstance(value, nn.Module):
            return value.to(self.device)
        return pytree.tree_map_only(Tensor, lambda t: t.to(self.device), value)

    def compile(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.compile` as the command line asks; a graph break is an error."""
        return torch.compile(fn, backend=self.backend, dynamic=self.dynamic, fullgraph=True)

    def shapes(self, static: Any, *others: Any) -> list[Any]:
        """The batch, and with dynamic shapes the others too, which must not recompile.

        Sizes that are the same in all of them are static: a symbol for each size of a large
        convolutional network costs PyTorch's front end most of a minute.
        """
        batches = [static, *others] if self.dynamic else [static]
        if self.dynamic:
            for tensors in zip(*(pytree.tree_leaves(batch) for batch in batches), strict=True):
                _mark_common_sizes_static([t for t in tensors if isinstance(t, Tensor)])
        return batches

    def inference(self, model: nn.Module, *batches: Mapping[str, Any]) -> None:
        """Compare outputs (values, dtypes, strides) for keyword inputs; eval mode, no gradients."""
        self.put(model).eval()
        double = copy.deepcopy(model).double()
        compiled = self.compile(model)
        for index, batch in enumerate(self.shapes(*self.put([*batches]))):
            with no_recompile(index > 0):
                check_errors(inference_errors(model, double, compiled, batch))

    def training(
        self,
        model: nn.Module,
        loss_of: LossOf,
        batch_of: Callable[[int], Any],
        steps: int = 2,
        optimizer: MakeOptimizer = sgd,
    ) -> None:
        """Compare every loss, the last gradients and the final state after some optimizer steps.

        `batch_of` makes a batch of a size: always the same one, or with dynamic shapes growing.
        """
        grow = 1 if self.dynamic else 0
        batches = [self.put(batch_of(2 + grow * step)) for step in range(steps)]
        self.put(model).train()
        self.shapes(*batches)
        check_errors(training_errors(model, loss_of, self.compile(loss_of), batches, optimizer))
