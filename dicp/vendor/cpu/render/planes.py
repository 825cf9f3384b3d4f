"""C++ of reductions of rows that lie in several planes, such as the channels of a batch of images.

A row after another would be read in pieces that lie far apart, and again for each of its sweeps.
Where the last cache keeps them all, planes are swept as they lie in memory instead, all rows in one
sweep, with sums for each plane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dicp.codegen.emitter import Scope, local, margin
from dicp.codegen.types import VALUE_TYPE
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, Ref
from dicp.loop.ir.index import Index, Var, product
from dicp.loop.ir.kernel import Accumulate, Define, Phase, Stmt, Store
from dicp.loop.passes.moments import squared_distances
from dicp.vendor.cpu.render.scan import Scans

MIN_PLANES = 1 << 19
"""Elements below which the nearest caches keep all rows."""
MIN_PLANE = 32
"""Elements of a plane below which its sums would be a good part of what is moved."""


class Planes(Scans):
    """Rows in planes: each sweep is shared among threads by planes."""

    known: dict[str, str]
    """C++ of what has been found for the row `v`, by name: sums and values of its own."""

    def _inner_loops(
        self, phase: Phase, scope: Scope, loops: Sequence[Var], serial: bool = False,
        first_range: tuple[str, str] | None = None,
    ) -> None:  # fmt: skip
        raise NotImplementedError

    def _in_planes(self) -> bool:
        kernel = self.kernel
        loops = (*kernel.rows, *kernel.inner)
        sizes = [v.size for v in loops if isinstance(v.size, int)]
        if len(kernel.rows) != 1 or len(kernel.inner) != 2 or len(sizes) != 3:
            return False
        if product(sizes) < MIN_PLANES or sizes[1] < 2 or sizes[2] < MIN_PLANE:
            return False
        sweeps = [p for p in kernel.phases if p.level == "inner"]
        if len(sweeps) < 2 or not all(map(self._is_plain, self._all_stmts())):
            return False
        reads = self._plane_reads()
        if product([*sizes, sum(r.dtype.itemsize for r, _ in reads)]) >= self.far_bytes:
            return False
        stores = [s.index for s in self._all_stmts() if isinstance(s, Store)]
        found = [*(i for _, i in reads), *(i for i in stores if kernel.inner[1] in i.variables())]
        return all(self._lies_in_planes(index) for index in found)

    def _is_plain(self, stmt: Stmt) -> bool:
        if isinstance(stmt, Accumulate):
            return stmt.op == "sum" and VALUE_TYPE[stmt.dtype] == "float"
        return isinstance(stmt, Define) or (isinstance(stmt, Store) and not stmt.op)

    def _plane_reads(self) -> set[tuple[Ref, Index]]:
        reads = {(item.ref, item.coords[0]) for item in self.kernel.reads()}
        return {(ref, i) for ref, i in reads if self.kernel.inner[1] in i.variables()}

    def _lies_in_planes(self, index: Index) -> bool:
        steps = [index.coefficient(v) for v in (self.kernel.inner[0], *self.kernel.rows)]
        image, row = (s if isinstance(s, int) else 0 for s in steps)
        return image > row >= MIN_PLANE and index.coefficient(self.kernel.inner[1]) == 1

    # ---- text -----------------------------------------------------------------------------------

    def _plane_lines(self) -> list[str]:
        self.known = {}
        squares = squared_distances(self.kernel)
        taken = {square.name for square, _ in squares}
        lines: list[str] = []
        for phase in self.kernel.phases:
            if phase.level == "row":
                lines += self._of_rows(phase.stmts)
                continue
            own = [s for s in phase.stmts if isinstance(s, Accumulate) and s.name in taken]
            rest = tuple(s for s in phase.stmts if s not in own)
            for stmt in own:
                lines += self._about_mean(stmt, next(s for q, s in squares if q is stmt))
            if rest:
                lines += self._sweep(replace(phase, stmts=rest), squares)
        return lines

    def _sweep(self, phase: Phase, squares: list[tuple[Accumulate, Accumulate]]) -> list[str]:
        """All planes in the order of memory; what is summed gets one number for each plane."""
        (row,), (image, inner) = self.kernel.rows, self.kernel.inner
        sums = [s for s in phase.stmts if isinstance(s, Accumulate)]
        mine = [(square, s) for square, s in squares if s in sums]
        slot, count = f"[{row.size} * {image.key} + {row.key}]", f"{image.size} * {row.size}"
        scope = self._row_scope([image, row], 3)
        self._inner_loops(phase, scope, (inner,))
        for stmt in sums:
            scope.lines.append(f"      all_{stmt.name}{slot} = {local(stmt.name)};")
        for square, stmt in mine:
            middle, one = f"middle_{square.name}", local(stmt.name)
            scope.lines.append(f"      const float {local(middle)} = {one} / {inner.size};")
            self.local_names[middle] = len(self.scopes) - 1
            away = ir.apply(
                "sub", stmt.dtype, stmt.value, Expr("acc", stmt.dtype, attr=middle)
            )  # fmt: skip
            squared = replace(square, value=ir.apply("mul", stmt.dtype, away, away))
            self._inner_loops(Phase("inner", (squared,)), scope, (inner,))
            scope.lines.append(
                f"      all_{square.name}{slot} = {local(square.name)} + (double){local(middle)} * "
                f"(2 * (double){one} - {inner.size} * (double){local(middle)});"
            )
        self._pop(scope)
        nest = self._nest([image, row], scope.lines, 1)
        made = [*sums, *(square for square, _ in mine)]
        lines = ["  " + self._allocated("double", f"all_{s.name}", count) for s in made]
        lines += self._shared("#pragma omp parallel for collapse(2) schedule(static)", nest)
        for stmt in made:
            lines += [
                f"  for (int64_t plane = 1; plane < {image.size}; ++plane)",
                f"    for (int64_t c = 0; c < {row.size}; ++c) "
                f"all_{stmt.name}[c] += all_{stmt.name}[plane * {row.size} + c];",
            ]
        self.known |= {s.name: f"(float)all_{s.name}[{row.key}]" for s in sums}
        return lines

    def _row_scope(self, loops: Sequence[Var], indent: int) -> Scope:
        """A scope in which what has been found for the row goes by its name."""
        scope = self._push(loops, indent)
        for name, text in self.known.items():
            scope.lines.append(f"{margin(indent)}const auto {local(name)} = {text};")
            self.local_names[name] = len(self.scopes) - 1
        return scope

    def _of_rows(self, stmts: Sequence[Stmt]) -> list[str]:
        """What is computed once for each row; what it names is kept for the sweeps that follow."""
        (row,) = self.kernel.rows
        scope = self._row_scope([row], 2)
        self._stmts(stmts, scope)
        lines = []
        for stmt in (s for s in stmts if isinstance(s, Define)):
            ctype = VALUE_TYPE[stmt.dtype]
            lines.append("  " + self._allocated(ctype, f"row_{stmt.name}", str(row.size)))
            scope.lines.append(f"    row_{stmt.name}[{row.key}] = {local(stmt.name)};")
            self.known[stmt.name] = f"row_{stmt.name}[{row.key}]"
        self._pop(scope)
        return [*lines, *self._loop(row, scope, 1)]

    def _about_mean(self, square: Accumulate, sums: Accumulate) -> list[str]:
        """sum (x - m)^2 = sum x^2 - 2 m sum x + n m^2, in doubles."""
        (row,), name = self.kernel.rows, square.name
        mean = square.value.args[0].args[1].attr
        count = product(v.size for v in self.kernel.inner)
        here = f"[{row.key}]"
        self.known[name] = f"row_{name}{here}"
        return [
            "  " + self._allocated("float", f"row_{name}", str(row.size)),
            f"  {self._for(row)} {{",
            f"    const double m = {self.known[mean]};",
            f"    const double all = all_{name}{here} - m * (2 * all_{sums.name}{here} "
            f"- {count} * m);",
            f"    row_{name}{here} = all < 0 ? 0 : (float)all;",
            "  }",
        ]
