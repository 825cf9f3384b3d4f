"""Block sizes and warps: pure functions of a kernel's extents and element sizes.

The numbers are for chips with about a hundred multiprocessors of 64 warps; each row says why.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dicp.loop.ir.expr import Ref
from dicp.loop.ir.index import Size, Var, product
from dicp.loop.ir.kernel import Kernel, Running, Store

GUESS = 4096
"""What an extent that is not known yet counts as."""
POINTWISE_BLOCK = 1024
LIGHT = 4
"""Bytes read for an element below which a thread takes twice as many elements: with one tensor of
2 bytes all threads that a multiprocessor holds have 32 KiB on their way, and need about 40."""
ENOUGH_PROGRAMS = 512
"""Programs that keep every multiprocessor busy."""
LINE = 128
"""Bytes of a line of the cache, which both sides of a tile span that is turned around."""
CROSSING = (32, 64)
"""The shortest and the longest of such sides."""
MAX_PERSISTENT = 8192
"""Elements of a row that are kept in registers; less where more tensors are read."""
WIDEST_ALONG = 4096
"""Elements of a row whose sums over rows are kept in registers, too."""
MOST_AHEAD = 80 * 1024
"""Bytes of shared memory for what is read ahead: two programs fit into a multiprocessor."""
LOOP_BLOCK = 2048
"""Elements of a long row at a time: 16 bytes of 2-byte elements for each thread of 8 warps."""
COLUMNS = 64
"""Columns side by side: one 128-byte line of 2-byte elements."""
FEW_COLUMNS = 16
"""Columns side by side where there are few: still whole sectors of 32 bytes."""
MULTIPROCESSORS = 128
COLUMN_STEPS = 32
COLUMN_ELEMENTS = 4096
"""Elements of a tile of columns: what a program must have on its way at a time."""
ROW_ELEMENTS = 2048
"""Elements of one tile of several short rows."""
MANY_ROWS = 4096
"""Rows that fill a chip with a warp for each."""
WARP_ELEMENTS = 1024
"""Elements of such a row that a warp takes: 64 bytes of 2-byte elements for each thread."""
MOST_IN_WARP = 5
"""Tensors of such rows, of 4 bytes an element: those of more need too many registers."""
LEAST_MOVED = 4096
"""Bytes that a program reads and writes: it takes time to start."""


@dataclass(frozen=True)
class Tile:
    """Elements per block of each axis by name, whether the reduced axis fits one block, warps."""

    blocks: dict[str, int]
    persistent: bool
    warps: int


def extent(size: Size) -> int:
    return size if isinstance(size, int) else GUESS


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()


def numel(loops: Iterable[Var]) -> Size:
    return product(v.size for v in loops)


def pointwise(kernel: Kernel) -> Tile:
    count = extent(numel(kernel.rows))
    block = min(POINTWISE_BLOCK, max(power_of_two(count), 32))
    if count >= 16 * ENOUGH_PROGRAMS * POINTWISE_BLOCK and 0 < _bytes_read(kernel) < LIGHT:
        block = 2 * POINTWISE_BLOCK
    while block > 128 and count // block < ENOUGH_PROGRAMS:
        block //= 2
    return Tile({"x": block}, False, max(1, min(4, block // 256)))


def _bytes_read(kernel: Kernel) -> int:
    """Bytes that an element takes from memory; what all elements share comes from a cache."""
    loops = set(kernel.rows)
    own = {item.ref for item in kernel.reads() if item.coords[0].variables() & loops}
    return sum(ref.dtype.itemsize for ref in own)


def crossing(outer: Size, last: Size, width: int) -> Tile:
    """Two axes, each contiguous for some tensor of elements of at least `width` bytes."""
    side = min(max(LINE // width, CROSSING[0]), CROSSING[1])
    y = min(side, power_of_two(extent(outer)))
    x = min(side, power_of_two(extent(last)))
    return Tile({"y": y, "x": x}, False, min(8, 4 * (x * y // 1024)) or 1)


def reduction(kernel: Kernel) -> Tile:
    """Blocks of a row or column kernel: rows (or columns) "x", the reduced axis "r"."""
    rows, inner = extent(numel(kernel.rows)), numel(kernel.inner)
    width = power_of_two(extent(inner))
    if kernel.kind == "column":
        return _column(rows, inner, width)
    persistent = isinstance(inner, int) and width <= _most_in_registers(kernel)
    if not persistent:
        block = min(LOOP_BLOCK, width)
        x = 1 if block >= 256 else min(ROW_ELEMENTS // block, power_of_two(rows))
        return Tile({"x": x, "r": block}, False, 8 if block >= LOOP_BLOCK else 4)
    if rows >= MANY_ROWS and width >= WARP_ELEMENTS // 2:
        moved = [r.dtype.itemsize for r in _row_tensors(kernel)]
        if 0 < len(moved) <= MOST_IN_WARP and max(moved) <= 4:
            return _by_warps(width, sum(moved))
    x = max(1, min(ROW_ELEMENTS // width, power_of_two(rows), 64))
    while x > 1 and rows // x < ENOUGH_PROGRAMS:
        x //= 2
    return Tile({"x": x, "r": width}, True, max(1, min(16, x * width // 512)))


def _by_warps(width: int, moved: int) -> Tile:
    """Rows, or large parts of them, each in one warp: sums over threads are the fewest, and over
    warps, where they have to wait for each other, there are none in rows of usual lengths."""
    x = max(1, WARP_ELEMENTS // width)
    while x * width * moved < LEAST_MOVED:
        x *= 2
    return Tile({"x": x, "r": width}, True, max(1, width // WARP_ELEMENTS))


def _row_tensors(kernel: Kernel) -> list[Ref]:
    """What is read and written at every point of the rows."""
    places = [(item.ref, item.coords[0]) for item in kernel.reads()]
    places += [(s.ref, s.index) for p in kernel.phases for s in p.stmts if isinstance(s, Store)]
    rows, inner = set(kernel.rows), set(kernel.inner)
    whole = (ref for ref, at in places if at.variables() & rows and at.variables() & inner)
    return list(dict.fromkeys(whole))


def along(rows: Size, inner: Size) -> Tile:
    """A few whole rows at a time, which one program walks: as many bytes on their way as rows of
    which each has a program of its own."""
    width = power_of_two(extent(inner))
    x = max(1, min(ROW_ELEMENTS // width, power_of_two(extent(rows)), 64))
    return Tile({"x": x, "r": width}, True, max(1, min(16, x * width // 512)))


def stages(bytes_read: int) -> int:
    """How many blocks of a walk are under way, of which all but one lie in shared memory.

    Between two reductions over the threads of a program nothing is asked for: the next two rows
    are, meanwhile, as far as two programs share a multiprocessor.
    """
    return next((n for n in (3, 2) if (n - 1) * bytes_read <= MOST_AHEAD), 1)


def _column(columns: int, inner: Size, width: int) -> Tile:
    x = min(COLUMNS, power_of_two(columns))
    while x > FEW_COLUMNS and columns // x < ENOUGH_PROGRAMS:
        x //= 2
    persistent = isinstance(inner, int) and width <= COLUMN_STEPS
    r = width if persistent else min(COLUMN_ELEMENTS // x, width)
    return Tile({"x": x, "r": r}, persistent, max(1, min(8, x * r // 512)))


def _most_in_registers(kernel: Kernel) -> int:
    """How long a row may be to stay in registers, by what is held of it at once."""
    reads = {item.ref.root for item in kernel.reads()}
    wide = any(s.dtype == torch.float64 for p in kernel.phases for s in p.stmts
               if isinstance(s, Running))  # fmt: skip
    stores = sum(isinstance(s, Store) for p in kernel.phases for s in p.stmts)
    return MAX_PERSISTENT // (2 if wide or len(reads) + stores > 6 else 1)
