"""What HLIR's operators do with dimensions that are padded (see `graphop.padding`)."""

from __future__ import annotations

from dicp.graphop.padding import (
    Check,
    Refusal,
    along,
    anything,
    division,
    images,
    is_padded,
    joined,
    reshaped,
    sliced,
    unless,
)
from dicp.graphop.program import Node
from dicp.vendor.tops.prototypes import ELEMENTWISE


def _product(node: Node) -> Refusal:
    left, contracted = node.operands()[0].shape, node.attrs["dims"][2]
    return unless(any(is_padded(left[d]) for d in contracted), "adds up along a padded dimension")


def _gather(node: Node) -> Refusal:
    """Places out of bounds are clamped, so those that are computed from padding may be any."""
    shape, (_, collapsed, looked_into, _) = node.operands()[0].shape, node.attrs["dims"]
    over = any(is_padded(shape[d]) for d in (*collapsed, *looked_into))
    return unless(over, "looks into a padded dimension")


CHECKS: dict[str, Check] = {
    **dict.fromkeys(ELEMENTWISE, anything),
    **dict.fromkeys(("BroadcastInDim", "Iota", "Transpose"), anything),
    **dict.fromkeys(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"),
                    along(lambda node: node.attrs["axes"])),
    **dict.fromkeys(("ArgMax", "ArgMin", "Softmax", "TopK"),
                    along(lambda node: [node.attrs["axis"]])),
    **dict.fromkeys(("Conv2D", "MaxPool2D"), images),
    "Concatenate": joined("axis"),
    "Div": division,
    "DotGeneral": _product,
    "Gather": _gather,
    "Reshape": reshaped,
    "Slice": lambda node: sliced(
        node.operands()[0].shape, [node.attrs[name] for name in ("start", "limit", "stride")]
    ),
}  # fmt: skip
"""By operator: why it does not keep padded elements apart, or None."""
