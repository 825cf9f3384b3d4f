"""C++ of scatters, whose stores may collide: threads divide rows by destination, or columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from dicp.codegen.types import VALUE_TYPE
from dicp.codegen.values import margin
from dicp.loop.ir.index import Var
from dicp.loop.ir.kernel import Kernel, Store
from dicp.vendor.cpu.form import ByDestination, Epilogue, HostForm, Scattered, Strip, Team
from dicp.vendor.cpu.render.loops import CHUNKS, Loops

F = TypeVar("F", bound=HostForm)


class RowsOfSums(Loops[F]):
    """Rows of sums that stay in a cache until their epilogue has read them."""

    def sums_of_row(self, epilogue: Epilogue) -> str:
        """Declares the sums of a row."""
        assert isinstance(epilogue.element.size, int)
        return self._array(epilogue.sums[0][0].dtype, "sums", epilogue.element.size)

    def epilogue(self, epilogue: Epilogue, strips: Sequence[Strip], indent: int) -> list[str]:
        """The loop over the elements of a row of sums."""
        element = epilogue.element
        for access in epilogue.sums:
            self.staged[access] = f"sums[{element.key}]"
        pragma = [f"{margin(indent)}#pragma omp simd"]
        lines = self._strips(strips, element, indent, pragma)
        self.staged.clear()
        return lines


class ScatteredWriter(RowsOfSums[Scattered]):
    """Threads each own a range of the last axis, or of the first where its stores do not overlap;
    else one thread runs all."""

    def lines(self) -> list[str]:
        if self.form.epilogue is not None:
            return self._row_by_row(self.form.epilogue)
        (*outer, last), owned = self.kernel.parallel, self.form.owned
        indent = 2 if owned else 1
        scope = self.push(outer, indent + len(outer))
        bounds = ("low", "high") if owned else None
        pragma = [f"{margin(scope.indent)}#pragma omp simd"] if self.form.distinct else []
        loop = self._inner_loop(self.kernel.stmts(), last, scope.indent, pragma, bounds)
        lines = self._nest(outer, [*scope.lines, *loop], indent)
        if owned:
            size = self.size(last.size)
            lines = [
                f"  for (int64_t chunk = 0; chunk < d_strips({size}); ++chunk) {{",
                f"    const int64_t low = chunk * {size} / d_strips({size}), "
                f"high = (chunk + 1) * {size} / d_strips({size});",
                *lines, "  }",
            ]  # fmt: skip
        return self._divided(self.form.team, lines)

    def _row_by_row(self, epilogue: Epilogue) -> list[str]:
        """Each row of sums from zeros to its epilogue."""
        (row, *inner), stmts = self.kernel.parallel, self.kernel.phases[0].stmts
        around = self.push((row,), 2)
        around.lines += [
            "    " + self.sums_of_row(epilogue),
            f"    for (int64_t c = 0; c < {epilogue.element.size}; ++c) sums[c] = 0;",
        ]
        body = self.push(inner, 2 + len(inner))
        self.statements(stmts)
        self.pop(body)
        around.lines += self._nest(inner, body.lines, 2)
        around.lines += self.epilogue(epilogue, epilogue.strips, 2)
        self.pop(around)
        return self._divided(self.form.team, self._nest([row], around.lines, 1))

    def _target(self, stmt: Store) -> str:
        epilogue = self.form.epilogue
        if epilogue is None or not stmt.op:
            return super()._target(stmt)
        return f"sums[{self.index(stmt.index.without(epilogue.row))}]"


class ByDestinationWriter(RowsOfSums[ByDestination]):
    """Sums of whole rows in the order of their destinations."""

    def __init__(self, kernel: Kernel, form: ByDestination) -> None:
        super().__init__(kernel, form)
        self._row = ""
        """The name of the row, of several, that is emitted."""

    def lines(self) -> list[str]:
        """A counting sort of the rows by destination; threads then sum each destination's rows."""
        place = self.form.place
        row, last = self.kernel.parallel
        rows, places = self.size(row.size), self.size(place.size)
        head = self.push((row,), 2)
        at = self.value(place.expr)
        self.pop(head)
        lines = [
            "  " + self._allocated("int64_t", "first", f"{places} + 1"),
            "  " + self._allocated("int64_t", "listed", rows),
            "  " + self._allocated("int64_t", "places", rows),
            f"  for (int64_t place = 0; place <= {places}; ++place) first[place] = 0;",
            f"  {self._for_header(row)} {{", *head.lines,
            f"    places[{row.key}] = {at};", f"    ++first[{at}];", "  }",
            f"  for (int64_t place = 1; place <= {places}; ++place)",
            "    first[place] += first[place - 1];",
            f"  for (int64_t row = {rows}; row-- > 0;) listed[--first[places[row]]] = row;",
            f"  {self._team_loop(Team())}",
            f"  for (int64_t part = 0; part < {CHUNKS}; ++part) {{",
            f"  const int64_t all = {rows} + {places};",
            f"  const int64_t low = d_partition(first, {places}, part * all / {CHUNKS});",
            f"  const int64_t high = d_partition(first, {places}, (part + 1) * all / {CHUNKS});",
            "  for (int64_t place = low; place < high; ++place) {",
            "    int64_t next = first[place];",
            "    const int64_t end = first[place + 1];",
        ]  # fmt: skip
        if self.kernel.fresh:
            lines.append("    bool begun = false;")
        if self.form.epilogue is not None:
            lines.append("    " + self.sums_of_row(self.form.epilogue))
        for count in self.form.rows_at_once:
            lines += self._add_rows(count)
        if self.form.epilogue is not None:
            lines += self._epilogue_of_place(self.form.epilogue)
        elif self.kernel.fresh:
            target = self._at_place()
            lines.append(f"    if (!begun) {self._for_header(last)} {target} = 0;")
        fence = ["  d_store_fence();"] * self.form.non_temporal
        return [*lines, "  }", *fence, "  }"]

    def _epilogue_of_place(self, epilogue: Epilogue) -> list[str]:
        lines: list[str] = []
        for test, strips in (("if (begun)", epilogue.strips), ("else", epilogue.untouched)):
            scope = self.push((epilogue.row,), 3)
            scope.lines.append(f"      const int64_t {epilogue.row.key} = place;")
            scope.lines += self.epilogue(epilogue, strips, 3)
            self.pop(scope)
            lines += [f"    {test} {{", *scope.lines, "    }"]
        return lines

    def variable(self, var: Var) -> str:
        return self._row or var.key if var == self.kernel.parallel[0] else var.key

    def _add_rows(self, count: int) -> list[str]:
        """Adds `count` rows of a destination at once, as long as there are as many if it is the
        most, else once."""
        row, last = self.kernel.parallel
        store, step = self.form.store, "while" if count == self.form.rows_at_once[0] else "if"
        target, ctype = self._at_place(), VALUE_TYPE[store.ref.dtype]
        old = f"begun ? {target} : 0" if self.kernel.fresh else target
        block = self._converted_block((store,), last, None, None)
        depth, bounds = 3 + (block is not None), None if block is None else ("start", "end")
        pad, before, inside, converted = margin(depth), [], [], []
        for k in range(count):
            self._row = f"{row.key}_{k}"
            outer = self.push((row,), 3)
            if block is not None:
                converted.append(self.begin_conversions((store,), block))
            body = self.push((last,), depth + 2)
            self.line(f"sum = sum + {self.value(store.value)};")
            self.pop(body)
            self.end_conversions()
            self.pop(outer)
            before += [f"      const int64_t {self._row} = listed[next + {k}];", *outer.lines]
            inside += [f"{pad}  {{", *body.lines, f"{pad}  }}"]
        self._row = ""
        loop = [
            f"{pad}#pragma omp simd", f"{pad}{self._for_header(last, bounds)} {{",
            f"{pad}  {ctype} sum = {old};", *inside, f"{pad}  {target} = sum;", f"{pad}}}",
        ]  # fmt: skip
        if block is not None:
            loop = self._in_converted_blocks(block, [], converted, loop, 3)
        begun = ["      begun = true;"] if self.kernel.fresh else []
        head = f"    {step} (next + {count} <= end) {{"
        return [head, *before, *loop, f"      next += {count};", *begun, "    }"]

    def _at_place(self) -> str:
        store, place = self.form.store, self.form.place
        if self.form.epilogue is not None:
            return f"sums[{self.kernel.parallel[-1].key}]"
        step, others = self.size(store.index.coefficient(place)), store.index.without(place)
        return f"{self.arg(store.ref)}[{step} * place + {self.index(others)}]"
