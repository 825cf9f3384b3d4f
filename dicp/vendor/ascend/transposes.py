"""Transposes moved behind the elementwise operators that read them, where they may meet another.

f(transpose(x, p), transpose(y, p)) = transpose(f(x, y), p), for a whole region of operators that
read each other's results or the same transposes. It is done where it leaves no more transposes than
there were: behind the region stand matrix products, which take one as a flag, conversions of
format, which take one into themselves, and transposes that undo it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from dicp.graphop.builder import Builder
from dicp.graphop.program import Item, Node, Operand, Result, Value
from dicp.graphop.rewrite import rewritten
from dicp.vendor.ascend.formats import ELEMENTWISE
from dicp.vendor.ascend.layout import order_of


def sunk(builder: Builder, items: Sequence[Item]) -> tuple[list[Item], bool]:
    """`items` with their transposes moved, and whether any was."""
    moving = _Regions(items).moving()
    if not moving:
        return list(items), False

    def visit(g: Builder, node: Node) -> Sequence[Value] | None:
        return [_behind(g, node)] if node in moving else None

    return rewritten(builder, items, dict.fromkeys(ELEMENTWISE, visit)), True


def _behind(g: Builder, node: Node) -> Value:
    """The node's result, made of what its operands are transposes of."""
    (order,) = {order_of(v) for v in _tensors(node)}
    assert order is not None
    ports = g.dialect.prototypes[node.kind].inputs
    operands = [_before(node.inputs.get(port.name)) for port in ports]
    return g.transpose(g.op(node.kind, *operands, **node.attrs), order)


def _before(operand: Operand | None) -> Operand | None:
    if not isinstance(operand, Value) or operand.ndim == 0:
        return operand
    source = operand.node.inputs["x"]
    assert isinstance(source, Value)
    return source


def _tensors(node: Node) -> list[Value]:
    return [v for v in node.operands() if v.ndim > 0]


class _Regions:
    """Elementwise operators joined by what they read."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.nodes = [item for item in items if isinstance(item, Node)]
        self.leader: dict[Node, Node] = {}
        self.readers: dict[Value, list[Node | None]] = defaultdict(list)
        for item in items:
            if isinstance(item, Node):
                for value in item.operands():
                    self.readers[value].append(item)
            elif isinstance(item, Result):
                self.readers[item.value].append(None)

    def moving(self) -> set[Node]:
        """The nodes of the regions to move transposes behind."""
        candidates = {node for node in self.nodes if _is_candidate(node)}
        for node in candidates:
            for value in _tensors(node):
                near = [n for n in self.readers[value] if n in candidates]
                for other in [value.node, *near] if value.node in candidates else near:
                    assert other is not None
                    self.leader[self._region(other)] = self._region(node)
        members: dict[Node, list[Node]] = defaultdict(list)
        for node in candidates:
            members[self._region(node)].append(node)
        return {node for region in members.values() if self._pays(set(region)) for node in region}

    def _region(self, node: Node) -> Node:
        while self.leader.get(node, node) is not node:
            node = self.leader[node]
        return node

    def _pays(self, region: set[Node]) -> bool:
        sources = {v for node in region for v in _tensors(node) if v.node not in region}
        orders = {order_of(v) for v in sources}
        order = orders.pop() if len(orders) == 1 else None
        if order is None:
            return False
        results = [node.outputs[0] for node in region]
        left = sum(
            any(reader not in region and not _undoes(reader, order) for reader in self.readers[v])
            for v in results
        )
        return left <= len(sources)


def _is_candidate(node: Node) -> bool:
    if node.kind not in ELEMENTWISE:
        return False
    rank = node.outputs[0].ndim
    tensors = _tensors(node)
    return bool(tensors) and all(v.ndim == rank for v in tensors)


def _undoes(node: Node | None, order: Sequence[int]) -> bool:
    """Whether the node is a transpose that puts what `order` has moved back."""
    outer = order_of(node.outputs[0]) if node is not None else None
    return outer is not None and [order[d] for d in outer] == sorted(order)
