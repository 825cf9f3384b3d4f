"""The tuned constants of generated C++, found on 2 cores of an AMD EPYC with AVX-512.

Counts are elements, operations are those of `ir.ops`, unless it says otherwise. What the library is
compared with is measured on each machine instead (`calibration.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# ---- threads --------------------------------------------------------------------------------

PARALLEL_COST = 32768
"""Elementary operations below which a thread team costs more than it saves."""
SPLIT_COST = 8 * PARALLEL_COST
"""Elementary operations from which splitting the rows of an outer reduction into chunks pays for
their accumulators."""

FEW_ROWS, FEW_TILES = 4, 4
"""Rows of an inner reduction, and tiles of columns of an outer one, below which threads divide the
reduction loop instead."""

# ---- loops ----------------------------------------------------------------------------------

UNROLL_AND_JAM = 4
"""Rows per unrolled and jammed iteration: column sums load and store their accumulators once for
all of them, and scans wait for the previous element of their own row only."""
MAX_PEELED = 16
"""Iterations up to which g++ unrolls an inner loop completely (max-completely-peel-times)."""
MAX_INTERLEAVED = 4
"""Iterations up to which a last loop is unrolled if each of them computes something else: g++
vectorizes the loop around it with up to four interleaved stores."""
SUM_LANES = 16
"""Sums that a vectorized loop over a row adds up at once."""
SUM_ADDITIONS = 16
"""Additions to a lane of a block of a long sum, whose results are then added to totals in
double: the error grows with these only. A sum of more additions is long."""
LANE_ADDITIONS = SUM_ADDITIONS // 2
"""The same where each lane adds up a row of more than SUM_ADDITIONS elements: with SUM_ADDITIONS,
rows of 31 to 47 had 1.0 to 1.13 times eager's error, root mean square; so it is 0.81 to 0.86."""
SHORT_ROW, SHORT_PREFETCHED_ROW = 2 * SUM_LANES, 64 * SUM_LANES
"""Elements of a row up to which a vectorized loop adds them without totals, and those where it
prefetches the next row. g++ adds the lanes of a reduction one after another in float: without
totals, rows of 40 to 1,024 elements had 1.2 to 1.5 times eager's error (root mean square; worst of
60 seeds 3.4). With totals it is 0.55 to 0.72, and loops take 0.77 to 1.02 of the time."""
ROW_TILE = 64
"""Rows of a tile of short rows, and the fewest for which there are tiles."""
MAX_SHORT_ROW = {1: 64, 2: 64, 4: 48, 8: 32, 16: 0}
MAX_SHORT_ROW_OF_LINES = {4: 32, 8: 0, 16: 0}
"""Bytes of an element -> elements of a row below which it is computed in vectors of rows: of any
row, and of those that fill whole cache lines and with them vectors of their own. 20,000 rows of one
to four bytes an element took 0.1 to 0.6 of the time by that; softmax of 48 and 64 float32 took 1.5,
their sum 1.1 to 1.4, and sums of 24 to 64 int64 1.4 to 2.0."""
SUM_BLOCK = SUM_ADDITIONS * SUM_LANES
"""Elements of a row per block of a vectorized loop."""
SHORT_COLUMN, ROW_BLOCK = 64, 32
"""Rows up to which column sums of UNROLL_AND_JAM rows are added to totals in double, and rows of a
block of longer ones, whose sums are: blocks of 64 had 2.8 times eager's error at the worst of 30
seeds. Sums of 64x512 to 8192x1024 elements take 0.92 to 1.03 of the time with those blocks, and
0.68 to 0.99 where the number of rows is no multiple of UNROLL_AND_JAM."""
COLUMN_TILE = 512
"""Columns of an outer reduction that have their accumulators in the L1 cache at a time: 4 KiB of
doubles for each reduction."""
MIN_HIDDEN_STEP = 16
"""Elements of a step from which the compiler may not be told their number: fewer fit a vector."""
MAX_CELLS = 9
"""Most copies of a loop's text, for ranges of the loops around it: those of two axes with three
kinds of ranges each, as in the gradient of padding."""
POSITION_BLOCK = 256
"""Elements of a row per block of an argmax or argmin, which buffers the block's values to find
the extremum's position among them."""
ONLINE_BLOCK = 512
"""Elements of a row per block of online softmax: their exponentials are summed while the elements
are in the L1 cache."""
SCAN_BLOCK = 256
"""Elements of a row per block of a vectorized prefix sum."""
MIN_SCAN = 32
"""Elements of a row below which its prefix sum is scalar."""
CONVERTED_IN_REGISTERS, CONVERTED_IN_CACHE = (32, 40, 48, 56), 256
"""float16 elements of a loop that are converted at once, before or after it. Blocks of the first
sizes, one of which must divide the loop, stay in registers, and others in the L1 cache: an addition
takes 0.2 and 0.4 of the time of conversions by integer arithmetic."""
MIN_CONVERTED, MAX_CONVERTED_ONCE = 8, 64
"""Iterations of a loop from which its elements are converted in vectors, and those up to which all
are at once."""
HALF_VECTOR, MAX_HALF_ROW = 16, 128
"""bfloat16 elements of half a vector, by which a row is computed if it is shorter than MAX_HALF_ROW
and its remainder has at least that many elements: they would be computed one by one."""
MIN_IN_PLANES = 1 << 19
"""Elements below which a core's private caches keep all rows."""
SHIFT_SAMPLE = 32
"""The first elements of a row, from which its mean is estimated."""
MIN_SHIFTED = 4 * SHIFT_SAMPLE
"""Elements of a row below which it is summed first: the sample would be much of the pass."""
MIN_PLANE = SHIFT_SAMPLE
"""Elements of a plane below which its partial sums would be a large part of the traffic."""

