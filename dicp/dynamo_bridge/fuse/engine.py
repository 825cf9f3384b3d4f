"""Finds the declared patterns in an FX graph and replaces them.

A pattern costs nothing unless the graph contains the operators that it needs: only then does the
engine call its pattern function, and it tries only nodes with the root's operator. It visits nodes
from the end, so that the largest form (with weight, bias, activation) matches before its parts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from dicp.dynamo_bridge.analysis.aliases import shared_by_results
from dicp.dynamo_bridge.analysis.constants import cast_source
from dicp.dynamo_bridge.analysis.values import difference, value_of
from dicp.dynamo_bridge.fuse.terms import Match, Number, Term, Var, reshape_source
from dicp.dynamo_bridge.passes.base import PassContext
from dicp.dynamo_bridge.provenance import inherit
from dicp.effects import is_mutating

PatternFunction = Callable[..., Term]
Guard = Callable[[Match, PassContext], bool]


class Rewriter:
    """Emits a replacement's calls before the root, with inferred values and provenance."""

    def __init__(self, root: fx.Node, match: Match, context: PassContext) -> None:
        self.root = root
        self.match = match
        self.context = context
        self.emitted: list[fx.Node] = []
        self._origins = _in_order(dict.fromkeys(match.nodes), root)

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Emit one call."""
        node = self.context.infer.emit(self.root, target, args, kwargs, self._origins)
        self.emitted.append(node)
        return node

    def view(self, node: fx.Node, sizes: Sequence[Any]) -> fx.Node:
        """`node` in another shape; copied where its strides allow no view."""
        try:
            return self(torch.ops.aten.view.default, node, sizes)
        except (RuntimeError, ValueError):
            return self(torch.ops.aten.view.default, self.contiguous(node), sizes)

    def contiguous(self, node: fx.Node) -> fx.Node:
        """A row-major copy of `node`."""
        return self(torch.ops.aten.clone.default, node, memory_format=torch.contiguous_format)

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """`node` as `dtype`: itself where it has that dtype."""
        if value_of(node).dtype == dtype:
            return node
        return self(torch.ops.prims.convert_element_type.default, node, dtype)

    def emit_as(self, value: Any, target: Any, *args: Any) -> fx.Node:
        """Emit one call without inference: it has the `value` (and layout) of the replaced node."""
        with self.root.graph.inserting_before(self.root):
            node = self.root.graph.call_function(target, args)
        inherit(node, self._origins)
        node.meta["val"] = value
        self.emitted.append(node)
        return node

    def size(self, node: fx.Node, dim: int) -> fx.Node | int:
        """One size of a tensor: a number, or a node if it is symbolic."""
        size = value_of(node).shape[dim]
        if isinstance(size, int):
            return size
        return self(torch.ops.aten.sym_size.int, node, dim % value_of(node).dim())

    def undo(self) -> None:
        for node in reversed(self.emitted):
            self.root.graph.erase_node(node)


def _in_order(nodes: dict[fx.Node, None], root: fx.Node) -> list[fx.Node]:
    """The matched nodes, sources first and root last: the replacement inherits the root's line."""
    return [*(node for node in reversed(list(nodes)) if node is not root), root]


Replacement = Callable[..., fx.Node | None]


@dataclass(frozen=True, eq=False)
class Pattern:
    """One form of a family: what to find, under which condition, and its replacement.

    `replacement(rw, **bound)` emits calls through `rw` and returns the node that replaces the root,
    or None if it does not apply. `needs` are operators that the pattern cannot match without, as
    groups of alternatives.
    """

    family: str
    name: str
    find: PatternFunction
    replacement: Replacement
    guard: Guard = lambda match, context: True
    needs: tuple[frozenset[Any], ...] = ()

    @cached_property
    def term(self) -> Term:
        """The pattern function, called with a wildcard per parameter."""
        parameters = inspect.signature(self.find).parameters.values()
        return self.find(*(_wildcard(parameter) for parameter in parameters))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the wildcards, which are those of the replacement's parameters."""
        return tuple(inspect.signature(self.find).parameters)

    def occurs(self, targets: frozenset[Any]) -> bool:
        return all(not group.isdisjoint(targets) for group in self.needs)


