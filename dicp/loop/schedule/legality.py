"""What a group must keep for its members to run in one kernel.

In: a group that fusion would make of two. Out: whether every member reads its operands at its own
point and in an earlier pass or the same, and stores do not overtake loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dicp.loop.ir.access import all_variables
from dicp.loop.ir.expr import Ref
from dicp.loop.ir.graph import Compute
from dicp.loop.ir.index import ZERO, Index, Var, flatten, product, variable
from dicp.loop.schedule.groups import Group
from dicp.loop.thresholds import MIN_CROSSED


def legal(group: Group, a: Group, b: Group) -> bool:
    """Whether `a` and `b` may run as `group`: every read between them is at the reader's own point.

    Reads within `a` and within `b` were checked when those groups were formed. The group's nodes
    are in topological order.
    """
    nodes = group.computes()
    effects = {n.out.root: n for n in nodes if n.out.base is not None}
    if effects and not _effects_allowed(group, effects):
        return False
    results = {part: {n.out: n for n in part.coords} for part in (a, b)}
    for node in nodes:
        if not _reads_at_own_point(group, node, results[b if node in a.coords else a]):
            return False
    return group.axes is None or _levels_allowed(group)


def _reads_at_own_point(group: Group, node: Compute, producers: Mapping[Ref, Compute]) -> bool:
    """Whether a member reads the results of `producers` at its own point of the group alone."""
    read = [(item, producers[item.ref]) for item in node.loads() if item.ref in producers]
    mapping = mapping_of(group, node) if read else {}
    for item, producer in read:
        if tuple(c.substitute(mapping) for c in item.coords) != result_coordinates(group, producer):
            return False
        per_point = producer not in group.rows_only and producer.kind != "reduce"
        if node in group.rows_only and per_point:
            return False
    return True


def _effects_allowed(group: Group, effects: dict[Ref, Compute]) -> bool:
    """Whether stores into existing tensors (in place, scatter) are correct inside one kernel."""
    if group.axes is not None or any(n.kind == "scatter" for n in group.computes()):
        return _only_feeds_scatter(group)
    return _aligned_effects(group, effects)


def topological(nodes: Sequence[Compute]) -> list[Compute]:
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


def _only_feeds_scatter(group: Group) -> bool:
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
    """The node's own loop variables, as indices of the group's loops."""
    coords = group.coords[node]
    return {Var(i, s): c for i, (s, c) in enumerate(zip(node.shape, coords, strict=True))}


def result_coordinates(group: Group, node: Compute) -> tuple[Index, ...]:
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
    """Whether this is an outer reduction: most loads are contiguous along a parallel axis.

    Loads that do not vary along all axes, such as weights and numbers of rows, count only where no
    other load decides: they are of few elements.
    """
    assert group.axes is not None
    votes = {True: 0, False: 0}
    members = {n.out for n in group.computes()}
    axes = {k for k, size in enumerate(group.dims) if size != 1}
    for node in group.computes():
        if node in group.rows_only:
            continue
        mapping = mapping_of(group, node)
        for item in node.loads():
            if item.ref in members or not item.ref.strides:
                continue
            own = {v for c in item.coords for v in all_variables(c)}
            along = {v.position for o in own for v in mapping.get(o, variable(o)).variables()}
            if not along & group.axes:
                continue
            flat = flatten([c.substitute(mapping) for c in item.coords], item.ref.strides)
            for var in flat.variables():
                if flat.coefficient(var) == 1:
                    votes[along >= axes] += 1 if var.position not in group.axes else -1
    decided = votes[True] or votes[False]
    if decided == 0:
        return (len(group.dims) - 1) not in group.axes
    return decided > 0


def has_strided_store(group: Group, node: Compute) -> bool:
    """Whether the innermost loops of a reduction would stride the memory of `node`'s result."""
    if group.axes is None or node in group.rows_only or node.kind == "reduce":
        return False
    offset = flatten(result_coordinates(group, node), node.out.strides)
    return is_strided(group, offset, is_outer(group))


def is_strided(group: Group, place: Index, outer: bool) -> bool:
    """Whether the innermost loops of a reduction stride memory that is contiguous along others:
    they then access one element per cache line, and lines of the same set of the cache if the
    stride is a power of two. `outer`: whether the group is an outer reduction."""
    assert group.axes is not None
    steps = {place.coefficient(v): v for v in place.variables()}
    last = [v for v in steps.values() if (v.position in group.axes) != outer]
    contiguous = steps.get(1)
    if contiguous is None or contiguous in last:
        return False
    sizes = (contiguous.size, product(v.size for v in last))
    return all(not isinstance(size, int) or size >= MIN_CROSSED for size in sizes)


def external_refs(group: Group) -> set[Ref]:
    """The tensors that a group's kernel may read or write in memory."""
    members = {n.out for n in group.computes()}
    return {r for n in group.computes() for r in n.reads() if r not in members} | members
