"""A model ready to run: weights and batch on a device, and the measured step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.backends import EAGER, Contestant, parse
from benchmarks.library_calls import LibraryCalls
from benchmarks.model import Batch, Model, without_dropout
from dicp.testing.accuracy import InDouble, errors, named_tensors, to_double

SEED = 20


def convolution_backward_flops(
    gradient: Sequence[int], image: Sequence[int], filters: Sequence[int], bias: Any, stride: Any,
    padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int,
    wanted: Sequence[bool], **others: Any,
) -> int:  # fmt: skip
    """The gradients of image and filters each cost what the forward does.

    PyTorch's own formula leaves the groups out: 16 times too many for 32 depthwise channels.
    """
    places = prod(image[2:] if transposed else gradient[2:])
    return 2 * image[0] * places * prod(filters) * sum(wanted[:2])


@dataclass
class Workload:
    """A model, its batch and labels; `train` says whether a step is forward plus backward."""

    model: Model
    net: nn.Module
    batch: Batch
    labels: Tensor
    train: bool

    @classmethod
    def prepare(cls, model: Model, train: bool, dtype: torch.dtype, device: str) -> Workload:
        """The same weights, batch and labels on every call."""
        torch.manual_seed(SEED)
        net = without_dropout(model.build()).to(device=device, dtype=dtype)
        batch = pytree.tree_map_only(
            Tensor,
            lambda t: t.to(device=device, dtype=dtype if t.is_floating_point() else t.dtype),
            model.batch(),
        )
        with torch.no_grad():
            labels = model.labels(model.output(net.eval()(**batch)))
        return cls(model, net.train(train), batch, labels, train)

    def step(self, candidate: Contestant) -> Callable[[], Any]:
        """A function that runs one step: the outputs, or the loss after its backward."""
        if not self.train:
            compiled = candidate.compile(self.net)

            def infer() -> Any:
                with torch.no_grad():
                    return compiled(**self.batch)

            return infer
        loss_of = candidate.compile(self.model.loss)

        def train() -> Any:
            self.net.zero_grad(set_to_none=True)
            loss = loss_of(self.net, self.batch, self.labels)
            loss.backward()
            return loss

        return train

    def results(self, step: Callable[[], Any]) -> list[dict[str, Tensor]]:
        """What a step computes: its outputs; in training the loss, and the gradients."""
        found = [named_tensors(step())]
        if self.train:
            gradients = self.net.named_parameters()
            found.append({n: p.grad.clone() for n, p in gradients if p.grad is not None})
        return found

    def reference(self) -> list[dict[str, Tensor]]:
        """The results of the same step in float64."""
        double = Workload(
            self.model,
            copy.deepcopy(self.net).double(),
            to_double(self.batch),
            to_double(self.labels),
            self.train,
        )
        with InDouble():
            return double.results(double.step(parse(EAGER)))

    def worst_error(self, step: Callable[[], Any], reference: list[dict[str, Tensor]]) -> Any:
        """The result that uses the largest part of the fp64 rule's allowance, and that part."""
        buffers = copy.deepcopy(dict(self.net.named_buffers()))
        eager = self.results(self.step(parse(EAGER)))
        self._restore(buffers)
        got = self.results(step)
        self._restore(buffers)
        found = [e for g, p, r in zip(got, eager, reference, strict=True) for e in errors(g, p, r)]
        worst = max(found, key=lambda e: e.excess)
        return {"excess": worst.excess, "ok": all(e.ok for e in found), "worst": str(worst)}

    def _restore(self, buffers: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self.net.named_buffers():
                buffer.copy_(buffers[name])

    def steps(
        self, backends: Sequence[str], visit: Callable[[str, Callable[[], Any]], None]
    ) -> tuple[dict[str, Callable[[], Any]], dict[str, Any], dict[str, str]]:
        """The steps of eager and the backends, their worst errors, and why others fail.

        `visit` is called with each label and step, before another backend runs.
        """
        reference = self.reference()
        steps, found, failures = {}, {}, {}
        for label in dict.fromkeys([EAGER, *backends]):
            step = self.step(parse(label))
            try:
                step()
                error = self.worst_error(step, reference)
                visit(label, step)
            except Exception as failure:  # a backend that fails does not stop the others
                failures[label] = f"{type(failure).__name__}: {failure}"[:2000]
                continue
            steps[label], found[label] = step, error
        return steps, found, failures

    def library_seconds(self) -> float:
        """The time of a step's library calls one by one, each by the fastest library."""
        with LibraryCalls() as calls:
            self.step(parse(EAGER))()
        return sum(calls.seconds(self.labels.device.type).values())

    def costs(self) -> dict[str, float]:
        """Library FLOPs, and the bytes a step moves at least: parameters, batch and results."""
        formulas = {torch.ops.aten.convolution_backward: convolution_backward_flops}
        with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
            outputs = self.results(self.step(parse(EAGER)))
        counts = counter.get_flop_counts()["Global"]
        convolution = sum(n for op, n in counts.items() if "convolution" in str(op))
        tensors = [*self.net.parameters(), *self.batch.values()]
        tensors += [t for group in outputs for t in group.values()]
        if self.train:  # parameters are read by the forward and again by the backward
            tensors += list(self.net.parameters())
        return {
            "matmul": float(sum(counts.values()) - convolution),
            "convolution": float(convolution),
            "bytes": float(sum(t.numel() * t.element_size() for t in tensors)),
        }
