"""Splits reductions with few results: parts of the axis in parallel, then their results.

sum over r of f(x, r) = sum over s of (sum over c of f(x, s * C + c)), with R = S * C, or with a
last part that reaches past the end. The number of parts S is fixed; for a dynamic R the size C of a
part is computed at every launch, so that the number of programs does not depend on R.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dicp.gpu.facts import DeviceFacts
from dicp.gpu.thresholds import (
    COLUMNS,
    CROSS_ROW_PARTS,
    CROSS_ROW_ROWS,
    MAX_CROSS_ROW_WIDTH,
    MIN_COLUMN,
    MIN_CROSS_ROW_PARTS,
    MIN_PARTS,
    MIN_ROW,
)
from dicp.gpu.tiles import extent
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, Load, Ref, Rewriter
from dicp.loop.ir.graph import Call, Compute, Graph, Node, refs_in
from dicp.loop.ir.index import (
    ZERO,
    Index,
    Size,
    Var,
    contiguous_strides,
    dense_strides,
    domain,
    flatten,
    variable,
)
from dicp.loop.ir.ops import neutral_element
from dicp.loop.schedule.groups import CrossRow
from dicp.loop.schedule.partition import chunk_of

SPLITTABLE = frozenset({"sum", "prod", "max", "min", "any", "all"})


@dataclass(frozen=True)
class AxisSplit:
    """A split of a reduced axis into `parts`, the last of which may be shorter or empty."""

    axis: int
    parts: int


def cross_row_sums(graph: Graph, first: Mapping[Any, int], facts: DeviceFacts) -> CrossRow:
    """Splits reductions as `split_reductions` does; returns which cross-row sums may fuse into the
    reductions of their rows: each program keeps the sums over the rows that it loops over."""
    partitions = split_reductions(graph, first, facts, partition=True)
    return CrossRow(MAX_CROSS_ROW_WIDTH, MIN_CROSS_ROW_PARTS, partitions)


def split_reductions(
    graph: Graph, first: Mapping[Any, int], facts: DeviceFacts, partition: bool = False
) -> dict[Ref, int]:
    """Splits each long reduction with few results into two, the first with many results.

    Dynamic sizes count as their values in the `first` call. With `partition`, rows of cross-row
    sums that do not split evenly are to be partitioned among programs: returns the number of parts
    by the sum's result (see `dicp.loop.schedule.partition`).
    """
    computes = [n for n in graph.nodes if isinstance(n, Compute)]
    rows = {(n.shape, n.axes) for n in computes if n.kind == "reduce"}
    wanted = {n: _cross_row_programs(n, rows, first) for n in computes}
    splits = {n: _cross_row_cut(n, wanted[n]) for n in computes}
    partitions = [n for n in computes if partition and wanted[n] and splits[n] is None]
    _split_all(
        graph,
        {n: splits[n] or _axis_split(n, first, facts) for n in computes if n not in partitions},
    )
    return {_partial_sums(graph, n, wanted[n]).out: wanted[n] for n in partitions}


def _partial_sums(graph: Graph, node: Compute, parts: int) -> Compute:
    """Inserts a sum with one result per program; `node` becomes the sum of these results."""
    axis = node.axes[0]
    kept = _of_parts(node, axis, parts)
    # The results of a part lie together, as the kernel of a partition stores them.
    strides = dense_strides(kept, sorted(range(len(kept)), key=lambda k: k != axis))
    left = Ref(f"{node.out.name}_parts", kept, node.out.dtype, strides, "temp")
    whole = replace(node, out=left)
    left.producer = whole
    node.shape, node.axes, node.body = kept, (axis,), ir.load(left, domain(kept))
    graph.nodes.insert(graph.nodes.index(node), whole)
    return whole


def _of_parts(node: Compute, axis: int, parts: int) -> tuple[Size, ...]:
    """The shape of a reduction's results of each part; the parts take the place of `axis`."""
    counts = dict.fromkeys(node.axes, 1) | {axis: parts}
    return tuple(counts.get(k, s) for k, s in enumerate(node.shape))


