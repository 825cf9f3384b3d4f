"""Results that overwrite an input: by an operator on its memory, or by using its buffer.

The first of three forms that applies: 1. the operator that computes the result has a form that
updates the input's memory (an update of a part, say); 2. the result is elementwise in the input, or
does not read it: it is written to the input's buffer; 3. the computed result is assigned to the
input's memory. All other readers of the old contents are ordered before. Where that is impossible,
or an eager call or a view needs the memory too, the result gets a buffer of its own and is copied
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dicp.graphop.builder import Builder
from dicp.graphop.program import LEAVES, EagerCall, IndexCheck, Item, Node, Result, Slot, Value
from dicp.origin import Origin


@dataclass(frozen=True, eq=False)
class Form:
    """A value that equals `source` except for a part, and how to write that part into `source`."""

    source: Value
    write: Callable[[Builder, Value], Value]
    unneeded: tuple[Node, ...] = ()
    """Operators that become unused: reads of the parts that do not change."""


Forms = Mapping[str, Callable[[Builder, Node], Form | None]]
"""Operator -> the function that gives its `Form`, or None where it has none."""


@dataclass(frozen=True)
class Writing:
    """The vendor's operators that are used to overwrite inputs."""

    forms: Forms
    elementwise: frozenset[str]
    """Elementwise operators: each element of the result depends on the elements at its position
    alone."""
    aliases: frozenset[str]
    """Operators whose result is their first operand's memory: mostly reshapes."""
    assign: Callable[[Builder, Value, Value], Value]
    """Emits the operator that assigns a value to memory."""


def in_place(builder: Builder, items: Sequence[Item], writing: Writing) -> list[Item]:
    """`items` in which every result that overwrites an input has one of the three forms."""
    if not any(isinstance(item, Result) and item.placement == "into_input" for item in items):
        return list(items)
    return _InPlace(builder, items, writing).run()


