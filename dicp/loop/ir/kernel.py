"""Kernels: the scheduler's output for a group of computes, and the renderers' input."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, Read, Ref
from dicp.loop.ir.index import Index, Size, Var, index_text, indirect_exprs
from dicp.origin import Origin


@dataclass(frozen=True, eq=False)
class Store:
    """`ref[index] = value`, or combined into it by `op` ("sum", "max", ...).

    In an inner reduction `op` is "sum" and means a cross-row reduction: the sum, from zero, over
    the parallel loops that the index does not vary along.
    """

    ref: Ref
    index: Index
    value: Expr
    op: str = ""

    @property
    def is_copy(self) -> bool:
        """Whether it stores an element as loaded: the bits are copied unconverted."""
        value = self.value
        return not self.op and isinstance(value, Read) and value.ref.dtype == self.ref.dtype

    @property
    def is_move(self) -> bool:
        """Whether it stores one of several elements and numbers: the bits need no conversion.

        False where a choice depends on what another one gives, as in the maximum of a window: both
        are made as values, and one conversion takes less time than making them as bits once more.
        """
        values, tests = [self.value], []
        for value in values:
            if value.op in ("where", "masked"):
                tests.append(value.args[0])
                values += [arg for arg in value.args[1:] if arg not in values]
        moved = ("where", "masked", "read", "const")
        if self.op or any(v.op not in moved or v.dtype != self.ref.dtype for v in values):
            return False
        seen: set[Expr] = set()
        tested = {e for test in tests for e in ir.walk(test, seen)}
        return not any(v.op == "where" and v in tested for v in values)


@dataclass(frozen=True, eq=False)
class Reduce:
    """`name = name op value` over the reduction loops; `position` is the index argmax returns."""

    name: str
    op: str
    dtype: torch.dtype
    value: Expr
    position: Index | None = None

    @property
    def finds_position(self) -> bool:
        """Whether it reduces pairs of a value and its position: argmax and argmin."""
        return self.op in ("argmax", "argmin")


@dataclass(frozen=True, eq=False)
class Scan:
    """The running `op` along the reduction loop; later statements read it as `name`."""

    name: str
    op: str
    dtype: torch.dtype
    value: Expr
    finds_position = False


@dataclass(frozen=True, eq=False)
class Let:
    """A scalar of the current row, named for later phases."""

    name: str
    dtype: torch.dtype
    value: Expr


@dataclass(frozen=True, eq=False)
class ScratchStore:
    """A value at the current point of the reduction, kept in a scratch row for a later phase."""

    name: str
    dtype: torch.dtype
    value: Expr


Stmt = Store | Reduce | Scan | Let | ScratchStore


def rewritten(stmt: Stmt, expr: Callable[[Expr], Expr], index: Callable[[Index], Index]) -> Stmt:
    """The statement with its value and the index that it stores to or finds rewritten."""
    value = expr(stmt.value)
    if isinstance(stmt, Store):
        return replace(stmt, value=value, index=index(stmt.index))
    if isinstance(stmt, Reduce) and stmt.position is not None:
        return replace(stmt, value=value, position=index(stmt.position))
    return replace(stmt, value=value)


@dataclass(frozen=True, eq=False)
class Phase:
    """Statements that run once per row, or at every point of the reduction loops."""

    level: Literal["parallel", "reduction"]
    stmts: tuple[Stmt, ...]


KernelKind = Literal["pointwise", "inner_reduction", "outer_reduction", "scatter"]


@dataclass(frozen=True, eq=False)
class Partition:
    """The rows of a kernel in parts, one per program, with partial sums of each part."""

    part: Var
    """The index of the part: the sums' store indices contain it, but no loop runs over it."""
    chunk: Size
    """Rows per part; the last parts may be shorter or empty."""


@dataclass(frozen=True)
class Variant:
    """A form of an operator that its operands or the use of its result allow: a cheaper one, or one
    that the compiler leaves as it is written."""

    name: str
    """The row of the language's table of variants."""
    number: float = 0
    """A constant that the row needs."""