def _split_all(graph: Graph, splits: Mapping[Compute, AxisSplit | None]) -> None:
    found = {n: cut for n, cut in splits.items() if cut is not None}
    private = _private(graph, found) if found else {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node in found:
            assert isinstance(node, Compute)
            nodes.append(_split(node, found[node], private))
        nodes.append(node)
    graph.nodes[:] = nodes


def _private(graph: Graph, readers: Container[Node]) -> dict[Ref, Compute]:
    """Pointwise results that only `readers` read, directly or through other such results.

    A result that some node reads at two places is excluded: it would be computed for each place.
    """
    known = {r.root for r in refs_in(graph.outputs)}
    written: set[Ref] = set()
    for node in graph.nodes:
        if isinstance(node, Compute) and node.out.base is not None:
            written.add(node.out.root)
        elif isinstance(node, Call) and node.mutates:
            written |= {r.root for r in node.reads()}
    private: dict[Ref, Compute] = {}
    for node in reversed(graph.nodes):
        known |= _read_at_many_places(node)
        inner = isinstance(node, Compute) and node.kind == "pointwise" and node.out.base is None
        if inner and not node.realize and node.out not in known:  # type: ignore[union-attr]
            if not any(r.root in written for r in node.reads()):
                private[node.out] = node  # type: ignore[union-attr, assignment]
                continue  # inlined into its readers, which then read what it reads
        if node not in readers:
            known |= {r.root for r in node.reads()}
        known |= {r.root for r in node.reads() if r.base is not None}
    return private


def _read_at_many_places(node: Node) -> set[Ref]:
    places = {(x.ref, x.coords) for x in node.loads()} if isinstance(node, Compute) else set()
    return {ref for ref, count in Counter(ref for ref, _ in places).items() if count > 1}


def _cross_row_programs(
    node: Compute, rows: Container[tuple[Any, Any]], first: Mapping[Any, int]
) -> int:
    """The number of programs if the cross-row sum `node` is fused into an inner reduction.

    One kernel computes both and reads the rows once. 0 if separate kernels are better, or `node` is
    no such sum.
    """
    sums = node.kind == "reduce" and node.op == "sum" and node.out.dtype.is_floating_point
    if not sums or len(node.shape) - 1 in node.axes:
        return 0
    kept = tuple(k for k in range(len(node.shape)) if k not in node.axes)
    width = math.prod(node.shape[k] for k in kept)
    if (node.shape, kept) not in rows or not isinstance(width, int) or width > MAX_CROSS_ROW_WIDTH:
        return 0
    reduced = math.prod(_current_size(node.shape[k], first) for k in node.axes)
    wanted = min(reduced // CROSS_ROW_ROWS, CROSS_ROW_PARTS)
    return wanted if wanted >= MIN_CROSS_ROW_PARTS else 0


def _cross_row_cut(node: Compute, wanted: int) -> AxisSplit | None:
    """An even split of a cross-row sum into nearly `wanted` parts; None if there is none."""
    if not wanted or not all(isinstance(s, int) for s in node.shape):
        return None
    cut = _even_split(node, wanted)
    return cut if cut.parts >= max(MIN_CROSS_ROW_PARTS, wanted // 2) else None


def _even_split(node: Compute, most: int) -> AxisSplit:
    """The split into the most equal parts, at most `most`; of one part where there is none."""
    parts, axis = max((_divisor(node.shape[k], most), -k) for k in node.axes)
    return AxisSplit(-axis, parts)


def _axis_split(node: Compute, first: Mapping[Any, int], facts: DeviceFacts) -> AxisSplit | None:
    """How to split a reduction; None unless it has too few programs to fill the chip."""
    if node.kind != "reduce" or node.op not in SPLITTABLE or 0 in node.shape:
        return None
    shape = [_current_size(s, first) for s in node.shape]
    results = math.prod(s for k, s in enumerate(shape) if k not in node.axes)
    reduced = math.prod(shape[k] for k in node.axes)
    outer = _is_outer(node)
    programs = -(-results // COLUMNS) if outer else results
    if not 0 < programs < facts.multiprocessors:
        return None
    least = MIN_COLUMN if outer else MIN_ROW
    wanted = min(reduced // least, facts.enough_programs // programs)
    even = _even_split(node, wanted)
    if even.parts >= MIN_PARTS:
        return even
    size, axis = max((shape[k], -k) for k in node.axes)
    parts = min(wanted, size)
    return AxisSplit(-axis, parts) if parts >= MIN_PARTS else None


def _is_outer(node: Compute) -> bool:
    """Whether adjacent elements belong to different results: an outer reduction."""
    votes = 0
    for item in node.loads():
        index = flatten(item.coords, item.ref.strides)
        for var in index.variables():
            if index.coefficient(var) == 1:
                votes += -1 if var.position in node.axes else 1
    return votes > 0 if votes else len(node.shape) - 1 not in node.axes


def _current_size(size: Size, first: Mapping[Any, int]) -> int:
    if isinstance(size, int):
        return size
    known = size.subs(first)
    return int(known) if known.is_Integer else extent(size)


def _divisor(size: Size, most: int) -> int:
    """The largest divisor of `size` that is at most `most`; 1 where none is known."""
    if not isinstance(size, int):
        return 1
    return next((d for d in range(min(most, size), 1, -1) if size % d == 0), 1)


def _split(node: Compute, cut: AxisSplit, private: Mapping[Ref, Compute]) -> Compute:
    """The reduction of each part, as a new node; `node` becomes the reduction of its results."""
    axis, parts = cut.axis, cut.parts
    size = node.shape[axis]
    chunk = chunk_of(size, parts)
    shape: tuple[Size, ...] = (*node.shape[:axis], parts, chunk, *node.shape[axis + 1 :])
    mapping: dict[Var, Index] = {}
    for k, s in enumerate(node.shape):
        at = k if k < axis else k + 1
        mapping[Var(k, s)] = variable(Var(at, s))
    place = variable(Var(axis, parts)) * chunk + variable(Var(axis + 1, chunk))
    mapping[Var(axis, size)] = place
    body = node.body
    uneven = not isinstance(size, int) or size % parts != 0
    if uneven:  # its domain differs from its sources', so that fusion would not merge them
        body = _inlined(body, private)
    body = Rewriter(mapping)(body)
    if uneven:
        body = _inside(place, size, body, node.op)
    axes = tuple(k if k < axis else k + 1 for k in node.axes)
    kept = tuple(1 if k in axes else s for k, s in enumerate(shape))
    partial = Ref(f"{node.out.name}_parts", kept, node.out.dtype, contiguous_strides(kept), "temp")
    first = Compute(
        partial, shape, body, "reduce", axes, node.op, after=node.after, origins=node.origins
    )
    partial.producer = first
    node.shape = _of_parts(node, axis, parts)
    idx = domain(node.shape)
    node.body = ir.load(partial, [*idx[: axis + 1], ZERO, *idx[axis + 1 :]])
    node.axes = (axis,)
    return first


def _inlined(body: Expr, private: Mapping[Ref, Compute]) -> Expr:
    """`body` with every load of a `private` result replaced by the expression that computes it."""
    made: dict[Load, Expr] = {}

    def value(item: Load) -> Expr | None:
        source = private.get(item.ref)
        if source is None:
            return None
        if item not in made:
            own = (Var(k, s) for k, s in enumerate(source.shape))
            moved = Rewriter(dict(zip(own, item.coords, strict=True)), value)
            made[item] = ir.opmath(moved(source.body), item.dtype)
        return made[item]

    return Rewriter({}, value)(body)


def _inside(place: Index, size: Size, body: Expr, op: str) -> Expr:
    """`body` before the end of the axis, and the identity of `op` past it."""
    end = ir.index_value(Index(size))
    test = ir.apply("lt", torch.bool, ir.index_value(place), end)
    start = ir.const(neutral_element(op, body.dtype), body.dtype)
    return ir.apply("where", body.dtype, test, ir.masked(test, body), start)
