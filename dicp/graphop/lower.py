"""From an FX graph to a pool of graph operators with eager calls between, then to a program."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate, map_arg

from dicp.domains import outside_domain
from dicp.effects import is_random, is_view, never_copies
from dicp.graphop.bounds import IndexChecks
from dicp.graphop.builder import Builder
from dicp.graphop.operators import Ops
from dicp.graphop.program import EagerCall, Item, Restride, Result, Slot, Value, View
from dicp.graphop.strides import dense_order, inverse
from dicp.indices import Site
from dicp.operator_choice import ASKED_EAGER, check_eager, kept_eager
from dicp.origin import origin_of
from dicp.rule_errors import InvalidResult, naming_rule, paired_results
from dicp.rules import NoRule, RuleEntry, RuleTable
from dicp.target import NO_RULE, Decision, LowerContext, NodeReport, is_number, unreadable
from dicp.torch_private import (
    OpOverload,
    expression_of,
    hint_of,
    is_object,
    is_plain_symbol,
    schema_of,
)


@dataclass(eq=False)
class Entry:
    """One tensor of the FX graph: as a tensor in memory, as a value of a graph, or both."""

    fake: torch.Tensor
    slot: Slot | None = None
    value: Value | None = None
    base: Entry | None = None
    """What it is a view of."""
    materialized: bool = False
    """Whether it must be in memory as a whole: several results are views of it, or an operator
    reads its memory between the elements of a view."""


class Lowering:
    """Lowers one FX graph. Afterwards `items` is the pool and `outputs` what the graph returns."""

    def __init__(
        self,
        gm: fx.GraphModule,
        context: LowerContext,
        builder: Builder,
        rules: RuleTable,
        decide: Callable[[fx.Node], Decision],
    ) -> None:
        self.gm = gm
        self.context = context
        self.builder = builder
        self.rules = rules
        self.decide = decide
        self.env: dict[fx.Node, Any] = {}
        self.items: list[Item] = builder.nodes
        self.inputs: list[Slot | None] = []
        self.symbols: dict[str, list[int]] = {}
        self.constants: dict[Slot, torch.Tensor] = {}
        self.outputs: list[Any] = []
        self.reports: list[NodeReport] = []
        self._materialized = _held_in_memory(gm.graph)
        self._count = 0
        checked = context.config.check_bounds and not builder.checks_indices
        self._checks = IndexChecks(builder) if checked and isinstance(builder, Ops) else None

    def run(self) -> Lowering:
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                self.env[node] = self._placeholder(node)
            elif node.op == "get_attr":
                self.env[node] = self._attribute(node)
            elif node.op == "output":
                self._output(node)
            else:
                self.env[node] = self._call_node(node)
                if node in self._materialized and isinstance(self.env[node], Entry):
                    self.env[node].materialized = True
        self.items += self._checks.items() if self._checks is not None else []
        return self

    # ---- leaves ---------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> Any:
        position = len(self.inputs)
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor) and not is_object(val):
            self.inputs.append(None)
            if isinstance(val, torch.SymInt):
                self._bind_symbol(val, [position])
            return val
        slot = Slot(f"in{position}", val)
        self.inputs.append(slot)
        for axis, size in enumerate(getattr(val, "shape", ())):
            self._bind_symbol(size, [position, axis])
        return Entry(val, slot)

    def _bind_symbol(self, size: Any, place: list[int]) -> None:
        if is_plain_symbol(size):
            self.symbols.setdefault(str(expression_of(size)), place)

    def _attribute(self, node: fx.Node) -> Any:
        target = operator.attrgetter(str(node.target))(self.gm)
        if not isinstance(target, torch.Tensor):
            return target
        slot = Slot(f"constant{len(self.constants)}", node.meta.get("val", target))
        self.constants[slot] = target
        return Entry(slot.fake, slot)

    # ---- calls ----------------------------------------------------------------------------------

    def _call_node(self, node: fx.Node) -> Any:
        val = node.meta.get("val")
        if _is_getitem(node):
            source = self._map(node.args[0])
            return source[node.args[1]] if isinstance(source, (list, tuple)) else source
        if is_number(val):
            if not isinstance(node.target, OpOverload) or _only_sizes(node):
                return val
        self.builder.origin = origin_of(node)
        if self._overwrites_input(node):
            return self._store(node)
        decision = self._decision(node)
        result: Any = None
        if decision.kind not in ("eager", "library"):
            entry = self.rules.get(node.target)
            try:
                with naming_rule(node, self.context.target, entry):
                    result = self._convert(node, entry, val)
            except NoRule as reason:  # nodes that the rule has emitted so far stay unused
                decision = Decision("eager", str(reason))
        if decision.kind == "eager":
            check_eager(node, decision.reason, self.context.config, self.context.target)
        if decision.kind in ("eager", "library"):
            result = self._eager(node, val)
        self._report(node, decision)
        return result

    def _overwrites_input(self, node: fx.Node) -> bool:
        """Whether a copy at the end writes a computed result over a dense input of its type."""
        if node.target is not torch.ops.aten.copy_.default or node.users or kept_eager(node):
            return False
        if not self.builder.writes_over_inputs:
            return False
        place, source = node.args[0], self._map(node.args[1])
        if not isinstance(place, fx.Node) or place.op != "placeholder" or unreadable(node):
            return False
        entry = self.env[place]
        if not isinstance(source, Entry) or source.value is None or source.slot is not None:
            return False
        fake = entry.fake
        same = source.fake.dtype == fake.dtype and source.fake.dim() == fake.dim()
        if not same or any(self.builder.same(size, 0) for size in fake.shape):
            return False
        shape = self.builder.same_shape(source.fake.shape, fake.shape)
        dense = dense_order(self.builder, fake) is not None
        return shape and dense and _is_last_use(place, node)

    def _store(self, node: fx.Node) -> None:
        """The result overwrites the input; `in_place` decides how."""
        entry, source = self._map(node.args[0]), self._map(node.args[1])
        order = dense_order(self.builder, entry.fake)
        assert order is not None
        value = self.builder.transpose(source.value, order)
        self.items.append(Result(value, entry.slot, order, "into_input"))
        self._report(node, Decision("compiled", "written over an input by its graph"))

    def _decision(self, node: fx.Node) -> Decision:
        if kept_eager(node):
            return Decision("eager", ASKED_EAGER)
        if node.target is torch.ops.aten.copy_.default:
            return Decision("library", "a result is written over an input after its graph")
        if getattr(node.target, "overloadpacket", None) is torch.ops.aten._assert_async:
            return Decision("library", "an assertion raises its error from the host")
        reason = unreadable(node)
        return Decision("eager", reason) if reason else self.decide(node)

    def _convert(self, node: fx.Node, rule: RuleEntry | None, val: Any) -> Any:
        if rule is None:
            raise NoRule(NO_RULE)
        if _reads_input_by_offset(node):
            raise NoRule("an offset into the storage of an input")
        self.builder.meta = val
        self.builder.is_read = lambda index: _is_read(node, index)
        given = [self._map(argument) for argument in node.args]
        self.builder.sources = [e.fake if isinstance(e, Entry) else None for e in given]
        sites = self._checks.needed(node) if self._checks is not None else []
        args = self._arguments(node.args, sites)
        kwargs = self._arguments(dict(node.kwargs), sites)
        if outside_domain(node.target, args, kwargs, self.builder.proves):
            raise NoRule("arguments that eager may refuse")
        result = rule.function(self.builder, *args, **kwargs)
        if self._checks is not None:
            self._checks.add_divisor(node, args)
        for site in sites:
            self._checks.add(node, site, self.value(self.env[site.node]))  # type: ignore[union-attr]
        if not isinstance(val, (tuple, list)):
            entry = self._checked(result, val)
            entry.base = self._base(node)
            return entry
        paired_results(node, result)
        base = self._base(node)
        entries: list[Entry | None] = []
        for index, (one, fake) in enumerate(zip(result, val, strict=True)):
            if one is None and isinstance(fake, torch.Tensor) and _is_read(node, index):
                raise NoRule(f"result {index} has no graph operator")
            if one is None or fake is None:
                entries.append(None)
                continue
            entry = self._checked(one, fake)
            entry.base = base
            entries.append(entry)
        return entries

    def _arguments(self, given: Any, sites: Sequence[Site]) -> Any:
        """A rule's arguments: tensors as values, those of `sites` as indices within bounds."""

        def value(entry: Entry | Slot) -> Any:
            if isinstance(entry, Slot):
                return entry.fake
            found = self.value(entry)
            for site in sites:
                if self.env[site.node] is entry and self._checks is not None:
                    found = self._checks.contained(site, found)
            return found

        return self._map(given, value)

    def _checked(self, value: Any, fake: torch.Tensor) -> Entry:
        """`value` for the FX tensor `fake`; raises InvalidResult if they differ."""
        alike = isinstance(value, Value) and value.dtype == fake.dtype
        pairs = zip(value.shape, fake.shape, strict=False) if alike else ()
        same = all(_may_be_same(self.builder, a, b) for a, b in pairs)
        if not alike or not same or value.ndim != fake.dim():
            raise InvalidResult(value, fake, self.builder.meaning_of(value))
        return Entry(fake, value=value)

    def _base(self, node: fx.Node) -> Entry | None:
        """The entry whose memory this node's result shares, if it is a view."""
        if not is_view(node.target) or not isinstance(node.args[0], fx.Node):
            return None
        source, val = self.env.get(node.args[0]), node.meta.get("val")
        shares = never_copies(node.target) or val.dtype == getattr(source, "fake", val).dtype
        return source if isinstance(source, Entry) and shares else None

    def _eager(self, node: fx.Node, val: Any) -> Any:
        origin = origin_of(node)
        reads: list[Slot] = []

        def slot_of(entry: Entry | Slot) -> Slot:
            slot = entry if isinstance(entry, Slot) else self.slot(entry)
            reads.append(slot)
            return slot

        args = self._map(tuple(node.args), slot_of)
        kwargs = self._map(dict(node.kwargs), slot_of)
        outs: list[Slot] = []

        def receive(fake: Any) -> Any:
            if isinstance(fake, (tuple, list)):
                return [receive(f) for f in fake]
            slot = Slot(self._slot_name(), fake)
            outs.append(slot)
            if is_number(fake):  # rules take what is known of it, calls the number
                return slot
            return Entry(fake, slot) if isinstance(fake, torch.Tensor) else None

        result = receive(val)
        schema = schema_of(node.target)
        # a call without results has an effect: an assertion, say
        mutates = schema is None or schema.is_mutable or val is None
        self.items.append(
            EagerCall(
                node.target, args, kwargs, outs, origin, reads, mutates, is_random(node.target)
            )
        )
        return result

    def _map(self, value: Any, leaf: Callable[[Any], Any] | None = None) -> Any:
        """`value` with nodes replaced by their entries, and each tensor mapped by `leaf`, as is
        each slot of a number that an eager call returns."""
        found: Any = map_arg(value, self.env.__getitem__)
        if leaf is None:
            return found
        return map_aggregate(found, lambda v: leaf(v) if isinstance(v, (Entry, Slot)) else v)

    # ---- tensors and values ---------------------------------------------------------------------

    def _slot_name(self) -> str:
        self._count += 1
        return f"t{self._count}"

    def value(self, entry: Entry) -> Value:
        """The tensor as a value of a graph."""
        if entry.value is None:
            assert entry.slot is not None
            if entry.fake.layout != torch.strided:
                raise NoRule(f"{entry.fake.layout} tensor")
            order = dense_order(self.builder, entry.fake) or tuple(range(entry.fake.dim()))
            leaf = self.builder.input(entry.slot, order)
            entry.value = self.builder.transpose(leaf, inverse(order))
        return entry.value

    def slot(self, entry: Entry) -> Slot:
        """The tensor in memory, with the strides the FX graph gives it."""
        if entry.slot is not None:
            return entry.slot
        base = entry.base
        while base is not None and base.slot is None and base.base is not None:
            base = base.base
        if base is not None and base.materialized:
            self.slot(base)  # first in memory, for the others to be views of it
        slot = Slot(self._slot_name(), entry.fake)
        if base is not None and base.slot is not None and self._is_aligned(base, entry):
            self.items.append(View(slot, base.slot))
        else:
            self._add_result(entry, slot)
        entry.slot = slot
        return slot

    def _is_aligned(self, base: Entry, view: Entry) -> bool:
        """Whether `view` begins at a whole element of its dtype: inputs may begin anywhere."""
        return base.fake.dtype == view.fake.dtype or base.slot not in self.inputs

    def _add_result(self, entry: Entry, slot: Slot) -> None:
        value = entry.value
        assert value is not None
        order = dense_order(self.builder, entry.fake)
        if order is None:
            inner = Slot(self._slot_name(), value.fake)
            self.items += [Result(value, inner, tuple(range(value.ndim))), Restride(slot, inner)]
            return
        self.builder.origin = value.node.origin
        value = self.builder.transpose(value, order)
        self.items.append(Result(value, slot, order))

    def _output(self, node: fx.Node) -> None:
        for item in node.args[0]:  # type: ignore[union-attr]
            value = self._map(item)
            self.outputs.append(self.slot(value) if isinstance(value, Entry) else value)

    # ---- reports --------------------------------------------------------------------------------

    def _report(self, node: fx.Node, decision: Decision) -> None:
        self.reports.append(NodeReport(origin_of(node), decision.kind, decision.reason))


