"""The forms of kernels on the host: teams of threads, tiles, passes over rows, cache lines.

Cores share memory and have vector units; a form says which loops threads divide, which loop is
vectorized, and in which blocks. The renderers print it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dicp.loop.ir.access import Access
from dicp.loop.ir.expr import Read
from dicp.loop.ir.index import Indirect, Size, Var
from dicp.loop.ir.kernel import Form, Phase, Reduce, Scan, Stmt, Store
from dicp.loop.passes.moments import Deviations
from dicp.loop.passes.split_loops import Limits, Range

LINE_BYTES = 64
"""Bytes of a cache line: a non-temporal store of whole lines does not read them first."""

Prefetch = tuple[Read, Var, int]
"""A load, and the loop by how many of whose steps it is prefetched ahead."""


def divides(count: int, var: Var) -> bool:
    """Whether a loop's size is a known multiple of `count`."""
    return isinstance(var.size, int) and var.size % count == 0


@dataclass(frozen=True)
class Team:
    """A team of threads that divide the iterations of a loop, or of `collapse` nested loops."""

    collapse: int = 0
    work: Size | None = None
    """The cost of the loops where it is dynamic: a team runs if it is at least `least`."""
    least: int = 0


@dataclass(frozen=True, eq=False)
class Strip:
    """A range of a vectorized loop, without conditions on the loop's variable."""

    range: Range
    lanes: int = 0
    """Elements of a cache line where the range is strip-mined, one line at a time; else 0."""
    non_temporal: tuple[Store, ...] = ()
    """Stores of whole lines that do not read them first."""
    prefetch: tuple[Prefetch, ...] = ()


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of the blocks of loops in which float16 elements are converted at once."""

    fewest: int = 0
    """Iterations of a loop from which they are."""
    single: int = 0
    """Iterations up to which the whole loop is a block."""
    in_registers: tuple[int, ...] = ()
    """Sizes of blocks that stay in registers: one of them must divide the loop's."""
    in_cache: int = 0
    """The size of other blocks, the last of which may be shorter."""

    def even(self, size: Size) -> int | None:
        """The size of blocks in registers that divide a loop."""
        return next((n for n in self.in_registers if size % n == 0), None)


@dataclass(frozen=True, eq=False)
class HostForm(Form):
    """A form of the host: its loops, divided by `team` if there is one."""

    team: Team | None = None
    scalar_rows: bool = field(default=False, kw_only=True)
    """Whether the compiler is kept from vectorizing loops around the last one."""
    stack_bytes: int = field(default=0, kw_only=True)
    """Bytes of a thread's stack for arrays; what does not fit lies in the workspace."""
    converted: BlockSizes = field(default=BlockSizes(), kw_only=True)
    hidden: frozenset[tuple[Var, int]] = field(default=frozenset(), kw_only=True)
    """Vectorized loops, and steps between their elements that the compiler is not told."""

    @property
    def non_temporal(self) -> bool:
        """Whether there are non-temporal stores: each thread then ends with a store fence."""
        return False


# ---- kernels without a reduction ---------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Inside:
    """The last loop inside ranges of loops around it: it need not test conditions on those."""

    limits: tuple[Limits, ...]
    """The ranges; of several of one loop, any."""
    strips: tuple[Strip, ...]


@dataclass(frozen=True, eq=False)
class Points(HostForm):
    """Every statement at every point, the last loop vectorized."""

    strips: tuple[Strip, ...] = ()
    half_vectors: bool = False
    """Whether the loop takes half a vector of 16-bit floats at a time."""
    inside: tuple[Inside, ...] = ()
    """What takes the place of `strips` inside ranges."""

    @property
    def non_temporal(self) -> bool:
        strips = (*self.strips, *(s for each in self.inside for s in each.strips))
        return any(s.non_temporal for s in strips)


