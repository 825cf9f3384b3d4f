"""Which of GE's operators an installation has: read in its headers once, then kept in the cache.

Operators of other releases have other ports, attributes and dtypes. One counts as usable where it
is declared with all that dicp's table of prototypes lists of it; rules ask for what is usable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from dicp.cache import Cache, key_of
from dicp.graphop.prototype import Port, Prototype
from dicp.vendor.ascend.installation import Cann
from dicp.vendor.ascend.prototypes import DTYPES, PROTOTYPES

UNIT = "operators"
FILE = "operators.json"
Dtypes = frozenset[torch.dtype]
Ports = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Declared:
    """An operator as a header declares it: names of ports with how often each may stand, and of
    attributes with their types."""

    inputs: Ports
    outputs: Ports
    attrs: Mapping[str, str]
    required: frozenset[str]
    """The attributes without a default."""
    dtypes: Mapping[str, Dtypes]
    """By port, where the declaration tells."""


@dataclass(frozen=True)
class Installed:
    """Which operators of the prototype table can be used, and what their ports are called."""

    kinds: frozenset[str]
    ports: Mapping[tuple[str, str], str]
    dtypes: Mapping[tuple[str, str], Dtypes]
    """By operator and input: what it takes, where that is known."""


EVERY_OPERATOR = Installed(frozenset(PROTOTYPES), {}, {})


def probed(cann: Cann, cache: Cache) -> Installed:
    """What can be used of an installation's operators. Its headers are read once, and again where
    one of them has changed."""
    files = [*cann.headers, *filter(None, [cann.types_header])]
    states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = key_of(UNIT, Path(__file__).read_text(), sorted(PROTOTYPES), states)
    entry = cache.get_or_build(UNIT, key, lambda: {FILE: _as_text(_read(cann)).encode()})
    declared = _from_text(entry.read(FILE).decode())
    if not declared:  # no headers of operators are installed: nothing is known against any
        return EVERY_OPERATOR
    return usable_operators(declared)


def _read(cann: Cann) -> dict[str, Declared]:
    types = cann.types_header
    groups = {} if types is None else dtype_groups(types.read_text(errors="replace"))
    texts = (file.read_text(errors="replace") for file in cann.headers)
    found = declared_operators(texts, groups)
    return {kind: declared for kind, declared in found.items() if kind in PROTOTYPES}


def _as_text(found: Mapping[str, Declared]) -> str:
    def plain(declared: Declared) -> list[object]:
        dtypes = {
            port: sorted(DTYPES[dtype][0] for dtype in listed)
            for port, listed in declared.dtypes.items()
        }
        required = sorted(declared.required)
        return [declared.inputs, declared.outputs, dict(declared.attrs), required, dtypes]

    return json.dumps({kind: plain(declared) for kind, declared in found.items()})


def _from_text(text: str) -> dict[str, Declared]:
    found = {}
    for kind, (inputs, outputs, attrs, required, dtypes) in json.loads(text).items():
        ports = [tuple((name, arity) for name, arity in given) for given in (inputs, outputs)]
        listed = {p: frozenset(_BY_NAME[name] for name in names) for p, names in dtypes.items()}
        found[kind] = Declared(ports[0], ports[1], attrs, frozenset(required), listed)
    return found


# ---- reading headers -----------------------------------------------------------------------------

_ARITIES = {"INPUT": "one", "OPTIONAL_INPUT": "optional", "DYNAMIC_INPUT": "many",
            "OUTPUT": "one", "DYNAMIC_OUTPUT": "many"}  # fmt: skip
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_REGISTRATION = re.compile(r"\bREG_OP\s*\(\s*(\w+)\s*\)(.*?)\.?\s*OP_END_FACTORY_REG", re.DOTALL)
_PART = re.compile(
    r"\.\s*(INPUT|OPTIONAL_INPUT|DYNAMIC_INPUT|OUTPUT|DYNAMIC_OUTPUT|ATTR|REQUIRED_ATTR|DATATYPE)"
    r"\s*\(\s*(\w+)\s*,(.*?)\)\s*(?=\.\s*[A-Z_]+\s*\(|\Z)",
    re.DOTALL,
)
_GROUP = re.compile(r"\bTensorType\s+(\w+)\s*\(\s*\)\s*\{\s*return\s+TensorType\s*\(?\{([^{}]*)\}")
_BY_NAME = {name: dtype for dtype, (name, _) in DTYPES.items()} | {"DT_FLOAT32": torch.float32}
_NO_DTYPES = frozenset({"TensorType", "ge"})


def dtype_groups(text: str) -> dict[str, Dtypes]:
    """The groups of dtypes that GE's header of types defines, as in `TensorType::NumberType()`."""
    found = {name: _dtypes(listed, {}) for name, listed in _GROUP.findall(text)}
    return {name: dtypes for name, dtypes in found.items() if dtypes is not None}


