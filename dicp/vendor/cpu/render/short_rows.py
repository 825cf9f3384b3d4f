"""C++ of reductions over short rows: tiles of rows, whose elements are transposed in registers."""

from __future__ import annotations

import torch

from dicp.codegen.emitter import accumulator_type
from dicp.codegen.spelling import combine, take
from dicp.codegen.types import STORAGE_TYPE, VALUE_TYPE, start_value
from dicp.codegen.values import margin
from dicp.loop.ir.expr import Named, Ref
from dicp.loop.ir.index import Index, Var
from dicp.loop.ir.kernel import Let, Phase, Reduce, Scan, ScratchStore
from dicp.vendor.cpu.form import ShortRows
from dicp.vendor.cpu.render.conversions import Bounds, Converted
from dicp.vendor.cpu.render.loops import Loops, block_end
from dicp.vendor.cpu.render.strips import each_lane

ARRAY_TYPE = VALUE_TYPE | {torch.bool: STORAGE_TYPE[torch.bool]}
"""Element types of arrays of values: loops that load or store `bool` are not vectorized."""


class ShortRowsWriter(Loops[ShortRows]):
    """Threads divide the tiles; a value that is named for a row is an array over the tile's."""

    def lines(self) -> list[str]:
        kernel, form = self.kernel, self.form
        outer, row = kernel.parallel[:-1], kernel.parallel[-1]
        depth = 2 + len(outer)
        scope, pad, size = self.push(outer, depth), margin(depth), self.size(row.size)
        lines = scope.lines
        lines.append(f"{pad}const int64_t rows = {size} - tile < {form.tile} ? {size} - tile : "
                     f"{form.tile};")  # fmt: skip
        lines += self._elements(row, pad)
        for step in form.steps:
            of = self._of_rows if step.level == "parallel" else self._of_elements
            lines += of(step, row, depth)
        lines += self._results(row, pad)
        self.pop(scope)
        head = f"for (int64_t tile = 0; tile < {size}; tile += {form.tile})"
        inside = [f"{margin(depth - 1)}{head} {{", *lines, f"{margin(depth - 1)}}}"]
        return self._outer_loops(outer, inside, form.team)

    # ---- tiles ----------------------------------------------------------------------------------

    def _elements(self, row: Var, pad: str) -> list[str]:
        """The tiles of elements, transposed from memory: each element's rows are contiguous."""
        (element,), count = self.kernel.reduction, self.form.tile
        lines = []
        for number, (ref, index) in enumerate(self.form.staged):
            name = f"elements{number}"
            lines += [
                pad + self._array(ref.dtype, name, count * int(element.size), stored=True),
                f"{pad}d_load_short_rows<{element.size}, {count}>("
                f"{self._row_place(ref, index, row)}, {self.size(index.coefficient(row))}, "
                f"{name}, rows);",
            ]
            self.staged[ref, index] = f"{name}[{count} * {element.key} + lane]"
        for number, store in enumerate(self.form.results):
            name = f"results{number}"
            lines.append(
                pad + self._array(store.ref.dtype, name, count * int(element.size), stored=True)
            )
            self.lane_lvalues[store.ref, store.index] = f"{name}[{count} * {element.key} + lane]"
        for access, number in self.form.read_back.items():
            self.staged[access] = f"results{number}[{count} * {element.key} + lane]"
        return lines

    def _results(self, row: Var, pad: str) -> list[str]:
        (element,), count = self.kernel.reduction, self.form.tile
        return [
            f"{pad}d_store_short_rows<{element.size}, {count}>(results{number}, "
            f"{self._row_place(store.ref, store.index, row)}, "
            f"{self.size(store.index.coefficient(row))}, rows);"
            for number, store in enumerate(self.form.results)
        ]

    def _row_place(self, ref: Ref, index: Index, row: Var) -> str:
        """The address of the tile's first row."""
        (element,) = self.kernel.reduction
        others, step = self.index(index.without(row, element)), self.size(index.coefficient(row))
        return f"{self.arg(ref)} + ({others} + {step} * tile)"

    # ---- phases ---------------------------------------------------------------------------------

    def _of_rows(self, phase: Phase, row: Var, depth: int) -> list[str]:
        """Statements that run once per row."""
        pad, count = margin(depth), self.form.tile
        lets = [s for s in phase.stmts if isinstance(s, Let)]
        converted = self.begin_lanes(phase.stmts, row, count, count="rows")
        body = self.push((row,), depth + 1)
        self.statements(phase.stmts)
        self.pop(body)
        self.end_conversions()
        loop = [
            f"{pad}#pragma omp simd",
            f"{pad}for (int64_t lane = 0; lane < rows; ++lane) {{",
            f"{pad}  const int64_t {row.key} = tile + lane;", *body.lines, f"{pad}}}",
        ]  # fmt: skip
        return [
            *(f"{pad}{ARRAY_TYPE[s.dtype]} rows_{s.name}[{count}] = {{}};" for s in lets),
            *self._with_conversions(converted, row, loop, depth),
        ]

    def _with_conversions(
        self, converted: Converted, row: Var, loop: list[str], depth: int
    ) -> list[str]:
        """The `loop` over a tile's rows with what converts their elements, if anything does."""
        if not converted:
            return loop
        pad, inner = margin(depth), margin(depth + 1)
        return [
            f"{pad}{{", f"{inner}const int64_t {row.key} = tile, lane = 0;",
            *(inner + text for text in converted.before), *("  " + line for line in loop),
            *(inner + text for text in converted.after), f"{pad}}}",
        ]  # fmt: skip

    def _of_elements(self, phase: Phase, row: Var, depth: int) -> list[str]:
        """A pass over the elements, each for all rows of the tile: lanes beyond its last row are
        computed from zeros."""
        (element,), pad = self.kernel.reduction, margin(depth)
        long = [s for s in phase.stmts if isinstance(s, Reduce) and s in self.form.long]
        inner = depth + bool(long)
        around = self.push((element,), inner + 1)
        converted = self.begin_lanes(phase.stmts, row, self.form.tile)
        body = self.push((row,), inner + 2)
        self.statements(phase.stmts)
        self.pop(body)
        self.end_conversions()
        self.pop(around)
        each = margin(inner + 1)
        loop = [
            f"{each}#pragma omp simd", f"{each}{each_lane(self.form.tile)} {{",
            f"{each}  const int64_t {row.key} = tile + lane;", *body.lines, f"{each}}}",
        ]  # fmt: skip
        lines = [*around.lines, *self._with_conversions(converted, row, loop, inner + 1)]
        kept = [s for s in phase.stmts if isinstance(s, ScratchStore)]
        declared = [s for s in phase.stmts if isinstance(s, Reduce) and s not in long]
        head = [pad + self._array(s.dtype, f"saved_{s.name}", self.form.tile * int(element.size))
                for s in kept]  # fmt: skip
        head += [line for s in declared for line in self._accumulator(s, pad)]
        if not long:
            return [*head, *self._loop_of(element, lines, depth)]
        return [*head, *self._in_blocks(element, lines, long, depth)]

    def _loop_of(
        self, element: Var, lines: list[str], depth: int, bounds: Bounds | None = None
    ) -> list[str]:
        return [
            f"{margin(depth)}{self._for_header(element, bounds)} {{",
            *lines,
            f"{margin(depth)}}}",
        ]

    def _in_blocks(
        self, element: Var, lines: list[str], long: list[Reduce], depth: int
    ) -> list[str]:
        """The loop in blocks, each with its own accumulators of long sums."""
        pad, each, count = margin(depth), each_lane(self.form.tile), self.form.tile
        step, size = self.form.block, self.size(element.size)
        return [
            *(f"{pad}double total_{s.name}[{count}] = {{}};" for s in long),
            f"{pad}for (int64_t block = 0; block < {size}; block += {step}) {{",
            f"{pad}  const int64_t block_end = {block_end('block', step, size)};",
            *("  " + line for s in long for line in self._accumulator(s, pad)),
            *self._loop_of(element, lines, depth + 1, ("block", "block_end")),
            *(f"{pad}  {each} total_{s.name}[lane] += rows_{s.name}[lane];" for s in long),
            f"{pad}}}",
            *(f"{pad}{VALUE_TYPE[s.dtype]} rows_{s.name}[{count}]; "
              f"{each} rows_{s.name}[lane] = total_{s.name}[lane];" for s in long),
        ]  # fmt: skip

    def _accumulator(self, stmt: Reduce, pad: str) -> list[str]:
        count, place = self.form.tile, stmt.finds_position
        text = f"{accumulator_type(stmt)} rows_{stmt.name}[{count}];"
        text += f" int32_t at_{stmt.name}[{count}];" if place else ""
        clear = f"rows_{stmt.name}[lane] = {start_value(stmt.op, stmt.dtype)};"
        clear += f" at_{stmt.name}[lane] = 0;" if place else ""
        return [pad + text, f"{pad}{each_lane(count)} {{ {clear} }}"]

    # ---- values ---------------------------------------------------------------------------------

    def define(self, stmt: Reduce | Scan | Let | ScratchStore, value: str) -> None:
        if isinstance(stmt, Reduce):
            self.line(self._combine(stmt, value, self._position(stmt)))
        elif isinstance(stmt, Let):
            self.line(f"rows_{stmt.name}[lane] = {value};")
        else:
            super().define(stmt, value)

    def _combine(self, stmt: Reduce | Scan, value: str, position: str) -> str:
        name = f"rows_{stmt.name}[lane]"
        if stmt.finds_position:
            return take(stmt.op, value, position, name, f"at_{stmt.name}[lane]")
        return f"{name} = {combine(stmt.op, name, value)};"

    def named_value(self, expr: Named) -> str:
        if expr.op == "scratch":
            return self._kept(expr.name)
        found = self.reductions.get(expr.name)
        if found is not None and found.finds_position:
            return f"at_{expr.name}[lane]"
        truth = expr.dtype == torch.bool
        return f"(rows_{expr.name}[lane] != 0)" if truth else f"rows_{expr.name}[lane]"

    def _kept(self, name: str) -> str:
        (element,) = self.kernel.reduction
        return f"saved_{name}[{self.form.tile} * {element.key} + lane]"
