"""Groups of operators that become one kernel, and what they depend on.

In: the nodes of a graph. Out: one `Group` per node, which fusion merges.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from dicp.loop.ir.expr import Ref
from dicp.loop.ir.graph import Call, Compute, Node
from dicp.loop.ir.index import ZERO, Index, Size, Var, variable
from dicp.loop.thresholds import MAX_CROSS_ROW


@dataclass(frozen=True)
class CrossRow:
    """Which cross-row (outer) reductions may fuse into the inner reductions of the same rows."""

    widest: int = MAX_CROSS_ROW
    """Most elements of a row: each needs an accumulator."""
    parts: int = 0
    """0: reductions over all parallel axes. Else: reductions over some of the parallel axes, where
    the others have at least this many points."""
    partitions: Mapping[Ref, int] = field(default_factory=dict)
    """Results of reductions over all parallel axes that fuse even if `parts` is set, and the number
    of programs among which the rows are partitioned: they have room for one sum of each."""


@dataclass(eq=False)
class Group:
    """Nodes that become one kernel (or one call)."""

    nodes: list[Node]
    dims: tuple[Size, ...] = ()
    """Sizes of the iteration domain."""
    axes: frozenset[int] | None = None
    """Those of its axes that are reduced; None for a pointwise group."""
    coords: dict[Compute, tuple[Index, ...]] = field(default_factory=dict)
    """Member -> its own coordinates at each point of the domain."""
    rows_only: set[Compute] = field(default_factory=set)
    """Members that run once per row: at each point of the parallel axes."""
    cross_row: frozenset[Compute] = frozenset()
    """Cross-row reductions, over parallel axes: one accumulator for each element of a row."""
    cross_row_axes: frozenset[int] = frozenset()
    """The axes that `cross_row` reduces."""
    depends: set[Group] = field(default_factory=set)
    """Groups that must run before."""
    order: int = 0
    """Position of its last node in the graph."""

    @property
    def is_call(self) -> bool:
        return isinstance(self.nodes[0], Call)

    @property
    def row_axes(self) -> list[int]:
        return [k for k in range(len(self.dims)) if self.axes is None or k not in self.axes]

    def computes(self) -> list[Compute]:
        return [n for n in self.nodes if isinstance(n, Compute)]


def single(node: Node, order: int) -> Group:
    """The group of one node; axes of size 1 have no loop."""
    if isinstance(node, Call):
        return Group([node], order=order)
    kept = [i for i, s in enumerate(node.shape) if s != 1]
    dims = tuple(node.shape[i] for i in kept)
    coords = tuple(
        variable(Var(kept.index(i), s)) if i in kept else ZERO for i, s in enumerate(node.shape)
    )
    axes = frozenset(kept.index(a) for a in node.axes if a in kept) if node.axes else None
    return Group([node], dims, axes or None, {node: coords}, order=order)


def outputs_of(node: Node) -> Iterable[Ref]:
    """The tensors that a node computes."""
    return (node.out,) if isinstance(node, Compute) else node.outs


def predecessors(node: Node, producers: dict[Ref, Node]) -> Iterator[Node]:
    """Nodes whose results `node` reads, and those it must follow."""
    for ref in itertools.chain.from_iterable(read.chain() for read in node.reads()):
        found = producers.get(ref)
        if found is not None and found is not node:
            yield found
    if isinstance(node, Compute) and node.out.base is not None:
        found = producers.get(node.out.base)
        if found is not None:
            yield found
    yield from node.after
