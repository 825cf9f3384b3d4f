"""How a target handles every ATen operator: the table behind `python -m dicp ops`.

An operator with a rule is compiled, a library call or a view; one without is decomposed where
PyTorch has a decomposition; any other stays an eager ATen call, for a reason listed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dicp.dynamo_bridge.decompose import decompositions
from dicp.dynamo_bridge.trial_calls import is_refused
from dicp.operator_choice import ASKED_EAGER, OperatorChoice
from dicp.target import NO_RULE, Target
from dicp.torch_private import OpOverload, is_composite, overloads_of, schema_of

aten = torch.ops.aten


@dataclass(frozen=True)
class OperatorRow:
    """One operator overload: compiled, library, view, decomposed or eager, and why."""

    op: str
    decision: str
    reason: str


COMPLEX = "its result or argument is complex, for which no code is generated"
DATA_DEPENDENT = "the size of its result depends on data"

EAGER_REASONS: dict[Any, str] = {
    aten._fft_c2r: COMPLEX,
    aten._fft_c2c: COMPLEX,
    aten._fft_r2c: COMPLEX,
    aten._local_scalar_dense: "it brings one element to the host, where Python decides on it",
    aten.nonzero: DATA_DEPENDENT,
    aten.masked_select: DATA_DEPENDENT,
    aten._unique2: DATA_DEPENDENT,
    aten.repeat_interleave: DATA_DEPENDENT,
    aten.bincount: DATA_DEPENDENT,
    aten.resize_: "it changes the size of a tensor in place",
}
"""Why operators stay eager by decision, by overload packet."""

PAIRS = "on pairs of real numbers, if all operators on the same complex values can be"
ON_PAIRS = frozenset({
    aten.complex.default, aten.polar.default, aten.view_as_complex.default,
    aten.view_as_real.default,
})  # fmt: skip
"""Operators from real to complex values or back."""
ENDS_WITHOUT_RULES = f"{NO_RULE}, nor for all that it is decomposed into"
SIZES = "a size, known when the graph is launched"
IN_PLACE = "functionalized: it becomes its functional form and a copy"


def operator_table(target: Target, choice: OperatorChoice | None = None) -> list[OperatorRow]:
    """Every core ATen overload and every overload `target` has a rule for, ordered by name."""
    choice = choice or OperatorChoice()
    ops = {str(op): op for op in (*core_overloads(), *target.facts.keep) if is_operator(op)}
    return [_chosen(operator_row(ops[name], target), ops[name], choice) for name in sorted(ops)]


def is_operator(op: Any) -> bool:
    return isinstance(op, OpOverload)


def core_overloads() -> Iterator[Any]:
    """The overloads that PyTorch tags as core ATen."""
    for op in overloads_of("aten"):
        if torch.Tag.core in op.tags:
            yield op


def _chosen(row: OperatorRow, op: Any, choice: OperatorChoice) -> OperatorRow:
    """The row with what the user chooses for the operator."""
    if choice.wants_eager(op):
        return OperatorRow(row.op, "eager", ASKED_EAGER)
    if row.decision in ("eager", "decomposed") and choice.wants_native(op):
        breach = "a warning" if choice.prefers else "an error"
        return OperatorRow(row.op, row.decision, f"{row.reason} ({breach}: native_ops names it)")
    return row


def operator_row(op: Any, target: Target) -> OperatorRow:
    """The decision on one overload, whatever the user chooses."""
    name = str(op)
    kind = target.rule_kind(op)
    if kind is not None:
        return OperatorRow(name, kind, "")
    if name.startswith("aten.sym_"):
        return OperatorRow(name, "compiled", SIZES)
    if op in ON_PAIRS:
        return OperatorRow(name, "decomposed", PAIRS)
    reason = EAGER_REASONS.get(op.overloadpacket)
    if reason is not None:
        return OperatorRow(name, "eager", reason)
    if op in decompositions(target):
        has_other_form = schema_of(op).is_mutable or is_composite(op)
        if not has_other_form and is_refused(op, target):
            return OperatorRow(name, "eager", ENDS_WITHOUT_RULES)
        return OperatorRow(name, "decomposed", "by PyTorch's decomposition")
    if schema_of(op).is_mutable:
        return OperatorRow(name, "decomposed", IN_PLACE)
    if is_composite(op):
        return OperatorRow(name, "decomposed", "composite: made of other operators")
    return OperatorRow(name, "eager", NO_RULE)
