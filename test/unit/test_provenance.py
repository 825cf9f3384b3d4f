"""Where generated code comes from: sources in the text, user's lines in errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorder import record
from torch import Tensor

from dicp import Backend
from dicp.errors import IndexOutOfBoundsError, IntegerDivisionByZeroError

FILE = Path(__file__).name


def line_of(fn: Callable[..., Any], text: str) -> str:
    lines, start = inspect.getsourcelines(fn)
    (offset,) = [k for k, line in enumerate(lines) if text in line]
    return f"{FILE}:{start + offset}"


def norm(x: Tensor) -> Tensor:
    y = x * 3
    z = torch.sigmoid(y)
    return F.layer_norm(z, (8,))


def test_dumped_source_names_operators_and_lines(tmp_path: Path) -> None:
    compiler = Backend("cpu", dump=tmp_path, cache=False)
    torch.compile(norm, backend=compiler)(torch.rand(4, 8))
    (source,) = tmp_path.glob("*/*kernels.cpp")
    comments = [line for line in source.read_text().splitlines() if line.startswith("//")]
    for operator, text in (("mul", "x * 3"), ("sigmoid", "sigmoid("), ("layer_norm", "F.layer")):
        place = line_of(norm, text)
        assert any(operator in c and c.endswith(place) for c in comments), (operator, comments)


def test_kernels_know_what_they_compute() -> None:
    (program,) = record(norm, torch.rand(4, 8)).programs
    (kernel,) = program.kernels()
    assert [s.split(" ")[0] for s in kernel.sources] == [
        "aten.mul.Tensor", "aten.sigmoid.default", "aten.native_layer_norm.default",
    ]  # fmt: skip


def test_sources_survive_common_subexpressions() -> None:
    def twice(x: Tensor) -> Tensor:
        a = (x + 1).exp()
        b = (x + 1).exp()
        return a * b

    (program,) = record(twice, torch.rand(8)).programs
    text = " ".join(program.kernels()[0].sources)
    assert "exp" in text and line_of(twice, "a = ") in text


def lookup(table: Tensor, at: Tensor) -> Tensor:
    doubled = table * 2
    return doubled[at] + 1


def gather(x: Tensor, at: Tensor) -> Tensor:
    return x.gather(0, at)


def embed(table: Tensor, at: Tensor) -> Tensor:
    return F.embedding(at, table)


@pytest.mark.parametrize(
    ("fn", "operator", "text"),
    [
        (lookup, "aten.index", "doubled[at]"),
        (gather, "aten.gather", "x.gather"),
        (embed, "aten.embedding", "F.embedding"),
    ],
)
@pytest.mark.parametrize("bad", [5, -6, 2**40])
def test_index_out_of_bounds(fn: Any, operator: str, text: str, bad: int) -> None:
    compiled = torch.compile(fn, backend="cpugraph")
    shape = (5,) if fn is not embed else (5, 2)
    table, good = torch.rand(shape), torch.tensor([0, 4])
    torch.testing.assert_close(compiled(table, good), fn(table, good))
    with pytest.raises(IndexOutOfBoundsError, match="index out of range") as caught:
        compiled(table, torch.tensor([0, bad]))
    assert isinstance(caught.value, IndexError)
    assert operator in caught.value.op
    assert caught.value.user_line.endswith(line_of(fn, text))
    torch.testing.assert_close(compiled(table, good), fn(table, good))  # still usable


def divide(x: Tensor, y: Tensor) -> Tensor:
    shifted = x + 1
    return torch.div(shifted, y, rounding_mode="floor") * 2


def remainder(x: Tensor, y: Tensor) -> Tensor:
    return x % y


@pytest.mark.parametrize(
    ("fn", "operator", "text"), [(divide, "div", "torch.div"), (remainder, "remainder", "x % y")]
)
def test_integer_division_by_zero(fn: Any, operator: str, text: str) -> None:
    compiled = torch.compile(fn, backend="cpugraph")
    x = torch.arange(1, 5)
    assert compiled(x, x).tolist() == fn(x, x).tolist()
    with pytest.raises(IntegerDivisionByZeroError) as caught:
        compiled(x, x - 2)
    assert isinstance(caught.value, ZeroDivisionError)
    assert operator in caught.value.op
    assert caught.value.user_line.endswith(line_of(fn, text))
