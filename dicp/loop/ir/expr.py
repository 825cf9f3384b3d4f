"""Expressions of the loop IR: one element of a tensor, as a DAG over loads at logical coordinates.

Coordinates are logical (one index per tensor axis); strides enter only when the scheduler builds a
kernel. Expressions are interned: two that compute the same are the same object, so they are
compared by `is`, and a dictionary or set of them shares work between equal parts of bodies.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch

from dicp.dtypes import REDUCED_FLOATS, Number, converted, holds_all, opmath_dtype, shortest
from dicp.errors.text import did_you_mean, nearest
from dicp.loop.ir.index import Index, Size, Var, index_text, indirect_exprs
from dicp.loop.ir.ops import CHECKED_OPS, INDEX_CHECKS, SCALAR_OPS
from dicp.origin import Origin

Role = Literal["input", "constant", "temp", "alias", "seed"]


@dataclass(eq=False)
class Ref:
    """A tensor in memory: a graph input, a constant, a computed buffer, or a view of another."""

    name: str
    shape: tuple[Size, ...]
    dtype: torch.dtype
    strides: tuple[Size, ...]
    role: Role
    offset: Size = 0
    base: Ref | None = None
    producer: Any = None
    opaque: bool = False
    """Whether only calls produce and consume it: it is not strided, or its sizes depend on data."""

    @property
    def root(self) -> Ref:
        return self if self.base is None else self.base.root

    def chain(self) -> Iterator[Ref]:
        """This tensor, its base, and so on up to the root."""
        yield self
        if self.base is not None:
            yield from self.base.chain()

    def __str__(self) -> str:
        return self.name


# ---- expressions ------------------------------------------------------------------------------

_NODES: WeakValueDictionary[tuple[Any, ...], Expr] = WeakValueDictionary()
"""Class and fields -> the expression that has them, while anything uses it."""
_NODES_LOCK = Lock()


class _Interned(type):
    """Makes one object per combination of fields."""

    def __call__(cls, *fields: Any) -> Any:
        key = (cls, *fields)
        node = _NODES.get(key)
        if node is None:
            fresh = super().__call__(*fields)
            with _NODES_LOCK:  # threads that make the same node at once share one
                node = _NODES.setdefault(key, fresh)
        return node


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Expr(metaclass=_Interned):
    """One scalar operation on the values of `args`; a subclass per kind adds what it needs beside.

    The functions below build expressions, and convert and check their operands; the classes are for
    looking at them. Fields are given by position.
    """

    op: str
    dtype: torch.dtype
    args: tuple[Expr, ...] = field(repr=False)  # shared: printed, they would grow exponentially
    _structure: str = field(default="", init=False, repr=False)

    def with_args(self, args: tuple[Expr, ...]) -> Expr:
        """The same operation on other operands."""
        return type(self)(self.op, self.dtype, args)

    def detail(self) -> object:
        """What `structure` reads beside operator, dtype and operands."""
        return None

    @property
    def structure(self) -> str:
        """A digest of the computation; of tensors it has dtypes, roles and layouts, not names."""
        if not self._structure:
            parts = (self.op, self.dtype, *(arg.structure for arg in self.args), self.detail())
            digest = hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()
            object.__setattr__(self, "_structure", digest[:16])
        return self._structure

    @property
    def key(self) -> str:
        """A sort key, the same in every process: the structure, then the tensors' names."""
        names = dict.fromkeys(e.ref.name for e in walk(self) if isinstance(e, (Load, Read)))
        return ",".join([self.structure, *(f"{len(name)}{name}" for name in names)])

    def __add__(self, other: Expr | float) -> Expr:
        return _binary("add", self, other)

    def __sub__(self, other: Expr | float) -> Expr:
        return _binary("sub", self, other)

    def __rsub__(self, other: Expr | float) -> Expr:
        return _binary("sub", other, self)

    def __mul__(self, other: Expr | float) -> Expr:
        return _binary("mul", self, other)

    def __truediv__(self, other: Expr | float) -> Expr:
        return _binary("div", self, other)

    def __rtruediv__(self, other: Expr | float) -> Expr:
        return _binary("div", other, self)

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> Expr:
        return apply("neg", self.dtype, self)


@dataclass(frozen=True, eq=False, slots=True)
class Operator(Expr):
    """A row of SCALAR_OPS, random numbers included."""


