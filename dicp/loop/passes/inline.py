"""Inlining: cheap values read at other coordinates are recomputed by their readers.

Reads at the same coordinates are left to kernel fusion, which computes the value once.
"""

from __future__ import annotations

from collections.abc import Callable

from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Checked, Expr, Load, Ref, Rewriter
from dicp.loop.ir.graph import Call, Compute, Graph, Node, refs_in
from dicp.loop.ir.index import Index, Indirect, Size, Var, domain, is_nonnegative, normal, product
from dicp.loop.ir.ops import SCALAR_OPS
from dicp.loop.passes.affine_indices import affine, with_affine
from dicp.loop.thresholds import (
    HEAVY,
    MAX_BETWEEN,
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
    return sum(map(operation_cost, ir.walk(expr)))


def operation_cost(expr: Expr) -> int:
    """Rough arithmetic cost of an expression's last operation."""
    row = SCALAR_OPS.get(expr.op)
    return row.cost if row else 0


def inline(graph: Graph) -> None:
    """Substitute producers into their readers where that is cheaper than a buffer."""
    inlining = _Inlining(graph)
    for node in graph.nodes:
        if isinstance(node, Compute):
            inlining.into(node)
    remove_dead(graph)


class _Inlining:
    """Decides which producers are computed by their readers, and rewrites these."""

    def __init__(self, graph: Graph) -> None:
        self._written = {
            c.out.root for c in graph.nodes if isinstance(c, Compute) and c.out.base is not None
        }
        for node in graph.nodes:
            if isinstance(node, Call) and node.mutates:
                self._written |= node.read_buffers()
        self._sizes: dict[Compute, tuple[int, int, int]] = {}
        self._readers: dict[Ref, list[tuple[Node, Load | None]]] = {}
        """Who reads a buffer, and by which loads: those before inlining."""
        for node in graph.nodes:
            if isinstance(node, Compute):
                for item in node.loads():
                    self._readers.setdefault(item.ref.root, []).append((node, item))
            else:
                for root in node.read_buffers():
                    self._readers.setdefault(root, []).append((node, None))

    def into(self, node: Compute) -> None:
        """Substitute the producers that `node` computes itself."""
        budget = [MAX_BODY]

        def replacing(cost: int) -> Callable[[Load], Expr | None]:
            """What replaces a load that lies in inlined producers of this cost."""

            def replace(item: Load) -> Expr | None:
                producer = item.ref.producer
                if not isinstance(producer, Compute) or item.ref is not producer.out:
                    return None
                if not self._is_candidate(producer):
                    return None
                once = self._is_computed_once(producer, item, node)
                if not once and not self._is_worth_it(producer, item, node, cost):
                    return None
                own_cost, _, count = self._measure(producer)
                budget[0] -= count
                if budget[0] < 0:
                    return None
                own = (Var(k, size) for k, size in enumerate(producer.shape))
                mapping = dict(zip(own, item.coords, strict=True))
                _merge_origins(node, producer)
                # Loads at the producer's own point may lie elsewhere for this reader: try to inline
                # them.
                around = cost if once else cost + own_cost
                body = _Inliner(mapping, replacing(around))(producer.body)
                return ir.opmath(body, item.ref.dtype)

            return replace

        rewrite = _Inliner(on_load=replacing(0))
        node.body = rewrite(node.body)
        position = affine(node.body) if node.kind == "pointwise" else None
        if position is not None and position.terms:
            node.body = ir.index_value(position)
        if node.target:
            node.target = tuple(rewrite.index(i) for i in node.target)

    def _measure(self, compute: Compute) -> tuple[int, int, int]:
        """Cost, number of loads and number of expression nodes of a body."""
        found = self._sizes.get(compute)
        if found is None:
            nodes = list(ir.walk(compute.body))
            reads = sum(e.op == "load" for e in nodes)
            found = self._sizes[compute] = (cost_of(compute.body), reads, len(nodes))
        return found

    def _is_candidate(self, producer: Compute) -> bool:
        """Whether the producer's values may be computed again elsewhere."""
        if producer.kind != "pointwise" or producer.out in self._written:
            return False
        return not any(r.root in self._written for r in producer.reads())

    def _is_worth_it(self, producer: Compute, item: Load, reader: Compute, cost: int) -> bool:
        """Whether computing the value again at the reader's points, inside of values of this cost,
        is cheaper than loading it."""
        own_cost, reads, _ = self._measure(producer)
        if reads == 0 and own_cost < HEAVY:
            return own_cost <= MAX_TABLE_COST or not _is_table(producer, reader)
        if producer.realize or reads > MAX_INLINE_LOADS or own_cost > MAX_INLINE_COST:
            return False
        if own_cost + cost > MAX_NESTED_COST or _has_indirect(producer.body):
            return False
        if own_cost > MAX_REPEATED_COST and product(producer.shape) != product(reader.shape):
            return False
        return not _same_point(producer, item, reader)

    def _is_computed_once(self, producer: Compute, item: Load, reader: Compute) -> bool:
        """Whether no value of the producer is computed more often than before: only the reader
        needs it, and loads it along its own loops, as the parts of a concatenation are loaded.

        Both halves of the reader may compute it: that is cheaper than a buffer.
        """
        if reader.kind != "pointwise" or producer.shape == reader.shape:
            return False
        offsets = _offsets(item.coords, reader.shape)
        if offsets is None or self._measure(producer)[1] > MAX_INLINE_LOADS:
            return False
        if _is_checked(producer.body) and not _is_whole(producer.shape, offsets, reader.shape):
            return False
        found = self._computed_at(producer, reader, {})
        halves = normal(2 * product(producer.shape)) == product(reader.shape)
        return found is not None and len(found) in ((1, 2) if halves else (1,))

    def _computed_at(
        self, producer: Compute, reader: Compute, known: dict[Compute, set[Offsets]]
    ) -> set[Offsets] | None:
        """The offsets from a point of the reader at which it needs the producer; None if they are
        not constant, or the producer's values are needed elsewhere."""
        if producer is reader:
            return {(0,) * len(reader.shape)}
        if producer in known:
            return known[producer]
        readers = self._readers.get(producer.out.root, [])
        if producer.realize or len(known) >= MAX_BETWEEN:  # results are realized
            return None
        found: set[Offsets] = set()
        for node, item in readers:
            if item is None or item.ref is not producer.out:
                return None
            if not isinstance(node, Compute) or node.kind != "pointwise":
                return None
            step = _offsets(item.coords, node.shape)
            after = self._computed_at(node, reader, known)
            if step is None or after is None:
                return None
            found |= {
                tuple(normal(a + b) for a, b in zip(step, offsets, strict=True))
                for offsets in after
            }
        known[producer] = found
        return found


Offsets = tuple[Size, ...]
"""How far an element lies from another one along each axis, in elements."""


def _offsets(coords: tuple[Index, ...], shape: tuple[Size, ...]) -> Offsets | None:
    """The offsets of `coords` from the point of a loop nest over `shape`, if they are constant."""
    if len(coords) != len(shape):
        return None
    rest = [at + own * -1 for at, own in zip(coords, domain(shape), strict=True)]
    return None if any(index.terms for index in rest) else tuple(index.const for index in rest)


def _is_whole(part: tuple[Size, ...], offsets: Offsets, shape: tuple[Size, ...]) -> bool:
    """Whether all of a tensor of shape `part` lies within `shape`, from which it has `offsets`."""
    return all(
        is_nonnegative(normal(-1 * at)) and is_nonnegative(normal(size + at - own))
        for own, at, size in zip(part, offsets, shape, strict=True)
    )


class _Inliner(Rewriter):
    """Inlines loads; computed indices that are affine then become plain ones."""

    def index(self, index: Index) -> Index:
        return with_affine(super().index(index))


def _merge_origins(node: Compute, producer: Compute) -> None:
    known = {o.node for o in node.origins}
    node.origins = tuple(o for o in producer.origins if o.node not in known) + node.origins


def _is_table(producer: Compute, reader: Compute) -> bool:
    """Whether each of the producer's values is used many times by the reader."""
    few, many = product(producer.shape), product(reader.shape)
    return isinstance(few, int) and isinstance(many, int) and few * TABLE_USES <= many


def _has_indirect(expr: Expr) -> bool:
    return any(
        isinstance(a, Indirect) for e in ir.walk(expr) for i in ir.indices_of(e) for a, _ in i.terms
    )


def _is_checked(expr: Expr) -> bool:
    """Whether some values are an error: an index out of bounds, for example."""
    return any(isinstance(e, Checked) for e in ir.walk(expr))


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
