"""The loop IR: expressions, tensors, computations and library calls of one graph.

Lowering produces a flat list of `Compute` and `Call` nodes in graph order. Each `Compute` is one
operator's loop nest over its own domain, with an expression DAG as body; the scheduler then fuses
computes into kernels. Coordinates are logical (one index per tensor axis); strides enter only when
the scheduler builds a kernel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from dicp.dtypes import HALVES, Number, converted, shortest
from dicp.loop.ir.index import Index, Size, Var
from dicp.loop.ir.ops import CHECKED_OPS, SCALAR_OPS
from dicp.origin import Origin

LOW_PRECISION = HALVES

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

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False, slots=True)
class Expr:
    """One scalar operation. `attr` holds a constant, an `Index`, a `Load`, an `Origin` or a name.

    Operators beyond SCALAR_OPS: "const", "index" (an Index as int64), "load" (at a tensor's
    coordinates), "read" (a load at a memory offset, in kernels), "cast", "widen" (see `opmath`),
    "masked", "reduction_result" (a finished reduction, or a scan or scalar, of the same kernel),
    "scratch" (a value kept for a later phase), and INDEX_CHECKS (an index that must lie below a
    size).
    """

    op: str
    dtype: torch.dtype
    args: tuple[Expr, ...] = ()
    attr: Any = None
    _structure: str = field(default="", init=False, repr=False)

    @property
    def structure(self) -> str:
        """A digest of the computation; of tensors it has dtypes, roles and layouts, not names."""
        if not self._structure:
            object.__setattr__(self, "_structure", _structure_of(self))
        return self._structure

    @property
    def key(self) -> str:
        """A sort key, the same in every process: the structure, then the tensors' names."""
        names = dict.fromkeys(e.attr.ref.name for e in walk(self) if isinstance(e.attr, Load))
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
        return Expr("neg", self.dtype, (self,))


def _binary(op: str, a: Expr | float, b: Expr | float) -> Expr:
    dtype = a.dtype if isinstance(a, Expr) else b.dtype  # type: ignore[union-attr]
    return Expr(op, dtype, (_operand(a, dtype), _operand(b, dtype)))


def _operand(value: Expr | float, dtype: torch.dtype) -> Expr:
    if not isinstance(value, Expr):
        return const(value, dtype)
    assert value.dtype == dtype, f"mixed operand types {value.dtype} and {dtype}"
    return value


@dataclass(frozen=True, eq=False, slots=True)
class Load:
    ref: Ref
    coords: tuple[Index, ...]


def const(value: Number, dtype: torch.dtype) -> Expr:
    """A number as an operand of arithmetic in `dtype`; 16-bit floats compute in float32.

    `as_stored(const(..))` is the number as an element of a tensor, rounded to its dtype.
    """
    held = converted(value, torch.float32 if dtype in LOW_PRECISION else dtype)
    assert held is not None, f"{value} in {dtype}"
    return Expr("const", dtype, attr=held)


def index_value(index: Index, dtype: torch.dtype = torch.int64) -> Expr:
    value = Expr("index", torch.int64, attr=index)
    return value if dtype == torch.int64 else cast(value, dtype)


def load(ref: Ref, coords: Sequence[Index]) -> Expr:
    return Expr("load", ref.dtype, attr=Load(ref, tuple(coords)))


def cast(value: Expr, dtype: torch.dtype) -> Expr:
    """`value` converted to `dtype`; floats are rounded to 16-bit floats only when stored."""
    if value.dtype.is_floating_point and value.op != "const":
        return opmath(value, dtype)
    return rounded(value, dtype)


def rounded(value: Expr, dtype: torch.dtype) -> Expr:
    """`value` converted to `dtype` and rounded, even to 16-bit floats, as user conversions are."""
    if value.dtype == dtype:
        return value
    held = converted(value.attr, dtype) if value.op == "const" else None
    return Expr("cast", dtype, (value,)) if held is None else const(held, dtype)


def as_stored(value: Expr) -> Expr:
    """`value` as it would be read back from memory: a 16-bit float is rounded."""
    if value.dtype not in LOW_PRECISION:
        return value
    if value.op == "const":
        held = converted(value.attr, value.dtype)
        assert held is not None
        return const(held, value.dtype)
    return Expr("cast", value.dtype, (value,))


def rounds(expr: Expr) -> bool:
    """Whether `expr` is a cast that may round: a value loaded in its dtype is rounded already."""
    source = expr.args[0]
    return expr.op == "cast" and not (source.op in ("load", "read") and source.dtype == expr.dtype)


def opmath(value: Expr, dtype: torch.dtype) -> Expr:
    """`value` as an operand of arithmetic in `dtype`, unrounded where `dtype` is a 16-bit float."""
    if value.dtype == dtype:
        return value
    if dtype in LOW_PRECISION:
        return Expr("widen", dtype, (value,)) if value.op != "const" else const(value.attr, dtype)
    return rounded(value, dtype)


