"""Where FRACTAL_NZ pays: chains of matrix products, and weights that are converted only once.

Values that elementwise operators join must have one format: they are a region. In FRACTAL_NZ a
region saves each matrix product that writes or reads it a conversion of its own, and costs one
wherever it meets anything else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from dicp.graphop.builder import Builder
from dicp.graphop.program import Graph, Node, Value
from dicp.vendor.ascend.blocked import MATRIX, is_whole
from dicp.vendor.ascend.formats import ELEMENTWISE, KEEPS_ZERO, OPERANDS, PRODUCTS

BLOCKED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CONVERSION = 3
"""What a conversion costs, by what a matrix product saves on an operand that has its format: a
tensor read and written once more, and an operator launched."""


@dataclass(frozen=True)
class Matrices:
    """What is in FRACTAL_NZ: values, converted where their operator gives them plain, and the
    elementwise operators that run on them."""

    values: frozenset[Value]
    elementwise: frozenset[Node]


def find_matrices(g: Builder, graph: Graph, static: Collection[Node]) -> Matrices:
    """Where FRACTAL_NZ pays; what `static` nodes give is converted before the first run."""
    return _Regions(g, graph, static).chosen()


class _Regions:
    def __init__(self, g: Builder, graph: Graph, static: Collection[Node]) -> None:
        self.g = g
        self.graph = graph
        self.static = static
        self.leader: dict[Value, Value] = {}
        self.joined: dict[Node, list[Value]] = {}

    def chosen(self) -> Matrices:
        for node in self.graph.operators:
            members = self.joined[node] = self._joined_by(node)
            for value in members[1:]:
                self.leader[self._region(value)] = self._region(members[0])
        gain: Counter[Value] = Counter()
        for value in self._operands_of_products():
            gain[self._region(value)] += 1
        for value in self._converted():
            gain[self._region(value)] -= CONVERSION
        given = {v for node in self.graph.nodes for v in node.outputs if self._is_matrix(v)}
        values = frozenset(v for v in given if gain[self._region(v)] > 0)
        nodes = (node for node, members in self.joined.items() if values.intersection(members))
        return Matrices(values, frozenset(nodes))

    def _region(self, value: Value) -> Value:
        while self.leader.get(value, value) is not value:
            value = self.leader[value]
        return value

    def _is_matrix(self, value: Value) -> bool:
        if value.dtype not in BLOCKED_DTYPES or value.ndim < 2:
            return False
        empty = any(self.g.same(size, 0) for size in value.shape)
        return not empty and not any(self.g.same(size, 1) for size in value.shape[-2:])

    def _joined_by(self, node: Node) -> list[Value]:
        """The values that an elementwise operator reads and gives in one format."""
        result = node.outputs[0]
        if node.kind not in ELEMENTWISE or not self._is_matrix(result):
            return []
        operands = [v for v in node.operands() if v.ndim > 0]
        numbers = len(operands) != len(node.operands())
        if not is_whole(MATRIX, result.shape) and (numbers or node.kind not in KEEPS_ZERO):
            return []  # what fills up the last blocks would not stay zero
        alike = all(
            self._is_matrix(v) and self.g.same_shape(v.shape, result.shape) for v in operands
        )
        return [result, *operands] if alike else []

    def _operands_of_products(self) -> Iterator[Value]:
        """Each time that a matrix product reads or writes a value."""
        for node in self.graph.operators:
            if node.kind not in PRODUCTS:
                continue
            for port in OPERANDS:
                operand = node.inputs[port]
                assert isinstance(operand, Value)
                yield operand
            yield node.outputs[0]

    def _converted(self) -> Iterator[Value]:
        """The values that would be converted in every run, were they in a region in FRACTAL_NZ."""
        given_plain = set()
        for node in self.graph.nodes:
            if node.kind not in PRODUCTS and not self.joined.get(node):
                given_plain.update(node.outputs)
                if node not in self.static:
                    yield from node.outputs
        yield from self._read_plain() - given_plain

    def _read_plain(self) -> set[Value]:
        plain = {result.value for result in self.graph.results}
        for node in self.graph.operators:
            if self.joined[node]:
                continue
            for port, operand in node.inputs.items():
                if node.kind not in PRODUCTS or port not in OPERANDS:
                    plain.update([operand] if isinstance(operand, Value) else operand)
        return plain
