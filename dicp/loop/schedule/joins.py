"""Merges the iteration domains of two groups.

In: two groups. Out: one group over the common domain of both, or None where they do not agree.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from dicp.loop.ir.expr import Ref
from dicp.loop.ir.graph import Compute
from dicp.loop.ir.index import ZERO, Index, Size, Var, product, variable
from dicp.loop.ir.reshape import refine
from dicp.loop.schedule.groups import CrossRow, Group
from dicp.loop.schedule.legality import is_outer
from dicp.loop.thresholds import MIN_CROSS_ROW


def join(a: Group, b: Group) -> Group | None:
    """One group over the common domain of both, or None where the domains do not agree."""
    if a.dims == b.dims and (a.axes == b.axes or a.axes is None or b.axes is None):
        return _union(a, b, a.dims, a.axes or b.axes)
    if a.axes is None and b.axes is not None:
        return _join_rows(b, a) or _join_refined(a, b)
    if b.axes is None and a.axes is not None:
        return _join_rows(a, b) or _join_refined(a, b)
    return _join_refined(a, b)


def _union(a: Group, b: Group, dims: tuple[Size, ...], axes: frozenset[int] | None) -> Group:
    nodes, coords = [*a.nodes, *b.nodes], {**a.coords, **b.coords}
    return Group(nodes, dims, axes, coords, a.rows_only | b.rows_only)


def _moved(group: Group, mapping: dict[Var, Index]) -> dict[Compute, tuple[Index, ...]]:
    return {n: tuple(c.substitute(mapping) for c in cs) for n, cs in group.coords.items()}


def _join_rows(reduced: Group, rows: Group) -> Group | None:
    """Both groups, the members of `rows` once per row of `reduced`; None where the rows differ."""
    own = reduced.row_axes
    blocks = refine(tuple(reduced.dims[k] for k in own), rows.dims)
    if blocks is None or len(blocks) != len(own):
        return None
    if product(rows.dims) != product(reduced.dims[k] for k in own):
        return None
    mapping = _recombine(rows.dims, [(size, j, Var(own[i], size)) for size, i, j in blocks])
    moved = Group(
        rows.nodes, reduced.dims, reduced.axes, _moved(rows, mapping), set(rows.computes())
    )
    return _union(reduced, moved, reduced.dims, reduced.axes)


def _recombine(dims: Sequence[Size], blocks: Sequence[tuple[Size, int, Var]]) -> dict[Var, Index]:
    """Each old axis as a mixed-radix number of its factors: (size, old axis, new variable)."""
    mapping: dict[Var, Index] = {}
    for axis, size in enumerate(dims):
        parts = [(s, v) for s, k, v in blocks if k == axis]
        value, step = ZERO, 1
        for factor, var in reversed(parts):
            value = value + variable(var) * step
            step = step * factor  # type: ignore[assignment]
        mapping[Var(axis, size)] = value
    return mapping


def _join_refined(a: Group, b: Group) -> Group | None:
    refined = _refined(a, b)
    if refined is None:
        return None
    first, second = refined
    if first.axes is not None and second.axes is not None and first.axes != second.axes:
        return None
    return _union(first, second, first.dims, first.axes or second.axes)


def _refined(a: Group, b: Group) -> tuple[Group, Group] | None:
    """Both groups over their common domain; None where they have none."""
    blocks = refine(a.dims, b.dims)
    if blocks is None or product(a.dims) != product(b.dims):
        return None
    dims = tuple(size for size, _, _ in blocks)
    moved = []
    for group, side in ((a, 1), (b, 2)):
        entries = [(p[0], p[side], Var(k, p[0])) for k, p in enumerate(blocks)]
        axes = group.axes and frozenset(
            k for k, p in enumerate(blocks) if p[side] in (group.axes or ())
        )
        mapping = _recombine(group.dims, entries)
        cross_row_axes = frozenset(
            k for k, p in enumerate(blocks) if p[side] in group.cross_row_axes
        )
        moved.append(
            Group(
                group.nodes, dims, axes, _moved(group, mapping), group.rows_only,
                cross_row=group.cross_row, cross_row_axes=cross_row_axes,
            )
        )  # fmt: skip
    return moved[0], moved[1]


def only_sums(group: Group) -> bool:
    """Whether a group holds only floating-point sums and the pointwise computes that feed them."""
    if group.axes is None or group.rows_only or group.cross_row:
        return False
    return all(
        n.kind == "pointwise"
        or (n.kind == "reduce" and n.op == "sum" and n.out.dtype.is_floating_point)
        for n in group.computes()
    )


def without_tail(group: Group) -> tuple[Group, Group | None]:
    """An outer reduction without what is computed from its results, and the pointwise group of
    that; the group itself and None where there is none, or where the reduction needs some of it."""
    if not group.rows_only or group.cross_row:
        return group, None
    reduced = {n.out for n in group.computes() if n.kind == "reduce"}
    tail: list[Compute] = []
    for node in group.computes():
        if node in group.rows_only and _reads_any(node, reduced):
            tail.append(node)
            reduced.add(node.out)
    kept = [n for n in group.computes() if n not in tail]
    needed = any(_reads_any(n, {t.out for t in tail}) for n in kept)
    if needed or set(tail) != group.rows_only:
        return group, None
    coords = {n: group.coords[n] for n in kept}
    sums = Group([*kept], group.dims, group.axes, coords, order=group.order)
    own = [(Var(k, group.dims[k]), Var(i, group.dims[k])) for i, k in enumerate(group.row_axes)]
    dims, mapping = tuple(v.size for _, v in own), {old: variable(new) for old, new in own}
    coords = {n: tuple(c.substitute(mapping) for c in group.coords[n]) for n in tail}
    return sums, Group([*tail], dims, None, coords, order=group.order)


def _reads_any(node: Compute, results: Container[Ref]) -> bool:
    """Whether a node reads one of these results, or a view of one."""
    return any(ref in results for read in node.reads() for ref in read.chain())


def equally_partitioned(group: Group, partitions: Mapping[Ref, int]) -> bool:
    """Whether all reductions of a group partition their rows into the same number of parts, or none
    does: a kernel whose rows are partitioned has no other result that depends on all rows."""
    own = [n for n in group.computes() if n.kind != "pointwise" and n not in group.cross_row]
    counts = {partitions.get(n.out, 0) for n in own}
    return counts <= {0} or (len(counts) == 1 and not group.rows_only)


def join_cross_row(rows: Group, sums: Group, allowed: CrossRow) -> Group | None:
    """The inner reduction `rows` with the cross-row reduction `sums` fused in, or None."""
    if rows.is_call or rows.axes is None or any(n.kind == "scan" for n in rows.computes()):
        return None
    refined = _refined(rows, sums)
    if refined is None:
        return None
    first, second = refined
    assert first.axes is not None and second.axes is not None
    own = frozenset(first.row_axes)
    reduces = frozenset(n for n in second.computes() if n.kind == "reduce")
    if second.axes == own:
        if allowed.parts and not all(n.out in allowed.partitions for n in reduces):
            return None
    elif not (second.axes < own and allowed.parts):
        return None
    else:
        kept = product(first.dims[k] for k in own - second.axes)
        if not (isinstance(kept, int) and kept >= allowed.parts):
            return None
    if first.cross_row and first.cross_row_axes != second.axes:
        return None
    width = product(first.dims[k] for k in first.axes)
    count = product(first.dims[k] for k in first.row_axes)
    if not isinstance(width, int) or width > allowed.widest:
        return None
    if isinstance(count, int) and count < MIN_CROSS_ROW:
        return None
    group = _union(first, second, first.dims, first.axes)
    group.cross_row, group.cross_row_axes = first.cross_row | reduces, second.axes
    complete = {n.out for n in group.cross_row}  # after the last row
    if any(r in complete for n in group.computes() for r in n.reads()) or is_outer(group):
        return None
    return group
