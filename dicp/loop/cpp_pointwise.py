"""C++ of kernels without a reduction: plain loops, tiles where directions cross, scatters."""

from __future__ import annotations

from dicp.loop import ir
from dicp.loop.cpp_emit import Scope, margin
from dicp.loop.cpp_loops import Loops, deep_variables
from dicp.loop.cpp_text import STORAGE_TYPE
from dicp.loop.index import Index, Var
from dicp.loop.ir import Expr, Ref
from dicp.loop.kernel import Store

TILE = (64, 16)
"""Crossing and contiguous extent of a tile: few lines of each tensor at a time, since rows whose
length is a power of two share cache sets."""


class Pointwise(Loops):
    """Every statement at every point."""

    def lines(self) -> list[str]:
        rows = self.kernel.rows
        if not rows:
            scope = self._push((), 1)
            self._stmts(self._all_stmts(), scope)
            return scope.lines
        outer, last = rows[:-1], rows[-1]
        if not outer:
            pragma = f"  {self._parallel(rows, 0, simd=True)}"
            return self._in_ranges(self._all_stmts(), last, 1, [pragma])
        crossing = self._crossing_loop()
        if crossing is not None:
            return self._tiled(crossing)
        row_scope = self._push(outer, 1 + len(outer))
        pragma = f"{margin(row_scope.indent)}#pragma omp simd"
        loops = self._in_ranges(self._all_stmts(), last, row_scope.indent, [pragma])
        inner = [*row_scope.lines, *loops]
        return self._outer_loops(outer, inner, self._parallel(rows, len(outer)))

    def _crossing_loop(self) -> Var | None:
        """The outer loop along which some tensor is contiguous while the last loop strides it."""
        last = self.kernel.rows[-1]
        for index in self._memory_indices():
            for var in self.kernel.rows[:-1]:
                if index.coefficient(var) == 1 and index.coefficient(last) not in (0, 1):
                    return var
        return None

    def _memory_indices(self) -> list[Index]:
        seen: set[int] = set()
        loads = [
            e.attr.coords[0]
            for expr in self.kernel.exprs() for e in ir.walk(expr, seen) if e.op == "read"
        ]  # fmt: skip
        return loads + [s.index for s in self._all_stmts() if isinstance(s, Store)]

    def _tiled(self, crossing: Var) -> list[str]:
        """Two loops in tiles, so that both directions use whole cache lines.

        What lies across the last loop is turned in registers into a tile of its own first.
        """
        rows = self.kernel.rows
        last = rows[-1]
        outer = [v for v in rows[:-1] if v is not crossing]
        depth = 1 + len(outer)
        base = self._push(outer, depth + 2)
        self._stage(crossing, last, base)
        row_scope = self._push([crossing], depth + 3)
        scope = self._push((last,), depth + 4)
        self._stmts(self._all_stmts(), scope)
        pad = margin(depth)
        lines = []
        for k, var in enumerate((crossing, last)):
            name, size = f"tile{k}", self._size(var.size)
            lines.append(f"{margin(depth + k)}for (int64_t {name} = 0; {name} < {size}; "
                         f"{name} += {TILE[k]}) {{")  # fmt: skip
        for k, var in enumerate((crossing, last)):
            name, size = f"tile{k}", self._size(var.size)
            lines.append(
                f"{pad}    const int64_t end{k} = "
                f"{name} + {TILE[k]} < {size} ? {name} + {TILE[k]} : {size};"
            )
        lines += [
            *base.lines, f"{margin(depth + 2)}{self._for(crossing, ('tile0', 'end0'))} {{",
            *row_scope.lines, f"{margin(depth + 3)}#pragma omp simd",
            *self._loop(last, scope, depth + 3, ("tile1", "end1")),
            f"{margin(depth + 2)}}}", f"{margin(depth + 1)}}}", f"{pad}}}",
        ]  # fmt: skip
        return self._outer_loops(outer, lines, self._parallel(rows, len(outer) + 2))

    def _stage(self, crossing: Var, last: Var, scope: Scope) -> None:
        """Turn what is contiguous along `crossing` into tiles that are contiguous along `last`."""
        if any(isinstance(v.size, int) and v.size < k for v, k in zip((crossing, last), TILE,
                                                                      strict=True)):  # fmt: skip
            return  # no tile is ever full
        for number, (ref, index) in enumerate(self._plain_reads()):
            others = tuple((a, c) for a, c in index.terms if a not in (crossing, last))
            hidden = {v for a, _ in others for v in deep_variables(a)}
            stride = index.coefficient(last)
            if index.coefficient(crossing) != 1 or stride in (0, 1) or {crossing, last} & hidden:
                continue
            name = f"turned{number}"
            ctype = STORAGE_TYPE[ref.dtype]
            start = (
                f"{self._index(Index(index.const, others))} + tile0 + {self._size(stride)} * tile1"
            )
            scope.lines += [
                f"{margin(scope.indent)}{ctype} {name}[{TILE[0] * TILE[1]}];",
                f"{margin(scope.indent)}d_turn<{ctype}, {TILE[0]}, {TILE[1]}>({self._arg(ref)} + "
                f"({start}), {self._size(stride)}, {name}, end0 - tile0, end1 - tile1);",
            ]
            place = f"({crossing.key} - tile0) * {TILE[1]} + {last.key} - tile1"
            self.staged[ref, index] = f"{name}[{place}]"

    def _plain_reads(self) -> list[tuple[Ref, Index]]:
        """What is read at every point, nothing that is only read where a condition holds."""
        found: dict[tuple[Ref, Index], bool] = {}

        def visit(expr: Expr, always: bool, seen: dict[int, bool]) -> None:
            if id(expr) in seen and (always or not seen[id(expr)]):
                return
            seen[id(expr)] = always
            if expr.op == "read":
                key = (expr.attr.ref, expr.attr.coords[0])
                found[key] = found.get(key, True) and always
            for k, arg in enumerate(expr.args):
                visit(arg, always and not (expr.op == "masked" and k == 1), seen)

        seen: dict[int, bool] = {}
        for expr in self.kernel.exprs():
            visit(expr, True, seen)
        return [key for key, always in found.items() if always]


