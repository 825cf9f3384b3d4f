"""In place: what is scattered into a copy of an input that then overwrites the input.

t = copy(x); t[index] = value; x = copy(t)  becomes  x[index] = value, so that updating a few rows
of a table takes the time of those rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dicp.loop.ir.expr import Load, Ref
from dicp.loop.ir.graph import Call, Compute, Graph, Node, refs_in
from dicp.loop.ir.index import contiguous_strides, domain, flatten
from dicp.origin import merged_origins


@dataclass(frozen=True)
class _Update:
    """The three steps of an update of `tensor`."""

    copy: Compute
    scatter: Compute
    write: Compute

    @property
    def tensor(self) -> Ref:
        return self.write.out.root


def scatter_in_place(graph: Graph) -> None:
    """Scatter into inputs whose old elements nothing reads from then on."""
    for node in list(graph.nodes):
        update = _update(node)
        if update is not None and _is_last_use(graph, update):
            _apply(graph, update)


def _update(write: Node) -> _Update | None:
    """The update that `write` ends, if it stores what was scattered into a copy of its target."""
    if not isinstance(write, Compute) or write.out.root.role != "input":
        return None
    if (result := _copied(write)) is None:
        return None
    scatter, start = result.producer, result.base
    copy: Any = None if start is None else start.producer
    source = _copied(copy)
    if source is None or source.root is not write.out.root or scatter.kind != "scatter":
        return None
    refs = (source, write.out, write.out.root, result, copy.out)
    dense = (contiguous_strides(write.shape), 0)
    if copy.out is not start or any((ref.strides, ref.offset) != dense for ref in refs):
        return None
    return _Update(copy, scatter, write)


def _copied(node: Any) -> Ref | None:
    """The tensor that a node copies, element by element."""
    if not isinstance(node, Compute) or node.kind != "pointwise":
        return None
    body, strides = node.body, contiguous_strides(node.shape)
    if not isinstance(body, Load) or body.ref.shape != node.shape:
        return None
    same = flatten(body.coords, strides) == flatten(domain(node.shape), strides)
    return body.ref if same and body.ref.dtype == node.out.dtype else None


def _is_last_use(graph: Graph, update: _Update) -> bool:
    """Whether the tensor is read before the scatter alone, and the copy serves it alone."""
    start = graph.nodes.index(update.scatter)
    copied = update.copy.out
    if any(ref.root is copied for ref in refs_in(graph.outputs)):
        return False
    for k, node in enumerate(graph.nodes):
        if node in (update.copy, update.scatter, update.write):
            continue
        if k > start and any(ref.root is update.tensor for ref in node.reads()):
            return False
        if any(ref is copied for ref in node.reads()) or _writes(node, (update.tensor, copied)):
            return False
    return not any(ref.root is update.tensor for ref in update.scatter.reads())


def _writes(node: Node, roots: tuple[Ref, Ref]) -> bool:
    written = node.written_buffers() if isinstance(node, Call) else {node.out.root}
    return not written.isdisjoint(roots)


def _apply(graph: Graph, update: _Update) -> None:
    copy, scatter, write = update.copy, update.scatter, update.write
    readers = [n for n in graph.nodes if any(r.root is update.tensor for r in n.reads())]
    first = (n for n in scatter.after if n is not copy)
    scatter.after = (*first, *(n for n in readers if n is not copy))
    scatter.out.base = update.tensor
    scatter.origins = merged_origins(scatter.origins, write.origins)
    graph.nodes = [n for n in graph.nodes if n not in (copy, write)]
    for node in graph.nodes:
        node.after = tuple(scatter if n is write else n for n in node.after)