@dataclass(frozen=True, eq=False)
class Transposed(HostForm):
    """Tiles of the last loop and of `crossing`, along which some tensors are contiguous."""

    crossing: Var = field(kw_only=True)
    extents: tuple[int, int] = field(kw_only=True)
    """Of a tile, along `crossing` and along the last loop."""
    ranges: tuple[Range, ...] = field(kw_only=True)
    """The last loop in ranges, each in tiles of its own."""
    copy: bool = False
    """Whether the kernel only copies a transposed tensor: tiles are transposed in registers."""
    staged: tuple[Access, ...] = ()
    """Reads that are transposed into a tile of their own first."""
    stored: tuple[Access, ...] = ()
    """Stores to a tile of their own, which is transposed afterwards."""
    streams: bool = False
    """Whether a copy's stores are non-temporal."""

    @property
    def non_temporal(self) -> bool:
        return self.streams


@dataclass(frozen=True, eq=False)
class Epilogue:
    """What reads each row of a scatter's sums once it is complete: the row stays in a cache, and
    the sums have no other place in memory."""

    row: Var
    element: Var
    """The loops over rows of sums, and over the elements of one."""
    sums: tuple[Access, ...]
    """The reads of the row's sums."""
    strips: tuple[Strip, ...]
    """The loop over elements."""
    untouched: tuple[Strip, ...]
    """The same for a row to which nothing is added."""

    @property
    def non_temporal(self) -> bool:
        return any(s.non_temporal for s in (*self.strips, *self.untouched))


@dataclass(frozen=True, eq=False)
class Scattered(HostForm):
    """Stores that may collide, but not along the last loop if `distinct`; if `owned`, each thread
    owns a range of that."""

    distinct: bool = False
    owned: bool = False
    epilogue: Epilogue | None = None
    """Of a scatter whose first loop is over rows of sums."""

    @property
    def non_temporal(self) -> bool:
        return self.epilogue is not None and self.epilogue.non_temporal


@dataclass(frozen=True, eq=False)
class ByDestination(HostForm):
    """A sum of whole rows into indexed rows: rows are sorted by destination, which threads own."""

    store: Store = field(kw_only=True)
    place: Indirect = field(kw_only=True)
    rows_at_once: tuple[int, ...] = field(kw_only=True)
    """Rows of one destination that are added at once: as many as possible first."""
    epilogue: Epilogue | None = None

    @property
    def non_temporal(self) -> bool:
        return self.epilogue is not None and self.epilogue.non_temporal


# ---- inner reductions --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass over the reduction loops of a phase."""

    phase: Phase
    loops: tuple[Var, ...]
    serial: bool = False
    """Whether elements depend on those before them: no vectors."""
    blocks: tuple[Reduce | Scan, ...] = ()
    """Long floating sums, which go in blocks: their error grows with these only."""
    block: int = 0
    """Iterations per block of the loop that goes in blocks: the last one, of `grouped` loops the
    one around it."""
    strip: Strip | None = None
    """The last loop, strip-mined, if those sums have lane accumulators."""
    one_block: bool = False
    """Whether that loop is the only one and a single block."""
    grouped: bool = False
    """Whether the last loop is so short that iterations of the one around it share a block."""
    extrema: Mapping[Reduce, Reduce] = field(default_factory=dict)
    """argmax or argmin -> the max or min beside it, whose block's values are then searched."""
    added: frozenset[Stmt] = frozenset()
    """Statements of `phase` that this pass adds to the kernel's: such extrema."""
    strips: tuple[Strip, ...] = ()
    """The last loop in ranges; empty where it goes in blocks or over a part of its range."""
    half_vectors: bool = False

    @property
    def non_temporal(self) -> bool:
        return any(s.non_temporal for s in self.strips)


@dataclass(frozen=True, eq=False)
class Online:
    """Online softmax in blocks: the maximum so far and the rescaled sum of exponentials."""

    row_max: Pass
    total: Reduce
    block: int
    """Elements of a block."""


