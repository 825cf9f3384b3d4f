"""The C++ that builds a GE graph: one named operator a line, grouped by the ATen call it is for.

Operators are made by their types' names (`OperatorFactory`), without the headers that declare
them. Measured with g++ and public headers of 2025 on a llama graph of 377 operators: 0.9 s of CPU
by name, 1.4 s with the declarations of the 25 kinds in use, over 9 s with all, as CANN's headers
have them.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dicp.graphop.literals import float_literal, literal
from dicp.graphop.program import Graph, Node, Operand, Value
from dicp.graphop.prototype import AttrSpec, Prototype
from dicp.graphop.text import Text, blocks_of, joined, size_list, size_part
from dicp.template import render_parts
from dicp.vendor.ascend.blocked import BLOCKED, MATRIX, storage_dims
from dicp.vendor.ascend.formats import PLAIN, plain_format
from dicp.vendor.ascend.prototypes import DTYPES, PROTOTYPES

FOLDER = Path(__file__).parent
ENTRY = "dicp_graph"
PortNames = Mapping[tuple[str, str], str]
"""By operator and port as the prototype table names it: what an installation calls the port."""


def node_names(graph: Graph) -> dict[Node, str]:
    """What each node is called in the source, and in GE's messages."""
    return {node: f"{node.kind.lower()}{k}" for k, node in enumerate(graph.nodes)}


def render_graph(graph: Graph, ports: PortNames | None = None) -> str:
    """The source text of one graph, with -1 for symbolic sizes; it does not depend on its name."""
    return _render(graph, graph.inputs, ports or {}).at(lambda expression: -1)


def render_static(graph: Graph, ports: PortNames | None = None) -> Text:
    """The source text with an expression for each symbolic size; what the host computes from them
    is constant when numbers replace them."""
    given = [node for node in graph.inputs if node.kind != "sizes"]
    return _render(graph, given, ports or {})


def input_shapes(graph: Graph) -> str:
    """GE's option for the sizes of the inputs, -1 for symbolic ones; empty if all are known."""
    names = node_names(graph)
    shapes = {names[n]: [_known(s) for s in n.outputs[0].shape] for n in graph.inputs}
    if not any(-1 in shape for shape in shapes.values()):
        return ""
    return ";".join(f"{name}:{','.join(map(str, shape))}" for name, shape in shapes.items())


def _known(size: Any) -> int:
    return size if isinstance(size, int) else -1


def _render(graph: Graph, given: Sequence[Node], ports: PortNames) -> Text:
    inputs = {node: k for k, node in enumerate(given)}
    names = node_names(graph)
    references = _references(graph)
    unreached = _unreached(graph, given)
    images = _image_formats(graph)

    def lines_of(node: Node) -> list[str | Text]:
        name = names[node]
        if node in inputs:
            kind = "RefData" if node in references else "Data"
            described = _desc(node.outputs[0], images.get(node, ""))
            made = f'auto {name} = Input("{kind}", "{name}", {inputs[node]}, '
            lines: list[str | Text] = [Text.of(made, described, ");")]
        elif node.kind in ("const", "sizes"):
            lines = [_constant(node, name)]
        else:
            lines = _operator(node, names, PROTOTYPES[node.kind], ports)
        if node in unreached and given:
            lines.append(f"{name}.AddControlInput({names[given[0]]});")
        return lines

    formats = {fmt for node in graph.nodes for fmt in node.formats.values()}
    parts = render_parts(
        FOLDER / "graph.cpp.jinja",
        name="graph",
        operators=len(graph.operators),
        constants=any(_is_constant(node, inputs) for node in graph.nodes),
        blocked=not formats.isdisjoint(BLOCKED),
        entry=ENTRY,
        blocks=blocks_of((node, lines_of(node)) for node in graph.nodes),
        ends=_ends(graph, given, names),
    )
    return Text.of(*parts)


