"""C++ of kernels without a reduction: plain loops, or tiles where tensors are transposed."""

from __future__ import annotations

from collections.abc import Sequence

from dicp.codegen.values import Scope, margin
from dicp.loop.ir.expr import Read, walk
from dicp.loop.ir.index import Index, Var
from dicp.loop.ir.kernel import Store
from dicp.loop.passes.split_loops import Limits, Range
from dicp.vendor.cpu.form import Points, Strip, Transposed
from dicp.vendor.cpu.render.loops import Loops, block_end, half_vectors


class PointsWriter(Loops[Points]):
    """Runs every statement at every point."""

    def lines(self) -> list[str]:
        rows, form = self.kernel.parallel, self.form
        if not rows:
            scope = self.push((), 1)
            self.statements(self.kernel.stmts())
            return scope.lines
        outer, last = rows[:-1], rows[-1]
        if not outer:
            simd = "#pragma omp simd"
            pragma = simd if form.team is None else self._team_loop(form.team, simd=True)
            return self._strips(form.strips, last, 1, [f"  {pragma}"], outermost=True)
        lines, pad = self._last_loop(form.strips, outer), margin(1 + len(outer))
        for case in reversed(form.inside):
            loops = dict.fromkeys(var for var, _, _ in case.limits)
            tests = [self._test([at for at in case.limits if at[0] == var]) for var in loops]
            lines = [
                f"{pad}if ({' && '.join(tests)}) {{", *self._last_loop(case.strips, outer),
                f"{pad}}} else {{", *lines, f"{pad}}}",
            ]  # fmt: skip
        return self._outer_loops(outer, lines, form.team)

    def _last_loop(self, strips: Sequence[Strip], outer: Sequence[Var]) -> list[str]:
        """The last loop, after what it needs of the loops around it."""
        scope = self.push(outer, 1 + len(outer))
        simd = f"{margin(scope.indent)}#pragma omp simd{half_vectors(self.form.half_vectors)}"
        loops = self._strips(strips, self.kernel.parallel[-1], scope.indent, [simd])
        self.pop(scope)
        return [*scope.lines, *self._scalar_rows(scope.indent), *loops]

    def _test(self, ranges: Sequence[Limits]) -> str:
        """C++ of the condition that a loop's variable is inside one of its ranges."""
        parts = []
        for var, low, high in ranges:
            tests = [f"{var.key} >= {self.size(low)}"] if low != 0 else []
            tests += [f"{var.key} < {self.size(high)}"] if high != var.size else []
            parts.append(" && ".join(tests))
        return parts[0] if len(parts) == 1 else f"({' || '.join(parts)})"


