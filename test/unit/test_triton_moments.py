"""Mean and variance of long rows: both in one sweep."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from recorder import TritonRecorder, record
from torch import Tensor

from dicp.compare import Rule, assert_matches
from dicp.dynamo_bridge.backend import Backend
from dicp.vendor.triton.builder import Plan, Workers

pytestmark = pytest.mark.sweep

LONG = 20000
"""Elements of a row that is swept a block at a time; no block divides them."""


def layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.var_mean(x, (0, 2, 3), correction=0)


INPUTS = {
    "uneven": lambda: torch.randn(150, LONG),
    "even": lambda: torch.randn(150, 16384),
    "far from zero": lambda: torch.randn(150, LONG) + 1000,
    "double": lambda: torch.randn(150, LONG, dtype=torch.float64) * 1e-3 + 1,
    "half": lambda: torch.randn(150, LONG).bfloat16() + 3,
    "infinite": lambda: torch.randn(150, LONG).index_fill(1, torch.tensor([7]), torch.inf),
}
RULES = {"double": Rule(floor=32.0)}
"""Subtracting a mean 300 times the divisor magnifies the rounding of the mean, in eager as well."""


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", INPUTS)
def test_rows(name: str, symbolic: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = INPUTS[name]()
    torch._dynamo.reset()
    backend = Backend("triton", cache_dir=tmp_path)
    got = torch.compile(layer_norm, backend=backend, dynamic=symbolic)(x)
    assert_matches(got, layer_norm(x), layer_norm(x.double()), rule=RULES.get(name))


@pytest.mark.parametrize("channels", [140, 16, 3])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_channels(channels: int, layout: torch.memory_format, tmp_path: Path) -> None:
    """Few channels are split: their mean comes first, then the squares."""
    torch.manual_seed(0)
    size = 420 // channels
    for images, side in ((size, 61), (size + 1, 64)):
        x = (torch.randn(images, channels, side, 60) + 10).contiguous(memory_format=layout)
        torch._dynamo.reset()
        got = torch.compile(moments, backend=Backend("triton", cache_dir=tmp_path))(x)
        for mine, eager, real in zip(got, moments(x), moments(x.double()), strict=True):
            assert_matches(mine, eager, real)


@pytest.mark.parametrize("symbolic", [False, True])
def test_integers_are_summed_exactly(symbolic: bool, tmp_path: Path) -> None:
    def distances(x: Tensor) -> Tensor:
        away = x - x.sum(-1, keepdim=True)
        return (away * away).sum(-1)

    x = torch.randint(-1000, 1000, (3, LONG), generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    run = torch.compile(distances, backend=Backend("triton", cache_dir=tmp_path), dynamic=symbolic)
    assert torch.equal(run(x), distances(x))


def test_moments_of_what_online_softmax_sums_up(tmp_path: Path) -> None:
    def variance(x: Tensor) -> Tensor:
        return torch.exp(x - x.amax(-1, keepdim=True)).var(-1)

    x = torch.randn(3, LONG, generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    got = torch.compile(variance, backend=Backend("triton", cache_dir=tmp_path))(x)
    assert_matches(got, variance(x), variance(x.double()))


@pytest.mark.parametrize("symbolic", [False, True])
def test_a_row_is_read_once_for_both_and_once_for_what_follows(symbolic: bool) -> None:
    recorded = record(layer_norm, torch.randn(150, LONG), target=TritonRecorder(), dynamic=symbolic)
    (program,) = recorded.programs
    (text,) = Plan(program.serialized, program.kernel_texts, 90).texts.values()
    assert len(re.findall(r"for start in", text)) == 2
    assert len(re.findall(r"tl\.load\(", text)) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_it_is_built_with_nothing_spilled(dtype: torch.dtype) -> None:
    x = torch.randn(150, LONG).to(dtype)
    (program,) = record(layer_norm, x, target=TritonRecorder()).programs
    workers = Workers()
    try:
        for arch in (80, 90):
            plan = Plan(program.serialized, program.kernel_texts, arch)
            (job,) = plan.jobs()
            answer = workers.compile(job.request(job.blocks()))
            assert "error" not in answer, answer["error"]
            assert ".local" not in answer["ptx"]
    finally:
        workers.close()
