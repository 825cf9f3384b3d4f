"""Emits a kernel's outline: the indices of its tile, the loop over blocks, its phases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dicp.codegen.values import Scope
from dicp.loop.ir.kernel import Phase
from dicp.serialize import encode_size
from dicp.vendor.triton.render.emit import Axis, Emitter


class Writer(Emitter):
    """Emits a kernel: the indices of its tile, then its phases."""

    def write(self) -> None:
        self._tile_indices()
        for phase in self.kernel.phases:
            self.phase(phase)

    def phase(self, phase: Phase) -> None:
        self.statements(phase.stmts)

    def launch_axes(self) -> dict[str, dict[str, Any]]:
        """The size, block and mask of each axis, for the launch."""
        return {
            a.name: {"size": encode_size(a.size), "block": a.block, "masked": a.masked}
            for a in self.by_dim()
        }

    def grid(self) -> list[str]:
        """The axes that programs divide."""
        return [name for name in self.launch_axes() if name not in ("r", self.looped)]

    @contextmanager
    def _looping(self, first: str = "", end: str = "", stages: int = 1) -> Iterator[None]:
        """Puts what is emitted in the context into a loop over the blocks of the looped axis.

        With several `stages`, loads of later blocks are prefetched: none of them may read what an
        earlier block stores.
        """
        axis = self.axes[self.looped]
        self.scopes.append(Scope(2))
        self._axis_index(axis, "start", end)
        yield
        body = self.scopes.pop()
        last = end or self.size(axis.size)
        steps = f"{first or 0}, {last}, {axis.block_name}"
        steps = f"tl.range({steps}, num_stages={stages})" if stages > 1 else f"range({steps})"
        self.line(f"for start in {steps}:")
        self.scopes[0].lines += body.lines

    def _tile_indices(self) -> None:
        grid = [a for a in self.by_dim() if a.name != "r"]
        if not grid:
            return
        self.line("pid = tl.program_id(0).to(INDEX)")
        if len(grid) == 1:
            self._axis_index(grid[0], f"pid * {grid[0].block_name}")
        else:
            outer, inner = grid
            self.line(f"column_blocks = {self._blocks_of(inner)}")
            self._axis_index(outer, f"(pid // column_blocks) * {outer.block_name}")
            self._axis_index(inner, f"(pid % column_blocks) * {inner.block_name}")

    def _blocks_of(self, axis: Axis) -> str:
        return f"({self.size(axis.size)} + {axis.block_name} - 1) // {axis.block_name}"

    def _axis_index(self, axis: Axis, start: str, end: str = "") -> None:
        places = f"tl.arange(0, {axis.block_name}){self._lifted(axis)}"
        if axis.name in ("r", self.looped):
            places = f"({start} + {places}).to(INDEX)" if start else f"{places}.to(INDEX)"
        else:
            places = f"{start} + {places}"
        self.line(f"{axis.index} = {places}")
        if axis.masked:
            self.line(f"{axis.mask} = {axis.index} < {end or self.size(axis.size)}")

    def _lifted(self, axis: Axis) -> str:
        if len(self.axes) == 1:
            return ""
        return "[:, None]" if axis.dim == 0 else "[None, :]"
