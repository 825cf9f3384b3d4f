"""Loops a cache line at a time, with non-temporal stores and prefetch of the next row.

The passes over a row load it from memory, compute, and store. The next row is prefetched while this
one is computed, and whole lines are stored without being read first: memory is never idle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dicp.codegen.emitter import LINE_BYTES, Emitter, accumulator_type, local, margin, nan_bits
from dicp.codegen.spelling import combine
from dicp.codegen.types import STORAGE_TYPE, VALUE_TYPE, start_value
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Read, Ref
from dicp.loop.ir.index import FloorDiv, Indirect, Mod, Var, product
from dicp.loop.ir.kernel import Kernel, Phase, Reduce, Scan, ScratchStore, Store
from dicp.loop.passes.split_loops import Range
from dicp.vendor.cpu.thresholds import BEYOND_NEAR, MIN_PASS, PREFETCH_BYTES


class NonTemporal(Emitter):
    """Emits loops over whole cache lines."""

    def __init__(self, kernel: Kernel, non_temporal_bytes: float = math.inf) -> None:
        super().__init__(kernel)
        self.non_temporal_bytes = non_temporal_bytes
        """Bytes from which no part of a result is still in a cache when it is read."""
        self.writes_non_temporal = False
        self.prefetch: dict[Phase, list[Read]] = {}
        """Pass over the reduction -> the loads that it prefetches for the next row."""

    def _non_temporal_stores(self, part: Range, var: Var) -> list[Store]:
        """The stores of a loop that become non-temporal stores of whole cache lines.

        Inner reductions have none in 16-bit floats: conversions bound them, not memory.
        """
        least = {"pointwise": 1, "inner_reduction": 4}.get(self.kernel.kind, LINE_BYTES)
        stores = [s for s in part.stmts if isinstance(s, Store) and self._is_non_temporal(s, var)]
        return [s for s in stores if s.ref.dtype.itemsize >= least]

    def _line(self, refs: Sequence[Ref]) -> int:
        """Elements that fill whole lines of each of these tensors."""
        return LINE_BYTES // min((ref.dtype.itemsize for ref in refs), default=LINE_BYTES)

    def _is_non_temporal(self, stmt: Store, var: Var) -> bool:
        index = stmt.index
        size = product([*(v.size for v in index.variables()), stmt.ref.dtype.itemsize])
        if stmt.op or not isinstance(size, int) or size < self.non_temporal_bytes:
            return False
        reads = {item.ref.root for item in self.kernel.reads()}
        if stmt.ref.root in reads or index.coefficient(var) != 1:
            return False
        others = [(a, c) for a, c in index.terms if a != var]
        steps = [index.const, *(c for _, c in others)]
        hidden = any(var in deep_variables(a) for a, _ in others)
        whole = self._line([stmt.ref])
        return not hidden and all(isinstance(c, int) and c % whole == 0 for c in steps)

    def _by_cache_lines(
        self, part: Range, var: Var, indent: int, prefetch: Sequence[Read]
    ) -> list[str]:
        """The loop over `var` a cache line at a time, if it has non-temporal stores or prefetches
        the next row. Empty otherwise, and where its range is short or not in whole lines.
        """
        non_temporal = self._non_temporal_stores(part, var)
        count = self._line([*(s.ref for s in non_temporal), *(item.ref for item in prefetch)])
        sums = [s for s in part.stmts if isinstance(s, Reduce)]
        least = MIN_PASS if sums else count
        if not non_temporal and not prefetch or not self._in_whole_lines(part, count, least):
            return []
        next_row = [(item, self.kernel.parallel[-1], 1) for item in prefetch]
        return [
            *self._clear_lane_accumulators(sums, count, indent),
            *self._lines_of(part, var, indent, count, non_temporal, next_row),
            *self._fold_lane_accumulators(sums, count, indent),
        ]

    def _lines_of(
        self, part: Range, var: Var, indent: int, count: int, non_temporal: Sequence[Store],
        prefetch: Sequence[tuple[Read, Var, int]],
    ) -> list[str]:  # fmt: skip
        """The loop itself: results are computed in registers and stored a line at once; `prefetch`
        lists loads, each with the loop and the number of its steps to prefetch ahead."""
        self.writes_non_temporal |= bool(non_temporal)
        pad, inner = margin(indent + 1), margin(indent + 2)
        saves = [s for s in part.stmts if isinstance(s, ScratchStore)]
        for k, s in enumerate(non_temporal):
            self.lined[s.ref, s.index] = f"far{k}[lane]"
        self.strip_mined = {s.name for s in part.stmts if isinstance(s, Reduce | ScratchStore)}
        body = self._push((var,), indent + 2)
        self._stmts(part.stmts, body)
        self._pop(body)
        self.lined.clear()
        self.strip_mined = set()
        low, high = self._size(part.low), self._size(part.high)
        return [
            f"{margin(indent)}for (int64_t line = {low}; line < {high}; line += {count}) {{",
            f"{pad}const int64_t {var.key} = line;",
            *(f"{pad}__builtin_prefetch({self._later(*place)});" for place in prefetch),
            *(f"{pad}{STORAGE_TYPE[s.ref.dtype]} far{k}[{count}];"
              for k, s in enumerate(non_temporal)),
            *(f"{pad}{VALUE_TYPE[s.dtype]} lanes_{s.name}[{count}];" for s in saves),
            f"{pad}#pragma omp simd",
            f"{pad}{_each_lane(count)} {{",
            f"{inner}const int64_t {var.key} = line + lane;", *body.lines, f"{pad}}}",
            *(f"{pad}d_stream({self._arg(s.ref)} + ({self._index(s.index)}), far{k});"
              for k, s in enumerate(non_temporal)),
            *(f"{pad}__builtin_memcpy(saved_{s.name} + ({self._inner_position()}), lanes_{s.name}, "
              f"sizeof(lanes_{s.name}));" for s in saves),
            f"{margin(indent)}}}",
        ]  # fmt: skip

    def _in_whole_lines(self, part: Range, count: int, least: int) -> bool:
        low, high = part.low, part.high
        if not isinstance(low, int) or not isinstance(high, int) or high - low < least:
            return False
        return low % count == high % count == 0

    def _clear_lane_accumulators(
        self, sums: Sequence[Reduce], count: int, indent: int
    ) -> list[str]:
        """Declares and clears lane accumulators, one per element of a cache line."""
        lines = []
        for s in sums:
            start, nan = start_value(s.op, s.dtype), s.name in self.flagged
            text = f"{accumulator_type(s)} lanes_{s.name}[{count}]; "
            text += f"{nan_bits(s)} nan_lanes_{s.name}[{count}]; " if nan else ""
            clear = f"lanes_{s.name}[lane] = {start};"
            clear += f" nan_lanes_{s.name}[lane] = 0;" if nan else ""
            lines.append(f"{margin(indent)}{text}{_each_lane(count)} {{ {clear} }}")
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
        return [f"{pad}{self._simd(sums)}", f"{pad}{_each_lane(count)} {{", *lines, f"{pad}}}"]

    def _later(self, item: Read, loop: Var, steps: int) -> str:
        """The address that `item` reads `steps` steps of `loop` later."""
        index = item.index
        moved = index + index.coefficient(loop) * steps
        return f"{self._arg(item.ref)} + ({self._index(moved)})"

    def _simd(self, accumulators: Sequence[Reduce | Scan]) -> str:
        clauses = {"sum": "+", "prod": "*", "any": "|", "all": "&", "max": "max", "min": "min"}
        parts = [f"reduction({clauses[s.op]}: {local(s.name)})" for s in accumulators]
        parts += [f"reduction(max: nan_{s.name})" for s in accumulators if s.name in self.flagged]
        return " ".join(["#pragma omp simd", *parts])

    # ---- prefetch of the next row ---------------------------------------------------------------

    def _prefetched(self, passes: Sequence[Phase]) -> dict[Phase, list[Read]]:
        """Divides the loads of the next row among these passes."""
        found: dict[Phase, list[Read]] = {}
        for k, item in enumerate(self._streams() if passes else []):
            found.setdefault(passes[k % len(passes)], []).append(item)
        return found

    def _streams(self) -> list[Read]:
        """Loads of elements that only one row reads, from beyond the private caches; none where a
        row is too long to stay in the L1 cache until it is computed."""
        rows, inner = self.kernel.parallel, self.kernel.reduction
        if not rows or not inner:
            return []
        streams = [item for item in distinct(self.kernel.reads()) if self._is_stream(item)]
        sizes = [v.size for v in inner]
        moved = product([*sizes, sum(item.ref.dtype.itemsize for item in streams)])
        return streams if isinstance(moved, int) and moved <= PREFETCH_BYTES else []

    def _is_stream(self, item: Read) -> bool:
        index, loops = item.index, (*self.kernel.parallel, *self.kernel.reduction)
        if item.ref.root in self.stored or not all(isinstance(a, Var) for a, _ in index.terms):
            return False
        size = product([*(v.size for v in index.variables()), item.ref.dtype.itemsize])
        steps = [index.coefficient(v) for v in loops]
        whole = all(isinstance(c, int) and c for c in steps) and steps[-1] == 1
        return whole and isinstance(size, int) and size >= BEYOND_NEAR


def distinct(reads: Sequence[Read]) -> list[Read]:
    """One load for each element: rebuilt expressions repeat loads."""
    return list({(item.ref, item.index): item for item in reads}.values())


def _each_lane(count: int) -> str:
    return f"for (int64_t lane = 0; lane < {count}; ++lane)"


def deep_variables(atom: Var | FloorDiv | Mod | Indirect) -> set[Var]:
    if isinstance(atom, Indirect):
        return {v for e in ir.walk(atom.expr) for i in ir.indices_of(e) for v in i.variables()}
    return atom.value.variables() if isinstance(atom, (FloorDiv, Mod)) else {atom}
