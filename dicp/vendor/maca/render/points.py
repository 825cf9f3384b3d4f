"""The statements of a kernel at a thread's points: their indices, and accesses of adjacent ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dicp.codegen.emitter import Emitter
from dicp.codegen.types import STORAGE_TYPE
from dicp.codegen.values import margin
from dicp.gpu.index_width import Reaches
from dicp.loop.ir.access import Access, is_along, unconditional_reads
from dicp.loop.ir.expr import Ref
from dicp.loop.ir.index import Index, Var, variable
from dicp.loop.ir.kernel import Kernel, Stmt, Store

ATOMIC = {"sum": "d_atomic_sum", "prod": "d_atomic_prod", "max": "d_atomic_max",
          "min": "d_atomic_min"}  # fmt: skip


class Points(Emitter):
    """Shared by all kinds of kernels; a subclass maps threads to points."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.preloaded: dict[Access, str] = {}
        """Reads whose elements stay in registers for all phases, and the array of each."""
        self.reaches = Reaches()
        self._arrays = 0

    def lines(self) -> list[str]:
        """The body of the kernel."""
        raise NotImplementedError

    # ---- loops of points ------------------------------------------------------------------------

    def _digits(self, flat: str, loops: Sequence[Var], last: str = "") -> list[str]:
        """Declares the index of each loop: `flat` is a mixed-radix number with these digits."""
        names = [var.key for var in loops]
        names[-1:] = [last] if last else names[-1:]
        return [
            f"const d_index {name} = {self.digit(flat, loops, at)};"
            for at, name in enumerate(names)
        ]

    def _points(
        self, stmts: Iterable[Stmt], loops: Sequence[Var], flat: str, width: int, indent: int
    ) -> list[str]:
        """The statements at the `width` adjacent points from number `flat` on."""
        stmts = tuple(stmts)
        if width == 1:
            scope = self.push(loops, indent)
            scope.lines += [margin(indent) + text for text in self._digits(flat, loops)]
            self.statements(stmts)
            self.pop(scope)
            return scope.lines
        return self._adjacent(stmts, loops, flat, width, indent)

    def _adjacent(
        self, stmts: tuple[Stmt, ...], loops: Sequence[Var], flat: str, width: int, indent: int
    ) -> list[str]:
        *outer, last = loops
        first = self.kernel.new_variable(last.size)  # the first of the adjacent points
        pad = margin(indent)
        scope = self.push((*outer, first), indent)
        scope.lines += [pad + text for text in self._digits(flat, loops, first.key)]
        at_first = {last: variable(first)}
        reads = [a for a in unconditional_reads(stmts) if is_along(a[1], last)]
        for ref, index in reads:
            if (ref, index) in self.preloaded:
                self.staged[ref, index] = f"{self.preloaded[ref, index]}[step * {width} + lane]"
                continue
            place = self.index(index.substitute(at_first))
            scope.lines += self._load(ref, index, place, width, pad)
        ends = []
        for stmt in stmts:
            if isinstance(stmt, Store) and is_along(stmt.index, last):
                name = self._array_name()
                place = self.index(stmt.index.substitute(at_first))
                scope.lines.append(f"{pad}{self._element(stmt.ref)} {name}[{width}];")
                ends.append(f"{pad}d_store<{width}>({self.arg(stmt.ref)} + ({place}), {name});")
                self.lane_places[stmt.ref, stmt.index] = f"{name}[lane]"
        body = self.push((last,), indent + 1)
        body.lines.append(f"{margin(indent + 1)}const d_index {last.key} = {first.key} + lane;")
        self.statements(stmts)
        self.pop(body)
        self.pop(scope)
        self.staged.clear()
        self.lane_places.clear()
        return [
            *scope.lines, f"{pad}#pragma unroll",
            f"{pad}for (int lane = 0; lane < {width}; ++lane) {{", *body.lines, f"{pad}}}", *ends,
        ]  # fmt: skip

    def _load(self, ref: Ref, index: Index, place: str, width: int, pad: str) -> list[str]:
        name = self._array_name()
        self.staged[ref, index] = f"{name}[lane]"
        return [
            f"{pad}{self._element(ref)} {name}[{width}];",
            f"{pad}d_load<{width}>({name}, {self.arg(ref)} + ({place}));",
        ]

    def _array_name(self) -> str:
        self._arrays += 1
        return f"e{self._arrays}"

    def _element(self, ref: Ref) -> str:
        return STORAGE_TYPE[ref.dtype]

    # ---- statements -----------------------------------------------------------------------------

    def _store(self, stmt: Store, value: str) -> str:
        if not stmt.op:
            return super()._store(stmt, value)
        place = f"{self.arg(stmt.ref)}, {self.index(stmt.index)}"
        return f"{ATOMIC[stmt.op]}({place}, ({self._element(stmt.ref)})({value}));"

    def _guarded(self, test: str, lines: list[str], indent: int) -> list[str]:
        """`lines` under the condition `test`, which may be empty."""
        pad = margin(indent)
        return [f"{pad}if ({test}) {{", *lines, f"{pad}}}"] if test else lines

    # ---- indices --------------------------------------------------------------------------------

    def reaching(self, index: Index) -> None:
        self.reaches.note(index)
