"""Code of reductions: the reduced axis in one block or a loop over blocks, or a loop over rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dicp.gpu import tiles
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, Named, Read, Ref
from dicp.loop.ir.index import Size, Var, product
from dicp.loop.ir.kernel import Kernel, Let, Phase, Reduce, Scan, ScratchStore, Stmt, Store
from dicp.loop.passes.moments import squared_distances
from dicp.serialize import encode_size
from dicp.vendor.triton.emit import EVERYWHERE, Axis
from dicp.vendor.triton.facts import GPU
from dicp.vendor.triton.spelling import COMBINE, VALUE_TYPE, start_value
from dicp.vendor.triton.writer import Writer

ROWS = frozenset({"x"})


class Reduction(Writer):
    """Parallel loops are axis "x", reduction loops axis "r": in one block or a loop over blocks."""

    def write(self) -> None:
        self._stored: set[Ref] = set()
        self._later: set[Ref] = set()
        self._squares = squared_distances(self.kernel) if self.looped else []
        self._early = {square.name for square, _ in self._squares}
        self._tile_indices()
        if not self.looped:
            self._axis_index(self.axes["r"], "")
        phases = iter(enumerate(self.kernel.phases))
        for position, phase in phases:
            self._wait_for_stores(phase)
            online = self._online(position) if self.looped else None
            if online is not None:
                self._later = set().union(*map(self._reads, self.kernel.phases[position + 2 :]))
                self._online_loop(*online)
                next(phases)
                continue
            self._later = set().union(*map(self._reads, self.kernel.phases[position + 1 :]))
            if phase.level == "parallel":
                self._row(phase)
            elif self.looped:
                self._loop(phase)
            else:
                self._block(phase)
            self._stored |= {s.ref.root for s in phase.stmts if isinstance(s, Store)}

    def _in_pass(self, phase: Phase) -> tuple[Stmt, ...]:
        """The statements of the phase's own pass over the reduction.

        Scratch values are rematerialized where they are read; an earlier pass computes some sums.
        """
        own = (s for s in phase.stmts if not isinstance(s, ScratchStore))
        return tuple(s for s in own if not (isinstance(s, Reduce) and s.name in self._early))

    def _wait_for_stores(self, phase: Phase) -> None:
        """A barrier before reads of elements that another thread of the program may have stored."""
        if self._reads(phase) & self._stored:
            self.line("tl.debug_barrier()")
            self._stored.clear()

    def _reads(self, phase: Phase) -> set[Ref]:
        """The buffers that the phase reads, including those for rematerialized scratch values."""
        seen: set[Expr] = set()
        used = [e for s in self._in_pass(phase) for e in ir.walk(s.value, seen)]
        for name in {e.name for e in used if isinstance(e, Named) and e.op == "scratch"}:
            used += ir.walk(self.saves[name].value, seen)
        return {e.ref.root for e in used if isinstance(e, Read)}

    def hint(self, ref: Ref, axes: frozenset[str]) -> str:
        """Keeps in the cache what a later pass reads again and what all rows read, but not what is
        read once; no hint in kernels with one pass."""
        if len([p for p in self.kernel.phases if p.level == "reduction" and self._in_pass(p)]) < 2:
            return ""
        again = ref.root in self._later or not axes & ROWS
        return f", eviction_policy='evict_{'last' if again else 'first'}'"

    def _row(self, phase: Phase) -> None:
        values: dict[int, str] = {}
        for stmt in phase.stmts:
            values[id(stmt)] = self.value(stmt.value)
            if isinstance(stmt, Let):
                self._define(stmt.name, values[id(stmt)], self.axes_in(stmt.value))
        self.stores(phase, values, ROWS)

    def _define(self, name: str, text: str, axes: frozenset[str]) -> None:
        self.line(f"v_{name} = {text}", self.depth_of(axes))
        self.shape_of[f"v_{name}"] = axes

    # ---- one block ----------------------------------------------------------------------------

    def _block(self, phase: Phase) -> None:
        values: dict[int, str] = {}
        for stmt in phase.stmts:
            if isinstance(stmt, ScratchStore):
                continue
            values[id(stmt)] = self.value(stmt.value)
            if isinstance(stmt, Reduce):
                self._reduce_block(stmt, values[id(stmt)])
            elif isinstance(stmt, Scan):
                text = self._inside(stmt, self._tile(stmt, values[id(stmt)]))
                self._define(stmt.name, _narrow(f"d.running_{stmt.op}({text})", stmt),
                             frozenset("xr"))  # fmt: skip
        self.stores(phase, values, frozenset("xr"))

    def _tile(self, stmt: Reduce | Scan, value: str) -> str:
        if _compared(stmt) != stmt.dtype:
            value = f"{value}.to(tl.int32)"
        return self.spread(value, self.axes_in(stmt.value), frozenset("xr"))

    def _inside(self, stmt: Reduce | Scan, tile: str) -> str:
        """`tile` with the reduction's start value in lanes past the end."""
        mask = self.mask("r")
        if not mask:
            return tile
        start = start_value(stmt.op, _compared(stmt))
        return f"tl.where({mask}, {tile}, tl.full([], {start}, {VALUE_TYPE[_compared(stmt)]}))"

    def _reduce_block(self, stmt: Reduce, value: str) -> None:
        tile = self._inside(stmt, self._tile(stmt, value))
        if stmt.op.startswith("arg"):
            self._define(stmt.name, f"d.{stmt.op}({tile}, {self._position(stmt)})", ROWS)
        else:
            self._define(stmt.name, _narrow(f"d.{stmt.op}({tile})", stmt), ROWS)

    def _position(self, stmt: Reduce) -> str:
        assert stmt.position is not None
        text = f"({self.index(stmt.position)}).to(tl.int64)"
        return self.spread(text, self.axes_of_index(stmt.position), frozenset("xr"))

    # ---- a loop over blocks -------------------------------------------------------------------

    def _loop(self, phase: Phase) -> None:
        stmts = self._in_pass(phase)
        for stmt in phase.stmts:
            if isinstance(stmt, Reduce) and stmt.name in self._early:
                self._close_square(stmt)
        if not stmts:
            return
        own = {id(stmt) for stmt in stmts}
        squares = {id(total): square for square, total in self._squares if id(total) in own}
        for stmt in stmts:
            if isinstance(stmt, Reduce):
                self._start(stmt)
            elif isinstance(stmt, Scan):
                self.line(f"c_{stmt.name} = {_filled(self.shape('x'), stmt)}")
        for square in squares.values():
            self._start_square(square)
        with self._looping():
            values = self._loop_body(replace(phase, stmts=stmts))
            for total, square in squares.items():
                self._take_square(square, values[total])
        for stmt in stmts:
            if isinstance(stmt, Reduce):
                self._close(stmt)

    # Sums of squared distances from the mean, computed in the pass that computes the mean: Welford,
    # "Note on a method for calculating corrected sums of squares and products" (1962), in every
    # lane; then lanes of unequal counts are combined (Chan, Golub and LeVeque, 1983).

    def _start_square(self, square: Reduce) -> None:
        self.line(f"mean_{square.name} = {_filled(self.shape('xr'), square)}")
        self._start(square)
        self.line(f"count_{square.name} = {_filled('[]', square)}")

    def _take_square(self, square: Reduce, value: str) -> None:
        """Adds an element to every lane's mean and sum of squared distances from it."""
        kept, mean, count = (f"{part}_{square.name}" for part in ("s", "mean", "count"))
        mask = self.mask("r")
        tile = self._tile(square, value)
        self.line(f"{count} += 1.0")
        self.line(f"away = {tile} - {mean}")
        self.line(f"moved = {mean} + away * (1.0 / {count})")
        more = f"{kept} + away * ({tile} - moved)"
        self.line(f"{kept} = {f'tl.where({mask}, {more}, {kept})' if mask else more}")
        self.line(f"{mean} = {f'tl.where({mask}, moved, {mean})' if mask else 'moved'}")

    def _close_square(self, square: Reduce) -> None:
        """Combines the lanes into the sum of squared distances from the whole row's mean."""
        axis, kind = self.axes["r"], VALUE_TYPE[square.dtype]
        whole = self.value(square.value.args[0].args[1])
        places = f"tl.arange(0, {axis.block_name}){self._lifted(axis)}"
        size, block = self.size(axis.size), axis.block_name
        self.line(f"counts = (({size} + {block} - 1 - {places}) // {block}).to({kind})")
        self.line(f"away = mean_{square.name} - {whole}")
        text = f"d.sum(s_{square.name} + counts * away * away)"
        self._define(square.name, _narrow(text, square), ROWS)

    def _online(self, position: int) -> tuple[Reduce, Reduce] | None:
        """max(x) and, in the next pass, sum(exp(x - max)): online softmax needs one pass for both.

        None for other phases.
        """
        pair = self.kernel.phases[position : position + 2]
        if len(pair) < 2 or any(p.level != "reduction" for p in pair):
            return None
        tops, sums = ([s for s in p.stmts if not isinstance(s, ScratchStore)] for p in pair)
        if len(tops) != 1 or len(sums) != 1:
            return None
        top, total = tops[0], sums[0]
        if not (isinstance(top, Reduce) and isinstance(total, Reduce)):
            return None
        if (top.op, total.op) != ("max", "sum") or total.value.op != "exp":
            return None
        (moved,) = total.value.args
        same = moved.op == "sub" and moved.args == (top.value, ir.result(top.name, top.dtype))
        return (top, total) if same and top.dtype == total.dtype else None

    def _online_loop(self, top: Reduce, total: Reduce) -> None:
        """Online softmax: max(x) and sum(exp(x - max)) in one pass over the reduction.

        Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
        """
        best, kept = f"s_{top.name}", f"s_{total.name}"
        self._start(top)
        self._start(total)
        with self._looping():
            value = self._inside(top, self._tile(top, self.value(top.value)))
            value = self.named(value, value, frozenset("xr"))
            # With new = max(old, x), one of exp(old - new) and exp(x - new) is 1. This holds for
            # leading values of -inf, too: the first number multiplies what they added by 0.
            self.line(f"rises = d.rises({value}, {best})")
            short = "" if total.value in self._reduced_precision.full_precision else "_short"
            self.line(f"fall = d.fall{short}({value}, {best})")
            self.line(f"{kept} = tl.where(rises, d.fma({kept}, fall, 1.0), {kept} + fall)")
            self.line(f"{best} = tl.where(rises, {value}, {best})")
        self._close(top)
        text = f"d.sum(d.rescaled({kept}, {best}, v_{top.name}))"
        self._define(total.name, text, ROWS)

    def _start(self, stmt: Reduce) -> None:
        self.line(f"s_{stmt.name} = {_filled(self.shape('xr'), stmt)}")
        if stmt.op.startswith("arg"):
            self.line(f"p_{stmt.name} = tl.full({self.shape('xr')}, 0, tl.int64)")

    def _loop_body(self, phase: Phase) -> dict[int, str]:
        values: dict[int, str] = {}
        for stmt in phase.stmts:
            if isinstance(stmt, ScratchStore):
                continue
            values[id(stmt)] = self.value(stmt.value)
            if isinstance(stmt, Reduce):
                self._accumulate(stmt, values[id(stmt)])
            elif isinstance(stmt, Scan):
                self._advance(stmt, values[id(stmt)])
        self.stores(phase, values, frozenset("xr"))
        return values

    def _accumulate(self, stmt: Reduce, value: str) -> None:
        kept, mask = f"s_{stmt.name}", self.mask("r")
        tile = self._tile(stmt, value)
        if stmt.op.startswith("arg"):
            better = f"d.better_{stmt.op[3:]}({tile}, {kept})"
            better = self.named(better, f"{better} & {mask}" if mask else better, frozenset("xr"))
            place = f"p_{stmt.name}"
            self.line(f"{place} = tl.where({better}, {self._position(stmt)}, {place})")
            self.line(f"{kept} = tl.where({better}, {tile}, {kept})")
            return
        new = COMBINE[stmt.op].format(kept, tile)
        self.line(f"{kept} = tl.where({mask}, {new}, {kept})" if mask else f"{kept} = {new}")

    def _advance(self, stmt: Scan, value: str) -> None:
        """The scan of this block, and the carry into the next one."""
        carry = f"c_{stmt.name}"
        tile = self._inside(stmt, self._tile(stmt, value))
        tile = self.named(tile, tile, frozenset("xr"))
        text = COMBINE[stmt.op].format(carry, f"d.running_{stmt.op}({tile})")
        self._define(stmt.name, _narrow(f"({text})", stmt), frozenset("xr"))
        whole = COMBINE[stmt.op].format(carry, f"d.{stmt.op}({tile})")
        self.line(f"{carry} = {_narrow(f'({whole})', stmt)}")

    def _close(self, stmt: Reduce) -> None:
        kept = f"s_{stmt.name}"
        if stmt.op.startswith("arg"):
            best = f"d.{stmt.op[3:]}({kept})"
            self._define(stmt.name, f"d.first_of({kept}, {best}, p_{stmt.name})", ROWS)
        else:
            self._define(stmt.name, _narrow(f"d.{stmt.op}({kept})", stmt), ROWS)


