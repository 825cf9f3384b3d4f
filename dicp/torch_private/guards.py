"""Guards on symbolic sizes: those that a compilation or a trace took, stored and checked again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import fx
from torch._dynamo.source import LocalSource
from torch._functorch._aot_autograd import autograd_cache
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, ShapeEnv, free_symbols
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

from dicp.torch_private.releases import release_of
from dicp.torch_private.tensors import traced_fake_mode

_HINTS: Final = "backed_var_to_val" if release_of(torch.__version__) >= (2, 13) else "var_to_val"
_hint = getattr(autograd_cache, "guarding_hint_or_throw", None) or autograd_cache.size_hint


def current_shape_env() -> ShapeEnv | None:
    """The symbols and guards of the compilation under way, if any."""
    mode = traced_fake_mode()
    return None if mode is None else mode.shape_env


class ShapeFacts:
    """What ShapeEnv knows of the symbols in one graph, and the guards it has added since."""

    def __init__(self, shape_env: ShapeEnv | None, symbols: Iterable[Any]) -> None:
        self.shape_env = shape_env
        self.symbols = sorted(symbols, key=str)
        self._before = len(shape_env.guards) if shape_env is not None else 0

    @classmethod
    def of(cls, gm: fx.GraphModule) -> ShapeFacts:
        shape_env, symbols = None, set[Any]()
        for node in gm.graph.nodes:
            for value in pytree.tree_leaves(node.meta.get("val")):
                if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                    shape_env = value.node.shape_env
                    symbols |= free_symbols(value)
                elif isinstance(value, torch.Tensor) and value.layout == torch.strided:
                    sizes = [s for s in (*value.shape, *value.stride()) if type(s) is not int]
                    for size in sizes:
                        shape_env = size.node.shape_env
                        symbols |= free_symbols(size)
        return cls(shape_env, symbols)

    def known(self) -> list[str]:
        """What holds so far: the symbols' ranges, and the guards that mention them."""
        if self.shape_env is None:
            return []
        ranges = [f"{s} in {self.shape_env.var_to_range.get(s)}" for s in self.symbols]
        ours = set(self.symbols)
        guards = (guard.expr for guard in self.shape_env.guards[: self._before])
        return ranges + sorted(str(expr) for expr in guards if ours & expr.free_symbols)

    def added(self) -> list[str] | None:
        """The guards added since, as Python; None if one mentions symbols without a value here."""
        if self.shape_env is None:
            return []
        new = [guard.expr for guard in self.shape_env.guards[self._before :]]
        if any(expr.free_symbols - self._hints().keys() for expr in new):
            return None
        return [str(PythonPrinter().doprint(expr)) for expr in new]

    def hold(self, guards: Iterable[str]) -> bool:
        """Whether `guards` hold for the sizes that this compilation is for; adds no guard."""
        hints = {str(symbol): value for symbol, value in self._hints().items()}
        return all(eval(guard, SYMPY_INTERP, hints) for guard in guards)

    def add(self, guards: Iterable[str]) -> None:
        """Add guards that hold to this compilation's own."""
        if self.shape_env is None:
            return
        of_kind = {int: self.shape_env.create_symintnode, float: self.shape_env.create_symfloatnode}
        symbolic = {
            str(symbol): of_kind[type(value)](symbol, hint=value)
            for symbol, value in self._hints().items()
        }
        for guard in guards:
            assert bool(eval(guard, SYMPY_INTERP, symbolic)), guard

    def _hints(self) -> dict[Any, int | float]:
        """The symbols' values in the call that this compilation is for.

        The size of a jagged dimension is left out: its value, a nested integer, is no number.
        """
        values: dict[Any, Any] = getattr(self.shape_env, _HINTS, {})
        known = [symbol for symbol in self.symbols if symbol in values]
        found = {symbol: values[symbol] for symbol in known if values[symbol].is_number}
        return {s: int(v) if s.is_integer else float(v) for s, v in found.items()}


def backed_symints(inputs: list[Any]) -> list[torch.SymInt]:
    return autograd_cache.AOTAutogradCache._filter_backed_symints(inputs)


class NewGuards:
    """The guards that the compilation under way takes from now on."""

    def __init__(self, symints: Iterable[torch.SymInt] = ()) -> None:
        self._shape_env = current_shape_env()
        self._before = len(self._shape_env.guards) if self._shape_env is not None else 0
        self._symbols = {symbol for symint in symints for symbol in free_symbols(symint)}

    def only_on_symints(self) -> bool:
        """Whether all of them are on symbols of the symbolic integers given before."""
        if self._shape_env is None:
            return True
        new = self._shape_env.guards[self._before :]
        return all(guard.expr.free_symbols <= self._symbols for guard in new)


def guards_on(symints: list[torch.SymInt]) -> str:
    """The guards taken on `symints` so far, as an expression ("" for none)."""
    if not symints:
        return ""
    shape_env = symints[0].node.shape_env  # a backward compiled later is in no tracing context
    guards = shape_env.get_pruned_guards(symints)
    return _expression(shape_env, symints, guards=guards)


def _expression(shape_env: ShapeEnv, placeholders: Sequence[Any], **options: Any) -> str:
    """As ShapeEnv.produce_guards_expression, which joins guards by "and" without parentheses: with
    one that has an "or", others would not count."""
    sources = [LocalSource(f"t{position}") for position in range(len(placeholders))]
    options = {"ignore_static": True, **options}
    guards = shape_env.produce_guards(placeholders, sources, **options)
    return " and ".join(f"({guard})" for guard in guards)


def guards_hold(expression: str, symints: list[torch.SymInt]) -> bool:
    """Whether `expression` holds for the current sizes; adds no guard."""
    if not symints:
        return False
    shape_env = symints[0].node.shape_env
    hints = [_hint(symint) for symint in symints]
    return bool(shape_env.evaluate_guards_expression(expression, hints))


def traced_guards(graph: fx.GraphModule) -> str:
    """The conditions on sizes under which a graph traced with symbolic sizes holds; "" for none."""
    inputs = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
    env = getattr(graph, "shape_env", None)
    if env is None:
        return ""
    return _expression(env, inputs, ignore_static=False)


def traced_guards_hold(graph: fx.GraphModule, guards: str, inputs: Sequence[Any]) -> bool:
    """Whether `inputs` satisfy the guards of a traced graph."""
    return bool(graph.shape_env.evaluate_guards_expression(guards, inputs))
