"""C++ of reductions of rows that lie in several planes, such as the channels of a batch of images.

Row by row, memory would be read in segments that lie far apart, and again for each pass. Where all
planes fit in the last-level cache, each pass instead reads them in the order of memory, all rows in
one pass, with partial sums for each plane.
"""

from __future__ import annotations

from collections.abc import Sequence

from dicp.codegen.types import VALUE_TYPE
from dicp.codegen.values import Scope, local, margin
from dicp.loop.ir.expr import Named
from dicp.loop.ir.index import Var, product
from dicp.loop.ir.kernel import Kernel, Let, Phase, Reduce, Stmt
from dicp.vendor.cpu.form import MeanStep, Planes, PlaneStep, Team, middle_of
from dicp.vendor.cpu.render.passes import Passes


class PlanesWriter(Passes[Planes]):
    """Threads divide the planes of each pass."""

    def __init__(self, kernel: Kernel, form: Planes) -> None:
        super().__init__(kernel, form)
        self.known: dict[str, str] = {}
        """Name of a sum or a `Let` of the row -> C++ of its value."""

    def lines(self) -> list[str]:
        lines: list[str] = []
        for step in self.form.steps:
            if isinstance(step, Phase):
                lines += self._of_rows(step.stmts)
            elif isinstance(step, MeanStep):
                lines += self._about_mean(step.square, step.sums)
            else:
                lines += self._over_planes(step)
        return lines

    def _over_planes(self, step: PlaneStep) -> list[str]:
        """One pass over all planes in the order of memory, with one partial sum for each plane."""
        (row,), (image, inner) = self.kernel.parallel, self.kernel.reduction
        sums = [s for s in step.over.phase.stmts if isinstance(s, Reduce)]
        slot, count = f"[{row.size} * {image.key} + {row.key}]", f"{image.size} * {row.size}"
        scope = self._row_scope([image, row], 3)
        self._pass(step.over, scope)
        for stmt in sums:
            scope.lines.append(f"      all_{stmt.name}{slot} = {local(stmt.name)};")
        for square, stmt, own in step.squares:
            middle, one = middle_of(square), local(stmt.name)
            scope.lines.append(f"      const float {local(middle)} = {one} / {inner.size};")
            self.named_here(middle)
            self._pass(own, scope)
            scope.lines.append(
                f"      all_{square.name}{slot} = {local(square.name)} + (double){local(middle)} * "
                f"(2 * (double){one} - {inner.size} * (double){local(middle)});"
            )
        self.pop(scope)
        nest = self._nest([image, row], scope.lines, 1)
        made = [*sums, *(square for square, _, _ in step.squares)]
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
        scope = self.push(loops, indent)
        for name, text in self.known.items():
            scope.lines.append(f"{margin(indent)}const auto {local(name)} = {text};")
            self.named_here(name)
        return scope

    def _of_rows(self, stmts: Sequence[Stmt]) -> list[str]:
        """Statements that run once per row; the values they name are kept for later passes."""
        (row,) = self.kernel.parallel
        scope = self._row_scope([row], 2)
        self.statements(stmts)
        lines = []
        for stmt in (s for s in stmts if isinstance(s, Let)):
            ctype = VALUE_TYPE[stmt.dtype]
            lines.append("  " + self._allocated(ctype, f"row_{stmt.name}", str(row.size)))
            scope.lines.append(f"    row_{stmt.name}[{row.key}] = {local(stmt.name)};")
            self.known[stmt.name] = f"row_{stmt.name}[{row.key}]"
        self.pop(scope)
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
