"""The operators that topsgraph has to have, in three graphs: none runs eagerly, all are right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorder import Recording, record
from torch import Tensor

from dicp.dynamo_bridge.backend import Backend
from dicp.graphop.program import Value
from dicp.vendor.tops import TopsTarget
from dicp.vendor.tops.prototypes import PROTOTYPES
from dicp.vendor.tops.simulator.compiler import Tensor as Type
from dicp.vendor.tops.simulator.shapes import SHAPES

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore::dicp.errors.SimulatorWarning")
Case = Callable[[Tensor], Any]

FORWARD: Mapping[str, Case] = {
    "_adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(image(x), (2, 3)),
    "_log_softmax": lambda x: F.log_softmax(x, 1),
    "_softmax": lambda x: F.softmax(x, 0),
    "_unsafe_view": lambda x: aten._unsafe_view(x, [6, 4]),
    "abs": torch.abs,
    "add": lambda x: torch.add(x, x, alpha=3) + 1,
    "addmm": lambda x: torch.addmm(x[0, :4], x, x.t()),
    "alias": lambda x: aten.alias(x) + 1,
    "amax": lambda x: x.amax((0, 1)),
    "arange": lambda x: x + torch.arange(2, 14, 2),
    "argmax": lambda x: (x.argmax(), x.argmax(1, True)),
    "argmin": lambda x: x.argmin(0),
    "bmm": lambda x: torch.bmm(batch(x), batch(x).mT),
    "cat": lambda x: torch.cat([x, x + 1], 1),
    "clone": lambda x: x.clone(),
    "convert_element_type": lambda x: (x.half(), x.to(torch.int32), x > 0, x.double()),
    "convolution": lambda x: F.conv2d(image(x), torch.ones(3, 2, 2, 2), stride=2, padding=1),
    "copy": lambda x: aten.copy(x, x.flip(0)),
    "copy_": lambda x: torch.zeros(4, 6).copy_(x),
    "cos": torch.cos,
    "cumsum": lambda x: (x.cumsum(1), (x > 0).cumsum(0), (x + 3).cumprod(1)),
    "div": lambda x: (x / (x + 9), torch.arange(6) // 4),
    "embedding": lambda x: F.embedding(indices(x), x),
    "empty_like": lambda x: torch.empty_like(x).fill_(2),
    "eq": lambda x: x == x.abs(),
    "erf": torch.erf,
    "exp": torch.exp,
    "expand": lambda x: x[:, :1].expand(4, 5),
    "fill": lambda x: aten.fill(x, 3.5),
    "full": lambda x: torch.full((2, 3), 7),
    "full_like": lambda x: torch.full_like(x, -1),
    "gather": lambda x: x.gather(1, indices(x).expand(4, 6)),
    "ge": lambda x: x >= 0.1,
    "gelu": lambda x: (F.gelu(x), F.gelu(x, approximate="tanh")),
    "getitem": lambda x: x.split(2)[1],
    "group_norm": lambda x: F.group_norm(image(x), 2),
    "hardswish": F.hardswish,
    "index": lambda x: x[indices(x)[0], indices(x)[0]],
    "index_put": lambda x: x.index_put((indices(x)[0],), x[:1] * 2, accumulate=True),
    "iota": lambda x: torch.ops.prims.iota(
        5, start=2, step=3, dtype=torch.int64, device="cpu", requires_grad=False),
    "le": lambda x: x <= 0,
    "lift_fresh_copy": lambda x: x + torch.tensor([1.0, 2, 3, 4, 5, 6]),
    "log": lambda x: torch.log(x.abs() + 1),
    "logical_or": lambda x: torch.logical_or(x > 1, x < 0),
    "lt": lambda x: x < 0.5,
    "masked_fill": lambda x: x.masked_fill(x > 0, -3),
    "max_pool2d_with_indices": lambda x: F.max_pool2d(image(x), 2, 1, 1, return_indices=True),
    "maximum": lambda x: torch.maximum(x, -x),
    "mean": lambda x: x.mean(1),
    "mm": lambda x: x @ x.t(),
    "mul": lambda x: x * x * 2,
    "native_layer_norm": lambda x: F.layer_norm(x, (6,)),
    "ne": lambda x: x != 1,
    "neg": torch.neg,
    "new_empty_strided": lambda x: x.new_empty_strided((2, 3), (3, 1)).fill_(1),
    "ones": lambda x: torch.ones(3),
    "ones_like": torch.ones_like,
    "permute": lambda x: batch(x).permute(2, 0, 1) * 1,
    "pow": lambda x: (x**2, x.abs() ** 0.5),
    "reciprocal": lambda x: torch.reciprocal(x + 9),
    "relu": torch.relu,
    "repeat": lambda x: x.repeat(2, 3),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "scalar_tensor": lambda x: x + torch.scalar_tensor(2.0),
    "scatter": lambda x: x.scatter(0, torch.zeros(1, 6, dtype=torch.int64), x[2:3]),
    "select": lambda x: x[2] * 2,
    "sigmoid": torch.sigmoid,
    "sin": torch.sin,
    "slice": lambda x: x[1:4:2] * 2,
    "slice_scatter": lambda x: torch.slice_scatter(x, x[:2] + 1, 0, 1, 3),
    "split": lambda x: [part * 2 for part in x.split(4, 1)],
    "sqrt": lambda x: torch.sqrt(x.abs()),
    "square": torch.square,
    "squeeze": lambda x: x[:1].squeeze(0) * 2,
    "stack": lambda x: torch.stack([x, -x], 1),
    "sub": lambda x: 1 - x,
    "sum": lambda x: (x.sum(), x.sum(0, True), (x > 0).sum()),
    "transpose": lambda x: x.transpose(0, 1) * 2,
    "tril": torch.tril,
    "triu": lambda x: x.triu(1),
    "unsqueeze": lambda x: x.unsqueeze(1) * 2,
    "var_mean": lambda x: torch.var_mean(x, 1),
    "view": lambda x: (x * 2).view(3, 8),
    "view_as_complex": lambda x: torch.view_as_complex(batch(x)[..., :2] * 2).abs(),
    "view_as_real": lambda x: torch.view_as_real(torch.polar(x.abs(), x) * torch.polar(x * x, x)),
    "where": lambda x: torch.where(x > 0, x, 1.0),
    "zeros": lambda x: torch.zeros(2, 2),
    "zeros_like": torch.zeros_like,
}  # fmt: skip
BACKWARD: Mapping[str, Case] = {
    "_adaptive_avg_pool2d_backward": FORWARD["_adaptive_avg_pool2d"],
    "_native_batch_norm_legit_functional": lambda x: F.batch_norm(
        image(x), torch.zeros(2), torch.ones(2), training=True),
    "convolution_backward": FORWARD["convolution"],
    "gelu_backward": lambda x: F.gelu(x) + F.gelu(x, approximate="tanh"),
    "hardswish_backward": F.hardswish,
    "max_pool2d_with_indices_backward": lambda x: F.max_pool2d(image(x), 2, 1, 1),
}  # fmt: skip
RANDOM: Mapping[str, Case] = {
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "native_dropout": lambda x: F.dropout(x, 0.5),
}


OTHERS: Mapping[str, Case] = {
    "activations": lambda x: (torch.atan(x), torch.tanh(x), torch.floor(x), x.sigmoid()),
    "reductions": lambda x: (x.prod(1), x.amin(0), x.amax(), x.mean(), x.topk(2)),
    "logic": lambda x: (torch.logical_and(x > 0, x < 1), torch.logical_not(x > 0)),
    "clamp": lambda x: x.clamp(-1, 1),
    "flip": lambda x: x.flip(0),
    "pow": lambda x: x.abs() ** x,
    "pool": lambda x: F.max_pool2d(image(x), 2),
}


def image(x: Tensor) -> Tensor:
    return x.reshape(1, 2, 3, 4)


def batch(x: Tensor) -> Tensor:
    return x.reshape(2, 3, 4)


def indices(x: Tensor) -> Tensor:
    return torch.tensor([[0, 2], [3, 1], [1, 1], [2, 0]])[:, :1]


def example() -> Tensor:
    return torch.linspace(-2, 2, 24).roll(5).reshape(4, 6).clone()


def compiled(cases: Mapping[str, Case]) -> tuple[Any, Backend]:
    """All cases in one graph, by name."""
    torch._dynamo.reset()
    backend = Backend("tops", cache=False, fallback="error")

    def every(x: Tensor) -> dict[str, Any]:
        return {name: case(x) for name, case in cases.items()}

    return torch.compile(every, backend=backend, fullgraph=True, dynamic=False), backend


class Programs(Recording, TopsTarget):
    """Keeps the HLIR programs."""


def test_the_simulators_own_shapes_are_those_stated_for_every_operator() -> None:
    """Rules state a result's type from what the operator computes; the simulator counts sizes."""
    target = Programs()
    cases = {**FORWARD, **OTHERS, **RANDOM}
    record(lambda x: {name: case(x) for name, case in cases.items()}, example(), target=target)
    backward = example().requires_grad_()
    record(lambda x: [case(x) for case in BACKWARD.values()], backward, target=target)
    nodes = [n for p in target.programs for graph in p.graphs for n in graph.operators]
    for node in nodes:
        operands = [type_of(value) for value in node.operands()]
        found = SHAPES[node.kind](operands, node.attrs)
        types = [Type(dtype, tuple(dims)) for dtype, dims in listed(found)]
        assert types == [type_of(value) for value in node.outputs], node
    assert {node.kind for node in nodes} == set(PROTOTYPES)


def listed(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [found]


def type_of(value: Value) -> Type:
    return Type(value.dtype, tuple(value.shape))


def test_forward_operators_are_native_and_right() -> None:
    run, _ = compiled(FORWARD)
    got, x = run(example()), example()
    for name, case in FORWARD.items():
        torch.testing.assert_close(got[name], case(x), rtol=1e-4, atol=1e-5, msg=name)


def test_backward_operators_are_native_and_right() -> None:
    run, _ = compiled(BACKWARD)
    x = example().requires_grad_()
    seeds = [torch.linspace(-1, 1, y.numel()).reshape(y.shape) for y in run(x).values()]
    torch.autograd.backward(list(run(x).values()), seeds)
    mirror = example().requires_grad_()
    torch.autograd.backward([case(mirror) for case in BACKWARD.values()], seeds)
    torch.testing.assert_close(x.grad, mirror.grad, rtol=1e-4, atol=1e-4)


def test_random_operators_are_native() -> None:
    run, _ = compiled(RANDOM)
    torch.manual_seed(0)
    got = run(torch.zeros(64, 64))
    assert 0.4 < got["bernoulli"].mean() < 0.6
    assert run(torch.ones(64, 64))["native_dropout"].unique().tolist() == [0, 2]
