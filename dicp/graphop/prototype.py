"""A vendor's declarations of its graph operators: names, ports, attributes and the types they take.

A table is text, one operator a line, so that it can be read beside the vendor's manual:

ReduceSum: x:number axes:index -> y:=x | keep_dims:Bool=false

A port is `name:types`, `name:=other` (the same dtype as another port), `name?` (optional) or
`name*` (any number of tensors). Types are classes that the vendor names, several joined by commas,
each perhaps without some (`any-bool`). An attribute without a default is required.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dicp.errors import PrototypeError

ATTR_TYPES: tuple[str, ...] = ("Int", "Float", "Bool", "String", "ListInt", "ListFloat", "ListBool",
                               "ListString", "Type", "Tensor", "Lists", "Result")  # fmt: skip
"""`Lists` is a list of integers and of lists of them, `Result` a `ResultType`."""


@dataclass(frozen=True)
class ResultType:
    """The dtype and (symbolic) sizes that an operator's attribute states for its result."""

    dtype: torch.dtype
    dims: tuple[Any, ...]


@dataclass(frozen=True)
class Port:
    """One input or output: whether it may be left out or repeated, and the dtypes it takes."""

    name: str
    arity: Literal["one", "optional", "many"]
    dtypes: frozenset[torch.dtype]
    same_as: str = ""


@dataclass(frozen=True)
class AttrSpec:
    """One attribute; `default` is the vendor's text, None for a required one."""

    name: str
    type: str
    default: str | None


@dataclass(frozen=True)
class Prototype:
    """One operator of the vendor's graph language."""

    kind: str
    group: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    attrs: tuple[AttrSpec, ...]

    def input(self, name: str) -> Port | None:
        return next((port for port in self.inputs if port.name == name), None)

    @property
    def written(self) -> tuple[int, ...]:
        """Positions of the inputs whose memory the operator writes to: an output has their name."""
        names = {port.name for port in self.outputs}
        return tuple(k for k, port in enumerate(self.inputs) if port.name in names)

    @property
    def only_writes(self) -> bool:
        """Whether the operator has no results but the inputs that it overwrites."""
        return bool(self.written) and len(self.written) == len(self.outputs)

    def form(self) -> str:
        """`ReduceSum: x axes -> y | keep_dims`."""
        inputs, outputs, attrs = (
            " ".join(part.name for part in parts)
            for parts in (self.inputs, self.outputs, self.attrs)
        )
        return f"{self.kind}: {inputs} -> {outputs}" + (f" | {attrs}" if attrs else "")

    def attr(self, name: str) -> AttrSpec | None:
        return next((attr for attr in self.attrs if attr.name == name), None)


DtypeClasses = Mapping[str, frozenset[torch.dtype]]


def parse_prototypes(group: str, text: str, classes: DtypeClasses) -> dict[str, Prototype]:
    """The operators of one table; `group` is where the vendor declares them (a header, say).

    Raises ValueError, which names the row, for one that is not in the form above.
    """
    rows = [line.strip() for line in text.splitlines()]
    found: dict[str, Prototype] = {}
    for row in rows:
        if row and not row.startswith("#"):
            prototype = _parse_row(group, row, classes)
            if prototype.kind in found:
                raise ValueError(f"prototype {row!r}: there is another row of {prototype.kind}")
            found[prototype.kind] = prototype
    return found


def _parse_row(group: str, row: str, classes: DtypeClasses) -> Prototype:
    found = re.fullmatch(r"(\w+):([^|]*)->([^|]*)(?:\|(.*))?", row)
    if found is None:
        raise ValueError(f"prototype {row!r} is not `Name: inputs -> outputs | attributes`")
    inputs, outputs, attrs = (found[k] or "" for k in (2, 3, 4))
    try:
        prototype = Prototype(
            found[1],
            group,
            tuple(_parse_port(word, classes) for word in inputs.split()),
            tuple(_parse_port(word, classes) for word in outputs.split()),
            tuple(_parse_attr(word) for word in attrs.split()),
        )
        for names in (prototype.inputs, prototype.outputs, prototype.attrs):
            if twice := [name for name, n in Counter(part.name for part in names).items() if n > 1]:
                raise ValueError(f"{twice[0]!r} occurs twice")
        for port in (*prototype.inputs, *prototype.outputs):
            if port.same_as and prototype.input(port.same_as) is None:
                raise ValueError(f"{port.name!r} has the dtype of {port.same_as!r}, no input")
        return prototype
    except ValueError as problem:
        raise ValueError(f"prototype {row!r}: {problem}") from None


def _parse_port(word: str, classes: DtypeClasses) -> Port:
    name, _, types = word.partition(":")
    arity: Literal["one", "optional", "many"] = "one"
    if name.endswith("?"):
        name, arity = name[:-1], "optional"
    elif name.endswith("*"):
        name, arity = name[:-1], "many"
    if types.startswith("="):
        return Port(name, arity, classes["any"], types[1:])
    return Port(name, arity, frozenset().union(*_parse_types(types or "any", classes)))


