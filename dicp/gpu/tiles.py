"""Block sizes and warps: pure functions of a kernel's extents, its element sizes and the device.

Constants that DeviceFacts does not give stand in `thresholds.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from dicp.gpu.facts import DeviceFacts
from dicp.gpu.thresholds import (
    ASSUMED_SIZE,
    COLUMN_ELEMENTS,
    COLUMN_STEPS,
    COLUMN_THREADS,
    COLUMNS,
    ELEMENTS_A_LANE,
    ELEMENTS_A_THREAD,
    FEW_COLUMNS,
    LIGHT,
    LOOP_BLOCK,
    LOOP_THREADS,
    MANY_BLOCKS,
    MANY_ROWS,
    MANY_TENSORS,
    MAX_BYTES_IN_WARP,
    MAX_PERSISTENT,
    MAX_ROWS,
    MAX_TENSORS_IN_WARP,
    MAX_TRANSPOSED_WARPS,
    MIN_BLOCK,
    MIN_BYTES_MOVED,
    MIN_POINTWISE_BLOCK,
    MIN_WARP_ROW,
    POINTWISE_BLOCK,
    POINTWISE_THREADS,
    ROW_ELEMENTS,
    ROW_THREADS,
    SHORT_LOOP_THREADS,
    TRANSPOSED,
    TRANSPOSED_PER_PROGRAM,
    WHOLE_ROW_BLOCK,
)
from dicp.loop.ir.expr import Ref
from dicp.loop.ir.index import Size, Var, product
from dicp.loop.ir.kernel import Kernel, Scan


@dataclass(frozen=True)
class Tile:
    """Elements per block of each axis by name, whether the reduced axis fits one block, warps."""

    blocks: dict[str, int]
    persistent: bool
    warps: int


def extent(size: Size) -> int:
    """A size for choosing a form: ASSUMED_SIZE stands for a symbolic one."""
    return size if isinstance(size, int) else ASSUMED_SIZE


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(value - 1, 0).bit_length()


def numel(loops: Iterable[Var]) -> Size:
    """The number of points of a loop nest."""
    return product(v.size for v in loops)


def warps(elements: int, facts: DeviceFacts, most: int) -> int:
    """Warps for a block of `elements`: 16 elements per thread, at most `most` warps."""
    return max(1, min(most, elements // (ELEMENTS_A_THREAD * facts.lanes)))


def pointwise(kernel: Kernel, facts: DeviceFacts) -> Tile:
    """Points per program: smaller blocks until there are enough programs to fill the chip."""
    count = extent(numel(kernel.parallel))
    block = min(POINTWISE_BLOCK, max(power_of_two(count), MIN_BLOCK))
    many = count >= MANY_BLOCKS * facts.enough_programs * POINTWISE_BLOCK
    if many and 0 < _bytes_read(kernel) < LIGHT:
        block = 2 * POINTWISE_BLOCK
    while block > MIN_POINTWISE_BLOCK and count // block < facts.enough_programs:
        block //= 2
    return Tile({"x": block}, False, warps(2 * block, facts, POINTWISE_THREADS // facts.lanes))


def _bytes_read(kernel: Kernel) -> int:
    """Bytes read from memory per element; tensors that all elements share come from a cache."""
    loops = set(kernel.parallel)
    own = {item.ref for item in kernel.reads() if item.index.variables() & loops}
    return sum(ref.dtype.itemsize for ref in own)


def transposed(outer: Size, last: Size, width: int, facts: DeviceFacts) -> Tile:
    """A tile of two axes, each contiguous for some tensor; elements have at least `width` bytes."""
    side = transposed_side(width, facts)
    y = min(side, power_of_two(extent(outer)))
    x = min(side, power_of_two(extent(last)))
    count = POINTWISE_THREADS // facts.lanes * (x * y // TRANSPOSED_PER_PROGRAM)
    return Tile({"y": y, "x": x}, False, min(MAX_TRANSPOSED_WARPS, count) or 1)


def transposed_side(width: int, facts: DeviceFacts) -> int:
    """The elements, of `width` bytes each, along either axis of a tile that is transposed."""
    return min(max(facts.line_bytes // width, TRANSPOSED[0]), TRANSPOSED[1])


def with_rows_of_part(kernel: Kernel) -> Kernel:
    """The kernel as a reduction over the rows of a part, if its rows are in parts."""
    if kernel.partition is None:
        return kernel
    part, chunk = kernel.partition.part, kernel.partition.chunk
    inner = (Var(part.position + 1, chunk),)
    return replace(kernel, parallel=(part, *kernel.parallel), reduction=inner)


def looped_rows(kernel: Kernel) -> tuple[tuple[Var, ...], tuple[Var, ...], Size]:
    """Of a kernel with cross-row sums: the loops that the sums keep, those over rows, and the
    number of rows that a program loops over."""
    if kernel.partition is not None:
        return (), kernel.parallel, kernel.partition.chunk
    kept = set().union(*(s.index.variables() for s in kernel.cross_row_stores()))
    rows = tuple(v for v in kernel.parallel if v not in kept)
    return tuple(v for v in kernel.parallel if v in kept), rows, numel(rows)


def reduction(kernel: Kernel, facts: DeviceFacts) -> Tile:
    """The tile of an inner or outer reduction: parallel loops are axis "x", reduction loops "r"."""
    rows, inner = extent(numel(kernel.parallel)), numel(kernel.reduction)
    width = power_of_two(extent(inner))
    if kernel.kind == "outer_reduction":
        return _outer(rows, inner, width, facts)
    persistent = isinstance(inner, int) and width <= _most_in_registers(kernel)
    if not persistent:
        block = min(LOOP_BLOCK, width)
        x = 1 if block >= WHOLE_ROW_BLOCK else min(ROW_ELEMENTS // block, power_of_two(rows))
        most = LOOP_THREADS if block >= LOOP_BLOCK else SHORT_LOOP_THREADS
        return Tile({"x": x, "r": block}, False, most // facts.lanes)
    if rows >= MANY_ROWS and width >= MIN_WARP_ROW:
        moved = [r.dtype.itemsize for r in _row_tensors(kernel)]
        if 0 < len(moved) <= MAX_TENSORS_IN_WARP and max(moved) <= MAX_BYTES_IN_WARP:
            return _by_warps(width, sum(moved), facts)
    x = max(1, min(ROW_ELEMENTS // width, power_of_two(rows), MAX_ROWS))
    while x > 1 and rows // x < facts.enough_programs:
        x //= 2
    return Tile({"x": x, "r": width}, True, warps(x * width, facts, ROW_THREADS // facts.lanes))


def _by_warps(width: int, moved: int, facts: DeviceFacts) -> Tile:
    """One warp per row, or per large part of it: the fewest reductions across threads, and for rows
    of usual lengths none across warps, which need a barrier."""
    elements = ELEMENTS_A_LANE * facts.lanes
    x = max(1, elements // width)
    while x * width * moved < MIN_BYTES_MOVED:
        x *= 2
    return Tile({"x": x, "r": width}, True, max(1, width // elements))


def _row_tensors(kernel: Kernel) -> list[Ref]:
    """The tensors that are read or written at every point of the parallel and reduction loops."""
    places = [(item.ref, item.index) for item in kernel.reads()]
    places += [(s.ref, s.index) for s in kernel.stores()]
    rows, inner = set(kernel.parallel), set(kernel.reduction)
    whole = (ref for ref, at in places if at.variables() & rows and at.variables() & inner)
    return list(dict.fromkeys(whole))


def cross_row(rows: Size, inner: Size, facts: DeviceFacts) -> Tile:
    """The tile of a program that loops over rows, for fused cross-row sums: a few whole rows at a
    time, with as many bytes in flight as in a kernel with one program per row."""
    width = power_of_two(extent(inner))
    x = max(1, min(ROW_ELEMENTS // width, power_of_two(extent(rows)), MAX_ROWS))
    return Tile({"x": x, "r": width}, True, warps(x * width, facts, ROW_THREADS // facts.lanes))


def stages(bytes_read: int, facts: DeviceFacts) -> int:
    """Pipeline stages of the loop over rows; all but one of their blocks lie in shared memory.

    A program issues no loads between two reductions over its threads. So the next two blocks of
    rows are prefetched, as far as two programs still fit a multiprocessor.
    """
    return next((n for n in (3, 2) if (n - 1) * bytes_read <= facts.prefetch_bytes), 1)


def _outer(columns: int, inner: Size, width: int, facts: DeviceFacts) -> Tile:
    x = min(COLUMNS, power_of_two(columns))
    while x > FEW_COLUMNS and columns // x < facts.enough_programs:
        x //= 2
    persistent = isinstance(inner, int) and width <= COLUMN_STEPS
    r = width if persistent else min(COLUMN_ELEMENTS // x, width)
    return Tile({"x": x, "r": r}, persistent, warps(x * r, facts, COLUMN_THREADS // facts.lanes))


def _most_in_registers(kernel: Kernel) -> int:
    """The longest row that stays in registers, by the values of it that are held at once."""
    reads = {item.ref.root for item in kernel.reads()}
    wide = any(isinstance(s, Scan) and s.dtype == torch.float64 for s in kernel.stmts())
    stores = len(kernel.stores())
    return MAX_PERSISTENT // (2 if wide or len(reads) + stores > MANY_TENSORS else 1)
