"""Code of reductions: the reduced axis in one block or a loop over blocks, or a loop over rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dicp.codegen.values import local
from dicp.gpu.form import ReductionTile, RowLoop
from dicp.gpu.passes import Hints
from dicp.loop.ir.expr import Read
from dicp.loop.ir.index import Var, product
from dicp.loop.ir.kernel import Kernel, Let, Reduce, Scan, ScratchStore, Store
from dicp.loop.passes.moments import Deviations
from dicp.serialize import encode_size
from dicp.vendor.triton.render.emit import EVERYWHERE, Axis
from dicp.vendor.triton.render.spelling import COMBINE, VALUE_TYPE, start_value
from dicp.vendor.triton.render.writer import Writer

ROWS, BOTH = frozenset("x"), frozenset("xr")


class Reduction(Writer):
    """Parallel loops are axis "x", reduction loops axis "r": in one block or a loop over blocks.

    With a partition, a program has the blocks of its part of the reduction loops.
    """

    shared_axis = "r"
    """The axis that a partition divides among programs."""
    part_name = "part"
    """The variable that holds the index of the program's part."""

    def __init__(self, kernel: Kernel, axes: list[Axis], form: ReductionTile | RowLoop) -> None:
        super().__init__(kernel, axes, form.limited, "" if form.tile.persistent else "r")
        self.form = form
        self._hints: Hints = {}
        """The cache hints of the current pass."""
        self._deviations = form.deviations if isinstance(form, ReductionTile) else ()
        pairs = form.online if isinstance(form, ReductionTile) else ()
        self._online = {position: (row_max, total) for position, row_max, total in pairs}
        self._range = ("", "")
        """The first row of the program's part and its end; empty if it has all rows."""

    def write(self) -> None:
        self._tile_indices()
        self._range = self._part()
        if not self.looped:
            self._axis_index(self.axes["r"], *self._range)
        phases = iter(enumerate(self.kernel.phases))
        for position, phase in phases:
            self._wait_before(position)
            if position in self._online:
                self._online_loop(*self._online[position])
                next(phases)
            elif self.looped and phase.level == "reduction":
                self._loop(position)
            else:
                self._pass(position)

    # ---- parts of the rows ----------------------------------------------------------------------

    def launch_axes(self) -> dict[str, dict[str, Any]]:
        axes, partition = super().launch_axes(), self.kernel.partition
        if partition is None:
            return axes
        axes[self.shared_axis]["size"] = encode_size(partition.chunk)
        size = encode_size(partition.part.size)
        return {"p": {"size": size, "block": 1, "masked": False, "fixed": True}, **axes}

    def variable(self, var: Var) -> str:
        if self.kernel.partition is not None and var == self.kernel.partition.part:
            return self.part_name
        return super().variable(var)

    def _tile_indices(self) -> None:
        if self.kernel.partition is None:
            super()._tile_indices()
            return
        columns = self.axes["x"]
        self.line("pid = tl.program_id(0).to(INDEX)")
        self.line(f"column_blocks = {self._blocks_of(columns)}")
        self.line(f"{self.part_name} = pid // column_blocks")
        self._axis_index(columns, f"(pid % column_blocks) * {columns.block_name}")

    def _part(self) -> tuple[str, str]:
        """The first row of the program's part and its end; empty if it has all rows."""
        partition = self.kernel.partition
        if partition is None:
            return "", ""
        rows, chunk = self.size(self.axes[self.shared_axis].size), self.size(partition.chunk)
        self.line(f"first = {self.part_name} * {chunk}")
        self.line(f"end = tl.minimum(first + {chunk}, {rows})")
        return "first", "end"

    # ---- passes over the reduction --------------------------------------------------------------

    def _wait_before(self, position: int) -> None:
        """The barrier before a phase, if it has one."""
        if position in self.form.barriers:
            self.line("tl.debug_barrier()")
        if isinstance(self.form, ReductionTile):
            self._hints = self.form.hints.get(position, {})

    def hint(self, item: Read) -> str:
        kept = self._hints.get(item)
        return f", eviction_policy='evict_{kept}'" if kept else ""

    def _pass(self, position: int) -> None:
        """The statements of a phase, once per row or at every point."""
        self.level = ROWS if self.kernel.phases[position].level == "parallel" else BOTH
        self.statements(self.form.passes[position])

    def define(self, stmt: Reduce | Scan | Let | ScratchStore, value: str) -> None:
        if isinstance(stmt, Reduce):
            (self._accumulate if self.looped == "r" else self._reduce_block)(stmt, value)
        elif isinstance(stmt, Scan):
            (self._advance if self.looped == "r" else self._scan_block)(stmt, value)
        else:
            super().define(stmt, value)

    # ---- one block ----------------------------------------------------------------------------

    def _scan_block(self, stmt: Scan, value: str) -> None:
        text = self._inside(stmt, self._tile(stmt, value))
        self.set(local(stmt.name), _narrow(f"d.running_{stmt.op}({text})", stmt), BOTH)

    def _tile(self, stmt: Reduce | Scan, value: str) -> str:
        if _compared(stmt) != stmt.dtype:
            value = f"{value}.to(tl.int32)"
        return self.spread(value, self.axes_in(stmt.value), BOTH)

    def _inside(self, stmt: Reduce | Scan, tile: str) -> str:
        """`tile` with the reduction's start value in lanes past the end."""
        mask = self.mask("r")
        if not mask:
            return tile
        start = start_value(stmt.op, _compared(stmt))
        return f"tl.where({mask}, {tile}, tl.full([], {start}, {VALUE_TYPE[_compared(stmt)]}))"

    def _reduce_block(self, stmt: Reduce, value: str) -> None:
        tile = self._inside(stmt, self._tile(stmt, value))
        if stmt.finds_position:
            self.set(local(stmt.name), f"d.{stmt.op}({tile}, {self._position(stmt)})", ROWS)
        else:
            self.set(local(stmt.name), _narrow(f"d.{stmt.op}({tile})", stmt), ROWS)

    def _position(self, stmt: Reduce) -> str:
        assert stmt.position is not None
        text = f"({self.index(stmt.position)}).to(tl.int64)"
        return self.spread(text, self.axes_of_index(stmt.position), BOTH)

    # ---- a loop over blocks -------------------------------------------------------------------

    def _loop(self, position: int) -> None:
        stmts = self.form.passes[position]
        for each in self._deviations:
            if each.squares in self.kernel.phases[position].stmts:
                self._close_deviations(each)
        if not stmts:
            return
        early = [each for each in self._deviations if each.total in stmts]
        for stmt in stmts:
            if isinstance(stmt, Reduce):
                self._start(stmt)
            elif isinstance(stmt, Scan):
                self.line(f"c_{stmt.name} = {_filled(self.shape('x'), stmt)}")
        for each in early:
            self._start_square(each.squares)
        with self._looping(*self._range):
            self._pass(position)
            for each in early:
                self._take_square(each.squares, self.value(each.total.value))
        for stmt in stmts:
            if isinstance(stmt, Reduce):
                self._close(stmt)

    # Sums over deviations from the mean, computed in the pass that computes the mean: Welford,
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

    def _close_deviations(self, sums: Deviations) -> None:
        """Combines the lanes into the sums over deviations from the whole row's mean."""
        axis, squares = self.axes["r"], sums.squares
        kind, whole = VALUE_TYPE[squares.dtype], self.value(sums.center)
        places = f"tl.arange(0, {axis.block_name}){self._lifted(axis)}"
        size, block = self.size(axis.size), axis.block_name
        self.line(f"counts = (({size} + {block} - 1 - {places}) // {block}).to({kind})")
        self.line(f"away = mean_{squares.name} - {whole}")
        if sums.residual is not None:
            text = _narrow("d.sum(counts * away)", sums.residual)
            self.set(local(sums.residual.name), text, ROWS)
        text = f"d.sum(s_{squares.name} + counts * away * away)"
        self.set(local(squares.name), _narrow(text, squares), ROWS)

    def _online_loop(self, row_max: Reduce, total: Reduce) -> None:
        """Online softmax: max(x) and sum(exp(x - max)) in one pass over the reduction.

        Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
        """
        best, kept = f"s_{row_max.name}", f"s_{total.name}"
        self._start(row_max)
        self._start(total)
        with self._looping(*self._range):
            value = self._inside(row_max, self._tile(row_max, self.value(row_max.value)))
            value = self.named(value, BOTH, row_max.dtype)
            # With new = max(old, x), one of exp(old - new) and exp(x - new) is 1. This holds for
            # leading values of -inf, too: the first number multiplies what they added by 0.
            self.line(f"rises = d.rises({value}, {best})")
            short = "_short" if total.value in self.variants else ""
            self.line(f"fall = d.fall{short}({value}, {best})")
            self.line(f"{kept} = tl.where(rises, d.fma({kept}, fall, 1.0), {kept} + fall)")
            self.line(f"{best} = tl.where(rises, {value}, {best})")
        self._close(row_max)
        text = f"d.sum(d.rescaled({kept}, {best}, v_{row_max.name}))"
        self.set(local(total.name), text, ROWS)

    def _start(self, stmt: Reduce) -> None:
        self.line(f"s_{stmt.name} = {_filled(self.shape('xr'), stmt)}")
        if stmt.finds_position:
            self.line(f"p_{stmt.name} = tl.full({self.shape('xr')}, 0, tl.int64)")

    def _accumulate(self, stmt: Reduce, value: str) -> None:
        kept, mask = f"s_{stmt.name}", self.mask("r")
        tile = self._tile(stmt, value)
        if stmt.finds_position:
            better = f"d.better_{stmt.op[3:]}({tile}, {kept})"
            better = self.named(f"{better} & {mask}" if mask else better, BOTH, torch.bool)
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
        tile = self.named(tile, BOTH, stmt.dtype)
        text = COMBINE[stmt.op].format(carry, f"d.running_{stmt.op}({tile})")
        self.set(local(stmt.name), _narrow(f"({text})", stmt), BOTH)
        whole = COMBINE[stmt.op].format(carry, f"d.{stmt.op}({tile})")
        self.line(f"{carry} = {_narrow(f'({whole})', stmt)}")

    def _close(self, stmt: Reduce) -> None:
        kept = f"s_{stmt.name}"
        if stmt.finds_position:
            best = f"d.{stmt.op[3:]}({kept})"
            self.set(local(stmt.name), f"d.first_of({kept}, {best}, p_{stmt.name})", ROWS)
        else:
            self.set(local(stmt.name), _narrow(f"d.{stmt.op}({kept})", stmt), ROWS)


