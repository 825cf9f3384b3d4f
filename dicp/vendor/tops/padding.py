"""What HLIR's operators do with dimensions that are padded (see `graphop.padding`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dicp.graphop import flattened
from dicp.graphop.builder import Builder
from dicp.graphop.flattened import Flow
from dicp.graphop.padding import (
    Check,
    allows_padding,
    along,
    division,
    highest,
    images,
    is_padded,
    joined,
    lowest,
    masked_dot,
    masked_mean,
    masks,
)
from dicp.graphop.program import Node
from dicp.graphop.rewrite import Rewrite, Rewritten
from dicp.vendor.tops.hlir import Hlir
from dicp.vendor.tops.prototypes import ELEMENTWISE


def _axes(node: Node) -> Sequence[int]:
    return node.attrs["axes"] if "axes" in node.attrs else [node.attrs["axis"]]


def _slice(g: Builder, node: Node) -> Rewritten:
    """Parts that begin or end at a size, or skip elements, are looked up instead."""
    assert isinstance(g, Hlir)
    x, bounds = node.operands()[0], [list(node.attrs[k]) for k in ("start", "limit", "stride")]
    old = x
    for axis, (first, last, step) in enumerate(zip(*bounds, strict=True)):
        size = x.shape[axis]
        if is_padded(first) or (step != 1 if is_padded(size) else is_padded(last)):
            places = g.mul(g.arange(node.outputs[0].shape[axis]), step)
            start = g.number(first, torch.int64)
            x = g.op("Gather", x, g.add(places, start), g.const(axis, torch.int64))
            bounds[0][axis], bounds[1][axis], bounds[2][axis] = 0, x.shape[axis], 1
    if x is old:
        return None
    return [g.hlir("Slice", x, start=bounds[0], limit=bounds[1], stride=bounds[2])]


MASKS: dict[str, Rewrite] = {
    **dict.fromkeys(("ArgMax", "ReduceMax", "Softmax"), masks(_axes, lowest)),
    **dict.fromkeys(("ArgMin", "ReduceMin"), masks(_axes, highest)),
    "DotGeneral": masked_dot,
    "ReduceMean": masked_mean(_axes, "ReduceSum"),
    "ReduceProd": masks(_axes, lambda dtype: 1),
    "ReduceSum": masks(_axes, lambda dtype: 0),
    "Slice": _slice,
}
"""By operator: its operands masked where it works along a padded dimension."""
CHECKS: dict[str, Check] = {
    **dict.fromkeys((*ELEMENTWISE, *MASKS, "BroadcastInDim", "Gather", "Iota", "Reshape",
                      "Transpose"), allows_padding),
    **dict.fromkeys(("Conv2D", "MaxPool2D"), images),
    "Concatenate": joined("axis"),
    "Div": division,
    "TopK": along(_axes),
}  # fmt: skip
"""By operator: why it does not keep padded elements apart, or None. Places that are computed from
padding may be any: those out of bounds are clamped."""
FLOWS: dict[str, Flow] = {
    **dict.fromkeys(ELEMENTWISE, flattened.elementwise),
    **dict.fromkeys(("ArgMax", "ArgMin", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
                     "ReduceSum"), flattened.along(_axes, lambda node: node.attrs["keepdim"])),
    **dict.fromkeys(("Softmax", "TopK"), flattened.along(_axes, lambda node: True)),
    "BroadcastInDim": flattened.broadcast,
    "DotGeneral": flattened.dot_general,
    "Gather": flattened.gather,
    "Iota": flattened.iota,
    "Reshape": flattened.reshaped,
    "Slice": flattened.sliced,
    "Transpose": lambda node, given: [given[0][d] for d in node.attrs["perm"]],
}  # fmt: skip
"""By operator: where its results hold padding; others take no flattened dimensions."""
