"""The table of lowering rules.

A rule is a function `rule(lw, *args, **kwargs) -> Value | Size | tuple` registered for one or more
ATen overloads. Tensor arguments arrive as `Value`s, symbolic integers as sympy expressions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from dicp.target import DecisionKind
from dicp.torch_private import OpOverload, OpOverloadPacket

Rule: TypeAlias = Callable[..., Any]


class NoRule(Exception):
    """A rule cannot take this particular call; the node stays an eager ATen call."""


@dataclass(frozen=True)
class RuleEntry:
    function: Rule
    kind: DecisionKind


class RuleTable:
    """ATen overload -> lowering rule. Built once per module import, then only read."""

    def __init__(self) -> None:
        self._rules: dict[Any, RuleEntry] = {}
        self._named: dict[str, RuleEntry] = {}

    def register(self, *ops: Any, kind: DecisionKind = "compiled") -> Callable[[Rule], Rule]:
        """Register a rule for overloads, or for every overload of an overload packet."""

        def add(function: Rule) -> Rule:
            for op in ops:
                self.add(op, function, kind)
            return function

        return add

    def add(self, op: Any, function: Rule, kind: DecisionKind = "compiled") -> None:
        overloads: Iterable[Any] = (
            [getattr(op, name) for name in op.overloads()]
            if isinstance(op, OpOverloadPacket)
            else [op]
        )
        for overload in overloads:
            name = overload._schema.overload_name
            if isinstance(op, OpOverloadPacket) and "out" in name:
                continue
            self._rules[overload] = RuleEntry(function, kind)

    def add_named(self, name: str, function: Rule, kind: DecisionKind = "compiled") -> None:
        """A rule for `namespace::operator` of a library that may never be imported."""
        self._named[name] = RuleEntry(function, kind)

    def merged(self, *others: RuleTable) -> RuleTable:
        table = RuleTable()
        for source in (self, *others):
            table._rules.update(source._rules)
            table._named.update(source._named)
        return table

    def get(self, op: Any) -> RuleEntry | None:
        found = self._rules.get(op)
        if found is None and self._named and isinstance(op, OpOverload):
            return self._named.get(op._schema.name)
        return found

    def ops(self) -> frozenset[Any]:
        return frozenset(self._rules)