# ---- transposes -----------------------------------------------------------------------------

TILE = 64
"""Extent of a tile in both loops: whole cache lines of each tensor, but few at a time, since rows
whose length is a power of two share cache sets."""
COPY_TILE = (64, 128)
"""Extents of a tile of a transposed copy, along its source and along its result: long rows of the
result, and few rows of it at a time."""
NON_TEMPORAL_WIDTH = 64
"""Extent along its source of a tile whose result gets non-temporal stores, one line of each row:
with more rows at a time, too few of the stores share a page."""
SQUARE = 16
"""Extent of the squares of elements that are transposed in registers."""

# ---- non-temporal stores and prefetches -----------------------------------------------------

MIN_LANE_LOOP = 128
"""Elements of a loop below which lane accumulators cost too much."""
MIN_REDUCTION_BYTES = 4
"""Fewest bytes of an element for non-temporal stores in inner reductions: conversions to shorter
floats bound them, not memory."""
BEYOND_PRIVATE_CACHES = 1 << 20
"""Bytes from which a tensor does not stay in a core's private caches."""
PREFETCH_AHEAD = 1024
"""Elements by which a long row's loads are prefetched ahead: with 1,024 the maximum of 4 million
floats takes 0.46 of the time without."""
PREFETCH_BYTES = 1 << 14
"""The most bytes of a prefetched row that the L1 cache keeps beside the row being computed."""

# ---- scatters -------------------------------------------------------------------------------

MIN_OWNED = 16
"""Fewest elements of each row of a scatter that a thread owns: shorter ranges fill no vector."""
MIN_SORTED_ROW = 64
"""Elements of a row from which sorting rows by destination pays."""
MAX_DESTINATIONS_PER_ROW = 8
"""Destinations per row beyond which counting them takes longer than the collisions."""
MIN_DESTINATIONS = 128
"""Destinations from which there are enough for all threads, however frequent some are."""
ROWS_AT_ONCE = (4, 2, 1)
"""Rows added at once: their destination is read and written once for all of them."""

# ---- routines ---------------------------------------------------------------------------------

MAX_CONVOLUTION = 1 << 32
"""Multiplications above which oneDNN's reordering of images and filters costs little beside its
faster kernel."""