@dataclass(frozen=True, eq=False, slots=True)
class Checked(Expr):
    """An operator that may raise: integer division, or an index that must lie below a size.

    Its `op` is one of CHECKED_OPS or INDEX_CHECKS.
    """

    origin: Origin | None
    """The user's operator, for the error message; its first user's, once there is one."""

    def detail(self) -> object:
        return None if self.origin is None else ""

    def with_args(self, args: tuple[Expr, ...]) -> Expr:
        return Checked(self.op, self.dtype, args, self.origin)


@dataclass(frozen=True, eq=False, slots=True)
class Convert(Expr):
    """A conversion to `dtype`: "cast" rounds; "widen" does not, see `opmath`."""


@dataclass(frozen=True, eq=False, slots=True)
class Masked(Expr):
    """`args` are a condition and a value: loads of the value are executed where it holds."""


@dataclass(frozen=True, eq=False, slots=True)
class Const(Expr):
    """A number."""

    value: Number
    text: str
    """Tells apart zeros of opposite sign, which are equal."""

    def detail(self) -> object:
        return self.value


@dataclass(frozen=True, eq=False, slots=True)
class IndexValue(Expr):
    """An index as an int64."""

    index: Index

    def detail(self) -> object:
        return self.index


@dataclass(frozen=True, eq=False, slots=True)
class Load(Expr):
    """An element of a tensor at logical coordinates; the scheduler turns loads into reads."""

    ref: Ref
    coords: tuple[Index, ...]

    def detail(self) -> object:
        return _layout(self.ref, self.coords)


@dataclass(frozen=True, eq=False, slots=True)
class Read(Expr):
    """The element of a tensor at an offset in memory, counted in elements."""

    ref: Ref
    index: Index

    def detail(self) -> object:
        return _layout(self.ref, (self.index,))


@dataclass(frozen=True, eq=False, slots=True)
class Named(Expr):
    """A value that a statement of the same kernel has named.

    "reduction_result" is a finished reduction, a scan or a scalar of the row; "scratch" is a value
    that an earlier phase kept.
    """

    name: str

    def detail(self) -> object:
        return self.name


def _layout(ref: Ref, coords: tuple[Index, ...]) -> object:
    return (ref.dtype, ref.role, ref.shape, ref.strides, *map(str, coords))


def _binary(op: str, a: Expr | float, b: Expr | float) -> Expr:
    dtype = a.dtype if isinstance(a, Expr) else b.dtype  # type: ignore[union-attr]
    return apply(op, dtype, _operand(a, dtype), _operand(b, dtype))


def _operand(value: Expr | float, dtype: torch.dtype) -> Expr:
    if not isinstance(value, Expr):
        return const(value, dtype)
    assert value.dtype == dtype, f"mixed operand types {value.dtype} and {dtype}"
    return value


def const(value: Number, dtype: torch.dtype) -> Const:
    """A number as an operand of arithmetic in `dtype`; 16-bit floats compute in float32.

    `as_stored(const(..))` is the number as an element of a tensor, rounded to its dtype.
    """
    held = converted(value, opmath_dtype(dtype))
    assert held is not None, f"{value} in {dtype}"
    held = held if held == held else math.nan  # one object for every NaN
    return Const("const", dtype, (), held, repr(held))


def is_const(expr: Expr, value: Number) -> bool:
    """Whether `expr` is a constant that equals `value`."""
    return isinstance(expr, Const) and expr.value == value


def is_zero(expr: Expr) -> bool:
    """Whether `expr` is 0, converted to whatever dtype; -0 is not."""
    while isinstance(expr, Convert):
        (expr,) = expr.args
    return is_const(expr, 0) and math.copysign(1, expr.value) > 0  # type: ignore[attr-defined]


def index_value(index: Index, dtype: torch.dtype = torch.int64) -> Expr:
    """The value of `index` as an expression."""
    value = IndexValue("index", torch.int64, (), index)
    return value if dtype == torch.int64 else cast(value, dtype)


def load(ref: Ref, coords: Sequence[Index]) -> Load:
    """The element of `ref` at `coords`, from memory or by computing it there."""
    return Load("load", ref.dtype, (), ref, tuple(coords))


def read(ref: Ref, index: Index) -> Read:
    """The element of `ref` at memory offset `index`, in elements."""
    return Read("read", ref.dtype, (), ref, index)


