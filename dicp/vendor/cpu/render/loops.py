"""Loops around what the emitter writes: bounds, pragmas, and parts without conditions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dicp.codegen.emitter import Scope, margin
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Load
from dicp.loop.ir.index import Var, product
from dicp.loop.ir.kernel import Accumulate, Kernel, Running, Stmt, Store
from dicp.loop.ir.ops import SCALAR_OPS
from dicp.loop.passes.split_loops import Range, split
from dicp.vendor.cpu.render.non_temporal import Lines

PARALLEL_COST = 32768
"""Elementary operations below which a thread team costs more than it brings."""
CHUNKS = 16
JAM = 4
"""Rows taken together: column sums read and write their accumulators once for all of them, and
scans wait for the previous element of their own row only."""
SUM_BLOCK = 1024
"""Elements of a row summed before the sum is added to the total, which is a double."""


def in_fours(var: Var) -> bool:
    """Whether a loop's steps come in whole groups of `JAM`."""
    return isinstance(var.size, int) and var.size % JAM == 0


class Loops(Lines):
    """What every kind of kernel needs; a subclass per kind writes the nest."""

    sum_block = SUM_BLOCK
    """Elements whose sum is added to a total."""

    def __init__(self, kernel: Kernel, far_bytes: float = math.inf) -> None:
        super().__init__(kernel, far_bytes)
        self._kept: list[list[Range]] = []
        """Rewritten statements: the emitter knows values by identity, so they must stay alive."""

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
        shared: str | None = None, ahead: Sequence[Load] = (),
    ) -> list[str]:  # fmt: skip
        """The loop over `var`, in parts where conditions on it would be tested at every point.

        `shared` is the pragma by which threads share whole lines where this loop is the outermost,
        `pragma` that of the loop itself; `ahead` is what the next row reads.
        """
        parts = split(stmts, var)
        self._kept.append(parts)
        lines: list[str] = []
        for part in parts:
            by_lines = self._by_lines(part, var, indent, ahead) if pragma else []
            if by_lines:
                lines += by_lines if shared is None else self._shared(shared, by_lines)
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
        """`loop` under the pragma; each thread waits in the end for what it wrote past the caches,
        which barriers need not do."""
        head = [f"  {pragma}"] if pragma else []
        if not self.writes_far:
            return [*head, *loop]
        if pragma:
            each = pragma.replace("parallel for", "for") + " nowait"
            head = ["  #pragma omp parallel", "  {", f"  {each}"]
        return [*head, *loop, "  d_stream_end();", *(["  }"] if pragma else [])]

    def _nest(
        self, loops: Sequence[Var], inner: list[str], indent: int,
        first_bounds: tuple[str, str] | None = None,
    ) -> list[str]:  # fmt: skip
        """`inner` inside `loops`, the first of which may run over a part of its range."""
        lines = []
        for depth, var in enumerate(loops):
            bounds = first_bounds if depth == 0 else None
            lines.append(f"{margin(indent + depth)}{self._for(var, bounds)} {{")
        closing = [f"{margin(indent + depth)}}}" for depth in reversed(range(len(loops)))]
        return [*lines, *inner, *closing]

    def _lanes(self, var: Var) -> str:
        """Half a vector of 16-bit floats at a time where that leaves fewer elements of a short row
        over: what is left over is computed one by one."""
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
        """What one point costs: its arithmetic or its memory traffic, whichever is more."""
        seen: set[int] = set()
        total, moved = 1, sum(isinstance(s, Store) for s in self._all_stmts())
        for expr in self.kernel.exprs():
            for e in ir.walk(expr, seen):
                row = SCALAR_OPS.get(e.op)
                total += row.cost // 4 if row else 0
                moved += e.op == "read"
        return max(total, moved // 2)

    def _summed_in_blocks(self, stmt: Accumulate | Running) -> bool:
        """Long floating sums are sums of block sums: the error grows with the blocks only."""
        count = product(v.size for v in self.kernel.inner)
        long = not isinstance(count, int) or count > 2 * self.sum_block
        return long and stmt.op == "sum" and stmt.dtype.is_floating_point


def tracks_nan(stmt: Accumulate | Running) -> bool:
    return stmt.op in ("max", "min") and stmt.dtype.is_floating_point


def block_end(start: str, block: int | str, size: str) -> str:
    """Where a block ends that begins at `start` and may be the last one."""
    return f"{start} + {block} < {size} ? {start} + {block} : {size}"
