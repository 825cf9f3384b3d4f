"""Which graphs may run on padded inputs: where what a padded place holds never reaches another.

Every symbolic dimension is padded at its end, up to a gear. A graph takes gears if each operator's
elements at unpadded places depend on elements at unpadded places alone: elementwise operators,
moves that leave padded dimensions whole, products and reductions and norms over other dimensions,
causal attention. What is left over at padded places is cut off the results. A graph does not take
them that uses a size as a number, writes to an input, or holds an operator not listed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dicp.graphop.program import Graph, Node, Value
from dicp.torch_private import linear_factor
from dicp.vendor.ascend.prototypes import POINTWISE
from dicp.vendor.ascend.semantics import SEMANTICS

Refusal = str | None
Check = Callable[[Node], Refusal]


def refusal(graph: Graph) -> Refusal:
    """Why a graph takes no gears; None if it does. A graph of known sizes has no use for them."""
    if not any(_is_padded(size) for node in graph.nodes for size in _sizes_of(node)):
        return "its sizes are known"
    if not any(node.kind == "input" for node in graph.nodes):
        return "it takes no tensor"
    if any(result.placement != "fresh" for result in graph.results):
        return "it writes to an input"
    for node in graph.nodes:
        found = None if node.checks else _node_refusal(node)
        if found is not None:
            return f"{node.kind} {found}" + (f", from {node.origin}" if node.origin else "")
    return None


def _node_refusal(node: Node) -> Refusal:
    if node.kind in ("input", "const", "sizes"):
        simple = all(linear_factor(size) is not None for size in _sizes_of(node))
        return None if simple else "has a size that is no multiple of one symbol"
    check = CHECKS.get(node.kind)
    if check is None:
        return "is not known to keep padded elements apart"
    host = SEMANTICS[node.kind].host
    for port, operand in node.inputs.items():
        for value in [operand] if isinstance(operand, Value) else operand:
            if value.node.kind == "sizes" and port not in host:
                return "uses a size as a number"
    return check(node)


def _sizes_of(node: Node) -> list[Any]:
    if node.kind == "sizes":
        sizes = node.attrs["sizes"]
        return list(sizes) if isinstance(sizes, tuple) else [sizes]
    return [size for value in node.outputs for size in value.shape]


def _is_padded(size: Any) -> bool:
    return isinstance(size, torch.SymInt)


def _value(node: Node, port: str) -> Value:
    value = node.inputs[port]
    assert isinstance(value, Value)
    return value


def _known(node: Node, port: str) -> list[Any]:
    known = _value(node, port).known
    return [None] if known is None else list(known)


def _unless(padded: bool, reason: str) -> Refusal:
    return reason if padded else None


def _anything(node: Node) -> Refusal:
    return None


def _along(axes: Callable[[Node], Sequence[Any]], port: str = "x") -> Check:
    """Not along a padded dimension."""

    def check(node: Node) -> Refusal:
        shape = _value(node, port).shape
        over = [shape[axis % len(shape)] for axis in axes(node)] if shape else []
        return _unless(any(map(_is_padded, over)), "works along a padded dimension")

    return check


def _last(count: Callable[[Node], int], port: str = "x") -> Check:
    return _along(lambda node: range(-count(node), 0), port)


def _product(node: Node) -> Refusal:
    left = _value(node, "x1").shape
    flag = node.attrs.get("transpose_x1", node.attrs.get("adj_x1", False))
    return _unless(_is_padded(left[-2 if flag else -1]), "adds up along a padded dimension")


def _reshape(node: Node) -> Refusal:
    """A padded dimension stays whole if as many elements stand before it as did before."""
    before, after = list(_value(node, "x").shape), list(node.outputs[0].shape)
    while before and after and _same(before[0], after[0]):
        before.pop(0)
        after.pop(0)
    left, right = (_before_padded(shape) for shape in (before, after))
    return _unless(left is None or left != right, "takes a padded dimension apart")


def _same(left: Any, right: Any) -> bool:
    return linear_factor(left) == linear_factor(right)


def _before_padded(shape: Sequence[Any]) -> int | None:
    """How many elements stand before the one padded dimension; 0 if there is none, None if two."""
    places = [k for k, size in enumerate(shape) if _is_padded(size)]
    if not places:
        return 0
    return math.prod(shape[: places[0]]) if len(places) == 1 else None


def _slice(node: Node) -> Refusal:
    bounds = [_known(node, port) for port in ("begin", "end", "strides")]
    shape = _value(node, "x").shape
    if any(len(b) != len(shape) for b in bounds):
        return "has bounds that are not known"
    for size, begin, end, step in zip(shape, *bounds, strict=True):
        if _is_padded(size) and (begin != 0 or step != 1 or not _same(end, size)):
            return "takes a part of a padded dimension"
        if not _is_padded(size) and (_is_padded(begin) or _is_padded(end)):
            return "starts or ends at a size"
    return None


def _gather(node: Node) -> Refusal:
    """Padded places of an index that comes from outside are 0, which is in range."""
    axis = _known(node, "axis")[0]
    if axis is None or _is_padded(_value(node, "x").shape[axis]):
        return "looks into a padded dimension"
    index = _value(node, "indices")
    padded = any(map(_is_padded, index.shape))
    moves = ("Reshape", "Transpose", "Cast", "Identity", "BroadcastTo")
    while index.node.kind in moves or index.node.checks:
        index = index.node.operands()[0]
    return _unless(padded and index.node.kind != "input", "looks up places that are computed")


def _attention(node: Node) -> Refusal:
    """Queries may be padded; keys too, if no query sees those after it."""
    rows, rest = (2, (1, 3)) if node.attrs["input_layout"] == "BNSD" else (1, (2,))
    key = _value(node, "key")
    if any(_is_padded(v.shape[d]) for v in (key, _value(node, "query")) for d in rest):
        return "has padded heads"
    ahead = node.attrs.get("next_tokens", node.attrs.get("next_tockens"))
    return _unless(_is_padded(key.shape[rows]) and ahead != 0, "attends to padded keys")


def _division(node: Node) -> Refusal:
    """Padded integers are zeros, by which nothing is divided."""
    padded = any(map(_is_padded, node.outputs[0].shape))
    whole = not node.outputs[0].dtype.is_floating_point
    return _unless(padded and whole, "divides integers")


def _range(node: Node) -> Refusal:
    fixed = all(_value(node, port).node.kind == "const" for port in ("start", "delta"))
    return _unless(not fixed, "has a start or step that is a size")


def _images(node: Node) -> Refusal:
    shape = _value(node, "x").shape
    return _unless(any(map(_is_padded, shape[1:])), "works on padded images")


CHECKS: dict[str, Check] = {
    **dict.fromkeys(POINTWISE, _anything),
    **dict.fromkeys(("FloorDiv", "FloorMod", "Mod", "TruncateDiv", "RealDiv"), _division),
    **dict.fromkeys(("Transpose", "BroadcastTo", "Fill", "Identity", "Pack", "BNInfer"), _anything),
    **dict.fromkeys(
        ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceAny",
         "ReduceAll"), _along(lambda node: _known(node, "axes"))),
    "SoftmaxV2": _along(lambda node: node.attrs["axes"]),
    "LogSoftmaxV2": _along(lambda node: node.attrs["axes"], "logits"),
    "SoftmaxGrad": _along(lambda node: node.attrs["axes"], "softmax"),
    "LogSoftmaxGrad": _along(lambda node: node.attrs["axis"], "grad"),
    "LayerNormV4": _last(lambda node: len(_known(node, "normalized_shape"))),
    "RmsNorm": _last(lambda node: _value(node, "gamma").ndim),
    "AddRmsNorm": _last(lambda node: _value(node, "gamma").ndim, "x1"),
    "AddLayerNorm": _last(lambda node: 1, "x1"),
    "RotaryMul": _last(lambda node: 1),
    "SwiGlu": _along(lambda node: [node.attrs["dim"]]),
    "SwiGluGrad": _along(lambda node: [node.attrs["dim"]]),
    "RepeatInterleave": _anything,
    "ConcatD": lambda node: _unless(
        any(_is_padded(v.shape[node.attrs["concat_dim"]]) for v in node.operands()),
        "joins along a padded dimension"),
    "SplitVD": _along(lambda node: [node.attrs["split_dim"]]),
    "Unpack": _along(lambda node: [node.attrs["axis"]]),
    "StridedSlice": _slice,
    "Reshape": _reshape,
    "GatherV2": _gather,
    "MatMulV2": _product,
    "BatchMatMulV2": _product,
    "PromptFlashAttention": _attention,
    "FlashAttentionScore": _attention,
    "Range": _range,
    **dict.fromkeys(("Conv2D", "MaxPoolV3", "AvgPoolV2", "AdaptiveAvgPool2d"), _images),
}  # fmt: skip
"""By operator: why it does not keep padded elements apart, or None."""
