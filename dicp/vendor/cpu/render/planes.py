"""C++ of reductions of rows that lie in several planes, such as the channels of a batch of images.

Row by row, memory would be read in segments that lie far apart, and again for each pass. Where all
planes fit in the last-level cache, each pass instead reads them in the order of memory, all rows in
one pass, with partial sums for each plane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dicp.codegen.emitter import Scope, local, margin
from dicp.codegen.types import VALUE_TYPE
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Named, Ref
from dicp.loop.ir.index import Index, Var, product
from dicp.loop.ir.kernel import Let, Phase, Reduce, Stmt, Store
from dicp.loop.passes.moments import squared_distances
from dicp.vendor.cpu.render.loops import Team
from dicp.vendor.cpu.render.scan import Scans
from dicp.vendor.cpu.thresholds import MIN_PLANE, MIN_PLANES


class Planes(Scans):
    """Rows in planes: threads divide the planes of each pass."""

    known: dict[str, str]
    """Name of a sum or a `Let` of the row -> C++ of its value."""

    def _inner_loops(
        self, phase: Phase, scope: Scope, loops: Sequence[Var], serial: bool = False,
        first_range: tuple[str, str] | None = None,
    ) -> None:  # fmt: skip
        raise NotImplementedError

    def _in_planes(self) -> bool:
        kernel = self.kernel
        loops = (*kernel.parallel, *kernel.reduction)
        sizes = [v.size for v in loops if isinstance(v.size, int)]
        if len(kernel.parallel) != 1 or len(kernel.reduction) != 2 or len(sizes) != 3:
            return False
        if product(sizes) < MIN_PLANES or sizes[1] < 2 or sizes[2] < MIN_PLANE:
            return False
        passes = [p for p in kernel.phases if p.level == "reduction"]
        if len(passes) < 2 or not all(map(self._is_plain, self._all_stmts())):
            return False
        reads = self._plane_reads()
        if product([*sizes, sum(r.dtype.itemsize for r, _ in reads)]) >= self.non_temporal_bytes:
            return False
        stores = [s.index for s in self._all_stmts() if isinstance(s, Store)]
        found = [
            *(i for _, i in reads),
            *(i for i in stores if kernel.reduction[1] in i.variables()),
        ]
        return all(self._lies_in_planes(index) for index in found)

    def _is_plain(self, stmt: Stmt) -> bool:
        if isinstance(stmt, Reduce):
            return stmt.op == "sum" and VALUE_TYPE[stmt.dtype] == "float"
        return isinstance(stmt, Let) or (isinstance(stmt, Store) and not stmt.op)

    def _plane_reads(self) -> set[tuple[Ref, Index]]:
        reads = {(item.ref, item.index) for item in self.kernel.reads()}
        return {(ref, i) for ref, i in reads if self.kernel.reduction[1] in i.variables()}

    def _lies_in_planes(self, index: Index) -> bool:
        steps = [index.coefficient(v) for v in (self.kernel.reduction[0], *self.kernel.parallel)]
        image, row = (s if isinstance(s, int) else 0 for s in steps)
        return image > row >= MIN_PLANE and index.coefficient(self.kernel.reduction[1]) == 1

    # ---- text -----------------------------------------------------------------------------------

    def _plane_lines(self) -> list[str]:
        self.known = {}
        squares = squared_distances(self.kernel)
        taken = {square.name for square, _ in squares}
        lines: list[str] = []
        for phase in self.kernel.phases:
            if phase.level == "parallel":
                lines += self._of_rows(phase.stmts)
                continue
            own = [s for s in phase.stmts if isinstance(s, Reduce) and s.name in taken]
            rest = tuple(s for s in phase.stmts if s not in own)
            for stmt in own:
                lines += self._about_mean(stmt, next(s for q, s in squares if q is stmt))
            if rest:
                lines += self._pass_over_reduction(replace(phase, stmts=rest), squares)
        return lines

    def _pass_over_reduction(self, phase: Phase, squares: list[tuple[Reduce, Reduce]]) -> list[str]:
        """One pass over all planes in the order of memory, with one partial sum for each plane."""
        (row,), (image, inner) = self.kernel.parallel, self.kernel.reduction
        sums = [s for s in phase.stmts if isinstance(s, Reduce)]
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
                "sub", stmt.dtype, stmt.value, ir.result(middle, stmt.dtype)
            )  # fmt: skip
            squared = replace(square, value=ir.apply("mul", stmt.dtype, away, away))
            self._inner_loops(Phase("reduction", (squared,)), scope, (inner,))
            scope.lines.append(
                f"      all_{square.name}{slot} = {local(square.name)} + (double){local(middle)} * "
                f"(2 * (double){one} - {inner.size} * (double){local(middle)});"
            )
        self._pop(scope)
        nest = self._nest([image, row], scope.lines, 1)
        made = [*sums, *(square for square, _ in mine)]
        lines = ["  " + self._allocated("double", f"all_{s.name}", count) for s in made]
        lines += self._divided(Team(collapse=2), nest)
        for stmt in made:
            lines += [
                f"  for (int64_t plane = 1; plane < {image.size}; ++plane)",
                f"    for (int64_t c = 0; c < {row.size}; ++c) "
                f"all_{stmt.name}[c] += all_{stmt.name}[plane * {row.size} + c];",
            ]
        self.known |= {s.name: f"(float)all_{s.name}[{row.key}]" for s in sums}
        return lines

    def _row_scope(self, loops: Sequence[Var], indent: int) -> Scope:
        """A scope that declares the known values of the row under their names."""
        scope = self._push(loops, indent)
        for name, text in self.known.items():
            scope.lines.append(f"{margin(indent)}const auto {local(name)} = {text};")
            self.local_names[name] = len(self.scopes) - 1
        return scope

    def _of_rows(self, stmts: Sequence[Stmt]) -> list[str]:
        """Statements that run once per row; the values they name are kept for later passes."""
        (row,) = self.kernel.parallel
        scope = self._row_scope([row], 2)
        self._stmts(stmts, scope)
        lines = []
        for stmt in (s for s in stmts if isinstance(s, Let)):
            ctype = VALUE_TYPE[stmt.dtype]
            lines.append("  " + self._allocated(ctype, f"row_{stmt.name}", str(row.size)))
            scope.lines.append(f"    row_{stmt.name}[{row.key}] = {local(stmt.name)};")
            self.known[stmt.name] = f"row_{stmt.name}[{row.key}]"
        self._pop(scope)
        return [*lines, *self._loop(row, scope, 1)]

    def _about_mean(self, square: Reduce, sums: Reduce) -> list[str]:
        """sum (x - m)^2 = sum x^2 - 2 m sum x + n m^2, in doubles."""
        (row,), name = self.kernel.parallel, square.name
        mean = square.value.args[0].args[1]
        assert isinstance(mean, Named)
        count = product(v.size for v in self.kernel.reduction)
        here = f"[{row.key}]"
        self.known[name] = f"row_{name}{here}"
        return [
            "  " + self._allocated("float", f"row_{name}", str(row.size)),
            f"  {self._for(row)} {{",
            f"    const double m = {self.known[mean.name]};",
            f"    const double all = all_{name}{here} - m * (2 * all_{sums.name}{here} "
            f"- {count} * m);",
            f"    row_{name}{here} = all < 0 ? 0 : (float)all;",
            "  }",
        ]