_READ_MEMORY = frozenset({
    torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_copy.default,
    torch.ops.aten.as_strided_scatter.default,
})  # fmt: skip
"""Operators that read the memory of their first argument, also between its elements."""


def _reads_input_by_offset(node: fx.Node) -> bool:
    """Whether an operator reads an input from a place in its storage: where the input begins there
    is known at run time only."""
    if node.target not in _READ_MEMORY or _viewed(node.args[0]).op != "placeholder":  # type: ignore[arg-type]
        return False
    position = 4 if node.target is torch.ops.aten.as_strided_scatter.default else 3
    return node.kwargs.get("storage_offset", (*node.args, None, None)[position]) is not None


def _held_in_memory(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose memory several of the graph's results share, or an operator reads by
    strides."""
    counts = Counter(_viewed(node) for node in graph.output_node().all_input_nodes)
    read = {_viewed(n.args[0]) for n in graph.nodes if n.target in _READ_MEMORY}  # type: ignore[arg-type]
    return read | {node for node, count in counts.items() if count > 1}


def _viewed(node: fx.Node) -> fx.Node:
    """The tensor that a chain of views begins with."""
    while True:
        item = _is_getitem(node) and isinstance(node.args[0], fx.Node)
        call = node.args[0] if item else node
        if not (is_view(call.target) and isinstance(call.args[0], fx.Node)):
            return node
        node = call.args[0]


def _may_be_same(builder: Builder, left: Any, right: Any) -> bool:
    """Equal, or equal for the sizes the graph was traced with where nothing else is known."""
    if builder.same(left, right):
        return True
    symbolic = isinstance(left, torch.SymInt) or isinstance(right, torch.SymInt)
    return symbolic and hint_of(left) == hint_of(right)


def _is_last_use(place: fx.Node, node: fx.Node) -> bool:
    """Whether no node after `node` but the graph's output reads or writes `place`."""
    later = node.next
    while later.op != "output":
        if place in later.all_input_nodes:
            return False
        later = later.next
    return True


def _is_getitem(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _only_sizes(node: fx.Node) -> bool:
    return str(node.target).startswith("aten.sym_")


def _is_read(node: fx.Node, index: int) -> bool:
    """Whether result `index` of a call with several results is read."""
    return any(not _is_getitem(user) or user.args[1] == index for user in node.users)
