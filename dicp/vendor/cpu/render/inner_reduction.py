"""C++ of inner reductions: rows passed over phase after phase, or few rows split among threads."""

from __future__ import annotations

from dataclasses import replace

from dicp.codegen.types import VALUE_TYPE
from dicp.codegen.values import Scope, local, margin
from dicp.loop.ir.index import product
from dicp.loop.ir.kernel import Phase, Reduce, Store
from dicp.vendor.cpu.form import MeanStep, Online, Rows, ShiftedSums, Split, Team
from dicp.vendor.cpu.render.loops import CHUNKS, block_end, half_vectors
from dicp.vendor.cpu.render.passes import Passes


class RowsWriter(Passes[Rows]):
    """Threads divide the rows."""

    def lines(self) -> list[str]:
        rows, form = self.kernel.parallel, self.form
        scope = self.push(rows, 1 + len(rows))
        for over in form.passes:
            if isinstance(over, Phase):
                self.statements(over.stmts)
            elif isinstance(over, ShiftedSums):
                self._sum_and_deviations(over, scope)
            elif isinstance(over, MeanStep):
                self._about_mean(over.found, scope)
            elif isinstance(over, Online):
                self._online_softmax(over, scope)
            else:
                self._pass(over, scope)
        if not rows:
            return scope.lines
        if form.cross_row:
            return self._in_parts(scope.lines)
        return self._outer_loops(rows, scope.lines, form.team)

    # ---- moments --------------------------------------------------------------------------------

    def _sum_and_deviations(self, found: ShiftedSums, scope: Scope) -> None:
        total = found.sums.total
        self._shifted_sums(found, scope, product(v.size for v in self.kernel.reduction))
        self._named(total, f"sum_{found.sums.squares.name}", scope)

    def _about_mean(self, found: ShiftedSums, scope: Scope) -> None:
        """The sums over deviations from the mean, of those over deviations from the shift."""
        sums, size = found.sums, self.size(product(v.size for v in self.kernel.reduction))
        name, residual = sums.squares.name, found.residual
        gap, deviation = f"gap_{name}", f"deviation_{name}"
        scope.lines += [
            f"{margin(scope.indent)}const double {gap} = {local(found.shift)} - "
            f"(double){local(sums.center.name)}, {deviation} = {residual} + {size} * {gap};"
        ]
        if sums.residual is not None:
            self._named(sums.residual, deviation, scope)
        self._named(sums.squares, f"squares_{name} + {gap} * ({residual} + {deviation})", scope)

    def _named(self, stmt: Reduce, value: str, scope: Scope) -> None:
        ctype, pad = VALUE_TYPE[stmt.dtype], margin(scope.indent)
        scope.lines.append(f"{pad}const {ctype} {local(stmt.name)} = ({ctype})({value});")
        self.named_here(stmt.name)

    # ---- cross-row reductions fused into the row's -----------------------------------------------

    def _store(self, stmt: Store, value: str) -> str:
        if not stmt.op:
            return super()._store(stmt, value)
        place = f"part_{self.arg(stmt.ref)}[{self._inner_position()}]"
        return f"{place} = {place} + {value};"

    def _in_parts(self, body: list[str]) -> list[str]:
        """The parallel loop in parts, each with cross-row accumulators that a tree then adds."""
        loops, inner = self.kernel.parallel, self.kernel.reduction
        width = self.size(product(v.size for v in inner))
        each = f"for (int64_t c = 0; c < {width}; ++c)"
        rows = self.size(product(v.size for v in loops))
        lines, own, total = [f"  const int64_t parts = d_partial_sum_count({rows});"], [], []
        tail = self.push(inner, 1 + len(inner))
        for stmt in self.form.cross_row:
            name, ctype = self.arg(stmt.ref), VALUE_TYPE[stmt.ref.dtype]
            lines.append("  " + self._allocated(ctype, f"all_{name}", f"parts * {width}"))
            own += [
                f"    {ctype}* part_{name} = all_{name} + part * {width};",
                f"    {each} part_{name}[c] = 0;",
            ]
            total += [
                "  for (int64_t step = 1; step < parts; step *= 2)",
                "    for (int64_t part = 0; part + step < parts; part += 2 * step)",
                f"      {each} all_{name}[part * {width} + c] "
                f"+= all_{name}[(part + step) * {width} + c];",
            ]
            value = f"all_{name}[{self._inner_position()}]"
            tail.lines.append(margin(tail.indent) + super()._store(replace(stmt, op=""), value))
        self.pop(tail)
        size = self.size(loops[0].size)
        each_part = [
            "  for (int64_t part = 0; part < parts; ++part) {",
            f"    const int64_t low = part * {size} / parts, high = (part + 1) * {size} / parts;",
            *own, *self._nest(loops, body, 2, ("low", "high")), "  }",
        ]  # fmt: skip
        lines += self._divided(self.form.team, each_part)
        return [*lines, *total, *self._nest(inner, tail.lines, 1)]

    def _online_softmax(self, online: Online, scope: Scope) -> None:
        """Online softmax in blocks: each is read from memory once, for the maximum so far and for
        the sum of exponentials, so memory is not idle for the length of a row. A higher maximum
        rescales the earlier sum.

        Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
        """
        (row_max,), total, pad = online.row_max.phase.stmts, online.total, margin(scope.indent)
        assert isinstance(row_max, Reduce)
        var, best, sum_ = self.kernel.reduction[0], local(row_max.name), local(total.name)
        most, before = f"most_{row_max.name}", f"before_{row_max.name}"
        size, bounds = self.size(var.size), ("block", "block_end")
        block = self.push((), scope.indent + 1)
        self._pass(online.row_max, block, bounds)
        simd = self._simd([total]) + half_vectors(online.row_max.half_vectors)
        pragma = [margin(block.indent) + simd]
        loop = self._inner_loop((total,), var, block.indent, pragma, bounds)
        self.pop(block)
        scope.lines += [
            f"{pad}float {most} = -d_inff; double total_{total.name} = 0;",
            f"{pad}for (int64_t block = 0; block < {size}; block += {online.block}) {{",
            f"{pad}  const int64_t block_end = {block_end('block', online.block, size)};",
            *block.lines,
            f"{pad}  const float {before} = {most};",
            f"{pad}  {most} = d_maximum({before}, {best});",
            f"{pad}  {best} = {most} == -d_inff ? 0.0f : {most};",
            f"{pad}  float {sum_} = 0;", *loop,
            f"{pad}  total_{total.name} = "
            f"total_{total.name} * d_exp_weight({before} - {best}) + {sum_};",
            f"{pad}}}",
            f"{pad}const float {best} = {most};",
            f"{pad}const float {sum_} = {most} == -d_inff ? d_nanf : (float)total_{total.name};",
        ]  # fmt: skip
        self.named_here(row_max.name)
        self.named_here(total.name)


