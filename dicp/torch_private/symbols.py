"""Symbolic numbers: their expressions, the values they were traced with, and proofs about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import sympy
import torch
from torch import fx
from torch._prims_common import compute_elementwise_output_strides
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,
    free_symbols,
    free_unbacked_symbols,
    statically_known_true,
)
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import FloorDiv, Mod
from torch.utils._sympy.printers import PythonPrinter

_SYMBOLIC: Final = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
UNKNOWN_SIZE: Final = 1 << 20
"""What a size that depends on data counts as where layouts and costs are compared."""
iterator_strides: Final = compute_elementwise_output_strides
"""The strides that eager's iterator gives a result of operands of one shape."""


def expression_of(value: Any) -> Any:
    """The expression of a symbolic number, comparable with `==` without adding a guard.

    Any other value is returned as it is.
    """
    symbolic = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return value.node.expr if symbolic else value


def size_expression(size: torch.SymInt) -> sympy.Expr:
    """The expression of a symbolic integer; its symbols' signs are those that ShapeEnv has proved.

    A size's symbol is positive from the start. That of an integer argument, or of a size that
    depends on data, is of any sign until a guard bounds it. What a guard makes 1 is 1: PyTorch
    broadcasts it as such.
    """
    node = size.node
    composite = not isinstance(node.expr, (sympy.Symbol, sympy.Number))
    if composite and is_proved(sympy.Eq(node.expr, 1), node.shape_env):
        return sympy.S.One
    ranges = node.shape_env.var_to_range
    signs = {
        symbol: _with_sign(symbol, ranges[symbol].lower, ranges[symbol].upper)
        for symbol in node.expr.free_symbols
        if symbol.is_nonnegative is None and symbol in ranges
    }
    return node.expr.xreplace(signs) if signs else node.expr


def _with_sign(symbol: sympy.Symbol, low: Any, high: Any) -> sympy.Symbol:
    for sign, holds in (
        ("positive", low >= 1), ("nonnegative", low >= 0),
        ("negative", high <= -1), ("nonpositive", high <= 0),
    ):  # fmt: skip
        if holds:
            return sympy.Symbol(symbol.name, integer=True, **{sign: True})
    return symbol


def python_size(size: Any) -> str:
    """A symbolic size as a Python expression of its symbols' names."""
    return str(PythonPrinter().doprint(size))


def linear_factor(size: Any) -> tuple[int, str] | None:
    """(c, symbol) for a size c * symbol, (c, "") for the number c; None for any other."""
    if not isinstance(size, torch.SymInt):
        return (int(size), "") if isinstance(size, int) else None
    factor, rest = size.node.expr.as_coeff_Mul()
    simple = factor.is_Integer and factor > 0 and (rest.is_Symbol or rest == 1)
    if not simple:
        return None
    return int(factor), "" if rest == 1 else str(rest)


def is_plain_symbol(size: Any) -> bool:
    """Whether a size is a symbol alone, so that its value is the symbol's."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.is_Symbol)


def symbols_in(values: Any) -> set[Any]:
    """The symbols of all numbers and tensors in nested values."""
    leaves = pytree.tree_leaves(values)
    return {s for x in leaves if isinstance(x, _SYMBOLIC) for s in free_symbols(x)}


def depends_on_data(value: Any) -> bool:
    """Whether a value, or a size of a tensor in it, is known only at run time."""
    leaves = pytree.tree_leaves(value)
    return any(isinstance(x, _SYMBOLIC) and bool(free_unbacked_symbols(x)) for x in leaves)


def is_jagged_size(size: Any) -> bool:
    """Whether a size stands for the lengths of a jagged dimension: PyTorch's nested integer, which
    is no number."""
    if not isinstance(size, torch.SymInt):
        return False
    node = size.node
    return node.is_nested_int() or (node.has_hint() and isinstance(node.hint, torch.SymInt))


def hint_of(size: Any) -> int:
    """An integer, or the value that a symbolic one was traced with."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    known = size.node.has_hint() and not is_jagged_size(size)
    return int(size.node.hint) if known else UNKNOWN_SIZE


def first_sizes(gm: fx.GraphModule) -> dict[Any, int]:
    """The symbols in the sizes of a graph's inputs, and their values in the first call."""
    found: dict[Any, int] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        tensor = node.meta.get("val")
        for size in tensor.shape if isinstance(tensor, torch.Tensor) else (tensor,):
            if is_plain_symbol(size) and size.node.has_hint() and not is_jagged_size(size):
                found[size.node.expr] = int(size.node.hint)
    return found


def number_at(number: Any, values: Mapping[Any, int]) -> Any:
    """A symbolic number as int, float or bool, its symbols having `values`.

    Returned unchanged if it has other symbols too; so is a plain number.
    """
    if not isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return number
    if free_symbols(number) - values.keys():
        return number
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return kinds[type(number)](number.node.expr.xreplace(values))


def floor_division(size: Any, divisor: Any) -> Any:
    """`size // divisor` of sizes that may be symbolic."""
    return FloorDiv(size, divisor)


def remainder(size: Any, divisor: Any) -> Any:
    """`size % divisor` of sizes that may be symbolic, as PyTorch's guards have it."""
    return Mod(size, divisor)


def shape_env_of(gm: fx.GraphModule) -> ShapeEnv | None:
    """The ShapeEnv of the symbols in a graph's arguments; None where no argument is symbolic."""
    for node in gm.graph.find_nodes(op="placeholder"):
        val = node.meta.get("val")
        for size in val.shape if isinstance(val, torch.Tensor) else (val,):
            if isinstance(size, torch.SymInt):
                return size.node.shape_env  # type: ignore[no-any-return]
    return None


def is_proved(relation: sympy.Basic, shape_env: ShapeEnv) -> bool:
    """Whether ranges and guards of ShapeEnv prove a relation between symbolic integers.

    Adds no guard. Symbols are matched by name, whatever signs `size_expression` gave them.
    """
    own = {symbol.name: symbol for symbol in shape_env.var_to_range}
    known = {symbol: own.get(str(symbol), symbol) for symbol in relation.free_symbols}
    return shape_env._maybe_evaluate_static(relation.xreplace(known)) is sympy.true


def may_be_zero(number: Any, value: torch.SymInt | torch.SymFloat) -> bool:
    """Whether a part of the expression of `value` may be zero, as far as ShapeEnv knows."""
    if number.is_number or number.is_positive:
        return bool(number == 0)
    node = value.node
    return not is_proved(sympy.Ne(number, 0), node.shape_env)


def ranges_of(symints: Iterable[torch.SymInt]) -> list[str]:
    """The values that ShapeEnv allows the symbols of `symints`."""
    nodes = [symint.node for symint in symints]
    return [f"{n.expr} in {n.shape_env.bound_sympy(n.expr)}" for n in nodes]
