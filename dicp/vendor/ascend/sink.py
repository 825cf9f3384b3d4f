"""Transposes and reshapes moved behind the elementwise operators that read them.

f(move(x), move(y)) = move(f(x, y)), for a whole region of operators that read each other's results
or the same moves. It is done where it leaves no more moves than there were: behind the region may
stand one that undoes it, a matrix product, which takes a transpose as a flag and between whose
matrices a format can stay, or a conversion of format, which takes a transpose into itself. It is
not done where the move would need conversions of dtype, as the transpose of a boolean does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from dicp.graphop.builder import Builder
from dicp.graphop.program import Item, Node, Operand, Result, Value
from dicp.graphop.rewrite import rewritten
from dicp.vendor.ascend.formats import ELEMENTWISE
from dicp.vendor.ascend.layout import order_of
from dicp.vendor.ascend.prototypes import PROTOTYPES

Move = tuple[str, tuple[str, ...]]
"""A transpose with its order, or a reshape with the sizes it begins with."""
Behind = dict[Value, tuple[Value, Node]]
"""By a result that is moved: the same before its move, and a move like its own. The result itself
may be a conversion, where the operator that moves does not take its dtype."""


def sunk(builder: Builder, items: Sequence[Item]) -> tuple[list[Item], bool]:
    """`items` with their moves behind elementwise operators, and whether any was moved."""
    moving = _Regions(items).moving()
    if not moving:
        return list(items), False

    behind: Behind = {}

    def visit(g: Builder, node: Node) -> Sequence[Value] | None:
        return [_behind(g, node, behind)] if node in moving else None

    return rewritten(builder, items, dict.fromkeys(ELEMENTWISE, visit)), True


def _behind(g: Builder, node: Node, behind: Behind) -> Value:
    """The node's result, made of what its operands are moved from."""
    moved = [_before(value, behind) for value in _tensors(node)]
    move = moved[0][1]
    sources = dict(zip(_tensors(node), (source for source, _ in moved), strict=True))
    operands: list[Operand | None] = []
    for port in g.dialect.prototypes[node.kind].inputs:
        operand = node.inputs.get(port.name)
        operands.append(sources.get(operand, operand) if isinstance(operand, Value) else operand)
    made = g.op(node.kind, *operands, **node.attrs)
    result = g.op(move.kind, made, move.inputs["shape" if move.kind == "Reshape" else "perm"])
    behind[result] = made, move
    return result


def _before(value: Value, behind: Behind) -> tuple[Value, Node]:
    """What a moved value is moved from, and the move."""
    return behind.get(value) or (_source(value.node), value.node)


def _source(move: Node) -> Value:
    source = move.inputs["x"]
    assert isinstance(source, Value)
    return source


def _move_of(value: Value) -> Move | None:
    """The move that makes a value, if it is one."""
    order = order_of(value)
    if order is not None:
        return "Transpose", tuple(map(str, order))
    if value.node.kind == "Reshape":
        return "Reshape", tuple(map(str, _source(value.node).shape))
    return None


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
        """The nodes of the regions to put moves behind."""
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
        moves = {_move_of(v) for v in sources}
        move = moves.pop() if len(moves) == 1 else None
        if move is None or move[0] == "Reshape" and not all(map(_keeps_shape, region)):
            return False
        results = [node.outputs[0] for node in region]
        left = [
            v for v in results
            if any(r not in region and not _undoes(r, move) for r in self.readers[v])
        ]  # fmt: skip
        port = PROTOTYPES[move[0]].input("x")
        assert port is not None
        return len(left) <= len(sources) and all(v.dtype in port.dtypes for v in left)


def _is_candidate(node: Node) -> bool:
    if node.kind not in ELEMENTWISE:
        return False
    rank = node.outputs[0].ndim
    tensors = _tensors(node)
    return bool(tensors) and all(v.ndim == rank for v in tensors)


def _keeps_shape(node: Node) -> bool:
    """Whether all that the node reads has its result's sizes: nothing is broadcast."""
    shape = list(map(str, node.outputs[0].shape))
    return all(list(map(str, v.shape)) == shape for v in _tensors(node))


def _undoes(reader: Node | None, move: Move) -> bool:
    """Whether a node puts what `move` has moved back."""
    if reader is None or reader.kind != move[0]:
        return False
    if reader.kind == "Reshape":
        return tuple(map(str, reader.outputs[0].shape)) == move[1]
    outer = order_of(reader.outputs[0])
    return outer is not None and [int(move[1][d]) for d in outer] == sorted(outer)
