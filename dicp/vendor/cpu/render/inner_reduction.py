"""C++ of inner reductions: each reduction phase is one pass over the row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dicp.codegen.emitter import (
    LINE_BYTES,
    Scope,
    is_distance_below,
    is_place,
    local,
    margin,
    nan_bits,
)
from dicp.codegen.types import VALUE_TYPE, literal
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Ref
from dicp.loop.ir.index import Var, product
from dicp.loop.ir.kernel import Phase, Reduce, Scan, ScratchStore, Store
from dicp.loop.passes.split_loops import Range
from dicp.vendor.cpu.render.loops import CHUNKS, Team, block_end, tracks_nan
from dicp.vendor.cpu.render.non_temporal import distinct
from dicp.vendor.cpu.render.planes import Planes
from dicp.vendor.cpu.thresholds import PARALLEL_COST, PLACE_BLOCK, SUM_BLOCK, WEIGHT_BLOCK


class InnerReduction(Planes):
    """Threads divide the rows; with few long rows, they divide each row's reduction loop."""

    def lines(self) -> list[str]:
        kernel = self.kernel
        if self._splittable():
            return self._split_row()
        if self._in_planes():
            return self._plane_lines()
        scan = any(isinstance(s, Scan) for s in self._all_stmts())
        if scan and self._only_sums():
            return self._summed_so_far()
        if scan and self._in_fours():
            return self._scanned_together()
        if not scan:
            self.prefetch = self._prefetched(self._between())
        depth = 1 + len(kernel.parallel)
        scope = self._push(kernel.parallel, depth)
        waiting = list(kernel.phases)
        while waiting:
            phase = waiting.pop(0)
            if phase.level == "parallel":
                self._stmts(phase.stmts, scope)
            elif waiting and not self.prefetch and self._is_online_softmax(phase, waiting[0]):
                self._online_softmax(phase, waiting.pop(0), scope)
            else:
                self._inner_loops(phase, scope, kernel.reduction, serial=scan)
        if not kernel.parallel:
            return scope.lines
        if self._sums():
            return self._in_parts(scope.lines)
        team = self._team((*kernel.parallel, *kernel.reduction), len(kernel.parallel))
        return self._outer_loops(kernel.parallel, scope.lines, team)

    def _between(self) -> list[Phase]:
        """The passes during which memory would be idle: those after the first, which loads the row,
        and before the last, which stores one; of two passes, the last. Passes with long sums, which
        go in blocks, are left out."""
        passes = [p for p in self.kernel.phases if p.level == "reduction"]
        found = passes[1:-1] or passes[1:]
        sums = {p: [s for s in p.stmts if isinstance(s, Reduce)] for p in found}
        return [p for p in found if not any(map(self._summed_in_blocks, sums[p]))]

    # ---- cross-row reductions fused into the row's -----------------------------------------------

    def _sums(self) -> dict[Ref, Store]:
        return {s.ref: s for s in self._all_stmts() if isinstance(s, Store) and s.op}

    def _store(self, stmt: Store, value: str) -> str:
        if not stmt.op:
            return super()._store(stmt, value)
        place = f"part_{self._arg(stmt.ref)}[{self._inner_position()}]"
        return f"{place} = {place} + {value};"

    def _in_parts(self, body: list[str]) -> list[str]:
        """The parallel loop in parts, each with cross-row accumulators that a tree then adds."""
        loops, inner = self.kernel.parallel, self.kernel.reduction
        width = self._size(product(v.size for v in inner))
        each = f"for (int64_t c = 0; c < {width}; ++c)"
        rows = self._size(product(v.size for v in loops))
        lines, own, total = [f"  const int64_t parts = d_parts({rows});"], [], []
        tail = self._push(inner, 1 + len(inner))
        for ref, stmt in self._sums().items():
            name, ctype = self._arg(ref), VALUE_TYPE[ref.dtype]
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
        self._pop(tail)
        size = self._size(loops[0].size)
        each_part = [
            "  for (int64_t part = 0; part < parts; ++part) {",
            f"    const int64_t low = part * {size} / parts, high = (part + 1) * {size} / parts;",
            *own, *self._nest(loops, body, 2, ("low", "high")), "  }",
        ]  # fmt: skip
        lines += self._divided(self._team((*loops, *inner)), each_part)
        return [*lines, *total, *self._nest(inner, tail.lines, 1)]

    def _is_online_softmax(self, phase: Phase, sums: Phase) -> bool:
        """Whether `sums` adds exp(x - max(x)), with the maximum that `phase` reduces.

        A sum so far is rescaled by exp(old max - new max), which holds for this exponent alone.
        """
        inner = self.kernel.reduction
        if len(inner) != 1 or len(phase.stmts) != 1 or len(sums.stmts) != 1:
            return False
        size, (top,), (total,) = inner[0].size, phase.stmts, sums.stmts
        return (
            isinstance(top, Reduce)
            and isinstance(total, Reduce)
            and (top.op, total.op) == ("max", "sum")
            and VALUE_TYPE[top.dtype] == VALUE_TYPE[total.dtype] == "float"
            and total.value.op == "exp"
            and is_distance_below(total.value.args[0], top)
            and (not isinstance(size, int) or size >= 2 * WEIGHT_BLOCK)
        )

    def _online_softmax(self, phase: Phase, sums: Phase, scope: Scope) -> None:
        """Online softmax in blocks: each is read from memory once, for the maximum so far and for
        the sum of exponentials, so memory is not idle for the length of a row. A higher maximum
        rescales the earlier sum.

        Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
        """
        (top,), (total,), pad = phase.stmts, sums.stmts, margin(scope.indent)
        assert isinstance(top, Reduce) and isinstance(total, Reduce)
        var, best, sum_ = self.kernel.reduction[0], local(top.name), local(total.name)
        most, before = f"most_{top.name}", f"before_{top.name}"
        size, limits = self._size(var.size), ("block", "block_end")
        block = self._push((), scope.indent + 1)
        self._inner_loops(phase, block, self.kernel.reduction, first_range=limits)
        body = self._push((var,), block.indent + 1)
        self._stmts(sums.stmts, body)
        self._pop(body)
        self._pop(block)
        loop = [
            margin(block.indent) + self._simd([total]) + self._lanes(var),
            *self._loop(var, body, block.indent, limits),
        ]
        scope.lines += [
            f"{pad}float {most} = -d_inff; double total_{total.name} = 0;",
            f"{pad}for (int64_t block = 0; block < {size}; block += {WEIGHT_BLOCK}) {{",
            f"{pad}  const int64_t block_end = {block_end('block', WEIGHT_BLOCK, size)};",
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
        self.local_names[top.name] = self.local_names[total.name] = len(self.scopes) - 1

    def _inner_loops(
        self, phase: Phase, scope: Scope, loops: Sequence[Var], serial: bool = False,
        first_range: tuple[str, str] | None = None,
    ) -> None:  # fmt: skip
        """The reduction loops of one phase, after the declarations of its accumulators."""
        places: dict[Reduce, Reduce] = {}
        read = set(phase.stmts)
        if loops and not serial:
            phase, places = _with_extrema(phase)
        accumulators = [s for s in phase.stmts if isinstance(s, (Reduce, Scan))]
        in_block = set(places.values())
        flagged = [s for s in accumulators if tracks_nan(s)]
        self.flagged = {s.name for s in flagged}
        pad = margin(scope.indent)
        for stmt in (s for s in accumulators if s in read):
            flag = f" {nan_bits(stmt)} nan_{stmt.name} = 0;" if stmt.name in self.flagged else ""
            scope.lines.append(pad + self._declare(stmt) + ("" if stmt in in_block else flag))
            self.local_names[stmt.name] = len(self.scopes) - 1
        for place in places:
            scope.lines += self._kept_blocks(place, pad)
        long = [s for s in accumulators if not serial and self._summed_in_blocks(s)]
        for stmt in long:
            scope.lines.append(f"{pad}double total_{stmt.name} = 0;")
        self._inner_body(phase, scope, loops, serial, first_range, long, places)
        for stmt in long:
            total = f"({VALUE_TYPE[stmt.dtype]})total_{stmt.name}"
            scope.lines.append(f"{pad}{local(stmt.name)} = {total};")
        for stmt in (s for s in flagged if s not in in_block):
            scope.lines.append(pad + self._nan_kept(stmt))
        self.flagged = set()
        for place, best in places.items():
            scope.lines += self._place_found(place, best, loops[-1], pad)

    def _nan_kept(self, stmt: Reduce | Scan) -> str:
        nan, name = literal(math.nan, stmt.dtype), local(stmt.name)
        return f"{name} = d_size_of_nan(nan_{stmt.name}) ? {nan} : {name};"

    def _inner_body(
        self, phase: Phase, scope: Scope, loops: Sequence[Var], serial: bool,
        first_range: tuple[str, str] | None, long: Sequence[Reduce | Scan],
        places: Mapping[Reduce, Reduce],
    ) -> None:  # fmt: skip
        accumulators = [s for s in phase.stmts if isinstance(s, (Reduce, Scan))]
        for stmt in phase.stmts:
            if isinstance(stmt, ScratchStore):
                size = product(v.size for v in self.kernel.reduction)
                assert isinstance(size, int), "rows are kept whose length is known"
                array = self._array(stmt.dtype, f"saved_{stmt.name}", size)
                scope.lines.append(margin(scope.indent) + array)
        if not loops:
            self._stmts(phase.stmts, scope)
            return
        if self._sums_in_groups(phase, loops, long):
            scope.lines += self._in_groups(phase, loops, scope.indent, first_range)
            return
        outer, last = loops[:-1], loops[-1]
        middle = self._push(outer, scope.indent + len(outer)) if outer else scope
        simd = self._simd([s for s in accumulators if s not in places])
        pragma = [] if serial else [margin(middle.indent) + simd + self._lanes(last)]
        limits = None if outer else first_range
        if long or limits or places:
            body = self._push((last,), middle.indent + 1)
            self.kept_at = {place.name: f"{last.key} - block" for place in places}
            self._stmts(phase.stmts, body)
            self.kept_at = {}
            if long or places:
                inner = self._in_blocks(last, body, middle.indent, limits, pragma, long, places)
            else:
                inner = [*pragma, *self._loop(last, body, middle.indent, limits)]
            self._pop(body)
        else:
            prefetch = self.prefetch.get(phase, ())
            inner = self._in_ranges(phase.stmts, last, middle.indent, pragma, prefetch=prefetch)
        if not outer:
            scope.lines += inner
            return
        self._pop(middle)
        nest = self._nest(outer, [*middle.lines, *inner], scope.indent, first_range)
        scope.lines += nest

    def _in_blocks(
        self, var: Var, body: Scope, indent: int, limits: tuple[str, str] | None,
        pragma: list[str], long: Sequence[Reduce | Scan],
        places: Mapping[Reduce, Reduce],
    ) -> list[str]:  # fmt: skip
        """The loop over `var` in blocks, each with its own accumulators of sums and extrema."""
        low, high = limits or ("0", self._size(var.size))
        pad, step = margin(indent + 1), PLACE_BLOCK if places else SUM_BLOCK
        starts = [f"{pad}{VALUE_TYPE[s.dtype]} {local(s.name)} = 0;" for s in long]
        ends = [f"{pad}total_{s.name} += {local(s.name)};" for s in long]
        for best in dict.fromkeys(places.values()):
            flag = f" {nan_bits(best)} nan_{best.name} = 0;" if best.name in self.flagged else ""
            starts.append(pad + self._declare(best) + flag)
            ends += [pad + self._nan_kept(best)] if flag else []
        for place, best in places.items():
            pair, name = f"{local(place.name)}, at_{place.name}", place.name
            ends += [
                f"{pad}if (d_better_{best.op}({local(best.name)}, {local(name)})) {{",
                f"{pad}  const int64_t {var.key} = block;",
                f"{pad}  d_take_{best.op}({local(best.name)}, {self._position(place)}, {pair});",
                f"{pad}  count_{name} = block_end - block; d_swap(block_{name}, kept_{name});",
                f"{pad}}}",
            ]
        return [
            f"{margin(indent)}for (int64_t block = {low}; block < {high}; block += {step}) {{",
            f"{pad}const int64_t block_end = {block_end('block', step, high)};",
            *starts,
            *("  " + line for line in pragma),
            *("  " + line for line in self._loop(var, body, indent, ("block", "block_end"))),
            *ends,
            f"{margin(indent)}}}",
        ]  # fmt: skip

    def _kept_blocks(self, place: Reduce, pad: str) -> list[str]:
        """Buffers for the values of the current block and of the block with the extremum so far.
        The position is found among buffered values: a recomputed one may differ in its last bits.
        """
        name, ctype = place.name, VALUE_TYPE[place.dtype]
        return [
            pad
            + self._array(place.dtype, f"blocks_{name}", 2 * PLACE_BLOCK)
            + f" int64_t count_{name} = 0;",
            f"{pad}{ctype} *block_{name} = blocks_{name}, "
            f"*kept_{name} = blocks_{name} + {PLACE_BLOCK};",
        ]

    def _place_found(self, place: Reduce, best: Reduce, var: Var, pad: str) -> list[str]:
        assert place.position is not None
        name, step = place.name, self._size(place.position.coefficient(var))
        found = f"d_first(kept_{name}, count_{name}, {local(name)})"
        lines = [f"{pad}at_{name} += {step} * {found};"]
        if best.name in self.local_names:
            lines.append(f"{pad}{local(best.name)} = {local(name)};")
        return lines

    def _sums_in_groups(
        self, phase: Phase, loops: Sequence[Var], long: Sequence[Reduce | Scan]
    ) -> bool:
        """Whether long sums have a short innermost loop, such as the planes of many images."""
        size = loops[-1].size
        return (
            len(loops) == 2
            and len(phase.stmts) == len(long)
            and isinstance(size, int)
            and 2 * size <= SUM_BLOCK
            and size % LINE_BYTES == 0
        )

    def _in_groups(
        self, phase: Phase, loops: Sequence[Var], indent: int, limits: tuple[str, str] | None
    ) -> list[str]:
        """Long sums in groups of innermost loops that share lane accumulators: folding the lanes
        costs as much as one short innermost loop."""
        outer, last = loops
        assert isinstance(last.size, int)
        sums = [s for s in phase.stmts if isinstance(s, Reduce)]
        low, high = limits or ("0", self._size(outer.size))
        pieces, pad = SUM_BLOCK // last.size, margin(indent + 1)
        streams = [
            item for item in distinct(ir.reads(s.value for s in sums)) if self._is_stream(item)
        ]
        count = self._line([item.ref for item in streams]) if streams else LINE_BYTES // 4
        prefetch = [(item, outer, pieces) for item in streams]
        middle = self._push((outer,), indent + 2)
        part = Range(0, last.size, tuple(phase.stmts))
        passes = self._lines_of(part, last, indent + 2, count, (), prefetch)
        self._pop(middle)
        end = block_end("group", pieces, high)
        return [
            f"{margin(indent)}for (int64_t group = {low}; group < {high}; group += {pieces}) {{",
            f"{pad}const int64_t group_end = {end};",
            *(f"{pad}{VALUE_TYPE[s.dtype]} {local(s.name)} = 0;" for s in sums),
            *self._clear_lane_accumulators(sums, count, indent + 1),
            *self._nest([outer], [*middle.lines, *passes], indent + 1, ("group", "group_end")),
            *self._fold_lane_accumulators(sums, count, indent + 1),
            *(f"{pad}total_{s.name} += {local(s.name)};" for s in sums),
            f"{margin(indent)}}}",
        ]  # fmt: skip

    def _splittable(self) -> bool:
        """Whether threads divide the reduction loop: there are few rows and one pass over each."""
        kernel = self.kernel
        if self._sums() or any(isinstance(s, (Scan, ScratchStore)) for s in self._all_stmts()):
            return False
        if [p.level for p in kernel.phases if p.level == "reduction"] != ["reduction"]:
            return False
        if kernel.phases[0].level != "reduction":
            return False
        return self._few_rows() and bool(kernel.reduction)

    def _few_rows(self) -> bool:
        rows, inner = self.kernel.parallel, self.kernel.reduction
        count = product(v.size for v in rows)
        work = product(v.size for v in inner)
        return (
            isinstance(count, int)
            and count < 4
            and (not isinstance(work, int) or work >= PARALLEL_COST)
        )

    def _split_row(self) -> list[str]:
        kernel = self.kernel
        depth = 1 + len(kernel.parallel)
        scope = self._push(kernel.parallel, depth)
        inner_phase, *tail = kernel.phases
        accumulators = [s for s in inner_phase.stmts if isinstance(s, Reduce)]
        pad = margin(depth)
        for stmt in accumulators:
            ctype = VALUE_TYPE[stmt.dtype]
            scope.lines.append(f"{pad}{ctype} part_{stmt.name}[d_max_chunks];")
            if is_place(stmt):
                scope.lines.append(f"{pad}int64_t part_at_{stmt.name}[d_max_chunks];")
        first = kernel.reduction[0]
        total = self._size(first.size)
        chunk = self._push((), depth + 1)
        low, high = f"chunk * {total} / {CHUNKS}", f"(chunk + 1) * {total} / {CHUNKS}"
        chunk.lines.append(f"{pad}  const int64_t low = {low}, high = {high};")
        self._inner_loops(inner_phase, chunk, kernel.reduction, first_range=("low", "high"))
        for stmt in accumulators:
            chunk.lines.append(f"{pad}  part_{stmt.name}[chunk] = {local(stmt.name)};")
            if is_place(stmt):
                chunk.lines.append(f"{pad}  part_at_{stmt.name}[chunk] = at_{stmt.name};")
        self._pop(chunk)
        head = f"{pad}for (int64_t chunk = 0; chunk < {CHUNKS}; ++chunk) {{"
        scope.lines += self._divided(Team(), [head, *chunk.lines, f"{pad}}}"])
        for stmt in accumulators:
            part = (f"part_{stmt.name}[chunk]", f"part_at_{stmt.name}[chunk]")
            scope.lines.append(pad + self._declare(stmt))
            scope.lines.append(f"{pad}for (int64_t chunk = 0; chunk < {CHUNKS}; ++chunk) {{")
            scope.lines.append(f"{pad}  {self._combine(stmt, *part)}")
            scope.lines.append(f"{pad}}}")
            self.local_names[stmt.name] = len(self.scopes) - 1
        for phase in tail:
            self._stmts(phase.stmts, scope)
        return self._outer_loops(kernel.parallel, scope.lines, None)


def _with_extrema(phase: Phase) -> tuple[Phase, dict[Reduce, Reduce]]:
    """The phase with a max or min beside each argmax or argmin, and the map from one to the other.

    A max or min that the phase already computes is reused.
    """
    found = {(s.op, s.dtype, s.value): s for s in phase.stmts if isinstance(s, Reduce)}
    places: dict[Reduce, Reduce] = {}
    for stmt in phase.stmts:
        if isinstance(stmt, Reduce) and is_place(stmt):
            own = replace(stmt, name=f"best_{stmt.name}", op=stmt.op[3:], position=None)
            places[stmt] = found.setdefault((own.op, own.dtype, own.value), own)
    stmts = dict.fromkeys((*places.values(), *phase.stmts))
    return replace(phase, stmts=tuple(stmts)) if places else phase, places
