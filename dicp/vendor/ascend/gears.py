"""What GE's operators do with dimensions that are padded up to a gear (see `graphop.padding`)."""

from __future__ import annotations

from typing import Any

from dicp.graphop.padding import (
    Check,
    Refusal,
    allows_padding,
    along,
    division,
    images,
    is_padded,
    joined,
    last,
    padding_refusal,
    refused_if,
    reshaped,
    sliced,
)
from dicp.graphop.program import Graph, Node, Value
from dicp.vendor.ascend.prototypes import POINTWISE
from dicp.vendor.ascend.semantics import SEMANTICS


def refusal(graph: Graph) -> Refusal:
    """Why a graph takes no gears; None if it does."""
    return padding_refusal(graph, CHECKS, SEMANTICS)


def _value(node: Node, port: str) -> Value:
    value = node.inputs[port]
    assert isinstance(value, Value)
    return value


def _known(node: Node, port: str) -> list[Any]:
    known = _value(node, port).known
    return [None] if known is None else list(known)


def _product(node: Node) -> Refusal:
    left = _value(node, "x1").shape
    flag = node.attrs.get("transpose_x1", node.attrs.get("adj_x1", False))
    return refused_if(is_padded(left[-2 if flag else -1]), "adds up along a padded dimension")


def _slice(node: Node) -> Refusal:
    bounds = [_known(node, port) for port in ("begin", "end", "strides")]
    shape = _value(node, "x").shape
    if any(len(b) != len(shape) for b in bounds):
        return "has bounds that are not known"
    return sliced(shape, bounds)


def _gather(node: Node) -> Refusal:
    """Padded places of an index that comes from outside are 0, which is in range."""
    axis = _known(node, "axis")[0]
    if axis is None or is_padded(_value(node, "x").shape[axis]):
        return "looks into a padded dimension"
    index = _value(node, "indices")
    padded = any(map(is_padded, index.shape))
    moves = ("Reshape", "Transpose", "Cast", "Identity", "BroadcastTo")
    while index.node.kind in moves or index.node.checks:
        index = index.node.operands()[0]
    return refused_if(padded and index.node.kind != "input", "looks up places that are computed")


def _attention(node: Node) -> Refusal:
    """Queries may be padded; keys too, if no query sees those after it."""
    rows, rest = (2, (1, 3)) if node.attrs["input_layout"] == "BNSD" else (1, (2,))
    key = _value(node, "key")
    if any(is_padded(v.shape[d]) for v in (key, _value(node, "query")) for d in rest):
        return "has padded heads"
    ahead = node.attrs.get("next_tokens", node.attrs.get("next_tockens"))
    return refused_if(is_padded(key.shape[rows]) and ahead != 0, "attends to padded keys")


def _range(node: Node) -> Refusal:
    fixed = all(_value(node, port).node.kind == "const" for port in ("start", "delta"))
    return refused_if(not fixed, "has a start or step that is a size")


CHECKS: dict[str, Check] = {
    **dict.fromkeys(POINTWISE, allows_padding),
    **dict.fromkeys(("FloorDiv", "FloorMod", "Mod", "TruncateDiv", "RealDiv"), division),
    **dict.fromkeys(
        ("Transpose", "BroadcastTo", "Fill", "Identity", "Pack", "BNInfer"), allows_padding
    ),
    **dict.fromkeys(
        ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceAny",
         "ReduceAll"), along(lambda node: _known(node, "axes"))),
    **dict.fromkeys(("SoftmaxV2", "LogSoftmaxV2", "SoftmaxGrad"),
                    along(lambda node: node.attrs["axes"])),
    "LogSoftmaxGrad": along(lambda node: node.attrs["axis"]),
    "LayerNormV4": last(lambda node: len(_known(node, "normalized_shape"))),
    **dict.fromkeys(("RmsNorm", "AddRmsNorm"), last(lambda node: _value(node, "gamma").ndim)),
    **dict.fromkeys(("AddLayerNorm", "RotaryMul"), last(lambda node: 1)),
    **dict.fromkeys(("SwiGlu", "SwiGluGrad"), along(lambda node: [node.attrs["dim"]])),
    "RepeatInterleave": allows_padding,
    "ConcatD": joined("concat_dim"),
    "SplitVD": along(lambda node: [node.attrs["split_dim"]]),
    "Unpack": along(lambda node: [node.attrs["axis"]]),
    "StridedSlice": _slice,
    "Reshape": reshaped,
    "GatherV2": _gather,
    "MatMulV2": _product,
    "BatchMatMulV2": _product,
    "PromptFlashAttention": _attention,
    "FlashAttentionScore": _attention,
    "Range": _range,
    **dict.fromkeys(("Conv2D", "MaxPoolV3", "AvgPoolV2", "AdaptiveAvgPool2d"), images),
}  # fmt: skip
"""By operator: why it does not keep padded elements apart, or None."""