class TransposedWriter(Loops[Transposed]):
    """Two loops in tiles; reads along the crossing one are transposed, in registers, first."""

    def lines(self) -> list[str]:
        rows, form = self.kernel.parallel, self.form
        outer = [v for v in rows[:-1] if v is not form.crossing]
        depth, (height, _), size = 1 + len(outer), form.extents, self.size(form.crossing.size)
        tiles = [line for part in form.ranges for line in self._tiles(part, outer, depth + 1)]
        head = f"{margin(depth)}for (int64_t tile0 = 0; tile0 < {size}; tile0 += {height}) {{"
        return self._outer_loops(outer, [head, *tiles, f"{margin(depth)}}}"], form.team)

    def _tiles(self, part: Range, outer: Sequence[Var], depth: int) -> list[str]:
        """The loop over the tiles of a range of the last loop."""
        base = self.push(outer, depth + 1)
        inside = (self._copy if self.form.copy else self._tile)(part, base)
        self.pop(base)
        (height, width), size = self.form.extents, self.size(self.form.crossing.size)
        low, high = self.size(part.low), self.size(part.high)
        return [
            f"{margin(depth)}for (int64_t tile1 = {low}; tile1 < {high}; tile1 += {width}) {{",
            f"{margin(depth + 1)}const int64_t end0 = {block_end('tile0', height, size)};",
            f"{margin(depth + 1)}const int64_t end1 = {block_end('tile1', width, high)};",
            *inside, f"{margin(depth)}}}",
        ]  # fmt: skip

    def _tile(self, part: Range, base: Scope) -> list[str]:
        """The loops over one tile."""
        crossing, last = self.form.crossing, self.kernel.parallel[-1]
        height, width = self.form.extents
        reads = {(e.ref, e.index) for s in part.stmts for e in walk(s.value) if isinstance(e, Read)}
        staged = [access for access in self.form.staged if access in reads]
        for number, (ref, index) in enumerate(staged):
            start, stride = self._start(index, crossing, last)
            name = f"transposed{number}"
            base.lines += [
                margin(base.indent) + self._array(ref.dtype, name, height * width, stored=True),
                f"{margin(base.indent)}d_transpose({self.arg(ref)} + ({start}), {stride}, "
                f"{name}, {width}, end0 - tile0, end1 - tile1);",
            ]
            self.staged[ref, index] = self._in_tile(name)
        ends = self._stored_tiles(part, base)
        row_scope = self.push([crossing], base.indent + 1)
        pragma = [f"{margin(row_scope.indent)}#pragma omp simd"]
        bounds = ("tile1", "end1")
        loop = self._inner_loop(part.stmts, last, row_scope.indent, pragma, bounds)
        self.pop(row_scope)
        return [
            *base.lines, f"{margin(base.indent)}{self._for_header(crossing, ('tile0', 'end0'))} {{",
            *row_scope.lines, *loop, f"{margin(base.indent)}}}", *ends,
        ]  # fmt: skip

    def _stored_tiles(self, part: Range, base: Scope) -> list[str]:
        """Declares the tiles of transposed stores; their transposes, which follow the loops."""
        crossing, last = self.form.crossing, self.kernel.parallel[-1]
        (height, width), pad = self.form.extents, margin(base.indent)
        own = {(s.ref, s.index) for s in part.stmts if isinstance(s, Store)}
        ends = []
        for number, (ref, index) in enumerate(at for at in self.form.stored if at in own):
            name, (start, step) = f"stored{number}", self._start(index, crossing, last)
            base.lines.append(pad + self._array(ref.dtype, name, height * width, stored=True))
            self.lane_lvalues[ref, index] = self._in_tile(name)
            ends.append(
                f"{pad}d_transpose({name}, {width}, {self.arg(ref)} + ({start}), {step}, "
                "end1 - tile1, end0 - tile0);"
            )
        return ends

    def _in_tile(self, name: str) -> str:
        """The element of the array `name`, which holds a tile, at a point of the loops."""
        crossing, last = self.form.crossing, self.kernel.parallel[-1]
        return f"{name}[({crossing.key} - tile0) * {self.form.extents[1]} + {last.key} - tile1]"

    def _copy(self, part: Range, base: Scope) -> list[str]:
        """One tile of a kernel that only copies a transposed tensor."""
        crossing, last = self.form.crossing, self.kernel.parallel[-1]
        (store,) = part.stmts
        assert isinstance(store, Store) and isinstance(store.value, Read)
        source = store.value
        start, stride = self._start(source.index, crossing, last)
        place, step = self._start(store.index, last, crossing)
        transpose = "d_transpose_non_temporal" if self.form.streams else "d_transpose"
        return [
            *base.lines,
            f"{margin(base.indent)}{transpose}({self.arg(source.ref)} + ({start}), {stride}, "
            f"{self.arg(store.ref)} + ({place}), {step}, end0 - tile0, end1 - tile1);",
        ]

    def _start(self, index: Index, along: Var, over: Var) -> tuple[str, str]:
        """C++ of a tile's start in a tensor that is contiguous along `along`, and of the tensor's
        stride along `over`."""
        others = self.index(index.without(along, over))
        names = ("tile1", "tile0") if over is self.kernel.parallel[-1] else ("tile0", "tile1")
        step = self.size(index.coefficient(over))
        start = f"{others} + {names[1]} + {step} * {names[0]}"
        return start, step
