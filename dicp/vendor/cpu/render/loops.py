"""Loops around the emitter's statements: bounds, pragmas, and ranges without conditions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dicp.codegen.emitter import Scope, margin
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Load
from dicp.loop.ir.index import Var, product
from dicp.loop.ir.kernel import Kernel, Reduce, Scan, Stmt, Store
from dicp.loop.ir.ops import SCALAR_OPS
from dicp.loop.passes.split_loops import Range, split
from dicp.vendor.cpu.render.non_temporal import NonTemporal

PARALLEL_COST = 32768
"""Elementary operations below which a thread team costs more than it saves."""
CHUNKS = "d_chunks()"
"""Into how many chunks threads divide a long reduction, computed when the kernel runs."""
UNROLL_AND_JAM = 4
"""Rows per unrolled and jammed iteration: column sums load and store their accumulators once for
all of them, and scans wait for the previous element of their own row only."""
SUM_BLOCK = 1024
"""Elements of a row per block sum, which is then added to a total in double."""


def unrolled_by_four(var: Var) -> bool:
    """Whether a loop's size is a known multiple of `UNROLL_AND_JAM`."""
    return isinstance(var.size, int) and var.size % UNROLL_AND_JAM == 0


class Loops(NonTemporal):
    """Shared by all kinds of kernels; a subclass per kind writes the loop nest."""

    sum_block = SUM_BLOCK
    """Elements per block sum."""

    def __init__(self, kernel: Kernel, non_temporal_bytes: float = math.inf) -> None:
        super().__init__(kernel, non_temporal_bytes)
        self._kept: list[list[Range]] = []
        """Rewritten statements, kept alive: the emitter identifies expressions by `id`."""

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
        shared: str | None = None, prefetch: Sequence[Load] = (),
    ) -> list[str]:  # fmt: skip
        """The loop over `var`, split into ranges that need not test conditions on it at each point.

        `pragma` is the loop's own; `shared`, where this loop is the outermost, is the pragma by
        which threads divide whole cache lines; `prefetch` are the loads to prefetch for the next
        row.
        """
        parts = split(stmts, var)
        self._kept.append(parts)
        lines: list[str] = []
        for part in parts:
            by_cache_lines = self._by_cache_lines(part, var, indent, prefetch) if pragma else []
            if by_cache_lines:
                lines += by_cache_lines if shared is None else self._shared(shared, by_cache_lines)
                continue
            body = self._push((var,), indent + 1)
            self._stmts(part.stmts, body)
            bounds = (self._size(part.low), self._size(part.high))
            lines += [*pragma, *self._loop(var, body, indent, bounds)]
            self._pop(body)
        return lines

    def _outer_loops(self, loops: Sequence[Var], inner: list[str], pragma: str) -> list[str]:
        return self._shared(pragma, self._nest(loops, inner, 1))

    def _shared(self, pragma: str, loop: list[str]) -> list[str]:
        """`loop` under the pragma; with non-temporal stores, each thread ends with a store fence,
        which barriers need not include."""
        head = [f"  {pragma}"] if pragma else []
        if not self.writes_non_temporal:
            return [*head, *loop]
        if pragma:
            each = pragma.replace("parallel for", "for") + " nowait"
            head = ["  #pragma omp parallel", "  {", f"  {each}"]
        return [*head, *loop, "  d_stream_end();", *(["  }"] if pragma else [])]

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

    def _parallel(self, loops: Sequence[Var], collapse: int, simd: bool = False) -> str:
        cost = self._cost()
        work = product([*(v.size for v in loops), cost])
        if isinstance(work, int) and work < PARALLEL_COST:
            return "#pragma omp simd" if simd else ""
        text = "#pragma omp parallel for" + (" simd" if simd else "")
        if collapse > 1:
            text += f" collapse({collapse})"
        text += " schedule(static)"
        if not isinstance(work, int):
            text += f" if ({self._size(work)} >= {PARALLEL_COST})"
        return text

    def _cost(self) -> int:
        """Cost of one point: its arithmetic or its memory traffic, whichever is more."""
        seen: set[int] = set()
        total, moved = 1, sum(isinstance(s, Store) for s in self._all_stmts())
        for expr in self.kernel.exprs():
            for e in ir.walk(expr, seen):
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