@dataclass(frozen=True)
class ConvolutionLimits:
    """Which float32 convolutions of row-major images our kernels compute faster than oneDNN."""

    light: int
    """Multiplications up to which oneDNN's call costs more than any kernel saves."""
    most: int
    """Multiplications up to which direct convolutions and products of pixels are faster."""
    columns: int
    """Pixels per row of the result up to which im2col is faster."""
    flat_pixels: int
    """Pixels of the result up to which it is, where filters read one pixel or one row."""
    reduced_pixels: int
    """Pixels of the result up to which it is where they are reduced over."""
    reduced_columns: int
    """Pixels per row of the result below which it is where they are reduced over."""
    filters: float
    """Filters of several taps from which im2col takes less time than a direct convolution."""


WIDE_CONVOLUTIONS = ConvolutionLimits(3 << 23, MAX_CONVOLUTION, 16, 64, 256, 16, 128)
"""With AVX-512. im2col, measured on ResNet-50 and a U-Net: 0.4 to 0.85 of the library's time and
0.5 to 1.0 of our direct kernel's; with 32 pixels per row 1.05 to 1.4.

im2col copies a pixel once for each tap, and the direct kernel computes the positions between rows.
Of the direct kernel's time it takes, on an AMD EPYC (Zen 4), 17 to 112 pixels per row, 1.09 to 1.14
with 32 filters, 1.0 to 1.06 with 64, 0.98 to 1.03 with 96, 0.95 to 1.0 with 128 and 0.87 to 0.96
with 256 and more."""
NARROW_CONVOLUTIONS = ConvolutionLimits(1 << 23, 1 << 23, 8, 16, 64, 12, math.inf)
"""With AVX2, 38 shapes on an AMD EPYC (Zen 3), one thread, of the library's time. Results: im2col
0.6 to 0.9 within these limits, 1.0 to 1.3 with 14 and 16 pixels per row; direct 1.0 up to 2^23
multiplications, 1.1 to 1.4 beyond; products of pixels 1.2 to 1.4. Gradients of images: 1.0 to 2.1
beyond. Gradients of filters: im2col 0.25 to 0.9, direct 0.5 to 0.8, but 1.15 to 1.4 for 1x1
filters."""
CONVOLUTION_TILE, MIN_TILE_SHARE = 32, 0.75
"""Pixels of a tile, and the share of them that must be used if there are several images.

Between the two bounds above, convolutions take 0.4 (one image of few pixels, 1x1 filters) to 1.05
of oneDNN's time; with a share of 0.67, 1.25. For a single image the share does not matter, as
oneDNN's reordering of filters is not amortized."""
THIN_PIXELS = 1024
"""Pixels up to which the gradient of filters of 3 or 4 channels takes 0.4 of the library's time by
im2col; with more pixels 1.5 or more."""
NHWC_PIXELS, NHWC_IMAGES_PIXELS, NHWC_FILTERS_PIXELS = 256, 1, 12
"""Pixels of a channels-last bfloat16 result up to which our kernel is faster than the library, and
pixels for each filter up to which our gradients of images, and of filters, are.

Measured on 76 shapes with 64 to 1024 channels, 1x1 to 5x5 filters that are in no cache, processor
time of one thread: results 0.30 to 0.87 of the library's time, from 784 pixels on 0.94 to 1.26;
gradients of images 0.51 to 1.03, with more pixels up to 1.22; gradients of filters 0.08 to 0.93
with up to 4 pixels for each, and on an AMD EPYC (Zen 5) 0.64 to 1.04 with 4 to 16, then up to
1.44."""
NHWC_TILE_PIXELS, NHWC_TILE_STRIDED_PIXELS = 3136, 2048
"""The same on tile registers where patches are copied: of results and gradients of images at stride
1, and of gradients of images with strides. Of filters, twice as many if there are strides.

On an Intel Xeon (Emerald Rapids), one thread, 32 to 1024 channels, 1x1 to 5x5 filters: results 0.30
to 0.98 of the library's time, with 4096 and 6272 pixels 1.04 to 1.18; gradients of images at stride
2 0.32 to 0.95, with 3136 pixels 0.92 to 1.17; gradients of filters 0.18 to 1.02, with 24 pixels for
each 1.17 to 1.39, with strides up to 24 of them 0.29 to 0.87, with 42 and 49 0.93 to 1.12."""
MIN_IN_PLACE, MAX_IN_PLACE = 7, 1 << 21
"""Pixels of a row, and numbers of the filters, from and up to which tile registers read patches in
place (`d_min_in_place` and twice `d_max_in_place` in nhwc.h).

On an Intel Xeon (Emerald Rapids), one thread, 32 to 320 channels, 7x7 to 112x112 pixels: 0.46 to
0.88 of the library's time, with 32 channels 0.88 to 1.0; 0.57 to 0.93 of the time with copied
patches; 750 to 1360 GFLOP/s."""
MAX_ORDERED_TAPS = 25
"""Taps of row-major filters that gradients read and write (`d_max_ordered_taps` in nhwc.h)."""
NHWC_STRIDED_PIXELS = 1024
"""Pixels of a channels-last bfloat16 result with strides up to which our gradient of images, or a
transposed convolution, is faster if filters have several taps.

Measured at stride 2 with 16 to 512 channels, 1x1 to 5x5 filters, on an AMD EPYC (Zen 5), processor
time of one thread: 0.40 to 0.96 of the library's time, with 3136 pixels 1.09 to 1.28; for 1x1
filters 0.31 to 0.79, however many pixels."""
TRANSPOSED_PIXELS = 256
"""Pixels of a row-major float32 image from which a transposed convolution whose filters are as
large as its stride is faster as a product.

Measured on an AMD EPYC (Zen 4): 0.27 to 0.9 of the library's time with 784 pixels and more, 1.0 to
1.2 with 196, as filters are packed for each image."""
MIN_FILTERS = 32
"""Filters that must read an im2col patch to amortize its copy."""
MAX_TRANSPOSED = 1 << 30
"""Multiplications in bfloat16 up to which our kernel is faster though it packs a column-major left
operand, as in gradients of weights; beyond, the library's is up to a tenth faster."""
MAX_FUSED_DEPTH = 512
"""Depth up to which our kernel with a fused activation is taken even where BLAS multiplies faster.

A separate pass reads and writes 8 bytes an element, 0.4 ns at 20 GB/s a core, and computes for
about 1 ns; a product takes 0.02 ns a row of depth at 100 GFLOP/s a core: a seventh is saved."""
MAX_PACKING = 1 << 19
"""Elements of the second operand, per row of the first, up to which packing it pays off."""
MIN_CHANNELS = 16
"""Channels that fill the widest vector."""
MAX_DEPTHWISE = 1 << 19
"""Elements of a bfloat16 result above which, for three taps, the library takes 0.6 to 0.9 of our
time. Elsewhere our kernels take 0.3 to 0.85 of the library's, and 1.06 for 14 MiB of float32."""
EAGER_IM2COL_PIXELS = 20480
"""Elements of a single image up to which eager uses im2col."""
MAX_DOTS, MAX_NARROW_DOTS, MAX_BYTES_DOTS = 8, 4, 12
"""Rows up to which a product whose right operand is column-major, as weights are, is computed by
dot products (`d_max_dot_rows`): with AVX-512, with shorter vectors, and with int8 weights. They
take ceil(rows / 4) passes over a column in the L1 cache, tiles one.

On an AMD EPYC (Zen 5), one thread, weights of 512x2048 to 4096x4096 numbers in the last cache or in
none, time of dot products over that of the faster kind of tiles: 0.5 to 0.8 for 4 rows, 0.7 to 1.2
for 5 to 8, 0.85 to 1.5 for 10 and 12. Compiled for AVX2, float32: 0.9 to 1.07 for 2 and 4 rows, 1.2
to 1.6 for 5 to 8."""
MAX_AXPYS, MAX_NARROW_AXPYS = 2, 1
"""Rows up to which a product whose right operand is row-major is computed by sums of its rows
(`d_max_axpy_rows`), in float32 and in bfloat16.

On an AMD EPYC (Zen 5), one thread, 64x256 to 384x8192 numbers: one row takes 0.40 to 0.83 of
oneDNN's time in float32 and 0.52 to 0.61 in bfloat16, 1.0 to 1.2 of BLAS's; two rows 0.57 to 0.95
of our tiles' time in float32 and 0.83 to 1.21 in bfloat16, more rows up to 2."""
MAX_TILE_BYTES_DOTS, MAX_TILE_BYTES_ROWS = 4, 192
"""Rows in bfloat16 up to which a product with int8 weights is computed by dot products, and by a
routine of its own, where there are tile registers.

On an Intel Xeon (Emerald Rapids), one thread, weights of 1024x2816 to 4096x4096 numbers, of the
least time of the other routines: dot products, which multiply in float32 there, 0.51 to 0.85 for up
to 4 rows; tiles 0.68 to 0.71 for 8 rows, 0.67 to 0.77 for 16 to 128, 0.79 to 0.87 for 192, 0.91 to
1.15 for 256."""
MAX_BYTES_ROWS, MAX_OWN_BYTES_ROWS = 64, 512
"""Rows up to which a product reads int8 weights unconverted, everywhere and where our kernel
multiplies faster than BLAS. Otherwise they are converted in memory at every run.

Time of one thread, relative to that with converted weights, 512x2048 to 4096x1024 weights, on an
AMD EPYC with AVX512-BF16: float32 0.67 to 0.81 for 13 rows, 0.86 to 0.97 for 64, 0.93 to 1.00 for
256 and 512; bfloat16 0.60 to 0.63, 0.79 to 0.84, 0.90 to 0.97. Beyond 512 rows they are packed
more than once."""
MAX_TRANSPOSED_ROWS, TRANSPOSED_VECTOR, TRANSPOSED_FILL = 64, 16, 0.8
"""Rows up to which the transposed product reads such an operand in place, rows of its vectors, and
the share of ceil(rows / TRANSPOSED_VECTOR) vectors that rows must fill: the rest is computed for
nothing. Of a single vector in float32 any share will do. On an AMD EPYC with AVX512-BF16, 16 to 64
rows: 1.05 to 1.25 times as fast as packing the operand."""
MAX_TRANSPOSED_TILE_ROWS = 192
"""The same on tile registers, where a product of one row is computed by dot products. On an Intel
Xeon (Emerald Rapids) with weights of 384x1024 to 1024x1024, 1 row takes 0.37 to 0.40 of oneDNN's
time and 2 to 48 rows 0.45 to 0.68. Relative to packing the operand, with one and two threads, 16
to 64 rows take 0.54 to 0.74 of the time, 128 rows 0.86 to 1.0, 192 and 197 rows 0.88 to 1.22, 256
rows 0.85 to 1.1, 384 and 512 rows 1.0 to 1.24."""
SPLIT_PANELS, MIN_SPLIT_DEPTH = 50, 48
"""How many times the rows and columns of a float32 product, added up, its result must be, and the
depth it must have, to be computed on tile registers as products of bfloat16 parts: each operand is
split once, which takes as long as multiplying a number of it 50 times.

On an Intel Xeon (Emerald Rapids), one thread, of BLAS's time: 64 rows 0.79 to 0.92 with 256 columns
or more, 98 rows 0.79 to 0.88, 197 rows 0.69 to 0.72, 512 rows 0.64 to 0.73, 8192 rows 0.90; outside
of the limits 0.97 to 5. Depths of 48 take 0.89 to 0.92, of 32 1.02 and of 16 1.35 to 1.41. In
batches of 49 to 197 rows, with a depth of 32 to 197, 1.04 to 2.9. In the slow state of the
tile unit (`d_tile_step`) 0.97 to 1.1; with two threads, both states, 0.63 to 1.14. The error, root
mean square, is 0.41 to 0.97 of BLAS's, with a depth of 16384 and positive numbers 1.24."""
FEW_BATCH_COLUMNS = 32
"""Columns of batched float32 products up to which BLAS is faster where it is the faster library.

On an Intel Xeon (Emerald Rapids), of BLAS's time, which does not pack: 8, 16 and 24 columns take
1.4 to 3.3, 32 columns 1.13 to 1.23, 64 columns 0.96 to 1.2."""
MAX_NARROW_ROWS = 2
"""Rows of a product with a column-major matrix, such as weights, up to which it is not computed in
float32 where the library has no kernels for 16-bit floats.

On an AMD EPYC (Zen 3), one thread, float16, 1024x1024 to 4096x1024 weights, time in float32, with
the conversion of the weights, over the library's: one row 1.6 to 2.4, two 1.0 to 1.3, three 0.6 to
1.2, four 0.6 to 0.8, 16 0.4 to 0.5."""
MIN_PRODUCT_ROWS = 4
"""Rows below which packing the other operand of a product is not amortized."""

