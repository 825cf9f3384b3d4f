"""How GE writes over an input: the forms that work on a reference, and plain assignment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dicp.graphop.builder import Builder
from dicp.graphop.inplace import Form, Writing
from dicp.graphop.program import Node, Value
from dicp.vendor.ascend.fuse.moves import along, source_of
from dicp.vendor.ascend.prototypes import ALIASES, POINTWISE
from dicp.vendor.ascend.rules.core import Ge


def _takes(g: Builder, kind: str, value: Value) -> bool:
    assert isinstance(g, Ge)
    return g.takes(kind, g.dialect.prototypes[kind].inputs[0].name, value.dtype)


def _scatter(kind: str, port: str) -> Callable[[Builder, Node], Form | None]:
    """An update of single places, whose reference form has the same other operands."""

    def form(g: Builder, node: Node) -> Form | None:
        source = source_of(node.outputs[0], port)
        if not _takes(g, kind, source):
            return None
        rest = [operand for name, operand in node.inputs.items() if name != port]
        return Form(source, lambda g, memory: g.op(kind, memory, *rest, **node.attrs))

    return form


def part_of(g: Builder, node: Node) -> Form | None:
    # concat(x[:first], new, x[last:]) = x with new assigned to x[first:last]
    parts, axis, whole = node.operands(), node.attrs["concat_dim"], node.outputs[0]
    if len(parts) not in (2, 3):
        return None
    for middle in {1, len(parts) - 2}:
        found = _assigned(g, whole, parts[:middle], parts[middle], parts[middle + 1 :], axis)
        if found is not None:
            return found
    return None


def _assigned(
    g: Builder, whole: Value, before: Sequence[Value], new: Value, after: Sequence[Value], axis: int
) -> Form | None:
    size = whole.shape[axis]
    bounds = [along(g, part, axis) for part in (*before, *after)]
    if any(b is None for b in bounds) or len(before) > 1 or len(after) > 1:
        return None
    sources = {source_of(part) for part in (*before, *after)}
    if not all(g.same_shape(source.shape, whole.shape) for source in sources):
        return None
    known = [b for b in bounds if b is not None]
    first: Any = known[0][1] if before else 0
    last: Any = known[-1][0] if after else size
    ends = [*([known[0][0]] if before else [0]), *([known[-1][1]] if after else [size])]
    if len(sources) != 1 or not g.same(ends[0], 0) or not g.same(ends[1], size):
        return None
    if not g.same(last - first, new.shape[axis]) or not _takes(g, "StridedSliceAssign", whole):
        return None
    begin, end = [0] * whole.ndim, list(whole.shape)
    begin[axis], end[axis] = first, last

    def write(g: Builder, memory: Value) -> Value:
        steps = g.ints([1] * whole.ndim)
        return g.op("StridedSliceAssign", memory, g.ints(begin), g.ints(end), steps, new)

    return Form(sources.pop(), write, tuple(part.node for part in (*before, *after)))


WRITING = Writing(
    forms={
        "ConcatD": part_of,
        "ScatterElements": _scatter("ScatterElementsV2", "data"),
        "TensorScatterUpdate": _scatter("ScatterNdUpdate", "x"),
    },
    elementwise=POINTWISE,
    aliases=ALIASES,
    assign=lambda g, memory, value: g.op("Assign", memory, value),
)