def _wildcard(parameter: inspect.Parameter) -> Term:
    annotation = parameter.annotation
    is_number = annotation is Number or annotation == "Number"
    return Number(parameter.name) if is_number else Var(parameter.name)


def apply_patterns(gm: fx.GraphModule, patterns: Sequence[Pattern], context: PassContext) -> int:
    """Replace every match of `patterns`, first declared first; return how many were replaced."""
    graph = gm.graph
    targets = frozenset(node.target for node in graph.nodes if node.op == "call_function")
    by_root: dict[Any, list[Pattern]] = {}
    for pattern in patterns:
        if pattern.occurs(targets):
            for root in pattern.term.roots() & targets:
                by_root.setdefault(root, []).append(pattern)
    if not by_root:
        return 0
    count = 0
    erased: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        if node in erased or node.op != "call_function" or not node.users:
            continue
        for pattern in by_root.get(node.target, ()):
            removed = _apply(pattern, node, context)
            if removed is not None:
                erased |= removed
                count += 1
                break
    return count


def _apply(pattern: Pattern, root: fx.Node, context: PassContext) -> set[fx.Node] | None:
    """Replace `pattern` at `root`; return the erased nodes, or None if it does not match."""
    for match in pattern.term.match(root, Match({})):
        if not is_closed(root, match) or not pattern.guard(match, context):
            continue
        rewriter = Rewriter(root, match, context)
        new = pattern.replacement(rewriter, **{n: match.bound.get(n) for n in pattern.names})
        if new is None or not fits(root, new):
            rewriter.undo()
            continue
        substitute(root, new, context)
        return erase(match.nodes)
    return None


def is_closed(root: fx.Node, match: Match) -> bool:
    """Whether no node outside the match reads a node that would disappear.

    Views, copies and conversions may have other readers: they stay, and cost nothing new.
    """
    inside = set(match.nodes)
    for node in inside:
        if node is root or all(user in inside for user in node.users):
            continue
        if not (is_cheap(node) and not _depends_on(node, inside)):
            return False
    return not any(is_mutating(node.target) for node in inside)


def is_cheap(node: fx.Node) -> bool:
    return reshape_source(node) is not None or cast_source(node) is not None


def _depends_on(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether `node`, which stays, needs a computation inside the match."""
    while is_cheap(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
        if node not in inside:
            return False
    return True


def fits(root: fx.Node, new: fx.Node) -> bool:
    """Whether shape and dtype are equal. (A match may skip a conversion that changes them.)"""
    return difference(value_of(root), value_of(new), strides=False) is None


def substitute(root: fx.Node, new: fx.Node, context: PassContext) -> None:
    """Replace `root` by `new` in all its users; a graph's result keeps its strides."""
    context.infer.check(root, new, strides=False)
    users = list(root.users)
    returned = any(user.op == "output" for user in users)
    old = root.meta["val"]
    changed = difference(old, new.meta["val"]) is not None
    if changed and returned and isinstance(old, torch.Tensor):
        copy = context.infer.restride(root, new, old)
        if shared_by_results(root):  # views that are returned too are views of the copy
            new, changed = copy, False
        for user in users:
            if user.op == "output":
                user.replace_input_with(root, copy)
    root.replace_all_uses_with(new)
    if changed:
        context.infer.update([user for user in users if user.op == "call_function"], {new: old})


def erase(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Erase those of `nodes` that have no users left, users first; return the erased nodes."""
    removed: set[fx.Node] = set()
    waiting = set(nodes)
    while dead := [node for node in waiting if not node.users]:
        for node in dead:
            node.graph.erase_node(node)
        removed.update(dead)
        waiting.difference_update(dead)
    return removed
