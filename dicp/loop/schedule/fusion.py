"""Kernel fusion: greedy grouping of computes into kernels, to save memory traffic.

A group has one iteration domain (`dims`), some of whose axes may be reduction axes; the others are
parallel. A member runs at every point of the domain or once per row (a point of the parallel axes).
Two groups merge where their domains agree after both are split into common factors, every read
between them is at the reader's own point, and no path leads out of the group and back in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dicp.loop.ir.expr import Ref
from dicp.loop.ir.graph import Call, Compute, Graph, Node
from dicp.loop.ir.index import ZERO, Index, Size, Var, flatten, product, refine, variable
from dicp.loop.thresholds import MAX_CROSS_ROW, MAX_MEMBERS, MAX_REFS, MIN_CROSS_ROW


@dataclass(frozen=True)
class CrossRow:
    """Which cross-row (outer) reductions may fuse into the inner reductions of the same rows."""

    widest: int = MAX_CROSS_ROW
    """Most elements of a row: each needs an accumulator."""
    parts: int = 0
    """0: reductions over all parallel axes. Else: reductions over some of the parallel axes, where
    the others have at least this many points."""
    shares: Mapping[Ref, int] = field(default_factory=dict)
    """Results of reductions over all parallel axes that fuse even if `parts` is set, and the number
    of programs among which the rows are partitioned: they have room for one sum of each."""


@dataclass(eq=False)
class Group:
    """Nodes that become one kernel (or one call)."""

    nodes: list[Node]
    dims: tuple[Size, ...] = ()
    axes: frozenset[int] | None = None
    coords: dict[Compute, tuple[Index, ...]] = field(default_factory=dict)
    rows_only: set[Compute] = field(default_factory=set)
    cross_row: frozenset[Compute] = frozenset()
    """Cross-row reductions, over parallel axes: one accumulator for each element of a row."""
    cross_row_axes: frozenset[int] = frozenset()
    """The axes that `cross_row` reduces."""
    depends: set[Group] = field(default_factory=set)
    order: int = 0

    @property
    def is_call(self) -> bool:
        return isinstance(self.nodes[0], Call)

    @property
    def row_axes(self) -> list[int]:
        return [k for k in range(len(self.dims)) if self.axes is None or k not in self.axes]

    def computes(self) -> list[Compute]:
        return [n for n in self.nodes if isinstance(n, Compute)]


def single(node: Node, order: int) -> Group:
    if isinstance(node, Call):
        return Group([node], order=order)
    kept = [i for i, s in enumerate(node.shape) if s != 1]
    dims = tuple(node.shape[i] for i in kept)
    coords = tuple(
        variable(Var(kept.index(i), s)) if i in kept else ZERO for i, s in enumerate(node.shape)
    )
    axes = frozenset(kept.index(a) for a in node.axes if a in kept) if node.axes else None
    return Group([node], dims, axes or None, {node: coords}, order=order)


def fuse(graph: Graph, enabled: bool = True, cross_row: CrossRow | None = None) -> list[Group]:
    """The groups of a graph, in topological order.

    `cross_row` says which cross-row reductions may fuse into inner reductions, if any.
    """
    groups: dict[Node, Group] = {}
    for order, node in enumerate(graph.nodes):
        groups[node] = single(node, order)
    producers = {ref: n for n in graph.nodes for ref in outputs_of(n)}
    for node in graph.nodes:
        groups[node].depends = {groups[p] for p in predecessors(node, producers)}
    if enabled:
        fuser = _Fuser(graph, groups, producers, cross_row.shares if cross_row else {})
        fuser.run()
        if cross_row is not None:
            fuser.fuse_cross_row(cross_row)
    unique = list(dict.fromkeys(groups[n] for n in graph.nodes))
    return _sorted(unique)


def outputs_of(node: Node) -> Iterable[Ref]:
    return (node.out,) if isinstance(node, Compute) else node.outs


def predecessors(node: Node, producers: dict[Ref, Node]) -> Iterator[Node]:
    """Nodes whose results `node` reads, and those it must follow."""
    for ref in node.reads():
        current: Ref | None = ref
        while current is not None:
            found = producers.get(current)
            if found is not None and found is not node:
                yield found
            current = current.base
    if isinstance(node, Compute) and node.out.base is not None:
        found = producers.get(node.out.base)
        if found is not None:
            yield found
    yield from node.after


def _sorted(groups: list[Group]) -> list[Group]:
    done: set[Group] = set()
    result: list[Group] = []
    for start in sorted(groups, key=lambda g: g.order):
        stack: list[tuple[Group, bool]] = [(start, False)]
        while stack:
            group, expanded = stack.pop()
            if group in done:
                continue
            if expanded:
                done.add(group)
                result.append(group)
                continue
            stack.append((group, True))
            waiting = sorted((d for d in group.depends if d not in done), key=lambda g: -g.order)
            stack += [(d, False) for d in waiting]
    return result


class _Fuser:
    def __init__(
        self, graph: Graph, groups: dict[Node, Group], producers: dict[Ref, Node],
        shares: Mapping[Ref, int],
    ) -> None:  # fmt: skip
        self.graph = graph
        self.shares = shares
        self.groups = groups
        self.producers = producers
        self.users: dict[Group, set[Group]] = {}
        for group in groups.values():
            for dep in group.depends:
                self.users.setdefault(dep, set()).add(group)

    def run(self) -> None:
        for node in self.graph.nodes:
            if isinstance(node, Compute):
                self._with_producers(node)
        self._horizontally()

    def _with_producers(self, node: Compute) -> None:
        direct = [self.producers[r] for r in node.reads() if r in self.producers]
        candidates = dict.fromkeys(self.groups[p] for p in direct if isinstance(p, Compute))
        for other in sorted(candidates, key=lambda g: -g.order):
            mine = self.groups[node]
            if other is not mine:
                self.merge(other, mine)

    def _readers(self) -> dict[Ref, list[Compute]]:
        readers: dict[Ref, list[Compute]] = {}
        for node in self.graph.nodes:
            if isinstance(node, Compute):
                for ref in dict.fromkeys(node.reads()):
                    readers.setdefault(ref, []).append(node)
        return readers

    def fuse_cross_row(self, allowed: CrossRow) -> None:
        """Fuse each cross-row reduction into the kernel that computes or reads the rows it sums."""
        readers = self._readers()
        for node in self.graph.nodes:
            if not isinstance(node, Compute) or not _only_sums(self.groups[node]):
                continue
            near: list[Node] = [self.producers[r] for r in node.reads() if r in self.producers]
            near += [n for r in node.reads() for n in readers[r]]
            for other in dict.fromkeys(self.groups[n] for n in near):
                mine = self.groups[node]
                if other is mine:
                    continue
                if self._admit(other, mine, join_cross_row(other, mine, allowed)):
                    break

    def _horizontally(self) -> None:
        """Merge groups that no path connects and that read the same tensor over the same domain."""
        for nodes in self._readers().values():
            if len(nodes) < 2:
                continue
            for first, second in zip(nodes, nodes[1:], strict=False):
                a, b = self.groups[first], self.groups[second]
                if a is not b and product(a.dims) == product(b.dims):
                    self.merge(a, b)

    def merge(self, a: Group, b: Group) -> bool:
        if a.is_call or b.is_call:
            return False
        return self._admit(a, b, join(a, b))

    def _admit(self, a: Group, b: Group, merged: Group | None) -> bool:
        """Replace `a` and `b` by `merged` if legal and within the limits; return whether it did."""
        if (
            merged is None
            or len(merged.nodes) > MAX_MEMBERS
            or (self.shares and not _same_shares(merged, self.shares))
            or not legal(merged, a, b)
            or self._cyclic(a, b)
        ):
            return False
        if len(external_refs(merged)) > MAX_REFS:
            return False
        merged.order = max(a.order, b.order)
        merged.depends = (a.depends | b.depends) - {a, b}
        for node in merged.nodes:
            self.groups[node] = merged
        users = (self.users.pop(a, set()) | self.users.pop(b, set())) - {a, b}
        self.users[merged] = users
        for user in users:
            user.depends -= {a, b}
            user.depends.add(merged)
        for dep in merged.depends:
            self.users[dep] -= {a, b}
            self.users[dep].add(merged)
        return True

    def _cyclic(self, a: Group, b: Group) -> bool:
        return self._path_outside(a, b) or self._path_outside(b, a)

    def _path_outside(self, start: Group, end: Group) -> bool:
        """Whether `end` depends on `start` through a third group."""
        stack = [d for d in end.depends if d is not start]
        seen = set(stack)
        while stack:
            group = stack.pop()
            for dep in group.depends:
                if dep is start:
                    return True
                if dep not in seen:
                    seen.add(dep)
                    stack.append(dep)
        return False


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
    position = {n: i for i, n in enumerate([*a.nodes, *b.nodes])}
    nodes = sorted({**dict.fromkeys(a.nodes), **dict.fromkeys(b.nodes)}, key=lambda n: position[n])
    return Group(nodes, dims, axes, {**a.coords, **b.coords}, a.rows_only | b.rows_only)


def _moved(group: Group, mapping: dict[Var, Index]) -> dict[Compute, tuple[Index, ...]]:
    return {n: tuple(c.substitute(mapping) for c in cs) for n, cs in group.coords.items()}


def _join_rows(reduced: Group, rows: Group) -> Group | None:
    """Both groups, the members of `rows` once per row of `reduced`; None where the rows differ."""
    own = reduced.row_axes
    pieces = refine(tuple(reduced.dims[k] for k in own), rows.dims)
    if pieces is None or len(pieces) != len(own):
        return None
    if product(rows.dims) != product(reduced.dims[k] for k in own):
        return None
    mapping = _recombine(rows.dims, [(size, j, Var(own[i], size)) for size, i, j in pieces])
    moved = Group(
        rows.nodes, reduced.dims, reduced.axes, _moved(rows, mapping), set(rows.computes())
    )
    return _union(reduced, moved, reduced.dims, reduced.axes)


def _recombine(dims: Sequence[Size], pieces: Sequence[tuple[Size, int, Var]]) -> dict[Var, Index]:
    """Each old axis as a mixed-radix number of its factors: (size, old axis, new variable)."""
    mapping: dict[Var, Index] = {}
    for axis, size in enumerate(dims):
        parts = [(s, v) for s, k, v in pieces if k == axis]
        value, step = ZERO, 1
        for piece_size, var in reversed(parts):
            value = value + variable(var) * step
            step = step * piece_size  # type: ignore[assignment]
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
    pieces = refine(a.dims, b.dims)
    if pieces is None or product(a.dims) != product(b.dims):
        return None
    dims = tuple(size for size, _, _ in pieces)
    moved = []
    for group, side in ((a, 1), (b, 2)):
        entries = [(p[0], p[side], Var(k, p[0])) for k, p in enumerate(pieces)]
        axes = group.axes and frozenset(
            k for k, p in enumerate(pieces) if p[side] in (group.axes or ())
        )
        mapping = _recombine(group.dims, entries)
        cross_row_axes = frozenset(
            k for k, p in enumerate(pieces) if p[side] in group.cross_row_axes
        )
        moved.append(
            Group(
                group.nodes, dims, axes, _moved(group, mapping), group.rows_only,
                cross_row=group.cross_row, cross_row_axes=cross_row_axes,
            )
        )  # fmt: skip
    return moved[0], moved[1]


def _only_sums(group: Group) -> bool:
    """Whether a group holds only floating-point sums and the pointwise computes that feed them."""
    if group.axes is None or group.rows_only or group.cross_row:
        return False
    return all(
        n.kind == "pointwise"
        or (n.kind == "reduce" and n.op == "sum" and n.out.dtype.is_floating_point)
        for n in group.computes()
    )


def _same_shares(group: Group, shares: Mapping[Ref, int]) -> bool:
    """Whether all or none of a group's own reductions have their rows in shares, as many for each:
    a kernel whose rows are partitioned computes nothing else of all rows."""
    own = [n for n in group.computes() if n.kind != "pointwise" and n not in group.cross_row]
    counts = {shares.get(n.out, 0) for n in own}
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
        if allowed.parts and not all(n.out in allowed.shares for n in reduces):
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


# ---- legality -------------------------------------------------------------------------------


def legal(group: Group, a: Group, b: Group) -> bool:
    """Whether `a` and `b` may run as `group`: every read between them is at the reader's own point.

    Reads within `a` and within `b` were checked when those groups were formed.
    """
    nodes = group.computes()
    group.nodes = [*_in_graph_order(nodes)]
    members = {n.out: n for n in nodes}
    effects = {n.out.root: n for n in nodes if n.out.base is not None}
    if effects and not _effects_allowed(group, members, effects):
        return False
    for node in nodes:
        mine, theirs = (a, b) if node in a.coords else (b, a)
        mapping: dict[Var, Index] | None = None
        for item in node.loads():
            producer = members.get(item.ref)
            if producer is None or producer not in theirs.coords:
                continue
            mapping = mapping if mapping is not None else mapping_of(group, node)
            placed = tuple(c.substitute(mapping) for c in item.coords)
            if placed != place_of(group, producer):
                return False
            if node in group.rows_only and producer not in group.rows_only:
                if producer.kind != "reduce":
                    return False
        if mine is theirs:
            return False
    return group.axes is None or _levels_allowed(group)


def _effects_allowed(
    group: Group, members: dict[Ref, Compute], effects: dict[Ref, Compute]
) -> bool:
    """Whether stores into existing tensors (in place, scatter) are correct inside one kernel."""
    if group.axes is not None or any(n.kind == "scatter" for n in group.computes()):
        return _only_feeds_scatter(group, members)
    return _aligned_effects(group, effects)


def _in_graph_order(nodes: Sequence[Compute]) -> list[Compute]:
    """Producers before readers; ties keep the given order."""
    members = {n.out: n for n in nodes}
    depth: dict[Compute, int] = {}

    def visit(node: Compute) -> int:
        found = depth.get(node)
        if found is None:
            depth[node] = 0
            before = [members[r] for r in node.reads() if r in members]
            before += [a for a in node.after if isinstance(a, Compute) and a.out in members]
            found = depth[node] = 1 + max((visit(p) for p in before if p is not node), default=0)
        return found

    for node in nodes:
        visit(node)
    return sorted(nodes, key=lambda n: depth[n])


def _only_feeds_scatter(group: Group, members: dict[Ref, Compute]) -> bool:
    """Whether the group is one scatter with producers, and none reads or initializes its buffer."""
    scatters = [n for n in group.computes() if n.kind == "scatter"]
    if len(scatters) != 1 or group.axes is not None:
        return False
    root = scatters[0].out.root
    for node in group.computes():
        if node is scatters[0]:
            continue
        if node.out.root is root or any(r.root is root for r in node.reads()):
            return False
        if node.out.base is not None:
            return False
    return not any(r.root is root for r in scatters[0].reads())


def _aligned_effects(group: Group, effects: dict[Ref, Compute]) -> bool:
    """Whether tensors written in place are read only at the point that is being written."""
    for node in group.computes():
        mapping = mapping_of(group, node)
        for item in node.loads():
            writer = effects.get(item.ref.root)
            if writer is None:
                continue
            if writer.kind == "scatter" or item.ref.base is not None:
                return False
            read = flatten([c.substitute(mapping) for c in item.coords], item.ref.strides)
            write = flatten(group.coords[writer], writer.out.strides, writer.out.offset)
            if read != write:
                return False
    return True


def mapping_of(group: Group, node: Compute) -> dict[Var, Index]:
    coords = group.coords[node]
    return {Var(i, s): c for i, (s, c) in enumerate(zip(node.shape, coords, strict=True))}


def place_of(group: Group, node: Compute) -> tuple[Index, ...]:
    """Coordinates of `node`'s result at the current point."""
    coords = group.coords[node]
    if node.kind != "reduce":
        return coords
    return tuple(ZERO if i in node.axes else c for i, c in enumerate(coords))