class Form:
    """How a kernel's loops run on its target; each target family has a subclass for each form."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """Loops over `parallel` (independent) and, inside, over `reduction`, phase after phase.

    pointwise: no reduction loops; every statement at every point of `parallel`.
    inner_reduction: reductions (or scans) along `reduction`, its last loop contiguous in memory.
    outer_reduction: reductions along `reduction`, the last of `parallel` contiguous in memory.
    scatter: as pointwise, but stores may collide.
    """

    kind: KernelKind
    parallel: tuple[Var, ...]
    reduction: tuple[Var, ...]
    phases: tuple[Phase, ...]
    origins: tuple[Origin, ...]
    fresh: bool = False
    """Whether a scatter's buffer is uninitialized and counts as zeros: it writes every element."""
    partition: Partition | None = None
    """How its sums' rows are partitioned: `parallel` where they are cross-row reductions, else
    `reduction`."""
    form: Form | None = None
    """Set once, by the scheduler; a renderer writes it as it is. None: plain nested loops."""
    variants: Mapping[Expr, Variant] = field(default_factory=dict)
    """Operators in a cheaper form, set with the kernel's form."""

    def new_variable(self, size: Size) -> Var:
        """A variable of `size` values that the kernel does not have yet."""
        used = [*self.parallel, *self.reduction, *([self.partition.part] if self.partition else [])]
        return Var(1 + max((v.position for v in used), default=-1), size)

    def stmts(self) -> list[Stmt]:
        return [s for p in self.phases for s in p.stmts]

    def stores(self) -> list[Store]:
        return [s for s in self.stmts() if isinstance(s, Store)]

    def cross_row_stores(self) -> list[Store]:
        """The stores of the cross-row reductions that are fused into an inner reduction."""
        return [s for s in self.stores() if s.op] if self.kind == "inner_reduction" else []

    def exprs(self) -> Iterator[Expr]:
        yield from (stmt.value for stmt in self.stmts())

    def reads(self) -> list[Read]:
        """The reads of all statements; those of a shared expression occur once."""
        return ir.reads(self.exprs())

    def read_buffers(self) -> set[Ref]:
        """The memory that it reads, that of indices of stores included."""
        places = (inner for s in self.stores() for inner in indirect_exprs(s.index))
        return {item.ref.root for item in (*self.reads(), *ir.reads(places))}

    def written_buffers(self) -> set[Ref]:
        """The memory that it writes."""
        return {s.ref.root for s in self.stores()}

    def text(self) -> str:
        """The kernel as readable text, for dumps and golden tests."""
        lines = [f"kernel {self.kind}{', from zeros' if self.fresh else ''}"]
        lines += [f"  from {origin}" for origin in self.origins]
        for label, loops in (("parallel", self.parallel), ("reduction", self.reduction)):
            if loops:
                lines.append(f"  {label} " + ", ".join(f"{v.key}:{v.size}" for v in loops))
        for phase in self.phases:
            lines.append(f"  {phase.level}:")
            lines += [f"    {_stmt_text(stmt)}" for stmt in phase.stmts]
        return "\n".join(lines)


def kernel_name(origins: Sequence[Origin], text: str) -> str:
    """A kernel's name: its operators, then a digest of `text`, all that its source depends on.

    Equal kernels have equal names: `gelu_layer_norm_25a2fdf9c1d0`.
    """
    operators = dict.fromkeys(_short_name(origin.op) for origin in origins)
    words = [word for word in operators if word not in _MOVES] or list(operators)
    shown: list[str] = []
    for word in words:
        if sum(map(len, shown)) + len(word) > _NAME_LENGTH:
            break
        shown.append(word)
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]
    return "_".join([*(shown or ["kernel"]), digest])


def _short_name(op: str) -> str:
    """`native_layer_norm` of `aten.native_layer_norm.default`."""
    name = op.split(".")[1] if op.count(".") > 1 else op
    word = re.sub(r"\W", "_", name).strip("_")
    return word if word[:1].isalpha() else f"op_{word}"


_MOVES = frozenset(
    {
        "alias", "clone", "detach", "expand", "permute", "reshape", "select", "slice", "squeeze",
        "t", "to_copy", "transpose", "unsafe_view", "unsqueeze", "view",
    }
)  # fmt: skip
"""Operators that only move or convert values: a name omits them where the kernel has others."""
_VERBS: dict[type, str] = {Reduce: "reduce", Scan: "scan", Let: "let", ScratchStore: "scratch"}
_NAME_LENGTH = 40
_DIGEST_LENGTH = 12


def _stmt_text(stmt: Stmt) -> str:
    if isinstance(stmt, Store):
        place = f"{stmt.ref}[{index_text(stmt.index, ir.show)}]"
        return f"{place} {stmt.op}= {ir.show(stmt.value)}"
    verb = _VERBS[type(stmt)]
    op = f" {stmt.op}" if isinstance(stmt, (Reduce, Scan)) else ""
    dtype = str(stmt.dtype).removeprefix("torch.")
    return f"{verb}{op} {stmt.name}: {dtype} = {ir.show(stmt.value)}"
