"""The gradients of one call: of its outputs as they come in, of its inputs as they go out.

A tensor's own gradient sums the contributions of every operator that reads it. The contribution of
one call is read off the edges of the autograd graph between the call's nodes and its inputs, so
that the program's tensors stay as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dicp.op_tools import trees
from dicp.op_tools.frame import FRAME
from dicp.op_tools.overwriting import differentiable_result
from dicp.torch_private import (
    at_end_of_backward,
    base_of,
    is_nested_or_transformed,
    next_node_number,
    node_number,
    with_memory,
)

Edge = tuple[Any, int]
"""A node of the autograd graph and the number of its result."""
MAX_NODES = 4096
"""A call whose graph is larger than this (a whole third-party model) has no gradients recorded."""


@dataclass
class Gradients:
    """What backward brought to one call.

    outputs: gradients of the call's output tensors, by their place among them.
    inputs: gradients of its input tensors, by their place; None where there is none.
    recorded: the places of the outputs that autograd recorded; others never get a gradient.
    """

    outputs: list[torch.Tensor | None]
    inputs: list[torch.Tensor | None]
    recorded: tuple[int, ...]
    waiting: int = 0
    """How many nodes or outputs have not been reached yet."""
    begun: bool = False
    finished: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def reached(self, done: Callable[[Gradients], None]) -> None:
        """Note one node or output. `done` is called with the last one, or at the end of the
        backward, which may not reach all: a result may be unused."""
        with self.lock:
            first, self.begun = not self.begun, True
            self.waiting -= 1
            last = self.waiting == 0
        if last:
            self._finish(done)
        elif first:
            at_end_of_backward(lambda: self._finish(done))

    def _finish(self, done: Callable[[Gradients], None]) -> None:
        with self.lock:
            again, self.finished = self.finished, True
        if not again:
            with FRAME.unhooked(), torch.no_grad():
                done(self)
        self.outputs = [None] * len(self.outputs)
        self.inputs = [None] * len(self.inputs)


@dataclass(frozen=True)
class ViewPart:
    """Which elements of its base a view shows: the part of a gradient that is the view's own."""

    base: tuple[Sequence[int], Sequence[int]]
    """Sizes and strides."""
    view: tuple[Sequence[int], Sequence[int]]
    offset: int

    @classmethod
    def of(cls, view: torch.Tensor, base: torch.Tensor) -> ViewPart | None:
        """None where elements of the view are other numbers than those of the base."""
        if base.layout != torch.strided or any(map(is_nested_or_transformed, (view, base))):
            return None
        kinds = {(t.dtype, t.layout, t.is_conj(), t.is_neg()) for t in (view, base)}
        if len(kinds) > 1:
            return None
        offset = view.storage_offset() - base.storage_offset()
        return cls((base.shape, base.stride()), (view.shape, view.stride()), offset)

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        """The part, in memory of its own, of a gradient of the base."""
        sizes, strides = self.base
        whole = gradient
        if whole.stride() != strides:
            whole = torch.empty_strided(sizes, strides, dtype=gradient.dtype, device=whole.device)
            whole.copy_(gradient)
        return whole.as_strided(*self.view, whole.storage_offset() + self.offset).clone()


@dataclass(frozen=True)
class InputView:
    """An input that is a view: autograd records what is written to it as written to its base."""

    base: torch.Tensor
    edge: Edge | None
    """Where the base hangs before the call; None if it needs no gradient then."""
    place: int | None
    """That of the input, if it needs a gradient itself."""
    part: ViewPart | None

    @property
    def is_written(self) -> bool:
        return _edge_of(self.base) != self.edge


