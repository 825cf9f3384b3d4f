"""The tuned constants of lowering, scheduling and running loop programs.

They bound work that grows with a graph, and decide between computing a value again and storing it.
Costs are those of `ir.ops`: one is about one vector addition. The numbers that were measured were
found on 2 cores of an AMD EPYC with AVX-512.
"""

from __future__ import annotations

# ---- lowering -------------------------------------------------------------------------------

MAX_UNROLLED = 32
"""Most window points whose sum is unrolled; more are a reduction loop."""
MAX_ARGMAX = 128
"""Most window points of a maximum that are unrolled; more are reduction loops."""
MAX_CHAIN = 8
"""Most points of a row that a maximum compares one after the other; chains of this length are then
compared in a tree. A tree alone takes 1.4 times as long for 5 points, and a chain over a whole
window may exceed the recursion limit."""
MAX_GATHERED = 9
"""Most windows over a point of a channels-last image whose gradients it gathers on the host: 2x2 of
stride 2 take half of a scatter's time, 3x3 0.7 to 0.9, 5x5 of stride 1 1.06."""
MAX_CONCATENATED = 128
"""The most tensors concatenated in one kernel: each adds a nested select for every element."""
MAX_UNROLLED_STEP = 4
"""The largest step of a replaced slice for which a target that `overwrites` selects each element:
if the step divides the axis, the loop over it is unrolled, and its stores are interleaved."""

MAX_CANCELLED = 2.0**-6
"""The largest share of a sum of squares that counts as its rounding error."""
MIN_SHIFT = 4.0
"""The smallest error of a mean that is corrected, as a multiple of the standard deviation times
the rounding error of the dtype."""
SAMPLE_STEP = 13
"""A mean is estimated from every SAMPLE_STEP-th element. The usual widths of images are no
multiples of it, so that elements of all columns are in the sample. The square of the estimate's
error is at most SAMPLE_STEP - 1 variances, so that the variance, computed from deviations from the
estimate, is more than MAX_CANCELLED of their squares."""
FEW_CHANNELS = 64
"""Fewest channels of a group for which group normalization of channels-last images adds up rows of
channels. With fewer, sums of each channel are computed first: that takes 0.19 to 0.72 of the time
for 4 to 40 channels, and 1.2 for 80."""
MIN_SCATTER_RATIO = 4
"""Elements of a 16-bit tensor per element scattered into it above which only the slices, not the
tensor, are copied to float32: 0.25 of the time for 512 rows scattered into 50000x64."""

# ---- inlining: a producer is computed at its readers' points --------------------------------

MAX_INLINE_COST = 10
"""Highest cost of a value that readers at other points compute again instead of loading it."""
MAX_NESTED_COST = 16
"""Highest cost of such a value and of those that it is computed from and that are computed again
with it, added up: a chain of cheap values, as in a recurrence, would be computed again whole."""
MAX_REPEATED_COST = 2
"""Highest cost of a value that is recomputed for every element it is broadcast to."""
MAX_INLINE_LOADS = 4
"""Most loads of such a value: each is memory traffic that a stored value would replace by one."""
HEAVY = 16
"""Cost of an elementary function: a polynomial of about this many operations. Values that cost as
much are kept rather than computed again."""
MAX_BETWEEN = 8
"""Most values computed from a value of any cost for the only reader that needs it."""
MAX_BODY = 400
"""Expression nodes that inlining may add to one reader: bounds text and compile time."""
MAX_TABLE_COST, TABLE_USES = 3, 16
"""A value that loads nothing, is used this often per element and costs more than MAX_TABLE_COST is
stored, not inlined (interpolation weights)."""

# ---- order of loops -------------------------------------------------------------------------

ASSUMED_STRIDE = 256
"""The extent assumed for a dynamic stride."""
STRIDE_POWER, MAX_STRIDE = 0.25, 1e6
"""An access along a loop costs its bytes * stride ** STRIDE_POWER, for strides up to MAX_STRIDE:
a guess between the number of cache lines and that of pages, untuned."""
ADJACENT = 4
"""What an access along memory saves, in units of its bytes: more than three of stride 64 cost, so
that the loop along which most tensors are contiguous is innermost."""
TIE = 1e-6
"""What each place further in takes from a loop's sum in the given order. One more element of stride
costs at least STRIDE_POWER * MAX_STRIDE ** (STRIDE_POWER - 1) = 8e-6 bytes: eight places less."""
MAX_DIVISIONS = 8
"""Most loops of a kernel that are split where an index divides them: each split rewrites all its
statements, and a division that is left is computed per element."""

# ---- loops and kernels ----------------------------------------------------------------------

MAX_RANGES, MAX_PARTS = 8, 128
"""Most copies of a loop's text, and most parts, into which it is split where conditions on its
variable change."""
MIN_CROSSED = 16
"""Fewest elements, along both loops, for which a reduction does not store results that are
transposed relative to the memory that it loads: a kernel of their own transposes tiles of this
extent."""
MAX_REFS = 48
"""Most tensors that one kernel reads and writes: each takes a register for its address."""
MAX_MEMBERS = 96
"""Most operators of one kernel: compile time grows faster than its text."""
MAX_CROSS_ROW = 8192
"""Most accumulators of a fused cross-row reduction: they stay in the cache from row to row."""
MIN_CROSS_ROW = 32
"""Fewest rows for which a cross-row reduction is fused."""
MAX_SCRATCH_ROW = 16384
"""Most elements of a row whose values are kept in scratch rather than rematerialized."""
MAX_REPEATED_READS = 4
"""Most reads from memory that a later pass repeats rather than load a scratch value."""

# ---- memory ---------------------------------------------------------------------------------

FREED_AT_ONCE = 1 << 20
"""Bytes of dead buffers at which a sequence of kernels is split, so that they are freed.

Allocations after the split can reuse their memory. A split costs a few microseconds.
"""
MAX_KEPT = 64 << 20
"""Most bytes of workspace that are kept until the process ends, whether runs take them or not."""
MIN_REUSED = 1 << 16
"""Fewest bytes of a result whose memory is reused: smaller ones come from the lists of the C
library, which stay mapped, and allocating those takes about as long as finding out that no
tensor holds the memory."""
KEPT_SHARE = 16
"""Divides the machine's memory: the most that results keep between runs, and large workspaces."""
IDLE_SECONDS = 10.0
"""Memory of results and large workspaces that no run uses for twice this time is released."""
MAX_PLANS = 64
"""Most combinations of sizes whose execution plan is kept; the oldest is planned again."""
MAX_RANDOM_RANGE = 1 << 53
"""Widest range of random integers: remainders of 63 bits by a larger number are not equally likely.
"""
