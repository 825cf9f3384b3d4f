"""Strip-mined loops, a cache line at a time: non-temporal stores, prefetch, lane accumulators.

The passes over a row load it from memory, compute, and store. The next row is prefetched while this
one is computed, and whole lines are stored without being read first: memory is never idle.
"""

from __future__ import annotations

from collections.abc import Sequence

from dicp.codegen.emitter import accumulator_type, nan_bits
from dicp.codegen.spelling import combine
from dicp.codegen.types import STORAGE_TYPE, VALUE_TYPE, start_value
from dicp.codegen.values import local, margin
from dicp.loop.ir.expr import Read
from dicp.loop.ir.index import Var
from dicp.loop.ir.kernel import Reduce, Scan, ScratchStore
from dicp.vendor.cpu.form import Strip
from dicp.vendor.cpu.render.conversions import Bounds, Conversions


class Strips(Conversions):
    """Emits loops over whole cache lines."""

    def _by_cache_lines(self, strip: Strip, var: Var, indent: int) -> list[str]:
        """The loop over `var` a cache line at a time."""
        sums = [s for s in strip.range.stmts if isinstance(s, Reduce)]
        return [
            *self._clear_lane_accumulators(sums, strip.lanes, indent),
            *self._strip_mined_loop(strip, var, indent),
            *self._fold_lane_accumulators(sums, strip.lanes, indent),
        ]

    def _strip_mined_loop(
        self, strip: Strip, var: Var, indent: int, bounds: Bounds | None = None
    ) -> list[str]:
        """The loop itself: results are computed in registers and stored a line at once."""
        part, count, non_temporal = strip.range, strip.lanes, strip.non_temporal
        pad, inner = margin(indent + 1), margin(indent + 2)
        saves = [s for s in part.stmts if isinstance(s, ScratchStore)]
        for k, s in enumerate(non_temporal):
            self.lane_lvalues[s.ref, s.index] = f"streamed{k}[lane]"
        self.strip_mined = {s.name for s in part.stmts if isinstance(s, Reduce | ScratchStore)}
        around = self.push((), indent + 1)
        converted = self.begin_lanes(part.stmts, var, count)
        body = self.push((var,), indent + 2)
        self.statements(part.stmts)
        self.pop(body)
        self.end_conversions()
        self.pop(around)
        self.lane_lvalues.clear()
        self.strip_mined = set()
        low, high = bounds or (self.size(part.low), self.size(part.high))
        return [
            f"{margin(indent)}for (int64_t line = {low}; line < {high}; line += {count}) {{",
            f"{pad}const int64_t {var.key} = line{', lane = 0' if converted else ''};",
            *(f"{pad}__builtin_prefetch({self._later(*place)});" for place in strip.prefetch),
            *(f"{pad}{STORAGE_TYPE[s.ref.dtype]} streamed{k}[{count}];"
              for k, s in enumerate(non_temporal)),
            *(f"{pad}{VALUE_TYPE[s.dtype]} lanes_{s.name}[{count}];" for s in saves),
            *around.lines, *(pad + text for text in converted.before), f"{pad}#pragma omp simd",
            f"{pad}{each_lane(count)} {{",
            f"{inner}const int64_t {var.key} = line + lane;", *body.lines, f"{pad}}}",
            *(pad + text for text in converted.after),
            *(f"{pad}d_store_lanes_non_temporal({self.arg(s.ref)} + ({self.index(s.index)}), "
              f"streamed{k});"
              for k, s in enumerate(non_temporal)),
            *(f"{pad}__builtin_memcpy(saved_{s.name} + ({self._inner_position()}), lanes_{s.name}, "
              f"sizeof(lanes_{s.name}));" for s in saves),
            f"{margin(indent)}}}",
        ]  # fmt: skip

    def _clear_lane_accumulators(
        self, sums: Sequence[Reduce | Scan], count: int, indent: int
    ) -> list[str]:
        """Declares and clears lane accumulators, one per element of a cache line."""
        lines = []
        for s in sums:
            start, nan = start_value(s.op, s.dtype), s.name in self.flagged
            text = f"{accumulator_type(s)} lanes_{s.name}[{count}]; "
            text += f"{nan_bits(s)} nan_lanes_{s.name}[{count}]; " if nan else ""
            clear = f"lanes_{s.name}[lane] = {start};"
            clear += f" nan_lanes_{s.name}[lane] = 0;" if nan else ""
            lines.append(f"{margin(indent)}{text}{each_lane(count)} {{ {clear} }}")
        return lines

    def _fold_lane_accumulators(self, sums: Sequence[Reduce], count: int, indent: int) -> list[str]:
        """Folds lane accumulators into one value per reduction."""
        if not sums:
            return []
        pad, lines = margin(indent), []
        for s in sums:
            name, one = local(s.name), f"lanes_{s.name}[lane]"
            text = f"{name} = {combine(s.op, name, one)};"
            if s.name in self.flagged:
                sign, nan, bits = ">" if s.op == "max" else "<", f"nan_{s.name}", f"nan_{one}"
                text = (
                    f"{name} = {one} {sign} {name} ? {one} : {name}; "
                    f"{nan} = {bits} > {nan} ? {bits} : {nan};"
                )
            lines.append(f"{pad}  {text}")
        return [f"{pad}{self._simd(sums)}", f"{pad}{each_lane(count)} {{", *lines, f"{pad}}}"]

    def _later(self, item: Read, loop: Var, steps: int) -> str:
        """The address that `item` reads `steps` steps of `loop` later."""
        index = item.index
        moved = index + index.coefficient(loop) * steps
        return f"{self.arg(item.ref)} + ({self.index(moved)})"

    def _simd(self, accumulators: Sequence[Reduce | Scan]) -> str:
        clauses = {"sum": "+", "prod": "*", "any": "|", "all": "&", "max": "max", "min": "min"}
        parts = [f"reduction({clauses[s.op]}: {local(s.name)})" for s in accumulators]
        parts += [f"reduction(max: nan_{s.name})" for s in accumulators if s.name in self.flagged]
        return " ".join(["#pragma omp simd", *parts])


def each_lane(count: int) -> str:
    return f"for (int64_t lane = 0; lane < {count}; ++lane)"