def _unreached(graph: Graph, given: Sequence[Node]) -> set[Node]:
    """The nodes of results that no path from an input leads to: GE would drop them."""
    reached = set(given)
    for node in graph.nodes:
        sources = {*node.after, *(value.node for value in node.operands())}
        if not reached.isdisjoint(sources):
            reached.add(node)
    return {result.value.node for result in graph.results} - reached


def _is_constant(node: Node, inputs: Mapping[Node, int]) -> bool:
    return node.kind == "const" or node.kind == "sizes" and node not in inputs


def _references(graph: Graph) -> set[Node]:
    """The inputs whose memory an operator writes to."""
    written = graph.written
    bounds = {node: node.attrs.get("bound") for node in graph.inputs}
    return {node for node, bound in bounds.items() if bound and bound.slot in written}


def _ends(graph: Graph, given: Sequence[Node], names: Mapping[Node, str]) -> list[str]:
    """What the graph takes and gives; operators that write to an input are kept as targets."""
    targets = dict.fromkeys(names[result.value.node] for result in graph.written.values())
    return [
        *_call("graph.SetInputs", "Operators", [names[node] for node in given]),
        *_call("graph.SetOutputs", "Outputs", [_output(r.value, names) for r in graph.outputs]),
        *(_call("graph.SetTargets", "Operators", list(targets)) if targets else []),
    ]


def _output(value: Value, names: Mapping[Node, str]) -> str:
    return f"{{{names[value.node]}, {{{value.index}}}}}"


def _call(function: str, kind: str, items: Sequence[str]) -> list[str]:
    """A call with one list, several items a line; its type tells the function's overload."""
    text = textwrap.fill(", ".join(items), 80, break_long_words=False)
    return f"{function}({kind}{{{text}}});".replace("\n", "\n      ").split("\n")


def _image_formats(graph: Graph) -> dict[Node, str]:
    """The format that those who read an input as an image or a filter want it declared with."""
    found: dict[Node, str] = {}
    for node in graph.operators:
        for port, operand in node.inputs.items():
            if not isinstance(operand, Value):
                continue
            fmt = plain_format(node.kind, port, operand.ndim)
            if node.kind == "TransData" and node.attrs["src_format"] in PLAIN:
                fmt = node.attrs["src_format"]
            if fmt != "ND":
                found[operand.node] = fmt
    return found


def _sizes(sizes: Sequence[Any]) -> Text:
    return Text.of("{", size_list(sizes), "}")


def _desc(value: Value, plain: str = "") -> Text:
    """Sizes, dtype and format of a value, `plain` if it has none of its own; of a blocked one, its
    storage and what it stands for."""
    fmt = value.node.formats.get(str(value.index), plain)
    dtype = _dtype(value.dtype)
    if fmt in BLOCKED:
        stored = _sizes(storage_dims(fmt, value.shape))
        plain = "ND" if fmt == MATRIX else "NCHW"
        dims, blocked = _sizes(value.shape), f", ge::FORMAT_{fmt}, "
        return Text.of("Blocked(", stored, blocked, dims, f", ge::FORMAT_{plain}, {dtype})")
    given = f", ge::FORMAT_{fmt}" if fmt else ""
    return Text.of("Desc(", _sizes(value.shape), f", {dtype}{given})")


def _dtype(dtype: torch.dtype) -> str:
    return f"ge::{DTYPES[dtype][0]}"


_STORED = {
    torch.float32: "float", torch.float64: "double", torch.float16: "uint16_t",
    torch.bfloat16: "uint16_t", torch.bool: "bool", torch.uint8: "uint8_t", torch.int8: "int8_t",
    torch.int16: "int16_t", torch.int32: "int32_t", torch.int64: "int64_t",
    torch.uint64: "uint64_t",
}  # fmt: skip


