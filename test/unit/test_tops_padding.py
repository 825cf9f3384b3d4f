"""Shape buckets on a target of static shapes: one program, with a graph for each bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import padded_cases
import pytest
import torch
import torch.nn.functional as F
from padded_cases import mark, rand
from recorder import Recording, record
from torch import Tensor, nn

from dicp.dynamo_bridge.backend import Backend
from dicp.errors import SpecializationWarning
from dicp.graphop import target as graphop
from dicp.vendor.tops import TopsTarget

pytestmark = [
    pytest.mark.filterwarnings("ignore::dicp.errors.SimulatorWarning"),
    pytest.mark.usefixtures("shared_builds"),
]
BUCKETS = (8, 16)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(16, 3),
    ).eval()  # fmt: skip


TAKEN: dict[str, padded_cases.Case] = {
    **padded_cases.TAKEN,
    "best": (lambda x: (x.argmax(1), x[:, 1:3].topk(1).values), lambda n: [rand(n, 4)]),
    "sum": (lambda x: x.sum(0) + x, lambda n: [rand(n, 3)]),
    "softmax": (lambda x: x.softmax(0), lambda n: [rand(n, 3)]),
    "number": (lambda x: x * x.shape[0] + (x * 3).std(0), lambda n: [rand(n, 3)]),
    "contracted": (lambda x: (1 / x).t() @ (1 / x) + x, lambda n: [rand(n, 1)]),
    "part": (lambda x: (x[1:] * 2).softmax(0).sum(0) + x, lambda n: [rand(n, 3)]),
    "looked_up_in": (lambda x: x[torch.tensor([1, -1])].sum() + x, lambda n: [rand(n, 3)]),
    "joined": (lambda x: torch.cat([x, x.neg()], 1), lambda n: [rand(n, 4)]),
    "written": (lambda x: x.add_(1).exp(), lambda n: [rand(n, 4)]),
    "images": (network(), lambda n: [rand(n, 2, 6, 6)]),
}  # fmt: skip


def statistics(x: Tensor) -> tuple[Tensor, ...]:
    y = x.abs() + 1
    return y / (y + 1).sum(1, keepdim=True), y.mean(1), (-y).amax(1), y.amin(1), y.argmin(1)


def heads(x: Tensor) -> list[Tensor]:
    return [y.unflatten(-1, (2, 6)).transpose(1, 2) for y in (x, x * 2, x + 1)]


FLATTENED: dict[str, padded_cases.Case] = {
    "rows": (lambda x, w: (x @ w).relu() + 1, lambda n: [rand(2, n, 4), rand(4, 3)]),
    "attention": (
        lambda x: F.scaled_dot_product_attention(*heads(x)).transpose(1, 2) + 1,
        lambda n: [rand(2, n, 12)],
    ),
    "scan": (lambda x: x.cumsum(1) * 2, lambda n: [rand(2, n)]),
    "places": (
        lambda i, x: x[:, i - 100] / x.shape[1] + x[:, -1:] + x[:, ::2].sum(),
        lambda n: [torch.arange(n) + 100, rand(2, n)],
    ),
    "statistics": (statistics, lambda n: [rand(2, n)]),
}  # fmt: skip
"""Their second size changes; operators work along it, others are flattened together with it."""
REFUSED = {name: padded_cases.REFUSED[name] for name in ("joined", "flip", "middle", "divided")} | {
    "rows_turned": (lambda x: x.reshape(2, -1).softmax(1), [rand(2, 5, 3).transpose(0, 1)]),
    "sum_of_rows": (lambda x: x.flatten(0, 1).sum(0), [rand(2, 5, 3)]),
    "random": (lambda x: F.dropout(x, 0.5), [rand(2, 5)]),
}
REASONS = {
    "joined": "Concatenate joins along a padded",
    "flip": "Reverse is not known to keep padded",
    "middle": "a result has a flattened padded dimension",
    "divided": "Div divides integers",
    "rows_turned": "takes a padded dimension apart",
    "sum_of_rows": "operands that are padded at different places",
    "random": "seed is not known to keep padded",
}


class Compiled:
    """A function on a target that tells what it compiled."""

    def __init__(self, fn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.fn, self.target = fn, TopsTarget()
        monkeypatch.setattr("dicp.dynamo_bridge.backend.load_target", lambda name: self.target)
        torch._dynamo.reset()
        self.backend = Backend("tops", cache=False, shape_buckets=BUCKETS)
        self.run = torch.compile(fn, backend=self.backend)

    def check(self, inputs: list[Tensor], n: int) -> None:
        """Compare results, their strides and what becomes of the inputs with eager's."""
        mirror = [x.clone() for x in inputs]
        mark(inputs, n)
        with torch.no_grad():
            got, expected = self.run(*inputs), self.fn(*mirror)
        torch.testing.assert_close((got, inputs), (expected, mirror), rtol=1e-5, atol=1e-5)
        for mine, theirs in zip(leaves(got), leaves(expected), strict=True):
            assert mine.stride() == theirs.stride()

    def sizes(self, dim: int = 0) -> set[int]:
        """The sizes of results of the graphs that were compiled."""
        (driver,) = self.target._drivers.values()
        assert driver.simulator is not None
        return {model.outputs[0].dims[dim] for model in driver.simulator.models.values()}


def leaves(value: Any) -> list[Tensor]:
    return list(torch.utils._pytree.tree_leaves(value))


@pytest.mark.parametrize("name", TAKEN)
def test_sizes_of_one_bucket_share_a_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, make = TAKEN[name]
    compiled = Compiled(fn, monkeypatch)
    # Every size has a graph that g++ compiles: one operator stands for all in the second bucket.
    for n in (5, 7, 13, 20, 7, 20) if name == "layer" else (5, 7, 20, 7):
        compiled.check(make(n), n)
    assert compiled.sizes() == {8, 16, 20} if name == "layer" else {8, 20}


@pytest.mark.parametrize("name", FLATTENED)
def test_padded_places_are_kept_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, make = FLATTENED[name]
    compiled = Compiled(fn, monkeypatch)
    for n in (5, 7, 20):
        compiled.check(make(n), n)
    assert compiled.sizes(1) == {8, 20}


def test_graphs_of_old_sizes_are_dropped_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphop, "MAX_PADDED", 2)
    compiled = Compiled(lambda x: torch.relu(x) * 2, monkeypatch)
    with pytest.warns(SpecializationWarning, match="more than 2 values of the sizes s") as warned:
        for n in (20, 21, 22, 23, 22):
            compiled.check([rand(n, 3)], n)
    assert len([w for w in warned if w.category is SpecializationWarning]) == 1
    (driver,) = compiled.target._drivers.values()
    assert driver.simulator is not None and driver.simulator.counts["launches"] == 5


def test_a_graph_that_takes_no_padding_is_compiled_for_each_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = Compiled(lambda x: x.flip(0) + 1, monkeypatch)
    for n in (5, 7, 5):
        compiled.check([rand(n, 3)], n)
    assert compiled.sizes() == {5, 7}
    note = "shape buckets do not apply: Reverse is not known to keep padded elements apart, from"
    assert note in str(compiled.backend.reports[0])


class Symbolic(Recording, TopsTarget):
    """Keeps what would be padded."""


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_operator(name: str) -> None:
    fn, inputs = REFUSED[name]
    mark(inputs, 5)
    target = Symbolic()
    record(fn, *inputs, target=target, shape_buckets=BUCKETS)
    refusals = [graph.bucket_refusal for p in target.programs for graph in p.graphs]
    assert any(REASONS[name] in str(refusal) for refusal in refusals), refusals
