"""Symbolic sizes padded up to gears: where it changes nothing, and why it is refused elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import padded_cases
import pytest
import torch
import torch.nn.functional as F
from ascend_recorder import record
from padded_cases import mark, rand
from torch import Tensor

from dicp.config import Config
from dicp.dynamo_bridge.backend import Backend
from dicp.errors import SimulatorWarning
from dicp.vendor.ascend import AscendTarget

pytestmark = pytest.mark.sweep

GEARS = (8, 16)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    split = [x.unflatten(-1, (2, 16)).transpose(1, 2) for x in (q, k, v)]
    return F.scaled_dot_product_attention(*split, is_causal=True).transpose(1, 2).flatten(2)


TAKEN: dict[str, padded_cases.Case] = {
    **padded_cases.TAKEN,
    "rows_and_columns": (
        lambda x, y: (x.relu() @ y).tanh(), lambda n: [rand(n, 12), rand(12, n)]
    ),
    "flattened": (lambda x: x.view(-1, 4).relu().view(-1, 3, 4) + 1, lambda n: [rand(n, 3, 4)]),
}  # fmt: skip
REFUSED = {
    **padded_cases.REFUSED,
    "computed": (lambda x, t: t[x - 1], [torch.arange(5) % 3 + 1, rand(4, 2)]),
    "written": (lambda x: x.add_(1).exp(), [rand(5, 3)]),
}
REASONS = {
    "sum": "ReduceSum works along a padded dimension",
    "softmax": "SoftmaxV2 works along a padded",
    "number": "Mul uses a size as a number",
    "contracted": "MatMulV2 adds up along a padded",
    "joined": "ConcatD joins along a padded",
    "part": "takes a part of a padded",
    "flip": "ReverseV2 is not known to keep padded",
    "middle": "takes a padded dim",
    "divided": "FloorDiv divides integers",
    "computed": "looks up places that are computed",
    "written": "it writes to an input",
}


@pytest.mark.parametrize("name", TAKEN)
def test_padding_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, make = TAKEN[name]
    ran = run_at(fn, make, (5, 8, 7, 13, 20), monkeypatch)
    assert ran == [{8}, {8}, {8}, {16}, {-1}]


def run_at(
    fn: Callable[..., Any], make: Callable[[int], list[Tensor]], rows: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> list[set[int]]:  # fmt: skip
    """Compare with eager for each number of rows; the sizes of the models that ran."""
    target = AscendTarget()
    monkeypatch.setattr("dicp.dynamo_bridge.backend.load_target", lambda name: target)
    torch._dynamo.reset()
    options = {"runs_on": "simulator", "cache": False, "shape_buckets": GEARS}
    compiled = torch.compile(fn, backend=Backend("ascend", **options))
    ran = []
    for n in rows:
        inputs = make(n)
        mark(inputs, n)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SimulatorWarning)
            got = compiled(*inputs)
        near = 1e-2 if got.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(got, fn(*inputs), rtol=near, atol=near)
        assert got.stride() == fn(*inputs).stride()
        driver = next(iter(target._drivers.values()))
        assert driver.simulator is not None
        last = list(driver.simulator.models.values())
        sizes = {d for m in last[-1:] for t in m.inputs for d in t.dims or ()}
        ran.append(sizes & {8, 16} if n <= 16 and -1 not in sizes else {-1})
    return ran


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_operator(name: str) -> None:
    fn, inputs = REFUSED[name]
    mark(inputs, 5)
    target = record(fn, *inputs, shape_buckets=GEARS)
    (graph,) = (g for p in target.programs for g in p.graphs)
    assert graph.bucket_refusal is not None and REASONS[name] in graph.bucket_refusal
    assert f"# takes no buckets: {graph.bucket_refusal}" in target.reports[0].kernels[0].text


def test_causal_attention_takes_gears_and_full_attention_does_not() -> None:
    inputs = [torch.randn(1, 5, 32).bfloat16() for _ in "qkv"]
    for fn, taken in ((causal, True), (lambda q, k, v: full(q, k, v), False)):
        mark(inputs, 5)
        target = record(lambda x, fn=fn: fn(x, x, x), inputs[0], shape_buckets=GEARS)
        (graph,) = (g for p in target.programs for g in p.graphs)
        assert (graph.bucket_refusal is None) == taken
        assert taken or "attends to padded keys" in str(graph.bucket_refusal)


def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    split = [x.unflatten(-1, (2, 16)).transpose(1, 2) for x in (q, k, v)]
    return F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)


def test_causal_attention_on_padded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Tensor) -> Tensor:
        return causal(x, x, x)

    ran = run_at(fn, lambda n: [rand(1, n, 32).bfloat16()], (5, 13), monkeypatch)
    assert ran == [{8}, {16}]


def test_without_gears_sizes_stay_dynamic() -> None:
    inputs = [rand(5, 3)]
    mark(inputs, 5)
    target = record(lambda x: x + 1, *inputs)
    (graph,) = (g for p in target.programs for g in p.graphs)
    assert "# takes no buckets" not in graph.text() and "-1, 3" in target.sources()[0]
    assert Config(shape_buckets="8 16, 32").shape_buckets == (8, 16, 32)  # type: ignore[arg-type]
