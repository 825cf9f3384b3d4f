"""The form of outer reductions: tiles of columns, or threads that divide the rows of one tile.

In: an outer reduction. Out: `Columns`.
"""

from __future__ import annotations

import sympy
import torch

from dicp.loop.ir.index import Size, product
from dicp.loop.ir.kernel import Reduce, Scan
from dicp.vendor.cpu import form
from dicp.vendor.cpu.schedule.chooser import CONVERTED, Chooser, is_floating_sum
from dicp.vendor.cpu.thresholds import (
    COLUMN_TILE,
    FEW_TILES,
    PARALLEL_COST,
    ROW_BLOCK,
    SHORT_COLUMN,
    SPLIT_COST,
    UNROLL_AND_JAM,
)


class Outer(Chooser):
    """Chooses tiles of columns for reductions across rows."""

    def choose(self) -> form.Columns:
        kernel = self.kernel
        outer, column = kernel.parallel[:-1], kernel.parallel[-1]
        tiles: Size = sympy.oo
        if isinstance(column.size, int):
            tiles = product([*(v.size for v in outer), -(-column.size // COLUMN_TILE)])
        split_rows = self._splits_rows(tiles)
        loops = (*kernel.parallel, *kernel.reduction)
        team = None if split_rows else self.team(loops, len(outer) + 1)
        long = frozenset(
            s for s in kernel.stmts() if is_floating_sum(s) and self.is_long(UNROLL_AND_JAM)
        )
        tile = self._tile(column.size)
        if split_rows and isinstance(column.size, int):
            tile = column.size
        blocks = self._row_blocks() if self.is_long(SHORT_COLUMN) else None
        return form.Columns(team, split_rows, long, blocks, self._jam(bool(long)), tile=tile)

    def _tile(self, columns: Size) -> int:
        """Columns of a tile, in whole blocks of converted elements."""
        is_converted = any(item.ref.dtype == torch.float16 for item in self.kernel.reads())
        block = CONVERTED.even(columns) if is_converted else None
        return COLUMN_TILE if block is None else -(-COLUMN_TILE // block) * block

    def _row_blocks(self) -> tuple[int, int]:
        """The loop to split into blocks of about ROW_BLOCK rows, and its iterations per block."""
        loops, rows = self.kernel.reduction, 1
        for depth in reversed(range(len(loops))):
            size = loops[depth].size
            if depth == 0 or not isinstance(size, int) or rows * size >= ROW_BLOCK:
                return depth, max(ROW_BLOCK // rows, 1)
            rows *= size
        raise AssertionError("a reduction has loops")

    def _jam(self, long: bool) -> int:
        """Rows of long sums, which have a loop over the remaining ones; of others where there are
        none."""
        for loop in self.kernel.reduction[-1:]:
            if long and isinstance(loop.size, int) and 1 < loop.size < UNROLL_AND_JAM:
                return loop.size
            if long or form.divides(UNROLL_AND_JAM, loop):
                return UNROLL_AND_JAM
        return 1

    def _splits_rows(self, tiles: Size) -> bool:
        """Whether threads divide the rows: there are few tiles of columns for them."""
        kernel = self.kernel
        ordered = any(
            isinstance(s, Scan) or (isinstance(s, Reduce) and s.finds_position)
            for s in kernel.stmts()
        )
        if ordered or not isinstance(tiles, int) or tiles >= FEW_TILES:
            return False
        work = product(v.size for v in (*kernel.parallel, *kernel.reduction))
        enough = PARALLEL_COST if tiles == 1 else SPLIT_COST
        much = not isinstance(work, int) or work >= enough
        return much and product(v.size for v in kernel.reduction) != 1