class SplitWriter(Passes[Split]):
    """Threads divide each row's reduction loop into chunks, whose results are then combined."""

    def lines(self) -> list[str]:
        kernel = self.kernel
        depth = 1 + len(kernel.parallel)
        scope = self.push(kernel.parallel, depth)
        accumulators = [s for s in kernel.phases[0].stmts if isinstance(s, Reduce)]
        pad = margin(depth)
        for stmt in accumulators:
            ctype = VALUE_TYPE[stmt.dtype]
            scope.lines.append(f"{pad}{ctype} part_{stmt.name}[d_max_chunks];")
            if stmt.finds_position:
                scope.lines.append(f"{pad}int64_t part_at_{stmt.name}[d_max_chunks];")
        first = kernel.reduction[0]
        total = self.size(first.size)
        chunk = self.push((), depth + 1)
        low, high = f"chunk * {total} / {CHUNKS}", f"(chunk + 1) * {total} / {CHUNKS}"
        chunk.lines.append(f"{pad}  const int64_t low = {low}, high = {high};")
        self._pass(self.form.first, chunk, ("low", "high"))
        for stmt in accumulators:
            chunk.lines.append(f"{pad}  part_{stmt.name}[chunk] = {local(stmt.name)};")
            if stmt.finds_position:
                chunk.lines.append(f"{pad}  part_at_{stmt.name}[chunk] = at_{stmt.name};")
        self.pop(chunk)
        head = f"{pad}for (int64_t chunk = 0; chunk < {CHUNKS}; ++chunk) {{"
        scope.lines += self._divided(Team(), [head, *chunk.lines, f"{pad}}}"])
        for stmt in accumulators:
            part = (f"part_{stmt.name}[chunk]", f"part_at_{stmt.name}[chunk]")
            scope.lines.append(pad + self._declare(stmt))
            scope.lines.append(f"{pad}for (int64_t chunk = 0; chunk < {CHUNKS}; ++chunk) {{")
            scope.lines.append(f"{pad}  {self._combine(stmt, *part)}")
            scope.lines.append(f"{pad}}}")
            self.named_here(stmt.name)
        for phase in self.form.tail:
            self.statements(phase.stmts)
        return self._outer_loops(kernel.parallel, scope.lines, None)
