"""The tuned constants of GPU kernels that DeviceFacts does not give.

Tiles, splits, products and runs were tuned on an H200 (132 multiprocessors of 2048 threads); each
constant states its reason. Counts are elements unless it says otherwise.
"""

from __future__ import annotations

# ---- tiles ----------------------------------------------------------------------------------

ELEMENTS_A_THREAD = 16
"""Elements of a block per thread: enough loads in flight, few enough for its registers."""
ASSUMED_SIZE = 4096
"""The extent assumed for a dynamic size."""
POINTWISE_BLOCK, MIN_POINTWISE_BLOCK = 1024, 128
"""Elements of a pointwise kernel's block, and what it is halved to while multiprocessors idle."""
MIN_BLOCK = 32
"""Elements of the block of the smallest tensors: one per thread of a warp."""
MANY_BLOCKS = 16
"""Blocks per program that a chip has at a time from which fewer, larger ones are better."""
POINTWISE_THREADS, COLUMN_THREADS, ROW_THREADS = 128, 256, 512
"""Most threads of a program of a pointwise kernel, an outer reduction and an inner reduction."""
LOOP_THREADS, SHORT_LOOP_THREADS = 256, 128
"""Threads of a program that loops over a long row, with blocks of LOOP_BLOCK and with shorter."""
LIGHT = 4
"""Bytes read per element below which a thread takes twice as many elements: with one tensor of
2-byte elements all threads of a multiprocessor have 32 KiB in flight, and need about 40 KiB."""
TRANSPOSED_PER_PROGRAM, MAX_TRANSPOSED_WARPS = 1024, 8
"""Elements of a transposed tile per POINTWISE_THREADS threads, and most warps of it."""
TRANSPOSED = (32, 64)
"""Shortest and longest side of a tile that is transposed; both span a cache line."""
MIN_CROSSING = 8
"""Fewest points of both loops of a transposed tile: shorter lines are not filled."""
MAX_PERSISTENT = 8192
"""Most elements of a row that is kept in registers; fewer if the kernel has many tensors."""
MAX_CROSS_ROW_WIDTH = 4096
"""Most elements of a row whose cross-row accumulators are kept in registers, too."""
MANY_TENSORS = 6
"""Tensors of a row above which only half as many of its elements are kept in registers."""
LOOP_BLOCK = 2048
"""Elements of a long row per iteration: 16 bytes of 2-byte elements per thread of 8 warps."""
COLUMNS = 64
"""Columns of an outer reduction's tile: one 128-byte line of 2-byte elements."""
FEW_COLUMNS = 16
"""Columns of such a tile where there are few columns: still whole sectors of 32 bytes."""
COLUMN_STEPS = 32
"""Most rows of an outer reduction whose tile has all of them: no loop, and no more registers than
COLUMN_ELEMENTS takes."""
COLUMN_ELEMENTS = 4096
"""Elements of an outer reduction's tile: what a program must have in flight at a time."""
ROW_ELEMENTS, MAX_ROWS = 2048, 64
"""Elements of a tile of several short rows, and most of its rows."""
WHOLE_ROW_BLOCK = 256
"""Elements per iteration from which a program that loops over a row has a single row."""
MANY_ROWS = 4096
"""Rows that fill a chip with one warp per row."""
ELEMENTS_A_LANE = 32
"""Elements of such a row per lane of a warp: 64 bytes of 2-byte elements."""
MIN_WARP_ROW = 512
"""Fewest elements of such a row, padded to a power of two."""
MAX_TENSORS_IN_WARP, MAX_BYTES_IN_WARP = 5, 4
"""Most tensors of such rows, and most bytes of an element: more need too many registers."""
MIN_BYTES_MOVED = 4096
"""Fewest bytes that a program reads and writes, to amortize its start."""

# ---- threads of languages written thread by thread (wave of 64, C500's facts; untuned) ------