def masked(test: Expr, value: Expr) -> Expr:
    """`value` with its loads executed only where `test` holds; elsewhere they count as zero."""
    return Expr("masked", value.dtype, (test, value))


def apply(op: str, dtype: torch.dtype, *args: Expr, attr: Any = None) -> Expr:
    assert SCALAR_OPS[op].arity == len(args), (op, len(args))
    return Expr(op, dtype, args, attr)


def _structure_of(expr: Expr) -> str:
    attr = "" if isinstance(expr.attr, Origin) else expr.attr
    if isinstance(attr, Load):
        ref = attr.ref
        attr = (ref.dtype, ref.role, ref.shape, ref.strides, *map(str, attr.coords))
    parts = (expr.op, expr.dtype, *(arg.structure for arg in expr.args), attr)
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()[:16]


def walk(expr: Expr, seen: set[int] | None = None) -> Iterator[Expr]:
    """Every node of the DAG once, operands first."""
    seen = set() if seen is None else seen
    if id(expr) in seen:
        return
    seen.add(id(expr))
    for arg in expr.args:
        yield from walk(arg, seen)
    for index in indices_of(expr):
        for inner in _indirect_exprs(index):
            yield from walk(inner, seen)
    yield expr


def indices_of(expr: Expr) -> tuple[Index, ...]:
    if isinstance(expr.attr, Load):
        return expr.attr.coords
    return (expr.attr,) if isinstance(expr.attr, Index) else ()


def _indirect_exprs(index: Index) -> Iterator[Expr]:
    for atom, _ in index.terms:
        inner = getattr(atom, "expr", None)
        if inner is not None:
            yield inner
        value = getattr(atom, "value", None)
        if value is not None:
            yield from _indirect_exprs(value)


def loads(expr: Expr) -> list[Load]:
    return [e.attr for e in walk(expr) if e.op == "load"]


def reads(exprs: Iterable[Expr]) -> list[Load]:
    """The memory reads of kernels' expressions; those of a shared subexpression occur once."""
    seen: set[int] = set()
    return [e.attr for expr in exprs for e in walk(expr, seen) if e.op == "read"]


def with_origin(expr: Expr, origin: Origin) -> Expr:
    """`expr` with `origin` attached to every operator that may raise, for its error message."""
    if not any(e.op in CHECKED_OPS and e.attr is None for e in walk(expr)):
        return expr
    done: dict[int, Expr] = {}

    def visit(e: Expr) -> Expr:
        found = done.get(id(e))
        if found is None:
            attr = origin if e.op in CHECKED_OPS and e.attr is None else e.attr
            found = done[id(e)] = Expr(e.op, e.dtype, tuple(visit(a) for a in e.args), attr)
        return found

    return visit(expr)


class Rewriter:
    """Rebuilds an expression DAG: variables substituted, loads replaced, sharing kept."""

    def __init__(
        self,
        mapping: dict[Var, Index] | None = None,
        on_load: Callable[[Load, Expr], Expr | None] | None = None,
    ) -> None:
        self.mapping = mapping or {}
        self.on_load = on_load
        self._done: dict[int, Expr] = {}
        self._keep: list[Expr] = []

    def __call__(self, expr: Expr) -> Expr:
        found = self._done.get(id(expr))
        if found is None:
            found = self._done[id(expr)] = self._rebuild(expr)
            self._keep.append(expr)
        return found

    def _rebuild(self, expr: Expr) -> Expr:
        attr = expr.attr
        if isinstance(attr, Load):
            moved = Load(attr.ref, tuple(self.index(c) for c in attr.coords))
            fresh = Expr(expr.op, expr.dtype, attr=moved)
            replaced = self.on_load(moved, fresh) if self.on_load else None
            return fresh if replaced is None else replaced
        if isinstance(attr, Index):
            attr = self.index(attr)
        args = tuple(self(a) for a in expr.args)
        if attr is expr.attr and all(a is b for a, b in zip(args, expr.args, strict=True)):
            return expr
        return Expr(expr.op, expr.dtype, args, attr)

    def index(self, index: Index) -> Index:
        return index.substitute(self.mapping, self)


ComputeKind = Literal["pointwise", "reduce", "scan", "scatter"]


