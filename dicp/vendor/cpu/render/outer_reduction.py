"""C++ of outer reductions: row after row is combined into accumulators for a tile of columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from dicp.codegen.spelling import combine
from dicp.codegen.types import VALUE_TYPE, start_value
from dicp.codegen.values import Scope, local, margin
from dicp.loop.ir.index import Size, Var, product
from dicp.loop.ir.kernel import Kernel, Phase, Reduce, Scan, Stmt
from dicp.vendor.cpu.form import Columns, Team, divides
from dicp.vendor.cpu.render.conversions import Bounds, Converted
from dicp.vendor.cpu.render.loops import CHUNKS, Loops, block_end


class ColumnsWriter(Loops[Columns]):
    """Threads divide the tiles of columns; with few columns, they divide the rows into chunks."""

    def __init__(self, kernel: Kernel, form: Columns) -> None:
        super().__init__(kernel, form)
        self._rows: dict[Var, str] = {}
        """The loop over rows -> the name of the row, of several, that is emitted."""

    def variable(self, var: Var) -> str:
        return self._rows.get(var, var.key)

    def lines(self) -> list[str]:
        kernel, split = self.kernel, self.form.split
        outer, column = kernel.parallel[:-1], kernel.parallel[-1]
        width = self.size(column.size)
        accumulators = [s for s in kernel.stmts() if isinstance(s, Reduce)]
        running = [s for s in kernel.stmts() if isinstance(s, Scan)]
        depth = 2 + len(outer)
        scope = self.push(outer, depth)
        pad = margin(depth)
        inner = [p for p in kernel.phases if p.level == "reduction"]
        tail = [p for p in kernel.phases if p.level == "parallel"]
        step = self.form.tile
        scope.lines.append(f"{pad}const int64_t tile_end = {block_end('tile', step, width)};")
        if split:
            self._split_column(scope, inner, accumulators, column)
        else:
            stmts: list[Reduce | Scan] = [*accumulators, *running]
            for stmt in stmts:
                scope.lines += self._accumulator_array(stmt, pad)
            self._pass_over_columns(scope, inner, column, kernel.reduction, None)
        self._column_tail(scope, tail, column, accumulators)
        head = [
            f"{margin(1 + len(outer))}for (int64_t tile = 0; tile < {width}; tile += {step}) {{"
        ]
        inside = [*head, *scope.lines, f"{margin(1 + len(outer))}}}"]
        return self._outer_loops(outer, inside, self.form.team)

    def _total_type(self, stmt: Reduce | Scan) -> torch.dtype:
        return torch.float64 if stmt in self.form.long else stmt.dtype

    def _place_type(self) -> torch.dtype:
        """The type of positions: int32 where it holds them, of which vectors have more."""
        count = product(v.size for v in self.kernel.reduction)
        short = isinstance(count, int) and count <= torch.iinfo(torch.int32).max
        return torch.int32 if short else torch.int64

    def _accumulator_array(self, stmt: Reduce | Scan, pad: str) -> list[str]:
        tile = self._tile_width()
        lines = [pad + self._array(self._total_type(stmt), f"column_{stmt.name}", tile)]
        clear = f"column_{stmt.name}[c] = {start_value(stmt.op, stmt.dtype)};"
        if stmt.finds_position:
            lines.append(pad + self._array(self._place_type(), f"column_at_{stmt.name}", tile))
            clear += f" column_at_{stmt.name}[c] = 0;"
        return [*lines, f"{pad}for (int64_t c = 0; c < {tile}; ++c) {{ {clear} }}"]

    def _tile_width(self) -> int:
        """How many columns a tile has at most."""
        columns, tile = self.kernel.parallel[-1].size, self.form.tile
        return min(columns, tile) if isinstance(columns, int) else tile

    def _pass_over_columns(
        self, scope: Scope, phases: Iterable[Phase], column: Var, loops: Sequence[Var],
        first_bounds: Bounds | None,
    ) -> None:  # fmt: skip
        for phase in phases:
            long = [s for s in phase.stmts if isinstance(s, Reduce) and s in self.form.long]
            if not long or self.form.blocks is None:
                scope.lines += self._rows_together(phase, loops, scope, column, first_bounds, long)
                continue
            outside, step = self.form.blocks
            whole, inside = loops[:outside], loops[outside:]
            bounds = None if whole else first_bounds
            around = self.push(whole, scope.indent + len(whole))
            block = ("block", "block_end")
            lines = [
                *self._open_row_blocks(around, inside[0], step, bounds, long, column),
                *self._rows_together(phase, inside, around, column, block, long),
                *self._close_row_blocks(around, long),
            ]
            self.pop(around)
            scope.lines += self._nest(whole, [*around.lines, *lines], scope.indent, first_bounds)

    def _columns(self, phase: Phase, column: Var, long: Sequence[Reduce]) -> None:
        """Emits what is computed for each column of a row."""
        for stmt in phase.stmts:
            if isinstance(stmt, Reduce):
                value, rows = self.value(stmt.value), f"rows_{stmt.name}"
                text = self._combine_at(stmt, value, f"{column.key} - tile")
                if stmt in long:
                    text = f"{rows} = {combine(stmt.op, rows, value)};"
                self.line(text)
            elif isinstance(stmt, Scan):
                slot = f"column_{stmt.name}[{column.key} - tile]"
                value = combine(stmt.op, slot, self.value(stmt.value))
                ctype = VALUE_TYPE[stmt.dtype]
                self.line(f"const {ctype} {local(stmt.name)} = {slot} = {value};")
                self.named_here(stmt.name)
            else:
                self.statements((stmt,))

    def _rows_together(
        self, phase: Phase, loops: Sequence[Var], scope: Scope, column: Var,
        bounds: Bounds | None, sums: Sequence[Reduce],
    ) -> list[str]:  # fmt: skip
        """The loop over rows, unrolled and jammed, and the loop over those that remain: `sums` of
        jammed rows are added up before they are added to the column's total."""
        indent, jam = scope.indent + len(loops), self.form.jam
        if jam == 1:
            middle = self.push(loops, indent)
            pragma, emit = "#pragma omp simd", partial(self._columns, phase, column, sums)
            inner = self._inner_loop(
                phase.stmts, column, indent, [margin(indent) + pragma], ("tile", "tile_end"), emit,
                self._tile_size(column),
            )  # fmt: skip
            self.pop(middle)
            return self._nest(loops, [*middle.lines, *inner], scope.indent, bounds)
        outer, last = loops[:-1], loops[-1]
        low, high = ("0", self.size(last.size)) if outer or not bounds else bounds
        whole = high if divides(jam, last) else f"{low} + ({high} - {low}) / {jam} * {jam}"
        around = self.push(outer, indent - 1)
        lines = self._jammed_rows(jam, (low, whole), phase, last, indent, column, sums)
        if whole != high:
            lines += self._jammed_rows(1, (whole, high), phase, last, indent, column, sums)
        self.pop(around)
        return self._nest(outer, [*around.lines, *lines], scope.indent, bounds)

    def _jammed_rows(
        self, count: int, bounds: Bounds, phase: Phase, row: Var, indent: int,
        column: Var, sums: Sequence[Reduce],
    ) -> list[str]:  # fmt: skip
        """The loop over rows within `bounds`, `count` of them at a time."""
        (low, high), pad, tile = bounds, margin(indent), ("tile", "tile_end")
        block = self._converted_block(phase.stmts, column, tile, self._tile_size(column))
        depth = indent + (block is not None)
        before: list[str] = []
        inside: list[str] = []
        converted: list[Converted] = []
        for k in range(count):
            name = self._rows[row] = f"{row.key}_{k}"
            middle = self.push((row,), indent)
            if block is not None:
                converted.append(self.begin_conversions(phase.stmts, block))
            body = self.push((column,), depth + 1)
            self._columns(phase, column, sums)
            self.pop(body)
            self.end_conversions()
            self.pop(middle)
            before += [f"{pad}const int64_t {name} = first + {k};", *middle.lines]
            inside += [f"{margin(depth)}  {{", *body.lines, f"{margin(depth)}  }}"]
        del self._rows[row]
        own, block_bounds = margin(depth), tile if block is None else ("start", "end")
        loop = [
            f"{own}#pragma omp simd",
            f"{own}{self._for_header(column, block_bounds)} {{",
            *(f"{own}  {VALUE_TYPE[s.dtype]} rows_{s.name} = 0;" for s in sums),
            *inside,
            *(f"{own}  column_{s.name}[{column.key} - tile] += rows_{s.name};" for s in sums),
            f"{own}}}",
        ]
        if block is not None:
            loop = self._in_converted_blocks(block, [], converted, loop, indent)
        return [
            f"{margin(indent - 1)}for (int64_t first = {low}; first < {high}; first += {count}) {{",
            *before, *loop, f"{margin(indent - 1)}}}",
        ]  # fmt: skip

    def _tile_size(self, column: Var) -> Size | None:
        """What the number of columns of a tile is a multiple of, as far as conversions need it."""
        size, tile = column.size, self.form.tile
        if isinstance(size, int) and size <= tile:
            return size
        block = self.form.converted.even(size)
        return None if block is None or tile % block else size

    def _folds(self, stmts: Sequence[Stmt]) -> bool:
        return False

    def _open_row_blocks(
        self, scope: Scope, first: Var, step: int, bounds: Bounds | None,
        long: Sequence[Reduce], column: Var,
    ) -> list[str]:  # fmt: skip
        """Opens the loop over blocks of the loop `first`, each block with its own accumulators."""
        pad = margin(scope.indent)
        low, high = bounds or ("0", self.size(first.size))
        width, lines = self._tile_width(), []
        for stmt in long:
            lines.append(f"{pad}double* total_{stmt.name} = column_{stmt.name};")
        lines += [
            f"{pad}for (int64_t block = {low}; block < {high}; block += {step}) {{",
            f"{pad}const int64_t block_end = {block_end('block', step, high)};",
        ]
        for stmt in long:
            lines.append(
                pad
                + self._array(stmt.dtype, f"column_{stmt.name}", width)
                + f" for (int64_t c = 0; c < tile_end - tile; ++c) column_{stmt.name}[c] = 0;"
            )
        return lines

    def _close_row_blocks(self, scope: Scope, long: Sequence[Reduce]) -> list[str]:
        pad = margin(scope.indent)
        sums = [
            f"{pad}for (int64_t c = 0; c < tile_end - tile; ++c) "
            f"total_{s.name}[c] += column_{s.name}[c];"
            for s in long
        ]
        return [*sums, f"{pad}}}"]

    def _split_column(
        self, scope: Scope, phases: list[Phase], accumulators: list[Reduce], column: Var
    ) -> None:
        """Each chunk of the reduction loops fills its own accumulators, which are then combined."""
        pad, width = margin(scope.indent), "(tile_end - tile)"
        types = {stmt: VALUE_TYPE[self._total_type(stmt)] for stmt in accumulators}
        for stmt, ctype in types.items():
            shared = self._allocated(ctype, f"column_{stmt.name}", f"{CHUNKS} * {width}")
            scope.lines.append(pad + shared)
        chunk = self.push((), scope.indent + 1)
        chunk.lines.append(f"{pad}  {self._chunk_limits()}")
        for stmt, ctype in types.items():
            chunk.lines += [
                f"{pad}  {ctype}* all_{stmt.name} = column_{stmt.name};",
                f"{pad}  {{ {ctype}* own = all_{stmt.name} + chunk * {width}; "
                f"for (int64_t c = 0; c < {width}; ++c) "
                f"own[c] = {start_value(stmt.op, stmt.dtype)}; }}",
            ]
        body = self.push((), scope.indent + 1)
        body.lines += [
            f"{pad}  {ctype}* column_{stmt.name} = all_{stmt.name} + chunk * {width};"
            for stmt, ctype in types.items()
        ]
        self._pass_over_columns(body, phases, column, self.kernel.reduction, ("low", "high"))
        self.pop(body)
        self.pop(chunk)
        scope.lines += [
            f"{pad}{self._team_loop(Team())}",
            f"{pad}for (int64_t chunk = 0; chunk < {CHUNKS}; ++chunk) {{",
            *chunk.lines, f"{pad}  {{", *body.lines, f"{pad}  }}", f"{pad}}}",
        ]  # fmt: skip
        for stmt in accumulators:
            combined = self._combine_at(stmt, f"column_{stmt.name}[chunk * {width} + c]", "c")
            scope.lines.append(
                f"{pad}for (int64_t chunk = 1; chunk < {CHUNKS}; ++chunk) "
                f"for (int64_t c = 0; c < {width}; ++c) {{ {combined} }}"
            )

    def _chunk_limits(self) -> str:
        """The first reduction loop's range in a chunk, in whole jammed iterations if it has any."""
        first, *inner = self.kernel.reduction
        total, times = self.size(first.size), ""
        if not inner and self.form.jam > 1 and divides(self.form.jam, first):
            total, times = f"{total} / {self.form.jam}", f" * {self.form.jam}"
        return (
            f"const int64_t low = chunk * {total} / {CHUNKS}{times}, "
            f"high = (chunk + 1) * {total} / {CHUNKS}{times};"
        )

    def _column_tail(
        self, scope: Scope, phases: Iterable[Phase], column: Var, accumulators: Sequence[Reduce]
    ) -> None:
        stmts = [s for p in phases for s in p.stmts]
        if not stmts:  # of scans
            return

        def emit() -> None:
            for stmt in accumulators:
                source, dtype = (
                    ("column_at_", torch.int64) if stmt.finds_position else ("column_", stmt.dtype)
                )
                self.line(
                    f"const {VALUE_TYPE[dtype]} {_result(stmt)} = "
                    f"({VALUE_TYPE[dtype]}){source}{stmt.name}[{column.key} - tile];"
                )
                self.named_here(stmt.name)
            self.statements(stmts)

        bounds, size = ("tile", "tile_end"), self._tile_size(column)
        scope.lines += self._inner_loop(stmts, column, scope.indent, [], bounds, emit, size)


def _result(stmt: Reduce) -> str:
    return f"at_{stmt.name}" if stmt.finds_position else local(stmt.name)
