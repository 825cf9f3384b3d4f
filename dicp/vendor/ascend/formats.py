"""Memory formats: which operators want or take blocked tensors, and the conversions between them.

Convolutions run on NC1HWC0 images and FRACTAL_Z filters. An image that is blocked stays so through
operators that do not care; a conversion is made once per tensor and direction, so that two which
undo each other never meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from dicp.graphop.builder import Builder
from dicp.graphop.program import Item, Node, Operand, Result, Value

PLAIN = frozenset({"ND", "NCHW", "NHWC"})
IMAGE = "NC1HWC0"
FILTER = "FRACTAL_Z"

DEMANDS = {
    ("Conv2D", "x"): IMAGE,
    ("Conv2D", "filter"): FILTER,
    ("Conv2DBackpropInput", "out_backprop"): IMAGE,
    ("Conv2DBackpropInput", "filter"): FILTER,
    ("Conv2DBackpropFilter", "x"): IMAGE,
    ("Conv2DBackpropFilter", "out_backprop"): IMAGE,
    ("Conv2DTranspose", "x"): IMAGE,
    ("Conv2DTranspose", "filter"): FILTER,
}
"""The format an operator runs on, by input."""

GIVES = {
    "Conv2D": IMAGE, "Conv2DBackpropInput": IMAGE, "Conv2DTranspose": IMAGE,
    "Conv2DBackpropFilter": FILTER,
}  # fmt: skip
"""The format of the result."""

ELEMENTWISE = frozenset({
    "Abs", "Add", "Addcmul", "AxpyV2", "Cast", "Ceil", "Equal", "Erf", "Exp", "Floor", "GeluGradV2",
    "GeluV2", "Greater", "GreaterEqual", "HardSwish", "HardSwishGrad", "Identity", "IsNan",
    "LeakyRelu", "Less", "LessEqual", "Log", "Maximum", "Minimum", "Mish", "Mul", "Neg", "RealDiv",
    "Reciprocal", "Relu", "Rsqrt", "SelectV2", "Sigmoid", "SigmoidGrad", "SoftplusV2", "Sqrt",
    "Square", "Sub", "Swish", "SwishGrad", "Tanh", "TanhGrad",
})  # fmt: skip
"""Take any format, the same for all images they read."""

FOLLOWERS = frozenset({"BNInfer", "MaxPoolV3", "AvgPoolV2", "AdaptiveAvgPool2d"})
"""Take a blocked image at `x` and give one."""

_REDUCTIONS = frozenset({"ReduceMean", "ReduceSum"})
"""Take a blocked image where they leave its channels alone, and give a plain result."""

_BLOCKED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def accepts(kind: str, port: str, fmt: str) -> bool:
    """Whether an operator takes a tensor in this format at this input."""
    if fmt in PLAIN or kind == "TransData" or DEMANDS.get((kind, port)) == fmt:
        return True
    if fmt != IMAGE:
        return False
    return kind in ELEMENTWISE or port == "x" and (kind in FOLLOWERS or kind in _REDUCTIONS)


def produced_format(kind: str, inputs: Sequence[str]) -> str:
    """The format of a result, where the operator does not say."""
    if kind in ELEMENTWISE or kind in FOLLOWERS:
        return next((fmt for fmt in inputs if fmt not in PLAIN), "ND")
    return "ND"


class Layout:
    """Assigns formats in one walk and puts conversions where they change."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.formats: dict[Value, str] = {}
        self.versions: dict[tuple[Value, str], Value] = {}

    def run(self, items: Sequence[Item]) -> list[Item]:
        if not any(isinstance(item, Node) and item.kind in GIVES for item in items):
            return list(items)
        self.builder.nodes = []
        for item in items:
            if isinstance(item, Node):
                self._node(item)
                self.builder.nodes.append(item)
            elif isinstance(item, Result):
                value = self._in_format(item.value, "ND")
                self.builder.nodes.append(replace(item, value=value))
            else:
                self.builder.nodes.append(item)
        return self.builder.nodes

    def _node(self, node: Node) -> None:
        self.builder.origin = node.origin
        wanted = self._wanted(node)
        node.inputs = {
            port: self._operand(operand, wanted.get(port, "ND"))
            for port, operand in node.inputs.items()
        }
        given = GIVES.get(node.kind) if self._runs_blocked(node) else None
        if given is None and (node.kind in ELEMENTWISE or node.kind in FOLLOWERS):
            given = IMAGE if IMAGE in wanted.values() else None
        if given is not None:
            node.formats = {"0": given}
            self.formats[node.outputs[0]] = given

    def _runs_blocked(self, node: Node) -> bool:
        return node.outputs[0].dtype in _BLOCKED_DTYPES

    def _wanted(self, node: Node) -> dict[str, str]:
        """The format of each input that is to be blocked, by port."""
        if node.kind in GIVES and self._runs_blocked(node):
            return {port: fmt for (kind, port), fmt in DEMANDS.items() if kind == node.kind}
        if node.kind in FOLLOWERS or node.kind in _REDUCTIONS:
            x = node.inputs["x"]
            blocked = isinstance(x, Value) and self._format(x) == IMAGE
            return {"x": IMAGE} if blocked and self._keeps_channels(node) else {}
        if node.kind not in ELEMENTWISE:
            return {}
        return self._wanted_elementwise(node)

    def _keeps_channels(self, node: Node) -> bool:
        if node.kind not in _REDUCTIONS:
            return True
        axes = node.inputs["axes"]
        assert isinstance(axes, Value)
        return axes.known is not None and set(axes.known) <= {0, 2, 3}

    def _wanted_elementwise(self, node: Node) -> dict[str, str]:
        """All images blocked, if one is and the others have its sizes, or one per channel."""
        images = {p: v for p, v in node.inputs.items() if isinstance(v, Value) and v.ndim == 4}
        others = [v for v in node.operands() if v.ndim not in (0, 4)]
        shape = node.outputs[0].shape
        if others or not any(self._format(v) == IMAGE for v in images.values()):
            return {}
        if not all(self._fits(v, shape) for v in images.values()):
            return {}
        return dict.fromkeys(images, IMAGE)

    def _fits(self, value: Value, shape: Sequence[object]) -> bool:
        same = self.builder.same_shape(value.shape, shape)
        per_channel = [1, shape[1], 1, 1]
        return same or self.builder.same_shape(value.shape, per_channel)

    def _format(self, value: Value) -> str:
        return self.formats.get(value, "ND")

    def _operand(self, operand: Operand, fmt: str) -> Operand:
        if isinstance(operand, Value):
            return self._in_format(operand, fmt)
        return tuple(self._in_format(value, fmt) for value in operand)

    def _in_format(self, value: Value, fmt: str) -> Value:
        own = self._format(value)
        if own == fmt:
            return value
        if (value, fmt) not in self.versions:
            names = ["NCHW" if f == "ND" else f for f in (own, fmt)]
            made = self.builder.op("TransData", value, src_format=names[0], dst_format=names[1])
            made.node.formats = {"0": names[1]}
            self.formats[made] = fmt
            self.versions[value, fmt] = made
            self.versions[made, own] = value
        return self.versions[value, fmt]
