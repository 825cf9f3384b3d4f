"""The C++ that builds an HLIR graph: one operator a line, grouped by the ATen call it is for.

The builder numbers what it makes from 0; `opN` is the N-th. HLIR's sizes are static; those of a
symbolic graph are expressions, which numbers replace before the text is compiled (`graphop.text`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from dicp.graphop.literals import float_literal, literal
from dicp.graphop.program import Graph, Node, Value
from dicp.graphop.prototype import AttrSpec, ResultType
from dicp.graphop.text import Text, blocks_of, joined, size_list, size_part
from dicp.template import render_parts
from dicp.vendor.tops.prototypes import DTYPES, OP_TYPES, PROTOTYPES

FOLDER = Path(__file__).parent
ENTRY = "dicp_graph"
STRUCTS = {
    "DotGeneral": "DotDimensionNumbers", "Gather": "GatherDimensionNumbers",
    "Scatter": "ScatterDimensionNumbers", "Conv": "ConvDimensionNumbers",
}  # fmt: skip
"""The builder's type of the attribute `dims`."""
COMBINED = {
    "add": "builder::Add(x, y)", "mul": "builder::Mul(x, y)", "max": "builder::Max(x, y)",
    "min": "builder::Min(x, y)", "update": "y",
}  # fmt: skip
"""What a region does with an old and a new element."""
STORED = {
    torch.float16: "uint16_t", torch.float32: "float", torch.float64: "double", torch.bool: "bool",
    torch.uint8: "uint8_t", torch.int8: "int8_t", torch.int16: "int16_t", torch.int32: "int32_t",
    torch.int64: "int64_t", torch.uint32: "uint32_t",
}  # fmt: skip


def node_names(graph: Graph) -> dict[Node, str]:
    """What each node is called in the source, and in messages: the last operator that it makes."""
    names: dict[Node, str] = {}
    count = 0
    for node in graph.nodes:
        count += 1 if len(node.outputs) == 1 else 1 + len(node.outputs)
        names[node] = f"op{count - len(node.outputs) if len(node.outputs) > 1 else count - 1}"
    return names


def stated_types(graph: Graph) -> Text:
    """The type of each operator that the builder makes, in lines, for the simulator to compare."""
    types: list[str | Text] = []
    for node in graph.nodes:
        found = [Text.of(DTYPES[v.dtype], "[", size_list(v.shape, ","), "]") for v in node.outputs]
        types += found if len(node.outputs) == 1 else ["", *found]
    return joined("\n", types)


def render_graph(graph: Graph) -> Text:
    """The source text of one graph; it does not depend on its name."""
    names = node_names(graph)
    regions = sorted({r for n in graph.operators for r in n.attrs.get("regions", ())})
    parts = render_parts(
        FOLDER / "graph.cpp.jinja",
        operators=len(graph.operators),
        entry=ENTRY,
        regions=[_region(name) for name in regions],
        blocks=blocks_of((node, _lines(node, names)) for node in graph.nodes),
        outputs=", ".join(value_name(r.value, names) for r in graph.outputs),
    )
    return Text.of(*parts)


def _region(name: str) -> dict[str, str]:
    action, _, dtype = name.partition("_")
    return {
        "name": name,
        "type": f"PrimitiveType::{DTYPES[getattr(torch, dtype)]}()",
        "result": COMBINED[action],
    }


def value_name(value: Value, names: Mapping[Node, str]) -> str:
    """How a consumer names a value."""
    name = names[value.node]
    if len(value.node.outputs) == 1:
        return name
    return f"op{int(name[2:]) + value.index}"


def _lines(node: Node, names: Mapping[Node, str]) -> list[str | Text]:
    name = names[node]
    if node.kind in ("input", "seed", "sizes"):
        return [Text.of(f"Op {name} = b->CreateInput(", _type(node.outputs[0]), ");")]
    if node.kind == "const":
        return _constant(node, name)
    prototype = PROTOTYPES[node.kind]
    arguments: list[str | Text] = [] if prototype.inputs else ["b"]
    for port in prototype.inputs:
        operand = node.inputs[port.name]
        if isinstance(operand, Value):
            arguments.append(value_name(operand, names))
        else:
            arguments.append(_initializer_list(value_name(v, names) for v in operand))
    arguments += [_attr(node, spec) for spec in prototype.attrs]
    if len(node.outputs) == 1:
        lines = [_made(name, node.kind, arguments)]
        if node.kind in OP_TYPES:
            kind = OP_TYPES[node.kind]
            lines.append(f'{name}.SetAttribute("op_type", builder::Attribute("{kind}"));')
        return lines
    first = int(name[2:])
    tuple_name = f"op{first - 1}"
    return [
        _made(tuple_name, node.kind, arguments),
        *(
            f"Op op{first + k} = builder::GetTupleElement({tuple_name}, {k});"
            for k in range(len(node.outputs))
        ),
    ]


def _made(name: str, kind: str, arguments: Sequence[str | Text]) -> str | Text:
    return Text.of(f"Op {name} = builder::{kind}(", joined(", ", arguments), ");")


def _attr(node: Node, spec: AttrSpec) -> str | Text:
    value = node.attrs[spec.name]
    if isinstance(value, ResultType):
        return _type(node.outputs[0])
    match spec.type:
        case "Bool":
            return "true" if value else "false"
        case "Float":
            return float_literal(float(value), "f")
        case "String":
            return json.dumps(value)
        case "ListString":
            return _initializer_list(json.dumps(v) for v in value)
        case "ListInt":
            return _initializer_list(map(size_part, value))
        case "Lists":
            items = [
                _initializer_list(map(size_part, v))
                if isinstance(v, (list, tuple))
                else size_part(v)
                for v in value
            ]
            struct_name = STRUCTS.get(node.kind) if spec.name == "dims" else None
            if struct_name is None:
                return _initializer_list(items)
            return Text.of(f"builder::{struct_name}(", joined(", ", items), ")")
    return Text.of(size_part(value))


def _type(value: Value) -> Text:
    element = f"PrimitiveType::{DTYPES[value.dtype]}()"
    sizes = [_initializer_list(map(size_part, value.shape)), ", "] if value.ndim else []
    return Text.of("Type(", *sizes, element, ")")


def _initializer_list(items: Iterable[object]) -> Text:
    return Text.of("{", joined(", ", items), "}")


def _constant(node: Node, name: str) -> list[str | Text]:
    value = node.outputs[0]
    numbers = ", ".join(literal(n, value.dtype) for n in node.attrs["numbers"]) or "0"
    return [
        f"{STORED[value.dtype]} {name}_data[] = {{{numbers}}};",
        Text.of(
            f"Op {name} = builder::Const(b, static_cast<void*>({name}_data), ", _type(value), ");"
        ),
    ]
