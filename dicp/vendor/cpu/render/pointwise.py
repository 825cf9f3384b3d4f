"""C++ of kernels without a reduction: plain loops, or tiles where tensors are transposed."""

from __future__ import annotations

from dicp.codegen.emitter import Scope, is_copy, margin
from dicp.loop.ir.expr import Expr, Read, Ref
from dicp.loop.ir.index import Index, Var
from dicp.loop.ir.kernel import Store
from dicp.vendor.cpu.render.loops import Loops, block_end
from dicp.vendor.cpu.render.non_temporal import deep_variables
from dicp.vendor.cpu.thresholds import COPY_TILE, NON_TEMPORAL_WIDTH, SQUARE, TILE


class Pointwise(Loops):
    """Runs every statement at every point."""

    def lines(self) -> list[str]:
        rows = self.kernel.parallel
        if not rows:
            scope = self._push((), 1)
            self._stmts(self._all_stmts(), scope)
            return scope.lines
        outer, last = rows[:-1], rows[-1]
        if not outer:
            team = self._team(rows)
            pragma = "#pragma omp simd" if team is None else team.loop(simd=True)
            return self._in_ranges(self._all_stmts(), last, 1, [f"  {pragma}"], True, team)
        crossing = self._crossing_loop()
        if crossing is not None:
            return self._tiled(crossing)
        row_scope = self._push(outer, 1 + len(outer))
        pragma = f"{margin(row_scope.indent)}#pragma omp simd{self._lanes(last)}"
        loops = self._in_ranges(self._all_stmts(), last, row_scope.indent, [pragma])
        inner = [*row_scope.lines, *loops]
        return self._outer_loops(outer, inner, self._team(rows, len(outer)))

    def _crossing_loop(self) -> Var | None:
        """The outer loop along which some tensor is contiguous while the last loop strides it."""
        last = self.kernel.parallel[-1]
        for index in self._memory_indices():
            for var in self.kernel.parallel[:-1]:
                if index.coefficient(var) == 1 and index.coefficient(last) not in (0, 1):
                    return var
        return None

    def _memory_indices(self) -> list[Index]:
        loads = [item.index for item in self.kernel.reads()]
        return loads + [s.index for s in self._all_stmts() if isinstance(s, Store)]

    def _tiled(self, crossing: Var) -> list[str]:
        """Two loops in tiles, so that both directions use whole cache lines.

        Tensors that are strided along the last loop are first transposed, in registers, into a tile
        of their own.
        """
        rows = self.kernel.parallel
        last = rows[-1]
        outer = [v for v in rows[:-1] if v is not crossing]
        depth = 1 + len(outer)
        base = self._push(outer, depth + 2)
        inside = self._transposed_copy(crossing, last, base)
        extents = COPY_TILE if inside else (TILE, TILE)
        if self.writes_non_temporal:
            extents = (
                NON_TEMPORAL_WIDTH,
                self._line([s.ref for s in self._all_stmts() if isinstance(s, Store)]),
            )
        inside = inside or self._tile_loops(crossing, last, base)
        lines, ends = [], []
        for k, (var, extent) in enumerate(zip((crossing, last), extents, strict=True)):
            name, size = f"tile{k}", self._size(var.size)
            lines.append(f"{margin(depth + k)}for (int64_t {name} = 0; {name} < {size}; "
                         f"{name} += {extent}) {{")  # fmt: skip
            ends.append(
                f"{margin(depth + 2)}const int64_t end{k} = {block_end(name, extent, size)};"
            )
        lines += [*ends, *inside]
        lines += [f"{margin(depth + 1)}}}", f"{margin(depth)}}}"]
        return self._outer_loops(outer, lines, self._team(rows, len(outer) + 2))

    def _tile_loops(self, crossing: Var, last: Var, base: Scope) -> list[str]:
        """The loops over one tile."""
        self._stage(crossing, last, base)
        row_scope = self._push([crossing], base.indent + 1)
        scope = self._push((last,), base.indent + 2)
        self._stmts(self._all_stmts(), scope)
        return [
            *base.lines, f"{margin(base.indent)}{self._for(crossing, ('tile0', 'end0'))} {{",
            *row_scope.lines, f"{margin(base.indent + 1)}#pragma omp simd",
            *self._loop(last, scope, base.indent + 1, ("tile1", "end1")),
            f"{margin(base.indent)}}}",
        ]  # fmt: skip

    def _transposed_copy(self, crossing: Var, last: Var, base: Scope) -> list[str]:
        """One tile of a kernel that only copies a transposed tensor; empty for any other kernel."""
        stmts = self._all_stmts()
        if len(stmts) != 1 or not isinstance(stmts[0], Store) or not is_copy(stmts[0]):
            return []
        store, source = stmts[0], stmts[0].value
        assert isinstance(source, Read)
        read = self._crossing_loops(source.index, crossing, last)
        written = self._crossing_loops(store.index, last, crossing)
        if not read or not written:
            return []
        (start, stride), (place, step) = read, written
        # Squares of shorter elements do not fill cache lines.
        self.writes_non_temporal = store.ref.dtype.itemsize in (4, 8) and self._is_non_temporal(
            store, last
        )
        turn = "d_transpose_non_temporal" if self.writes_non_temporal else "d_transpose"
        return [
            *base.lines,
            f"{margin(base.indent)}{turn}({self._arg(source.ref)} + ({start}), {stride}, "
            f"{self._arg(store.ref)} + ({place}), {step}, end0 - tile0, end1 - tile1);",
        ]

    def _crossing_loops(self, index: Index, along: Var, over: Var) -> tuple[str, str] | None:
        """C++ of a tile's start in a tensor that is contiguous along `along`, and of the tensor's
        stride along `over`; None for any other tensor."""
        others = tuple((a, c) for a, c in index.terms if a not in (along, over))
        hidden = {v for a, _ in others for v in deep_variables(a)}
        stride = index.coefficient(over)
        if index.coefficient(along) != 1 or stride in (0, 1) or {along, over} & hidden:
            return None
        names = ("tile1", "tile0") if over is self.kernel.parallel[-1] else ("tile0", "tile1")
        step = self._size(stride)
        start = f"{self._index(Index(index.const, others))} + {names[1]} + {step} * {names[0]}"
        return start, step

    def _stage(self, crossing: Var, last: Var, scope: Scope) -> None:
        """Transposes tensors contiguous along `crossing` into tiles contiguous along `last`."""
        if any(isinstance(v.size, int) and v.size < SQUARE for v in (crossing, last)):
            return  # no square is ever full
        for number, (ref, index) in enumerate(self._plain_reads()):
            found = self._crossing_loops(index, crossing, last)
            if found is None:
                continue
            start, stride = found
            name = f"transposed{number}"
            scope.lines += [
                margin(scope.indent) + self._array(ref.dtype, name, TILE * TILE, stored=True),
                f"{margin(scope.indent)}d_transpose({self._arg(ref)} + ({start}), {stride}, "
                f"{name}, {TILE}, end0 - tile0, end1 - tile1);",
            ]
            place = f"({crossing.key} - tile0) * {TILE} + {last.key} - tile1"
            self.staged[ref, index] = f"{name}[{place}]"

    def _plain_reads(self) -> list[tuple[Ref, Index]]:
        """The loads of every point, without those that are made only where a condition holds."""
        found: dict[tuple[Ref, Index], bool] = {}

        def visit(expr: Expr, always: bool, seen: dict[Expr, bool]) -> None:
            if expr in seen and (always or not seen[expr]):
                return
            seen[expr] = always
            if isinstance(expr, Read):
                key = (expr.ref, expr.index)
                found[key] = found.get(key, True) and always
            for k, arg in enumerate(expr.args):
                visit(arg, always and not (expr.op == "masked" and k == 1), seen)

        seen: dict[Expr, bool] = {}
        for expr in self.kernel.exprs():
            visit(expr, True, seen)
        return [key for key, always in found.items() if always]
