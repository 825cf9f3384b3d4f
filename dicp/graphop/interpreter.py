"""The semantics of graph operators, as torch functions: for shape inference and for simulators.

A vendor's table maps each operator to a function of its inputs, in the order of the prototype, and
of its attributes by name. An omitted optional input is None, a repeated one a list. Ports named in
`host` hold small integers that determine shapes: the function gets them as a list of numbers. The
same function runs on fake tensors, to infer a result's dtype and sizes, and on real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dicp.graphop.prototype import Prototype

Function = Callable[..., Any]


@dataclass(frozen=True)
class Meaning:
    """The semantics of one operator."""

    function: Function
    host: frozenset[str] = frozenset()


class Semantics:
    """The table of one vendor. Filled at import, then only read."""

    def __init__(self) -> None:
        self._table: dict[str, Meaning] = {}

    def op(self, *kinds: str, host: Sequence[str] = ()) -> Callable[[Function], Function]:
        """Register a function for operators."""

        def add(function: Function) -> Function:
            for kind in kinds:
                self._table[kind] = Meaning(function, frozenset(host))
            return function

        return add

    def update(self, functions: Mapping[str, Function]) -> None:
        for kind, function in functions.items():
            self.op(kind)(function)

    def __getitem__(self, kind: str) -> Meaning:
        return self._table[kind]

    def __contains__(self, kind: object) -> bool:
        return kind in self._table

    def kinds(self) -> frozenset[str]:
        return frozenset(self._table)


Source = tuple[int, int]
"""A value of a plain graph: position of its node, number of the output."""


@dataclass(frozen=True)
class Call:
    """One operator of a plain graph, ready to run."""

    name: str
    prototype: Prototype
    meaning: Meaning
    sources: tuple[Source | list[Source] | None, ...]
    attrs: Mapping[str, Any]


class Interpreter:
    """Runs a list of calls on real tensors; position k of the list leaves its results at k."""

    def __init__(self, calls: Sequence[Call | torch.Tensor | int], outputs: Sequence[Source]):
        """`calls` also holds constants (tensors) and inputs (their position among the inputs)."""
        self.calls = calls
        self.outputs = outputs
        self.launches = sum(isinstance(call, Call) for call in calls)
        self._dying = self._last_uses()

    def _last_uses(self) -> list[list[int]]:
        last: dict[int, int] = {}
        for k, call in enumerate(self.calls):
            if isinstance(call, Call):
                for source in call.sources:
                    for place in source if isinstance(source, list) else [source]:
                        if place is not None:
                            last[place[0]] = k
        kept = {source[0] for source in self.outputs}
        dying: list[list[int]] = [[] for _ in self.calls]
        for position, k in last.items():
            if position not in kept:
                dying[k].append(position)
        return dying

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        env: list[Any] = [None] * len(self.calls)
        for k, call in enumerate(self.calls):
            if isinstance(call, Call):
                env[k] = self._call(call, env)
            else:
                env[k] = [inputs[call]] if isinstance(call, int) else [call]
            for position in self._dying[k]:
                env[position] = None
        return [env[position][index] for position, index in self.outputs]

    def _call(self, call: Call, env: list[Any]) -> Sequence[torch.Tensor]:
        for position in call.prototype.written:
            _keep_contents(env, call.sources[position])
        arguments: list[Any] = []
        for port, source in zip(call.prototype.inputs, call.sources, strict=True):
            if source is None:
                arguments.append(None)
            elif isinstance(source, list):
                arguments.append([env[p][i] for p, i in source])
            else:
                value = env[source[0]][source[1]]
                arguments.append(value.tolist() if port.name in call.meaning.host else value)
        result = call.meaning.function(*arguments, **call.attrs)
        return result if isinstance(result, (tuple, list)) else [result]


def _keep_contents(env: list[Any], written: Source | list[Source] | None) -> None:
    """Copy views of memory that is written to: operators' results own their memory, but those of
    the functions that implement them may be views."""
    assert isinstance(written, tuple)
    memory = env[written[0]][written[1]].untyped_storage().data_ptr()
    for position, values in enumerate(env):
        if values is not None and any(v.untyped_storage().data_ptr() == memory for v in values):
            env[position] = [
                value
                if (position, index) == written or value.untyped_storage().data_ptr() != memory
                else value.clone()
                for index, value in enumerate(values)
            ]