def _parse_types(types: str, classes: DtypeClasses) -> Iterator[frozenset[torch.dtype]]:
    for term in types.split(","):
        unknown = [name for name in term.split("-") if name not in classes]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no class of dtypes; known are {sorted(classes)}")
        whole, *without = (classes[name] for name in term.split("-"))
        yield whole.difference(*without)


def _parse_attr(word: str) -> AttrSpec:
    found = re.fullmatch(r"(\w+):(\w+)(?:=(.*))?", word)
    if found is None or found[2] not in ATTR_TYPES:
        raise ValueError(f"{word!r} is no attribute; types are {', '.join(ATTR_TYPES)}")
    spec = AttrSpec(found[1], found[2], found[3])
    if not _default_fits(spec.type, spec.default or ""):
        raise ValueError(f"the default {spec.default!r} of {spec.name!r} is no {spec.type}")
    return spec


_DEFAULTS = {"Int": r"-?\d+", "Float": r"-?\d+(\.\d*)?(e-?\d+)?f?", "Bool": "true|false"}
"""Attribute type -> the form of its default; others have any."""


def _default_fits(kind: str, text: str) -> bool:
    single = kind.removeprefix("List")
    texts = text.split(",") if kind != single else [text]
    return not text or all(re.fullmatch(_DEFAULTS.get(single, ".*"), each) for each in texts)


_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "Int": (int, torch.SymInt, torch.dtype),
    "Float": (float, int),
    "Bool": (bool,),
    "String": (str,),
    "Type": (torch.dtype,),
}


def attr_fits(spec: AttrSpec, value: Any) -> bool:
    """Whether `value` is of the attribute's type (an Int may be given as a dtype, its number)."""
    if spec.type == "Tensor":
        return isinstance(value, Mapping)
    if spec.type == "Result":
        return isinstance(value, ResultType)
    if spec.type == "Lists":
        return isinstance(value, (list, tuple)) and all(map(_is_list_or_size, value))
    if spec.type.startswith("List"):
        single = AttrSpec(spec.name, spec.type.removeprefix("List"), None)
        return isinstance(value, (list, tuple)) and all(attr_fits(single, v) for v in value)
    if isinstance(value, bool) and spec.type != "Bool":
        return False
    return isinstance(value, _PYTHON_TYPES[spec.type])


def _is_list_or_size(value: Any) -> bool:
    items = value if isinstance(value, (list, tuple)) else [value]
    return all(isinstance(item, (int, torch.SymInt)) for item in items)


Dtypes = Mapping[str, torch.dtype | Sequence[torch.dtype]]


def check_call(
    prototype: Prototype, inputs: Dtypes, attrs: Mapping[str, Any], where: str = ""
) -> None:
    """Raise PrototypeError unless `inputs` (dtypes by port) and `attrs` are as declared."""
    kind = prototype.kind
    for name in inputs:
        if prototype.input(name) is None:
            known = [port.name for port in prototype.inputs]
            raise PrototypeError(kind, f"it has no input {name!r} but {known}", where)
    for port in prototype.inputs:
        if port.name not in inputs:
            if port.arity == "one":
                raise PrototypeError(kind, f"input {port.name!r} is missing", where)
            continue
        _check_dtypes(prototype, port, inputs, where)
    for name, value in attrs.items():
        spec = prototype.attr(name)
        if spec is None:
            known = [attr.name for attr in prototype.attrs]
            raise PrototypeError(kind, f"it has no attribute {name!r} but {known}", where)
        if not attr_fits(spec, value):
            raise PrototypeError(kind, f"attribute {name!r} is {value!r}, not {spec.type}", where)
    for spec in prototype.attrs:
        if spec.default is None and spec.name not in attrs:
            raise PrototypeError(kind, f"attribute {spec.name!r} is missing", where)


def _check_dtypes(prototype: Prototype, port: Port, inputs: Dtypes, where: str) -> None:
    given = inputs[port.name]
    listed = [given] if isinstance(given, torch.dtype) else list(given)
    if (port.arity == "many") == isinstance(given, torch.dtype):
        number = "one tensor" if port.arity != "many" else "a list of tensors"
        raise PrototypeError(prototype.kind, f"input {port.name!r} takes {number}", where)
    for dtype in listed:
        if dtype not in port.dtypes:
            raise PrototypeError(
                prototype.kind, f"input {port.name!r} does not take {_name(dtype)}", where
            )
        other = inputs.get(port.same_as)
        if isinstance(other, torch.dtype) and dtype != other:
            raise PrototypeError(
                prototype.kind,
                f"input {port.name!r} is {_name(dtype)}, but {port.same_as!r} is {_name(other)}",
                where,
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
