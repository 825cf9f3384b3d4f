"""The tuned constants of the graph passes, and the limits of caches and analyses.

Counts are elements unless it says otherwise. None depends on a machine.
"""

from __future__ import annotations

MIN_FOLD_RATIO = 4
"""Fewest elements of the activation for each of the weight for which folding a batch norm into the
weight saves traffic; frozen parameters are folded once, always."""
FEW_ROWS = 4
"""Queries of attention below which its probabilities are saved for backward: they are small beside
the keys, and recomputed ones are less exact."""
MAX_EVALUATED = 1 << 22
"""The largest constant mask that is computed and analyzed."""
MAX_MASK_NODES = 64
"""Most nodes of the graph that compute such a mask."""
MAX_NUMBERS = 8
"""Most distinct numbers of a constant mask that is analyzed."""
MAX_SIZES = 64
"""Most sets of sizes whose programs are kept; the least recently used program is dropped."""
MAX_VARIANTS = 8
"""Most results in the cache for one graph, which differ in their guards on sizes."""
MANY_CORE_RULES = 100
"""A target with rules for more core operators than this has rules for whatever others decompose
into; for a target with fewer, each decomposition is tried."""
LARGEST_SCALE = 2.0**16
"""The factor or divisor of attention's scores is below this number and above its inverse."""
MAX_TIMED_RUNS, MIN_TIMED_RUNS, TIMED_SECONDS = 20, 3, 2.0
"""A graph is timed by as many runs as fit into so many seconds, within these bounds."""
KEPT_REPORTS = 256
"""How many compiled graphs a backend reports, the newest."""
KEPT_PROGRAMS = 16
"""Of these, how many keep their kernels' programs in memory, to show them."""
