"""Generated C++ keeps to the public API: real headers, documented ports, setters and types."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dicp.config import Config
from dicp.graphop.program import Bound, Graph, Node, Operand, Result, Slot, Value
from dicp.graphop.prototype import AttrSpec, Port, Prototype
from dicp.vendor.ascend.codegen import render_graph
from dicp.vendor.ascend.prototypes import FORMATS, PROTOTYPES
from dicp.vendor.ascend.toolchain import compile_shared, find_toolchain

MARKS = {"one": "", "optional": "?", "many": "*"}


def public_api() -> dict[str, tuple[str, str]]:
    """Header and row of each operator, from the file beside this one."""
    rows: dict[str, tuple[str, str]] = {}
    header = ""
    for line in (Path(__file__).parent / "ge_public_api.txt").read_text().splitlines():
        if line.startswith("["):
            header = line.strip("[]")
        elif line and not line.startswith("#"):
            rows[line.partition(":")[0]] = (header, line)
    return rows


PUBLIC = public_api()


def as_row(prototype: Prototype) -> str:
    def ports(listed: tuple[Port, ...]) -> str:
        return " ".join(port.name + MARKS[port.arity] for port in listed)

    attrs = " ".join(
        f"{a.name}:{a.type}" + ("" if a.default is None else "=") for a in prototype.attrs
    )
    row = f"{prototype.kind}: {ports(prototype.inputs)} -> {ports(prototype.outputs)}"
    return f"{row} | {attrs}" if attrs else row


@pytest.mark.parametrize("kind", sorted(PROTOTYPES))
def test_prototypes_are_those_of_the_public_headers(kind: str) -> None:
    assert kind in PUBLIC, f"add the row of {kind} as its public header declares it"
    assert (PROTOTYPES[kind].group, as_row(PROTOTYPES[kind])) == PUBLIC[kind]


# ---- everything that can be emitted --------------------------------------------------------------

SAMPLES: dict[str, Any] = {
    "Int": 1, "Float": 0.5, "Bool": True, "String": "text", "ListInt": [1, 2],
    "ListFloat": [0.5], "Type": torch.float32,
}  # fmt: skip


def leaf(name: str) -> Value:
    fake = torch.empty(2, 3)
    node = Node(name, "input", {}, {"bound": Bound(Slot(name, fake), (0, 1))})
    node.outputs.append(Value(node, 0, fake))
    return node.outputs[0]


def everything(prototype: Prototype) -> Graph:
    """A graph of one call with every input and attribute, each output read, and a format."""
    values: list[Value] = []

    def value() -> Value:
        values.append(leaf(f"in{len(values)}"))
        return values[-1]

    inputs: dict[str, Operand] = {
        port.name: (value(), value()) if port.arity == "many" else value()
        for port in prototype.inputs
    }
    attrs = {a.name: sample(a) for a in prototype.attrs}
    node = Node("made", prototype.kind, inputs, attrs)
    many = prototype.outputs[0].arity == "many"
    count = 2 if many else len(prototype.outputs)
    node.outputs += [Value(node, k, torch.empty(2, 3)) for k in range(count)]
    readers = [Node(f"read{k}", "Neg", {"x": v}) for k, v in enumerate(node.outputs)]
    for reader in readers:
        reader.outputs.append(Value(reader, 0, torch.empty(2, 3)))
    if not many:
        node.formats = {"0": "FRACTAL_NZ"}
    readers[0].after = (node,)
    results = [Result(r.outputs[0], Slot(r.name, torch.empty(2, 3)), (0, 1)) for r in readers]
    return Graph("graph", [v.node for v in values] + [node, *readers], results)


def sample(attr: AttrSpec) -> Any:
    return SAMPLES[attr.type]


MEMBERS = r"\.(\w+)\(\"(\w+)\""
PORTS = {"In", "DynamicIn", "DynamicOut", "OutDesc"}


@pytest.mark.parametrize("kind", sorted(PROTOTYPES))
def test_only_declared_ports_and_attributes_are_named(kind: str) -> None:
    prototype = PROTOTYPES[kind]
    source = render_graph(everything(prototype))
    body = source[source.index('extern "C"') :]
    ports = {p.name for p in (*prototype.inputs, *prototype.outputs)} | {"x"}
    types = {a.name: a.type for a in prototype.attrs}
    named = re.findall(MEMBERS, body)
    for member, name in named:
        assert name in ports if member in PORTS else types[name] == member, (member, name)
    assert set(types) | {p.name for p in prototype.inputs} <= {name for _, name in named}
    assert set(re.findall(r'Op\("\w+", "(\w+)"\)', body)) == {kind, "Neg"}


def test_everything_that_can_be_emitted_compiles() -> None:
    """Against headers that declare every overload of what they declare, and no operator."""
    texts = []
    for number, kind in enumerate(sorted(PROTOTYPES)):
        source = render_graph(everything(PROTOTYPES[kind]))
        texts.append(source[source.index('extern "C"') :].replace("dicp_graph", f"f{number}", 1))
    first = render_graph(everything(PROTOTYPES["Neg"]))
    prelude = first[: first.index('extern "C"')]
    toolchain = find_toolchain(Config(runs_on="simulator"))
    assert compile_shared(toolchain, prelude + "\n".join(texts))


def test_formats_have_public_numbers() -> None:
    assert FORMATS == {"NCHW": 0, "NHWC": 1, "ND": 2, "NC1HWC0": 3, "FRACTAL_Z": 4,
                       "FRACTAL_NZ": 29, "NCDHW": 30}  # fmt: skip
