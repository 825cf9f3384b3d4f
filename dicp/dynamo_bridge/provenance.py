"""Where a node came from: the original ATen nodes and the user's lines, kept through every pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

SOURCES = "dicp_sources"

_VALUE_KEYS = frozenset({"val", "tensor_meta", "eager_input_vals", SOURCES})


def describe(node: fx.Node) -> str:
    """One original node in words: its operator and its name in the graph as traced."""
    return f"{node.target} ({node.name})"


def sources_of(node: fx.Node) -> tuple[str, ...]:
    """Descriptions of the original nodes that `node` stands for."""
    sources: tuple[str, ...] | None = node.meta.get(SOURCES)
    if sources is not None:
        return sources
    return (describe(node),) if node.op == "call_function" else ()


def union_sources(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """The sources of all `nodes`, in order, each once."""
    return tuple(dict.fromkeys(source for node in nodes for source in sources_of(node)))


def inherit(node: fx.Node, origins: Sequence[fx.Node]) -> None:
    """Make `node` stand for `origins`: their sources, and the last one's line and module."""
    if not origins:
        return
    for key, value in origins[-1].meta.items():
        if key not in _VALUE_KEYS:
            node.meta.setdefault(key, value)
    if not node.meta.get("stack_trace"):
        traces = (origin.meta.get("stack_trace") for origin in reversed(origins))
        trace = next((trace for trace in traces if trace), None)
        if trace:
            node.meta["stack_trace"] = trace
    node.meta[SOURCES] = union_sources(origins)


def absorb(kept: fx.Node, removed: fx.Node) -> None:
    """Record on `kept` that it now also stands for `removed` (both computed the same value)."""
    if kept.op == "call_function":
        kept.meta[SOURCES] = union_sources((kept, removed))