class Scatter(Pointwise):
    """Colliding stores: one thread, or threads that each own a range of the last axis."""

    def lines(self) -> list[str]:
        rows = self.kernel.rows
        if not rows:
            return super().lines()
        last = rows[-1]
        stores = [s for s in self._all_stmts() if isinstance(s, Store)]
        owned = last.size != 1 and all(_owns(s.index, last) for s in stores)
        scope = self._push(rows[:-1], 2 + len(rows[:-1]) if owned else 1 + len(rows[:-1]))
        body = self._push((last,), scope.indent + 1)
        self._stmts(self._all_stmts(), body)
        bounds = ("low", "high") if owned else None
        pragma = [f"{margin(scope.indent)}#pragma omp simd"] if owned else []
        inner = [*scope.lines, *pragma, *self._loop(last, body, scope.indent, bounds)]
        lines: list[str] = []
        base = 1
        if owned:
            size = self._size(last.size)
            base = 2
            lines = [
                f"  {self._parallel(rows, 1)}",
                "  for (int64_t chunk = 0; chunk < 4; ++chunk) {",
                f"    const int64_t low = chunk * {size} / 4, high = (chunk + 1) * {size} / 4;",
            ]
        for depth, var in enumerate(rows[:-1]):
            lines.append(f"{margin(base + depth)}{self._for(var)} {{")
        lines += inner
        lines += [f"{margin(base + depth)}}}" for depth in reversed(range(len(rows) - 1))]
        return [*lines, "  }"] if owned else lines


def _owns(index: Index, var: Var) -> bool:
    """Whether distinct values of `var` always store to distinct places of the last axis."""
    hidden = any(
        var in deep_variables(atom) for atom, _ in index.terms if not isinstance(atom, Var)
    )
    return index.coefficient(var) == 1 and not hidden
