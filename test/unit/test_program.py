"""Serialized programs: what is stored, and sizes evaluated from it as arithmetic alone."""

from __future__ import annotations

import json
import math

import pytest
import torch
from recorder import record
from torch import Tensor

from dicp.dynamo_bridge.graph_cache import StoredGraph
from dicp.loop.program import ProgramBuilder
from dicp.origin import SourceLocation
from dicp.serialize import decode_constant, evaluate_size, resolve_operator
from dicp.target import Artifact


def test_plain_form_survives_json() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ y).relu(), x.sum(0)

    for dynamic in (False, True):
        (program,) = record(fn, torch.rand(4, 5), torch.rand(5, 6), dynamic=dynamic).programs
        assert not program.objects
        origins = {origin for step in program.serialized["steps"] for origin in step["origins"]}
        lines = {origin.line_of: origin.user_line for origin in origins}
        stored = StoredGraph(Artifact("cpu", program.serialized), ("inference", (), ()), lines)
        locations = {line: SourceLocation(line) for line in lines.values()}
        back = StoredGraph.decode(stored.encode(), locations)
        assert back.artifact.program == program.serialized and back == stored


def test_sizes() -> None:
    symbols = {"s0": 12, "s1": 5}
    assert evaluate_size(7, symbols) == 7
    assert evaluate_size("s0*s1 + 3", symbols) == 63
    assert evaluate_size("(s0 // s1)", symbols) == 2
    assert evaluate_size("max(s0, s1) % 7", symbols) == 5
    assert evaluate_size("s0 if s0 > s1 else 1", symbols) == 12


@pytest.mark.parametrize(
    "text", ["[].append(1)", "lambda: 1", "(1).__class__ if [1] else 2", "{}", "f'{s0}'", "s0 := 3"]
)
def test_only_arithmetic_is_evaluated(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        evaluate_size(text, {"s0": 1})


@pytest.mark.parametrize("text", ["__import__('os')", "open('x')", "s0.__class__.__base__()"])
def test_nothing_beyond_sizes_is_in_reach(text: str) -> None:
    with pytest.raises((ValueError, NameError, TypeError, AttributeError)):
        evaluate_size(text, {"s0": 1})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(math.nan), torch.tensor([], dtype=torch.int64).reshape(0, 3),
        torch.arange(6.0).reshape(2, 3).t(), torch.tensor([True, False]),
        torch.tensor([1.5, -0.0, math.inf], dtype=torch.bfloat16),
        torch.tensor([2**63 - 1, -(2**63)]), torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag, torch.arange(3.0).expand(2, 3),
    ],
    ids=str,
)  # fmt: skip
def test_constants_keep_bits_and_strides(tensor: Tensor) -> None:
    plain = ProgramBuilder(None)._constant(tensor)  # type: ignore[arg-type]
    back = decode_constant(json.loads(json.dumps(plain)))
    assert back.dtype == tensor.dtype and back.stride() == tensor.stride()
    assert torch.equal(back.isnan(), tensor.isnan())
    assert torch.equal(back.nan_to_num(), tensor.nan_to_num())


def test_operators_are_found_by_name() -> None:
    assert resolve_operator("aten::add.Tensor") is torch.ops.aten.add.Tensor
    assert resolve_operator("aten::relu.") is torch.ops.aten.relu.default