@dataclass(eq=False)
class Compute:
    """One operator as a loop nest: for every point of `shape`, evaluate `body`.

    pointwise: store at the same coordinates of `out` (whose shape is `shape`).
    reduce: combine over `axes` with `op`; `out.shape` is `shape` with 1 at `axes`.
    scan: running `op` along `axes[0]`, stored at every point.
    scatter: store or combine (`op`) into `out` at `target`; `out` aliases an initialized buffer.
    """

    out: Ref
    shape: tuple[Size, ...]
    body: Expr
    kind: ComputeKind = "pointwise"
    axes: tuple[int, ...] = ()
    op: str = ""
    target: tuple[Index, ...] = ()
    after: tuple[Any, ...] = ()
    """Nodes that must run earlier for reasons other than this node's loads."""
    origins: tuple[Origin, ...] = ()
    realize: bool = False
    """Whether the result must be stored: a call reads it, say, or it must be computed only once."""

    _found: tuple[Expr, tuple[Index, ...], list[Load]] | None = None

    def loads(self) -> list[Load]:
        """Every load of the body and of the store's coordinates; cached until either changes."""
        known = self._found
        if known is not None and known[0] is self.body and known[1] is self.target:
            return known[2]
        seen: set[int] = set()
        found = [e.attr for e in walk(self.body, seen) if e.op == "load"]
        for index in self.target:
            for inner in _indirect_exprs(index):
                found += [e.attr for e in walk(inner, seen) if e.op == "load"]
        self._found = (self.body, self.target, found)
        return found

    def reads(self) -> list[Ref]:
        return [item.ref for item in self.loads()]


@dataclass(frozen=True)
class Routine:
    """A kernel whose source the target supplies; its arguments are a call's `args` and `outs`."""

    name: str
    body: str
    sizes: tuple[Size, ...]
    """Passed as arguments at every launch, in this order."""


@dataclass(eq=False)
class Call:
    """A library or eager ATen call. `args`/`kwargs` may hold Refs, Sizes and plain values."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[Ref, ...]
    out_variant: Any = None
    """The overload that writes into given outputs, where there is one."""
    routine: Routine | None = None
    """Runs in place of `op`; `args` then holds Refs only."""
    kind: Literal["library", "eager"] = "library"
    mutates: bool = False
    after: tuple[Any, ...] = ()
    origins: tuple[Origin, ...] = ()

    def reads(self) -> list[Ref]:
        return list(refs_in((self.args, self.kwargs)))


def refs_in(value: Any) -> Iterator[Ref]:
    """The buffers in arguments or outputs, however deeply nested."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from refs_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from refs_in(item)


Node = Compute | Call


@dataclass(frozen=True)
class Requirement:
    """A condition on the sizes of a run, checked before it starts.

    equal: `left` is `right`. indexable: a dimension of size `left` is not empty if there are
    `right` > 0 indices into it.
    """

    kind: Literal["equal", "indexable"]
    left: Size
    right: Size
    detail: str
    origin: Origin


@dataclass
class Graph:
    """A lowered graph before scheduling."""

    inputs: list[Ref] = field(default_factory=list)
    sizes: dict[int, Any] = field(default_factory=dict)
    """Graph input position -> sympy expression, for inputs that are sizes."""
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    requirements: list[Requirement] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    """Refs, Sizes, plain values or None, in order."""


def show(expr: Expr) -> str:
    """`expr` as one line of text, or `value where e0 = ...; e1 = ...` with shared parts named."""
    uses: dict[int, int] = {}
    for e in walk(expr):
        for arg in e.args:
            uses[id(arg)] = uses.get(id(arg), 0) + 1
    shown: dict[int, str] = {}
    named: list[str] = []
    for e in walk(expr):
        text = _show_one(e, shown)
        if uses.get(id(e), 0) > 1 and e.args:
            named.append(f"e{len(named)} = {text}")
            text = f"e{len(named) - 1}"
        shown[id(e)] = text
    return shown[id(expr)] + (f" where {'; '.join(named)}" if named else "")


def _show_one(expr: Expr, shown: dict[int, str]) -> str:
    if expr.op == "const":
        value = expr.attr
        return shortest(value, expr.dtype) if isinstance(value, float) else repr(value)
    if expr.op == "index":
        return f"index({_show_index(expr.attr, shown)})"
    if expr.op in ("load", "read"):
        coords = ", ".join(_show_index(c, shown) for c in expr.attr.coords)
        return f"{expr.attr.ref}[{coords}]"
    if expr.op in ("reduction_result", "scratch"):
        return str(expr.attr)
    name = f"{expr.op}.{str(expr.dtype).removeprefix('torch.')}" if expr.op == "cast" else expr.op
    return f"{name}({', '.join(shown[id(a)] for a in expr.args)})"


def _show_index(index: Index, shown: dict[int, str]) -> str:
    text = str(index)
    for inner in _indirect_exprs(index):
        text = text.replace(f"[{inner.key}]", f"[{shown[id(inner)]}]")
    return text


def show_index(index: Index) -> str:
    """`index` as readable text, with the expressions of its indirect atoms."""
    return _show_index(index, {id(e): show(e) for e in _indirect_exprs(index)})