def declared_operators(
    texts: Iterable[str], groups: Mapping[str, Dtypes] | None = None
) -> dict[str, Declared]:
    """The operators that headers register; of several registrations the first counts."""
    found: dict[str, Declared] = {}
    for text in texts:
        for kind, body in _REGISTRATION.findall(_COMMENT.sub("", text)):
            if kind not in found:
                found[kind] = _declared(_PART.findall(body), groups or {})
    return found


def _declared(parts: list[tuple[str, str, str]], groups: Mapping[str, Dtypes]) -> Declared:
    named = dict(groups)
    for what, name, text in parts:
        listed = _dtypes(text, groups) if what == "DATATYPE" else None
        if listed is not None:
            named[name] = listed
    ports = [(what, (name, _ARITIES[what])) for what, name, _ in parts if what in _ARITIES]
    return Declared(
        tuple(port for what, port in ports if "INPUT" in what),
        tuple(port for what, port in ports if "OUTPUT" in what),
        {name: text.partition(",")[0].strip() for what, name, text in parts if "ATTR" in what},
        frozenset(name for what, name, _ in parts if what == "REQUIRED_ATTR"),
        dict(_listed_dtypes(parts, named)),
    )


def _listed_dtypes(
    parts: list[tuple[str, str, str]], named: Mapping[str, Dtypes]
) -> Iterator[tuple[str, Dtypes]]:
    for what, name, text in parts:
        listed = _dtypes(text, named) if what in _ARITIES else None
        if listed is not None:
            yield name, listed


def _dtypes(text: str, named: Mapping[str, Dtypes]) -> Dtypes | None:
    """The dtypes of a `TensorType`, of those that dicp has; None where a name is not known."""
    found: set[torch.dtype] = set()
    for word in re.findall(r"\w+", text):
        if word.startswith("DT_"):
            found.update([_BY_NAME[word]] if word in _BY_NAME else [])
        elif word in named:
            found |= named[word]
        elif word not in _NO_DTYPES:
            return None
    return frozenset(found)


# ---- what can be used ----------------------------------------------------------------------------


def usable_operators(declared: Mapping[str, Declared]) -> Installed:
    """The operators of the prototype table that are declared with the ports and attributes that it
    lists, and ask for no others; a port may have another name."""
    kinds: set[str] = set()
    ports: dict[tuple[str, str], str] = {}
    dtypes: dict[tuple[str, str], Dtypes] = {}
    for kind, prototype in PROTOTYPES.items():
        given = declared.get(kind)
        names = None if given is None else _names(prototype, given)
        if given is None or names is None or not _has_attrs(prototype, given):
            continue
        kinds.add(kind)
        ports |= {(kind, name): called for name, called in names.items() if name != called}
        for port in prototype.inputs:
            listed = _taken(prototype, port, given, names)
            if listed is not None:
                dtypes[kind, port.name] = listed
    return Installed(frozenset(kinds), ports, dtypes)


def _taken(
    prototype: Prototype, port: Port, declared: Declared, names: Mapping[str, str]
) -> Dtypes | None:
    """The dtypes of an input, and of results of the same dtype, as far as the declaration tells."""
    like = [out for out in prototype.outputs if port.name in (out.same_as, out.name)]
    called = [names[p.name] for p in (port, *like) if p.name in names]
    listed = [declared.dtypes[name] for name in called if name in declared.dtypes]
    return frozenset.intersection(*listed) if listed else None


def _has_attrs(prototype: Prototype, declared: Declared) -> bool:
    known = {attr.name: attr.type for attr in prototype.attrs}
    return known.items() <= declared.attrs.items() and declared.required <= known.keys()


def _names(prototype: Prototype, declared: Declared) -> dict[str, str] | None:
    """What the declaration calls each port; None where the operator is another one. A name that an
    input and an output share says that the operator writes to its input: it stays."""
    written = frozenset(prototype.inputs[k].name for k in prototype.written)
    inputs = _port_names(prototype.inputs, declared.inputs, written)
    outputs = _port_names(prototype.outputs, declared.outputs, written)
    if inputs is None or outputs is None:
        return None
    given = {name for name, arity in declared.inputs if arity != "optional"}
    return inputs | outputs if given <= set(inputs.values()) else None


def _port_names(
    ports: tuple[Port, ...], given: Ports, kept: frozenset[str]
) -> dict[str, str] | None:
    arities = dict(given)
    free = [name for name, _ in given if name not in {port.name for port in ports}]
    names: dict[str, str] = {}
    for port in ports:
        if port.name in arities:
            names[port.name] = port.name
        elif free and len(given) == len(ports) and port.name not in kept:
            names[port.name] = free.pop(0)
        elif port.arity != "optional":
            return None
    fits = all(_fits(port, arities[names[port.name]]) for port in ports if port.name in names)
    return names if fits else None


def _fits(port: Port, arity: str) -> bool:
    return port.arity == arity or (port.arity, arity) == ("one", "optional")
