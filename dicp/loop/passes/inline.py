"""Inlining: cheap values read at other coordinates are recomputed by their readers.

Reads at the same coordinates are left to kernel fusion, which computes the value once.
"""

from __future__ import annotations

from collections.abc import Callable

from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, Load, Ref, Rewriter
from dicp.loop.ir.graph import Call, Compute, Graph, refs_in
from dicp.loop.ir.index import Index, Indirect, Size, Var, domain, product
from dicp.loop.ir.ops import SCALAR_OPS
from dicp.loop.passes.affine_indices import affine, with_affine
from dicp.loop.thresholds import (
    HEAVY,
    MAX_BODY,
    MAX_INLINE_COST,
    MAX_INLINE_LOADS,
    MAX_NESTED_COST,
    MAX_REPEATED_COST,
    MAX_TABLE_COST,
    TABLE_USES,
)


def cost_of(expr: Expr) -> int:
    """Rough arithmetic cost of one element."""
    total = 0
    for e in ir.walk(expr):
        row = SCALAR_OPS.get(e.op)
        total += row.cost if row else 0
    return total


def inline(graph: Graph) -> None:
    """Substitute producers into their readers where that is cheaper than a buffer."""
    written = {c.out.root for c in graph.nodes if isinstance(c, Compute) and c.out.base is not None}
    written |= {r.root for n in graph.nodes if isinstance(n, Call) and n.mutates for r in n.reads()}
    sizes: dict[Compute, tuple[int, int, int]] = {}
    for node in graph.nodes:
        if isinstance(node, Compute):
            _inline_into(node, written, sizes)
    remove_dead(graph)


def _inline_into(
    node: Compute, written: set[Ref], sizes: dict[Compute, tuple[int, int, int]]
) -> None:
    budget = [MAX_BODY]

    def replacing(cost: int) -> Callable[[Load], Expr | None]:
        """What replaces a load that lies in inlined producers of this cost."""

        def replace(item: Load) -> Expr | None:
            producer = item.ref.producer
            if not isinstance(producer, Compute) or item.ref is not producer.out:
                return None
            if not _worth_inlining(producer, item, node, written, sizes, cost):
                return None
            own_cost, _, count = _measure(producer, sizes)
            budget[0] -= count
            if budget[0] < 0:
                return None
            own = (Var(k, size) for k, size in enumerate(producer.shape))
            mapping = dict(zip(own, item.coords, strict=True))
            _merge_origins(node, producer)
            # Loads at the producer's own point may lie elsewhere for this reader: try to inline
            # them.
            body = _Inliner(mapping, replacing(cost + own_cost))(producer.body)
            return ir.opmath(body, item.ref.dtype)

        return replace

    rewrite = _Inliner(on_load=replacing(0))
    node.body = rewrite(node.body)
    position = affine(node.body) if node.kind == "pointwise" else None
    if position is not None and position.terms:
        node.body = ir.index_value(position)
    if node.target:
        node.target = tuple(rewrite.index(i) for i in node.target)


class _Inliner(Rewriter):
    """Inlines loads; computed indices that are affine then become plain ones."""

    def index(self, index: Index) -> Index:
        return with_affine(super().index(index))


def _merge_origins(node: Compute, producer: Compute) -> None:
    known = {o.node for o in node.origins}
    node.origins = tuple(o for o in producer.origins if o.node not in known) + node.origins


def _measure(compute: Compute, sizes: dict[Compute, tuple[int, int, int]]) -> tuple[int, int, int]:
    """Cost, number of loads and number of expression nodes of a body."""
    found = sizes.get(compute)
    if found is None:
        nodes = list(ir.walk(compute.body))
        reads = sum(e.op == "load" for e in nodes)
        found = sizes[compute] = (cost_of(compute.body), reads, len(nodes))
    return found


def _worth_inlining(
    producer: Compute,
    item: Load,
    reader: Compute,
    written: set[Ref],
    sizes: dict[Compute, tuple[int, int, int]],
    cost_around: int,
) -> bool:
    if producer.kind != "pointwise" or producer.out in written:
        return False
    if any(r.root in written for r in producer.reads()):
        return False
    cost, reads, _ = _measure(producer, sizes)
    if reads == 0 and cost < HEAVY:
        return cost <= MAX_TABLE_COST or not _is_table(producer, reader)
    if producer.realize or reads > MAX_INLINE_LOADS or cost > MAX_INLINE_COST:
        return False
    if cost + cost_around > MAX_NESTED_COST:
        return False
    if _has_indirect(producer.body):
        return False
    if cost > MAX_REPEATED_COST and product(producer.shape) != product(reader.shape):
        return False
    return not _same_point(producer, item, reader)


def _is_table(producer: Compute, reader: Compute) -> bool:
    """Whether each of the producer's values is used many times by the reader."""
    few, many = product(producer.shape), product(reader.shape)
    return isinstance(few, int) and isinstance(many, int) and few * TABLE_USES <= many


def _has_indirect(expr: Expr) -> bool:
    return any(
        isinstance(a, Indirect) for e in ir.walk(expr) for i in ir.indices_of(e) for a, _ in i.terms
    )


def _same_point(producer: Compute, item: Load, reader: Compute) -> bool:
    """Whether the reader loads the producer's elements one by one at its own coordinates."""
    if producer.shape == reader.shape:
        return item.coords == domain(reader.shape)
    if _squeezed(producer.shape) == _squeezed(reader.shape):
        own = [c for c, s in zip(item.coords, producer.shape, strict=True) if s != 1]
        return own == [c for c in domain(reader.shape) if c.terms]
    return _plain(item.coords) and product(producer.shape) == product(reader.shape)


def _plain(coords: tuple[Index, ...]) -> bool:
    """Whether the coordinates are in increasing axis order: a reshape, not a permutation."""
    order = [v.position for c in coords for v in _by_step(c)]
    return order == sorted(order) and all(c.const == 0 for c in coords)


def _by_step(index: Index) -> list[Var]:
    """The variables of `index`, those that it takes the largest steps along first."""
    steps = {v: index.coefficient(v) for v in index.variables()}
    known = all(isinstance(step, int) for step in steps.values())
    return sorted(steps, key=lambda v: (-int(steps[v]) if known else 0, v.position))


def _squeezed(shape: tuple[Size, ...]) -> list[Size]:
    return [s for s in shape if s != 1]


def remove_dead(graph: Graph) -> None:
    """Drop nodes without side effects whose results are not used."""
    alive: set[int] = set()
    needed: set[Ref] = {r.root for r in refs_in(graph.outputs)}
    kept = []
    for node in reversed(graph.nodes):
        if isinstance(node, Compute):
            is_effect = node.out.base is not None
            live = node.out.root in needed or (is_effect and node.out.root.role == "input")
        else:
            live = node.mutates or node.kind == "eager" or any(r.root in needed for r in node.outs)
        if not live:
            continue
        kept.append(node)
        alive.add(id(node))
        needed |= {r.root for r in node.reads()}
        if isinstance(node, Compute) and node.out.base is not None:
            needed.add(node.out.root)
    graph.nodes = list(reversed(kept))
    for node in graph.nodes:
        node.after = tuple(a for a in node.after if id(a) in alive)