class _InPlace:
    def __init__(self, builder: Builder, items: Sequence[Item], writing: Writing) -> None:
        self.builder = builder
        self.items = list(items)
        self.writing = writing
        self.uses: dict[Value, list[Node]] = {}
        self.later: dict[Node, list[Node]] = {}
        """Operators that wait for this one and do not read it."""
        self.returned: dict[Value, list[Result]] = {}
        self.leaves: dict[Slot, list[Value]] = {}
        self.held: dict[Slot, list[Slot]] = {}
        """Slots that steps other than operators read, and their views and results."""
        self.buffers: set[Node] = set()
        for item in self.items:
            self._note(item)

    def _note(self, item: Item) -> None:
        if isinstance(item, Node):
            for value in item.operands():
                self.uses.setdefault(value, []).append(item)
            bound = item.attrs.get("bound")
            if item.kind == "input" and bound is not None:
                self.leaves.setdefault(bound.slot, []).append(item.outputs[0])
        elif isinstance(item, Result):
            self.returned.setdefault(item.value, []).append(item)
        elif isinstance(item, EagerCall):
            for slot in item.reads:
                self.held.setdefault(slot, []).extend(item.outs)
        elif isinstance(item, IndexCheck):
            self.held.setdefault(item.source, [])
        else:
            self.held.setdefault(item.source, []).append(item.slot)

    def run(self) -> list[Item]:
        for result in [
            r for r in self.items if isinstance(r, Result) and r.placement == "into_input"
        ]:
            self._decide_placement(result)
        return _ordered(self.items)

    # ---- one result -----------------------------------------------------------------------------

    def _decide_placement(self, result: Result) -> None:
        result = next(
            r for r in self._results() if r.slot is result.slot and r.placement == "into_input"
        )
        leaves = self.leaves.get(result.slot, [])
        kept = any(self._is_returned(leaf, result) for leaf in leaves)
        if result.slot in self.held or kept or len(leaves) > 1:
            self._copy_afterwards(result)
            return
        leaf = leaves[0] if leaves else None
        written = self._written(result.value, leaf) if leaf is not None else None
        if written is not None:
            self._replace(result, replace(result, value=written, placement="in_place"))
        elif not self._as_buffer(result, leaf):
            self._assign(result, leaf)

    def _results(self) -> Iterator[Result]:
        return (item for item in self.items if isinstance(item, Result))

    def _is_returned(self, value: Value, but: Result) -> bool:
        """Whether the graph returns this memory besides."""
        shown = [value, *self._aliases(value)]
        return any(r is not but for v in shown for r in self.returned.get(v, []))

    def _replace(self, old: Item, *new: Item) -> None:
        place = next(k for k, item in enumerate(self.items) if item is old)
        self.items[place : place + 1] = new
        if isinstance(old, Result):
            self.returned[old.value].remove(old)
        for item in new:
            self._note(item)

    # ---- an operator on the memory --------------------------------------------------------------

    def _written(self, value: Value, leaf: Value) -> Value | None:
        """`value` computed by an update of `leaf`'s memory."""
        if value is leaf:
            return leaf
        form_of = self.writing.forms.get(value.node.kind)
        form = form_of(self.builder, value.node) if form_of is not None else None
        if form is None or value.node in self.buffers:
            return None
        gone = {value.node, *form.unneeded}
        readers = [n for n in self._readers(form.source) if n not in gone]
        kept = any(self.returned.get(v) for p in form.unneeded for v in p.outputs)
        if kept or any(set(self._users(p)) - gone for p in form.unneeded):
            return None
        if form.source is not leaf and self.returned.get(form.source):
            return None
        if set(readers) & self._descendants(value.node):
            return None
        memory = self._written(form.source, leaf)
        if memory is None:
            return None
        made, new = self._made(value.node, lambda: form.write(self.builder, memory))
        new.node.after = (*value.node.after, *readers)
        self._instead(value, new, made, gone)
        return new

    def _made(self, near: Node, make: Callable[[], Value]) -> tuple[list[Item], Value]:
        self.builder.nodes = []
        self.builder.origin = near.origin
        value = make()
        return self.builder.nodes, value

    def _instead(self, old: Value, new: Value, made: Sequence[Item], gone: set[Node]) -> None:
        """Put `made` in the place of the operator of `old`, and remove `gone`."""
        place = next(k for k, item in enumerate(self.items) if item is old.node)
        self.items[place:place] = made
        self.items = [i for i in self.items if not (isinstance(i, Node) and i in gone)]
        for node in gone:
            for operand in node.operands():
                self.uses[operand] = [n for n in self.uses.get(operand, []) if n is not node]
        for item in made:
            self._note(item)
        for reader in new.node.after:
            self.later.setdefault(reader, []).append(new.node)
        for node in self.uses.pop(old, []):
            node.rename({old: new})
            self.uses.setdefault(new, []).append(node)
        for result in list(self.returned.get(old, [])):
            if result.placement != "into_input":
                self._replace(result, replace(result, value=new))

    # ---- the memory as a buffer -----------------------------------------------------------------

    def _as_buffer(self, result: Result, leaf: Value | None) -> bool:
        maker = result.value
        while maker.node.kind in self.writing.aliases:
            maker = maker.node.operands()[0]
        node = maker.node
        if node.kind in LEAVES or node in self.buffers:
            return False
        if leaf is not None:
            before = self._ancestors(node)
            readers = self._readers(leaf)
            if set(readers) & self._descendants(node) or not self._is_elementwise(leaf, before):
                return False
            self._wait(node, [n for n in readers if n not in before])
        self.buffers.add(node)
        return True

    def _wait(self, node: Node, readers: Sequence[Node]) -> None:
        node.after = (*node.after, *readers)
        for reader in readers:
            self.later.setdefault(reader, []).append(node)

    def _is_elementwise(self, leaf: Value, nodes: set[Node]) -> bool:
        """Whether each element of the values that `nodes` compute from `leaf` depends on its own
        element alone.

        Such operators never reduce the number of elements: a result of the leaf's size was never
        broadcast.
        """
        between = self._descendants_of(leaf) & nodes
        return all(node.kind in self.writing.elementwise | self.writing.aliases for node in between)

    # ---- an assignment, or a copy ---------------------------------------------------------------

    def _assign(self, result: Result, leaf: Value | None) -> None:
        near = result.value.node
        made: list[Item] = []
        if leaf is None:
            made, leaf = self._made(near, lambda: self.builder.input(result.slot, result.order))
        memory = leaf
        readers = self._readers(memory)
        more, new = self._made(
            near, lambda: self.writing.assign(self.builder, memory, result.value)
        )
        self._replace(result, *made, *more, replace(result, value=new, placement="in_place"))
        before = self._ancestors(new.node)
        self._wait(new.node, [n for n in readers if n not in before])

    def _copy_afterwards(self, result: Result) -> None:
        slot = Slot(f"{result.slot.name}_new", result.slot.fake)
        origin = result.value.node.origin or Origin("", "aten.copy_.default", "")
        copy = EagerCall(
            torch.ops.aten.copy_.default, (result.slot, slot), {}, [], origin,
            [result.slot, slot], mutates=True,
        )  # fmt: skip
        self._replace(result, replace(result, slot=slot, placement="fresh"), copy)

    # ---- who reads what -------------------------------------------------------------------------

    def _aliases(self, value: Value) -> list[Value]:
        found: list[Value] = []
        for node in self.uses.get(value, []):
            if node.kind in self.writing.aliases and node.operands()[0] is value:
                found += [node.outputs[0], *self._aliases(node.outputs[0])]
        return found

    def _readers(self, value: Value) -> list[Node]:
        """Operators that read this memory."""
        shown = [value, *self._aliases(value)]
        readers = dict.fromkeys(n for v in shown for n in self.uses.get(v, []))
        return [n for n in readers if n.kind not in self.writing.aliases]

    def _users(self, node: Node) -> list[Node]:
        """Operators that read a result of `node`, or the result of an eager call on it."""
        found = [n for value in node.outputs for n in self.uses.get(value, [])]
        slots = [
            r.slot for v in node.outputs for r in self.returned.get(v, []) if r.placement == "fresh"
        ]
        seen: set[Slot] = set()
        while slots:
            slot = slots.pop()
            if slot not in seen:
                seen.add(slot)
                found += [leaf.node for leaf in self.leaves.get(slot, [])]
                slots += self.held.get(slot, [])
        return found

    def _descendants(self, node: Node) -> set[Node]:
        """Operators that run after `node`, by what they read or wait for."""
        return _reached(node, lambda n: [*self._users(n), *self.later.get(n, [])])

    def _descendants_of(self, value: Value) -> set[Node]:
        found: set[Node] = set()
        for node in self.uses.get(value, []):
            found |= {node} | _reached(node, self._users)
        return found

    def _ancestors(self, node: Node) -> set[Node]:
        """`node` and the operators that it reads, directly or not."""
        return {node} | _reached(node, lambda n: [v.node for v in n.operands()])


