"""Reductions and scans: the threads of a group share a row."""

from __future__ import annotations

from collections.abc import Sequence

from dicp.codegen.emitter import accumulator_type
from dicp.codegen.spelling import combine
from dicp.codegen.types import VALUE_TYPE, start_value
from dicp.codegen.values import local, margin
from dicp.gpu.threads import RowThreads
from dicp.gpu.tiles import numel
from dicp.loop.ir.access import Access, is_along, unconditional_reads
from dicp.loop.ir.index import Size
from dicp.loop.ir.kernel import Kernel, Phase, Reduce, Scan, ScratchStore, Stmt, Store
from dicp.vendor.maca.facts import MIN_WAVE
from dicp.vendor.maca.render.points import Points


class Reduction(Points):
    """One row per group of threads, phase after phase.

    Every thread of a block reaches every barrier: rows past the end count as the last row, without
    points and without stores.
    """

    block: RowThreads

    def __init__(self, kernel: Kernel, form: RowThreads) -> None:
        super().__init__(kernel)
        self.block = form
        self.shared: dict[str, str] = {}
        """Arrays in shared memory, and the declaration of each."""
        self._exchanges: dict[str, int] = {}
        """By the name of a pair of arrays, how many exchanges use it."""
        self.range = "", ""
        """The first point of the block's part of the reduction and its end; empty if it has all."""
        self._sum_of: dict[str, Reduce] = {}
        """By the name of a maximum, the sum of the exponentials that is computed beside it."""

    @property
    def together(self) -> bool:
        return self.block.exchanges

    def axes(self) -> dict[str, tuple[Size, int]]:
        rows: dict[str, tuple[Size, int]] = {"x": (numel(self.kernel.parallel), self.block.rows)}
        partition = self.kernel.partition
        return rows if partition is None else {"p": (partition.part.size, 1), **rows}

    def inner_axes(self) -> dict[str, tuple[Size, int]]:
        return {"r": (numel(self.kernel.reduction), 1)}

    def lines(self) -> list[str]:
        kernel, block = self.kernel, self.block
        rows = self.size(numel(kernel.parallel))
        row = self.push(kernel.parallel, 1)
        group, thread = ("% {0}", "/ {0}") if self.block.apart else ("/ {1}", "% {1}")
        own, at = (text.format(block.rows, block.group) for text in (group, thread))
        live, inside = "true", "own_row"
        if block.masked:
            live, inside = f"own_row < {rows}", f"live ? own_row : {rows} - 1"
        *part, number = self.block_axes()
        row.lines += [
            *(self._part(part[0]) if part else ()),
            f"  const d_index own_row = {number} * {block.rows} + threadIdx.x {own};",
            f"  const bool live = {live};", f"  const d_index row = {inside};",
            f"  const d_index at = threadIdx.x {at};",
            *(f"  {text}" for text in self._digits("row", kernel.parallel)),
        ]  # fmt: skip
        self._phases()
        return [*self._declarations(), *row.lines]

    def _declarations(self) -> list[str]:
        return [f"  __shared__ {text};" for text in self.shared.values()]

    def _part(self, number: str) -> list[str]:
        """Declares the part of the partitioned loops that the block has: its number and its end."""
        partition = self.kernel.partition
        assert partition is not None
        part = partition.part.key
        chunk, count = self.size(partition.chunk), self.size(self.shared_size)
        self.range = "first", "end"
        return [
            f"  const d_index {part} = {number};", f"  const d_index first = {part} * {chunk};",
            f"  const d_index end = d_minimum<d_index>(first + {chunk}, {count});",
        ]  # fmt: skip

    @property
    def shared_size(self) -> Size:
        """Points of the loops that a partition divides."""
        return numel(self.kernel.reduction)

    def _phases(self) -> None:
        """Adds the phases to the current scope."""
        block, scope = self.block, self.scopes[-1]
        if block.steps is not None:
            scope.lines += self._preloads()
        online = {position: pair for position, *pair in block.online}
        phases = iter(enumerate(self.kernel.phases))
        for position, phase in phases:
            if position in block.barriers:
                scope.lines.append("  __syncthreads();")
            if position in online:
                self._online_phase(*online[position])
                next(phases)
            elif phase.level == "parallel":
                self._row_phase(phase)
            elif any(isinstance(s, Scan) for s in phase.stmts):
                self._scan_phase(phase)
            else:
                self._reduce_phase(phase)

    # ---- values ---------------------------------------------------------------------------------

    @property
    def rematerializes(self) -> bool:
        return self.block.steps is None

    def _inner_position(self) -> str:
        return "step" if self.block.width == 1 else f"step * {self.block.width} + lane"

    def _preloads(self) -> list[str]:
        """Loads into registers what several phases read at every point."""
        block, (*_, last) = self.block, self.kernel.reduction
        assert block.steps is not None
        phases = [p for p in self.kernel.phases if p.level == "reduction"]
        uses: dict[Access, int] = {}
        for phase in phases:
            for access in unconditional_reads(phase.stmts):
                uses[access] = uses.get(access, 0) + 1
        loops = set(self.kernel.reduction)
        wanted = [
            (ref, index) for (ref, index), count in uses.items()
            if count > 1 and ref.root not in self.stored and index.is_affine
            and index.variables() & loops and (block.width == 1 or is_along(index, last))
        ]  # fmt: skip
        lines: list[str] = []
        for ref, index in wanted:
            name = self._array_name()
            size = block.steps * block.width
            scope = self.push(self.kernel.reduction, 3)
            scope.lines += [
                margin(3) + text for text in self._digits("point", self.kernel.reduction)
            ]
            place = f"{self.arg(ref)} + ({self.index(index)})"
            to = f"{name} + step * {block.width}"
            scope.lines.append(f"{margin(3)}d_load<{block.width}>({to}, {place});")
            self.pop(scope)
            lines += [f"  {self._element(ref)} {name}[{size}];", *self._loop(scope.lines)]
            self.preloaded[ref, index] = name
        return lines

    # ---- phases ---------------------------------------------------------------------------------

    def _row_phase(self, phase: Phase) -> None:
        """Values of the row, which every thread of the group has; the first one stores them."""
        scope = self.scopes[-1]
        stores = [s for s in phase.stmts if isinstance(s, Store)]
        self.statements([s for s in phase.stmts if not isinstance(s, Store)])
        if stores:
            inner = self.push((), 2)
            self.statements(stores)
            self.pop(inner)
            scope.lines += self._guarded("live && at == 0", inner.lines, 1)

    def _loop(self, body: list[str]) -> list[str]:
        """`body` at each group of adjacent points of the thread, the first of which is `point`."""
        block, count = self.block, self.size(numel(self.kernel.reduction))
        wide = f" * {block.width}" if block.width != 1 else ""
        if block.steps is None:
            first, end = self.range
            start = f"{first} + at" if first else f"at{wide}"
            apart, last = block.group * block.width, end or count
            return [
                f"  for (d_index point = {start}; live && point < {last}; point += {apart}) {{",
                *body, "  }",
            ]  # fmt: skip
        return [
            "  #pragma unroll", f"  for (int step = 0; step < {block.steps}; ++step) {{",
            f"    const d_index point = (step * {block.group} + at){wide};",
            *self._guarded(f"live && point < {count}", body, 2), "  }",
        ]  # fmt: skip

    def _reduce_phase(self, phase: Phase) -> None:
        scope = self.scopes[-1]
        kept = self.block.steps is not None
        stmts = [s for s in phase.stmts if kept or not isinstance(s, ScratchStore)]
        reduces = [s for s in stmts if isinstance(s, Reduce)]
        if not stmts:
            return
        scope.lines += [f"  {self._declare(s)}" for s in reduces]
        for s in stmts:
            if isinstance(s, ScratchStore):
                size = (self.block.steps or 0) * self.block.width
                scope.lines.append(f"  {VALUE_TYPE[s.dtype]} saved_{s.name}[{size}];")
        if self.block.width == 1:
            self._stage_preloaded(stmts)
        loops = self.kernel.reduction
        indent = 3 if kept else 2
        body = self._points(stmts, loops, "point", self.block.width, indent)
        self.staged.clear()
        scope.lines += self._loop(body)
        for stmt in reduces:
            scope.lines.append(f"  {self._join(stmt)}")
            self.named_here(stmt.name)

    def _online_phase(self, row_max: Reduce, total: Reduce) -> None:
        """max(x) and sum(exp(x - max)) in one pass over the row, each thread rescaling its own sum.

        Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
        """
        scope, best, kept = self.scopes[-1], local(row_max.name), local(total.name)
        self._sum_of[row_max.name] = total
        scope.lines += [f"  {self._declare(s)}" for s in (row_max, total)]
        loops = self.kernel.reduction
        scope.lines += self._loop(self._points((row_max,), loops, "point", self.block.width, 2))
        own = f"own_{row_max.name}"
        scope.lines += [
            f"  const {accumulator_type(row_max)} {own} = {best};", f"  {self._join(row_max)}",
            f"  {kept} = d_rescaled({kept}, {own}, {best});", f"  {self._join(total)}",
        ]  # fmt: skip
        for stmt in (row_max, total):
            self.named_here(stmt.name)

    def _stage_preloaded(self, stmts: Sequence[Stmt]) -> None:
        for access in unconditional_reads(stmts):
            if access in self.preloaded:
                self.staged[access] = f"{self.preloaded[access]}[step]"

    def _join(self, stmt: Reduce) -> str:
        """The reduction over the threads of the group."""
        block, name = self.block, local(stmt.name)
        apart = "_apart" if self.block.apart else ""
        sizes = f"{block.rows}, {block.group}" if self.block.apart else f"{block.group}"
        ctype = accumulator_type(stmt)
        array = self._next_array(ctype, f"shared_{ctype}")
        if stmt.finds_position:
            places = self._next_array("int64_t", "places")
            kind = f"d_reduce_pair{apart}<d_first_{stmt.op[3:]}, {sizes}>"
            return f"{kind}({name}, at_{stmt.name}, {array}, {places});"
        return f"{name} = d_reduce{apart}<d_op_{stmt.op}, {sizes}>({name}, {array});"

    def _next_array(self, ctype: str, pair: str) -> str:
        """One of two arrays that reductions use in turn: the barrier of each reduction orders what
        the one before it has read and what the next one writes."""
        used = self._exchanges[pair] = self._exchanges.get(pair, 0) + 1
        return self._exchange_array(ctype, f"{pair}_{used % 2}")

    def _exchange_array(self, ctype: str, name: str) -> str:
        """An array for the exchanges of a reduction or scan."""
        size = self.threads if self.block.apart else max(1, self.threads // MIN_WAVE)
        return self._shared_array(ctype, name, size)

    def _shared_array(self, ctype: str, name: str, size: int) -> str:
        self.shared[name] = f"d_shared<{ctype}, {size}> {name}"
        return name

    # ---- scans ----------------------------------------------------------------------------------

    def _scan_phase(self, phase: Phase) -> None:
        """Every thread takes part in each exchange; those past the end have the start value."""
        scope, block = self.scopes[-1], self.block
        count = self.size(numel(self.kernel.reduction))
        scans = [s for s in phase.stmts if isinstance(s, Scan)]
        reduces = [s for s in phase.stmts if isinstance(s, Reduce)]
        scope.lines += [f"  {self._declare(s)}" for s in reduces]
        for s in scans:
            ctype = accumulator_type(s)
            scope.lines.append(f"  {ctype} carry_{s.name} = {start_value(s.op, s.dtype)};")
        body = self.push(self.kernel.reduction, 2)
        body.lines += [
            "    const d_index own_point = chunk + at;",
            f"    const bool inside = own_point < {count};",
            "    const d_index point = inside ? own_point : 0;",
            *(f"    {text}" for text in self._digits("point", self.kernel.reduction)),
        ]
        stmts = [s for s in phase.stmts if not isinstance(s, (Store, ScratchStore))]
        self.statements(stmts)
        inner = self.push((), 3)
        self.statements([s for s in phase.stmts if isinstance(s, Store)])
        self.pop(inner)
        self.pop(body)
        scope.lines += [
            f"  for (d_index chunk = 0; chunk < {count}; chunk += {block.group}) {{",
            *body.lines, *self._guarded("live && inside", inner.lines, 2), "  }",
            *(f"  {self._join(s)}" for s in reduces),
        ]  # fmt: skip

    def _combine(self, stmt: Reduce | Scan, value: str, position: str) -> str:
        if stmt.name in self._sum_of:
            total, best = self._sum_of[stmt.name], local(stmt.name)
            fall = self.operator(total.value, [f"d_below({value}, {best})"])
            return f"d_online({best}, {local(total.name)}, {value}, {fall});"
        if isinstance(stmt, Reduce):
            text = super()._combine(stmt, value, position)
            scanning = any(s is stmt for p in self.kernel.phases for s in p.stmts
                           if any(isinstance(o, Scan) for o in p.stmts))  # fmt: skip
            return f"if (inside) {{ {text} }}" if scanning else text
        ctype, carry = accumulator_type(stmt), f"carry_{stmt.name}"
        name = local(stmt.name)
        if self.block.group == 1:
            combined = combine(stmt.op, carry, value)
            return f"const {ctype} {name} = {carry} = ({ctype})({combined});"
        start = start_value(stmt.op, stmt.dtype)
        text = f"inside ? ({ctype})({value}) : ({ctype})({start})"
        array = self._exchange_array(ctype, f"shared_{stmt.name}")
        operator = f"d_op_{stmt.op}, {self.block.group}"
        return f"const {ctype} {name} = d_scan<{operator}>({text}, {carry}, {array});"
