"""C++ of scatters, whose stores may collide: threads divide rows by destination, or columns."""

from __future__ import annotations

from dicp.codegen.types import VALUE_TYPE
from dicp.codegen.values import margin
from dicp.loop.ir.index import Index
from dicp.vendor.cpu.form import ByDestination, Scattered, Team
from dicp.vendor.cpu.render.loops import CHUNKS, Loops


class ScatteredWriter(Loops[Scattered]):
    """Threads each own a range of the last axis, or of the first where its stores do not overlap;
    else one thread runs all."""

    def lines(self) -> list[str]:
        (*outer, last), owned = self.kernel.parallel, self.form.owned
        indent = 2 if owned else 1
        scope = self.push(outer, indent + len(outer))
        bounds = ("low", "high") if owned else None
        pragma = [f"{margin(scope.indent)}#pragma omp simd"] if owned else []
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


class ByDestinationWriter(Loops[ByDestination]):
    """Sums of whole rows in the order of their destinations."""

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
        for count in self.form.together:
            lines += self._added_together(count)
        if self.kernel.fresh:
            target = self._at_place()
            lines.append(f"    if (!begun) {self._for_header(last)} {target} = 0;")
        return [*lines, "  }", "  }"]

    def _added_together(self, count: int) -> list[str]:
        row, last = self.kernel.parallel
        store = self.form.store
        target, ctype = self._at_place(), VALUE_TYPE[store.ref.dtype]
        old = f"begun ? {target} : 0" if self.kernel.fresh else target
        outer = self.push((row,), 5)
        body = self.push((last,), 5)
        value = self.value(store.value)
        self.pop(body)
        self.pop(outer)
        lines = [
            f"    {'while' if count == self.form.together[0] else 'if'} (next + {count} <= end) {{",
            "      #pragma omp simd", f"      {self._for_header(last)} {{",
            f"        {ctype} sum = {old};",
        ]  # fmt: skip
        for k in range(count):
            lines += [
                "        {", f"{margin(5)}const int64_t {row.key} = listed[next + {k}];",
                *outer.lines, *body.lines, f"{margin(5)}sum = sum + {value};", "        }",
            ]  # fmt: skip
        begun = ["      begun = true;"] if self.kernel.fresh else []
        lines += [f"        {target} = sum;", "      }", f"      next += {count};", *begun, "    }"]
        return lines

    def _at_place(self) -> str:
        store, place = self.form.store, self.form.place
        terms = tuple((a, c) for a, c in store.index.terms if a != place)
        step = dict(store.index.terms)[place]
        index = f"{self.size(step)} * place + {self.index(Index(store.index.const, terms))}"
        return f"{self.arg(store.ref)}[{index}]"