class LoopedRows(Reduction):
    """An inner reduction with fused cross-row sums: each program loops over rows and adds up."""

    def __init__(
        self, kernel: Kernel, axes: list[Axis], parts: tuple[Var, ...], along: Sequence[Store],
        chunk: Size | None = None,
    ) -> None:  # fmt: skip
        super().__init__(kernel, axes, looped=True)
        self.parts = parts
        self.looped_axis = "x"
        self.chunk = chunk
        """Rows per share, if each program loops over a share of all rows."""
        self._sums = {f"t_{k}": stmt for k, stmt in enumerate(along)}

    def launch_axes(self) -> dict[str, dict[str, Any]]:
        size = encode_size(product(v.size for v in self.parts))
        axes = super().launch_axes()
        if self.chunk is not None:
            axes["x"]["size"] = encode_size(self.chunk)
        return {"p": {"size": size, "block": 1, "masked": False, "fixed": True}, **axes}

    def variable(self, var: Var) -> str:
        if var in self.parts:
            return self.digit("pid", self.parts, var, EVERYWHERE)
        return super().variable(var)

    def hint(self, ref: Ref, axes: frozenset[str]) -> str:
        return ""

    def write(self) -> None:
        self._stored, self._later, self._early = set(), set(), set()
        self.line("pid = tl.program_id(0).to(INDEX)")
        self._axis_index(self.axes["r"], "")
        for name, stmt in self._sums.items():
            zero = f"tl.full({self.shape('xr')}, 0.0, {VALUE_TYPE[stmt.ref.dtype]})"
            self.line(f"{name} = {zero}")
        first, end = self._row_range()
        with self._looping(first, end, self._stages()):
            for phase in self.kernel.phases:
                self._wait_for_stores(phase)
                if phase.level == "parallel":
                    self._row(phase)
                else:
                    self._block(phase)
                written = (s for s in phase.stmts if isinstance(s, Store) and not s.op)
                self._stored |= {s.ref.root for s in written}
        for name, stmt in self._sums.items():
            index, mask = self.index(stmt.index), self.mask("r")
            tail = f", {mask}" if mask else ""
            place = f"{self.arg(stmt.ref)} + ({index})"
            self.line(f"tl.store({place}, d.sum_across({name}){tail})")

    def _stages(self) -> int:
        """Pipeline stages of the loop over rows; 1 if the kernel reads what it stores."""
        stores = (s for s in self.stmts() if isinstance(s, Store) and not s.op)
        written = {s.ref.root for s in stores}
        rows, inner = set(self.axes["x"].loops), set(self.axes["r"].loops)
        read = {item.ref: item.index.variables() for item in self.kernel.reads()}
        if written & {ref.root for ref in read}:
            return 1
        whole = [ref.dtype.itemsize for ref, used in read.items() if used & rows and used & inner]
        return tiles.stages(sum(whole) * self.axes["x"].block * self.axes["r"].block, GPU)

    def _row_range(self) -> tuple[str, str]:
        """The first row of the program's share and its end; "0" and "" if it has all rows."""
        if self.chunk is None:
            return "0", ""
        rows = self.size(self.axes[self.looped_axis].size)
        self.line(f"first = pid * {self.size(self.chunk)}")
        self.line(f"end = tl.minimum(first + {self.size(self.chunk)}, {rows})")
        return "first", "end"

    def stores(self, phase: Phase, values: Mapping[int, str], level: frozenset[str]) -> None:
        for name, stmt in self._sums.items():
            if id(stmt) in values:
                have = self.axes_in(stmt.value)
                tile = self.spread(values[id(stmt)], have, frozenset("xr"))
                mask = self.mask("xr")
                self.line(f"{name} += {f'tl.where({mask}, {tile}, 0.0)' if mask else tile}")
        rest = tuple(s for s in phase.stmts if not (isinstance(s, Store) and s.op))
        super().stores(Phase(phase.level, rest), values, level)


def _compared(stmt: Reduce | Scan) -> torch.dtype:
    """The type a reduction works in: int32 for booleans, which have no order in Triton."""
    truth = stmt.dtype == torch.bool and stmt.op not in ("any", "all")
    return torch.int32 if truth else stmt.dtype


def _filled(shape: str, stmt: Reduce | Scan) -> str:
    dtype = _compared(stmt)
    return f"tl.full({shape}, {start_value(stmt.op, dtype)}, {VALUE_TYPE[dtype]})"


def _narrow(text: str, stmt: Reduce | Scan) -> str:
    """`text` converted back to a small integer type, which Triton reduces in 32 bits."""
    small = (torch.int8, torch.int16, torch.uint8)
    return f"{text}.to({VALUE_TYPE[stmt.dtype]})" if stmt.dtype in small else text
