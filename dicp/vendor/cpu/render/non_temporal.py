"""Loops a cache line at a time: results written past the caches, and the next row fetched ahead.

A row's sweeps read it from memory, compute, and write. What the next row needs is fetched while
this one is computed, and whole lines are written without being read before: memory never waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dicp.codegen.emitter import LINE_BYTES, Emitter, accumulator_type, local, margin, nan_bits
from dicp.codegen.types import STORAGE_TYPE, VALUE_TYPE, start_value
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Load, Ref
from dicp.loop.ir.index import FloorDiv, Indirect, Mod, Var, product
from dicp.loop.ir.kernel import Accumulate, Kernel, Phase, Running, Save, Store
from dicp.loop.ir.ops import REDUCTIONS
from dicp.loop.passes.split_loops import Range

MIN_SWEEP = 128
"""Elements of a loop below which an accumulator for each place in a line costs too much."""
BEYOND_NEAR = 1 << 20
"""Bytes of a tensor from which on a core's own caches do not keep it."""
AHEAD_BYTES = 1 << 14
"""Bytes of a row that the nearest cache keeps beside what the row before it works on."""


class Lines(Emitter):
    """What goes by whole cache lines."""

    def __init__(self, kernel: Kernel, far_bytes: float = math.inf) -> None:
        super().__init__(kernel)
        self.far_bytes = far_bytes
        """The size of a result from which on none of it is in a cache when it is read."""
        self.writes_far = False
        self.ahead: dict[Phase, list[Load]] = {}
        """What a sweep fetches of the next row while it computes."""

    def _far_stores(self, part: Range, var: Var) -> list[Store]:
        """The stores of a loop that fill whole cache lines past the caches.

        Sweeps over rows of 16-bit floats are bound by conversions: they need not wait for memory.
        """
        least = {"pointwise": 1, "row": 4}.get(self.kernel.kind, LINE_BYTES)
        stores = [s for s in part.stmts if isinstance(s, Store) and self._is_far(s, var)]
        return [s for s in stores if s.ref.dtype.itemsize >= least]

    def _line(self, refs: Sequence[Ref]) -> int:
        """Elements that fill whole lines of each of these tensors."""
        return LINE_BYTES // min((ref.dtype.itemsize for ref in refs), default=LINE_BYTES)

    def _is_far(self, stmt: Store, var: Var) -> bool:
        index = stmt.index
        size = product([*(v.size for v in index.variables()), stmt.ref.dtype.itemsize])
        if stmt.op or not isinstance(size, int) or size < self.far_bytes:
            return False
        reads = {item.ref.root for item in self.kernel.reads()}
        if stmt.ref.root in reads or index.coefficient(var) != 1:
            return False
        others = [(a, c) for a, c in index.terms if a != var]
        steps = [index.const, *(c for _, c in others)]
        hidden = any(var in deep_variables(a) for a, _ in others)
        whole = self._line([stmt.ref])
        return not hidden and all(isinstance(c, int) and c % whole == 0 for c in steps)

    def _by_lines(self, part: Range, var: Var, indent: int, ahead: Sequence[Load]) -> list[str]:
        """The loop over `var` a cache line at a time, where it writes past the caches or fetches
        the next row. Empty where lines are not whole.
        """
        far = self._far_stores(part, var)
        count = self._line([*(s.ref for s in far), *(item.ref for item in ahead)])
        sums = [s for s in part.stmts if isinstance(s, Accumulate)]
        least = MIN_SWEEP if sums else count
        if not far and not ahead or not self._in_whole_lines(part, count, least):
            return []
        next_row = [(item, self.kernel.rows[-1], 1) for item in ahead]
        return [
            *self._clear_lanes(sums, count, indent),
            *self._lines_of(part, var, indent, count, far, next_row),
            *self._fold_lanes(sums, count, indent),
        ]

    def _lines_of(
        self, part: Range, var: Var, indent: int, count: int, far: Sequence[Store],
        ahead: Sequence[tuple[Load, Var, int]],
    ) -> list[str]:  # fmt: skip
        """The loop itself: results are made in registers and written at once, and what `ahead`
        reads that many steps of a loop later is fetched."""
        self.writes_far |= bool(far)
        pad, inner = margin(indent + 1), margin(indent + 2)
        saves = [s for s in part.stmts if isinstance(s, Save)]
        for k, s in enumerate(far):
            self.lined[s.ref, s.index] = f"far{k}[lane]"
        self.laned = {s.name for s in part.stmts if isinstance(s, Accumulate | Save)}
        body = self._push((var,), indent + 2)
        self._stmts(part.stmts, body)
        self._pop(body)
        self.lined.clear()
        self.laned = set()
        low, high = self._size(part.low), self._size(part.high)
        return [
            f"{margin(indent)}for (int64_t line = {low}; line < {high}; line += {count}) {{",
            f"{pad}const int64_t {var.key} = line;",
            *(f"{pad}__builtin_prefetch({self._later(*place)});" for place in ahead),
            *(f"{pad}{STORAGE_TYPE[s.ref.dtype]} far{k}[{count}];" for k, s in enumerate(far)),
            *(f"{pad}{VALUE_TYPE[s.dtype]} lanes_{s.name}[{count}];" for s in saves),
            f"{pad}#pragma omp simd",
            f"{pad}{_each_lane(count)} {{",
            f"{inner}const int64_t {var.key} = line + lane;", *body.lines, f"{pad}}}",
            *(f"{pad}d_stream({self._arg(s.ref)} + ({self._index(s.index)}), far{k});"
              for k, s in enumerate(far)),
            *(f"{pad}__builtin_memcpy(saved_{s.name} + ({self._inner_position()}), lanes_{s.name}, "
              f"sizeof(lanes_{s.name}));" for s in saves),
            f"{margin(indent)}}}",
        ]  # fmt: skip

    def _in_whole_lines(self, part: Range, count: int, least: int) -> bool:
        low, high = part.low, part.high
        if not isinstance(low, int) or not isinstance(high, int) or high - low < least:
            return False
        return low % count == high % count == 0

    def _clear_lanes(self, sums: Sequence[Accumulate], count: int, indent: int) -> list[str]:
        """Accumulators for each place in a line."""
        lines = []
        for s in sums:
            start, nan = start_value(s.op, s.dtype), s.name in self.flagged
            text = f"{accumulator_type(s)} lanes_{s.name}[{count}]; "
            text += f"{nan_bits(s)} nan_lanes_{s.name}[{count}]; " if nan else ""
            clear = f"lanes_{s.name}[lane] = {start};"
            clear += f" nan_lanes_{s.name}[lane] = 0;" if nan else ""
            lines.append(f"{margin(indent)}{text}{_each_lane(count)} {{ {clear} }}")
        return lines

    def _fold_lanes(self, sums: Sequence[Accumulate], count: int, indent: int) -> list[str]:
        """One number from the accumulators of each place."""
        if not sums:
            return []
        pad, lines = margin(indent), []
        for s in sums:
            name, one = local(s.name), f"lanes_{s.name}[lane]"
            text = f"{name} = {REDUCTIONS[s.op].combine.format(name, one)};"
            if s.name in self.flagged:
                sign, nan, bits = ">" if s.op == "max" else "<", f"nan_{s.name}", f"nan_{one}"
                text = (
                    f"{name} = {one} {sign} {name} ? {one} : {name}; "
                    f"{nan} = {bits} > {nan} ? {bits} : {nan};"
                )
            lines.append(f"{pad}  {text}")
        return [f"{pad}{self._simd(sums)}", f"{pad}{_each_lane(count)} {{", *lines, f"{pad}}}"]

    def _later(self, item: Load, loop: Var, steps: int) -> str:
        """The address of what `item` reads so many steps of a loop later."""
        index = item.coords[0]
        moved = index + index.coefficient(loop) * steps
        return f"{self._arg(item.ref)} + ({self._index(moved)})"

    def _simd(self, accumulators: Sequence[Accumulate | Running]) -> str:
        clauses = {"sum": "+", "prod": "*", "any": "|", "all": "&", "max": "max", "min": "min"}
        parts = [f"reduction({clauses[s.op]}: {local(s.name)})" for s in accumulators]
        parts += [f"reduction(max: nan_{s.name})" for s in accumulators if s.name in self.flagged]
        return " ".join(["#pragma omp simd", *parts])

    # ---- the next row ---------------------------------------------------------------------------

    def _fetched_ahead(self, sweeps: Sequence[Phase]) -> dict[Phase, list[Load]]:
        """Which of these sweeps fetches what of the next row."""
        found: dict[Phase, list[Load]] = {}
        for k, item in enumerate(self._streams() if sweeps else []):
            found.setdefault(sweeps[k % len(sweeps)], []).append(item)
        return found

    def _streams(self) -> list[Load]:
        """What each row reads of its own from beyond the near caches; nothing where a row is too
        long to be kept in the nearest one until its turn comes."""
        rows, inner = self.kernel.rows, self.kernel.inner
        if not rows or not inner:
            return []
        streams = [item for item in distinct(self.kernel.reads()) if self._is_stream(item)]
        sizes = [v.size for v in inner]
        moved = product([*sizes, sum(item.ref.dtype.itemsize for item in streams)])
        return streams if isinstance(moved, int) and moved <= AHEAD_BYTES else []

    def _is_stream(self, item: Load) -> bool:
        index, loops = item.coords[0], (*self.kernel.rows, *self.kernel.inner)
        if item.ref.root in self.stored or not all(isinstance(a, Var) for a, _ in index.terms):
            return False
        size = product([*(v.size for v in index.variables()), item.ref.dtype.itemsize])
        steps = [index.coefficient(v) for v in loops]
        whole = all(isinstance(c, int) and c for c in steps) and steps[-1] == 1
        return whole and isinstance(size, int) and size >= BEYOND_NEAR


def distinct(reads: Sequence[Load]) -> list[Load]:
    """One of the loads of each element: a rebuilt expression repeats them."""
    return list({(item.ref, item.coords[0]): item for item in reads}.values())


def _each_lane(count: int) -> str:
    return f"for (int64_t lane = 0; lane < {count}; ++lane)"


def deep_variables(atom: Var | FloorDiv | Mod | Indirect) -> set[Var]:
    if isinstance(atom, Indirect):
        return {v for e in ir.walk(atom.expr) for i in ir.indices_of(e) for v in i.variables()}
    return atom.value.variables() if isinstance(atom, (FloorDiv, Mod)) else {atom}
