"""C++ of reductions along memory: one sweep per phase over each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from dicp.codegen.emitter import Scope, local, margin, nan_bits
from dicp.codegen.types import VALUE_TYPE, literal, start_value
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, Ref
from dicp.loop.ir.index import Var, product
from dicp.loop.ir.kernel import Accumulate, Kernel, Phase, Running, Save, Stmt, Store
from dicp.loop.passes.split_loops import Range
from dicp.vendor.cpu.render.loops import CHUNKS, PARALLEL_COST, SUM_BLOCK, block_end, tracks_nan
from dicp.vendor.cpu.render.non_temporal import LINE_BYTES, distinct
from dicp.vendor.cpu.render.planes import Planes

PLACE_BLOCK = 256
"""Elements of a row among which the place of its extremum is sought at once."""

WEIGHT_BLOCK = 512
"""Elements of a row whose exponentials are added up while they are in the nearest cache."""


class Rows(Planes):
    """Rows are shared among threads; few long rows are swept by all threads together."""

    def __init__(self, kernel: Kernel, far_bytes: float = math.inf) -> None:
        super().__init__(kernel, far_bytes)
        self.extrema: dict[str, str] = {}
        """The extremum whose place an accumulator looks for."""

    def lines(self) -> list[str]:
        kernel = self.kernel
        if self._splittable():
            return self._split_row()
        if self._in_planes():
            return self._plane_lines()
        scan = any(isinstance(s, Running) for s in self._all_stmts())
        if scan and self._only_sums():
            return self._summed_so_far()
        if scan and self._in_fours():
            return self._scanned_together()
        if not scan:
            kernel, self.extrema = _positions_by_value(kernel)
            self.kernel = kernel
            self.ahead = self._fetched_ahead(self._between())
        depth = 1 + len(kernel.rows)
        scope = self._push(kernel.rows, depth)
        waiting = list(kernel.phases)
        while waiting:
            phase = waiting.pop(0)
            if phase.level == "row":
                self._stmts(phase.stmts, scope)
            elif waiting and self._places_of(phase, waiting[0]):
                self._found_in_blocks(phase, waiting.pop(0), scope)
            elif waiting and not self.ahead and self._weights_of(phase, waiting[0]):
                self._weighed_in_blocks(phase, waiting.pop(0), scope)
            else:
                self._inner_loops(phase, scope, kernel.inner, serial=scan)
        if not kernel.rows:
            return scope.lines
        if self._sums():
            return self._in_parts(scope.lines)
        pragma = self._parallel((*kernel.rows, *kernel.inner), len(kernel.rows))
        return self._outer_loops(kernel.rows, scope.lines, pragma)

    def _between(self) -> list[Phase]:
        """The sweeps after the first, which reads a row from memory, and before the last, which
        writes one, the last where there are two: memory would wait for them."""
        sweeps = [p for p in self.kernel.phases if p.level == "inner"]
        found = sweeps[1:-1] or sweeps[1:]
        sums = {p: [s for s in p.stmts if isinstance(s, Accumulate)] for p in found}
        return [p for p in found if not any(map(self._summed_in_blocks, sums[p]))]

    # ---- sums over rows -------------------------------------------------------------------------

    def _sums(self) -> dict[Ref, Store]:
        return {s.ref: s for s in self._all_stmts() if isinstance(s, Store) and s.op}

    def _store(self, stmt: Store, value: str) -> str:
        if not stmt.op:
            return super()._store(stmt, value)
        place = f"part_{self._arg(stmt.ref)}[{self._inner_position()}]"
        return f"{place} = {place} + {value};"

    def _in_parts(self, body: list[str]) -> list[str]:
        """Parts of the rows, each with accumulators of its own, which are added up in the end."""
        loops, inner = self.kernel.rows, self.kernel.inner
        width = self._size(product(v.size for v in inner))
        each = f"for (int64_t c = 0; c < {width}; ++c)"
        rows = self._size(product(v.size for v in loops))
        lines, own, total = [f"  const int64_t parts = d_parts({rows});"], [], []
        tail = self._push(inner, 1 + len(inner))
        for ref, stmt in self._sums().items():
            name, ctype = self._arg(ref), VALUE_TYPE[ref.dtype]
            bytes_ = f"sizeof({ctype}) * parts * {width}"
            lines.append(f"  {ctype}* all_{name} = ({ctype}*)d_alloc({bytes_});")
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
        lines += self._shared(self._parallel((*loops, *inner), 1), each_part)
        lines += [*total, *self._nest(inner, tail.lines, 1)]
        return [*lines, *(f"  d_free(all_{self._arg(ref)});" for ref in self._sums())]

    def _places_of(self, phase: Phase, places: Phase) -> bool:
        """Whether `places` looks for the one extremum of `phase` in a row of many blocks."""
        inner = self.kernel.inner
        if len(inner) != 1 or len(phase.stmts) != 1 or len(places.stmts) != 1:
            return False
        size, (best,), (place,) = inner[0].size, phase.stmts, places.stmts
        return (
            isinstance(best, Accumulate)
            and isinstance(place, Accumulate)
            and best.name == self.extrema.get(place.name)
            and (not isinstance(size, int) or size >= 2 * PLACE_BLOCK)
        )

    def _found_in_blocks(self, phase: Phase, places: Phase, scope: Scope) -> None:
        """The first block that holds the extremum is the only one in which its place is sought."""
        (best,), pad = phase.stmts, margin(scope.indent)
        assert isinstance(best, Accumulate)
        name, size = best.name, self._size(self.kernel.inner[0].size)
        ctype, start = VALUE_TYPE[best.dtype], start_value(best.op, best.dtype)
        block = self._push((), scope.indent + 1)
        self._inner_loops(phase, block, self.kernel.inner, first_range=("block", "block_end"))
        self._pop(block)
        scope.lines += [
            f"{pad}{ctype} most_{name} = {start}; int64_t from_{name} = 0;",
            f"{pad}for (int64_t block = 0; block < {size}; block += {PLACE_BLOCK}) {{",
            f"{pad}  const int64_t block_end = {block_end('block', PLACE_BLOCK, size)};",
            *block.lines,
            f"{pad}  if (d_better_{best.op}({local(name)}, most_{name})) "
            f"{{ most_{name} = {local(name)}; from_{name} = block; }}",
            f"{pad}}}",
            f"{pad}const {ctype} {local(name)} = most_{name};",
            f"{pad}const int64_t end_{name} = {block_end(f'from_{name}', PLACE_BLOCK, size)};",
        ]
        self.local_names[name] = len(self.scopes) - 1
        limits = (f"from_{name}", f"end_{name}")
        self._inner_loops(places, scope, self.kernel.inner, first_range=limits)

    def _weights_of(self, phase: Phase, sums: Phase) -> bool:
        """Whether `sums` adds up exponentials of distances below the maximum in `phase`."""
        inner = self.kernel.inner
        if len(inner) != 1 or len(phase.stmts) != 1 or len(sums.stmts) != 1:
            return False
        size, (top,), (total,) = inner[0].size, phase.stmts, sums.stmts
        return (
            isinstance(top, Accumulate)
            and isinstance(total, Accumulate)
            and (top.op, total.op) == ("max", "sum")
            and VALUE_TYPE[top.dtype] == VALUE_TYPE[total.dtype] == "float"
            and total.value.op == "exp"
            and self._never_positive(total.value.args[0])
            and (not isinstance(size, int) or size >= 2 * WEIGHT_BLOCK)
        )

    def _weighed_in_blocks(self, phase: Phase, sums: Phase, scope: Scope) -> None:
        """Each block is read from memory once, for the maximum so far and for the weights below it:
        memory is not left idle for the length of a row. A higher maximum scales the earlier sum.

        Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
        """
        (top,), (total,), pad = phase.stmts, sums.stmts, margin(scope.indent)
        assert isinstance(top, Accumulate) and isinstance(total, Accumulate)
        var, best, sum_ = self.kernel.inner[0], local(top.name), local(total.name)
        most, before = f"most_{top.name}", f"before_{top.name}"
        size, limits = self._size(var.size), ("block", "block_end")
        block = self._push((), scope.indent + 1)
        self._inner_loops(phase, block, self.kernel.inner, first_range=limits)
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
        """The inner loops of one phase; accumulators are declared before them."""
        accumulators = [s for s in phase.stmts if isinstance(s, (Accumulate, Running))]
        flagged = [s for s in accumulators if tracks_nan(s)]
        self.flagged = {s.name for s in flagged}
        for stmt in accumulators:
            flag = f" {nan_bits(stmt)} nan_{stmt.name} = 0;" if stmt.name in self.flagged else ""
            scope.lines.append(margin(scope.indent) + self._declare(stmt) + flag)
            self.local_names[stmt.name] = len(self.scopes) - 1
        long = [s for s in accumulators if not serial and self._summed_in_blocks(s)]
        for stmt in long:
            scope.lines.append(f"{margin(scope.indent)}double total_{stmt.name} = 0;")
        self._inner_body(phase, scope, loops, serial, first_range, long)
        for stmt in long:
            ctype = VALUE_TYPE[stmt.dtype]
            total = f"({ctype})total_{stmt.name}"
            scope.lines.append(f"{margin(scope.indent)}{local(stmt.name)} = {total};")
        self.flagged = set()
        for stmt in flagged:
            nan = literal(math.nan, stmt.dtype)
            name = local(stmt.name)
            test = f"d_size_of_nan(nan_{stmt.name})"
            scope.lines.append(f"{margin(scope.indent)}{name} = {test} ? {nan} : {name};")

    def _inner_body(
        self, phase: Phase, scope: Scope, loops: Sequence[Var], serial: bool,
        first_range: tuple[str, str] | None, long: Sequence[Accumulate | Running],
    ) -> None:  # fmt: skip
        accumulators = [s for s in phase.stmts if isinstance(s, (Accumulate, Running))]
        for stmt in phase.stmts:
            if isinstance(stmt, Save):
                size = product(v.size for v in self.kernel.inner)
                ctype = VALUE_TYPE[stmt.dtype]
                scope.lines.append(f"{margin(scope.indent)}{ctype} saved_{stmt.name}[{size}];")
        if not loops:
            self._stmts(phase.stmts, scope)
            return
        if self._sums_in_groups(phase, loops, long):
            scope.lines += self._in_groups(phase, loops, scope.indent, first_range)
            return
        outer, last = loops[:-1], loops[-1]
        middle = self._push(outer, scope.indent + len(outer)) if outer else scope
        arg = any(isinstance(s, Accumulate) and s.op.startswith("arg") for s in phase.stmts)
        pragma = (
            []
            if serial or arg
            else [margin(middle.indent) + self._simd(accumulators) + self._lanes(last)]
        )
        limits = None if outer else first_range
        if long or limits:
            body = self._push((last,), middle.indent + 1)
            self._stmts(phase.stmts, body)
            if long:
                inner = self._in_blocks(last, body, middle.indent, limits, pragma, long)
            else:
                inner = [*pragma, *self._loop(last, body, middle.indent, limits)]
            self._pop(body)
        else:
            ahead = self.ahead.get(phase, ())
            inner = self._in_ranges(phase.stmts, last, middle.indent, pragma, ahead=ahead)
        if not outer:
            scope.lines += inner
            return
        self._pop(middle)
        nest = self._nest(outer, [*middle.lines, *inner], scope.indent, first_range)
        scope.lines += nest

    def _in_blocks(
        self, var: Var, body: Scope, indent: int, limits: tuple[str, str] | None,
        pragma: list[str], long: Sequence[Accumulate | Running],
    ) -> list[str]:  # fmt: skip
        """The loop over `var` in blocks, each with sums of its own."""
        low, high = limits or ("0", self._size(var.size))
        pad = margin(indent + 1)
        starts = [f"{pad}{VALUE_TYPE[s.dtype]} {local(s.name)} = 0;" for s in long]
        ends = [f"{pad}total_{s.name} += {local(s.name)};" for s in long]
        return [
            f"{margin(indent)}for (int64_t block = {low}; block < {high}; block += {SUM_BLOCK}) {{",
            f"{pad}const int64_t block_end = {block_end('block', SUM_BLOCK, high)};",
            *starts,
            *("  " + line for line in pragma),
            *("  " + line for line in self._loop(var, body, indent, ("block", "block_end"))),
            *ends,
            f"{margin(indent)}}}",
        ]  # fmt: skip

    def _sums_in_groups(
        self, phase: Phase, loops: Sequence[Var], long: Sequence[Accumulate | Running]
    ) -> bool:
        """Whether long sums are taken over short pieces, such as the planes of many images."""
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
        """Sums of several pieces at a time, which are swept with one accumulator for each place in
        a line: to add the places up costs as much as to sweep a short piece."""
        outer, last = loops
        assert isinstance(last.size, int)
        sums = [s for s in phase.stmts if isinstance(s, Accumulate)]
        low, high = limits or ("0", self._size(outer.size))
        pieces, pad = SUM_BLOCK // last.size, margin(indent + 1)
        streams = [
            item for item in distinct(ir.reads(s.value for s in sums)) if self._is_stream(item)
        ]
        count = self._line([item.ref for item in streams]) if streams else LINE_BYTES // 4
        ahead = [(item, outer, pieces) for item in streams]
        middle = self._push((outer,), indent + 2)
        part = Range(0, last.size, tuple(phase.stmts))
        swept = self._lines_of(part, last, indent + 2, count, (), ahead)
        self._pop(middle)
        end = block_end("group", pieces, high)
        return [
            f"{margin(indent)}for (int64_t group = {low}; group < {high}; group += {pieces}) {{",
            f"{pad}const int64_t group_end = {end};",
            *(f"{pad}{VALUE_TYPE[s.dtype]} {local(s.name)} = 0;" for s in sums),
            *self._clear_lanes(sums, count, indent + 1),
            *self._nest([outer], [*middle.lines, *swept], indent + 1, ("group", "group_end")),
            *self._fold_lanes(sums, count, indent + 1),
            *(f"{pad}total_{s.name} += {local(s.name)};" for s in sums),
            f"{margin(indent)}}}",
        ]  # fmt: skip

    def _splittable(self) -> bool:
        """Few rows and one sweep: the sweep itself is shared among threads."""
        kernel = self.kernel
        if self._sums() or any(isinstance(s, (Running, Save)) for s in self._all_stmts()):
            return False
        if [p.level for p in kernel.phases if p.level == "inner"] != ["inner"]:
            return False
        if kernel.phases[0].level != "inner":
            return False
        return self._few_rows() and bool(kernel.inner)

    def _few_rows(self) -> bool:
        rows, inner = self.kernel.rows, self.kernel.inner
        count = product(v.size for v in rows)
        work = product(v.size for v in inner)
        return (
            isinstance(count, int)
            and count < 4
            and (not isinstance(work, int) or work >= PARALLEL_COST)
        )

    def _split_row(self) -> list[str]:
        kernel = self.kernel
        depth = 1 + len(kernel.rows)
        scope = self._push(kernel.rows, depth)
        inner_phase, *tail = kernel.phases
        accumulators = [s for s in inner_phase.stmts if isinstance(s, Accumulate)]
        pad = margin(depth)
        for stmt in accumulators:
            ctype = VALUE_TYPE[stmt.dtype]
            scope.lines.append(f"{pad}{ctype} part_{stmt.name}[{CHUNKS}];")
            if stmt.op.startswith("arg"):
                scope.lines.append(f"{pad}int64_t part_at_{stmt.name}[{CHUNKS}];")
        first = kernel.inner[0]
        total = self._size(first.size)
        chunk = self._push((), depth + 1)
        low, high = f"chunk * {total} / {CHUNKS}", f"(chunk + 1) * {total} / {CHUNKS}"
        chunk.lines.append(f"{pad}  const int64_t low = {low}, high = {high};")
        self._inner_loops(inner_phase, chunk, kernel.inner, first_range=("low", "high"))
        for stmt in accumulators:
            chunk.lines.append(f"{pad}  part_{stmt.name}[chunk] = {local(stmt.name)};")
            if stmt.op.startswith("arg"):
                chunk.lines.append(f"{pad}  part_at_{stmt.name}[chunk] = at_{stmt.name};")
        self._pop(chunk)
        head = f"{pad}for (int64_t chunk = 0; chunk < {CHUNKS}; ++chunk) {{"
        shared = "#pragma omp parallel for schedule(static)"
        scope.lines += self._shared(shared, [head, *chunk.lines, f"{pad}}}"])
        for stmt in accumulators:
            scope.lines.append(pad + self._declare(stmt))
            scope.lines.append(f"{pad}for (int64_t chunk = 0; chunk < {CHUNKS}; ++chunk) {{")
            scope.lines.append(f"{pad}  {self._combine(stmt, f'part_{stmt.name}[chunk]', 'chunk')}")
            scope.lines.append(f"{pad}}}")
            self.local_names[stmt.name] = len(self.scopes) - 1
        for phase in tail:
            self._stmts(phase.stmts, scope)
        return self._outer_loops(kernel.rows, scope.lines, "")


def _positions_by_value(kernel: Kernel) -> tuple[Kernel, dict[str, str]]:
    """The place of an extremum as the first place whose value equals it: both sweeps vectorize.

    Also by which name each place's extremum goes.
    """
    phases: list[Phase] = []
    names: dict[str, str] = {}
    for phase in kernel.phases:
        stmts: dict[Stmt, None] = {}
        places: list[Stmt] = []
        for stmt in phase.stmts:
            if (
                isinstance(stmt, Accumulate)
                and stmt.position is not None
                and stmt.dtype != torch.bool
            ):
                best = _extremum(stmt, phase)
                stmts[best], names[stmt.name] = None, best.name
                places.append(_first_place(stmt, best.name))
            else:
                stmts[stmt] = None
        phases.append(replace(phase, stmts=tuple(stmts)))
        if places:
            phases.append(Phase("inner", tuple(places)))
    return replace(kernel, phases=tuple(phases)), names


def _extremum(stmt: Accumulate, phase: Phase) -> Accumulate:
    """What finds the extremum whose place `stmt` is: a statement of `phase` where there is one."""
    best = replace(stmt, name=f"best_{stmt.name}", op=stmt.op[3:], position=None)
    for other in phase.stmts:
        if isinstance(other, Accumulate) and (other.op, other.dtype) == (best.op, best.dtype):
            if ir.show(other.value) == ir.show(best.value):
                return other
    return best


def _first_place(stmt: Accumulate, best: str) -> Accumulate:
    assert stmt.position is not None
    value = stmt.value
    found = ir.apply("eq", torch.bool, value, Expr("acc", value.dtype, attr=best))
    if value.dtype.is_floating_point:  # a NaN is the extremum wherever there is one
        nan = ir.apply("isnan", torch.bool, value)
        found = ir.apply("bitwise_or", torch.bool, found, nan)
    beyond = ir.const(torch.iinfo(torch.int64).max, torch.int64)
    place = ir.apply("where", torch.int64, found, ir.index_value(stmt.position), beyond)
    return Accumulate(stmt.name, "min", torch.int64, place)