def _constant(node: Node, name: str) -> Text:
    value = node.outputs[0]
    numbers: list[Any]
    if node.kind == "const":
        numbers = [literal(n, value.dtype) for n in node.attrs["numbers"]]
    else:
        sizes = node.attrs["sizes"]
        numbers = [size_part(size) for size in (sizes if isinstance(sizes, tuple) else (sizes,))]
    made = f'auto {name} = Constant<{_STORED[value.dtype]}>("{name}", '
    listed = joined(", ", numbers or ["0"])
    return Text.of(made, _sizes(value.shape), f", {_dtype(value.dtype)}, {{", listed, "});")


def _operator(
    node: Node, names: Mapping[Node, str], prototype: Prototype, ports: PortNames
) -> list[str | Text]:
    name = names[node]
    chain: list[str | Text] = []
    for port in prototype.inputs:
        operand = node.inputs.get(port.name)
        if operand is not None:
            called = ports.get((node.kind, port.name), port.name)
            chain += _inputs(called, operand, names, ports)
            fmt = plain_format(
                node.kind, port.name, operand.ndim if isinstance(operand, Value) else 0
            )
            if isinstance(operand, Value) and fmt != "ND":
                chain.append(Text.of(f'.InDesc("{called}", ', _desc(operand, fmt), ")"))
    for port in prototype.outputs:
        if port.arity == "many":
            chain.append(f'.DynamicOut("{port.name}", {len(node.outputs)})')
    for attr, value in node.attrs.items():
        spec = prototype.attr(attr)
        assert spec is not None
        chain.append(f'.{spec.type}("{attr}", {_attr(spec, value)})')
    many = prototype.outputs[0].arity == "many"
    for output in node.outputs:
        given = prototype.outputs[0 if many else output.index].name
        fmt = plain_format(node.kind, given, output.ndim)
        if str(output.index) in node.formats or fmt != "ND":
            given = ports.get((node.kind, given), given)
            chain.append(Text.of(f'.OutDesc("{given}", ', _desc(output, fmt), ")"))
    lines = _wrapped([f'auto {name} = Op("{name}", "{node.kind}")', *chain])
    return [*lines, *(f"{name}.AddControlInput({names[n]});" for n in node.after if n in names)]


def _inputs(port: str, operand: Operand, names: Mapping[Node, str], ports: PortNames) -> list[str]:
    def source(value: Value) -> str:
        output = output_name(value, ports)
        return names[value.node] + (f', "{output}"' if output else "")

    if isinstance(operand, Value):
        return [f'.In("{port}", {source(operand)})']
    made = f'.DynamicIn("{port}", {len(operand)})'
    return [made, *(f'.In("{port}", {k}, {source(value)})' for k, value in enumerate(operand))]


def output_name(value: Value, ports: PortNames) -> str:
    """How a consumer names this output; empty for the only one of an operator."""
    prototype = PROTOTYPES.get(value.node.kind)
    if prototype is None:
        return ""
    if prototype.outputs[0].arity == "many":
        return f"{prototype.outputs[0].name}{value.index}"
    if len(prototype.outputs) == 1:
        return ""
    name = prototype.outputs[value.index].name
    return ports.get((prototype.kind, name), name)


def _attr(spec: AttrSpec, value: Any) -> str:
    if isinstance(value, torch.dtype):
        return _dtype(value)
    match spec.type:
        case "Bool":
            return "true" if value else "false"
        case "Float":
            return float_literal(float(value), "f")
        case "String":
            return json.dumps(value)
        case "ListInt":
            return "{" + ", ".join(map(str, value)) + "}"
        case "ListFloat":
            return "{" + ", ".join(float_literal(float(v), "f") for v in value) + "}"
    return str(value)


def _wrapped(chain: Sequence[str | Text]) -> list[Text]:
    """A chain of calls, broken where a line would be long."""
    lines = [Text.of(chain[0])]
    for call in chain[1:]:
        if len(lines[-1]) + len(call) > 94:
            lines.append(Text.of("    ", call))
        else:
            lines[-1] = Text.of(lines[-1], call)
    lines[-1] = Text.of(lines[-1], ";")
    return lines
