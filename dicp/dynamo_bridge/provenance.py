"""Provenance of nodes: the original ATen nodes and the user's lines, preserved by every pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from dicp.operator_choice import CHOICE
from dicp.origin import LINE_OF

SOURCES = "dicp_sources"
DYNAMO = "dicp_dynamo"
"""Key in `node.meta`: the node of Dynamo's graph that an ATen node was traced from."""

_LINE_KEYS = ("stack_trace", LINE_OF, DYNAMO)
_VALUE_KEYS = frozenset({"val", "tensor_meta", "eager_input_vals", SOURCES, CHOICE})


def describe(node: fx.Node) -> str:
    """Description of an original node: its operator and its name in the graph as traced."""
    return f"{node.target} ({node.name})"


def sources_of(node: fx.Node) -> tuple[str, ...]:
    """Descriptions of the original nodes that `node` computes."""
    sources: tuple[str, ...] | None = node.meta.get(SOURCES)
    if sources is not None:
        return sources
    return (describe(node),) if node.op == "call_function" else ()


def union_sources(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """The sources of all `nodes`, in order, each once."""
    return tuple(dict.fromkeys(source for node in nodes for source in sources_of(node)))


def inherit(node: fx.Node, origins: Sequence[fx.Node]) -> None:
    """Give `node` the sources of `origins`, and the line and module of the last of them."""
    if not origins:
        return
    for key, value in origins[-1].meta.items():
        if key not in _VALUE_KEYS:
            node.meta.setdefault(key, value)
    if not node.meta.get("stack_trace"):
        located = (origin.meta for origin in reversed(origins) if origin.meta.get("stack_trace"))
        found: dict[str, Any] = next(located, {})
        node.meta |= {key: found[key] for key in _LINE_KEYS if key in found}
    node.meta[SOURCES] = union_sources(origins)
    native = [c for origin in origins if "native" in (c := origin.meta.get(CHOICE, ""))]
    if native:
        node.meta.setdefault(CHOICE, native[0])


def absorb(kept: fx.Node, removed: fx.Node) -> None:
    """Add the sources of `removed`, which computes the same value, to those of `kept`."""
    if kept.op == "call_function":
        kept.meta[SOURCES] = union_sources((kept, removed))


def mark_dynamo_nodes(graph: fx.Graph) -> None:
    """Record on freshly traced ATen nodes the node of Dynamo's graph that each comes from.

    A backward node is identified by the sequence number of its forward operator.
    """
    by_number: dict[int, str] = {}
    for node in graph.nodes:
        sources, number = node.meta.get("from_node"), node.meta.get("seq_nr", -1)
        name = sources[-1].name if sources else by_number.get(number)
        if name is not None:
            node.meta[DYNAMO] = name
            by_number.setdefault(number, name)


def dynamo_nodes(gm: fx.GraphModule) -> dict[str, str]:
    """Maps each node of an ATen graph to the node of Dynamo's graph whose line it has."""
    return {n.name: n.meta[DYNAMO] for n in gm.graph.nodes if DYNAMO in n.meta}
