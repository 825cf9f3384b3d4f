"""Emits C++: the values of a kernel, and the statements that name them.

In: a kernel. Out: lines of C++ in scopes. What is computed where is decided in `values.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import sympy
import torch

from dicp.codegen.spelling import SHARED, VARIANTS, combine, operator, take
from dicp.codegen.types import (
    VALUE_TYPE,
    conversion,
    has_spelling,
    literal,
    size_text,
    start_value,
    widened,
)
from dicp.codegen.values import Needs, Values, local
from dicp.dtypes import REDUCED_FLOATS
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Checked, Convert, Expr, Named, Read, Ref
from dicp.loop.ir.index import FloorDiv, Index, Mod, Size, contiguous_strides, flatten, variable
from dicp.loop.ir.kernel import Kernel, Let, Reduce, Scan, ScratchStore, Store
from dicp.loop.ir.ops import INDEX_CHECKS


class Emitter(Values[int]):
    """Emits the code of one kernel; a value's place is the depth of its scope."""

    VALUE_TYPE = VALUE_TYPE
    VARIANTS, SHARED = VARIANTS, SHARED

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.reductions = {s.name: s for s in kernel.stmts() if isinstance(s, Reduce)}
        self.staged: dict[tuple[Ref, Index], str] = {}
        """(tensor, index) -> C++ of the element's copy in a tile that is filled before the loop."""
        self.lane_lvalues: dict[tuple[Ref, Index], str] = {}
        """(tensor, index) of a non-temporal store -> C++ of the element in its line buffer."""
        self.flagged: set[str] = set()
        """Max and min reductions that find NaNs by a max of magnitude bits: both vectorize."""
        self.kept_at: dict[str, str] = {}
        """Name of an argmax or argmin -> where the current block's buffer keeps the value."""
        self.strip_mined: set[str] = set()
        """Names of reductions and scratch stores that have one lane per element of a cache line."""

    # ---- statements -------------------------------------------------------------------------

    def named_here(self, name: str) -> None:
        """Notes that the current scope names a value: expressions that read it stay in it."""
        self.places[local(name)] = len(self.scopes) - 1

    def define(self, stmt: Reduce | Scan | Let | ScratchStore, value: str) -> None:
        if isinstance(stmt, Reduce):
            self.line(self._combine(stmt, value, self._position(stmt)))
        elif isinstance(stmt, Scan):
            self.line(self._combine(stmt, value, ""))
            self.named_here(stmt.name)
        elif isinstance(stmt, ScratchStore):
            lanes = stmt.name in self.strip_mined
            at = f"lanes_{stmt.name}[lane]" if lanes else self._kept(stmt.name)
            self.line(f"{at} = {value};")
        else:
            self.line(f"const {VALUE_TYPE[stmt.dtype]} {local(stmt.name)} = {value};")
            self.named_here(stmt.name)

    def _inner_position(self) -> str:
        sizes = [v.size for v in self.kernel.reduction]
        coords = [variable(v) for v in self.kernel.reduction]
        return self.index(flatten(coords, contiguous_strides(sizes)))

    def _kept(self, name: str) -> str:
        """The lvalue of a scratch value at the current point."""
        return f"saved_{name}[{self._inner_position()}]"

    def store(self, stmt: Store) -> Callable[[], None]:
        if stmt.is_copy:
            assert isinstance(stmt.value, Read)
            source = self._lvalue(stmt.value)
            text = f"{self._target(stmt)} = {source};"
        else:
            text = self._store(stmt, self.value(_unrounded(stmt)))
        return partial(self.line, text)

    def _target(self, stmt: Store) -> str:
        lvalue = f"{self.arg(stmt.ref)}[{self.index(stmt.index)}]"
        return self.lane_lvalues.get((stmt.ref, stmt.index), lvalue)

    def _store(self, stmt: Store, value: str) -> str:
        lvalue = self._target(stmt)
        if stmt.op:
            return self.combining_store(stmt, lvalue, value)
        return self._assignment(stmt, lvalue, value)

    def combining_store(self, stmt: Store, lvalue: str, value: str) -> str:
        """The statement that combines `value` into `lvalue` by `stmt.op`.

        Of a kernel whose threads share the destinations it must be atomic. The dtypes are those of
        `Lowering.atomic_dtypes`.
        """
        old = widened(lvalue, stmt.ref.dtype)
        return self._assignment(stmt, lvalue, combine(stmt.op, old, value))

    def _assignment(self, stmt: Store, lvalue: str, value: str) -> str:
        narrow = {torch.bfloat16: "d_to_bf16", torch.float16: "d_to_f16"}.get(stmt.ref.dtype)
        return f"{lvalue} = {narrow}({value});" if narrow else f"{lvalue} = {value};"

    def _declare(self, stmt: Reduce | Scan) -> str:
        ctype = accumulator_type(stmt)
        text = f"{ctype} {local(stmt.name)} = {start_value(stmt.op, stmt.dtype)};"
        return text + (f" int64_t at_{stmt.name} = 0;" if stmt.finds_position else "")

    def _combine(self, stmt: Reduce | Scan, value: str, position: str) -> str:
        name = local(stmt.name)
        if stmt.name in self.kept_at:
            return f"block_{stmt.name}[{self.kept_at[stmt.name]}] = {value};"
        if stmt.finds_position:
            return take(stmt.op, value, position, name, f"at_{stmt.name}")
        nan = f"nan_{stmt.name}"
        if stmt.name in self.strip_mined:
            name, nan = f"lanes_{stmt.name}[lane]", f"nan_lanes_{stmt.name}[lane]"
        if stmt.name in self.flagged:
            sign = ">" if stmt.op == "max" else "<"
            return (
                f"{name} = {value} {sign} {name} ? {value} : {name}; "
                f"{nan} = d_size_bits({value}) > {nan} ? d_size_bits({value}) : {nan};"
            )
        return f"{name} = {combine(stmt.op, name, value)};"

    def _combine_at(self, stmt: Reduce, value: str, at: str) -> str:
        slot = f"column_{stmt.name}[{at}]"
        if stmt.finds_position:
            return take(stmt.op, value, self._position(stmt), slot, f"column_at_{stmt.name}[{at}]")
        return f"{slot} = {combine(stmt.op, slot, value)};"

    def _position(self, stmt: Reduce) -> str:
        return "" if stmt.position is None else f"(int64_t)({self.index(stmt.position)})"

    # ---- values -----------------------------------------------------------------------------

    def place_of(self, expr: Expr, guard: str) -> int:
        return max(self._depth_of(self.needs(expr)), self.places.get(guard, 0))

    def _depth_of(self, needs: Needs) -> int:
        """Index of the outermost scope that has these loop variables and named values."""
        innermost = len(self.scopes) - 1
        if any(named.op == "scratch" for named in needs.names):
            return innermost
        least = max((self.places.get(local(n.name), innermost) for n in needs.names), default=0)
        for depth, scope in enumerate(self.scopes):
            if depth >= least and needs.variables <= scope.variables:
                return depth
        return innermost

    def depth_at(self, place: int) -> int:
        return place

    def declaration(self, name: str, text: str, dtype: torch.dtype) -> str:
        return f"const {VALUE_TYPE[dtype]} {name} = {text};"

    def literal(self, value: float | int | bool, dtype: torch.dtype) -> str:
        return literal(value, dtype)

    def named_value(self, expr: Named) -> str:
        if expr.op == "scratch":
            return self._kept(expr.name)
        found = self.reductions.get(expr.name)
        result = f"at_{expr.name}" if found and found.finds_position else local(expr.name)
        is_truth = found is not None and found.op in ("any", "all")
        return f"({result} != 0)" if is_truth else result

    def index_value(self, index: Index, guard: str) -> str:
        return f"(int64_t)({self.index(index, guard)})"

    def converted(self, text: str, expr: Convert) -> str:
        return conversion(text, expr.args[0].dtype, expr.dtype, ir.rounds(expr))

    def check(self, expr: Checked, args: list[str], guard: str) -> str:
        if expr.op in INDEX_CHECKS:
            active = f", {guard}" if guard else ""
            return f"d_{expr.op}({args[0]}, {args[1]}, status, {self.site(expr)}{active})"
        return operator(expr, args, str(self.site(expr)))

    def spelled(self, expr: Expr, args: list[str]) -> str:
        if expr.op == "where":
            args = [self.selector(args[0], self.place_of(expr, "")), *args[1:]]
        return operator(expr, args)

    def read(self, item: Read, guard: str) -> str:
        text = self.loaded(item, guard)
        if guard:
            zero = "false" if item.dtype == torch.bool else f"({VALUE_TYPE[item.dtype]})0"
            return f"{self.selector(guard, self.place_of(item, guard))} ? {text} : {zero}"
        return text

    def loaded(self, item: Read, guard: str) -> str:
        """An element in memory as a value."""
        return widened(self._lvalue(item, guard), item.ref.dtype)

    def selector(self, condition: str, place: int) -> str:
        """A condition as it is tested where it selects one of two values, at `place`."""
        return condition

    def _lvalue(self, item: Read, guard: str = "") -> str:
        return self.staged.get((item.ref, item.index)) or (
            f"{self.arg(item.ref)}[{self.index(item.index, guard)}]"
        )

    # ---- indices ----------------------------------------------------------------------------

    def divided(self, atom: FloorDiv | Mod, dividend: str, guard: str) -> str:
        sign = self.DIVIDE if isinstance(atom, FloorDiv) else "%"
        return f"(({dividend}) {sign} {self.size(atom.divisor)})"

    def symbolic(self, size: Size) -> str:
        assert isinstance(size, sympy.Expr)
        if not has_spelling(size):  # the host computes it and passes it as an argument
            return self.argument(size)
        renamed = {
            symbol: sympy.Symbol(self.argument(symbol), **symbol.assumptions0)
            for symbol in sorted(size.free_symbols, key=str)
        }
        return f"({size_text(size.xreplace(renamed))})"


def _unrounded(stmt: Store) -> Expr:
    """The value of a store, without a cast to the 16-bit float to which the store rounds anyway."""
    value, dtype = stmt.value, stmt.ref.dtype
    cast = value.op == "cast" and value.dtype == dtype and dtype in REDUCED_FLOATS
    return value.args[0] if cast and not stmt.op else value


def nan_bits(stmt: Reduce | Scan) -> str:
    """The unsigned type that holds the magnitude bits by which a max or min finds NaNs."""
    return "uint64_t" if VALUE_TYPE[stmt.dtype] == "double" else "uint32_t"


def accumulator_type(stmt: Reduce | Scan) -> str:
    """The C type of a reduction's or scan's accumulator; any and all count in int."""
    return "int" if stmt.op in ("any", "all") else VALUE_TYPE[stmt.dtype]
