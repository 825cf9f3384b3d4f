"""Kernels: what the scheduler makes of a group of computes, and what renderers read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, Load, Ref
from dicp.loop.ir.index import Index, Var
from dicp.origin import Origin


@dataclass(frozen=True, eq=False)
class Store:
    """`ref[index] = value`, or combined into it by `op` ("sum", "max", ...).

    In a row kernel `op` is "sum" and means the sum, from zero, over the rows' loops that the index
    does not vary along.
    """

    ref: Ref
    index: Index
    value: Expr
    op: str = ""


@dataclass(frozen=True, eq=False)
class Accumulate:
    """`name = name op value` over the inner loops; `position` is the index argmax keeps."""

    name: str
    op: str
    dtype: torch.dtype
    value: Expr
    position: Index | None = None


@dataclass(frozen=True, eq=False)
class Running:
    """A scan: the running `op` along the inner loop, readable as `name` from then on."""

    name: str
    op: str
    dtype: torch.dtype
    value: Expr


@dataclass(frozen=True, eq=False)
class Define:
    """A scalar of the current row, named for later phases."""

    name: str
    dtype: torch.dtype
    value: Expr


@dataclass(frozen=True, eq=False)
class Save:
    """A value of the current inner point, kept in a scratch row for a later phase."""

    name: str
    dtype: torch.dtype
    value: Expr


Stmt = Store | Accumulate | Running | Define | Save


@dataclass(frozen=True, eq=False)
class Phase:
    """Statements run once per row, or at every point of the inner loops."""

    level: Literal["row", "inner"]
    stmts: tuple[Stmt, ...]


KernelKind = Literal["pointwise", "row", "column", "scatter"]


@dataclass(frozen=True, eq=False)
class Kernel:
    """Loops over `rows` (independent) and, inside, over `inner`, phase after phase.

    pointwise: no inner loops; every statement at every point of `rows`.
    row: reductions along `inner`, whose last loop is contiguous in memory.
    column: reductions along `inner`, the last of `rows` being contiguous in memory.
    scatter: as pointwise, but stores may collide.
    """

    kind: KernelKind
    rows: tuple[Var, ...]
    inner: tuple[Var, ...]
    phases: tuple[Phase, ...]
    origins: tuple[Origin, ...]
    fresh: bool = False
    """Whether a scatter's buffer holds nothing yet and counts as zeros: it writes every element."""

    def exprs(self) -> Iterator[Expr]:
        for phase in self.phases:
            for stmt in phase.stmts:
                yield stmt.value

    def reads(self) -> list[Load]:
        """What its statements read; of an expression that several share, once."""
        return ir.reads(self.exprs())

    def text(self) -> str:
        """The kernel as readable text, for dumps and golden tests."""
        lines = [f"kernel {self.kind}{', from zeros' if self.fresh else ''}"]
        lines += [f"  from {origin}" for origin in self.origins]
        for label, loops in (("rows", self.rows), ("inner", self.inner)):
            if loops:
                lines.append(f"  {label} " + ", ".join(f"{v.key}:{v.size}" for v in loops))
        for phase in self.phases:
            lines.append(f"  {phase.level}:")
            lines += [f"    {_stmt_text(stmt)}" for stmt in phase.stmts]
        return "\n".join(lines)


def _stmt_text(stmt: Stmt) -> str:
    if isinstance(stmt, Store):
        place = f"{stmt.ref}[{ir.show_index(stmt.index)}]"
        return f"{place} {stmt.op}= {ir.show(stmt.value)}"
    verb = type(stmt).__name__.lower()
    op = f" {stmt.op}" if isinstance(stmt, (Accumulate, Running)) else ""
    dtype = str(stmt.dtype).removeprefix("torch.")
    return f"{verb}{op} {stmt.name}: {dtype} = {ir.show(stmt.value)}"
