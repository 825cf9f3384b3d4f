"""Emits Triton code: the values of a kernel on tiles, their masks, loads and stores.

In: a kernel and the axes of its tile, of which there are at most two, each of merged loops. Out:
lines of Triton code. A value's place are the axes along which it varies: its shape has an axis's
block along those, 1 along others. What is computed once is decided in `dicp.codegen.values`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dicp.codegen.values import Needs, Scope, Values, local
from dicp.gpu.index_width import Reaches
from dicp.gpu.random_groups import split
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Checked, Convert, Expr, IndexValue, Named, Read
from dicp.loop.ir.index import FloorDiv, Index, Indirect, Mod, Size, Var, product
from dicp.loop.ir.kernel import Kernel, Let, Reduce, Scan, ScratchStore, Store, kernel_name
from dicp.loop.ir.ops import INDEX_CHECKS, PHILOX_NEIGHBOURS
from dicp.loop.program import RenderedKernel
from dicp.vendor.triton.render.spelling import (
    ATOMIC,
    ELEMENT,
    SHARED,
    VALUE_TYPE,
    VARIANTS,
    conversion,
    literal,
    operator,
)

Axes = frozenset[str]
EVERYWHERE: Axes = frozenset()


@dataclass(frozen=True)
class Axis:
    """One axis of the tile: loops merged into one index, cut into blocks."""

    name: str
    loops: tuple[Var, ...]
    block: int
    dim: int
    cut: bool = False
    """Whether each program loops over one part of the axis, whose last block must be masked."""

    @property
    def size(self) -> Size:
        return product(v.size for v in self.loops)

    @property
    def masked(self) -> bool:
        """Whether the last block reaches past the end."""
        size = self.size
        return self.cut or not isinstance(size, int) or size == 0 or size % self.block != 0

    @property
    def block_name(self) -> str:
        return f"{self.name.upper()}BLOCK"

    @property
    def index(self) -> str:
        return f"{self.name}i"

    @property
    def mask(self) -> str:
        return f"{self.name}m"


class Emitter(Values[Axes]):
    """Emits the code of one kernel."""

    DIVIDE = "//"
    MARGIN = "    "
    VALUE_TYPE = VALUE_TYPE
    VARIANTS, SHARED = VARIANTS, SHARED

    def __init__(
        self, kernel: Kernel, axes: Sequence[Axis], limited: Mapping[Store, int],
        looped: str = "",
    ) -> None:  # fmt: skip
        super().__init__(kernel)
        self.axes = {a.name: a for a in axes}
        self.limited = limited
        """Stores, and the most adjacent elements of one that a thread may store at once."""
        self.looped = looped
        """The axis over whose blocks the kernel loops; empty if each is one block."""
        self.level: Axes = frozenset(self.axes)
        """The axes at whose points the current statements run."""
        self.axis_of = {v: a.name for a in axes for v in a.loops}
        self.reaches = Reaches()
        self.scopes = [Scope(1)]
        for axis in axes:
            self.places[axis.index] = self.places[axis.mask] = frozenset((axis.name,))

    def rendered(
        self, body: str, distinct: object, launch: Mapping[str, Any], whole: bool
    ) -> RenderedKernel:
        """The kernel with the text `body`, and with a name of its own for each text and `distinct`.

        launch: the grid, the axes and what they need. whole: whether the reduced axis is one block.
        """
        given = {
            **launch,
            "elements": [ELEMENT[r.dtype] for r in self.args],
            "checks": any(kind in INDEX_CHECKS for kind, _ in self.sites),
            "whole": whole,
            "reaches": list(self.reaches),
        }
        name = kernel_name(self.kernel.origins, f"{body} {distinct}")
        return RenderedKernel(
            name, body, tuple(self.args), tuple(self.symbols), self.kernel, tuple(self.sites),
            {"launch": given},
        )  # fmt: skip

    # ---- shapes -------------------------------------------------------------------------------

    def shape(self, axes: Iterable[str]) -> str:
        """The shape of a value that varies along `axes`, as Triton writes it."""
        wanted = set(axes)
        blocks = [a.block_name if a.name in wanted else "1" for a in self.by_dim()]
        return f"[{', '.join(blocks)}]"

    def by_dim(self) -> list[Axis]:
        return sorted(self.axes.values(), key=lambda a: a.dim)

    def spread(self, text: str, have: Axes, want: Axes) -> str:
        """`text` broadcast along every axis of `want`."""
        return text if want <= have else f"tl.broadcast_to({text}, {self.shape(have | want)})"

    def mask(self, axes: Iterable[str], guard: str = "") -> str:
        """The mask of lanes within bounds along `axes` where `guard` holds; "" if all are."""
        wanted = set(axes)
        parts = [a.mask for a in self.by_dim() if a.name in wanted and a.masked]
        parts += [guard] if guard else []
        return " & ".join(parts)

    # ---- places -------------------------------------------------------------------------------

    def axes_in(self, expr: Expr) -> Axes:
        """The axes along which `expr` varies."""
        return self._axes_of(self.needs(expr))

    def axes_of_index(self, index: Index) -> Axes:
        return self._axes_of(self.needs_of_index(index))

    def _axes_of(self, needs: Needs) -> Axes:
        found = {self.axis_of[v] for v in needs.variables if v in self.axis_of}
        for named in needs.names:
            if named.op == "scratch":
                found |= self.axes_in(self.saves[named.name].value)
            else:
                found |= self.places.get(local(named.name), EVERYWHERE)
        return frozenset(found)

    def place_of(self, expr: Expr, guard: str) -> Axes:
        return self.axes_in(expr) | self.places.get(guard, EVERYWHERE)

    def depth_at(self, place: Axes) -> int:
        return len(self.scopes) - 1 if self.looped in place else 0

    def named(self, text: str, place: Axes, dtype: torch.dtype = torch.int64) -> str:
        """A name for `text`."""
        return self.once(text, text, dtype, place)

    def set(self, name: str, text: str, place: Axes) -> None:
        """Assigns `text` to a variable of this name."""
        self.line(f"{name} = {text}", self.depth_at(place))
        self.places[name] = place

    # ---- values -------------------------------------------------------------------------------

    @property
    def rematerializes(self) -> bool:
        return True

    def declaration(self, name: str, text: str, dtype: torch.dtype) -> str:
        return f"{name} = {text}"

    def literal(self, value: float | int | bool, dtype: torch.dtype) -> str:
        return literal(value, dtype)

    def named_value(self, expr: Named) -> str:
        return local(expr.name)

    def condition(self, test: Expr, guard: str) -> str:
        name = super().condition(test, guard)
        return self.named(name, EVERYWHERE, torch.bool) if test.op == "const" else name

    def index_value(self, index: Index, guard: str) -> str:
        if not index.terms and isinstance(index.const, int):
            return literal(index.const, torch.int64)
        return f"({self.index(index, guard)}).to(tl.int64)"

    def operands(self, expr: Expr, guard: str) -> list[str]:
        if expr.op.startswith("philox"):
            return self._draw(expr, guard)
        return super().operands(expr, guard)

    def text(self, expr: Expr, guard: str) -> str:
        variant = self.variants.get(expr)
        if variant is None or variant.name != "word":
            return super().text(expr, guard)
        number = expr.args[0]
        word = f"d.philox_word({', '.join(self._draw(number, guard))})"
        limit = f"tl.full([], {variant.number}, tl.uint32)"
        args = [self.named(word, self.axes_in(number)), limit]
        return operator(expr.op, torch.bool, torch.int64, args)

    def _draw(self, expr: Expr, guard: str) -> list[str]:
        """Seed and site of a random number, counter of its Philox call, and place in its words."""
        *key, at = expr.args
        assert isinstance(at, IndexValue)
        neighbours = PHILOX_NEIGHBOURS[expr.op, expr.dtype]
        shift = neighbours.bit_length() - 1
        found = split(at.index, neighbours)
        if found is not None:
            block, var = found
            along = self.variable(var)
            start = f"{self.index(block, guard)} + " if block.terms or block.const != 0 else ""
            counter = f"{start}({along} >> {shift})"
        else:
            along = self.index(at.index, guard)
            along = f"({along})" if self.axes_in(at) else f"tl.full([], {along}, INDEX)"
            counter = f"{along} >> {shift}"
        place = f"{along} & {neighbours - 1}"
        return [*(self.value(k, guard) for k in key), counter, place]

    def converted(self, text: str, expr: Convert) -> str:
        return conversion(text, expr.args[0].dtype, expr.dtype, ir.rounds(expr))

    def check(self, expr: Checked, args: list[str], guard: str) -> str:
        if expr.op in INDEX_CHECKS:
            message = repr(f"index out of range: {expr.origin or ''}")
            site = self.site(expr)
            active = self._active(expr, guard)
            return f"d.{expr.op}({args[0]}, {args[1]}, {active}, {site}, {message})"
        if not expr.dtype.is_floating_point:
            site = self.site(expr)
            args[1] = f"d.divisor({args[1]}, {self._active(expr, guard)}, {site})"
        return self.operator(expr, args)

    def _active(self, expr: Expr, guard: str) -> str:
        mask = self.mask(self.place_of(expr, guard), guard)
        return f"({mask})" if mask else literal(True, torch.bool)

    def spelled(self, expr: Expr, args: list[str]) -> str:
        return operator(expr.op, expr.dtype, expr.args[0].dtype, args)

    def read(self, item: Read, guard: str) -> str:
        index = self.index(item.index, guard)
        axes = self.place_of(item, guard)
        mask = self.mask(axes, guard)
        place = f"{self.arg(item.ref)} + {self._offset(index, self.axes_in(item), axes)}"
        hint = self.hint(item) if self.looped in axes else ""
        text = f"tl.load({place}, {mask}, other=0{hint})" if mask else f"tl.load({place}{hint})"
        if VALUE_TYPE[item.dtype] == "tl.float32" and item.ref.dtype != torch.float32:
            text += ".to(tl.float32)"
        return text

    def hint(self, item: Read) -> str:
        """The cache hint for a load in the loop, as a further argument of `tl.load`."""
        return ""

    def _offset(self, index: str, have: Axes, want: Axes) -> str:
        if want <= have:
            return f"({index})" if " " in index else index
        if not have:
            known = not any(c.isalpha() for c in index)
            index = f"tl.full([], {index}, INDEX)" if known else f"({index})"
        return self.spread(index, have, want)

    # ---- indices ------------------------------------------------------------------------------

    def reaching(self, index: Index) -> None:
        self.reaches.note(index)

    def indirect(self, atom: Indirect, guard: str) -> str:
        text = f"({self.value(atom.expr, guard)}).to(INDEX)"
        return self.named(text, self.place_of(atom.expr, guard))

    def divided(self, atom: FloorDiv | Mod, dividend: str, guard: str) -> str:
        axes = self.axes_of_index(atom.value) | self.places.get(guard, EVERYWHERE)
        sign = self.DIVIDE if isinstance(atom, FloorDiv) else "%"
        return self.named(f"({dividend}) {sign} {self.size(atom.divisor)}", axes)

    def variable(self, var: Var) -> str:
        axis = self.axes[self.axis_of[var]]
        return self.digit_of(axis.index, axis.loops, var, frozenset((axis.name,)))

    def digit_of(self, flat: str, loops: Sequence[Var], var: Var, axes: Axes) -> str:
        """The index of loop `var`, a digit of the mixed-radix number `flat`."""
        if len(loops) == 1:
            return flat
        return self.named(self.digit(flat, loops, loops.index(var)), axes)

    # ---- statements ---------------------------------------------------------------------------

    def define(self, stmt: Reduce | Scan | Let | ScratchStore, value: str) -> None:
        assert isinstance(stmt, Let), "reductions have writers of their own"
        self.set(local(stmt.name), value, self.axes_in(stmt.value))

    def store(self, stmt: Store) -> Callable[[], None]:
        value = self.value(stmt.value)
        return lambda: self._store(stmt, value)

    def _store(self, stmt: Store, value: str) -> None:
        index = self.index(stmt.index)
        have = self.axes_of_index(stmt.index)
        scattered = bool(stmt.op) or self.kernel.kind == "scatter"
        want = self.level if scattered else have | self.axes_in(stmt.value)
        offset = self._offset(index, have, want)
        value = f"d.to_bf16({value})" if stmt.ref.dtype == torch.bfloat16 else value
        mask = self.mask(want | have)
        tail = f", {mask}" if mask else ""
        if not stmt.op:
            if stmt in self.limited:
                widths = [1] * (len(self.axes) - 1) + [self.limited[stmt]]
                offset = f"tl.max_contiguous({offset}, {widths})"
            place = f"{self.arg(stmt.ref)} + {offset}"
            self.line(f"tl.store({place}, {value}{tail})", self.depth_at(want))
            return
        value = self.spread(value, self.places.get(value, EVERYWHERE), want)
        if stmt.op == "prod" and mask:  # masked lanes need a valid address, too
            offset = f"tl.where({mask}, {offset}, 0)"
        place = f"{self.arg(stmt.ref)} + {offset}"
        text = f"{ATOMIC[stmt.op]}({place}, {value}{tail}, sem='relaxed')"
        self.line(text, self.depth_at(want))
