"""Targets without symbolic shapes: one program per set of sizes, compiled as the sizes occur."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from dicp import Backend
from dicp.config import Config
from dicp.dynamo_bridge import executables
from dicp.dynamo_bridge.compile_fx import compile_fx
from dicp.dynamo_bridge.observe import GraphReport
from dicp.errors import FallbackWarning, SpecializationWarning
from dicp.target import LowerContext
from dicp.vendor.cpu import CpuTarget


class FixedSizes(CpuTarget):
    """The host as if it could not compile symbolic sizes."""

    facts = replace(CpuTarget.facts, symbolic_shapes=False)

    def __init__(self) -> None:
        super().__init__()
        self.graphs = 0
        self.fails = False

    def lower(self, gm: fx.GraphModule, context: LowerContext) -> Any:
        if self.fails:
            raise RuntimeError("this size fails")
        vals = [node.meta.get("val") for node in gm.graph.nodes]
        parts = [p for v in vals if isinstance(v, Tensor) for p in (*v.shape, *v.stride())]
        assert all(type(part) is int for part in parts), "a symbolic size"
        assert not any(isinstance(v, torch.SymInt) for v in vals), "a symbolic number"
        self.graphs += 1
        program = super().lower(gm, context)
        assert not program.serialized["symbols"]
        return program


class Compiled:
    """A compiled function, and what its compilation reported."""

    def __init__(self, fn: Callable[..., Any], folder: Path, **options: Any) -> None:
        self.target, self.reports = FixedSizes(), list[GraphReport]()
        config = Config(cache_dir=folder, **options)
        self.captured = 0

        def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            self.captured += 1
            return compile_fx(gm, inputs, self.target, config, self.reports.append)

        self.fn = torch.compile(fn, backend=backend, dynamic=True)


def block(x: Tensor, w: Tensor) -> Tensor:
    rows = x.shape[0]
    left = torch.softmax(x @ w, -1)[: rows // 2].reshape(-1) * rows
    return left.sum() + x[1:, ::2].flip(0).pow(2).mean() + torch.arange(rows).sum()


def test_each_size_has_a_program_of_its_own(tmp_path: Path) -> None:
    compiled = Compiled(block, tmp_path)
    w = torch.randn(12, 20)
    for rows in (6, 8, 6, 10, 8):
        mine, theirs = (torch.randn(rows, 12).requires_grad_() for _ in range(2))
        theirs.data.copy_(mine.data)
        got, expected = compiled.fn(mine, w), block(theirs, w)
        torch.testing.assert_close(got, expected)
        got.backward()
        expected.backward()
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert compiled.captured == 1
    assert compiled.target.graphs == 6, "forward and backward of three sizes"
    assert [report.kind for report in compiled.reports].count("forward") == 3


def test_programs_of_old_sizes_are_dropped_and_found_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executables, "MAX_SIZES", 2)
    compiled = Compiled(lambda x: (x * 2).sum(0), tmp_path)
    with pytest.warns(SpecializationWarning, match="more than 2 values of the sizes s") as warned:
        for size in (4, 5, 6, 4, 6):
            x = torch.randn(size, 3)
            torch.testing.assert_close(compiled.fn(x), (x * 2).sum(0))
    assert len([w for w in warned if w.category is SpecializationWarning]) == 1
    found = [report.cache for report in compiled.reports]
    assert found == ["cold", "cold", "cold", "graph"], "size 4 was dropped, size 6 was not"


def test_views_keep_their_offsets_and_storages(tmp_path: Path) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor, int]:
        n = x.shape[0]
        part = x[1:, 1]
        part.add_(1)
        return torch.as_strided(x * 1, (n, 2), (2, 1), 1), x.t(), n * 2

    compiled = Compiled(fn, tmp_path)
    for size in (3, 7):
        x = torch.randn(size, 4)
        y = x.clone()
        torch.testing.assert_close(compiled.fn(x), fn(y))
        torch.testing.assert_close(x, y)


def test_a_later_size_that_fails_runs_eagerly(tmp_path: Path) -> None:
    compiled = Compiled(torch.cumsum, tmp_path, on_compile_error="eager")
    x = torch.randn(4, 3)
    torch.testing.assert_close(compiled.fn(x, 0), x.cumsum(0))
    compiled.target.fails = True
    y = torch.randn(9, 3)
    with pytest.warns(FallbackWarning, match="this size fails"):
        torch.testing.assert_close(compiled.fn(y, 0), y.cumsum(0))


def test_a_later_size_that_fails_is_an_error(tmp_path: Path) -> None:
    compiled = Compiled(torch.cumsum, tmp_path)
    compiled.fn(torch.randn(4, 3), 0)
    compiled.target.fails = True
    with pytest.raises(RuntimeError, match="this size fails"):
        compiled.fn(torch.randn(9, 3), 0)


def test_a_float_that_became_a_constant_is_not_found_again(tmp_path: Path) -> None:
    """Decomposed, a threshold's value is a constant of the graph, and its guard is on a float."""

    def fn(x: Tensor, value: float) -> Tensor:
        return F.threshold(x, value, value)

    x = torch.randn(4, 9)
    compiled = torch.compile(fn, backend=Backend("tops", cache_dir=tmp_path))
    for value in (0.5, 0.25, 0.75):
        torch.testing.assert_close(compiled(x, value), fn(x, value))
