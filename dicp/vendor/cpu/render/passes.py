"""C++ of one pass over a reduction: accumulators, blocks, groups and strips of its loops."""

from __future__ import annotations

import math
from typing import TypeVar

from dicp.codegen.emitter import nan_bits
from dicp.codegen.types import VALUE_TYPE, literal
from dicp.codegen.values import Scope, local, margin
from dicp.loop.ir.index import Size, Var, product
from dicp.loop.ir.kernel import Reduce, Scan, ScratchStore
from dicp.vendor.cpu.form import HostForm, Pass, ShiftedSums, Strip
from dicp.vendor.cpu.render.conversions import Bounds
from dicp.vendor.cpu.render.loops import Loops, block_end, half_vectors
from dicp.vendor.cpu.render.strips import each_lane

F = TypeVar("F", bound=HostForm)


class Passes(Loops[F]):
    """Shared by the writers of inner reductions."""

    def _pass(
        self, over: Pass, scope: Scope, first_bounds: Bounds | None = None,
        last_bounds: Bounds | None = None,
    ) -> None:  # fmt: skip
        """The loops of one pass, after the declarations of its accumulators."""
        extrema = dict.fromkeys(over.extrema.values())
        accumulators = [s for s in over.phase.stmts if isinstance(s, (Reduce, Scan))]
        flagged = [s for s in accumulators if tracks_nan(s)]
        self.flagged = {s.name for s in flagged}
        pad = margin(scope.indent)
        for stmt in (s for s in accumulators if s not in over.added):
            flag = f" {nan_bits(stmt)} nan_{stmt.name} = 0;" if stmt.name in self.flagged else ""
            scope.lines.append(pad + self._declare(stmt) + ("" if stmt in extrema else flag))
            self.named_here(stmt.name)
        for place in over.extrema:
            scope.lines += self._kept_blocks(place, over.block, pad)
        for stmt in over.blocks:
            scope.lines.append(f"{pad}double total_{stmt.name} = 0;")
        for kept in (s for s in over.phase.stmts if isinstance(s, ScratchStore)):
            size = product(v.size for v in self.kernel.reduction)
            assert isinstance(size, int), "rows are kept whose length is known"
            scope.lines.append(pad + self._array(kept.dtype, f"saved_{kept.name}", size))
        if over.strip is not None:
            scope.lines += self._strip_mined_pass(over, over.strip, scope.indent, first_bounds)
        else:
            self._pass_body(over, scope, first_bounds, last_bounds)
        for stmt in over.blocks:
            total = f"({VALUE_TYPE[stmt.dtype]})total_{stmt.name}"
            scope.lines.append(f"{pad}{local(stmt.name)} = {total};")
        for stmt in (s for s in flagged if s not in extrema):
            scope.lines.append(pad + self._nan_kept(stmt))
        self.flagged = set()
        for place, best in over.extrema.items():
            scope.lines += self._place_found(place, best, over.loops[-1], pad)

    def _shifted_sums(self, found: ShiftedSums, scope: Scope, count: Size) -> None:
        """The row's sum and those over deviations from a shift, an estimate of its mean. The shift
        moves to the mean if more than half of the squares is due to its distance from that.

        Chan, Golub and LeVeque, Algorithms for Computing the Sample Variance (1983).
        """
        pad, size, name = margin(scope.indent), self.size(count), found.sums.squares.name
        shift, residual, squares = local(found.shift), found.residual, f"squares_{name}"
        *outer, last = found.estimate.loops
        few = self._at_most(found.sample, last.size)
        ones = ("0", self._at_most(1, outer[0].size)) if outer else ("0", few)
        self._pass(found.estimate, scope, ones, ("0", few))
        ctype = VALUE_TYPE[found.sums.total.dtype]
        scope.lines += [
            f"{pad}{ctype} {shift} = d_estimated_mean({local(f'sample_sum_{name}')}, "
            f"{local(f'sample_squares_{name}')}, {few});",
            f"{pad}double {residual}, {squares};",
            f"{pad}for (bool again = false;; again = true) {{",
        ]
        self.named_here(found.shift)
        block = self.push((), scope.indent + 1)
        self._pass(found.over, block)
        self.pop(block)
        scope.lines += [
            *block.lines,
            f"{pad}  {residual} = {local(found.residual)}, {squares} = {local(name)};",
            f"{pad}  if (again || d_is_centred({residual}, {squares}, {size})) break;",
            f"{pad}  {shift} += {residual} / {size};",
            f"{pad}}}",
            f"{pad}double sum_{name} = {residual} + {size} * (double){shift};",
        ]

    def _at_most(self, count: int, size: Size) -> str:
        if isinstance(size, int):
            return str(min(count, size))
        return f"({self.size(size)} < {count} ? {self.size(size)} : {count})"

    def _nan_kept(self, stmt: Reduce | Scan) -> str:
        nan, name = literal(math.nan, stmt.dtype), local(stmt.name)
        return f"{name} = d_size_of_nan(nan_{stmt.name}) ? {nan} : {name};"

    def _pass_body(
        self, over: Pass, scope: Scope, first_bounds: Bounds | None, last_bounds: Bounds | None
    ) -> None:
        stmts = over.phase.stmts
        if not over.loops:
            self.statements(stmts)
            return
        outer, last = over.loops[:-1], over.loops[-1]
        middle = self.push(outer, scope.indent + len(outer)) if outer else scope
        simd = self._simd(
            [s for s in stmts if isinstance(s, (Reduce, Scan)) and s not in over.extrema]
        )
        half = half_vectors(over.half_vectors)
        pragma = [] if over.serial else [margin(middle.indent) + simd + half]
        bounds = last_bounds if outer else first_bounds
        if over.strips:
            inner = self._strips(over.strips, last, middle.indent, pragma)
        else:
            in_blocks = bool(over.blocks or over.extrema)
            block_bounds = ("block", "block_end") if in_blocks else bounds
            self.kept_at = {place.name: f"{last.key} - block" for place in over.extrema}
            inner = self._inner_loop(stmts, last, middle.indent, pragma, block_bounds)
            self.kept_at = {}
            if in_blocks:
                inner = self._in_blocks(over, inner, middle.indent, bounds)
        inner = [*self._scalar_rows(middle.indent), *inner]
        if not outer:
            scope.lines += inner
            return
        self.pop(middle)
        nest = self._nest(outer, [*middle.lines, *inner], scope.indent, first_bounds)
        scope.lines += nest

    def _in_blocks(
        self, over: Pass, loop: list[str], indent: int, bounds: Bounds | None
    ) -> list[str]:
        """The last loop in blocks, each with its own accumulators of sums and extrema."""
        var, long, places = over.loops[-1], over.blocks, over.extrema
        low, high = bounds or ("0", self.size(var.size))
        pad, step = margin(indent + 1), over.block
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
            *("  " + line for line in loop),
            *ends,
            f"{margin(indent)}}}",
        ]

    def _kept_blocks(self, place: Reduce, count: int, pad: str) -> list[str]:
        """Buffers for the values of the current block and of the block with the extremum so far.
        The position is found among buffered values: a recomputed one may differ in its last bits.
        """
        name, ctype = place.name, VALUE_TYPE[place.dtype]
        return [
            pad
            + self._array(place.dtype, f"blocks_{name}", 2 * count)
            + f" int64_t count_{name} = 0;",
            f"{pad}{ctype} *block_{name} = blocks_{name}, *kept_{name} = blocks_{name} + {count};",
        ]

    def _place_found(self, place: Reduce, best: Reduce, var: Var, pad: str) -> list[str]:
        assert place.position is not None
        name, step = place.name, self.size(place.position.coefficient(var))
        found = f"d_first_index_of(kept_{name}, count_{name}, {local(name)})"
        lines = [f"{pad}at_{name} += {step} * {found};"]
        if local(best.name) in self.places:
            lines.append(f"{pad}{local(best.name)} = {local(name)};")
        return lines

    def _strip_mined_pass(
        self, over: Pass, strip: Strip, indent: int, bounds: Bounds | None
    ) -> list[str]:
        """The loops, the last one strip-mined. Long sums have lane accumulators for each block,
        which are then added to lanes of double: folding lanes costs as much as several lines. Those
        of a single block are folded at once."""
        count, sums = strip.lanes, over.blocks
        others = [s for s in over.phase.stmts if isinstance(s, Reduce) and s not in sums]
        each, pad = each_lane(count), margin(indent)
        if over.one_block and not bounds:
            return [
                *self._clear_lane_accumulators([*others, *sums], count, indent),
                *self._strip_mined_blocks(over, strip, indent, bounds),
                *(f"{pad}total_{s.name} += d_sum(lanes_{s.name});" for s in sums),
                *self._fold_lane_accumulators(others, count, indent),
            ]
        in_blocks = self._strip_mined_groups if over.grouped else self._strip_mined_blocks
        return [
            *self._clear_lane_accumulators(others, count, indent),
            *(f"{pad}double totals_{s.name}[{count}]; {each} totals_{s.name}[lane] = 0;"
              for s in sums),
            *in_blocks(over, strip, indent, bounds),
            *(f"{pad}total_{s.name} += d_sum(totals_{s.name});" for s in sums),
            *self._fold_lane_accumulators(others, count, indent),
        ]  # fmt: skip

    def _strip_mined_groups(
        self, over: Pass, strip: Strip, indent: int, bounds: Bounds | None
    ) -> list[str]:
        """Blocks of whole iterations of the first loop."""
        outer, last = over.loops
        low, high = bounds or ("0", self.size(outer.size))
        rows, pad = over.block, margin(indent + 1)
        middle = self.push((outer,), indent + 2)
        middle.lines += self._strip_mined_loop(strip, last, indent + 2)
        self.pop(middle)
        return [
            f"{margin(indent)}for (int64_t group = {low}; group < {high}; group += {rows}) {{",
            f"{pad}const int64_t group_end = {block_end('group', rows, high)};",
            *self._clear_lane_accumulators(over.blocks, strip.lanes, indent + 1),
            *self._nest([outer], middle.lines, indent + 1, ("group", "group_end")),
            *self._add_lanes(over, strip, indent + 1),
            f"{margin(indent)}}}",
        ]

    def _strip_mined_blocks(
        self, over: Pass, strip: Strip, indent: int, bounds: Bounds | None
    ) -> list[str]:
        """Blocks of the last loop, and its elements beyond whole lines."""
        outer, last, count = over.loops[:-1], over.loops[-1], strip.lanes
        middle = self.push(outer, indent + len(outer))
        pad, inner = margin(middle.indent), margin(middle.indent + 1)
        low, high = (None if outer else bounds) or ("0", self.size(last.size))
        whole = f"whole_{next(s.name for s in over.phase.stmts if isinstance(s, Reduce))}"
        step = over.block
        even = isinstance(last.size, int) and not bounds and last.size // count * count % step == 0
        end = f"block + {step}" if even else block_end("block", step, whole)
        blocks = (
            [
                f"{pad}for (int64_t block = {low}; block < {whole}; block += {step}) {{",
                f"{inner}const int64_t block_end = {end};",
                *self._clear_lane_accumulators(over.blocks, count, middle.indent + 1),
                f"{inner}#pragma GCC unroll 1",
                *self._strip_mined_loop(strip, last, middle.indent + 1, ("block", "block_end")),
                *self._add_lanes(over, strip, middle.indent + 1),
                f"{pad}}}",
            ]
            if over.blocks and (bounds or not over.one_block)
            else self._strip_mined_loop(strip, last, middle.indent, (low, whole))
        )
        lines = [
            *self._scalar_rows(middle.indent),
            f"{pad}const int64_t {whole} = {low} + ({high} - {low}) / {count} * {count};",
            *blocks,
        ]
        if not isinstance(last.size, int) or last.size % count or bounds:
            lines += self._remainder(over, middle.indent, (whole, high))
        self.pop(middle)
        return self._nest(outer, [*middle.lines, *lines], indent, bounds)

    def _add_lanes(self, over: Pass, strip: Strip, indent: int) -> list[str]:
        """Adds the lanes of a block's sums to those of their totals."""
        if not over.blocks:
            return []
        pad = margin(indent)
        return [
            f"{pad}#pragma omp simd", f"{pad}{each_lane(strip.lanes)} {{",
            *(f"{pad}  totals_{s.name}[lane] += lanes_{s.name}[lane];" for s in over.blocks),
            f"{pad}}}",
        ]  # fmt: skip

    def _remainder(self, over: Pass, indent: int, bounds: Bounds) -> list[str]:
        last, pad, stmts = over.loops[-1], margin(indent + 1), over.phase.stmts
        simd = self._simd([s for s in stmts if isinstance(s, Reduce)])
        return [
            f"{margin(indent)}{{",
            *(f"{pad}{VALUE_TYPE[s.dtype]} {local(s.name)} = 0;" for s in over.blocks),
            *self._inner_loop(stmts, last, indent + 1, [pad + simd], bounds),
            *(f"{pad}total_{s.name} += {local(s.name)};" for s in over.blocks),
            f"{margin(indent)}}}",
        ]


def tracks_nan(stmt: Reduce | Scan) -> bool:
    """Whether a reduction's result is NaN if an element is, which C's comparisons do not give."""
    return stmt.op in ("max", "min") and stmt.dtype.is_floating_point
