"""The statements of a kernel at a thread's points: their indices, and accesses of adjacent ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from dicp.codegen.emitter import Emitter
from dicp.codegen.spelling import DRAWN, drawn, drawn_alone, philox_shift
from dicp.codegen.types import STORAGE_TYPE, VALUE_TYPE
from dicp.codegen.values import margin
from dicp.gpu.index_width import Reaches
from dicp.gpu.random_groups import split
from dicp.gpu.threads import CrossingThreads, PointThreads, RowThreads
from dicp.loop.ir.access import Access, is_along, unconditional_reads
from dicp.loop.ir.expr import Expr, IndexValue, Ref
from dicp.loop.ir.index import Index, Size, Var, variable
from dicp.loop.ir.kernel import Kernel, Stmt, Store

ATOMIC = {"sum": "d_atomic_sum", "prod": "d_atomic_prod", "max": "d_atomic_max",
          "min": "d_atomic_min"}  # fmt: skip

WRAPPING = {
    "add": "({0})((u{0}){1} + (u{0}){2})",
    "sub": "({0})((u{0}){1} - (u{0}){2})",
    "mul": "({0})((u{0}){1} * (u{0}){2})",
    "square": "({0})((u{0}){1} * (u{0}){1})",
    "fma": "({0})((u{0}){1} * (u{0}){2} + (u{0}){3})",
    "neg": "({0})(0 - (u{0}){1})",
    "abs": "({0})({1} < 0 ? 0 - (u{0}){1} : (u{0}){1})",
}
"""Rows for integers, which wrap around: the type, then the operands. A compiler may assume that no
signed number overflows, and takes `x + 1 > x` for true; NVRTC has no option against that."""


class Points(Emitter):
    """Shared by all kinds of kernels; a subclass maps threads to points."""

    block: PointThreads | CrossingThreads | RowThreads

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.preloaded: dict[Access, str] = {}
        """Reads whose elements stay in registers for all phases, and the array of each."""
        self.adjacent: tuple[Var, Var, int] | None = None
        """In a loop over lanes: the loop of its points, the first of them, their count."""
        self.reaches = Reaches()
        self._arrays = 0

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.block.threads

    def lines(self) -> list[str]:
        """The body of the kernel."""
        raise NotImplementedError

    @property
    def together(self) -> bool:
        """Whether threads of a block exchange values or wait for each other."""
        return False

    def axes(self) -> dict[str, tuple[Size, int]]:
        """The axes that blocks divide, the last of which runs fastest, and points of a block."""
        raise NotImplementedError

    def inner_axes(self) -> dict[str, tuple[Size, int]]:
        """The axes that the threads of a block divide."""
        return {}

    def block_axes(self) -> list[str]:
        """C++ of the block's number along each axis."""
        counts = [self._blocks(size, block) for size, block in self.axes().values()]
        below = [" * ".join(counts[k + 1 :]) for k in range(len(counts))]
        texts = [f"(d_index)blockIdx.x / ({b})" if b else "(d_index)blockIdx.x" for b in below]
        return [f"{t} % ({counts[k]})" if k else t for k, t in enumerate(texts)]

    def blocks(self) -> str:
        """C++ of the number of blocks."""
        return " * ".join(self._blocks(size, block) for size, block in self.axes().values())

    def _blocks(self, size: Size, block: int) -> str:
        if isinstance(size, int):
            return str(-(-size // block))
        return self.size(size) if block == 1 else f"(({self.size(size)} + {block - 1}) / {block})"

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
            if isinstance(stmt, Store) and not stmt.op and is_along(stmt.index, last):
                name = self._array_name()
                place = self.index(stmt.index.substitute(at_first))
                scope.lines.append(f"{pad}{self._element(stmt.ref)} {name}[{width}];")
                ends.append(f"{pad}d_store<{width}>({self.arg(stmt.ref)} + ({place}), {name});")
                self.lane_lvalues[stmt.ref, stmt.index] = f"{name}[lane]"
        self.adjacent = last, first, width
        body = self.push((last,), indent + 1)
        body.lines.append(f"{margin(indent + 1)}const d_index {last.key} = {first.key} + lane;")
        self.statements(stmts)
        self.pop(body)
        self.adjacent = None
        self.pop(scope)
        self.staged.clear()
        self.lane_lvalues.clear()
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

    # ---- values ---------------------------------------------------------------------------------

    def spelled(self, expr: Expr, args: list[str]) -> str:
        if expr.dtype in (torch.int32, torch.int64) and expr.op in WRAPPING:
            return WRAPPING[expr.op].format(VALUE_TYPE[expr.dtype], *args)
        return super().spelled(expr, args)

    # ---- random numbers -------------------------------------------------------------------------

    def text(self, expr: Expr, guard: str) -> str:
        variant = self.variants.get(expr)
        if variant is not None and variant.name == "word":
            sign = ">=" if expr.op == "ge" else "<"
            return f"{self._drawn('philox_word', expr.args[0], guard)} {sign} {variant.number}u"
        if expr.op in DRAWN:
            return self._drawn(expr.op, expr, guard)
        return super().text(expr, guard)

    def _drawn(self, op: str, number: Expr, guard: str) -> str:
        shared = "" if guard else self._shared_calls(number)
        if shared:
            each = 1 << philox_shift(number)
            return drawn(op, number.dtype, f"{shared}.at[lane / {each}]", f"lane % {each}")
        return drawn_alone(op, number, self.operands(number, guard))

    def _shared_calls(self, number: Expr) -> str:
        """An array of the Philox calls that adjacent points share, made before the loop over them.

        Empty where they share none.
        """
        each, at = 1 << philox_shift(number), number.args[2]
        if self.adjacent is None or self.adjacent[2] % each or each == 1:
            return ""
        last, first, width = self.adjacent
        assert isinstance(at, IndexValue)
        found = split(at.index, each)
        if found is None or found[1] != last or not at.index.is_affine:
            return ""
        self.reaching(at.index)
        key, scope = ("calls", number), self.scopes[-2]
        if key not in scope.values:
            name = scope.values[key] = self._array_name()
            seed, site = (self.value(arg) for arg in number.args[:2])
            counter = f"({self.index(found[0])} + {first.key} / {each})"
            calls, args = f"calls<{width // each}>", f"{seed}, {site}, {counter}"
            self.line(f"const d_{calls} {name} = d_philox_{calls}({args});", -2)
        return scope.values[key]

    # ---- indices --------------------------------------------------------------------------------

    def reaching(self, index: Index) -> None:
        self.reaches.note(index)
