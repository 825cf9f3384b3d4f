"""ATen overload -> conversion rule: one table per vendor.

A rule is a function `rule(builder, *args, **kwargs)` of the operator's own arguments: tensors come
as values, symbolic sizes as they are. It returns a value, or a tuple for several results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dicp.torch_private import OpOverload, OpOverloadPacket

Rule = Callable[..., Any]


class RuleTable:
    """Filled once at import, then only read."""

    def __init__(self, *tables: RuleTable) -> None:
        self._rules: dict[Any, Rule] = {}
        for table in tables:
            self._rules.update(table._rules)

    def rule(self, *ops: Any) -> Callable[[Rule], Rule]:
        """Register a function for overloads, or for every functional overload of a packet."""

        def add(function: Rule) -> Rule:
            for op in ops:
                self.add(op, function)
            return function

        return add

    def add(self, op: Any, function: Rule) -> None:
        for overload in overloads(op):
            self._rules[overload] = function

    def get(self, op: Any) -> Rule | None:
        return self._rules.get(op)

    def ops(self) -> frozenset[Any]:
        return frozenset(self._rules)


def overloads(op: Any) -> Iterable[Any]:
    """The overload itself, or those of a packet that take tensors and write to none."""
    if isinstance(op, OpOverload):
        return [op]
    assert isinstance(op, OpOverloadPacket), op
    found = [getattr(op, name) for name in op.overloads()]
    return [o for o in found if not o._schema.is_mutable and _takes_tensors(o)]


def _takes_tensors(overload: Any) -> bool:
    return any("Tensor" in str(argument.type) for argument in overload._schema.arguments)