@dataclass(frozen=True, eq=False)
class ShiftedSums:
    """Sums over deviations from a shift, which estimates the mean, in one pass over the elements; a
    second one follows where they show that the shift was far from the mean."""

    sums: Deviations
    sample: int
    """The most elements from which the mean is estimated."""
    estimate: Pass
    """The sum of the first elements, and that of their squares."""
    over: Pass
    """The sums over deviations from `shift`."""

    @property
    def shift(self) -> str:
        """The name of the estimate of the mean."""
        return f"shift_{self.sums.squares.name}"

    @property
    def residual(self) -> str:
        """The name of the sum of deviations from it."""
        return f"residual_{self.sums.squares.name}"


@dataclass(frozen=True, eq=False)
class MeanStep:
    """Sums over deviations from a mean, of those over deviations from shifts near it."""

    found: ShiftedSums


RowStep = Phase | Pass | Online | ShiftedSums | MeanStep
"""What rows are passed over for, one after the other."""


@dataclass(frozen=True, eq=False)
class Rows(HostForm):
    """Threads divide the rows; each row is passed over phase after phase."""

    passes: tuple[RowStep, ...] = ()
    cross_row: tuple[Store, ...] = ()
    """Fused cross-row sums: the rows are in parts, each with accumulators of its own."""

    @property
    def non_temporal(self) -> bool:
        return any(isinstance(p, Pass) and p.non_temporal for p in self.passes)


@dataclass(frozen=True, eq=False)
class ShortRows(HostForm):
    """Rows shorter than a few vectors: the loop over rows is vectorized, a tile of them at a time,
    whose elements are transposed in registers first and whose results are transposed back."""

    steps: tuple[Phase, ...] = field(kw_only=True)
    """The phases; what they compute for a row alone is named in a phase of its own."""
    tile: int = field(kw_only=True)
    """Rows of a tile."""
    staged: tuple[Access, ...] = ()
    """Reads that are transposed into a tile of their own."""
    results: tuple[Store, ...] = ()
    """Stores that are transposed from a tile of their own."""
    read_back: Mapping[Access, int] = field(default_factory=dict)
    """Reads of what the kernel has stored before -> which of the results they read."""
    long: frozenset[Reduce | Scan] = frozenset()
    """Long floating sums, which go in blocks whose results are then added to totals in double."""
    block: int = 0
    """Elements per block."""


@dataclass(frozen=True, eq=False)
class Split(HostForm):
    """Few long rows: threads divide each row's reduction loop into chunks."""

    first: Pass = field(kw_only=True)
    tail: tuple[Phase, ...] = ()

    @property
    def non_temporal(self) -> bool:
        return self.first.non_temporal


@dataclass(frozen=True, eq=False)
class PlaneStep:
    """One pass over all planes."""

    over: Pass
    shifted: tuple[ShiftedSums, ...]

    @property
    def non_temporal(self) -> bool:
        return self.over.non_temporal


@dataclass(frozen=True, eq=False)
class Planes(HostForm):
    """Rows in several planes: each pass reads the planes in the order of memory."""

    steps: tuple[Phase | MeanStep | PlaneStep, ...] = ()

    @property
    def non_temporal(self) -> bool:
        return any(isinstance(s, PlaneStep) and s.non_temporal for s in self.steps)


@dataclass(frozen=True, eq=False)
class PrefixSums(HostForm):
    """Prefix sums, block by block, in vectorized loops."""

    block: int = field(kw_only=True)
    """Elements of a row per block."""


@dataclass(frozen=True, eq=False)
class JammedScans(HostForm):
    """Scans of several rows in one loop, by unroll-and-jam."""

    jam: int = field(kw_only=True)
    """Rows of one loop."""


# ---- outer reductions --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Columns(HostForm):
    """Tiles of columns, row after row; if `split`, threads divide the rows of a single tile."""

    split: bool = False
    tile: int = field(kw_only=True)
    """Columns of a tile: all of them if `split`."""
    long: frozenset[Reduce | Scan] = frozenset()
    """Long floating sums: their totals are in double."""
    blocks: tuple[int, int] | None = None
    """The reduction loop that goes in blocks, which are added up before they are added to the
    totals, and its iterations per block; None: jammed rows alone are."""
    jam: int = 1
    """Iterations of the last reduction loop that are unrolled and jammed."""