def result(name: str, dtype: torch.dtype) -> Named:
    """The result of the kernel's reduction `name`."""
    return Named("reduction_result", dtype, (), name)


def scratch(name: str, dtype: torch.dtype) -> Named:
    """The value of scratch row `name` at the current point."""
    return Named("scratch", dtype, (), name)


def cast(value: Expr, dtype: torch.dtype) -> Expr:
    """`value` converted to `dtype`; floats are rounded to 16-bit floats only when stored."""
    if value.dtype.is_floating_point and value.op != "const":
        return opmath(value, dtype)
    return rounded(value, dtype)


def rounded(value: Expr, dtype: torch.dtype) -> Expr:
    """`value` converted to `dtype` and rounded, even to 16-bit floats, as user conversions are."""
    if value.dtype == dtype:
        return value
    held = converted(value.value, dtype) if isinstance(value, Const) else None
    return Convert("cast", dtype, (value,)) if held is None else const(held, dtype)


def as_stored(value: Expr) -> Expr:
    """`value` as it would be read back from memory: a 16-bit float is rounded."""
    if value.dtype not in REDUCED_FLOATS:
        return value
    if isinstance(value, Const):
        held = converted(value.value, value.dtype)
        assert held is not None
        return const(held, value.dtype)
    return Convert("cast", value.dtype, (value,))


def rounds(expr: Expr) -> bool:
    """Whether `expr` is a cast that may round: a value loaded in its dtype is rounded already."""
    source = expr.args[0]
    return expr.op == "cast" and not (source.op in ("load", "read") and source.dtype == expr.dtype)


def opmath(value: Expr, dtype: torch.dtype) -> Expr:
    """`value` as an operand of arithmetic in `dtype`, unrounded where `dtype` is a 16-bit float."""
    if value.dtype == dtype:
        return value
    if dtype in REDUCED_FLOATS:
        if isinstance(value, Const):
            return const(value.value, dtype)
        return Convert("widen", dtype, (value,))
    return rounded(value, dtype)


def masked(test: Expr, value: Expr) -> Expr:
    """`value` with its loads executed only where `test` holds; elsewhere they count as zero."""
    return Masked("masked", value.dtype, (test, value))


def apply(op: str, dtype: torch.dtype, *args: Expr) -> Expr:
    """Operator `op` of SCALAR_OPS on `args`, with a result in `dtype`.

    Raises ValueError for an operator that SCALAR_OPS lacks, and for another number of operands.
    """
    if op not in SCALAR_OPS:
        near = did_you_mean(nearest(op, tuple(SCALAR_OPS)))
        raise ValueError(f"there is no scalar operator {op!r} in dicp/loop/ir/ops.py.{near}")
    if (arity := SCALAR_OPS[op].arity) != len(args):
        raise ValueError(f"the scalar operator {op!r} takes {arity} operands, not {len(args)}")
    return Checked(op, dtype, args, None) if op in CHECKED_OPS else Operator(op, dtype, args)


def checked_index(op: str, index: Expr, size: Expr, origin: Origin | None) -> Expr:
    """`index`, which must lie below `size`; `op` is one of INDEX_CHECKS."""
    assert op in INDEX_CHECKS, op
    return Checked(op, torch.int64, (index, size), origin)


def walk(expr: Expr, seen: set[Expr] | None = None) -> Iterator[Expr]:
    """Every node of the DAG once, operands first."""
    seen = set() if seen is None else seen
    if expr in seen:
        return
    seen.add(expr)
    for arg in expr.args:
        yield from walk(arg, seen)
    for index in indices_of(expr):
        for inner in indirect_exprs(index):
            yield from walk(inner, seen)
    yield expr


def indices_of(expr: Expr) -> tuple[Index, ...]:
    """The index expressions of this node itself, its operands' left out."""
    if isinstance(expr, Load):
        return expr.coords
    return (expr.index,) if isinstance(expr, (Read, IndexValue)) else ()


def loads(expr: Expr) -> list[Load]:
    """The loads in the DAG of `expr`, each once."""
    return [e for e in walk(expr) if isinstance(e, Load)]


def reads(exprs: Iterable[Expr]) -> list[Read]:
    """The memory reads of kernels' expressions; those of a shared subexpression occur once."""
    seen: set[Expr] = set()
    return [e for expr in exprs for e in walk(expr, seen) if isinstance(e, Read)]


