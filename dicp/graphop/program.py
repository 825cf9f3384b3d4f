"""A graph-operator program: operators on typed values, tensors that cross into eager calls, steps.

Everything of one FX graph is built into one pool of nodes; `partition` then cuts the pool into
graphs for the vendor's compiler with eager calls between them.

Node kinds: "input" (a tensor of the caller's or of an eager call), "sizes" (integers the host
computes from the symbolic sizes of this run), "seed" (a random number drawn by the host), "const",
and the names of the vendor's operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from dicp.origin import Origin
from dicp.target import KernelReport, NodeReport

GRAPH_INPUTS = frozenset({"input", "sizes", "seed"})
LEAVES = GRAPH_INPUTS | {"const"}
"""The kinds of nodes that are no operators."""


@dataclass(frozen=True, eq=False)
class Slot:
    """A real tensor at run time: an input, a constant, or a step's result that later steps read.

    `fake` has its dtype, (symbolic) sizes and strides.
    """

    name: str
    fake: torch.Tensor


@dataclass(frozen=True, eq=False)
class Value:
    """One result of a graph operator. `fake` holds dtype and (symbolic) sizes; row-major.

    `known` are its contents, if known before the run: integers or symbolic integers.
    """

    node: Node = field(repr=False)  # shared: printed, nodes would grow exponentially
    index: int
    fake: torch.Tensor
    known: tuple[Any, ...] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.fake.dtype

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(self.fake.shape)

    @property
    def ndim(self) -> int:
        return self.fake.dim()


Operand = Value | tuple[Value, ...]


@dataclass(eq=False)
class Node:
    """One operator, or a leaf: an input, whose attribute `bound` is a `Bound`, or a constant."""

    name: str
    kind: str
    inputs: Mapping[str, Operand] = field(default_factory=dict)
    attrs: Mapping[str, Any] = field(default_factory=dict)
    origin: Origin | None = None
    outputs: list[Value] = field(default_factory=list)
    formats: Mapping[str, str] = field(default_factory=dict)
    """Memory format of each output that is not plain, by number."""
    after: tuple[Node, ...] = field(default=(), repr=False)
    """Operators that must run before, though their results are not read: they read the memory that
    this one writes."""
    checks: bool = False
    """Whether it belongs to a check of indices, which zeros pass."""

    def operands(self) -> list[Value]:
        """All values read, in port order."""
        found: list[Value] = []
        for operand in self.inputs.values():
            found += [operand] if isinstance(operand, Value) else operand
        return found

    def rename(self, values: Mapping[Value, Value]) -> None:
        """Read the values that `values` maps the operands to; others stay."""
        self.inputs = {
            port: values.get(operand, operand)
            if isinstance(operand, Value)
            else tuple(values.get(value, value) for value in operand)
            for port, operand in self.inputs.items()
        }


@dataclass(frozen=True, eq=False)
class Bound:
    """How a slot enters a graph: its dimensions reordered so that it is row-major."""

    slot: Slot
    order: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Result:
    """How a value leaves a graph: written row-major, viewed as `slot` with dimensions reordered.

    The slot is new memory, or an input's, which the result overwrites or an operator has already
    written to.
    """

    value: Value
    slot: Slot
    order: tuple[int, ...]
    placement: Literal["fresh", "into_input", "in_place"] = "fresh"


@dataclass(eq=False)
class EagerCall:
    """An ATen call between graphs. Its arguments are as in the FX graph, with slots for tensors."""

    op: Any
    args: Any
    kwargs: Mapping[str, Any]
    outs: list[Slot]
    origin: Origin
    reads: list[Slot] = field(default_factory=list)
    mutates: bool = False
    random: bool = False


@dataclass(frozen=True, eq=False)
class View:
    """`slot` is a view of the memory of `source`, with the strides of its fake tensor."""

    slot: Slot
    source: Slot


@dataclass(frozen=True, eq=False)
class Restride:
    """`slot` is a copy of `source` with strides that no row-major result can have."""

    slot: Slot
    source: Slot


@dataclass(frozen=True, eq=False)
class CheckedIndex:
    """Indices of a call: their least and greatest value are pair `number` of the extremes in a
    slot, `size` is the size of the dimension they index, and with a `count` of 0 elements no index
    is read."""

    number: int
    size: Any
    count: Any
    wraps: bool
    origin: Origin
    divides: bool = False
    """Whether they are no indices, but 1 where a divisor is 0."""


@dataclass(frozen=True, eq=False)
class IndexCheck:
    """The run ends with an error unless all indices, whose extremes `source` holds, are in
    range."""

    source: Slot
    rows: tuple[CheckedIndex, ...]


Item = Node | Result | EagerCall | View | Restride | IndexCheck
"""Items of the pool, in a valid order of execution."""


@dataclass(eq=False)
class Graph:
    """One graph for the vendor's compiler. Nodes are in order of computation."""

    name: str
    nodes: list[Node]
    results: list[Result]
    bucket_refusal: str | None = "not asked for"
    """Why the graph does not run on inputs padded to shape buckets; None if it does."""

    @property
    def inputs(self) -> list[Node]:
        return [n for n in self.nodes if n.kind in GRAPH_INPUTS]

    @property
    def outputs(self) -> list[Result]:
        """Results that the graph returns."""
        return [r for r in self.results if r.placement != "in_place"]

    @property
    def written(self) -> dict[Slot, Result]:
        """The inputs whose memory an operator of the graph writes to."""
        return {r.slot: r for r in self.results if r.placement == "in_place"}

    @property
    def operators(self) -> list[Node]:
        return [n for n in self.nodes if n.kind not in LEAVES]

    def text(self) -> str:
        lines = [node_text(node) for node in self.nodes]
        refusal = self.bucket_refusal
        if refusal != "not asked for":
            lines.insert(
                0, "# takes buckets" if refusal is None else f"# takes no buckets: {refusal}"
            )
        lines += [f"return {_leaving(r)}" for r in self.results]
        return "\n".join(lines)


