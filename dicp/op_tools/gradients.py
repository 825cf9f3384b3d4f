"""The gradients of one call: of its outputs as they come in, of its inputs as they go out.

A tensor's own gradient sums the contributions of every operator that reads it. The contribution of
one call is read off the edges of the autograd graph between the call's nodes and its inputs, so
that the program's tensors stay as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dicp.op_tools import trees
from dicp.op_tools.frame import FRAME
from dicp.op_tools.overwriting import differentiable_result
from dicp.torch_private import (
    at_end_of_backward,
    is_view_of_another,
    next_node_number,
    node_number,
    with_memory,
)

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
class InputEdges:
    """Where the inputs of a call hang in the autograd graph, taken before the call runs."""

    edges: list[tuple[Any, int] | None]
    first_node: int = 0
    """The number of the first node that the call may record."""
    views: frozenset[int] = frozenset()
    """The ids of inputs that are views: what is written to one changes the node of its base."""
    assigned: torch.Tensor | None = None
    """The tensor whose elements the call assigns, if that is what it does."""

    @classmethod
    def of(cls, args: Any, kwargs: Any, operator: str = "") -> InputEdges:
        if not torch.is_grad_enabled():
            return cls([])
        edges: list[tuple[Any, int] | None] = []
        views = set()
        for tensor in trees.tensors((args, kwargs)):
            if tensor.requires_grad:
                views |= {id(tensor)} if is_view_of_another(tensor) else set()
                edge = torch.autograd.graph.get_gradient_edge(tensor)
                edges.append((edge.node, edge.output_nr))
            else:
                edges.append(None)
        assigned = differentiable_result(operator, args, None)
        return cls(edges, next_node_number(), frozenset(views), assigned)

    def results(self, outputs: Any) -> list[torch.Tensor]:
        """The tensors among what the call returns, or those by which autograd knows its result."""
        return list(trees.tensors(outputs if self.assigned is None else self.assigned))

    @property
    def needed(self) -> bool:
        return any(edge is not None for edge in self.edges)

    @property
    def places(self) -> dict[tuple[Any, int], int]:
        """Edge -> the place of its input; the last of several."""
        return {edge: k for k, edge in enumerate(self.edges) if edge is not None}


def watch(
    edges: InputEdges, outputs: Any, done: Callable[[Gradients], None], most: int = MAX_NODES
) -> Gradients | None:
    """Call `done` in backward, once all gradients of a call that it reaches are known.

    `outputs` is the result of the call whose inputs hung at `edges`. Returns None, and watches
    nothing, for a call that autograd did not record, that has more nodes than `most`, or that wrote
    to a view, whose gradient arrives as a part of that of its base.
    """
    results = edges.results(outputs)
    recorded = _recorded(results)
    if not edges.needed or not recorded or any(id(t) in edges.views for t in results):
        return None
    known = edges.places
    first_of = [None if e is None else known[e] for e in edges.edges]  # one tensor given twice
    nodes = [(node, places) for node, places in nodes_of(edges, results, most) if places]
    if not nodes:
        return None
    found = Gradients([None] * len(results), [None] * len(edges.edges), recorded, len(nodes))
    for node, arriving in _makers(results, recorded):
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
    makers = _makers(results, recorded)
    found = Gradients([None] * len(results), [], recorded, len(makers))
    for node, arriving in makers:
        node.register_prehook(_arrives(found, arriving, lambda: found.reached(done)))


def nodes_of(
    edges: InputEdges, outputs: Any, most: int = MAX_NODES
) -> list[tuple[Any, list[tuple[int, int]]]]:
    """The autograd nodes that a call made, each with (its own place, the input's) for gradients of
    inputs; none for a call that autograd did not record, or with more nodes than `most`."""
    if not edges.needed:
        return []
    known = edges.places
    stops = {node for node, _ in known}
    seen: set[Any] = set()
    starts = (t.grad_fn for t in edges.results(outputs))
    todo = [node for node in starts if node is not None and node not in stops]
    found = []
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if len(seen) > most:
            return []
        places = []
        for place, (upstream, number) in enumerate(node.next_functions):
            if upstream is None:
                continue
            if (upstream, number) in known:
                places.append((place, known[upstream, number]))
            elif upstream not in stops and node_number(upstream) >= edges.first_node:
                todo.append(upstream)
        found.append((node, places))
    return found


def _recorded(results: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(k for k, t in enumerate(results) if t.requires_grad and t.grad_fn is not None)


def _makers(
    results: Sequence[torch.Tensor], recorded: Sequence[int]
) -> list[tuple[Any, list[tuple[int, int]]]]:
    """The nodes that made these results, each with (its own place, the result's)."""
    found: dict[Any, list[tuple[int, int]]] = {}
    for place in recorded:
        edge = torch.autograd.graph.get_gradient_edge(results[place])
        found.setdefault(edge.node, []).append((edge.output_nr, place))
    return list(found.items())


def _arrives(
    found: Gradients, places: list[tuple[int, int]], then: Callable[[], None] = lambda: None
) -> Callable[[Any], None]:
    """Keep the gradients that a node gets, after hooks of the program have changed them; that of
    an output that nothing reads, beside one that something does, is None."""

    def hook(grad_outputs: Any) -> None:
        with FRAME.unhooked():
            for place, target in places:
                gradient = grad_outputs[place]
                found.outputs[target] = None if gradient is None else _kept(gradient)
        then()

    return hook


def _kept(gradient: torch.Tensor) -> torch.Tensor:
    return with_memory(gradient.detach())


def _leaves(
    found: Gradients,
    places: list[tuple[int, int]],
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
            for place, target in places:
                gradient = grad_inputs[place]
                if gradient is not None:
                    before = found.inputs[target]
                    gradient = _kept(gradient)
                    found.inputs[target] = gradient if before is None else before + gradient
        found.reached(complete)

    return hook
