"""`apply_feature`: a tool on chosen operators, torch's or third-party, under a condition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Self

from dicp.errors import ToolVariableError, UnknownFeatureError
from dicp.op_tools.autocompare import OpAutoCompare
from dicp.op_tools.capture import OpCapture
from dicp.op_tools.cast import OpDtypeCast
from dicp.op_tools.fallback import OpFallback
from dicp.op_tools.frame import FRAME, Feature
from dicp.op_tools.names import is_torch, name_of, owner_of, resolve, resolve_any, routines
from dicp.op_tools.observe import OpObserve
from dicp.op_tools.overflow import OpOverflowCheck
from dicp.op_tools.timing import OpTimeMeasure

TOOLS: dict[str, type[Feature]] = {
    tool.feature: tool
    for tool in (
        OpCapture,
        OpAutoCompare,
        OpTimeMeasure,
        OpFallback,
        OpDtypeCast,
        OpObserve,
        OpOverflowCheck,
    )
}
Condition = Callable[..., Any]
Operator = str | Callable[..., Any] | ModuleType


def always(*args: Any, **kwargs: Any) -> bool:
    """The condition of a feature that is active at every call."""
    return True


class Handle:
    """Takes an applied feature away again: by `remove()`, or at the end of a `with` block."""

    def __init__(self, features: Sequence[Feature], wraps: Sequence[tuple[Any, str]]) -> None:
        self.features = tuple(features)
        self._wraps = list(wraps)

    def remove(self) -> None:
        for feature in self.features:
            feature.stop()
        for owner, attribute in self._wraps:
            FRAME.unwrap(owner, attribute)
        self._wraps.clear()
        if self in _APPLIED:
            _APPLIED.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.remove()


_APPLIED: list[Handle] = []


def apply_feature(
    ops: Operator | Sequence[Operator],
    feature: str,
    condition_func: Condition | Sequence[Condition] = always,
    **options: Any,
) -> Handle:
    """Put a feature on operators of this thread, besides those that are there already.

    ops: a dotted name, a function, a module (all its routines), or a list of these.
    condition_func: called with the operator's own arguments; False leaves that call alone. A list
    of conditions pairs with a list of operators. options: those of the feature's class.
    Raises UnknownFeatureError, OperatorNameError, ToolVariableError.
    """
    tool = TOOLS.get(feature)
    if tool is None:
        raise UnknownFeatureError(feature, tuple(TOOLS))
    listed: list[Operator] = [*ops] if isinstance(ops, (list, tuple)) else [ops]  # type: ignore[list-item]
    if callable(condition_func):
        pairs = [(listed, condition_func)]
    else:
        conditions = list(condition_func)
        if len(conditions) != len(listed):
            text = f"{len(conditions)} conditions for {len(listed)} operators"
            raise ToolVariableError("condition_func", text, "as many conditions as operators")
        pairs = [([op], condition) for op, condition in zip(listed, conditions, strict=True)]
    chosen = [(_chosen(group), condition) for group, condition in pairs]
    features = []
    for group, condition in chosen:
        given = None if condition is always else condition
        made = tool([name for name, _ in group], exclude=(), condition=given, **options)
        made.chosen_only = True
        features.append(made)
    wrapped = [(place, name) for group, _ in chosen for name, place in group if place is not None]
    for place, name in wrapped:
        FRAME.wrap(*place, name)
    for each in features:
        each.start()
    handle = Handle(features, [place for place, _ in wrapped])
    _APPLIED.append(handle)
    return handle


def clear_features() -> None:
    """Take away everything that `apply_feature` has put on operators."""
    for handle in list(_APPLIED):
        handle.remove()


def _chosen(ops: Sequence[Operator]) -> list[tuple[str, tuple[Any, str] | None]]:
    """The operators' names, each with the attribute to wrap where no mode sees its calls."""
    found: list[tuple[str, tuple[Any, str] | None]] = []
    for op in ops:
        if not isinstance(op, (str, ModuleType)) and not callable(op):
            raise ToolVariableError("ops", str(op), "names, functions or modules")
        given = resolve_any(op) if isinstance(op, str) else op
        if isinstance(given, ModuleType):
            found += [_one(function) for function in routines(given)]
        elif isinstance(op, str):
            owner, attribute, function = resolve(op)
            found.append((name_of(function), None) if is_torch(function) else (
                op, (owner, attribute)))  # fmt: skip
        else:
            found.append(_one(given))
    return found


def _one(function: Callable[..., Any]) -> tuple[str, tuple[Any, str] | None]:
    if is_torch(function):
        return name_of(function), None
    owner, attribute = owner_of(function)
    return f"{function.__module__}.{function.__qualname__}", (owner, attribute)
