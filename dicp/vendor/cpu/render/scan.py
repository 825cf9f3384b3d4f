"""C++ of scans along memory: prefix sums in vectors, other scans over several rows at once."""

from __future__ import annotations

from dicp.codegen.emitter import accumulator_type
from dicp.codegen.types import VALUE_TYPE, start_value
from dicp.codegen.values import local, margin
from dicp.loop.ir.kernel import Scan
from dicp.vendor.cpu.form import JammedScans, PrefixSums
from dicp.vendor.cpu.render.loops import Loops, block_end


class PrefixSumsWriter(Loops[PrefixSums]):
    """Rows of prefix sums."""

    def lines(self) -> list[str]:
        """Block by block, three vectorized loops: over the values to sum, their prefix sums, and
        the statements that read these."""
        kernel, depth = self.kernel, 1 + len(self.kernel.parallel)
        scope = self.push(kernel.parallel, depth)
        (phase,), (var,), pad = kernel.phases, kernel.reduction, margin(depth)
        running = [s for s in phase.stmts if isinstance(s, Scan)]
        bounds, place = ("block", "block_end"), f"[{var.key} - block]"
        arrays = [self._array(s.dtype, f"part_{s.name}", self.form.block) for s in running]
        pragma, stores = [f"{pad}  #pragma omp simd"], kernel.stores()

        def emit_values() -> None:
            for s in running:
                self.line(f"part_{s.name}{place} = {self.value(s.value)};")

        def emit_stores() -> None:
            for s in running:
                self.line(f"const {VALUE_TYPE[s.dtype]} {local(s.name)} = part_{s.name}{place};")
                self.named_here(s.name)
            self.statements(stores)

        before = self._inner_loop(running, var, depth + 1, pragma, bounds, emit_values)
        after = self._inner_loop(stores, var, depth + 1, pragma, bounds, emit_stores)
        size, step = self.size(var.size), self.form.block
        scope.lines += [
            *(f"{pad}{VALUE_TYPE[s.dtype]} total_{s.name} = 0;" for s in running),
            f"{pad}for (int64_t block = 0; block < {size}; block += {step}) {{",
            f"{pad}  const int64_t block_end = {block_end('block', step, size)};",
            *(f"{pad}  {array}" for array in arrays),
            *before,
            *(f"{pad}  d_running_sum(part_{s.name}, block_end - block, total_{s.name});"
              for s in running),
            *after,
            f"{pad}}}",
        ]  # fmt: skip
        if not kernel.parallel:
            return scope.lines
        return self._outer_loops(kernel.parallel, scope.lines, self.form.team)


class JammedScansWriter(Loops[JammedScans]):
    """Scans of several rows in one loop, by unroll-and-jam."""

    def lines(self) -> list[str]:
        kernel, jam = self.kernel, self.form.jam
        (*outer, last), depth = kernel.parallel, 1 + len(kernel.parallel)
        row = self.push(kernel.parallel, depth + 2)
        (phase,), pad = kernel.phases, margin(depth)
        running = [s for s in phase.stmts if isinstance(s, Scan)]
        body = self.push(kernel.reduction, depth + 2)
        self.statements(phase.stmts)
        self.pop(body)
        self.pop(row)
        low = margin(depth - 1)
        lines = [f"{low}for (int64_t first = 0; first < {last.size}; first += {jam}) {{"]
        for k in range(jam):
            lines += [
                f"{pad}{accumulator_type(s)} row{k}_{s.name} = {start_value(s.op, s.dtype)};"
                for s in running
            ]
        lines.append(f"{pad}{self._for_header(kernel.reduction[0])} {{")
        for k in range(jam):
            names = [f"{accumulator_type(s)}& {local(s.name)} = row{k}_{s.name};" for s in running]
            lines += [f"{pad}  {{", f"{pad}    const int64_t {last.key} = first + {k};",
                      *(f"{pad}    {name}" for name in names), *row.lines, *body.lines,
                      f"{pad}  }}"]  # fmt: skip
        lines += [f"{pad}}}", f"{low}}}"]
        return self._outer_loops(outer, lines, self.form.team)
