"""Operators called with changing numbers: what the table of `test_symbolic_arguments` is made of."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Numbers = tuple[Any, ...]


@dataclass(frozen=True)
class Row:
    """An operator and the numbers it is called with, one tuple after the other.

    `arguments` names tensors of TENSORS first and then one parameter per number, and returns the
    operator's arguments (the last may be a dict of keyword arguments). `bad` holds numbers that
    eager refuses.
    """

    op: Any
    arguments: Callable[..., Sequence[Any]]
    numbers: Sequence[Numbers]
    bad: Sequence[Numbers] = ()
    random: bool = False
    tensors: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        return str(self.op) if hasattr(self.op, "_schema") else self.op.__name__

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the tensors it takes."""
        if self.tensors is not None:
            return self.tensors
        return tuple(p for p in inspect.signature(self.arguments).parameters if p in TENSORS)

    def call(self, tensors: Sequence[torch.Tensor], numbers: Numbers) -> Any:
        *args, last = self.arguments(*tensors, *numbers)
        return self.op(*args, **last) if isinstance(last, dict) else self.op(*args, last)

    def marked(self) -> set[str]:
        """The parameters of the operator's schema that change between calls."""
        marks = [_Whole(n) if isinstance(n, int) else _Real(n) for n in self.numbers[0]]
        given = list(self.arguments(*(TENSORS[name] for name in self.given), *marks))
        named = given.pop() if isinstance(given[-1], dict) else {}
        schema = [a.name for a in self.op._schema.arguments]
        named = {**dict(zip(schema, given, strict=False)), **named}
        return {name for name, value in named.items() if _holds_mark(value)}


class _Whole(int):
    """An integer that is told from others: its place among the arguments is asked for."""


class _Real(float):
    """A real number that is told from others."""


def _holds_mark(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_mark, value))
    return isinstance(value, (_Whole, _Real))


def numeric_parameters(op: Any) -> set[str]:
    """The parameters of an operator that Dynamo may turn into symbols: SymInt, Scalar and float.

    An `int` of a schema is a constant of the graph: Dynamo compiles anew for another.
    """
    schema = re.sub(r"^[^(]*\(", "(", str(op._schema))
    found = re.findall(r"(?<=[(, ])(?:SymInt|Scalar|float)(?:\[\d*\])?\??(?:\[\d*\])?\?? (\w+)", schema.split("->")[0])
    return set(found)


TENSORS: dict[str, torch.Tensor] = {}


def batches(rows: Iterable[Row], size: int) -> list[list[Row]]:
    rows = list(rows)
    return [rows[k : k + size] for k in range(0, len(rows), size)]
