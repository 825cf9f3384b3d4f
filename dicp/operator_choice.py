"""Operators that the user chooses: `eager_ops` stay eager ATen calls, `native_ops` must not.

A pattern is a regular expression that matches a name in full. An operator has the names `add`,
`add.Tensor` and `aten.add.Tensor`, those of the in-place and out forms that functionalization turns
into it (`add_.Tensor`, `add.out`), and that of the function in the user's program whose call was
traced to it (`conv2d` for `aten.convolution`).
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, Final

import torch
from torch import fx

from dicp.config import Config
from dicp.errors import ConfigValueError, DicpWarning, FallbackWarning
from dicp.origin import origin_of, unsupported
from dicp.torch_private import (
    OpOverload,
    is_backward,
    original_of,
    overload_name,
    registered_names,
    schema_of,
    traced_from,
    twin_of,
)

ASKED_EAGER: Final = "asked for by eager_ops"
CHOICE: Final = "dicp_choice"
"""Key in `node.meta`: "eager", "native" or "prefer native"."""

Patterns = tuple[str, ...]


@dataclass(frozen=True)
class OperatorChoice:
    """The patterns of both options; with `prefers`, a breach of `native` is a warning and no
    error."""

    eager: Patterns = ()
    native: Patterns = ()
    prefers: bool = False

    @classmethod
    def of(cls, config: Config) -> OperatorChoice:
        """The choice of `config`; warns of patterns that match nothing.

        Raises ConfigValueError for an operator in both options.
        """
        choice = cls(config.eager_ops, config.native_ops, config.native_ops_preferred)
        for option, patterns in (("eager_ops", choice.eager), ("native_ops", choice.native)):
            for pattern in patterns:
                _warn_if_unknown(option, pattern)
        if choice.eager and choice.native:
            _refuse(sorted(_known_matches(choice.eager) & _known_matches(choice.native)))
        return choice

    def __bool__(self) -> bool:
        return bool(self.eager or self.native)

    def wants_eager(self, op: OpOverload, written: Iterable[str] = ()) -> bool:
        return _matches(self.eager, (*names_of(op), *written))

    def wants_native(self, op: OpOverload, written: Iterable[str] = ()) -> bool:
        return _matches(self.native, (*names_of(op), *written))

    def mark(self, graph: fx.Graph, written: Mapping[str, Any], dynamo_key: str) -> None:
        """Record the choice on every operator of a captured graph.

        `written` maps the nodes of Dynamo's graph to the functions that the user's program calls;
        `dynamo_key` is the key in `node.meta` of a node's name there. The gradient of a function
        is not the function: it has names of its own. Raises ConfigValueError for an operator that
        both options name.
        """
        for node in graph.nodes:
            if not self or not isinstance(node.target, OpOverload) or not _makes_tensors(node):
                continue
            names: list[str] = []
            if not is_backward(node):
                original = traced_from(node)
                names += names_of(original) if original is not None else ()
                names += _function_names(written.get(node.meta.get(dynamo_key, "")))
            eager, native = (f(node.target, names) for f in (self.wants_eager, self.wants_native))
            if eager and native:
                _refuse([str(node.target)])
            if eager:
                node.meta[CHOICE] = "eager"
            elif native:
                node.meta[CHOICE] = "prefer native" if self.prefers else "native"


def kept_eager(node: fx.Node) -> bool:
    """Whether the user asked for an eager call of `node`."""
    # Placeholders and outputs of a split graph have the meta of the nodes that they replace.
    return isinstance(node.target, OpOverload) and node.meta.get(CHOICE) == "eager"


def check_eager(node: fx.Node, reason: str, config: Config, target: str) -> None:
    """Raises UnsupportedOperatorError if `node`, which stays an eager call, must not be one."""
    choice = node.meta.get(CHOICE)
    if choice == "eager":
        return
    if choice == "native":
        raise unsupported(node, target, reason, forbidden_by="native_ops")
    if config.fallback == "error":
        raise unsupported(node, target, reason)
    if choice == "prefer native":
        message = f"{origin_of(node)} stays an eager call although native_ops names it: {reason}"
        warnings.warn(FallbackWarning(message), stacklevel=2)


@contextmanager
def hidden(graph: fx.Graph) -> Iterator[None]:
    """Hides the operators that stay eager from passes: within, they equal no operator in a rule."""
    for node in graph.nodes:
        if kept_eager(node):
            node.target = twin_of(node.target)
    try:
        yield
    finally:
        for node in graph.nodes:
            if kept_eager(node):
                node.target = original_of(node.target)


@cache
def names_of(op: OpOverload) -> tuple[str, ...]:
    """All names of an operator: its own and those of the forms that become it."""
    space, _, packet = schema_of(op).name.partition("::")
    forms = [(packet, overload_name(op))]
    forms += [(packet, name) for name in _out_forms(op)]
    if hasattr(getattr(torch.ops, space), f"{packet}_"):
        forms.append((f"{packet}_", overload_name(op)))
    names = [name for form, overload in forms for name in (form, f"{form}.{overload}")]
    return tuple(dict.fromkeys([*names, *(f"{space}.{name}" for name in names)]))


def _out_forms(op: OpOverload) -> Iterator[str]:
    """The overloads that take what `op` takes and write the result to an argument."""
    wanted = [(a.name, str(a.type)) for a in schema_of(op).arguments if not a.is_out]
    for name in op.overloadpacket.overloads():
        arguments = schema_of(getattr(op.overloadpacket, name)).arguments
        given = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        if given == wanted and len(given) < len(arguments):
            yield name


def _makes_tensors(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else (value,)
    return value is None or any(isinstance(v, torch.Tensor) for v in values)


def _function_names(function: Any) -> tuple[str, ...]:
    """Names of a function in the user's program: `relu`, also for `relu_` and `Tensor.relu`."""
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    names = dict.fromkeys((name, name.removesuffix("_")))
    return tuple(n for name in names if name for n in (name, f"{name}.default"))


@cache
def _matches(patterns: Patterns, names: Iterable[str]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns for name in names)


@cache
def _overload_names() -> Mapping[str, tuple[str, ...]]:
    """Every overload, and the names that a pattern may match: with and without namespace and
    overload."""
    known: dict[str, tuple[str, ...]] = {}
    for space, packet, overload in registered_names():
        full = f"{packet}.{overload or 'default'}"
        known[f"{space}.{full}"] = (packet, full, f"{space}.{packet}", f"{space}.{full}")
    return known


@cache
def _known_names() -> tuple[str, ...]:
    """Every name that a pattern may match, of operators and of PyTorch's functions."""
    functions = (*dir(torch.nn.functional), *dir(torch.Tensor), *dir(torch))
    return tuple(dict.fromkeys((*chain(*_overload_names().values()), *functions)))


def _known_matches(patterns: Patterns) -> frozenset[str]:
    """Every overload that `patterns` name, of each operator if they name it without overload."""
    return frozenset(op for op, names in _overload_names().items() if _matches(patterns, names))


@cache
def _warn_if_unknown(option: str, pattern: str) -> None:
    known = _known_names()
    if not any(re.fullmatch(pattern, name) for name in known):
        near = difflib.get_close_matches(pattern, known, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        message = f"{option}: {pattern!r} is the name of no operator{hint}"
        warnings.warn(message, DicpWarning, stacklevel=4)


def _refuse(names: list[str]) -> None:
    if names:
        listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        raise ConfigValueError(
            "options 'eager_ops' and 'native_ops'",
            listed,
            "different operators in the two",
            "Take these out of one of them.",
        )
