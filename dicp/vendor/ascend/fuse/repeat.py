"""Elements repeated one by one."""

from __future__ import annotations

from collections.abc import Sequence

from dicp.graphop.builder import Builder
from dicp.graphop.program import Node, Value
from dicp.vendor.ascend.fuse.moves import reshaped, source_of
from dicp.vendor.ascend.rules.core import Ge


def repeat_interleave(g: Builder, node: Node) -> Sequence[Value] | None:
    # reshape(broadcast(x[.., n, 1, ..] to [.., n, r, ..]) to [.., n r, ..]) = repeat_interleave(x)
    assert isinstance(g, Ge)
    spread, out = source_of(node.outputs[0]), node.outputs[0]
    if spread.node.kind != "BroadcastTo":
        return None
    narrow = source_of(spread)
    if narrow.ndim != spread.ndim or out.ndim != spread.ndim - 1:
        return None
    grown = [d for d in range(spread.ndim) if not g.same(narrow.shape[d], spread.shape[d])]
    if len(grown) != 1 or grown[0] == 0 or not g.same(narrow.shape[grown[0]], 1):
        return None
    axis, count = grown[0] - 1, spread.shape[grown[0]]
    if not isinstance(count, int) or g.same(narrow.shape[axis], 1):
        return None
    merged = [*spread.shape[:axis], spread.shape[axis] * count, *spread.shape[axis + 2 :]]
    if not g.same_shape(merged, out.shape):
        return None
    x = reshaped(g, narrow, [*narrow.shape[: axis + 1], *narrow.shape[axis + 2 :]])
    return [g.op("RepeatInterleave", x, g.ints([count]), axis=axis)]
