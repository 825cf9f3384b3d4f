"""Loops around the emitter's statements: bounds, pragmas, and ranges without conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dicp.codegen.emitter import Scope, margin
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, Read
from dicp.loop.ir.index import Var, product
from dicp.loop.ir.kernel import Reduce, Scan, Stmt, Store
from dicp.loop.ir.ops import SCALAR_OPS
from dicp.loop.passes.split_loops import split
from dicp.vendor.cpu.render.non_temporal import NonTemporal
from dicp.vendor.cpu.thresholds import PARALLEL_COST, SUM_BLOCK, UNROLL_AND_JAM

CHUNKS = "d_chunks()"
"""Into how many chunks threads divide a long reduction, computed when the kernel runs."""


@dataclass(frozen=True)
class Team:
    """A team of threads that divide the iterations of a loop, or of `collapse` nested loops."""

    collapse: int = 0
    condition: str = ""
    """C++ of when there is work enough for a team; always where empty."""

    def loop(self, simd: bool = False) -> str:
        """The pragma of a loop that a new team divides."""
        return f"#pragma omp parallel {self._for(simd)}{self._if()}"

    def inside(self, loop: Sequence[str], end: str) -> list[str]:
        """`loop`, divided by a new team whose threads each execute `end` afterwards."""
        head = [f"  #pragma omp parallel{self._if()}", "  {", f"  #pragma omp {self._for()} nowait"]
        return [*head, *loop, end, "  }"]

    def _for(self, simd: bool = False) -> str:
        collapse = f" collapse({self.collapse})" if self.collapse > 1 else ""
        return f"for{' simd' if simd else ''}{collapse} schedule(static)"

    def _if(self) -> str:
        return f" if ({self.condition})" if self.condition else ""


def unrolled_by_four(var: Var) -> bool:
    """Whether a loop's size is a known multiple of `UNROLL_AND_JAM`."""
    return isinstance(var.size, int) and var.size % UNROLL_AND_JAM == 0


class Loops(NonTemporal):
    """Shared by all kinds of kernels; a subclass per kind writes the loop nest."""

    sum_block = SUM_BLOCK
    """Elements per block sum."""

    def lines(self) -> list[str]:
        """The body of the kernel's function after its arguments."""
        raise NotImplementedError

    def _for(self, var: Var, bounds: tuple[str, str] | None = None) -> str:
        low, high = bounds or ("0", self._size(var.size))
        name = var.key
        return f"for (int64_t {name} = {low}; {name} < {high}; ++{name})"

    def _loop(
        self, var: Var, body: Scope, indent: int, bounds: tuple[str, str] | None = None
    ) -> list[str]:
        return [f"{margin(indent)}{self._for(var, bounds)} {{", *body.lines, f"{margin(indent)}}}"]

    def _in_ranges(
        self, stmts: Sequence[Stmt], var: Var, indent: int, pragma: list[str],
        outermost: bool = False, team: Team | None = None, prefetch: Sequence[Read] = (),
    ) -> list[str]:  # fmt: skip
        """The loop over `var`, split into ranges that need not test conditions on it at each point.

        `pragma` is the loop's own; `team` divides the whole cache lines of the `outermost` loop;
        `prefetch` are the loads to prefetch for the next row.
        """
        parts = split(stmts, var)
        lines: list[str] = []
        for part in parts:
            by_cache_lines = self._by_cache_lines(part, var, indent, prefetch) if pragma else []
            if by_cache_lines:
                lines += self._divided(team, by_cache_lines) if outermost else by_cache_lines
                continue
            body = self._push((var,), indent + 1)
            self._stmts(part.stmts, body)
            bounds = (self._size(part.low), self._size(part.high))
            lines += [*pragma, *self._loop(var, body, indent, bounds)]
            self._pop(body)
        return lines

    def _outer_loops(
        self, loops: Sequence[Var], inner: list[str], team: Team | None
    ) -> list[str]:  # fmt: skip
        return self._divided(team, self._nest(loops, inner, 1))

    def _divided(self, team: Team | None, loop: list[str]) -> list[str]:
        """`loop`, divided by the team if there is one; after non-temporal stores, each thread
        executes a store fence, which barriers need not include."""
        if self.writes_non_temporal:
            fence = "  d_stream_end();"
            return [*loop, fence] if team is None else team.inside(loop, fence)
        return loop if team is None else [f"  {team.loop()}", *loop]

    def _nest(
        self, loops: Sequence[Var], inner: list[str], indent: int,
        first_bounds: tuple[str, str] | None = None,
    ) -> list[str]:  # fmt: skip
        """`inner` inside `loops`; `first_bounds` limits the first loop to a part of its range."""
        lines = []
        for depth, var in enumerate(loops):
            bounds = first_bounds if depth == 0 else None
            lines.append(f"{margin(indent + depth)}{self._for(var, bounds)} {{")
        closing = [f"{margin(indent + depth)}}}" for depth in reversed(range(len(loops)))]
        return [*lines, *inner, *closing]

    def _lanes(self, var: Var) -> str:
        """A clause for half a vector of 16-bit floats at a time where that shortens a short row's
        remainder, which is computed element by element."""
        size = var.size
        if not isinstance(size, int) or size >= 128 or size % 32 < 16:
            return ""
        low = any(item.ref.dtype in ir.LOW_PRECISION for item in self.kernel.reads())
        return " simdlen(16)" if low else ""

    def _team(self, loops: Sequence[Var], collapse: int = 0) -> Team | None:
        """The team for `loops`; None if they are too little work for more than one thread."""
        work = product([*(v.size for v in loops), self._cost()])
        if isinstance(work, int):
            return Team(collapse) if work >= PARALLEL_COST else None
        return Team(collapse, f"{self._size(work)} >= {PARALLEL_COST}")

    def _cost(self) -> int:
        """Cost of one point in all passes: its arithmetic or its traffic, whichever is more."""
        total, moved = 1, sum(isinstance(s, Store) for s in self._all_stmts())
        for phase in self.kernel.phases:
            seen: set[Expr] = set()
            for stmt in phase.stmts:
                for e in ir.walk(stmt.value, seen):
                    row = SCALAR_OPS.get(e.op)
                    total += row.cost // 4 if row else 0
                    moved += e.op == "read"
        return max(total, moved // 2)

    def _summed_in_blocks(self, stmt: Reduce | Scan) -> bool:
        """Whether a floating sum is long and goes in blocks: its error grows with these only."""
        count = product(v.size for v in self.kernel.reduction)
        long = not isinstance(count, int) or count > 2 * self.sum_block
        return long and stmt.op == "sum" and stmt.dtype.is_floating_point


def tracks_nan(stmt: Reduce | Scan) -> bool:
    return stmt.op in ("max", "min") and stmt.dtype.is_floating_point


def block_end(start: str, block: int | str, size: str) -> str:
    """C++ of the end of a block that begins at `start`; the last block ends at `size`."""
    return f"{start} + {block} < {size} ? {start} + {block} : {size}"
