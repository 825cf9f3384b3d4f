"""The layout pass: a format for every edge of a graph, and conversions where it changes.

One pass in order of computation. An operator that runs on blocked tensors has its operands
converted; a blocked tensor stays so through operators that do not care. A conversion is made once
per tensor and direction, so that two which undo each other never meet, and takes a transpose to or
from channels-last into itself. What fills up the last block of an image is cleared before channels
are summed over, where an operator may have left something in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from dicp.graphop.builder import Builder
from dicp.graphop.hoist import static_nodes
from dicp.graphop.partition import remove_dead
from dicp.graphop.program import LEAVES, Graph, Item, Node, Operand, Slot, Value
from dicp.vendor.ascend.blocked import BLOCKED, FILTER, IMAGE, MATRIX, is_whole
from dicp.vendor.ascend.formats import (
    ELEMENTWISE,
    FOLLOWERS,
    KEEPS_ZERO,
    OPERAND_FORMATS,
    OPERANDS,
    PRODUCTS,
    REDUCTIONS,
    RESULT_FORMATS,
    SUMS_CHANNELS,
)
from dicp.vendor.ascend.regions import BLOCKED_DTYPES, Matrices, find_matrices

TO_CHANNELS_LAST = (0, 2, 3, 1)
FROM_CHANNELS_LAST = (0, 3, 1, 2)


def with_formats(builder: Builder, graph: Graph, static: Collection[Slot]) -> Graph:
    """The graph with a format for each value; those in `static` never change between runs."""
    matrices = find_matrices(builder, graph, static_nodes(graph, static))
    if not matrices.values and not any(node.kind in RESULT_FORMATS for node in graph.operators):
        return graph
    return _Layout(builder, matrices).run(graph)


def order_of(value: Value) -> tuple[int, ...] | None:
    """The permutation, if the value is a transpose."""
    if value.node.kind != "Transpose":
        return None
    perm = value.node.inputs["perm"]
    assert isinstance(perm, Value) and perm.known is not None
    return tuple(int(d) for d in perm.known)


class _Layout:
    def __init__(self, builder: Builder, matrices: Matrices) -> None:
        self.builder = builder
        self.matrices = matrices
        self.formats: dict[Value, str] = {}
        """The format of each value that is blocked."""
        self.versions: dict[tuple[Value, str], Value] = {}
        """Value and format -> the value converted to it."""
        self.dirty: set[Value] = set()
        """Blocked values whose last block may be filled up with something else than zeros."""
        self.renamed: dict[Value, Value] = {}
        """Value of the given graph -> what takes its place."""
        self.images: set[Value] = set()
        """Plain values that a convolution reads: they are converted anyway."""
        self.readers: dict[Value, list[Node]] = defaultdict(list)

    def run(self, graph: Graph) -> Graph:
        self._find_readers(graph)
        self.builder.nodes = made = []
        for node in graph.nodes:
            if node.kind in LEAVES:
                made.append(node)
            else:
                self._node(node)
        # Who waits for a transpose waits for the conversion that stands for it.
        by_old = {old.node: new.node for old, new in self.renamed.items()}
        for node in made:
            node.after = tuple(by_old.get(other, other) for other in node.after)
        results = [
            replace(r, value=self._in_format(self._current(r.value), "ND")) for r in graph.results
        ]
        items: list[Item] = [*made, *results]
        kept = remove_dead(items, [result.slot for result in results])
        return Graph(graph.name, [item for item in kept if isinstance(item, Node)], results)

    def _find_readers(self, graph: Graph) -> None:
        for node in graph.operators:
            for port, operand in node.inputs.items():
                if isinstance(operand, Value) and OPERAND_FORMATS.get((node.kind, port)) == IMAGE:
                    self.images.add(operand)
            for value in node.operands():
                self.readers[value].append(node)

    # ---- operators ------------------------------------------------------------------------------

    def _node(self, node: Node) -> None:
        self.builder.origin = node.origin
        node.rename(self.renamed)
        if self._becomes_conversion(node):
            return
        wanted = self._operand_formats(node)
        node.inputs = {
            port: self._operand(node, port, operand, wanted.get(port, "ND"))
            for port, operand in node.inputs.items()
        }
        given = self._result_format(node, wanted)
        if given in BLOCKED:
            node.formats = {"0": given}
            self.formats[node.outputs[0]] = given
            if not self._keeps_zeros(node):
                self.dirty.add(node.outputs[0])
        self.builder.nodes.append(node)

    def _becomes_conversion(self, node: Node) -> bool:
        """A transpose of an image to channels-last is a conversion to NHWC."""
        result = node.outputs[0]
        if order_of(result) != TO_CHANNELS_LAST:
            return False
        image = node.inputs["x"]
        assert isinstance(image, Value)
        if self._format(image) != IMAGE:
            return False
        self.renamed[result] = self._convert(image, IMAGE, "NHWC")
        return True

    def _operand_formats(self, node: Node) -> dict[str, str]:
        """The format of each input that is to be blocked, by port."""
        if node.kind in RESULT_FORMATS and node.outputs[0].dtype in BLOCKED_DTYPES:
            ports = {
                port: fmt for (kind, port), fmt in OPERAND_FORMATS.items() if kind == node.kind
            }
            if node.attrs["groups"] != 1:  # GE lays out grouped filters
                ports = {port: fmt for port, fmt in ports.items() if fmt != FILTER}
            return ports
        if node.kind in PRODUCTS:
            return {port: MATRIX for port in OPERANDS if node.inputs[port] in self.matrices.values}
        if node.kind in FOLLOWERS:
            images = {p: v for p in FOLLOWERS[node.kind] if isinstance(v := node.inputs[p], Value)}
            blocked = any(self._format(v) == IMAGE for v in images.values())
            return dict.fromkeys(images, IMAGE) if blocked else {}
        if node.kind in REDUCTIONS:
            x = node.inputs["x"]
            blocked = isinstance(x, Value) and self._format(x) == IMAGE
            return {"x": IMAGE} if blocked and self._leaves_channels(node) else {}
        if node.kind in ELEMENTWISE:
            return self._elementwise_formats(node)
        return {}

    def _result_format(self, node: Node, wanted: dict[str, str]) -> str:
        """The format of the first result, with operands in the formats `wanted`."""
        result = node.outputs[0]
        if node.kind in PRODUCTS:
            return MATRIX if result in self.matrices.values else "ND"
        if node.kind in RESULT_FORMATS:
            fmt = RESULT_FORMATS[node.kind] if IMAGE in wanted.values() else "ND"
            return "ND" if fmt == FILTER and node.attrs["groups"] != 1 else fmt
        if node.kind in REDUCTIONS and not node.attrs.get("keep_dims"):
            return "ND"
        return next(iter(wanted.values()), "ND")

    def _leaves_channels(self, node: Node) -> bool:
        axes = node.inputs["axes"]
        assert isinstance(axes, Value)
        return axes.known is not None and set(axes.known) <= {0, 2, 3}

    def _elementwise_formats(self, node: Node) -> dict[str, str]:
        """All operands blocked, if one is and the others have its sizes, or one per channel."""
        ports = {p: v for p, v in node.inputs.items() if isinstance(v, Value) and v.ndim > 0}
        shape = node.outputs[0].shape
        if node in self.matrices.elementwise:
            return dict.fromkeys(ports, MATRIX)
        if not any(self._format(v) == IMAGE for v in ports.values()):
            readers = self.readers[node.outputs[0]]
            among = bool(readers) and all(reader.kind in ELEMENTWISE for reader in readers)
            if not (among and self.images.issuperset(ports.values())):
                return {}
        if not all(v.ndim == 4 and self._fits(v, shape) for v in ports.values()):
            return {}
        return dict.fromkeys(ports, IMAGE)

    def _fits(self, value: Value, shape: Sequence[object]) -> bool:
        same = self.builder.same_shape(value.shape, shape)
        per_channel = [1, shape[1], 1, 1]
        return same or self.builder.same_shape(value.shape, per_channel)

    def _keeps_zeros(self, node: Node) -> bool:
        """Whether what fills up the result's last block is zero."""
        if node.kind not in ELEMENTWISE:
            return True
        if node.kind not in KEEPS_ZERO:
            return False
        operands = [v for port, v in node.inputs.items() if port != "condition"]
        return not any(
            isinstance(v, Value) and (v in self.dirty or v.ndim == 0 and not _is_zero(v))
            for v in operands
        )

    # ---- values ---------------------------------------------------------------------------------

    def _current(self, value: Value) -> Value:
        return self.renamed.get(value, value)

    def _format(self, value: Value) -> str:
        return self.formats.get(value, "ND")

    def _operand(self, node: Node, port: str, operand: Operand, fmt: str) -> Operand:
        if not isinstance(operand, Value):
            return tuple(self._in_format(value, fmt) for value in operand)
        value = self._in_format(operand, fmt)
        if (node.kind, port) in SUMS_CHANNELS and value in self.dirty:
            if not is_whole(IMAGE, value.shape):
                return self._convert(self._in_format(value, "ND"), "NCHW", fmt)
        return value

    def _in_format(self, value: Value, fmt: str) -> Value:
        own = self._format(value)
        if own == fmt:
            return value
        if own in BLOCKED and fmt in BLOCKED:
            value, own = self._in_format(value, "ND"), "ND"
        if (value, fmt) not in self.versions:
            plain = "ND" if MATRIX in (own, fmt) else "NCHW"
            source, names = value, [plain if f == "ND" else f for f in (own, fmt)]
            if fmt in (IMAGE, FILTER) and order_of(value) == FROM_CHANNELS_LAST:
                untransposed = value.node.inputs["x"]
                assert isinstance(untransposed, Value)
                source, names[0] = untransposed, "NHWC"
            made = self._convert(source, *names)
            self.versions[value, fmt] = made
            self.versions[made, own] = value
        return self.versions[value, fmt]

    def _convert(self, value: Value, source: str, result: str) -> Value:
        made = self.builder.op("TransData", value, src_format=source, dst_format=result)
        made.node.formats = {"0": result}
        if result in BLOCKED:
            self.formats[made] = result
        return made


def _is_zero(value: Value) -> bool:
    """Whether a value is the constant 0."""
    return value.node.kind == "const" and not any(value.node.attrs["numbers"])
