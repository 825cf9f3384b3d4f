"""Loops around the emitter's statements: bounds, pragmas, teams of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

import torch

from dicp.codegen.types import STORAGE_TYPE, VALUE_TYPE
from dicp.codegen.values import Scope, margin
from dicp.loop.ir import expr as ir
from dicp.loop.ir.access import Access
from dicp.loop.ir.expr import Read
from dicp.loop.ir.index import FloorDiv, Index, Mod, Size, Var, is_below
from dicp.loop.ir.kernel import Kernel, Reduce, Stmt
from dicp.vendor.cpu.form import LINE_BYTES, HostForm, Strip, Team
from dicp.vendor.cpu.render.conversions import Block, Bounds, Converted
from dicp.vendor.cpu.render.strips import Strips

CHUNKS = "d_chunks()"
"""Into how many chunks threads divide a long reduction, computed when the kernel runs."""
F = TypeVar("F", bound=HostForm)


class Loops(Strips, Generic[F]):
    """Shared by the writers of all forms; a subclass per form writes its loop nest."""

    def __init__(self, kernel: Kernel, form: F) -> None:
        super().__init__(kernel)
        self.form = form
        self._steps: dict[int, str] = {}
        """Step between elements -> the variable that hides it from the compiler."""
        self._stack_bytes = 0
        self.workspace_bytes = 0
        """Bytes of workspace that each thread needs."""

    # ---- stack arrays and workspace -------------------------------------------------------------

    def _array(self, dtype: torch.dtype, name: str, count: int, stored: bool = False) -> str:
        """Declares a per-thread array: on the stack, or in the workspace once the stack is full."""
        ctype = (STORAGE_TYPE if stored else VALUE_TYPE)[dtype]
        size = -(-count * max(dtype.itemsize, 1 if stored else 4) // LINE_BYTES) * LINE_BYTES
        if self._stack_bytes + size <= self.form.stack_bytes:
            self._stack_bytes += size
            return f"{ctype} {name}[{count}];"
        place = f"d_thread_workspace(workspace, workspace_bytes) + {self.workspace_bytes}"
        self.workspace_bytes += size
        return f"{ctype}* const {name} = ({ctype}*)({place});"

    def _allocated(self, ctype: str, name: str, count: str) -> str:
        """Declares memory shared by all threads and freed at the end of the scope."""
        return (
            f"const d_workspace<{ctype}> memory_{name}({count}, status); "
            f"{ctype}* const {name} = memory_{name}.data; if (!{name}) return;"
        )

    def workspace(self) -> list[str]:
        """The first lines of a kernel: they allocate its workspace, if it needs one."""
        if not self.workspace_bytes:
            return []
        return [
            f"  constexpr int64_t workspace_bytes = {self.workspace_bytes};",
            "  " + self._allocated("char", "workspace", "workspace_bytes * d_threads()"),
        ]

    # ---- conditions -----------------------------------------------------------------------------

    def selector(self, condition: str, place: int) -> str:
        """A condition that the innermost loop does not change, as an integer that the compiler does
        not know: g++ 12 vectorizes no loop that selects by more than a few such booleans."""
        known = self.places.get(condition, place)
        if known == place or place < len(self.scopes) - 1:
            return condition
        return self.once(("selector", condition), f"d_opaque({condition})", torch.int32, known)

    def _lvalue(self, item: Read, guard: str = "") -> str:
        """An element; where an outer loop decides that it is not read, its address is the tensor's:
        loads that a mask leaves out take hundreds of cycles at an address without memory."""
        innermost = len(self.scopes) - 1
        terms = {t: self._depth_of(self.needs_of_index(Index(0, (t,)))) for t in item.index.terms}
        inner = tuple(t for t in item.index.terms if terms[t] == innermost)
        outer = tuple(t for t in item.index.terms if terms[t] < innermost)
        known = self.places.get(guard, innermost)
        moves = inner and all(isinstance(atom, Var) for atom, _ in inner)
        if known == innermost or not moves or (item.ref, item.index) in self.staged:
            return super()._lvalue(item, guard)
        depth = max([known, *(terms[t] for t in outer)])
        tensor, values = self.arg(item.ref), self.scopes[depth].values
        start = self.index(Index(item.index.const, outer), guard)
        text = f"{guard} ? {tensor} + ({start}) : {tensor}"
        if text not in values:
            values[text] = self.fresh()
            ctype = STORAGE_TYPE[item.ref.dtype]
            self.line(f"const {ctype}* const {values[text]} = {text};", depth)
        return f"{values[text]}[{self.index(Index(0, inner), guard)}]"

    # ---- indices --------------------------------------------------------------------------------

    def index(self, index: Index, guard: str = "") -> str:
        hidden = [term for term in index.terms if term in self.form.hidden]
        if not hidden:
            return super().index(index, guard)
        texts = []
        for loop, step in hidden:
            assert isinstance(loop, Var) and isinstance(step, int)
            name = self._steps.setdefault(step, f"step{len(self._steps)}")
            texts.append(f"{name} * {self.variable(loop)}")
        rest = Index(index.const, tuple(term for term in index.terms if term not in hidden))
        return " + ".join([*texts, super().index(rest, guard)])

    def divided(self, atom: FloorDiv | Mod, dividend: str, guard: str) -> str:
        """A quotient or remainder, in 32 bits where these suffice: vectors have no 64-bit products
        that a division by a constant could become."""
        fits = is_below(atom.value, torch.iinfo(torch.int32).max)
        if not fits or not isinstance(atom.divisor, int):
            return super().divided(atom, dividend, guard)
        sign = "/" if isinstance(atom, FloorDiv) else "%"
        return f"(int64_t)((uint32_t)({dividend}) {sign} {atom.divisor}u)"

    def hidden_steps(self) -> list[str]:
        """The declarations of the steps that are hidden from the compiler."""
        return [f"  const int64_t {name} = d_opaque({n});" for n, name in self._steps.items()]

    def lines(self) -> list[str]:
        """The body of the kernel's function after its arguments."""
        raise NotImplementedError

    def _for_header(self, var: Var, bounds: Bounds | None = None) -> str:
        low, high = bounds or ("0", self.size(var.size))
        name = var.key
        return f"for (int64_t {name} = {low}; {name} < {high}; ++{name})"

    def _loop(self, var: Var, body: Scope, indent: int, bounds: Bounds | None = None) -> list[str]:
        return [
            f"{margin(indent)}{self._for_header(var, bounds)} {{",
            *body.lines,
            f"{margin(indent)}}}",
        ]

    def _inner_loop(
        self, stmts: Sequence[Stmt], var: Var, indent: int, pragma: Sequence[str],
        bounds: Bounds | None = None, emit: Callable[[], None] | None = None,
        size: Size | None = None,
    ) -> list[str]:  # fmt: skip
        """The loop over `var` with `pragma`, in blocks where elements of `stmts` are converted or
        gathered before it. `emit` emits its body, by default `stmts`; `size`: its iterations."""
        emit = emit or partial(self.statements, stmts)
        block = self._converted_block(stmts, var, bounds, size)
        if block is None:
            body = self.push((var,), indent + 1)
            emit()
            self.pop(body)
            return [*pragma, *self._loop(var, body, indent, bounds)]
        around = self.push((), indent + 1)
        converted = self.begin_conversions(stmts, block)
        self._load_gathered(self.gathers(stmts, var), block, indent + 1)
        body = self.push((var,), indent + 2)
        emit()
        self.pop(body)
        self.end_conversions()
        self.pop(around)
        lines = [*("  " + line for line in pragma),
                 *self._loop(var, body, indent + 1, ("start", "end"))]  # fmt: skip
        lines = lines if body.lines else []  # copies of whole blocks are calls
        return self._in_converted_blocks(block, around.lines, [converted], lines, indent)

    def _load_gathered(self, found: Sequence[Access], block: Block, indent: int) -> None:
        """Emits the loop that loads these elements of a block; the loop after it reads them."""
        if not found:
            return
        var, around, arrays = block.var, self.scopes[-1], {}
        body = self.push((var,), indent + 1)
        for ref, index in found:
            value, name = self.loaded(ir.read(ref, index), ""), self.array_name("gathered")
            arrays[ref, index] = element = f"{name}[{var.key} - start]"
            self.line(f"{element} = {value};")
            around.lines.append(f"{margin(indent)}{VALUE_TYPE[ref.dtype]} {name}[{block.size}];")
        self.pop(body)
        around.lines += self._loop(var, body, indent, ("start", "end"))
        self.read_from.update(arrays)

    def _converted_block(
        self, stmts: Sequence[Stmt], var: Var, bounds: Bounds | None, size: Size | None
    ) -> Block | None:
        """The blocks of a loop whose elements are converted or gathered, if it is one."""
        sizes, size = self.form.converted, var.size if bounds is None else size
        few = isinstance(size, int) and size < sizes.fewest
        if few or not (self.is_converted(stmts, var) or self.gathers(stmts, var)):
            return None
        bounds = bounds or ("0", self.size(var.size))
        if isinstance(size, int) and size <= sizes.single:
            return Block(var, bounds, size, is_even=True, is_single=True)
        even = None if self._folds(stmts) or size is None else sizes.even(size)
        return Block(var, bounds, even or sizes.in_cache, is_even=even is not None)

    def _folds(self, stmts: Sequence[Stmt]) -> bool:
        """Whether a loop over `stmts` folds vectors at its end, as often as there are blocks."""
        return any(isinstance(s, Reduce) for s in stmts)

    def _in_converted_blocks(
        self, block: Block, around: Sequence[str], converted: Sequence[Converted],
        loop: Sequence[str], indent: int,
    ) -> list[str]:  # fmt: skip
        """The blocks of a loop: `around`, conversions, and the `loop` over a block between them."""
        (low, high), step, pad = block.bounds, block.size, margin(indent + 1)
        head = f"for (int64_t start = {low}; start < {high}; start += {step}) {{"
        if block.is_single:
            head = f"{{ const int64_t start = {low};"
        end = f"start + {step}" if block.is_even else block_end("start", step, high)
        return [
            margin(indent) + head,
            f"{pad}const int64_t end = {end}, {block.var.key} = start;",
            *around, *(pad + text for each in converted for text in each.before),
            *loop, *(pad + text for each in converted for text in each.after),
            f"{margin(indent)}}}",
        ]  # fmt: skip

    def _strips(
        self, strips: Sequence[Strip], var: Var, indent: int, pragma: list[str],
        outermost: bool = False,
    ) -> list[str]:  # fmt: skip
        """The loop over `var` in ranges, each with `pragma`; whole cache lines of the `outermost`
        loop are divided by the form's team."""
        lines: list[str] = []
        for strip in strips:
            if strip.lanes:
                own = self._by_cache_lines(strip, var, indent)
                lines += self._divided(self.form.team, own) if outermost else own
                continue
            stmts = strip.range.stmts
            low, high = strip.range.low, strip.range.high
            bounds, size = (self.size(low), self.size(high)), high - low
            if outermost and self._converted_block(stmts, var, bounds, size):
                simd = [f"{margin(indent)}#pragma omp simd"]
                own = self._inner_loop(stmts, var, indent, simd, bounds, size=size)
                lines += self._divided(self.form.team, own)
            else:
                lines += self._inner_loop(stmts, var, indent, pragma, bounds, size=size)
        return lines

    def _scalar_rows(self, indent: int) -> list[str]:
        """What keeps the compiler from vectorizing the loops around, where the form asks for it."""
        return [f'{margin(indent)}asm("");  // rows are not vectorized'] * self.form.scalar_rows

    def _outer_loops(self, loops: Sequence[Var], inner: list[str], team: Team | None) -> list[str]:
        return self._divided(team, self._nest(loops, inner, 1))

    def _divided(self, team: Team | None, loop: list[str]) -> list[str]:
        """`loop`, divided by the team if there is one; after non-temporal stores, each thread
        executes a store fence, which barriers need not include."""
        if not self.form.non_temporal:
            return loop if team is None else [f"  {self._team_loop(team)}", *loop]
        fence = "  d_store_fence();"
        if team is None:
            return [*loop, fence]
        head = f"  #pragma omp parallel{self._team_condition(team)}"
        divided = f"  #pragma omp {_team_for(team)} nowait"
        return [head, "  {", divided, *loop, fence, "  }"]

    def _team_loop(self, team: Team, simd: bool = False) -> str:
        """The pragma of a loop that a new team divides."""
        return f"#pragma omp parallel {_team_for(team, simd)}{self._team_condition(team)}"

    def _team_condition(self, team: Team) -> str:
        return "" if team.work is None else f" if ({self.size(team.work)} >= {team.least})"

    def _nest(
        self, loops: Sequence[Var], inner: list[str], indent: int,
        first_bounds: Bounds | None = None,
    ) -> list[str]:  # fmt: skip
        """`inner` inside `loops`; `first_bounds` limits the first loop to a part of its range."""
        lines = []
        for depth, var in enumerate(loops):
            bounds = first_bounds if depth == 0 else None
            lines.append(f"{margin(indent + depth)}{self._for_header(var, bounds)} {{")
        closing = [f"{margin(indent + depth)}}}" for depth in reversed(range(len(loops)))]
        return [*lines, *inner, *closing]


def _team_for(team: Team, simd: bool = False) -> str:
    collapse = f" collapse({team.collapse})" if team.collapse > 1 else ""
    return f"for{' simd' if simd else ''}{collapse} schedule(static)"


def half_vectors(wanted: bool) -> str:
    """The clause of a vectorized loop that takes half a vector of 16-bit floats at a time."""
    return " simdlen(16)" if wanted else ""


def block_end(start: str, block: int | str, size: str) -> str:
    """C++ of the end of a block that begins at `start`; the last block ends at `size`."""
    return f"{start} + {block} < {size} ? {start} + {block} : {size}"
