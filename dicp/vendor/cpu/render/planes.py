"""C++ of reductions of rows that lie in several planes, such as the channels of a batch of images.

Row by row, memory would be read in segments that lie far apart, and again for each pass. Where all
planes fit in the last-level cache, each pass instead reads them in the order of memory, all rows in
one pass, with partial sums for each plane.
"""

from __future__ import annotations

from collections.abc import Sequence

from dicp.codegen.types import VALUE_TYPE
from dicp.codegen.values import Scope, local, margin
from dicp.loop.ir.index import Var
from dicp.loop.ir.kernel import Kernel, Let, Phase, Reduce, Stmt
from dicp.vendor.cpu.form import MeanStep, Planes, PlaneStep, ShiftedSums, Team
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
                lines += self._about_mean(step.found)
            else:
                lines += self._over_planes(step)
        return lines

    def _over_planes(self, step: PlaneStep) -> list[str]:
        """One pass over all planes in the order of memory, with one partial sum for each plane."""
        (row,), (image, inner) = self.kernel.parallel, self.kernel.reduction
        sums = {s.name: local(s.name) for s in step.over.phase.stmts if isinstance(s, Reduce)}
        slot, count = f"[{row.size} * {image.key} + {row.key}]", f"{image.size} * {row.size}"
        scope = self._row_scope([image, row], 3)
        if step.over.phase.stmts:
            self._pass(step.over, scope)
        of_planes: dict[str, tuple[str, str]] = {}
        for each in step.shifted:
            squares = each.sums.squares.name
            self._shifted_sums(each, scope, inner.size)
            sums[each.sums.total.name] = f"sum_{squares}"
            of_planes |= {
                f"all_{each.shift}": ("float", local(each.shift)),
                f"all_{each.residual}": ("double", each.residual),
                f"all_{squares}": ("double", f"squares_{squares}"),
            }
        of_planes |= {f"all_{name}": ("double", value) for name, value in sums.items()}
        scope.lines += [f"      {name}{slot} = {value};" for name, (_, value) in of_planes.items()]
        self.pop(scope)
        nest = self._nest([image, row], scope.lines, 1)
        lines = ["  " + self._allocated(k, name, count) for name, (k, _) in of_planes.items()]
        lines += self._divided(Team(collapse=2), nest)
        for name in sums:
            lines += [
                f"  for (int64_t plane = 1; plane < {image.size}; ++plane)",
                f"    for (int64_t c = 0; c < {row.size}; ++c) "
                f"all_{name}[c] += all_{name}[plane * {row.size} + c];",
            ]
        self.known |= {name: f"(float)all_{name}[{row.key}]" for name in sums}
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

    def _about_mean(self, found: ShiftedSums) -> list[str]:
        """With y = x - c and d = c - m in a plane of n elements, sum (x - m) = sum y + n d, and
        sum (x - m)^2 = sum y^2 + d (2 sum y + n d), in doubles: both stay exact for equal numbers.
        """
        (row,), (image, inner) = self.kernel.parallel, self.kernel.reduction
        sums = found.sums
        residual, squares = f"all_{found.residual}", f"all_{sums.squares.name}"
        arrays = {stmt: f"row_{stmt.name}" for stmt in sums.sums}
        values = {sums.residual: f"{residual}[{row.key}]", sums.squares: f"{squares}[{row.key}]"}
        self.known |= {stmt.name: f"{name}[{row.key}]" for stmt, name in arrays.items()}
        shift, mean = f"all_{found.shift}[at]", self.known[sums.center.name]
        return [
            *("  " + self._allocated("float", name, str(row.size)) for name in arrays.values()),
            f"  for (int64_t plane = 0; plane < {image.size}; ++plane)",
            f"    {self._for_header(row)} {{",
            f"      const int64_t at = plane * {row.size} + {row.key};",
            f"      const double d = {shift} - (double){mean};",
            f"      const double deviation = {residual}[at] + {inner.size} * d;",
            f"      const double all = {squares}[at] + d * ({residual}[at] + deviation);",
            f"      {residual}[{row.key}] = plane ? {residual}[{row.key}] + deviation : deviation;",
            f"      {squares}[{row.key}] = plane ? {squares}[{row.key}] + all : all;",
            "    }",
            f"  {self._for_header(row)} {{",
            *(f"    {name}[{row.key}] = (float){values[stmt]};" for stmt, name in arrays.items()),
            "  }",
        ]
