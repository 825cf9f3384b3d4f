"""Operators called with changing numbers: what `test_symbolic_arguments` lists, and its checks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dicp.compare import Rule, check_tensor, significant_strides
from dicp.testing.backends import BackendUnderTest
from dicp.torch_private import pytree, schema_of

Numbers = tuple[Any, ...]


@dataclass(frozen=True)
class Row:
    """An operator and the numbers it is called with, one tuple after the other.

    `arguments` takes tensors of TENSORS, by the names of its parameters or those in `tensors`, and
    then the numbers; it returns the operator's arguments, the last of which may be a dict of
    keyword arguments. Eager refuses the numbers in `bad`.
    """

    op: Callable[..., Any]
    arguments: Callable[..., Sequence[Any]]
    numbers: Sequence[Numbers]
    bad: Sequence[Numbers] = ()
    random: bool = False
    tensors: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        return str(self.op) if schema_of(self.op) is not None else self.op.__name__

    def inputs(self) -> list[torch.Tensor]:
        """Fresh copies of the tensors it takes."""
        taken = inspect.signature(self.arguments).parameters if self.tensors is None else ()
        names = self.tensors or [name for name in taken if name in TENSORS]
        return [TENSORS[name].clone() for name in names]

    def call(self, tensors: Sequence[torch.Tensor], numbers: Numbers) -> Any:
        given = self.arguments(*tensors, *numbers)
        if isinstance(given[-1], dict):
            return self.op(*given[:-1], **given[-1])
        return self.op(*given)

    def changing(self) -> set[str]:
        """The parameters of the operator's schema that change between the calls."""
        marks = [_DistinctInt(n) if isinstance(n, int) else _Real(n) for n in self.numbers[0]]
        given = list(self.arguments(*self.inputs(), *marks))
        named = given.pop() if isinstance(given[-1], dict) else {}
        schema = [a.name for a in schema_of(self.op).arguments]  # type: ignore[attr-defined]
        named = {**dict(zip(schema, given, strict=False)), **named}
        return {name for name, value in named.items() if _is_marked(value)}


class _DistinctInt(int):
    """An integer that is told from others, to find its place among the arguments."""


class _Real(float):
    """A real number that is told from others."""


def _is_marked(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_is_marked, value))
    return isinstance(value, (_DistinctInt, _Real))


def numeric_parameters(op: Any) -> set[str]:
    """The parameters of an operator that may be symbolic: SymInt, Scalar and float.

    An `int` of a schema is a constant of the graph: Dynamo compiles anew for another.
    """
    parameters = str(schema_of(op)).partition("(")[2].partition("->")[0]
    return set(re.findall(r"(?:SymInt|Scalar|float)(?:\[\d*\])?\?? (\w+)", parameters))


TENSORS: dict[str, torch.Tensor] = {}


def batches(rows: Sequence[Row], size: int) -> Iterator[list[Row]]:
    """Rows in groups of at most `size`, those with as many calls together."""
    ordered = sorted(rows, key=lambda row: len(row.numbers))
    for k in range(0, len(ordered), size):
        yield ordered[k : k + size]


def problems_of(rows: Sequence[Row], backend: BackendUnderTest) -> list[str]:
    """What differs from eager where the rows are compiled as one function and called in turn."""
    backend.start_over()

    def together(tensors: list[list[torch.Tensor]], numbers: list[Numbers]) -> list[Any]:
        return [row.call(t, n) for row, t, n in zip(rows, tensors, numbers, strict=True)]

    compiled = torch.compile(together, backend=backend, fullgraph=True)
    problems = []
    for step in range(max(len(row.numbers) for row in rows)):
        numbers = [row.numbers[step % len(row.numbers)] for row in rows]
        try:
            found = compiled([row.inputs() for row in rows], numbers)
        except Exception as error:
            if len(rows) > 1:
                return [text for row in rows for text in problems_of([row], backend)]
            return [f"{rows[0].name}{numbers[0]}: {type(error).__name__}: {str(error)[:300]}"]
        for row, given, got in zip(rows, numbers, found, strict=True):
            problems += [f"{row.name}{given}: {text}" for text in _differences(row, given, got)]
    return problems


def _differences(row: Row, numbers: Numbers, got: Any) -> Iterator[str]:
    wanted = pytree.tree_leaves(row.call(row.inputs(), numbers))
    truth = _in_double(row, numbers)
    outputs = pytree.tree_leaves(got)
    if len(outputs) != len(wanted):
        yield f"{len(outputs)} results, eager gives {len(wanted)}"
        return
    for output, eager, exact in zip(outputs, wanted, truth or [None] * len(wanted), strict=True):
        if not isinstance(eager, torch.Tensor):
            if output != eager:
                yield f"{output}, eager gives {eager}"
        elif row.random:
            mine, theirs = (
                (value.shape, value.dtype, significant_strides(value)) for value in (output, eager)
            )
            if mine != theirs:
                yield f"{mine}, eager gives {theirs}"
        else:
            yield from check_tensor(output, eager, exact, Rule())


def _in_double(row: Row, numbers: Numbers) -> list[Any] | None:
    """Eager's results in fp64; None where it has none."""
    wide = [t.double() if t.is_floating_point() else t for t in row.inputs()]
    try:
        return pytree.tree_leaves(row.call(wide, numbers))
    except RuntimeError:
        return None


def accepted(row: Row, numbers: Numbers, backend: BackendUnderTest) -> bool:
    """Whether the compiled operator takes numbers that eager refuses."""
    backend.start_over()
    try:
        row.call(row.inputs(), numbers)
    except Exception:
        compiled = torch.compile(row.call, backend=backend, dynamic=True, fullgraph=True)
        try:
            compiled(row.inputs(), numbers)
        except Exception:
            return False
        return True
    raise AssertionError(f"eager takes {row.name}{numbers}")
