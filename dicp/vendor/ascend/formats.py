"""Memory formats: which operators run on blocked tensors, and which take them as they come.

Convolutions run on NC1HWC0 images and FRACTAL_Z filters. Matrix products take each operand plain or
in FRACTAL_NZ, and give either. What neither knows channels nor rows takes any format, as long as
all it reads has the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from dicp.vendor.ascend.blocked import FILTER, IMAGE, MATRIX

PLAIN = frozenset({"ND", "NCHW", "NHWC", "NCDHW"})

IMAGES: dict[str, tuple[str, ...]] = {
    "Conv2D": ("x", "filter", "y"), "Conv3D": ("x", "filter", "y"),
    "Conv2DTranspose": ("x", "filter", "y"), "Conv3DTranspose": ("x", "filter", "y"),
    "Conv2DBackpropInput": ("filter", "out_backprop", "y"),
    "Conv3DBackpropInput": ("filter", "out_backprop", "y"),
    "Conv2DBackpropFilter": ("x", "out_backprop", "y"),
    "Conv3DBackpropFilter": ("x", "out_backprop", "y"),
    "MaxPoolV3": ("x", "y"), "AvgPoolV2": ("x", "y"), "AvgPoolV2Grad": ("input_grad", "out_grad"),
    "AdaptiveAvgPool2d": ("x", "y"), "AdaptiveMaxPool2d": ("x", "y"),
    "AdaptiveAvgPool2dGrad": ("input_grad", "output_grad"),
    "BNInfer": ("x", "y"),
    "BatchNormV3": ("x", "y"), "BatchNormGradV3": ("dy", "x", "dx"),
}  # fmt: skip
"""Inputs and outputs that are images or filters, and are not taken for tensors without a format."""


def plain_format(kind: str, port: str, rank: int) -> str:
    """What the format of a plain tensor is declared as, by who reads or makes it."""
    named = port in IMAGES.get(kind, ())
    return {4: "NCHW", 5: "NCDHW"}.get(rank, "ND") if named else "ND"


OPERAND_FORMATS = {
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

RESULT_FORMATS = {
    "Conv2D": IMAGE, "Conv2DBackpropInput": IMAGE, "Conv2DTranspose": IMAGE,
    "Conv2DBackpropFilter": FILTER,
}  # fmt: skip
"""The format of the result."""

SUMS_CHANNELS = frozenset({
    ("Conv2D", "x"), ("Conv2DBackpropInput", "out_backprop"), ("Conv2DTranspose", "x"),
})  # fmt: skip
"""Inputs whose channels are summed over: what fills up their last block must be zero."""

PRODUCTS = frozenset({"MatMulV2", "BatchMatMulV2"})
OPERANDS = ("x1", "x2")

KEEPS_ZERO = frozenset({
    "Abs", "Add", "Addcmul", "Cast", "Ceil", "Erf", "Floor", "GeluGradV2", "GeluV2", "HardSwish",
    "HardSwishGrad", "Identity", "LeakyRelu", "Maximum", "Minimum", "Mish", "Mul", "Neg", "Relu",
    "SelectV2", "SigmoidGrad", "Sqrt", "Square", "Sub", "Swish", "SwishGrad", "Tanh", "TanhGrad",
})  # fmt: skip
"""Give zero where every number they read is zero."""

ELEMENTWISE = KEEPS_ZERO | {
    "AxpyV2",
    "Equal",
    "Exp",
    "Greater",
    "GreaterEqual",
    "IsNan",
    "Less",
    "LessEqual",
    "Log",
    "LogicalNot",
    "RealDiv",
    "Reciprocal",
    "Rsqrt",
    "Sigmoid",
    "SoftplusV2",
}
"""Take any format, the same for all tensors they read."""

FOLLOWERS: dict[str, tuple[str, ...]] = {
    "BNInfer": ("x",), "MaxPoolV3": ("x",), "AvgPoolV2": ("x",), "AdaptiveAvgPool2d": ("x",),
    "BatchNormV3": ("x",), "BatchNormGradV3": ("dy", "x"),
}  # fmt: skip
"""Take blocked images at these inputs and give one as their first result."""

REDUCTIONS = frozenset({"ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"})
"""Take a blocked image where they leave its channels alone; the result is blocked if it keeps all
dimensions, else plain."""


def accepts(kind: str, port: str, fmt: str) -> bool:
    """Whether an operator takes a tensor in this format at this input."""
    if fmt in PLAIN or kind == "TransData" or OPERAND_FORMATS.get((kind, port)) == fmt:
        return True
    if fmt == MATRIX:
        return kind in ELEMENTWISE or (kind in PRODUCTS and port in OPERANDS)
    if fmt != IMAGE:
        return False
    follows = port in FOLLOWERS.get(kind, ()) or (kind in REDUCTIONS and port == "x")
    return kind in ELEMENTWISE or follows


def produced_format(kind: str, inputs: Sequence[str]) -> str:
    """The format of the first result, where the operator does not say."""
    if kind in ELEMENTWISE or kind in FOLLOWERS:
        return next((fmt for fmt in inputs if fmt not in PLAIN), "ND")
    return "ND"
