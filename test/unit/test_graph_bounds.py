"""Checks of indices in graphs of vendors' operators: where there is none, and what it takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dicp.dynamo_bridge.backend import Backend
from dicp.errors import IndexOutOfBoundsError, IntegerDivisionByZeroError, SimulatorWarning
from dicp.graphop.program import GraphProgram
from dicp.graphop.target import GraphTarget

ROWS = 6
X, PLACES = torch.rand(ROWS, 4), torch.tensor([0, 5, 2])
X[:, 3] = -1  # where no maximum is
TARGETS = ["ascend", "tops"]


@pytest.fixture(params=TARGETS)
def run(
    request: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., Any]]:
    """Compiles a function and runs it; `run.programs` are the graph programs of all."""
    monkeypatch.setenv("DICP_CACHE_DIR", str(tmp_path))
    lower, programs = GraphTarget._lower, []

    def recorded(self: Any, *args: Any) -> GraphProgram:
        programs.append(lower(self, *args))
        return programs[-1]

    monkeypatch.setattr(GraphTarget, "_lower", recorded)

    def compiled(fn: Callable[..., Any], *args: Any, dynamic: bool = False, **options: Any) -> Any:
        torch.compiler.reset()
        programs.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SimulatorWarning)
            backend = Backend(request.param, **options)
            return torch.compile(fn, backend=backend, dynamic=dynamic)(*args)

    compiled.programs = programs  # type: ignore[attr-defined]
    yield compiled
    torch.compiler.reset()


def checks(run: Any) -> list[dict[str, Any]]:
    """The checked indices of all programs."""
    steps = [step for program in run.programs for step in program.serialized["steps"]]
    return [row for step in steps if "check" in step for row in step["rows"]]


def checking(run: Any) -> list[str]:
    """The operators that serve checks."""
    graphs = [graph for program in run.programs for graph in program.graphs]
    return [node.kind for graph in graphs for node in graph.operators if node.checks]


KNOWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "arange": lambda x, i: x[torch.arange(5) + 1] * 2,
    "counted_down": lambda x, i: x[torch.arange(5, -1, -1)] * 2,
    "constant": lambda x, i: x[torch.tensor([3, 0, 5])] * 2,
    "positions_of_maxima": lambda x, i: x.gather(0, x.argmax(0, keepdim=True)) * 2,
    "positions_of_a_sort": lambda x, i: x.gather(1, x.sort(1)[1]) * 2,
    "positions_of_the_largest": lambda x, i: x.gather(1, x.topk(2, 1)[1].flip(1)) * 2,
    "comparisons": lambda x, i: x[(i > 3).long()] * 2,
    "clamped": lambda x, i: x[i.clamp(0, ROWS - 1)] * 2,
    "remainders": lambda x, i: x[(i % 3 * 2).unsqueeze(0)] * 2,
    "chosen": lambda x, i: x[torch.where(i > 3, 5, torch.arange(3))] * 2,
    "joined": lambda x, i: x[torch.cat([x.argmin(0), torch.zeros(2, dtype=torch.int64)])] * 2,
    "negative_in_range": lambda x, i: x[-1 - torch.arange(ROWS)] * 2,
}


@pytest.mark.parametrize("name", KNOWN)
def test_indices_that_are_known_to_be_in_range_are_not_checked(name: str, run: Any) -> None:
    torch.testing.assert_close(run(KNOWN[name], X, PLACES), KNOWN[name](X, PLACES))
    assert run.programs and not checks(run) and not checking(run)


NOT_KNOWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "input": lambda x, i: x[i] * 2,
    "chosen": lambda x, i: x[torch.where(i > 99, 2, i)] * 2,
    "too_many": lambda x, i: x[torch.arange(4) + i[:1]] * 2,
    "around_a_view": lambda x, i: x[(i.clamp(0, 5) + 0)[:1].as_strided((2,), (2,))] * 2,
    "wraps_around": lambda x, i: x[(i.clamp(1, 5) * 2**62 * 4).clamp_max(5)] * 2,
    "scaled_difference": lambda x, i: x[torch.rsub(torch.arange(3), 3, alpha=2)] * 2,
    "beyond_positions": lambda x, i: x.gather(1, x.argmax(1, keepdim=True) + 1),
}


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_all_others_are(name: str, run: Any) -> None:
    run(NOT_KNOWN[name], X, PLACES)
    assert len(checks(run)) == 1


def test_truth_values_of_other_numbers_are_ones(run: Any) -> None:
    with pytest.raises(IndexError):
        run(lambda x, i: x[:1][(i * 0 - 1).clamp(-1, -1).bool().long()] * 2, X, PLACES)


def test_a_constant_out_of_range_is_left_to_eager(run: Any) -> None:
    with pytest.raises(IndexError) as caught:
        run(lambda x: x[torch.tensor([1, ROWS])] * 2, X)
    assert not isinstance(caught.value, IndexOutOfBoundsError) and not checks(run)


def test_one_tensor_of_indices_is_looked_at_once(run: Any) -> None:
    def twice(x: Tensor, y: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        return x[i] * 2, y.index_select(0, i) + 1

    run(twice, X, X[:4], PLACES % 4)
    assert len(checks(run)) == 2
    assert sum(kind == "ReduceMin" for kind in checking(run)) == 1
    with pytest.raises(IndexOutOfBoundsError) as caught:
        run(twice, X, X[:4], PLACES)
    assert caught.value.op == "aten.index_select.default" and caught.value.size == 4


def test_results_of_a_bad_call_are_not_handed_out_and_the_next_is_right(run: Any) -> None:
    calls = []

    def lookup(x: Tensor, i: Tensor) -> Tensor:
        return x[i] * 2

    run(lambda x: x, X)
    backend = Backend("tops")
    compiled = torch.compile(lookup, backend=backend)
    with pytest.raises(IndexOutOfBoundsError, match=r"7 in a dimension of size 6.*test_graph_bou"):
        calls.append(compiled(X, torch.tensor([0, 7, 1])))
    torch.testing.assert_close(compiled(X, PLACES), lookup(X, PLACES))
    assert not calls


def test_the_setting_turns_checks_off(run: Any) -> None:
    run(NOT_KNOWN["input"], X, PLACES, check_bounds=False)
    assert not checks(run) and not checking(run)


def test_operators_that_check_themselves_get_no_check(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dicp.graphop.builder.Builder.checks_indices", True)
    run(NOT_KNOWN["input"], X, PLACES)
    assert not checks(run) and not checking(run)


def test_no_index_of_changing_number(run: Any) -> None:
    """An empty tensor of indices has no least one; eager takes it, into an empty dimension too."""

    def lookup(x: Tensor, i: Tensor) -> Tensor:
        return x.index_select(0, i) * 2

    compiled = torch.compile(lookup, backend=Backend("ascend"), dynamic=True)
    for x, i in ((X, PLACES), (X, PLACES[:0]), (X[:0], PLACES[:0])):
        torch.testing.assert_close(compiled(x, i), lookup(x, i))
    with pytest.raises((IndexError, RuntimeError)):
        compiled(X[:0], PLACES)


def test_ignored_labels_are_no_bad_indices(run: Any) -> None:
    def loss(x: Tensor, i: Tensor) -> Tensor:
        return F.cross_entropy(x, i, ignore_index=-100)

    labels = torch.tensor([0, -100, 3, 1, 2, -100])
    torch.testing.assert_close(run(loss, X, labels), loss(X, labels))
    for wrong in (4, -1, -99):
        with pytest.raises(IndexOutOfBoundsError, match="nll_loss_forward"):
            run(loss, X, torch.where(labels == 3, wrong, labels))


def floor(x: Tensor, y: Tensor) -> Tensor:
    return x // y


def truncated(x: Tensor, y: Tensor) -> Tensor:
    return torch.div(x, y, rounding_mode="trunc")


@pytest.mark.parametrize("divide", [floor, truncated, torch.remainder, torch.fmod])
def test_no_integer_is_divided_by_zero(divide: Callable[..., Any], run: Any) -> None:
    x, y = torch.tensor([5, -6, 7]), torch.tensor([-2, 4, -1])
    assert torch.equal(run(divide, x, y), divide(x, y))
    with pytest.raises(IntegerDivisionByZeroError):
        run(divide, x, y * torch.tensor([1, 0, 1]))
    for fn in (lambda x: divide(x, 3), lambda x: divide(x, x.clamp(1, 2))):
        assert torch.equal(run(fn, x), fn(x)) and not checks(run)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run(lambda x: divide(x, 0), x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
@pytest.mark.parametrize("divide", [floor, torch.remainder, torch.fmod])
def test_the_least_integer_is_divided(
    divide: Callable[..., Any], dtype: torch.dtype, run: Any
) -> None:
    info = torch.iinfo(dtype)
    x = torch.tensor([info.min, info.max, 5], dtype=dtype)
    y = torch.tensor([-1 if info.min else info.max, info.max, 2], dtype=dtype)
    assert torch.equal(run(divide, x, y), divide(x, y))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_begin_within_the_indices_and_the_first_at_0(mode: str, run: Any) -> None:
    def bags(x: Tensor, i: Tensor, offsets: Tensor) -> Tensor:
        return F.embedding_bag(i, x, offsets, mode=mode) * 2

    good = torch.tensor([0, 3])
    torch.testing.assert_close(run(bags, X, PLACES, good), bags(X, PLACES, good))
    for wrong in ([0, 7], [1, 2]):
        with pytest.raises((IndexError, RuntimeError), match="index out of range|offsets"):
            run(bags, X, PLACES, torch.tensor(wrong))


class Encoder(nn.Module):
    """What a text encoder looks up: tokens, positions of a buffer, types."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(99, 8), nn.Embedding(16, 8)
        self.types = nn.Embedding(2, 8)
        self.register_buffer("places", torch.arange(16).expand(1, -1))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        types = torch.zeros_like(tokens)
        x = self.tokens(tokens) + self.positions(self.places[:, :length]) + self.types(types)
        return self.layer(x)


def test_an_encoder_gains_few_operators(run: Any) -> None:
    """Two tensors of indices come from outside: the ends of each, and clamped ones for one vendor;
    then all ends in one result."""
    model, tokens = Encoder().eval(), torch.randint(0, 99, (2, 7))
    with torch.no_grad():
        torch.testing.assert_close(run(model, tokens), model(tokens), atol=1e-5, rtol=1e-5)
    assert len(checks(run)) == 2
    assert len([kind for kind in checking(run) if kind not in ("Reshape",)]) <= 2 * 4 + 1
