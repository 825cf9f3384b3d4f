"""The fuzzer finds faults that are planted in a backend, and shrinks them to tests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from dicp.fuzz.batch import Batch, Find, as_test, examine, valid
from dicp.fuzz.check import Mode
from dicp.fuzz.generate import generate
from dicp.fuzz.shrink import shrunk
from dicp.fuzz.slots import Choices
from dicp.fuzz.table import ROWS

PLANTED = "planted_fault"
GRAMMAR = ("{x} * {s}", "{x}.transpose({d}, {d_b})", "{f}.to({t_float})", "{x}.mul_({s})",
           "torch.where({m}, {x}, {y})", "{x}.masked_fill({m}, {s})", "torch.sin({x})",
           "torch.add({x}, {y}, alpha={n})")  # fmt: skip
BATCH = 16
BATCHES = 2
SECONDS = 4
"""For shrinking a find."""


class _Faulty(TorchFunctionMode):
    """Calls `replacement` in the place of a function or method of a name."""

    def __init__(self, name: str, replacement: Callable[..., Any]) -> None:
        super().__init__()
        self.name, self.replacement = name, replacement

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_meant = getattr(func, "__name__", "") == self.name
        return (self.replacement if is_meant else func)(*args, **(kwargs or {}))


class _Sine(torch.autograd.Function):
    """Sine, whose gradient has other strides than eager's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        back = tuple(reversed(range(x.ndim)))
        return (grads[0] * x.cos()).permute(back).contiguous().permute(back)


def _sine_of_floats(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) if x.dtype.is_floating_point else torch.cos(x)


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "wrong value": ("sin", torch.cos),
    "lost strides": ("transpose", lambda x, *dims: x.transpose(*dims).contiguous()),
    "lost dtype": ("to", lambda x, dtype: x if x.dtype == dtype else x + 0),
    "ignored mask": ("where", lambda mask, x, y: torch.where(mask | True, x, y)),
    "lost mutation": ("mul_", lambda x, factor: x * factor),
    "lost alias": ("transpose", lambda x, *dims: x.transpose(*dims).clone()),
    "hidden NaN": ("masked_fill", lambda x, mask, value: x * ~mask + mask * value),
    "wrong integers": ("sin", _sine_of_floats),
    "lost strides of gradients": ("sin", _Sine.apply),
}
"""The function or method that is wrong, and what comes in its place."""


def _with_fault(name: str, replacement: Callable[..., Any]) -> Callable[..., Any]:
    def compile_graph(gm: fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            with _Faulty(name, replacement):
                return gm.forward(*values)

        return run

    return compile_graph


def _with_first_numbers(gm: fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
    """A backend that keeps the Python numbers of the first call for all calls of a graph."""
    first: list[Any] = []

    def run(*values: Any) -> Any:
        first.extend(values if not first else ())
        tensors = (isinstance(value, torch.Tensor) for value in values)
        return gm.forward(
            *(v if t else old for v, t, old in zip(values, tensors, first, strict=True))
        )

    return run


def _stale(gm: fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
    """A backend that keeps the results of the first call for all calls of a graph."""
    kept: list[Any] = []

    def run(*values: Any) -> Any:
        kept.append(gm.forward(*values))
        return kept[0]

    return run


@pytest.fixture
def planted() -> Iterator[Callable[[Callable[..., Any]], str]]:
    def plant(compile_graph: Callable[..., Any]) -> str:
        torch._dynamo.register_backend(compile_graph, PLANTED)
        return PLANTED

    yield plant
    registry = torch._dynamo.backends.registry
    registry._COMPILER_FNS.pop(PLANTED)
    registry._BACKENDS.pop(PLANTED, None)


def first_find(mode: Mode) -> Find:
    """The first find of at most BATCH * BATCHES programs over the grammar."""
    rows = [row for row in ROWS if row.template in GRAMMAR]
    assert len(rows) == len(GRAMMAR)
    for number in range(BATCHES):
        rng = random.Random(f"planted/{number}")
        choices = Choices(grad=number % 2 == 1, numbers=mode.dynamo, special=0.2, whole=0.3)
        drawn = (generate(rng, choices, rows) for _ in itertools.count())
        programs = tuple(itertools.islice((valid(p) for p in drawn if p.statements), BATCH))
        outcome = examine(Batch(mode, programs))
        if outcome.finds:
            return outcome.finds[0]
    raise AssertionError(f"nothing found in {BATCH * BATCHES} programs")


def check_found(backend: str, dynamic: bool = False) -> None:
    find = first_find(Mode(backend, dynamic, dynamo=dynamic))  # guards hold only with Dynamo
    smallest = shrunk(find, SECONDS)
    assert len(smallest.program.statements) <= 3
    namespace: dict[str, Any] = {}
    exec(as_test(smallest), namespace)
    with pytest.raises(AssertionError):
        namespace["test_found"]()
    exec(as_test(smallest).replace(PLANTED, "eager"), namespace)
    namespace["test_found"]()


@pytest.mark.sweep
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, planted: Callable[..., str]) -> None:
    check_found(planted(_with_fault(*FAULTS[name])))


def test_results_of_an_earlier_call_are_found(planted: Callable[..., str]) -> None:
    check_found(planted(_stale))


def test_numbers_of_an_earlier_call_are_found(planted: Callable[..., str]) -> None:
    check_found(planted(_with_first_numbers), dynamic=True)


def test_operands_differ() -> None:
    """Between equal values no mask chooses."""
    rows = [row for row in ROWS if row.template == "torch.where({m}, {x}, {y})"]
    rng = random.Random(1)
    drawn = [generate(rng, Choices(), rows) for _ in range(40)]
    chosen = [each.args for program in drawn for each in program.statements]
    assert sum(args["x"] != args["y"] for args in chosen) > 0.75 * len(chosen)
