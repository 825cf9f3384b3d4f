"""C++ of loops over float16 elements: conversions to floats in arrays, the loop over these, and
conversions of its results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dicp.codegen.emitter import Emitter
from dicp.codegen.types import literal
from dicp.codegen.values import local
from dicp.loop.ir import expr as ir
from dicp.loop.ir.access import Access, is_along
from dicp.loop.ir.expr import Const, Expr, Masked, Read
from dicp.loop.ir.index import Index, Var
from dicp.loop.ir.kernel import Kernel, Stmt, Store
from dicp.vendor.cpu.conversions import converted_copies, narrowed, widened
from dicp.vendor.cpu.gathers import gathered

Bounds = tuple[str, str]
"""C++ of where a loop begins and ends."""

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.bool: torch.uint8}
"""The types whose elements in memory differ from their values, and the types of these bits."""


@dataclass(frozen=True)
class Converted:
    """The statements before and after a loop that convert its elements."""

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.before or self.after)


@dataclass(frozen=True)
class Block:
    """Elements of a loop that are converted at once."""

    var: Var
    bounds: Bounds
    size: int
    is_even: bool = False
    """Whether each block has exactly these elements; else the last one may have fewer."""
    is_single: bool = False


class Conversions(Emitter):
    """Emits loops that read and store float16 elements as floats in arrays."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.read_from: dict[Access, str] = {}
        """Element -> C++ of the value that the current loop reads instead of it."""
        self._stored_to: dict[Access, str] = {}
        """Element -> C++ of the float to which the current loop stores it."""
        self._copies: dict[Store, Read] = {}
        """The stores that the current loop does not make: they are calls after it."""
        self._arrays = 0

    def is_converted(self, stmts: Sequence[Stmt], var: Var) -> bool:
        """Whether a loop over `var` has float16 elements that are contiguous along it."""
        found = self._widened(stmts, var) or self._narrowed(stmts, var)
        return bool(found or self._converted_copies(stmts, var))

    def begin_conversions(self, stmts: Sequence[Stmt], block: Block) -> Converted:
        """Conversions of a loop's block, from `start` to `end`; the loop's variable is `start`."""
        count = "" if block.is_even else "end - start"
        return self.begin_lanes(stmts, block.var, block.size, f"{block.var.key} - start", count)

    def begin_lanes(
        self, stmts: Sequence[Stmt], var: Var, lanes: int, at: str = "lane", count: str = ""
    ) -> Converted:
        """Conversions of a loop of `lanes` iterations, of which `at` is the current one; the
        loop's variables are those of the first. `count`: the iterations if there may be fewer."""
        before, after = [], []
        exact, rest = ("", f", {count}") if count else (f"<{lanes}>", "")
        self._copies = self._converted_copies(stmts, var)
        for store, source in self._copies.items():
            call = "d_narrow" if store.ref.dtype == torch.float16 else "d_widen"
            lvalues = f"&{self._lvalue(source)}, &{self._target(store)}"
            after.append(f"{call}{exact}({lvalues}{rest});")
        stmts = [s for s in stmts if s not in self._copies]
        for ref, index in self._widened(stmts, var):
            lvalue, name = self._lvalue(ir.read(ref, index)), self.array_name()
            self.read_from[ref, index] = f"{name}[{at}]"
            before.append(f"float {name}[{lanes}]; d_widen{exact}(&{lvalue}, {name}{rest});")
        for store in self._narrowed(stmts, var):
            lvalue, name = self._target(store), self.array_name()
            self._stored_to[store.ref, store.index] = f"{name}[{at}]"
            before.append(f"float {name}[{lanes}];")
            after.append(f"d_narrow{exact}({name}, &{lvalue}{rest});")
        return Converted(tuple(before), tuple(after))

    def gathers(self, stmts: Sequence[Stmt], var: Var) -> list[Access]:
        """The elements at checked indices that are loaded before a loop over `var`."""
        return [at for at in gathered(stmts, var) if self._is_known(at[1], stmts)]

    def end_conversions(self) -> None:
        self._copies = {}
        self.read_from.clear()
        self._stored_to.clear()

    def array_name(self, kind: str = "floats") -> str:
        self._arrays += 1
        return f"{kind}{self._arrays}"

    def _widened(self, stmts: Sequence[Stmt], var: Var) -> list[Access]:
        found = [at for at in widened(stmts) if self._is_known(at[1], stmts)]
        return [at for at in found if is_along(at[1], var) or at in self.staged]

    def _converted_copies(self, stmts: Sequence[Stmt], var: Var) -> dict[Store, Read]:
        found = converted_copies(stmts, var)
        return {s: source for s, source in found.items() if self._is_known(source.index, stmts)}

    def _is_known(self, index: Index, stmts: Sequence[Stmt]) -> bool:
        """Whether an index is known before a loop over `stmts`, which name no part of it."""
        own = {s.name for s in stmts if not isinstance(s, Store)}
        names = {named.name for named in self.needs_of_index(index).names}
        return not names & own and all(local(name) in self.places for name in names)

    def _narrowed(self, stmts: Sequence[Stmt], var: Var) -> list[Store]:
        found, places = narrowed(stmts), self.lane_lvalues
        return [
            s for s in found
            if (is_along(s.index, var) or (s.ref, s.index) in places) and self._varies(s, var)
        ]  # fmt: skip

    def _varies(self, store: Store, var: Var) -> bool:
        """Whether a value changes along `var`; if not, it is converted once, before the loop."""
        needs = self.needs(store.value)
        return var in needs.variables or bool(needs.names)

    def store(self, stmt: Store) -> Callable[[], None]:
        if stmt in self._copies:
            return lambda: None
        if stmt.is_copy or not stmt.is_move or stmt.ref.dtype not in BITS:
            return super().store(stmt)
        bits = self._bits(stmt.value)
        return partial(self.line, f"{self._target(stmt)} = {bits};")

    def _bits(self, expr: Expr, guard: str = "") -> str:
        """The name of an element, a number, or what selections of them give, as it is stored."""
        dtype = BITS[expr.dtype]
        if isinstance(expr, Const):
            return literal(torch.tensor(expr.value, dtype=expr.dtype).view(dtype).item(), dtype)
        if isinstance(expr, Masked):
            return self._bits(expr.args[1], self.guard_of(expr, guard))
        place = self.place_of(expr, guard)
        if isinstance(expr, Read):
            text, other, test = self._lvalue(expr, guard), literal(0, dtype), guard
        else:
            test = self.value(expr.args[0], guard)
            text, other = (self._bits(arg, guard) for arg in expr.args[1:])
        if test:
            text = f"{self.selector(test, place)} ? {text} : {other}"
        return self.once((expr, guard, "bits"), text, dtype, place)

    def loaded(self, item: Read, guard: str) -> str:
        return self.read_from.get((item.ref, item.index)) or super().loaded(item, guard)

    def _assignment(self, stmt: Store, lvalue: str, value: str) -> str:
        found = self._stored_to.get((stmt.ref, stmt.index))
        return f"{found} = {value};" if found else super()._assignment(stmt, lvalue, value)