def pass_numbers(group: Group) -> dict[Compute, int]:
    """For each member, how many passes over the reduction must finish before it runs."""
    members = {n.out: n for n in group.computes()}
    number: dict[Compute, int] = {}
    for node in group.computes():
        level = 0
        for ref in node.reads():
            producer = members.get(ref)
            if producer is not None and producer is not node:
                level = max(level, number[producer] + (producer.kind == "reduce"))
        number[node] = level
    return number


def _levels_allowed(group: Group) -> bool:
    nodes = group.computes()
    if any(n.kind == "scan" for n in nodes):
        return all(n.kind != "reduce" for n in nodes) and not group.rows_only
    number = pass_numbers(group)
    if all(number[n] == 0 for n in nodes if n not in group.rows_only):
        return True
    return not is_outer(group)


def is_outer(group: Group) -> bool:
    """Whether this is an outer reduction: most loads are contiguous along a parallel axis."""
    assert group.axes is not None
    votes = 0
    members = {n.out for n in group.computes()}
    for node in group.computes():
        if node in group.rows_only:
            continue
        mapping = mapping_of(group, node)
        for item in node.loads():
            if item.ref in members or not item.ref.strides:
                continue
            flat = flatten([c.substitute(mapping) for c in item.coords], item.ref.strides)
            if not any(v.position in group.axes for v in flat.variables()):
                continue
            for var in flat.variables():
                if flat.coefficient(var) == 1:
                    votes += 1 if var.position not in group.axes else -1
    if votes == 0:
        return (len(group.dims) - 1) not in group.axes
    return votes > 0


def external_refs(group: Group) -> set[Ref]:
    members = {n.out for n in group.computes()}
    return {r for n in group.computes() for r in n.reads() if r not in members} | members
