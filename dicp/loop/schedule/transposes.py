"""Transposed copies of the operands that the innermost loops of a reduction would stride.

In: a group. Out: the copies that run before it, from which it then loads. A pointwise kernel
transposes such an operand tile by tile. The reduction itself would read one element per cache line,
and lines of the same set of the cache where the stride is a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence

from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Load, Ref, Rewriter
from dicp.loop.ir.graph import Compute
from dicp.loop.ir.index import Index, dense_strides, domain, flatten
from dicp.loop.schedule.groups import Group, single
from dicp.loop.schedule.legality import is_outer, is_strided, mapping_of


def transposed_operands(group: Group) -> list[Group]:
    """The copies, as groups; none for a group without a reduction."""
    if group.axes is None or any(n.kind == "scan" for n in group.computes()):
        return []
    outer = is_outer(group)
    members = {n.out for n in group.computes()}
    orders: dict[Ref, list[int] | None] = {}
    """Operand -> the order of axes of its copy; None for one that some load does not stride."""
    readers: dict[Ref, Compute] = {}
    for node in group.computes():
        mapping = mapping_of(group, node)
        for item in (e for e in node.loads() if e.ref not in members and e.ref.strides):
            place = [c.substitute(mapping) for c in item.coords]
            strided = is_strided(group, flatten(place, item.ref.strides), outer)
            per_row = node in group.rows_only
            order = _order(place, group, outer) if strided and not per_row else None
            orders[item.ref] = order if orders.get(item.ref, order) == order else None
            readers.setdefault(item.ref, node)
    copies = {r: _copy(r, order, readers[r]) for r, order in orders.items() if order is not None}

    def moved(item: Load) -> Load | None:
        return ir.load(copies[item.ref].out, item.coords) if item.ref in copies else None

    for node in group.computes() if copies else ():
        node.body = Rewriter(on_load=moved)(node.body)
    return [single(copy, group.order) for copy in copies.values()]


def _order(place: Sequence[Index], group: Group, outer: bool) -> list[int] | None:
    """An operand's axes, last those of the loops that run along memory; None where loops of both
    kinds share an axis."""
    assert group.axes is not None
    inner = []
    for index in place:
        kinds = {(v.position in group.axes) != outer for v in index.variables()}
        if not index.is_affine or len(kinds) > 1:
            return None
        inner.append(True in kinds)
    return sorted(range(len(place)), key=inner.__getitem__)


def _copy(ref: Ref, order: Sequence[int], reader: Compute) -> Compute:
    name = f"{ref.name}_for_{reader.out.name}"
    out = Ref(name, ref.shape, ref.dtype, dense_strides(ref.shape, order), "temp")
    body = ir.load(ref, domain(ref.shape))
    out.producer = copy = Compute(out, ref.shape, body, origins=reader.origins, realize=True)
    return copy
