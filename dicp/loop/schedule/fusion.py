"""Kernel fusion: greedy grouping of computes into kernels, to save memory traffic.

In: a graph. Out: groups in topological order. A group has one iteration domain (`dims`), some of
whose axes may be reduction axes; the others are parallel. A member runs at every point of the
domain or once per row (a point of the parallel axes). Two groups merge where their domains agree
after both are split into common factors (`joins.py`), every read between them is at the reader's
own point (`legality.py`), and no path leads out of the group and back in.
"""

from __future__ import annotations

from collections.abc import Mapping

from dicp.loop.ir.expr import Ref
from dicp.loop.ir.graph import Compute, Graph, Node, refs_in
from dicp.loop.ir.index import product
from dicp.loop.schedule.groups import CrossRow, Group, outputs_of, predecessors, single
from dicp.loop.schedule.joins import (
    equally_partitioned,
    join,
    join_cross_row,
    only_sums,
    without_tail,
)
from dicp.loop.schedule.legality import external_refs, has_strided_store, legal, topological
from dicp.loop.thresholds import MAX_MEMBERS, MAX_REFS


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
        fuser = _Fuser(graph, groups, producers, cross_row.partitions if cross_row else {})
        fuser.run()
        if cross_row is not None:
            fuser.fuse_cross_row(cross_row)
    unique = list(dict.fromkeys(groups[n] for n in graph.nodes))
    return _sorted(unique)


def _sorted(groups: list[Group]) -> list[Group]:
    done: set[Group] = set()
    begun: set[Group] = set()
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
            begun.add(group)
            waiting = sorted((d for d in group.depends if d not in done), key=lambda g: -g.order)
            assert begun.isdisjoint(waiting), "fused groups depend on each other"
            stack += [(d, False) for d in waiting]
    return result


class _Fuser:
    def __init__(
        self, graph: Graph, groups: dict[Node, Group], producers: dict[Ref, Node],
        partitions: Mapping[Ref, int],
    ) -> None:  # fmt: skip
        self.graph = graph
        self.partitions = partitions
        self.groups = groups
        self.producers = producers
        self.returned = {ref.root for ref in refs_in(graph.outputs)}
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
            if not isinstance(node, Compute):
                continue
            mine = self.groups[node]
            sums, tail = without_tail(mine)
            if not only_sums(sums):
                continue
            near: list[Node] = [self.producers[r] for r in node.reads() if r in self.producers]
            near += [n for r in node.reads() for n in readers[r]]
            for other in dict.fromkeys(self.groups[n] for n in near):
                merged = None if other is mine else join_cross_row(other, sums, allowed)
                if merged is None:
                    continue
                if tail is not None:
                    self._split(mine, sums, tail)
                if self._admit(other, sums, merged):
                    break
                if tail is not None:
                    self.merge(sums, tail)
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
        if merged is None or len(merged.nodes) > MAX_MEMBERS:
            return False
        merged.nodes = [*topological(merged.computes())]
        if (
            (self.partitions and not equally_partitioned(merged, self.partitions))
            or not legal(merged, a, b)
            or self._has_strided_stores(merged, a, b)
            or self._cyclic(a, b)
            or len(external_refs(merged)) > MAX_REFS
        ):
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

    def _split(self, group: Group, sums: Group, tail: Group) -> None:
        """Replace a group by its sums and the group of what is computed from them."""
        users = self.users.pop(group, set())
        for dep in group.depends:
            self.users[dep].discard(group)
        for part in (sums, tail):
            self.groups.update(dict.fromkeys(part.nodes, part))
        for part in (sums, tail, *users):
            part.depends = {
                self.groups[p] for n in part.nodes for p in predecessors(n, self.producers)
            } - {part}
            for dep in part.depends:
                self.users.setdefault(dep, set()).add(part)

    def _has_strided_stores(self, merged: Group, a: Group, b: Group) -> bool:
        """Whether a reduction's innermost loops would stride results of a pointwise group."""
        pointwise = [g for g in (a, b) if g.axes is None]
        return len(pointwise) == 1 and any(
            has_strided_store(merged, n) for n in pointwise[0].computes()
            if n.realize or n.out.root in self.returned
        )  # fmt: skip

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