ACCESS_BYTES = 16
"""Bytes of the widest access of a thread: what one load instruction moves."""
WIDEST = 8
"""Most points of one access: more would need too many registers."""
POINTS_A_THREAD = 8
"""Points of a thread of a pointwise kernel on large tensors."""
ROW_POINTS, FEW_ROW_POINTS = 16, 4
"""Points of a row per thread, which may stay in registers, and where rows are few: more threads
share a row then, so that multiprocessors are busy."""
ROWS_PER_PROGRAM = 4
"""Rows per program that a chip has at a time from which rows are not few."""
MAX_WAVE_POINTS = 32
"""Most points of a row per thread of a group that is one wave, which needs no barrier."""
MAX_GROUP = 512
"""Most threads that share a row."""
ROW_BLOCK = 128
"""Threads of a block of short rows."""
COLUMN_BLOCK = 256
"""Threads of a block of an outer reduction, and most of a pointwise kernel's."""
MIN_COLUMNS = 16
"""Fewest adjacent columns of a block: their elements of 2 bytes fill a sector of 32 bytes."""

# ---- arithmetic -----------------------------------------------------------------------------

MAX_DIVISOR = 2.0**60
"""Bound of a constant divisor and its inverse for division as multiplication by the inverse: both
and their errors are far from the limits of float32."""

# ---- split reductions -----------------------------------------------------------------------

MIN_ROW = 8192
"""Fewest elements that one program of an inner reduction reduces."""
MIN_COLUMN = 128
"""Fewest rows that one program of an outer reduction reduces."""
MIN_PARTS = 4
"""Fewest parts of a split: fewer do not pay for the second kernel, which reduces the parts."""
CROSS_ROW_PARTS = 512
"""Most programs of an inner reduction with fused cross-row sums; each loops over its rows, with a
few rows in flight at a time."""
MIN_CROSS_ROW_PARTS = 48
"""With fewer such programs it is better to reduce each row in a program and sum up afterwards."""
CROSS_ROW_ROWS = 16
"""Fewest rows of such a program."""

# ---- matrix products ------------------------------------------------------------------------

TILINGS = (
    (128, 256, 64, 3, 8),
    (256, 128, 64, 3, 8),
    (128, 128, 64, 4, 8),
    (128, 128, 64, 3, 4),
    (128, 128, 32, 4, 4),
    (128, 64, 64, 4, 4),
    (64, 256, 64, 4, 4),
    (64, 128, 64, 4, 4),
    (64, 64, 64, 5, 4),
    (64, 64, 128, 3, 4),
    (32, 64, 128, 4, 4),
    (16, 128, 128, 4, 4),
    (16, 64, 256, 3, 4),
)
"""Rows, columns and depth of the tiles that the autotuner tries, pipeline stages, warps: from tiles
for large products that fill the chip to those for few rows and great depth."""

MIN_TILE_SIDE = 16
"""The smallest side of a tile that the matrix units accept."""
TILE_GROUP = 8
"""Rows of tiles of a product that consecutive programs cover together, so that the cache holds the
operands."""
PARTS = (2, 4, 8, 16)
"""Split-K factors that the autotuner tries."""
ENOUGH_TILES = 128
"""Tiles that keep every multiprocessor of a large chip busy."""
MIN_STEPS = 4
"""Fewest blocks along the depth of a split-K part."""
MARGIN = 0.97
"""A generated product wins if its time is less than this fraction of the library's."""
REPEATS, ROUNDS = 10, 5
"""Runs of one recording, and recordings timed for one candidate, of which the fastest counts."""

# ---- runs -----------------------------------------------------------------------------------

MAX_KEPT = 256 << 20
"""Bytes of workspaces that a stream keeps between runs; the rest returns to the device's
allocator."""
ORDINARY_RUNS = 2
"""Ordinary runs before the first capture: libraries initialize, kernels are loaded."""
MAX_CAPTURES = 4
"""Captures after which addresses are taken to change with every call, and capture ends."""