def with_origin(expr: Expr, origin: Origin) -> Expr:
    """`expr` with `origin` attached to every operator that may raise, for its error message."""
    if not any(isinstance(e, Checked) and e.origin is None for e in walk(expr)):
        return expr
    done: dict[Expr, Expr] = {}

    def visit(e: Expr) -> Expr:
        found = done.get(e)
        if found is None:
            args = tuple(visit(a) for a in e.args)
            if isinstance(e, Checked):
                found = Checked(e.op, e.dtype, args, origin if e.origin is None else e.origin)
            else:
                found = e.with_args(args) if args else e
            done[e] = found
        return found

    return visit(expr)


def map_indices(expr: Expr, change: Callable[[Index], Index]) -> Expr:
    """`expr` with its own indices changed; those of its operands stay."""
    if isinstance(expr, Load):
        return load(expr.ref, [change(c) for c in expr.coords])
    if isinstance(expr, Read):
        return read(expr.ref, change(expr.index))
    return index_value(change(expr.index)) if isinstance(expr, IndexValue) else expr


def _without_round_trip(expr: Expr) -> Expr:
    """An element itself, for one that is converted to a type that holds it and back, and one
    conversion for two of the same kind."""
    if expr.op != "cast" or not isinstance(expr.args[0], Convert):
        return expr
    (wide,) = expr.args
    if wide.op == "cast" and wide.dtype == expr.dtype:
        return wide
    (element,) = wide.args
    whole = isinstance(element, (Load, Read)) and element.dtype == expr.dtype
    return element if whole and holds_all(expr.dtype, wide.dtype) else expr


class Rewriter:
    """Rebuilds an expression DAG: variables substituted, loads and reads replaced."""

    def __init__(
        self,
        mapping: dict[Var, Index] | None = None,
        on_load: Callable[[Load], Expr | None] | None = None,
        on_read: Callable[[Read], Expr | None] | None = None,
    ) -> None:
        self.mapping = mapping or {}
        self.on_load = on_load
        self.on_read = on_read
        self._done: dict[Expr, Expr] = {}

    def __call__(self, expr: Expr) -> Expr:
        found = self._done.get(expr)
        if found is None:
            found = self._done[expr] = self._rebuild(expr)
        return found

    def _rebuild(self, expr: Expr) -> Expr:
        if expr.args:
            args = tuple(self(a) for a in expr.args)
            return expr if args == expr.args else _without_round_trip(expr.with_args(args))
        moved = map_indices(expr, self.index)
        replaced: Expr | None = None
        if isinstance(moved, Load) and self.on_load:
            replaced = self.on_load(moved)
        elif isinstance(moved, Read) and self.on_read:
            replaced = self.on_read(moved)
        return moved if replaced is None else replaced

    def index(self, index: Index) -> Index:
        return index.substitute(self.mapping, self)


def show(expr: Expr) -> str:
    """`expr` as one line of text, or `value where e0 = ...; e1 = ...` with shared parts named."""
    uses: dict[Expr, int] = {}
    for e in walk(expr):
        for arg in e.args:
            uses[arg] = uses.get(arg, 0) + 1
    shown: dict[Expr, str] = {}
    named: list[str] = []
    for e in walk(expr):
        text = _show_one(e, shown)
        if uses.get(e, 0) > 1 and e.args:
            named.append(f"e{len(named)} = {text}")
            text = f"e{len(named) - 1}"
        shown[e] = text
    return shown[expr] + (f" where {'; '.join(named)}" if named else "")


def _show_one(expr: Expr, shown: dict[Expr, str]) -> str:
    if isinstance(expr, Const):
        return shortest(expr.value, expr.dtype) if isinstance(expr.value, float) else expr.text
    if isinstance(expr, IndexValue):
        return f"index({index_text(expr.index, shown.__getitem__)})"
    if isinstance(expr, (Load, Read)):
        coords = ", ".join(index_text(c, shown.__getitem__) for c in indices_of(expr))
        return f"{expr.ref}[{coords}]"
    if isinstance(expr, Named):
        return expr.name
    name = f"{expr.op}.{str(expr.dtype).removeprefix('torch.')}" if expr.op == "cast" else expr.op
    return f"{name}({', '.join(shown[a] for a in expr.args)})"
