"""Calls with integers for which compiled code would compute something else than Python.

Compiled code computes symbolic numbers in 64 bits, and a division by zero ends the process; Python
has integers of any size, and an error. Such calls run in eager.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from dicp.serialize import encode_size, evaluate
from dicp.torch_private import expression_of, is_plain_symbol, may_be_zero

DIVISIONS = frozenset(
    {"FloorDiv", "CleanDiv", "Mod", "PythonMod", "ModularIndexing", "IntTrueDiv", "FloatTrueDiv"}
)
POWERS = frozenset({"Pow", "PowByNatural"})
SAFE_INTEGER = 2.0**62
"""Numbers below it, and the sum of two, fit into 64 bits."""
ASSUMED_SIZE = 2.0**20
"""What a size counts as: that of a tensor in memory, which is not checked."""
LIMITS = tuple(2**bits for bits in range(62, -1, -1))
"""Limits of the integers of a call; a graph has the largest that is safe."""
SizeSource = tuple[int, int | None]
"""An input's position, and a dimension of it if it is a tensor."""


class NumberChecks:
    """The checks of a graph of Dynamo's whose inputs `traced` are fake."""

    def __init__(self, graph: fx.Graph, traced: Sequence[Any]) -> None:
        sources, integers = _sources(traced)
        values = [node.meta.get("example_value") for node in graph.nodes]
        symbolic = [v for v in values if isinstance(v, torch.SymInt | torch.SymFloat)]
        computed = {expression_of(v): v for v in symbolic if not is_plain_symbol(v)}
        self.positions = [sources[name][0] for name in integers]
        self.limit = _largest_safe(computed, integers) if integers and computed else None
        divisors = {
            divisor for expression, value in computed.items()
            for divisor in _divisors(expression) if may_be_zero(divisor, value)
        }  # fmt: skip
        names = {str(symbol) for divisor in divisors for symbol in divisor.free_symbols}
        self.divisors = sorted(encode_size(divisor) for divisor in divisors)
        self.sources = {name: sources[name] for name in names if name in sources}

    def __bool__(self) -> bool:
        return self.limit is not None or bool(self.divisors)

    def fail(self, inputs: Sequence[Any]) -> bool:
        """Whether a call has to run in eager."""
        if self.limit is not None and any(abs(inputs[k]) > self.limit for k in self.positions):
            return True
        if not self.divisors:
            return False
        symbols = {name: _number(inputs, source) for name, source in self.sources.items()}
        with contextlib.suppress(NameError):  # a symbol that only data determines
            return any(_is_zero(divisor, symbols) for divisor in self.divisors)
        return False


def _sources(traced: Sequence[Any]) -> tuple[dict[str, SizeSource], list[str]]:
    """Where the value of each symbol is found, and the symbols that are no tensor's size."""
    sizes: dict[str, SizeSource] = {}
    for position, value in enumerate(traced):
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if is_plain_symbol(size):
                sizes.setdefault(str(expression_of(size)), (position, dim))
    integers: dict[str, SizeSource] = {
        str(expression_of(value)): (position, None)
        for position, value in enumerate(traced) if is_plain_symbol(value)
    }  # fmt: skip
    return integers | sizes, [name for name in integers if name not in sizes]


def _number(inputs: Sequence[Any], source: SizeSource) -> int:
    position, dim = source
    return inputs[position] if dim is None else inputs[position].shape[dim]  # type: ignore[no-any-return]


def _is_zero(number: int | str, symbols: Mapping[str, int]) -> bool:
    try:
        return bool(evaluate(number, symbols) == 0)
    except ArithmeticError:  # it divides by another divisor, which is zero
        return True


def _parts(expression: Any) -> Iterator[Any]:
    yield expression
    for part in expression.args:
        yield from _parts(part)


def _divisors(expression: Any) -> Iterator[Any]:
    for part in _parts(expression):
        if type(part).__name__ in DIVISIONS:
            yield from part.args[1:]


# ---- limits --------------------------------------------------------------------------------------


def _largest_safe(expressions: Iterable[Any], integers: Collection[str]) -> int:
    """The largest of LIMITS with which no part of an expression is beyond 64 bits."""
    parts = {part for expression in expressions for part in _parts(expression)}
    computed = [part for part in parts if not part.is_Atom]
    return next(
        (limit for limit in LIMITS
         if all(_bound(part, integers, limit) < SAFE_INTEGER for part in computed)), 0,
    )  # fmt: skip


def _bound(expression: Any, integers: Collection[str], limit: float) -> float:
    """A bound of the absolute value of an expression."""
    if expression.is_Symbol:
        return limit if str(expression) in integers else ASSUMED_SIZE
    if expression.is_number:
        return abs(float(expression))
    bounds = [_bound(part, integers, limit) for part in expression.args]
    kind = type(expression).__name__
    if kind == "Add":
        return sum(bounds)
    if kind == "Mul":
        return math.prod(bounds)
    if kind in POWERS:
        return _power(*bounds)
    if kind == "LShift":
        return bounds[0] * _power(2.0, bounds[1])
    if kind == "FloatTrueDiv" and expression.args[1].is_number:
        return bounds[0] / bounds[1] if bounds[1] else SAFE_INTEGER
    return max(bounds)


def _power(base: float, exponent: float) -> float:
    try:
        return max(base, 1.0) ** exponent
    except OverflowError:
        return SAFE_INTEGER
