"""Effects of operators: whether one returns a view, writes, or draws random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from dicp.torch_private import OpOverload, fills_uninitialized, schema_of

aten = torch.ops.aten

_ALIASES_BEYOND_SCHEMA = frozenset({"_unsafe_view", "lift_fresh"})
"""Operators whose result shares storage with the first argument, which their schema omits."""

_MAY_COPY = frozenset({"reshape", "contiguous", "to", "flatten"})
"""Operators that return a view or a copy, depending on strides."""

_KNOWN_NAMESPACES = frozenset({"aten", "prims", "dicp"})

UNINITIALIZED = (
    aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default,
    aten.empty_strided.default, aten.new_empty_strided.default, aten.empty_permuted.default,
)  # fmt: skip
"""Operators whose result has no values yet: calls may be dropped and never merged."""


def uninitialized_value(dtype: torch.dtype) -> bool | int | float:
    """What the results of `UNINITIALIZED` hold: eager fills them under deterministic algorithms."""
    if not (fills_uninitialized() and torch.are_deterministic_algorithms_enabled()):
        return 0
    if dtype.is_floating_point:
        return math.nan
    return True if dtype == torch.bool else torch.iinfo(dtype).max


_UNINITIALIZED = frozenset(op.overloadpacket.__name__ for op in UNINITIALIZED)

_CHECKS = ("_assert", "sym_constrain", "_check", "_functional_assert", "_functional_sym")


@cache
def is_view(target: Any) -> bool:
    """Whether the result may share storage with the first argument."""
    if not isinstance(target, OpOverload):
        return False
    return op_name(target) in _ALIASES_BEYOND_SCHEMA | _MAY_COPY or _returns_alias(target)


@cache
def never_copies(target: Any) -> bool:
    """Whether the result is a view of the first argument whatever its strides."""
    aliases = isinstance(target, OpOverload) and _returns_alias(target)
    return aliases and op_name(target) not in _MAY_COPY


def _returns_alias(target: OpOverload) -> bool:
    returns = schema_of(target).returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


@cache
def is_random(target: Any) -> bool:
    """Whether the operator draws from a random generator."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def drawn_within(context: Callable[[], AbstractContextManager[Any]], op: Any) -> Any:
    """A function that calls `op` within a context; `op` itself if it is an operator that draws no
    random numbers."""
    if context is nullcontext or (isinstance(op, OpOverload) and not is_random(op)):
        return op

    def call(*args: Any, **kwargs: Any) -> Any:
        with context():
            return op(*args, **kwargs)

    return call


@cache
def is_mutating(target: Any) -> bool:
    """Whether the operator writes to an argument."""
    return isinstance(target, OpOverload) and schema_of(target).is_mutable


@cache
def is_repeatable(target: Any) -> bool:
    """Whether a call may run again on copies of its arguments: it has no effects outside of
    them."""
    if isinstance(target, OpOverload):
        return target.namespace in _KNOWN_NAMESPACES
    return is_pure(target)


@cache
def op_name(target: Any) -> str:
    """The operator's name without namespace and overload."""
    if isinstance(target, OpOverload):
        return str(schema_of(target).name).split("::")[-1]
    return getattr(target, "__name__", str(target))


@cache
def is_pure(target: Any) -> bool:
    """Whether calls may be merged or removed: equal results for equal arguments, no effects."""
    if isinstance(target, OpOverload):
        return (
            target.namespace in _KNOWN_NAMESPACES
            and not schema_of(target).is_mutable
            and not is_random(target)
            and op_name(target) not in _UNINITIALIZED
            and not op_name(target).startswith(_CHECKS)
        )
    module = getattr(target, "__module__", "")
    return module in {
        "_operator",
        "operator",
        "math",
        "torch",
        "torch.utils._sympy.functions",
    } and (callable(target))


@cache
def may_write(target: Any) -> bool:
    """Whether a call may write to an argument; unknown operators count as if they did."""
    return is_mutating(target) or not (is_removable(target) or is_random(target))


@cache
def is_removable(target: Any) -> bool:
    """Whether a call may be dropped if nothing reads its result."""
    return is_pure(target) or op_name(target) in _UNINITIALIZED