class LoopedRows(Reduction):
    """An inner reduction with fused cross-row sums: each program loops over rows and adds up."""

    shared_axis, part_name = "x", "pid"

    def __init__(self, kernel: Kernel, axes: list[Axis], form: RowLoop) -> None:
        super().__init__(kernel, axes, form)
        self.looped = "x"
        self.parts, self.stages = form.parts, form.stages
        self._sums = {stmt: f"t_{k}" for k, stmt in enumerate(kernel.cross_row_stores())}

    def launch_axes(self) -> dict[str, dict[str, Any]]:
        axes = super().launch_axes()
        size = encode_size(product(v.size for v in self.parts))
        return {"p": {"size": size, "block": 1, "masked": False, "fixed": True}, **axes}

    def variable(self, var: Var) -> str:
        if var in self.parts:
            return self.digit_of("pid", self.parts, var, EVERYWHERE)
        return super().variable(var)

    def write(self) -> None:
        self.line("pid = tl.program_id(0).to(INDEX)")
        self._axis_index(self.axes["r"], "")
        for stmt, name in self._sums.items():
            zero = f"tl.full({self.shape('xr')}, 0.0, {VALUE_TYPE[stmt.ref.dtype]})"
            self.line(f"{name} = {zero}")
        with self._looping(*self._part(), self.stages):
            for position in range(len(self.kernel.phases)):
                self._wait_before(position)
                self._pass(position)
        for stmt, name in self._sums.items():
            index, mask = self.index(stmt.index), self.mask("r")
            tail = f", {mask}" if mask else ""
            place = f"{self.arg(stmt.ref)} + ({index})"
            self.line(f"tl.store({place}, d.sum_cross_row({name}){tail})")

    def store(self, stmt: Store) -> Callable[[], None]:
        value = self.value(stmt.value)
        name = self._sums.get(stmt)
        return super().store(stmt) if name is None else partial(self._add, name, stmt, value)

    def _add(self, name: str, stmt: Store, value: str) -> None:
        """Adds a tile to the accumulators of a cross-row sum."""
        tile = self.spread(value, self.axes_in(stmt.value), BOTH)
        mask = self.mask("xr")
        self.line(f"{name} += {f'tl.where({mask}, {tile}, 0.0)' if mask else tile}")


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
