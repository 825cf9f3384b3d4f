"""Code of reductions: the reduced axis in one block or a loop over blocks, or a loop over rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from dicp.gpu.form import ReductionTile, RowLoop
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, Named, Read, Ref
from dicp.loop.ir.index import Var, product
from dicp.loop.ir.kernel import Kernel, Let, Phase, Reduce, Scan, ScratchStore, Stmt, Store
from dicp.serialize import encode_size
from dicp.vendor.triton.emit import EVERYWHERE, Axis
from dicp.vendor.triton.spelling import COMBINE, VALUE_TYPE, start_value
from dicp.vendor.triton.writer import Writer

ROWS = frozenset({"x"})


class Reduction(Writer):
    """Parallel loops are axis "x", reduction loops axis "r": in one block or a loop over blocks.

    With a partition, a program has the blocks of its share of the reduction loops.
    """

    shared_axis = "r"
    """The axis that a partition divides among programs."""
    share = "share"
    """The index of the program's share."""

    def __init__(self, kernel: Kernel, axes: list[Axis], form: ReductionTile | RowLoop) -> None:
        super().__init__(kernel, axes, looped=not form.tile.persistent)
        self._stored: set[Ref] = set()
        self._later: set[Ref] = set()
        self._squares = form.squares if isinstance(form, ReductionTile) else ()
        self._early = {square.name for square, _ in self._squares}
        pairs = form.online if isinstance(form, ReductionTile) else ()
        self._online = {position: (top, total) for position, top, total in pairs}
        self._range = ("", "")
        """The first row of the program's share and its end; empty if it has all rows."""

    def write(self) -> None:
        self._tile_indices()
        self._range = self._share()
        if not self.looped:
            self._axis_index(self.axes["r"], *self._range)
        phases = iter(enumerate(self.kernel.phases))
        for position, phase in phases:
            self._wait_for_stores(phase)
            if position in self._online:
                self._later = set().union(*map(self._reads, self.kernel.phases[position + 2 :]))
                self._online_loop(*self._online[position])
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

    # ---- shares of the rows ---------------------------------------------------------------------

    def launch_axes(self) -> dict[str, dict[str, Any]]:
        axes, partition = super().launch_axes(), self.kernel.partition
        if partition is None:
            return axes
        axes[self.shared_axis]["size"] = encode_size(partition.chunk)
        size = encode_size(partition.part.size)
        return {"p": {"size": size, "block": 1, "masked": False, "fixed": True}, **axes}

    def variable(self, var: Var) -> str:
        if self.kernel.partition is not None and var == self.kernel.partition.part:
            return self.share
        return super().variable(var)

    def _tile_indices(self) -> None:
        if self.kernel.partition is None:
            super()._tile_indices()
            return
        columns = self.axes["x"]
        self.line("pid = tl.program_id(0).to(INDEX)")
        self.line(f"across = {self._blocks_of(columns)}")
        self.line(f"{self.share} = pid // across")
        self._axis_index(columns, f"(pid % across) * {columns.block_name}")

    def _share(self) -> tuple[str, str]:
        """The first row of the program's share and its end; empty if it has all rows."""
        partition = self.kernel.partition
        if partition is None:
            return "", ""
        rows, chunk = self.size(self.axes[self.shared_axis].size), self.size(partition.chunk)
        self.line(f"first = {self.share} * {chunk}")
        self.line(f"end = tl.minimum(first + {chunk}, {rows})")
        return "first", "end"

    # ---- passes over the reduction --------------------------------------------------------------

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
        with self._looping(*self._range):
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

    def _online_loop(self, top: Reduce, total: Reduce) -> None:
        """Online softmax: max(x) and sum(exp(x - max)) in one pass over the reduction.

        Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
        """
        best, kept = f"s_{top.name}", f"s_{total.name}"
        self._start(top)
        self._start(total)
        with self._looping(*self._range):
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

    shared_axis, share = "x", "pid"

    def __init__(self, kernel: Kernel, axes: list[Axis], form: RowLoop) -> None:
        super().__init__(kernel, axes, form)
        self.looped, self.looped_axis = True, "x"
        self.parts, self.stages = form.parts, form.stages
        self._sums = {f"t_{k}": stmt for k, stmt in enumerate(kernel.cross_row_stores())}

    def launch_axes(self) -> dict[str, dict[str, Any]]:
        axes = super().launch_axes()
        size = encode_size(product(v.size for v in self.parts))
        return {"p": {"size": size, "block": 1, "masked": False, "fixed": True}, **axes}

    def variable(self, var: Var) -> str:
        if var in self.parts:
            return self.digit("pid", self.parts, var, EVERYWHERE)
        return super().variable(var)

    def hint(self, ref: Ref, axes: frozenset[str]) -> str:
        return ""

    def write(self) -> None:
        self.line("pid = tl.program_id(0).to(INDEX)")
        self._axis_index(self.axes["r"], "")
        for name, stmt in self._sums.items():
            zero = f"tl.full({self.shape('xr')}, 0.0, {VALUE_TYPE[stmt.ref.dtype]})"
            self.line(f"{name} = {zero}")
        with self._looping(*self._share(), self.stages):
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
