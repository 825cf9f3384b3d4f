"""C++ text of loop kernels: expressions from the operator table, loops from the kernel's kind."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import sympy
import torch

from dicp.loop import ir
from dicp.loop.cpp_emit import Emitter, Scope, local, margin
from dicp.loop.cpp_text import (
    STORAGE_TYPE,
    VALUE_TYPE,
    literal,
    start_value,
)
from dicp.loop.index import (
    FloorDiv,
    Index,
    Indirect,
    Mod,
    Var,
    product,
)
from dicp.loop.ir import Expr, Ref
from dicp.loop.kernel import Accumulate, Kernel, Phase, Running, Save, Stmt, Store
from dicp.loop.ops import REDUCTIONS, SCALAR_OPS
from dicp.loop.ranges import Range, split

PARALLEL_COST = 32768
"""Elementary operations below which a thread team costs more than it brings."""
COLUMN_TILE = 512
MAX_TILE = 3 * COLUMN_TILE
CHUNKS = 16
SUM_BLOCK = 4096
"""Elements of a row summed before the sum is added to the total."""
ROW_BLOCK = 256
"""Rows summed into a column before the sum is added to the total."""
TILE = (64, 16)
"""Crossing and contiguous extent of a tile: few lines of each tensor at a time, since rows whose
length is a power of two share cache sets."""


@dataclass(frozen=True)
class CppKernel:
    """A rendered kernel: equal work has equal `body`, hence an equal name."""

    name: str
    body: str
    args: tuple[Ref, ...]
    symbols: tuple[sympy.Symbol, ...]
    kernel: Kernel
    sites: tuple[tuple[str, str], ...]
    """What each checked place in the code is, and its origin, for error messages."""


def render(kernel: Kernel) -> CppKernel:
    return _Renderer(kernel).render()


class _Renderer(Emitter):
    """Loops by the kernel's kind, around what the emitter writes."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._kept: list[list[Range]] = []
        """Rewritten statements: the emitter knows values by identity, so they must stay alive."""

    # ---- whole kernels ----------------------------------------------------------------------

    def render(self) -> CppKernel:
        lines = {
            "pointwise": self._pointwise,
            "row": self._row,
            "column": self._column,
            "scatter": self._scatter,
        }[self.kernel.kind]()
        head = []
        for k, (ref, name) in enumerate(self.args.items()):
            ctype = STORAGE_TYPE[ref.dtype]
            const = "" if ref.root in self.stored else "const "
            head.append(f"  {const}{ctype}* {name} = ({const}{ctype}*)args[{k}];")
        for k, name in enumerate(self.symbols.values()):
            head.append(f"  const int64_t {name} = sizes[{k}];")
        body = "\n".join([*head, *lines])
        name = "k" + hashlib.sha256(body.encode()).hexdigest()[:20]
        return CppKernel(
            name, body, tuple(self.args), tuple(self.symbols), self.kernel, tuple(self.sites)
        )

    def _pointwise(self) -> list[str]:
        rows = self.kernel.rows
        if not rows:
            scope = self._push((), 1)
            self._stmts(self._all_stmts(), scope)
            return scope.lines
        outer, last = rows[:-1], rows[-1]
        if not outer:
            pragma = f"  {self._parallel(rows, 0, simd=True)}"
            return self._in_ranges(self._all_stmts(), last, 1, [pragma])
        crossing = self._crossing_loop()
        if crossing is not None:
            return self._tiled(crossing)
        row_scope = self._push(outer, 1 + len(outer))
        pragma = f"{margin(row_scope.indent)}#pragma omp simd"
        loops = self._in_ranges(self._all_stmts(), last, row_scope.indent, [pragma])
        inner = [*row_scope.lines, *loops]
        return self._outer_loops(outer, inner, self._parallel(rows, len(outer)))

    def _in_ranges(
        self, stmts: Sequence[Stmt], var: Var, indent: int, pragma: list[str]
    ) -> list[str]:
        """The loop over `var`, in parts where conditions on it would be tested at every point."""
        parts = split(stmts, var)
        self._kept.append(parts)
        lines: list[str] = []
        for part in parts:
            body = self._push((var,), indent + 1)
            self._stmts(part.stmts, body)
            bounds = (self._size(part.low), self._size(part.high))
            lines += [*pragma, *self._loop(var, body, indent, bounds)]
            self._pop(body)
        return lines

    def _crossing_loop(self) -> Var | None:
        """The outer loop along which some tensor is contiguous while the last loop strides it."""
        last = self.kernel.rows[-1]
        for index in self._memory_indices():
            for var in self.kernel.rows[:-1]:
                if index.coefficient(var) == 1 and index.coefficient(last) not in (0, 1):
                    return var
        return None

    def _memory_indices(self) -> list[Index]:
        seen: set[int] = set()
        loads = [
            e.attr.coords[0]
            for expr in self.kernel.exprs() for e in ir.walk(expr, seen) if e.op == "read"
        ]  # fmt: skip
        return loads + [s.index for s in self._all_stmts() if isinstance(s, Store)]

    def _tiled(self, crossing: Var) -> list[str]:
        """Two loops in tiles, so that both directions use whole cache lines.

        What lies across the last loop is turned in registers into a tile of its own first.
        """
        rows = self.kernel.rows
        last = rows[-1]
        outer = [v for v in rows[:-1] if v is not crossing]
        depth = 1 + len(outer)
        base = self._push(outer, depth + 2)
        self._stage(crossing, last, base)
        row_scope = self._push([crossing], depth + 3)
        scope = self._push((last,), depth + 4)
        self._stmts(self._all_stmts(), scope)
        pad = margin(depth)
        lines = []
        for k, var in enumerate((crossing, last)):
            name, size = f"tile{k}", self._size(var.size)
            lines.append(f"{margin(depth + k)}for (int64_t {name} = 0; {name} < {size}; "
                         f"{name} += {TILE[k]}) {{")  # fmt: skip
        for k, var in enumerate((crossing, last)):
            name, size = f"tile{k}", self._size(var.size)
            lines.append(
                f"{pad}    const int64_t end{k} = "
                f"{name} + {TILE[k]} < {size} ? {name} + {TILE[k]} : {size};"
            )
        lines += [
            *base.lines, f"{margin(depth + 2)}{self._for(crossing, ('tile0', 'end0'))} {{",
            *row_scope.lines, f"{margin(depth + 3)}#pragma omp simd",
            *self._loop(last, scope, depth + 3, ("tile1", "end1")),
            f"{margin(depth + 2)}}}", f"{margin(depth + 1)}}}", f"{pad}}}",
        ]  # fmt: skip
        return self._outer_loops(outer, lines, self._parallel(rows, len(outer) + 2))

    def _stage(self, crossing: Var, last: Var, scope: Scope) -> None:
        """Turn what is contiguous along `crossing` into tiles that are contiguous along `last`."""
        for number, (ref, index) in enumerate(self._plain_reads()):
            others = tuple((a, c) for a, c in index.terms if a not in (crossing, last))
            hidden = {v for a, _ in others for v in _deep_variables(a)}
            stride = index.coefficient(last)
            if index.coefficient(crossing) != 1 or stride in (0, 1) or {crossing, last} & hidden:
                continue
            name = f"turned{number}"
            ctype = STORAGE_TYPE[ref.dtype]
            start = (
                f"{self._index(Index(index.const, others))} + tile0 + {self._size(stride)} * tile1"
            )
            scope.lines += [
                f"{margin(scope.indent)}{ctype} {name}[{TILE[0] * TILE[1]}];",
                f"{margin(scope.indent)}d_turn<{ctype}, {TILE[0]}, {TILE[1]}>({self._arg(ref)} + "
                f"({start}), {self._size(stride)}, {name}, end0 - tile0, end1 - tile1);",
            ]
            place = f"({crossing.key} - tile0) * {TILE[1]} + {last.key} - tile1"
            self.staged[ref, index] = f"{name}[{place}]"

    def _plain_reads(self) -> list[tuple[Ref, Index]]:
        """What is read at every point, nothing that is only read where a condition holds."""
        found: dict[tuple[Ref, Index], bool] = {}

        def visit(expr: Expr, always: bool, seen: dict[int, bool]) -> None:
            if id(expr) in seen and (always or not seen[id(expr)]):
                return
            seen[id(expr)] = always
            if expr.op == "read":
                key = (expr.attr.ref, expr.attr.coords[0])
                found[key] = found.get(key, True) and always
            for k, arg in enumerate(expr.args):
                visit(arg, always and not (expr.op == "masked" and k == 1), seen)

        seen: dict[int, bool] = {}
        for expr in self.kernel.exprs():
            visit(expr, True, seen)
        return [key for key, always in found.items() if always]

    def _outer_loops(self, loops: Sequence[Var], inner: list[str], pragma: str) -> list[str]:
        lines = [f"  {pragma}"] if pragma else []
        for depth, var in enumerate(loops):
            lines.append(f"{margin(1 + depth)}{self._for(var)} {{")
        lines += inner
        lines += [f"{margin(1 + depth)}}}" for depth in reversed(range(len(loops)))]
        return lines

    def _row(self) -> list[str]:
        kernel = self.kernel
        if self._splittable():
            return self._split_row()
        scan = any(isinstance(s, Running) for s in self._all_stmts())
        if not scan:
            kernel = self.kernel = _positions_by_value(kernel)
        depth = 1 + len(kernel.rows)
        scope = self._push(kernel.rows, depth)
        for phase in kernel.phases:
            if phase.level == "row":
                self._stmts(phase.stmts, scope)
            else:
                self._inner_loops(phase, scope, kernel.inner, serial=scan)
        if not kernel.rows:
            return scope.lines
        pragma = self._parallel((*kernel.rows, *kernel.inner), len(kernel.rows))
        return self._outer_loops(kernel.rows, scope.lines, pragma)

    def _inner_loops(
        self, phase: Phase, scope: Scope, loops: Sequence[Var], serial: bool = False,
        first_range: tuple[str, str] | None = None,
    ) -> None:  # fmt: skip
        """The inner loops of one phase; accumulators are declared before them."""
        accumulators = [s for s in phase.stmts if isinstance(s, (Accumulate, Running))]
        flagged = [s for s in accumulators if _tracks_nan(s)]
        self.flagged = {s.name for s in flagged}
        for stmt in accumulators:
            flag = f" int nan_{stmt.name} = 0;" if stmt.name in self.flagged else ""
            scope.lines.append(margin(scope.indent) + self._declare(stmt) + flag)
            self.local_names[stmt.name] = len(self.scopes) - 1
        long = [s for s in accumulators if not serial and self._summed_in_blocks(s)]
        for stmt in long:
            ctype = VALUE_TYPE[stmt.dtype]
            scope.lines.append(f"{margin(scope.indent)}{ctype} total_{stmt.name} = 0;")
        self._inner_body(phase, scope, loops, serial, first_range, long)
        for stmt in long:
            scope.lines.append(f"{margin(scope.indent)}{local(stmt.name)} = total_{stmt.name};")
        self.flagged = set()
        for stmt in flagged:
            nan = literal(math.nan, stmt.dtype)
            name = local(stmt.name)
            scope.lines.append(f"{margin(scope.indent)}{name} = nan_{stmt.name} ? {nan} : {name};")

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
        outer, last = loops[:-1], loops[-1]
        middle = self._push(outer, scope.indent + len(outer)) if outer else scope
        arg = any(isinstance(s, Accumulate) and s.op.startswith("arg") for s in phase.stmts)
        pragma = [] if serial or arg else [margin(middle.indent) + self._simd(accumulators)]
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
            inner = self._in_ranges(phase.stmts, last, middle.indent, pragma)
        if not outer:
            scope.lines += inner
            return
        self._pop(middle)
        for depth, var in enumerate(outer):
            bounds = first_range if depth == 0 else None
            scope.lines.append(f"{margin(scope.indent + depth)}{self._for(var, bounds)} {{")
        scope.lines += [*middle.lines, *inner]
        for depth in reversed(range(len(outer))):
            scope.lines.append(f"{margin(scope.indent + depth)}}}")

    def _summed_in_blocks(self, stmt: Accumulate | Running) -> bool:
        """Long floating sums are sums of block sums: the error grows with the blocks only."""
        count = product(v.size for v in self.kernel.inner)
        long = not isinstance(count, int) or count > 2 * SUM_BLOCK
        return long and stmt.op == "sum" and stmt.dtype.is_floating_point

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
            f"{pad}const int64_t block_end = "
            f"block + {SUM_BLOCK} < {high} ? block + {SUM_BLOCK} : {high};",
            *starts,
            *("  " + line for line in pragma),
            *("  " + line for line in self._loop(var, body, indent, ("block", "block_end"))),
            *ends,
            f"{margin(indent)}}}",
        ]  # fmt: skip

    def _splittable(self) -> bool:
        """Few rows and one sweep: the sweep itself is shared among threads."""
        kernel = self.kernel
        if any(isinstance(s, (Running, Save)) for s in self._all_stmts()):
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
        scope.lines += [
            f"{pad}#pragma omp parallel for schedule(static)",
            f"{pad}for (int64_t chunk = 0; chunk < {CHUNKS}; ++chunk) {{", *chunk.lines, f"{pad}}}",
        ]  # fmt: skip
        for stmt in accumulators:
            scope.lines.append(pad + self._declare(stmt))
            scope.lines.append(f"{pad}for (int64_t chunk = 0; chunk < {CHUNKS}; ++chunk) {{")
            scope.lines.append(f"{pad}  {self._combine(stmt, f'part_{stmt.name}[chunk]', 'chunk')}")
            scope.lines.append(f"{pad}}}")
            self.local_names[stmt.name] = len(self.scopes) - 1
        for phase in tail:
            self._stmts(phase.stmts, scope)
        return self._outer_loops(kernel.rows, scope.lines, "")

    # ---- columns ----------------------------------------------------------------------------

    def _column(self) -> list[str]:
        """Accumulators for a tile of columns, swept over the reduced loops."""
        kernel = self.kernel
        outer, column = kernel.rows[:-1], kernel.rows[-1]
        width = self._size(column.size)
        accumulators = [s for s in self._all_stmts() if isinstance(s, Accumulate)]
        running = [s for s in self._all_stmts() if isinstance(s, Running)]
        tiles = (
            product([*(v.size for v in outer), -(-column.size // COLUMN_TILE)])
            if (isinstance(column.size, int))
            else sympy.oo
        )
        many = not isinstance(tiles, int) or tiles >= 4
        positions = any(s.op.startswith("arg") for s in accumulators)
        split = (
            not many
            and not running
            and not positions
            and self._worth_splitting()
            and (product(v.size for v in kernel.inner) != 1)
        )
        depth = 2 + len(outer)
        scope = self._push(outer, depth)
        pad = margin(depth)
        inner = [p for p in kernel.phases if p.level == "inner"]
        tail = [p for p in kernel.phases if p.level == "row"]
        lines: list[str] = []
        step = f"{COLUMN_TILE}" if not split else width
        scope.lines.append(
            f"{pad}const int64_t tile_end = tile + {step} < {width} ? tile + {step} : {width};"
        )
        if split:
            lines += self._split_column(scope, inner, accumulators, column)
        else:
            stmts: list[Accumulate | Running] = [*accumulators, *running]
            for stmt in stmts:
                scope.lines += self._accumulator_array(stmt, pad, str(COLUMN_TILE))
            self._sweep_columns(scope, inner, column, kernel.inner, None)
        self._column_tail(scope, tail, column, accumulators)
        if split:
            for stmt in accumulators:
                scope.lines.append(f"{pad}d_free(acc_{stmt.name});")
        head = [
            f"{margin(1 + len(outer))}for (int64_t tile = 0; tile < {width}; tile += {step}) {{"
        ]
        inside = [*head, *scope.lines, f"{margin(1 + len(outer))}}}"]
        pragma = "" if split else self._parallel((*kernel.rows, *kernel.inner), len(outer) + 1)
        return self._outer_loops(outer, inside, pragma)

    def _worth_splitting(self) -> bool:
        work = product(v.size for v in (*self.kernel.rows, *self.kernel.inner))
        return not isinstance(work, int) or work >= PARALLEL_COST

    def _accumulator_array(self, stmt: Accumulate | Running, pad: str, size: str) -> list[str]:
        ctype = VALUE_TYPE[stmt.dtype]
        lines = [f"{pad}{ctype} acc_{stmt.name}[{size}];"]
        if stmt.op.startswith("arg"):
            lines.append(f"{pad}int64_t acc_at_{stmt.name}[{size}];")
        return lines + self._fill_array(stmt, pad, size)

    def _fill_array(self, stmt: Accumulate | Running, pad: str, size: str) -> list[str]:
        zero = f" acc_at_{stmt.name}[c] = 0;" if stmt.op.startswith("arg") else ""
        start = start_value(stmt.op, stmt.dtype)
        return [
            f"{pad}for (int64_t c = 0; c < {size}; ++c) {{ acc_{stmt.name}[c] = {start};{zero} }}"
        ]

    def _sweep_columns(
        self, scope: Scope, phases: Iterable[Phase], column: Var, loops: Sequence[Var],
        first_range: tuple[str, str] | None,
    ) -> None:  # fmt: skip
        for phase in phases:
            middle = self._push(loops, scope.indent + len(loops))
            body = self._push((column,), middle.indent + 1)
            for stmt in phase.stmts:
                if isinstance(stmt, Accumulate):
                    value = self.value(stmt.value)
                    body.lines.append(
                        margin(body.indent) + self._combine_at(stmt, value, f"{column.key} - tile")
                    )
                elif isinstance(stmt, Running):
                    slot = f"acc_{stmt.name}[{column.key} - tile]"
                    value = REDUCTIONS[stmt.op].combine.format(slot, self.value(stmt.value))
                    ctype = VALUE_TYPE[stmt.dtype]
                    body.lines.append(
                        f"{margin(body.indent)}const {ctype} {local(stmt.name)} = {slot} = {value};"
                    )
                    self.local_names[stmt.name] = len(self.scopes) - 1
                else:
                    self._stmts((stmt,), body)
            bounds = ("tile", "tile_end")
            inner = [
                f"{margin(middle.indent)}#pragma omp simd",
                *self._loop(column, body, middle.indent, bounds),
            ]
            self._pop(body)
            self._pop(middle)
            long = [
                s for s in phase.stmts if isinstance(s, Accumulate) and self._summed_in_blocks(s)
            ]
            limits = first_range
            if long:
                scope.lines += self._open_row_blocks(scope, loops[0], first_range, long, column)
                limits = ("block", "block_end")
            for depth, var in enumerate(loops):
                bounds_of = limits if depth == 0 else None
                scope.lines.append(f"{margin(scope.indent + depth)}{self._for(var, bounds_of)} {{")
            scope.lines += [*middle.lines, *inner]
            for depth in reversed(range(len(loops))):
                scope.lines.append(f"{margin(scope.indent + depth)}}}")
            if long:
                scope.lines += self._close_row_blocks(scope, long)

    def _open_row_blocks(
        self, scope: Scope, first: Var, limits: tuple[str, str] | None,
        long: Sequence[Accumulate], column: Var,
    ) -> list[str]:  # fmt: skip
        """Blocks of the outermost reduced loop, each with accumulators of its own."""
        pad = margin(scope.indent)
        low, high = limits or ("0", self._size(first.size))
        width = min(column.size, MAX_TILE) if isinstance(column.size, int) else COLUMN_TILE
        lines = []
        for stmt in long:
            ctype = VALUE_TYPE[stmt.dtype]
            lines.append(f"{pad}{ctype}* total_{stmt.name} = acc_{stmt.name};")
        lines += [
            f"{pad}for (int64_t block = {low}; block < {high}; block += {ROW_BLOCK}) {{",
            f"{pad}const int64_t block_end = "
            f"block + {ROW_BLOCK} < {high} ? block + {ROW_BLOCK} : {high};",
        ]
        for stmt in long:
            ctype = VALUE_TYPE[stmt.dtype]
            lines.append(
                f"{pad}{ctype} acc_{stmt.name}[{width}]; "
                f"for (int64_t c = 0; c < tile_end - tile; ++c) acc_{stmt.name}[c] = 0;"
            )
        return lines

    def _close_row_blocks(self, scope: Scope, long: Sequence[Accumulate]) -> list[str]:
        pad = margin(scope.indent)
        sums = [
            f"{pad}for (int64_t c = 0; c < tile_end - tile; ++c) "
            f"total_{s.name}[c] += acc_{s.name}[c];"
            for s in long
        ]
        return [*sums, f"{pad}}}"]

    def _split_column(
        self, scope: Scope, phases: list[Phase], accumulators: list[Accumulate], column: Var
    ) -> list[str]:
        """Each chunk of the reduced loops fills its own accumulators, which are then combined."""
        pad, inner = margin(scope.indent), self.kernel.inner
        width = "(tile_end - tile)"
        for stmt in accumulators:
            ctype = VALUE_TYPE[stmt.dtype]
            scope.lines.append(
                f"{pad}{ctype}* acc_{stmt.name} = ({ctype}*)d_alloc(sizeof({ctype}) * "
                f"{CHUNKS} * {width});"
            )
        total = self._size(inner[0].size)
        chunk = self._push((), scope.indent + 1)
        chunk.lines.append(
            f"{pad}  const int64_t low = chunk * {total} / {CHUNKS}, "
            f"high = (chunk + 1) * {total} / {CHUNKS};"
        )
        names = [(f"acc_{s.name}", f"{s.name}") for s in accumulators]
        for stmt, (array, _) in zip(accumulators, names, strict=True):
            ctype = VALUE_TYPE[stmt.dtype]
            chunk.lines.append(f"{pad}  {ctype}* all_{stmt.name} = {array};")
            chunk.lines.append(
                f"{pad}  {{ {ctype}* acc = all_{stmt.name} + chunk * {width}; "
                f"for (int64_t c = 0; c < {width}; ++c) "
                f"acc[c] = {start_value(stmt.op, stmt.dtype)}; }}"
            )
        body = self._push((), scope.indent + 1)
        for stmt in accumulators:
            ctype = VALUE_TYPE[stmt.dtype]
            body.lines.append(
                f"{pad}  {ctype}* acc_{stmt.name} = all_{stmt.name} + chunk * {width};"
            )
        self._sweep_columns(body, phases, column, inner, ("low", "high"))
        self._pop(body)
        self._pop(chunk)
        scope.lines += [
            f"{pad}#pragma omp parallel for schedule(static)",
            f"{pad}for (int64_t chunk = 0; chunk < {CHUNKS}; ++chunk) {{",
            *chunk.lines, f"{pad}  {{", *body.lines, f"{pad}  }}", f"{pad}}}",
        ]  # fmt: skip
        for stmt in accumulators:
            value = f"acc_{stmt.name}[chunk * {width} + c]"
            combined = self._combine_at(stmt, value, "c")
            scope.lines.append(
                f"{pad}for (int64_t chunk = 1; chunk < {CHUNKS}; ++chunk) "
                f"for (int64_t c = 0; c < {width}; ++c) {{ {combined} }}"
            )
        return []

    def _column_tail(
        self, scope: Scope, phases: Iterable[Phase], column: Var, accs: Sequence[Accumulate]
    ) -> None:
        stmts = [s for p in phases for s in p.stmts]
        body = self._push((column,), scope.indent + 1)
        for stmt in accs:
            source = "acc_at_" if stmt.op.startswith("arg") else "acc_"
            body.lines.append(
                f"{margin(body.indent)}const auto {_result(stmt)} = "
                f"{source}{stmt.name}[{column.key} - tile];"
            )
            self.local_names[stmt.name] = len(self.scopes) - 1
        self._stmts(stmts, body)
        scope.lines += self._loop(column, body, scope.indent, ("tile", "tile_end"))
        self._pop(body)

    # ---- scatter ----------------------------------------------------------------------------

    def _scatter(self) -> list[str]:
        """Colliding stores: one thread, or threads that each own a range of the last axis."""
        rows = self.kernel.rows
        if not rows:
            return self._pointwise()
        last = rows[-1]
        stores = [s for s in self._all_stmts() if isinstance(s, Store)]
        owned = last.size != 1 and all(_owns(s.index, last) for s in stores)
        scope = self._push(rows[:-1], 2 + len(rows[:-1]) if owned else 1 + len(rows[:-1]))
        body = self._push((last,), scope.indent + 1)
        self._stmts(self._all_stmts(), body)
        bounds = ("low", "high") if owned else None
        pragma = [f"{margin(scope.indent)}#pragma omp simd"] if owned else []
        inner = [*scope.lines, *pragma, *self._loop(last, body, scope.indent, bounds)]
        lines: list[str] = []
        base = 1
        if owned:
            size = self._size(last.size)
            base = 2
            lines = [
                f"  {self._parallel(rows, 1)}",
                "  for (int64_t chunk = 0; chunk < 4; ++chunk) {",
                f"    const int64_t low = chunk * {size} / 4, high = (chunk + 1) * {size} / 4;",
            ]
        for depth, var in enumerate(rows[:-1]):
            lines.append(f"{margin(base + depth)}{self._for(var)} {{")
        lines += inner
        lines += [f"{margin(base + depth)}}}" for depth in reversed(range(len(rows) - 1))]
        return [*lines, "  }"] if owned else lines

    # ---- loops and pragmas ------------------------------------------------------------------

    def _for(self, var: Var, bounds: tuple[str, str] | None = None) -> str:
        low, high = bounds or ("0", self._size(var.size))
        name = var.key
        return f"for (int64_t {name} = {low}; {name} < {high}; ++{name})"

    def _loop(
        self, var: Var, body: Scope, indent: int, bounds: tuple[str, str] | None = None
    ) -> list[str]:
        return [f"{margin(indent)}{self._for(var, bounds)} {{", *body.lines, f"{margin(indent)}}}"]

    def _simd(self, accumulators: Sequence[Accumulate | Running]) -> str:
        clauses = {"sum": "+", "prod": "*", "any": "|", "all": "&", "max": "max", "min": "min"}
        parts = [f"reduction({clauses[s.op]}: {local(s.name)})" for s in accumulators]
        parts += [f"reduction(|: nan_{s.name})" for s in accumulators if s.name in self.flagged]
        return " ".join(["#pragma omp simd", *parts])

    def _parallel(self, loops: Sequence[Var], collapse: int, simd: bool = False) -> str:
        cost = self._cost()
        work = product([*(v.size for v in loops), cost])
        if isinstance(work, int) and work < PARALLEL_COST:
            return "#pragma omp simd" if simd else ""
        text = "#pragma omp parallel for" + (" simd" if simd else "")
        if collapse > 1:
            text += f" collapse({collapse})"
        text += " schedule(static)"
        if not isinstance(work, int):
            text += f" if ({self._size(work)} >= {PARALLEL_COST})"
        return text

    def _cost(self) -> int:
        seen: set[int] = set()
        total = 1
        for expr in self.kernel.exprs():
            for e in ir.walk(expr, seen):
                row = SCALAR_OPS.get(e.op)
                total += row.cost // 4 if row else 0
        return total


def _positions_by_value(kernel: Kernel) -> Kernel:
    """The place of an extremum as the first place whose value equals it: both sweeps vectorize."""
    phases: list[Phase] = []
    for phase in kernel.phases:
        sought = [
            s for s in phase.stmts
            if isinstance(s, Accumulate) and s.position is not None and s.dtype != torch.bool
        ]  # fmt: skip
        best = {s: replace(s, name=f"best_{s.name}", op=s.op[3:], position=None) for s in sought}
        phases.append(replace(phase, stmts=tuple(best.get(s, s) for s in phase.stmts)))
        if sought:
            phases.append(Phase("inner", tuple(_first_place(s, best[s].name) for s in sought)))
    return replace(kernel, phases=tuple(phases))


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


def _result(stmt: Accumulate) -> str:
    return f"at_{stmt.name}" if stmt.op.startswith("arg") else local(stmt.name)


def _owns(index: Index, var: Var) -> bool:
    """Whether distinct values of `var` always store to distinct places of the last axis."""
    hidden = any(
        var in _deep_variables(atom) for atom, _ in index.terms if not isinstance(atom, Var)
    )
    return index.coefficient(var) == 1 and not hidden


def _deep_variables(atom: Var | FloorDiv | Mod | Indirect) -> set[Var]:
    if isinstance(atom, Indirect):
        return {v for e in ir.walk(atom.expr) for i in ir.indices_of(e) for v in i.variables()}
    return atom.value.variables() if isinstance(atom, (FloorDiv, Mod)) else {atom}


def _tracks_nan(stmt: Accumulate | Running) -> bool:
    return stmt.op in ("max", "min") and stmt.dtype.is_floating_point
