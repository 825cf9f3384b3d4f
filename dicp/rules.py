"""Tables of conversion rules: ATen overload -> rule, and the decision on the operator.

A rule is a function `rule(builder, *args, **kwargs)` of the operator's own arguments, registered
for one or more overloads. Tensors are passed as values of the builder's IR, symbolic integers as
its sizes; a rule returns a value, or a tuple for several results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from dicp.torch_private import OpOverload, OpOverloadPacket, schema_of

DecisionKind = Literal["compiled", "library", "view", "eager"]
Rule: TypeAlias = Callable[..., Any]


class NoRule(Exception):
    """A rule cannot take this particular call; the node stays an eager ATen call."""


@dataclass(frozen=True)
class RuleEntry:
    function: Rule
    kind: DecisionKind


class RuleTable:
    """Rules by operator; filled when its module is imported, then only read. A table has one rule
    for an operator; `merged` lays another table's over it."""

    def __init__(self) -> None:
        self._rules: dict[Any, RuleEntry] = {}
        self._named: dict[str, RuleEntry] = {}

    def register(self, *ops: Any, kind: DecisionKind = "compiled") -> Callable[[Rule], Rule]:
        """Register a rule for overloads, or for every overload of an overload packet.

        Raises TypeError and ValueError as `add`.
        """
        _check_operators(ops)

        def add(function: Rule) -> Rule:
            for op in ops:
                self.add(op, function, kind)
            return function

        return add

    def add(self, op: Any, function: Rule, kind: DecisionKind = "compiled") -> None:
        """A rule for one overload or packet.

        Raises TypeError for anything else, ValueError for a kind that is none of DecisionKind and
        for an operator that has a rule.
        """
        _check_operators([op])
        if kind not in get_args(DecisionKind):
            raise ValueError(f"{kind!r} is none of {', '.join(get_args(DecisionKind))}")
        for overload in functional_overloads(op):
            if overload in self._rules:
                raise ValueError(f"{overload} has a rule in this table; `merged` replaces it")
            self._rules[overload] = RuleEntry(function, kind)

    def update(self, rules: Mapping[Any, Rule]) -> None:
        """Rules that are one expression each, by operator or by several that share one."""
        for ops, function in rules.items():
            for op in ops if isinstance(ops, tuple) else (ops,):
                self.add(op, function)

    def add_named(self, name: str, function: Rule, kind: DecisionKind = "compiled") -> None:
        """A rule for `namespace::operator` of a library that may never be imported."""
        self._named[name] = RuleEntry(function, kind)

    def merged(self, *others: RuleTable) -> RuleTable:
        table = RuleTable()
        for source in (self, *others):
            table._rules.update(source._rules)
            table._named.update(source._named)
        return table

    def only(self, *ops: Any) -> RuleTable:
        """The same rules for these overloads, or for the overloads of these packets, alone.

        Raises ValueError for an operator that has none.
        """
        table = RuleTable()
        for op in ops:
            found = [o for o in functional_overloads(op) if o in self._rules]
            if not found:
                raise ValueError(f"no rule for {op} is among these; register one of your own")
            table._rules.update((o, self._rules[o]) for o in found)
        return table

    def with_kind(self, kind: DecisionKind, ops: Iterable[Any]) -> RuleTable:
        """The same rules, those of `ops` with another kind."""
        table = self.merged()
        for op in ops:
            if op in table._rules:
                table._rules[op] = RuleEntry(table._rules[op].function, kind)
        return table

    def get(self, op: Any) -> RuleEntry | None:
        found = self._rules.get(op)
        if found is None and self._named and isinstance(op, OpOverload):
            return self._named.get(schema_of(op).name)
        return found

    def kind(self, op: Any) -> DecisionKind | None:
        """The decision on `op` if its arguments allow it; None if there is no rule."""
        entry = self.get(op)
        return None if entry is None else entry.kind

    def ops(self) -> frozenset[Any]:
        return frozenset(self._rules)


def _check_operators(ops: Iterable[Any]) -> None:
    for op in ops:
        if not isinstance(op, (OpOverload, OpOverloadPacket)):
            raise TypeError(f"a rule is for an operator such as torch.ops.aten.sqrt, not {op!r}")


def functional_overloads(op: Any) -> Iterable[Any]:
    """The overload itself, or those of a packet that write to none of their arguments."""
    if not isinstance(op, OpOverloadPacket):
        return [op]
    found = (getattr(op, name) for name in op.overloads())
    return [overload for overload in found if not schema_of(overload).is_mutable]


def of_vectors(rule: Rule) -> Rule:
    """The rule of an operator along an axis, of tensors without axes as of vectors of one element.

    Not a constant: the softmax of a NaN or of an infinite number is NaN. The builder has a method
    `reshape(value, sizes)`, and its values have `ndim`.
    """

    @functools.wraps(rule)
    def widened(builder: Any, *args: Any, **kwargs: Any) -> Any:
        ranks = [getattr(x, "ndim", None) for x in args]
        if any(ranks):
            return rule(builder, *args, **kwargs)
        pairs = zip(args, ranks, strict=True)
        vectors = [x if rank is None else builder.reshape(x, [1]) for x, rank in pairs]
        return builder.reshape(rule(builder, *vectors, **kwargs), [])

    return widened