MIN_GRADIENT_COLUMNS, MIN_IMAGE_COLUMNS = 12, 7
"""Pixels per row of the result from which our gradient of filters is faster, for several images and
for one. On ResNet-50 and a U-Net, relative to the library's time: 0.55 to 0.8 from 16 pixels per
row on; with 8, 1.06 for four images and 0.5 for one; with 4, 1.4; for 1x1 filters 0.5 to 0.9."""
MIN_CHANNEL_SHARE = 0.75
"""Least share of the panels of CONVOLUTION_TILE channels that are used in such a gradient."""
THIN_CHANNELS = 4
"""Most channels of filters whose gradient is taken by im2col (THIN_PIXELS)."""
MAX_CACHE_PER_CPU = 16 << 20
"""Bytes of last-level cache per logical CPU beyond which the size is a host's, shown to a virtual
machine that has a part of it: AMD's with stacked caches have 8 MiB, others 1 to 4."""

# ---- calibration ------------------------------------------------------------------------------

FEW_PRODUCT_ROWS = 32
"""Rows below which a product is limited by reading its second operand."""
LARGE_PRODUCT = 1 << 29
"""Multiplications from which packing costs little beside arithmetic: 5 ms at 100 GFLOP/s."""
LIBRARY_MARGIN = {"blas": 1.25, "onednn": 0.9}
"""How much faster than BLAS oneDNN must be to be taken, and our kernels with it, where the table of
processors names BLAS or oneDNN. oneDNN is about 2 times as fast on AMD's Zen 4 where MKL takes a
generic path, and 0.95 on Intel's Sapphire Rapids, where MKL reaches 93% of the peak. Our kernels
fuse bias and activation: on a Zen 4 with a ratio of 1.06 to 1.14, float32 models gain 4 to 18%."""
TILE_MARGIN = 0.9
"""How much of oneDNN's speed our product on tile registers must have to be taken: bias, activation
and the call, which oneDNN's product does not save, are more than the tenth."""
TURNS, MAX_TURNS = 9, 45
"""Ratios of one measurement, and of all measurements until it counts as unstable."""
MIN_SAMPLE_SECONDS = 3e-4
"""Seconds that one sample lasts at least; short products are repeated within a sample."""

# ---- memory ----------------------------------------------------------------------------------

STACK_BYTES = 1 << 16
"""The most one kernel's arrays take of a thread's stack, which may be as small as 512 KiB."""

# ---- compilation ----------------------------------------------------------------------------

UNIT_TEXT = 8_000
"""Characters of kernel text that justify a translation unit of their own: they compile in about
0.1 s, and the compiler starts in 0.05 s."""

# ---- limits of kernels ----------------------------------------------------------------------

MAX_HEAD = 256
"""The largest head size that the attention kernels support (`d_max_head_size` in attention.h)."""
ONEDNN_PADDING, ONEDNN_TAPS = 3, 7
"""Most columns of padding of a convolution that oneDNN's kernel for AVX2 takes, and most taps of a
row where the stride is not 1 (oneDNN, jit_avx2_conv_kernel)."""