def _reached(start: Node, step: Callable[[Node], Sequence[Node]]) -> set[Node]:
    found: set[Node] = set()
    open_nodes = [start]
    while open_nodes:
        for node in step(open_nodes.pop()):
            if node not in found:
                found.add(node)
                open_nodes.append(node)
    return found


def _ordered(items: Sequence[Item]) -> list[Item]:
    """The items, each after those it reads or must follow, else in their present order."""
    needs = _needs(items)
    done: set[Item] = set()
    ordered: list[Item] = []
    for item in items:
        stack: list[tuple[Item, Iterator[Item]]] = [(item, iter(needs[item]))]
        while stack:
            current, needed = stack[-1]
            missing = next((n for n in needed if n in needs and n not in done), None)
            if missing is not None:
                stack.append((missing, iter(needs[missing])))
                continue
            stack.pop()
            if current not in done:
                done.add(current)
                ordered.append(current)
    return ordered


def _needs(items: Sequence[Item]) -> dict[Item, list[Item]]:
    """The items that each item must follow; eager calls stay in order."""
    maker: dict[Slot, Item] = {}
    needs: dict[Item, list[Item]] = {}
    last: EagerCall | None = None
    for item in items:
        if isinstance(item, EagerCall):
            made, read = item.outs, item.reads
            needs[item] = [] if last is None else [last]
            last = item
        elif isinstance(item, Node):
            bound = item.attrs.get("bound")
            made, read = [], [bound.slot] if bound is not None else []
            needs[item] = [*(v.node for v in item.operands()), *item.after]
        elif isinstance(item, Result):
            made, read = [item.slot] if item.placement == "fresh" else [], []
            needs[item] = [item.value.node]
        else:
            made = [] if isinstance(item, IndexCheck) else [item.slot]
            read, needs[item] = [item.source], []
        needs[item] += [maker[slot] for slot in read if slot in maker]
        maker.update(dict.fromkeys(made, item))
    return needs