@dataclass(frozen=True)
class Place:
    """One gradient among those that a node gets or gives, and whose it is."""

    own: int
    """Its number at the node."""
    target: int
    """The place of the call's output or input."""
    part: ViewPart | None = None
    """Of an output or input that is a view, where the gradient is that of its base."""

    def gradient(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        found = gradients[self.own]
        if found is None:
            return None
        found = with_memory(found.detach())
        return found if self.part is None else self.part(found)


@dataclass(frozen=True)
class InputEdges:
    """Where the inputs of a call hang in the autograd graph, taken before the call runs."""

    edges: list[Edge | None]
    first_node: int = 0
    """The number of the first node that the call may record."""
    views: Mapping[int, InputView] = field(default_factory=dict)
    """The inputs that are views, by their ids."""
    assigned: torch.Tensor | None = None
    """The tensor whose elements the call assigns, if that is what it does."""

    @classmethod
    def of(cls, args: Any, kwargs: Any, operator: str = "") -> InputEdges:
        if not torch.is_grad_enabled():
            return cls([])
        tensors = list(trees.tensors((args, kwargs)))
        edges = [_edge_of(tensor) for tensor in tensors]
        views = {}
        for place, tensor in enumerate(tensors):
            base = base_of(tensor)
            if base is not None:  # of a tensor given twice, the last place
                own = None if edges[place] is None else place
                part = ViewPart.of(tensor, base)
                views[id(tensor)] = InputView(base, _edge_of(base), own, part)
        assigned = differentiable_result(operator, args, None)
        return cls(edges, next_node_number(), views, assigned)

    def results(self, outputs: Any) -> list[torch.Tensor]:
        """The tensors among what the call returns, or those by which autograd knows its result."""
        return list(trees.tensors(outputs if self.assigned is None else self.assigned))

    def written_view(self, result: torch.Tensor) -> InputView | None:
        """The input that a result is, if it is a view that the call has written to."""
        view = self.views.get(id(result))
        return view if view is not None and view.is_written else None

    @property
    def needed(self) -> bool:
        return any(edge is not None for edge in self.edges)

    @property
    def places(self) -> dict[Edge, int]:
        """Edge -> the place of its input; the last of several."""
        return {edge: k for k, edge in enumerate(self.edges) if edge is not None}


def watch(
    edges: InputEdges, outputs: Any, done: Callable[[Gradients], None], most: int = MAX_NODES
) -> Gradients | None:
    """Call `done` in backward, once all gradients of a call that it reaches are known.

    `outputs` is the result of the call whose inputs hung at `edges`. Returns None, and watches
    nothing, for a call that autograd did not record, that has more nodes than `most`, or that wrote
    to a view whose elements are other numbers than those of its base, such as the real parts.
    """
    results = edges.results(outputs)
    recorded = _recorded(results)
    views = [edges.written_view(results[place]) for place in recorded]
    if not edges.needed or not recorded or any(v is not None and v.part is None for v in views):
        return None
    known = edges.places
    first_of = [None if e is None else known[e] for e in edges.edges]  # one tensor given twice
    nodes = [(node, places) for node, places in nodes_of(edges, results, most) if places]
    if not nodes:
        return None
    found = Gradients([None] * len(results), [None] * len(edges.edges), recorded, len(nodes))
    for node, arriving in makers_of(edges, results):
        node.register_prehook(_arrives(found, arriving))
    for node, places in nodes:
        node.register_hook(_leaves(found, places, first_of, done))
    return found


def watch_outputs(outputs: Any, done: Callable[[Gradients], None]) -> None:
    """Call `done` in backward, once the gradients of the outputs that it reaches are known.

    For calls that `watch` does not: of a module whose parameters alone have a gradient.
    """
    results = list(trees.tensors(outputs))
    recorded = _recorded(results)
    makers = makers_of(InputEdges([]), results)
    found = Gradients([None] * len(results), [], recorded, len(makers))
    for node, arriving in makers:
        node.register_prehook(_arrives(found, arriving, lambda: found.reached(done)))


def nodes_of(
    edges: InputEdges, outputs: Any, most: int = MAX_NODES
) -> list[tuple[Any, list[Place]]]:
    """The autograd nodes that a call made, each with the places of gradients that it gives to
    inputs; none for a call that autograd did not record, or with more nodes than `most`."""
    if not edges.needed:
        return []
    known = edges.places
    results = edges.results(outputs)
    views = [view for view in map(edges.written_view, results) if view is not None]
    stops = {node for node, _ in known} | {view.edge[0] for view in views if view.edge}
    seen: set[Any] = set()
    starts = (_maker_of(edges, t) for t in results if t.requires_grad)
    todo = [edge[0] for edge in starts if edge is not None and edge[0] not in stops]
    found = []
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if len(seen) > most:
            return []
        places: list[Place] = []
        for own, edge in enumerate(node.next_functions):
            upstream, _ = edge
            if upstream is None:
                continue
            written = [v for v in views if own == 0 and v.edge == edge and _writes_a_view(node)]
            if written:
                places += _of_views(edges, known, written)
            elif edge in known:
                places.append(Place(own, known[edge]))
            elif upstream not in stops and node_number(upstream) >= edges.first_node:
                todo.append(upstream)
        found.append((node, places))
    return found


def _writes_a_view(node: Any) -> bool:
    """Whether the node's first gradient is of the base of a view that was written in place."""
    return bool(node.name().endswith("CopySlices"))


def _of_views(
    edges: InputEdges, known: Mapping[Edge, int], written: Sequence[InputView]
) -> Iterator[Place]:
    for view in written:
        edge = None if view.place is None else edges.edges[view.place]
        if edge is not None:
            yield Place(0, known[edge], view.part)


def _edge_of(tensor: torch.Tensor) -> Edge | None:
    if not tensor.requires_grad:
        return None
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _maker_of(edges: InputEdges, result: torch.Tensor) -> Edge | None:
    """The node of a call's result; of a view that was written, that of its base."""
    view = edges.written_view(result)
    return _edge_of(result if view is None else view.base)


def _recorded(results: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(k for k, t in enumerate(results) if t.requires_grad and t.grad_fn is not None)


def makers_of(edges: InputEdges, outputs: Any) -> list[tuple[Any, list[Place]]]:
    """The nodes that made a call's results, each with the places of gradients that it gets."""
    found: dict[Any, list[Place]] = {}
    results = edges.results(outputs)
    for place in _recorded(results):
        view = edges.written_view(results[place])
        edge = _maker_of(edges, results[place])
        assert edge is not None  # autograd recorded the result
        part = None if view is None else view.part
        found.setdefault(edge[0], []).append(Place(edge[1], place, part))
    return list(found.items())


def _arrives(
    found: Gradients, places: list[Place], then: Callable[[], None] = lambda: None
) -> Callable[[Any], None]:
    """Keep the gradients that a node gets, after hooks of the program have changed them; that of
    an output that nothing reads, beside one that something does, is None."""

    def hook(grad_outputs: Any) -> None:
        with FRAME.unhooked(), torch.no_grad():
            for place in places:
                found.outputs[place.target] = place.gradient(grad_outputs)
        then()

    return hook


def _leaves(
    found: Gradients,
    places: list[Place],
    first_of: list[int | None],
    done: Callable[[Gradients], None],
) -> Callable[[Any, Any], None]:
    def complete(found: Gradients) -> None:
        for place, first in enumerate(first_of):
            if first is not None and first != place:
                found.inputs[place] = found.inputs[first]
        done(found)

    def hook(grad_inputs: Any, grad_outputs: Any) -> None:
        with FRAME.unhooked(), torch.no_grad(), found.lock:
            for place in places:
                gradient = place.gradient(grad_inputs)
                if gradient is not None:
                    before = found.inputs[place.target]
                    found.inputs[place.target] = gradient if before is None else before + gradient
        found.reached(complete)

    return hook
