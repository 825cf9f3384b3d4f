"""Emits Triton code: tile axes, values computed once, indices, masks.

A kernel works on one tile at a time. A tile has at most two axes, each of merged loops. The emitter
tracks along which axes a value varies: its shape has the axis's block along those, 1 along others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from dicp.gpu import random_groups as draws
from dicp.gpu.index_width import NARROW_LIMIT, reach
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Checked, Const, Convert, Expr, IndexValue, Masked, Named, Read, Ref
from dicp.loop.ir.index import FloorDiv, Index, Indirect, Mod, Size, Var, indirect_exprs, product
from dicp.loop.ir.kernel import Kernel, ScratchStore, Store
from dicp.loop.ir.ops import INDEX_CHECKS
from dicp.origin import Origin
from dicp.serialize import encode_size
from dicp.vendor.triton.shortcuts import ReducedPrecision
from dicp.vendor.triton.spelling import ATOMIC, VALUE_TYPE, conversion, literal, operator

EVERYWHERE = frozenset[str]()


@dataclass(frozen=True)
class Axis:
    """One axis of the tile: loops merged into one index, cut into blocks."""

    name: str
    loops: tuple[Var, ...]
    block: int
    dim: int
    cut: bool = False
    """Whether each program loops over a share of the axis, whose last block must be masked."""

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


@dataclass
class Scope:
    """A block of code, and the names of values computed in it by key and by text."""

    indent: int
    lines: list[str] = field(default_factory=list)
    values: dict[object, str] = field(default_factory=dict)


class Emitter:
    """Emits the code of one kernel."""

    def __init__(self, kernel: Kernel, axes: Sequence[Axis], looped: bool) -> None:
        self.kernel = kernel
        self.axes = {a.name: a for a in axes}
        self.looped = looped
        """Whether the kernel loops over the blocks of the axis `looped_axis`."""
        self.looped_axis = "r"
        self.axis_of = {v: a.name for a in axes for v in a.loops}
        self.args: dict[Ref, str] = {}
        self.sizes: dict[Size, str] = {}
        self.sites: list[tuple[str, Origin | None]] = []
        self.reaches: dict[int | str, None] = {}
        """Bounds of indices that must not wrap around, if they may need more than 32 bits."""
        self.scopes = [Scope(1)]
        self.shape_of: dict[str, frozenset[str]] = {}
        """The axes along which a named value varies."""
        self.saves = {s.name: s for s in kernel.stmts() if isinstance(s, ScratchStore)}
        self.loaded: dict[str, Ref] = {}
        self._reduced_precision = ReducedPrecision(kernel)
        self._side_by_side = draws.most_side_by_side(kernel)
        self._uses: dict[Expr, frozenset[str]] = {}
        self._temp = 0

    # ---- names --------------------------------------------------------------------------------

    def arg(self, ref: Ref) -> str:
        return self.args.setdefault(ref, f"a{len(self.args)}")

    def size(self, size: Size) -> str:
        """A number, or the name of the kernel's argument that carries it."""
        if isinstance(size, int):
            return str(size)
        return self.sizes.setdefault(size, f"n{len(self.sizes)}")

    def fresh(self) -> str:
        self._temp += 1
        return f"x{self._temp}"

    def line(self, text: str, depth: int | None = None) -> None:
        scope = self.scopes[-1 if depth is None else depth]
        scope.lines.append(f"{'    ' * scope.indent}{text}")

    def named(self, key: object, text: str, axes: frozenset[str]) -> str:
        """A name for `text`, assigned in the outermost possible scope; equal text shares a name.

        A value that varies along the looped axis is computed in the loop.
        """
        depth = self.depth_of(axes)
        for scope in self.scopes[: depth + 1]:
            for known in (key, text):
                if known in scope.values:
                    scope.values[key] = scope.values[known]
                    return scope.values[known]
        name = self.fresh()
        self.line(f"{name} = {text}", depth)
        self.scopes[depth].values[key] = self.scopes[depth].values[text] = name
        self.shape_of[name] = axes
        return name

    def depth_of(self, axes: frozenset[str]) -> int:
        return len(self.scopes) - 1 if self.looped and self.looped_axis in axes else 0

    def known(self, key: object) -> str | None:
        for scope in self.scopes:
            if key in scope.values:
                return scope.values[key]
        return None

    def forget(self, root: Ref) -> None:
        """Drops values that were loaded from `root`, which has been stored to since."""
        for scope in self.scopes:
            stale = {n for n in scope.values.values() if self.loaded.get(n) is root}
            scope.values = {k: n for k, n in scope.values.items() if n not in stale}

    # ---- shapes -------------------------------------------------------------------------------

    def shape(self, axes: Iterable[str]) -> str:
        """The shape of a value that varies along `axes`, as Triton writes it."""
        wanted = set(axes)
        blocks = [a.block_name if a.name in wanted else "1" for a in self.by_dim()]
        return f"[{', '.join(blocks)}]"

    def by_dim(self) -> list[Axis]:
        return sorted(self.axes.values(), key=lambda a: a.dim)

    def spread(self, text: str, have: frozenset[str], want: frozenset[str]) -> str:
        """`text` broadcast along every axis of `want`."""
        return text if want <= have else f"tl.broadcast_to({text}, {self.shape(have | want)})"

    def mask(self, axes: Iterable[str], guard: str = "") -> str:
        """The mask of lanes within bounds along `axes` where `guard` holds; "" if all are."""
        wanted = set(axes)
        parts = [a.mask for a in self.by_dim() if a.name in wanted and a.masked]
        parts += [guard] if guard else []
        return " & ".join(parts)

    # ---- values ---------------------------------------------------------------------------------

    def axes_in(self, expr: Expr) -> frozenset[str]:
        """The axes along which `expr` varies."""
        found = self._uses.get(expr)
        if found is None:
            parts: set[str] = set()
            for arg in expr.args:
                parts |= self.axes_in(arg)
            for index in ir.indices_of(expr):
                parts |= self.axes_of_index(index)
            if isinstance(expr, Named):
                if expr.op == "scratch":
                    parts |= self.axes_in(self.saves[expr.name].value)
                else:
                    parts |= self.shape_of.get(f"v_{expr.name}", EVERYWHERE)
            else:
                self._uses[expr] = frozenset(parts)
            return frozenset(parts)
        return found

    def axes_of_index(self, index: Index) -> frozenset[str]:
        found = {self.axis_of[v] for v in index.variables() if v in self.axis_of}
        for inner in indirect_exprs(index):
            found |= self.axes_in(inner)
        return frozenset(found)

    def value(self, expr: Expr, guard: str = "") -> str:
        """The name of `expr`, or a literal; lanes load memory only where `guard` holds."""
        if isinstance(expr, Const):
            return literal(expr.value, expr.dtype)
        if isinstance(expr, Named):
            if expr.op == "scratch":
                return self.value(self.saves[expr.name].value, guard)
            return f"v_{expr.name}"
        if isinstance(expr, Masked):
            return self._masked(expr, guard)
        for key in ((expr, ""), (expr, guard)):
            found = self.known(key)
            if found is not None:
                return found
        key = (expr, guard)
        if isinstance(expr, Read):
            return self._read(expr, guard, key)
        axes = self.axes_in(expr) | self.shape_of.get(guard, EVERYWHERE)
        return self.named(key, self._text(expr, guard), axes)

    def _masked(self, expr: Expr, guard: str) -> str:
        test, value = expr.args
        name = self.value(test, guard)
        axes = self.axes_in(test) | self.shape_of.get(guard, EVERYWHERE)
        if test.op == "const":
            name = self.named(name, name, EVERYWHERE)
        if guard:
            both = f"{guard} & {name}"
            name = self.named(both, both, axes)
        return self.value(value, name)

    def _text(self, expr: Expr, guard: str) -> str:
        if isinstance(expr, IndexValue):
            text = self.index(expr.index, guard)
            self.reaching(expr.index)
            if not expr.index.terms and isinstance(expr.index.const, int):
                return literal(expr.index.const, torch.int64)
            return f"({text}).to(tl.int64)"
        least = draws.threshold(expr)
        if least is not None:
            word = f"d.philox_word({', '.join(self._draw(expr.args[0], guard))})"
            word = self.named(word, word, self.axes_in(expr.args[0]))
            limit = f"tl.full([], {least}, tl.uint32)"
            return operator(expr.op, torch.bool, torch.int64, [word, limit])
        drawn = expr.op.startswith("philox")
        args = self._draw(expr, guard) if drawn else [self.value(a, guard) for a in expr.args]
        if isinstance(expr, Convert):
            return conversion(args[0], expr.args[0].dtype, expr.dtype, ir.rounds(expr))
        if isinstance(expr, Checked) and expr.op in INDEX_CHECKS:
            site, message = self._site(expr)
            return f"d.{expr.op}({args[0]}, {args[1]}, {self._active(expr, guard)}, " + (
                f"{site}, {message})"
            )
        if isinstance(expr, Checked) and not expr.dtype.is_floating_point:
            site, _ = self._site(expr)
            args[1] = f"d.divisor({args[1]}, {self._active(expr, guard)}, {site})"
        shorter = self._reduced_precision.text(expr, args)
        if shorter is not None:
            text, shared = shorter
            if shared:
                shared = self.named(shared, shared, self.axes_in(expr.args[1]))
            return text.format(shared)
        return operator(expr.op, expr.dtype, expr.args[0].dtype, args)

    def _draw(self, expr: Expr, guard: str) -> list[str]:
        """Seed and site of a random number, counter of its Philox call, and place in its words."""
        *key, at = expr.args
        assert isinstance(at, IndexValue)
        neighbours = draws.NEIGHBOURS[expr.op, expr.dtype]
        shift = neighbours.bit_length() - 1
        found = draws.split(at.index, neighbours)
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

    def _active(self, expr: Expr, guard: str) -> str:
        axes = self.axes_in(expr) | self.shape_of.get(guard, EVERYWHERE)
        mask = self.mask(axes, guard)
        return f"({mask})" if mask else literal(True, torch.bool)

    def _site(self, expr: Checked) -> tuple[int, str]:
        """Numbers a checked operation; returns its site and the message of a failed check."""
        self.sites.append((expr.op, expr.origin))
        return len(self.sites), repr(f"index out of range: {expr.origin or ''}")

    def _read(self, item: Read, guard: str, key: object) -> str:
        index = self.index(item.index, guard)
        have = self.axes_of_index(item.index)
        axes = have | self.shape_of.get(guard, EVERYWHERE)
        mask = self.mask(axes, guard)
        place = f"{self.arg(item.ref)} + {self._offset(index, have, axes)}"
        hint = self.hint(item.ref, have) if self.looped and self.looped_axis in axes else ""
        text = f"tl.load({place}, {mask}, other=0{hint})" if mask else f"tl.load({place}{hint})"
        if VALUE_TYPE[item.dtype] == "tl.float32" and item.ref.dtype != torch.float32:
            text += ".to(tl.float32)"
        name = self.named(key, text, axes)
        self.loaded[name] = item.ref.root
        return name

    def hint(self, ref: Ref, axes: frozenset[str]) -> str:
        """The cache hint for loads of `ref` in the loop, as further arguments of `tl.load`."""
        return ""

    def _offset(self, index: str, have: frozenset[str], want: frozenset[str]) -> str:
        if want <= have:
            return f"({index})" if " " in index else index
        if not have:
            known = not any(c.isalpha() for c in index)
            index = f"tl.full([], {index}, INDEX)" if known else f"({index})"
        return self.spread(index, have, want)

    # ---- indices --------------------------------------------------------------------------------

    def index(self, index: Index, guard: str = "") -> str:
        parts = []
        for atom, c in index.terms:
            text = self._atom(atom, guard)
            parts.append(text if c == 1 else f"{self._coefficient(c)} * {text}")
        if index.const != 0 or not parts:
            parts.append(self._coefficient(index.const))
        return " + ".join(parts)

    def reaching(self, index: Index) -> None:
        """Records the bound of `index`, which is divided or used as a value, for the launch."""
        furthest = reach(index)
        if not isinstance(furthest, int) or furthest >= NARROW_LIMIT:
            self.reaches[encode_size(furthest)] = None

    def _coefficient(self, size: Size) -> str:
        text = self.size(size)
        return f"({text})" if text.startswith("-") else text

    def _atom(self, atom: Var | FloorDiv | Mod | Indirect, guard: str) -> str:
        if isinstance(atom, Var):
            return self.variable(atom)
        if isinstance(atom, Indirect):
            axes = self.axes_in(atom.expr) | self.shape_of.get(guard, EVERYWHERE)
            text = f"({self.value(atom.expr, guard)}).to(INDEX)"
            return self.named(("index", text), text, axes)
        sign = "//" if isinstance(atom, FloorDiv) else "%"
        inner = self.index(atom.value, guard)
        self.reaching(atom.value)
        axes = self.axes_of_index(atom.value) | self.shape_of.get(guard, EVERYWHERE)
        text = f"({inner}) {sign} {self.size(atom.divisor)}"
        return self.named(("index", text), text, axes)

    def variable(self, var: Var) -> str:
        axis = self.axes[self.axis_of[var]]
        return self.digit(axis.index, axis.loops, var, frozenset((axis.name,)))

    def digit(self, index: str, loops: Sequence[Var], var: Var, axes: frozenset[str]) -> str:
        """The index of loop `var`: `index` is a mixed-radix number whose digits are `loops`."""
        at = loops.index(var)
        if len(loops) == 1:
            return index
        below = product(v.size for v in loops[at + 1 :])
        text = index if below == 1 else f"{index} // {self.size(below)}"
        if at > 0:
            text = f"({text})" if below != 1 else text
            text = f"{text} % {self.size(var.size)}"
        return self.named(("loop", var.key), text, axes)

    # ---- stores ---------------------------------------------------------------------------------

    def store(self, stmt: Store, value: str, level: frozenset[str]) -> None:
        """Emits `stmt` for every lane of the axes `level`."""
        index = self.index(stmt.index)
        have = self.axes_of_index(stmt.index)
        scattered = bool(stmt.op) or self.kernel.kind == "scatter"
        want = level if scattered else have | self.axes_in(stmt.value)
        offset = self._offset(index, have, want)
        value = f"d.to_bf16({value})" if stmt.ref.dtype == torch.bfloat16 else value
        mask = self.mask(want | have)
        tail = f", {mask}" if mask else ""
        if not stmt.op:
            offset = self._beside(stmt, offset)
        if stmt.op:
            value = self.spread(value, self.shape_of.get(value, EVERYWHERE), want)
            if stmt.op == "prod" and mask:  # masked lanes need a valid address, too
                offset = f"tl.where({mask}, {offset}, 0)"
            place = f"{self.arg(stmt.ref)} + {offset}"
            text = f"{ATOMIC[stmt.op]}({place}, {value}{tail}, sem='relaxed')"
            self.line(text, self.depth_of(want))
            return
        self.line(f"tl.store({self.arg(stmt.ref)} + {offset}, {value}{tail})", self.depth_of(want))

    def _beside(self, stmt: Store, offset: str) -> str:
        """`offset` with its contiguity limited, so that a thread stores no wider vector."""
        most = self._side_by_side
        axis = self.by_dim()[-1] if self.axes else None
        if most is None or axis is None or stmt.ref.dtype.itemsize * most >= draws.WIDEST:
            return offset
        if len(axis.loops) != 1 or stmt.index.coefficient(axis.loops[0]) != 1:
            return offset
        return f"tl.max_contiguous({offset}, {[1] * (len(self.axes) - 1) + [most]})"
