"""The simulator's graph compiler: a recorded module, checked as the builder would, made runnable.

Refused are operators, operand counts, attribute types and dtypes outside the prototypes, sizes that
are not static, images that are not NHWC, operands whose sizes do not fit, and types that differ
from those that dicp states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dicp.errors import PrototypeError
from dicp.graphop.interpreter import Call, Interpreter, Source
from dicp.graphop.prototype import Prototype, ResultType, check_call
from dicp.graphop.simulator import Refused
from dicp.vendor.tops.prototypes import DTYPES, OP_TYPES, PROTOTYPES
from dicp.vendor.tops.semantics import SEMANTICS
from dicp.vendor.tops.simulator.shapes import SHAPES, Mistake

BY_CODE = tuple(DTYPES)
ACTIONS = frozenset({"add", "mul", "max", "min", "update"})
"""What regions do, by the first part of their names."""


@dataclass(frozen=True)
class Tensor:
    """The type of a value."""

    dtype: torch.dtype
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.dims) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{DTYPES[self.dtype]}[{','.join(map(str, self.dims))}]"


@dataclass
class Model:
    """A compiled graph: how to run it, and what it takes and gives."""

    interpreter: Interpreter
    inputs: list[Tensor]
    outputs: list[Tensor]
    kinds: list[str]


class Compiler:
    """Compiles one recorded module."""

    def __init__(self, module: Mapping[str, Any], stated: Sequence[str]) -> None:
        self.module = module
        self.stated = stated
        """The types that dicp states, by number of the operator; empty texts state nothing."""
        self.calls: list[Call | torch.Tensor | int] = []
        self.places: list[Source] = []
        self.results: list[list[Tensor]] = []
        self.inputs: list[Tensor] = []
        self.kinds: list[str] = []

    def compile(self) -> Model:
        """Raises Refused."""
        if not self.module["infers"]:
            raise Refused("shape inference is off")
        main = self.module["functions"]["main"]
        if self.stated and len(self.stated) != len(main["ops"]):
            raise Refused(f"{len(main['ops'])} operators are built, {len(self.stated)} are stated")
        for number, record in enumerate(main["ops"]):
            try:
                self._add(number, record)
            except Mistake as error:
                raise Refused(f"op{number} ({record['kind']}): {error}") from error
        sources = [self.places[number] for number in main["outputs"]]
        if not sources:
            raise Refused("the graph has no outputs")
        outputs = [self._type(number) for number in main["outputs"]]
        return Model(Interpreter(self.calls, sources), self.inputs, outputs, self.kinds)

    def _type(self, number: int) -> Tensor:
        place, index = self.places[number]
        return self.results[place][index]

    def _add(self, number: int, record: Mapping[str, Any]) -> None:
        kind, attrs = record["kind"], dict(record["attrs"])
        if kind == "GetTupleElement":
            place, _ = self.places[record["in"][0]]
            if attrs["index"] >= len(self.results[place]):
                raise Mistake(f"the tuple has {len(self.results[place])} elements")
            self.places.append((place, attrs["index"]))
        else:
            if record["extra"].get("op_type") != OP_TYPES.get(kind):
                raise Mistake(f"its op_type is not {OP_TYPES.get(kind)!r}")
            self.places.append((len(self.calls), 0))
            self._make(f"op{number}", kind, record["in"], attrs)
        stated = self.stated[number] if self.stated else ""
        if stated and stated != str(self._type(number)):
            raise Mistake(f"its result is {self._type(number)}, dicp states {stated}")

    def _make(self, name: str, kind: str, operands: Sequence[int], attrs: dict[str, Any]) -> None:
        if "type" in attrs:
            attrs["type"] = _result_type(attrs["type"])
        if kind == "Input":
            self.calls.append(len(self.inputs))
            self.inputs.append(_tensor(attrs["type"]))
            self.results.append([self.inputs[-1]])
        elif kind == "Const":
            declared = _tensor(attrs["type"])
            data = bytearray.fromhex(attrs["data"])
            flat = torch.frombuffer(data, dtype=declared.dtype) if data else torch.empty(0)
            self.calls.append(flat.to(declared.dtype).reshape(declared.dims))
            self.results.append([declared])
        else:
            self._operator(name, kind, operands, attrs)

    def _operator(
        self, name: str, kind: str, operands: Sequence[int], attrs: dict[str, Any]
    ) -> None:
        prototype = PROTOTYPES.get(kind)
        if prototype is None:
            raise Mistake("there is no such operator")
        many = bool(prototype.inputs) and prototype.inputs[0].arity == "many"
        if not many and len(operands) != len(prototype.inputs):
            raise Mistake(f"it takes {len(prototype.inputs)} operands, not {len(operands)}")
        types = [self._type(number) for number in operands]
        sources: list[Source | list[Source]] = [self.places[number] for number in operands]
        if many:
            sources = [[self.places[number] for number in operands]]
        self._check(prototype, types, attrs, many)
        result = SHAPES[kind](types, attrs)
        self.calls.append(Call(name, prototype, SEMANTICS[kind], tuple(sources), attrs))
        self.kinds.append(kind)
        found = result if isinstance(result, list) else [result]
        self.results.append([Tensor(dtype, tuple(dims)) for dtype, dims in found])

    def _check(
        self, prototype: Prototype, types: Sequence[Tensor], attrs: Mapping[str, Any], many: bool
    ) -> None:
        dtypes: dict[str, Any] = (
            {prototype.inputs[0].name: [t.dtype for t in types]} if many
            else {p.name: t.dtype for p, t in zip(prototype.inputs, types, strict=True)}
        )  # fmt: skip
        try:
            check_call(prototype, dtypes, attrs)
        except PrototypeError as error:
            raise Mistake(error.detail) from error
        if many and len({t.dtype for t in types}) > 1:
            raise Mistake("its operands have several dtypes")
        for region in attrs.get("regions", ()):
            action = region.partition("_")[0]
            if region not in self.module["functions"] or action not in ACTIONS:
                raise Mistake(f"{region!r} is no region for it")


def _result_type(told: Sequence[Any]) -> ResultType:
    code, dims = told
    if any(size < 0 for size in dims):
        raise Mistake(f"sizes {dims} are not static")
    return ResultType(BY_CODE[code], tuple(dims))


def _tensor(told: ResultType) -> Tensor:
    return Tensor(told.dtype, told.dims)
