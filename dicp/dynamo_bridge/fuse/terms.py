"""The language of patterns: terms that match nodes of the FX graph.

A pattern function receives one term per parameter (a wildcard, or a number if annotated `Number`)
and combines them with calls such as `op(aten.add.Tensor, x, y)`. Terms match structure and never
sizes, so symbolic shapes match like static ones; a commutative operator matches in both orders;
arguments that a pattern does not mention must have their default.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import fx

from dicp.dtypes import REDUCED_FLOATS
from dicp.dynamo_bridge.analysis.constants import CASTS, cast_source, uniform_value
from dicp.dynamo_bridge.analysis.values import sizes_of, value_of
from dicp.effects import op_name
from dicp.torch_private import OpOverload, schema_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Match:
    """The values bound to wildcards and the nodes matched so far (root first)."""

    bound: Mapping[str, Any]
    nodes: tuple[fx.Node, ...] = ()

    def bind(self, name: str, value: Any) -> Match | None:
        if name in self.bound:
            return self if _equal(self.bound[name], value) else None
        return replace(self, bound={**self.bound, name: value})

    def visit(self, node: fx.Node) -> Match:
        return replace(self, nodes=(*self.nodes, node))

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, fx.Node) or isinstance(right, fx.Node):
        return left is right
    return type(left) is type(right) and bool(left == right)


class Term(abc.ABC):
    """A pattern for a value in the graph (a node or a constant); it may have several matches."""

    @abc.abstractmethod
    def match(self, value: Any, state: Match) -> Iterator[Match]:
        """Every match of `value` that extends the bindings in `state`."""

    def roots(self) -> frozenset[Any]:
        """Targets of the nodes that this term can match; empty: anything."""
        return frozenset()


@dataclass(frozen=True, eq=False)
class Var(Term):
    """Any value; equal names in a pattern must match the same value."""

    name: str

    def match(self, value: Any, state: Match) -> Iterator[Match]:
        if (bound := state.bind(self.name, value)) is not None:
            yield bound


@dataclass(frozen=True, eq=False)
class Number(Term):
    """A Python number or a tensor filled with one number; binds the number."""

    name: str

    def match(self, value: Any, state: Match) -> Iterator[Match]:
        number = uniform_value(value)
        if number is not None and (bound := state.bind(self.name, number)) is not None:
            yield bound


@dataclass(frozen=True, eq=False)
class Literal(Term):
    """Exactly this number (within `tolerance`, relative), as a number or a filled tensor."""

    number: float
    tolerance: float = 0.0

    def match(self, value: Any, state: Match) -> Iterator[Match]:
        number = uniform_value(value)
        if number is None or isinstance(number, bool):
            return
        if abs(number - self.number) <= self.tolerance * abs(self.number):
            yield state


@dataclass(frozen=True, eq=False)
class Op(Term):
    """A call of one of `targets` whose leading arguments match `args`."""

    targets: frozenset[Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def match(self, value: Any, state: Match) -> Iterator[Match]:
        if not isinstance(value, fx.Node) or value.target not in self.targets:
            return
        given = list(value.args)
        if len(given) < len(self.args) or not self._rest_is_default(value):
            return
        state = state.visit(value)
        yield from match_all(self.args, given, state)
        if len(self.args) >= 2 and _commutes(value.target):
            swapped = (self.args[1], self.args[0], *self.args[2:])
            yield from match_all(swapped, given, state)

    def _rest_is_default(self, node: fx.Node) -> bool:
        defaults, names = _defaults(node.target)
        for position in range(len(self.args), len(node.args)):
            wanted = self.kwargs.get(names[position], defaults.get(names[position]))
            if wanted is not ANY and not _same_constant(node.args[position], wanted):
                return False
        for name, value in node.kwargs.items():
            wanted = self.kwargs.get(name, defaults.get(name))
            if wanted is not ANY and not _same_constant(value, wanted):
                return False
        given = {*names[: len(node.args)], *node.kwargs}
        return all(
            name in given or wanted is ANY or _same_constant(defaults.get(name), wanted)
            for name, wanted in self.kwargs.items()
        )

    def roots(self) -> frozenset[Any]:
        return self.targets


ANY: Any = type("Any", (), {"__repr__": lambda self: "ANY"})()
"""Matches any value of a keyword argument in a pattern."""


def _same_constant(left: Any, right: Any) -> bool:
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        pairs = zip(left, right, strict=False)
        return len(left) == len(right) and all(_same_constant(a, b) for a, b in pairs)
    return bool(left is right or (not isinstance(left, fx.Node) and left == right))


def match_all(terms: Iterable[Any], values: Iterable[Any], state: Match) -> Iterator[Match]:
    """Every match of all `values` with their `terms`."""
    terms, values = tuple(terms), tuple(values)
    if not terms:
        yield state
        return
    for first in match_one(terms[0], values[0], state):
        yield from match_all(terms[1:], values[1:], first)


def match_one(term: Any, value: Any, state: Match) -> Iterator[Match]:
    """Match a term, or compare with a constant in a pattern."""
    if isinstance(term, Term):
        yield from term.match(value, state)
    elif isinstance(term, (list, tuple)) and isinstance(value, (list, tuple)):
        if len(term) == len(value):
            yield from match_all(term, value, state)
    elif isinstance(term, (int, float)) and not isinstance(term, bool):
        yield from Literal(term).match(value, state)
    elif _same_constant(value, term):
        yield state


@cache
def _defaults(target: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    schema = schema_of(target)
    if schema is None:
        return {}, ()
    names = tuple(argument.name for argument in schema.arguments)
    return {a.name: a.default_value for a in schema.arguments if a.has_default_value()}, names


_COMMUTATIVE = frozenset({"add", "mul", "maximum", "minimum", "logical_and", "bitwise_and"})


@cache
def _commutes(target: Any) -> bool:
    return isinstance(target, OpOverload) and op_name(target) in _COMMUTATIVE


@dataclass(frozen=True, eq=False)
class OneOf(Term):
    """Any of several alternatives, tried in order."""

    terms: tuple[Term, ...]

    def match(self, value: Any, state: Match) -> Iterator[Match]:
        for term in self.terms:
            yield from term.match(value, state)

    def roots(self) -> frozenset[Any]:
        roots = [term.roots() for term in self.terms]
        return frozenset().union(*roots) if all(roots) else frozenset()


@dataclass(frozen=True, eq=False)
class Peel(Term):
    """`term`, directly or below any number of unary nodes that `through` skips.

    `through` takes a node and the pattern's root and returns the node's source, or None.
    """

    term: Term
    through: Callable[[fx.Node, fx.Node], fx.Node | None]
    targets: frozenset[Any] = frozenset()
    """Targets that `through` skips, where a pattern may have them at the root."""

    def roots(self) -> frozenset[Any]:
        return self.targets | self.term.roots()

    def match(self, value: Any, state: Match) -> Iterator[Match]:
        yield from self.term.match(value, state)
        root = state.nodes[0] if state.nodes else value
        while isinstance(value, fx.Node) and (source := self.through(value, root)) is not None:
            state = state.visit(value)
            value = source
            yield from self.term.match(value, state)


@dataclass(frozen=True, eq=False)
class As(Term):
    """`term`, with the node that it matches bound to `name`."""

    name: str
    term: Term

    def match(self, value: Any, state: Match) -> Iterator[Match]:
        if (bound := state.bind(self.name, value)) is not None:
            yield from self.term.match(value, bound)

    def roots(self) -> frozenset[Any]:
        return self.term.roots()


@dataclass(frozen=True, eq=False)
class LastDim(Term):
    """The last dimension of the tensor bound to `of`, as a number or as a list of it alone."""

    of: str

    def match(self, value: Any, state: Match) -> Iterator[Match]:
        tensor = value_of(state.bound.get(self.of))
        dims = [value] if isinstance(value, int) else value
        if not isinstance(dims, (list, tuple)) or not isinstance(tensor, torch.Tensor):
            return
        if len(dims) == 1 and tensor.dim() and dims[0] in (-1, tensor.dim() - 1):
            yield state


def op(target: Any, *args: Any, **kwargs: Any) -> Op:
    """A call of `target`, an operator or a list of several."""
    return Op(frozenset(target if isinstance(target, list) else [target]), args, kwargs)


def one_of(*terms: Term) -> OneOf:
    return OneOf(terms)


def cast(term: Term) -> Peel:
    """`term`, optionally widened to the dtype that operators compute 16-bit floats in.

    No other conversion is skipped: it may round (an int8 round trip quantizes), and a wider
    computation is more precise than the operator that would replace it.
    """
    return Peel(term, lambda node, root: widened_source(node), CASTS)


def rounded(term: Term) -> Peel:
    """`term`, optionally widened, and optionally rounded to the result's dtype.

    A fused operator computes in float32 and rounds its result once.
    """
    return Peel(term, rounded_source, CASTS)


def widened_source(node: fx.Node) -> fx.Node | None:
    """The source of a conversion from a 16-bit float to float32."""
    source = cast_source(node)
    if source is None or value_of(node).dtype != torch.float32:
        return None
    return source if value_of(source).dtype in REDUCED_FLOATS else None


def rounded_source(node: fx.Node, root: fx.Node) -> fx.Node | None:
    """As `widened_source`, or the source of a rounding from float32 to the root's 16-bit float."""
    source = cast_source(node)
    if source is None or value_of(source).dtype != torch.float32:
        return widened_source(node)
    dtype = value_of(node).dtype
    return source if dtype in REDUCED_FLOATS and dtype == value_of(root).dtype else None


_RESHAPES = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
_COPIES = frozenset({aten.clone.default, aten.contiguous.default, aten.alias.default})


def reshape_source(node: fx.Node) -> fx.Node | None:
    """The source of a reshape, copy or alias, which keeps the order of elements."""
    if node.target in _RESHAPES or node.target in _COPIES:
        source = node.args[0]
        return source if isinstance(source, fx.Node) else None
    if node.target is aten.expand.default and isinstance(node.args[0], fx.Node):
        same = sizes_of(node) == sizes_of(node.args[0])
        return node.args[0] if same else None
    return None


def copy_source(node: fx.Node) -> fx.Node | None:
    """The source of a copy or alias of the same shape, dtype and values."""
    source = reshape_source(node)
    if source is None or sizes_of(source) != sizes_of(node):
        return None
    return source