def _leaving(result: Result) -> str:
    shown = {"fresh": "", "into_input": " over ", "in_place": " in "}[result.placement]
    place = f"{shown}{result.slot.name}" if shown else ""
    return f"{result.value.node.name}:{result.value.index}{place}"


def node_text(node: Node) -> str:
    """A node as a line of text, with its origin."""
    return describe(node) + (f"  # {node.origin}" if node.origin else "")


def describe(node: Node) -> str:
    """A node as a line of text, without its origin."""

    def show(operand: Operand) -> str:
        if isinstance(operand, Value):
            return operand.node.name + (f":{operand.index}" if operand.index else "")
        return "[" + ", ".join(map(show, operand)) + "]"

    parts = [f"{port}={show(value)}" for port, value in node.inputs.items()]
    parts += [f"{name}={_short(value)}" for name, value in node.attrs.items()]
    parts += [f"after={n.name}" for n in node.after]
    types = ", ".join(
        f"{str(v.dtype).removeprefix('torch.')}{list(v.shape)}"
        + (f" {node.formats[str(v.index)]}" if str(v.index) in node.formats else "")
        for v in node.outputs
    )
    return f"{node.name}: {types} = {node.kind}({', '.join(parts)})"


def _short(value: Any) -> str:
    text = str(value.slot.name) if isinstance(value, Bound) else str(value)
    return text if len(text) < 80 else f"{text[:77]}..."


@dataclass
class GraphProgram:
    """Graphs and the steps that run them. `serialized` is the JSON form of everything but the text
    of graphs, which `render` writes; `objects` holds the values that have no such form."""

    serialized: dict[str, Any]
    graphs: list[Graph]
    nodes: Sequence[NodeReport] = ()
    objects: list[Any] = field(default_factory=list)
    retry: Callable[[frozenset[str]], GraphProgram] | None = None
    """The same program with some nodes of the FX graph, by name, run eagerly."""

    def text(self) -> str:
        lines = [f"once {_without_origins(step)}" for step in self.serialized["once"]]
        lines += [str(_without_origins(step)) for step in self.serialized["steps"]]
        for graph in self.graphs:
            lines += ["", graph.name, graph.text()]
        return "\n".join(lines) + "\n"

    def kernels(self) -> Sequence[KernelReport]:
        return [
            KernelReport(
                graph.name,
                tuple(dict.fromkeys(n.origin for n in graph.operators if n.origin)),
                graph.text,
            )
            for graph in self.graphs
        ]


def _without_origins(step: Mapping[str, Any]) -> dict[str, Any]:
    """A step without those of its operators, which the text of its graph has."""
    return {key: value for key, value in step.items() if key != "origins"}
