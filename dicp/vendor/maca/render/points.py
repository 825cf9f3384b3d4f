"""The statements of a kernel at a thread's points: their indices, and accesses of adjacent ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dicp.codegen.emitter import Emitter, margin
from dicp.codegen.types import STORAGE_TYPE
from dicp.gpu.index_width import NARROW_LIMIT, reach
from dicp.loop.ir.access import Access, is_along, unconditional_reads
from dicp.loop.ir.expr import Expr, IndexValue, Ref
from dicp.loop.ir.index import Atom, FloorDiv, Index, Mod, Size, Var, product, variable
from dicp.loop.ir.kernel import Kernel, ScratchStore, Stmt, Store
from dicp.serialize import encode_size

ATOMIC = {"sum": "d_atomic_sum", "prod": "d_atomic_prod", "max": "d_atomic_max",
          "min": "d_atomic_min"}  # fmt: skip
FIRST_POINT = 1000
"""Position of the variable that is the first point of an access."""


class Points(Emitter):
    """Shared by all kinds of kernels; a subclass maps threads to points."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.saves = {s.name: s for s in self.kernel.stmts() if isinstance(s, ScratchStore)}
        self.preloaded: dict[Access, str] = {}
        """Reads whose elements stay in registers for all phases, and the array of each."""
        self.reaches: dict[int | str, None] = {}
        """Bounds of indices that are divided or used as values, if they may need 64 bits."""
        self._arrays = 0

    def lines(self) -> list[str]:
        """The body of the kernel."""
        raise NotImplementedError

    # ---- loops of points ------------------------------------------------------------------------

    def _digits(self, flat: str, loops: Sequence[Var], last: str = "") -> list[str]:
        """Declares the index of each loop: `flat` is a mixed-radix number with these digits."""
        lines = []
        for at, var in enumerate(loops):
            below = product(v.size for v in loops[at + 1 :])
            text = flat if below == 1 else f"{flat} / {self._size(below)}"
            if at > 0:
                text = f"({text}) % {self._size(var.size)}" if below != 1 else (
                    f"{text} % {self._size(var.size)}"
                )  # fmt: skip
            name = last if last and at == len(loops) - 1 else var.key
            lines.append(f"const d_index {name} = {text};")
        return lines

    def _points(
        self, stmts: Iterable[Stmt], loops: Sequence[Var], flat: str, width: int, indent: int
    ) -> list[str]:
        """The statements at the `width` adjacent points from number `flat` on."""
        stmts = tuple(stmts)
        if width == 1:
            scope = self._push(loops, indent)
            scope.lines += [margin(indent) + text for text in self._digits(flat, loops)]
            self._stmts(stmts, scope)
            self._pop(scope)
            return scope.lines
        return self._adjacent(stmts, loops, flat, width, indent)

    def _adjacent(
        self, stmts: tuple[Stmt, ...], loops: Sequence[Var], flat: str, width: int, indent: int
    ) -> list[str]:
        *outer, last = loops
        first = Var(FIRST_POINT, last.size)
        pad = margin(indent)
        scope = self._push((*outer, first), indent)
        scope.lines += [pad + text for text in self._digits(flat, loops, first.key)]
        at_first = {last: variable(first)}
        reads = [a for a in unconditional_reads(stmts) if is_along(a[1], last)]
        for ref, index in reads:
            if (ref, index) in self.preloaded:
                self.staged[ref, index] = f"{self.preloaded[ref, index]}[step * {width} + lane]"
                continue
            place = self._index(index.substitute(at_first))
            scope.lines += self._load(ref, index, place, width, pad)
        ends = []
        for stmt in stmts:
            if isinstance(stmt, Store) and is_along(stmt.index, last):
                name = self._array_name()
                place = self._index(stmt.index.substitute(at_first))
                scope.lines.append(f"{pad}{self._element(stmt.ref)} {name}[{width}];")
                ends.append(f"{pad}d_store<{width}>({self._arg(stmt.ref)} + ({place}), {name});")
                self.lined[stmt.ref, stmt.index] = f"{name}[lane]"
        body = self._push((last,), indent + 1)
        body.lines.append(f"{margin(indent + 1)}const d_index {last.key} = {first.key} + lane;")
        self._stmts(stmts, body)
        self._pop(body)
        self._pop(scope)
        self.staged.clear()
        self.lined.clear()
        return [
            *scope.lines, f"{pad}#pragma unroll",
            f"{pad}for (int lane = 0; lane < {width}; ++lane) {{", *body.lines, f"{pad}}}", *ends,
        ]  # fmt: skip

    def _load(self, ref: Ref, index: Index, place: str, width: int, pad: str) -> list[str]:
        name = self._array_name()
        self.staged[ref, index] = f"{name}[lane]"
        return [
            f"{pad}{self._element(ref)} {name}[{width}];",
            f"{pad}d_load<{width}>({name}, {self._arg(ref)} + ({place}));",
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
        place = f"{self._arg(stmt.ref)}, {self._index(stmt.index)}"
        return f"{ATOMIC[stmt.op]}({place}, ({self._element(stmt.ref)})({value}));"

    def _guarded(self, test: str, lines: list[str], indent: int) -> list[str]:
        """`lines` under the condition `test`, which may be empty."""
        pad = margin(indent)
        return [f"{pad}if ({test}) {{", *lines, f"{pad}}}"] if test else lines

    # ---- indices --------------------------------------------------------------------------------

    def text_of(self, size: Size) -> str:
        return self._size(size)

    def _text(self, expr: Expr, guard: str, guard_depth: int) -> str:
        if isinstance(expr, IndexValue):
            self._reaching(expr.index)
        return super()._text(expr, guard, guard_depth)

    def _atom(self, atom: Atom, guard: str, guard_depth: int) -> str:
        if isinstance(atom, (FloorDiv, Mod)):
            self._reaching(atom.value)
        return super()._atom(atom, guard, guard_depth)

    def _reaching(self, index: Index) -> None:
        furthest = reach(index)
        if not isinstance(furthest, int) or furthest >= NARROW_LIMIT:
            self.reaches[encode_size(furthest)] = None
