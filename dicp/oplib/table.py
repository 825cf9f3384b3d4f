"""The table of functions, and their parameters' types in C."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final

import torch

from dicp.torch_private import OpOverload, schema_of

TEXT: Final = Path(__file__).parent / "functions.txt"
AS_IN_ATEN: Final = "# as in ATen"
ANY: Final = object()
"""Of an argument that is not passed: its value is told by the results, or by other arguments."""

C_TYPES: Final = {
    "out": "diopiTensorHandle_t",
    "write": "diopiTensorHandle_t",
    "tensor": "diopiConstTensorHandle_t",
    "tensors": "diopiConstTensorHandle_t*",
    "scalar": "const diopiScalar_t*",
    "size": "diopiSize_t",
    "size*": "diopiSize_t*",
    "int64": "int64_t",
    "int64*": "const int64_t*",
    "bool": "bool",
    "bool*": "const bool*",
    "double": "double",
    "double*": "const double*",
    "string": "const char*",
    "reduction": "diopiReduction_t",
    "rounding": "diopiRoundMode_t",
    "unbiased": "bool",
}
"""Type of a parameter in the table -> in C. After `tensors` follows their number, an int64_t.

A pointer is null, and a size without data, where the argument is None. `write` is a tensor that the
function writes to beside its results; `rounding` is `rounding_mode`, and `unbiased` is a
`correction` of 1.
"""
_OF_SCHEMA: Final = {
    "Tensor": "tensor",
    "Optional[Tensor]": "tensor",
    "List[Tensor]": "tensors",
    "List[Optional[Tensor]]": "tensors",
    "number": "scalar",
    "Optional[number]": "scalar",
    "int": "int64",
    "Optional[int]": "int64*",
    "List[int]": "size",
    "Optional[List[int]]": "size",
    "bool": "bool",
    "Optional[bool]": "bool*",
    "float": "double",
    "Optional[float]": "double*",
    "str": "string",
    "Optional[str]": "string",
}
"""Type in a schema -> in the table, where the table names none."""
_CONSTANTS: Final = {"null": None, "true": True, "false": False}
_TOLD: Final = ("dtype", "layout", "device", "pin_memory")
"""Arguments that no function of `as in ATen` has: the results tell them."""


@dataclass(frozen=True)
class Parameter:
    """A parameter: a result, an argument of the operator, or a constant."""

    name: str
    kind: str
    constant: Any = ANY


@dataclass(frozen=True)
class Function:
    """A function of a library, for calls of one operator."""

    name: str
    operator: str
    parameters: tuple[Parameter, ...]
    absent: Mapping[str, Any]
    """Argument that is not passed -> the value it must have, or `ANY`."""
    dimensions: Mapping[str, int]
    """Argument -> the number of dimensions that it must have."""
    public: bool
    """Whether the public interface DIOPI has it."""

    @cached_property
    def op(self) -> OpOverload:
        return overload(self.operator)

    @cached_property
    def results(self) -> int:
        """How many results it writes."""
        return sum(parameter.kind == "out" for parameter in self.parameters)

    @cached_property
    def written(self) -> frozenset[str]:
        """Arguments that it writes to."""
        return frozenset(p.name for p in self.parameters if p.kind == "write")

    @cached_property
    def in_place(self) -> str | None:
        """The function that writes to its first tensor instead; None where ATen has no such form.

        Its parameters are the same without `out`.
        """
        packet = getattr(torch.ops.aten, f"{self.operator.partition('.')[0]}_", None)
        arguments = list(_types(self.op).items())
        forms = [getattr(packet, name) for name in packet.overloads()] if packet else []
        same = any(list(_types(form).items()) == arguments for form in forms)
        if self.results != 1 or self.parameters[1].name != "self" or not same:
            return None
        return re.sub("(Scalar|Tensor)?$", r"Inp\1", self.name, count=1)

    def parameters_of(self, in_place: bool) -> tuple[Parameter, ...]:
        """The parameters, or those of the in-place form, after the context."""
        return tuple(p for p in self.parameters if not (in_place and p.kind == "out"))

    def c_parameters(self, in_place: bool = False) -> Iterator[tuple[str, str]]:
        """The C type and the name of each parameter, after the context."""
        for place, parameter in enumerate(self.parameters_of(in_place)):
            kind = "write" if in_place and place == 0 else parameter.kind
            name = f"constant{place}" if parameter.constant is not ANY else parameter.name
            yield C_TYPES[kind], name
            if kind == "tensors":
                yield C_TYPES["int64"], f"{name}_count"


@cache
def functions() -> tuple[Function, ...]:
    """All functions, in the table's order; of one operator, the first that takes a call serves."""
    found: list[Function] = []
    public = True
    for number, line in enumerate(TEXT.read_text().splitlines(), 1):
        public = public and line != AS_IN_ATEN
        if line and not line.startswith("#"):
            try:
                found.append(_listed(line) if public else _as_in_aten(line))
            except (AttributeError, KeyError, ValueError) as error:
                raise ValueError(f"{TEXT.name}:{number}: {line!r}: {error}") from error
    return tuple(found)


