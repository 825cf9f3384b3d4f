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

pytestmark = pytest.mark.filterwarnings("ignore::dicp.errors.SimulatorWarning")
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
    "joined": (lambda x: torch.cat([x, x.neg()], 1), lambda n: [rand(n, 4)]),
    "written": (lambda x: x.add_(1).exp(), lambda n: [rand(n, 4)]),
    "images": (network(), lambda n: [rand(n, 2, 6, 6)]),
}  # fmt: skip
REFUSED = {
    **padded_cases.REFUSED,
    "looked_up": (lambda i, x: F.embedding(i, x), [torch.tensor([1, 3]), rand(5, 3)]),
}
REASONS = {
    "sum": "ReduceSum works along a padded dimension",
    "softmax": "Softmax works along a padded",
    "number": "uses a size as a number",
    "contracted": "DotGeneral adds up along a padded",
    "joined": "Concatenate joins along a padded",
    "part": "takes a part of a padded",
    "flip": "Reverse is not known to keep padded",
    "middle": "takes a padded dim",
    "divided": "Div divides integers",
    "looked_up": "looks into a padded",
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

    def sizes(self) -> set[int]:
        """The rows of the graphs that were compiled."""
        (driver,) = self.target._drivers.values()
        assert driver.simulator is not None
        return {model.outputs[0].dims[0] for model in driver.simulator.models.values()}


def leaves(value: Any) -> list[Tensor]:
    return list(torch.utils._pytree.tree_leaves(value))


@pytest.mark.parametrize("name", TAKEN)
def test_sizes_of_one_bucket_share_a_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, make = TAKEN[name]
    compiled = Compiled(fn, monkeypatch)
    for n in (5, 7, 13, 20, 7, 20):
        compiled.check(make(n), n)
    assert compiled.sizes() == {8, 16, 20}


def test_graphs_of_old_sizes_are_dropped_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphop, "MOST_PADDED", 2)
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
    compiled = Compiled(lambda x: x.softmax(0), monkeypatch)
    for n in (5, 7, 5):
        compiled.check([rand(n, 3)], n)
    assert compiled.sizes() == {5, 7}
    note = "shape buckets do not apply: Softmax works along a padded dimension, from"
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
