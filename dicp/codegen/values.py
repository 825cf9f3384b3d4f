"""The values of a kernel as code: each is computed once, where all that it depends on is known.

In: a kernel's expressions and statements. Out: lines of code in nested scopes, and the text that
stands for each value. What is computed once and where, under which guard memory is read, the order
of statements, indices and what a conversion means are the same in every language and stand here. A
subclass per language spells them.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import torch

from dicp.dtypes import REDUCED_FLOATS
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Checked, Const, Convert, Expr, IndexValue, Masked, Named, Read, Ref
from dicp.loop.ir.index import (
    Atom,
    FloorDiv,
    Index,
    Indirect,
    Mod,
    Size,
    Var,
    indirect_exprs,
    product,
)
from dicp.loop.ir.kernel import Kernel, Let, Reduce, Scan, ScratchStore, Stmt, Store
from dicp.origin import Origin

Place = TypeVar("Place")
"""What decides the scope of a value: a depth, or the axes of a tile that the value varies along."""

ConversionKind = Literal["test", "select", "round", "truncate", "convert"]


@dataclass
class Scope:
    """A block of code: the loop variables known in it and the values already computed there."""

    indent: int
    variables: frozenset[Var] = frozenset()
    lines: list[str] = field(default_factory=list)
    values: dict[object, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Needs:
    """What an expression depends on."""

    variables: frozenset[Var] = frozenset()
    names: frozenset[Named] = frozenset()
    """Values that statements have named."""

    def __or__(self, other: Needs) -> Needs:
        return Needs(self.variables | other.variables, self.names | other.names)


class Values(abc.ABC, Generic[Place]):
    """Emits the values of one kernel; `Place` is the language's."""

    DIVIDE = "/"
    """The operator of integer division, for operands that are not negative."""
    MARGIN = "  "
    """What each level of nesting is indented by."""
    VALUE_TYPE: Mapping[torch.dtype, str]
    """The type that holds a value of each dtype; 16-bit floats are widened."""
    VARIANTS: Mapping[str, str]
    """Cheaper forms of operators, which a kernel's schedule chooses: a row for each `Variant`."""
    SHARED: Mapping[str, str]
    """What a row of VARIANTS computes once for all elements with the same second operand."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.stored = kernel.written_buffers()
        self.saves = {s.name: s for s in kernel.stmts() if isinstance(s, ScratchStore)}
        self.variants = kernel.variants
        self.args: dict[Ref, str] = {}
        self.symbols: dict[Size, str] = {}
        """Sizes that are arguments of the kernel, and their names in it."""
        self.sites: list[tuple[str, Origin | None]] = []
        """Operator and origin of each runtime check."""
        self.scopes: list[Scope] = []
        self.places: dict[str, Place] = {}
        """Where a named value is computed."""
        self._needs: dict[Expr, Needs] = {}
        self._temp = 0

    # ---- what a language spells -----------------------------------------------------------------

    @abc.abstractmethod
    def place_of(self, expr: Expr, guard: str) -> Place:
        """Where `expr` is computed, under `guard`."""

    @abc.abstractmethod
    def depth_at(self, place: Place) -> int:
        """The position of the outermost scope in which a value of that place can be computed."""

    @abc.abstractmethod
    def declaration(self, name: str, text: str, dtype: torch.dtype) -> str:
        """The statement that gives the value of `text` a name."""

    @abc.abstractmethod
    def literal(self, value: float | int | bool, dtype: torch.dtype) -> str:
        """A literal of exactly this value and type."""

    @abc.abstractmethod
    def named_value(self, expr: Named) -> str:
        """A value that a statement has named."""

    @abc.abstractmethod
    def read(self, item: Read, guard: str) -> str:
        """An element loaded from memory and widened; zero where `guard` does not hold."""

    @abc.abstractmethod
    def index_value(self, index: Index, guard: str) -> str:
        """An index as an int64."""

    @abc.abstractmethod
    def converted(self, text: str, expr: Convert) -> str:
        """`text` converted to the dtype of `expr`."""

    @abc.abstractmethod
    def check(self, expr: Checked, args: list[str], guard: str) -> str:
        """An operator that reports an error where `guard` and its condition hold."""

    @abc.abstractmethod
    def spelled(self, expr: Expr, args: list[str]) -> str:
        """Any other operator applied to `args`."""

    @abc.abstractmethod
    def divided(self, atom: FloorDiv | Mod, dividend: str, guard: str) -> str:
        """A quotient or remainder in an index."""

    @abc.abstractmethod
    def define(self, stmt: Reduce | Scan | Let | ScratchStore, value: str) -> None:
        """Emits a statement other than a store."""

    @abc.abstractmethod
    def store(self, stmt: Store) -> Callable[[], None]:
        """Computes what a store needs; returns what emits it."""

    # ---- what a language may change -------------------------------------------------------------

    @property
    def rematerializes(self) -> bool:
        """Whether scratch values are computed again where they are read."""
        return False

    def condition(self, test: Expr, guard: str) -> str:
        """The name of a condition."""
        return self.value(test, guard)

    def operands(self, expr: Expr, guard: str) -> list[str]:
        return [self.value(arg, guard) for arg in expr.args]

    def symbolic(self, size: Size) -> str:
        """A size known only at run time."""
        return self.argument(size)

    def variable(self, var: Var) -> str:
        return var.key

    def indirect(self, atom: Indirect, guard: str) -> str:
        """An index that is itself read or computed."""
        return self.value(atom.expr, guard)

    def reaching(self, index: Index) -> None:
        """Called with each index that is divided or used as a value: it must not wrap around."""

    # ---- names ----------------------------------------------------------------------------------

    def arg(self, ref: Ref) -> str:
        return self.args.setdefault(ref, f"a{len(self.args)}")

    def argument(self, size: Size) -> str:
        """The name of the kernel's argument that carries `size`."""
        return self.symbols.setdefault(size, f"n{len(self.symbols)}")

    def fresh(self) -> str:
        self._temp += 1
        return f"x{self._temp}"

    def site(self, expr: Checked) -> int:
        """Numbers a runtime check."""
        self.sites.append((expr.op, expr.origin))
        return len(self.sites)

    # ---- scopes ---------------------------------------------------------------------------------

    def push(self, variables: Sequence[Var], indent: int) -> Scope:
        known = self.scopes[-1].variables if self.scopes else frozenset()
        scope = Scope(indent, known | frozenset(variables))
        self.scopes.append(scope)
        return scope

    def pop(self, scope: Scope) -> None:
        assert self.scopes[-1] is scope
        self.scopes.pop()

    def line(self, text: str, depth: int = -1) -> None:
        """Adds a line to the scope at `depth`, by default the innermost."""
        scope = self.scopes[depth]
        scope.lines.append(self.MARGIN * scope.indent + text)

    def once(self, key: object, text: str, dtype: torch.dtype, place: Place) -> str:
        """A name for `text`, declared in the outermost possible scope; equal text shares it."""
        depth, same = self.depth_at(place), (self.VALUE_TYPE[dtype], text)
        for scope in self.scopes[: depth + 1]:
            name = scope.values.get(key) or scope.values.get(same)
            if name is not None:
                scope.values[key] = name
                return name
        name = self.fresh()
        self.line(self.declaration(name, text, dtype), depth)
        self.scopes[depth].values[key] = self.scopes[depth].values[same] = name
        self.places[name] = place
        return name

    def forget(self, root: Ref) -> None:
        """Drops values that were loaded from `root`, which has been stored to since."""
        for scope in self.scopes:
            stale = {
                name for key, name in scope.values.items()
                if isinstance(key, tuple) and isinstance(key[0], Read) and key[0].ref.root is root
            }  # fmt: skip
            if stale:
                scope.values = {k: n for k, n in scope.values.items() if n not in stale}

    # ---- what values depend on ------------------------------------------------------------------

    def needs(self, expr: Expr) -> Needs:
        found = self._needs.get(expr)
        if found is None:
            found = Needs(names=frozenset((expr,)) if isinstance(expr, Named) else frozenset())
            for arg in expr.args:
                found |= self.needs(arg)
            for index in ir.indices_of(expr):
                found |= self.needs_of_index(index)
            self._needs[expr] = found
        return found

    def needs_of_index(self, index: Index) -> Needs:
        found = Needs(frozenset(index.variables()))
        for inner in indirect_exprs(index):
            found |= self.needs(inner)
        return found

    # ---- values ---------------------------------------------------------------------------------

    def value(self, expr: Expr, guard: str = "") -> str:
        """The name of `expr`, or a literal; memory is read only where `guard` holds."""
        if isinstance(expr, Const):
            return self.literal(expr.value, expr.dtype)
        if isinstance(expr, Named):
            if expr.op == "scratch" and self.rematerializes:
                return self.value(self.saves[expr.name].value, guard)
            return self.named_value(expr)
        if isinstance(expr, Masked):
            return self._masked(expr, guard)
        place = self.place_of(expr, guard)
        for scope in self.scopes[: self.depth_at(place) + 1]:
            found = scope.values.get((expr, guard)) or scope.values.get((expr, ""))
            if found is not None:
                return found
        return self.once((expr, guard), self.text(expr, guard), expr.dtype, place)

    def _masked(self, expr: Masked, guard: str) -> str:
        return self.value(expr.args[1], self.guard_of(expr, guard))

    def guard_of(self, expr: Masked, guard: str) -> str:
        """The name of the condition under which the loads of `expr` are executed."""
        test = expr.args[0]
        name = self.condition(test, guard)
        place = self.place_of(test, guard)
        if guard:
            both = f"{guard} & {name}"
            name = self.once(("guard", both), both, torch.bool, place)
        self.places[name] = place
        return name

    def text(self, expr: Expr, guard: str) -> str:
        """`expr` as code, its operands by their names."""
        if isinstance(expr, Read):
            return self.read(expr, guard)
        if isinstance(expr, IndexValue):
            self.reaching(expr.index)
            return self.index_value(expr.index, guard)
        args = self.operands(expr, guard)
        if isinstance(expr, Convert):
            return self.converted(args[0], expr)
        if isinstance(expr, Checked):
            return self.check(expr, args, guard)
        return self.operator(expr, args)

    def operator(self, expr: Expr, args: list[str]) -> str:
        """An operator applied to `args`, in the cheaper form that the schedule has chosen."""
        variant = self.variants.get(expr)
        if variant is None:
            return self.spelled(expr, args)
        shared = self.SHARED.get(variant.name, "").format(*args)
        if shared:
            place = self.place_of(expr.args[1], "")
            shared = self.once(shared, shared, torch.float32, place)
        number = self.literal(variant.number, torch.float32)
        return self.VARIANTS[variant.name].format(*args, shared=shared, number=number)

    # ---- statements -----------------------------------------------------------------------------

    def statements(self, stmts: Iterable[Stmt]) -> None:
        """Emits what `stmts` compute, then their stores: all of them read what was there before."""
        written: list[Store] = []
        ends: list[Callable[[], None]] = []
        for stmt in stmts:
            if isinstance(stmt, Store):
                written.append(stmt)
                ends.append(self.store(stmt))
            else:
                self.define(stmt, self.value(stmt.value))
        for end in ends:
            end()
        for stmt in written:
            self.forget(stmt.ref.root)

    # ---- indices --------------------------------------------------------------------------------

    def size(self, size: Size) -> str:
        """A number, or what stands for a size known only at run time."""
        if isinstance(size, int):
            return str(size) if size >= 0 else f"({size})"
        return self.symbolic(size)

    def index(self, index: Index, guard: str = "") -> str:
        parts = []
        for atom, c in index.terms:
            text = self._atom(atom, guard)
            parts.append(text if c == 1 else f"{self.size(c)} * {text}")
        if index.const != 0 or not parts:
            parts.append(self.size(index.const))
        return " + ".join(parts)

    def _atom(self, atom: Atom, guard: str) -> str:
        if isinstance(atom, Var):
            return self.variable(atom)
        if isinstance(atom, Indirect):
            return self.indirect(atom, guard)
        dividend = self.index(atom.value, guard)
        self.reaching(atom.value)
        return self.divided(atom, dividend, guard)

    def digit(self, flat: str, loops: Sequence[Var], at: int) -> str:
        """The index of loop `at`: `flat` is a mixed-radix number with a digit for each loop."""
        below = product(v.size for v in loops[at + 1 :])
        text = flat if below == 1 else f"{flat} {self.DIVIDE} {self.size(below)}"
        if at == 0:
            return text
        return f"{text if below == 1 else f'({text})'} % {self.size(loops[at].size)}"


def conversion_kind(source: torch.dtype, target: torch.dtype, rounded: bool) -> ConversionKind:
    """What a conversion does: test a number for zero, select 0 or 1, round to a 16-bit float if
    `rounded`, truncate a float to an integer, or only change the type."""
    if target == torch.bool:
        return "test"
    if source == torch.bool:
        return "select"
    if target in REDUCED_FLOATS and rounded:
        return "round"
    integer = not target.is_floating_point
    return "truncate" if source.is_floating_point and integer else "convert"


def margin(depth: int) -> str:
    """The white space before a line at nesting depth `depth`."""
    return "  " * depth


def local(name: str) -> str:
    """The name in the code of a value that a statement has named."""
    return f"v_{name}"