def overload(operator: str) -> OpOverload:
    """The ATen overload of a name such as `add.Tensor` or `relu`."""
    base, _, suffix = operator.partition(".")
    return getattr(getattr(torch.ops.aten, base), suffix or "default")  # type: ignore[no-any-return]


def _listed(line: str) -> Function:
    match = re.fullmatch(r"(\S+)\s+(\w+)\(([^)]*)\)(?:; (.*))?", line)
    if match is None:
        raise ValueError("not an operator, a function and its parameters")
    operator, name, parameters, clauses = match.groups()
    types = _types(overload(operator))
    read = tuple(_parameter(text, types) for text in parameters.split(", "))
    absent: dict[str, Any] = {}
    dimensions: dict[str, int] = {}
    for clause in clauses.split(", ") if clauses else ():
        argument, _, value = clause.partition("=")
        if value.endswith("d"):
            dimensions[argument] = int(value[:-1])
        else:
            absent[argument] = _CONSTANTS[value] if value else ANY
    return _function(f"diopi{name}", operator, read, absent, dimensions, True)


def _as_in_aten(operator: str) -> Function:
    """A function whose parameters are the results, then the arguments of the schema."""
    types = _types(overload(operator))
    returned = len(schema_of(overload(operator)).returns)
    outs = [f"out{k}" for k in range(returned)] if returned > 1 else ["out"]
    passed = [name for name in types if name not in _TOLD]
    read = tuple(_parameter(text, types) for text in (*outs, *passed))
    absent = {name: ANY for name in types if name in _TOLD}
    name = "".join(part.title() for part in re.split(r"[_.]", operator.removesuffix(".Tensor")))
    return _function(f"diopi{name}", operator, read, absent, {}, False)


def _function(
    name: str,
    operator: str,
    parameters: tuple[Parameter, ...],
    absent: dict[str, Any],
    dimensions: Mapping[str, int],
    public: bool,
) -> Function:
    """With what the schema says of the arguments that the row does not name."""
    passed = {parameter.name for parameter in parameters}
    arguments = {a.name: a for a in schema_of(overload(operator)).arguments}
    for argument in arguments.values():
        if argument.name not in passed | set(absent):
            if not argument.has_default_value():
                raise ValueError(f"{argument.name} has no default and is not passed")
            absent[argument.name] = argument.default_value
    unknown = (set(absent) | set(dimensions)) - set(arguments)
    if unknown or passed & set(absent):
        raise ValueError(f"not an argument, or passed as well: {sorted(unknown or passed)}")
    return Function(name, operator, parameters, absent, dimensions, public)


def _types(op: OpOverload) -> dict[str, str]:
    return {argument.name: str(argument.type) for argument in schema_of(op).arguments}


def _parameter(text: str, types: Mapping[str, str]) -> Parameter:
    name, _, kind = text.partition(":")
    if kind and kind not in C_TYPES:
        raise ValueError(f"{kind} is no type of a parameter")
    if re.fullmatch(r"out\d?", name) and name not in types:
        return Parameter(name, "out")
    if name.startswith('"'):
        return Parameter(name, "string", name.strip('"'))
    if name in _CONSTANTS or name.isdigit():
        return Parameter(name, kind, _CONSTANTS[name] if name in _CONSTANTS else int(name))
    if name.startswith("*"):
        return Parameter(name[1:], "scalar")
    return Parameter(name, kind or _OF_SCHEMA[types[name]])
