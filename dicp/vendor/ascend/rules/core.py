"""GE's operators behind the vocabulary that rules are written with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dicp.graphop.builder import Dialect
from dicp.graphop.operators import NoRule, Operand, Ops, Value
from dicp.graphop.prototype import Port, Prototype
from dicp.torch_private import FakeTensorMode
from dicp.vendor.ascend.blocked import BLOCKED, storage_dims
from dicp.vendor.ascend.probe import EVERY_OPERATOR, Installed
from dicp.vendor.ascend.prototypes import PROTOTYPES
from dicp.vendor.ascend.semantics import SEMANTICS

GE = Dialect("GE", PROTOTYPES, SEMANTICS)

NAMES: dict[str, str] = {
    "AdaptiveAvgPool2D": "AdaptiveAvgPool2d",
    "AdaptiveAvgPool2DGrad": "AdaptiveAvgPool2dGrad",
    "AdaptiveMaxPool2D": "AdaptiveMaxPool2d",
    "ArgMax": "ArgMaxV2",
    "AvgPool2D": "AvgPoolV2",
    "AvgPool2DGrad": "AvgPoolV2Grad",
    "Axpy": "AxpyV2",
    "BatchMatMul": "BatchMatMulV2",
    "BatchNormGrad": "BatchNormGradV3",
    "BatchNormInference": "BNInfer",
    "BatchNormTraining": "BatchNormV3",
    "Concat": "ConcatD",
    "Copy": "TensorMove",
    "Div": "RealDiv",
    "Gather": "GatherV2",
    "GatherND": "GatherNd",
    "Gelu": "GeluV2",
    "GeluGrad": "GeluGradV2",
    "LayerNorm": "LayerNormV4",
    "LogSoftmax": "LogSoftmaxV2",
    "MatMul": "MatMulV2",
    "MaxPool2D": "MaxPoolV3",
    "Pad": "PadV3",
    "RandomNormal": "StatelessRandomNormalV2",
    "RandomUniform": "StatelessRandomUniformV2",
    "Reverse": "ReverseV2",
    "Round": "Rint",
    "ScatterNDUpdate": "TensorScatterUpdate",
    "Select": "SelectV2",
    "Softmax": "SoftmaxV2",
    "Softplus": "SoftplusV2",
    "Split": "SplitVD",
    "Stack": "Pack",
    "TopK": "TopKV2",
    "Unstack": "Unpack",
}
"""GE's names of operators that the vocabulary calls differently."""
MOVES = frozenset({
    "AsStrided", "BroadcastTo", "Concat", "GatherElements", "GatherND", "Gather", "Identity",
    "MaskedScatter", "Stack", "Pad", "RepeatInterleave", "Reverse", "Roll", "Select",
    "Split", "StridedSlice", "ScatterNDUpdate", "Tile", "TransData", "Transpose", "Tril",
    "Triu", "Unstack",
})  # fmt: skip
"""Ops whose results are bits of their operands."""
EXACT = frozenset({
    "Abs", "Cummax", "Cummin", "Equal", "FloorMod", "Greater", "GreaterEqual", "Less", "LessEqual",
    "Maximum", "Minimum", "Mod", "NotEqual", "Range", "ReduceMax", "ReduceMin", "SearchSorted",
    "Sign", "Sort", "TopK", "Trunc",
})  # fmt: skip
"""Ops whose results on integers are numbers that their operands' dtype holds."""


class Ge(Ops):
    """Builds GE operators; all of the vocabulary has one of the same form."""

    writes_over_inputs = True
    names = NAMES
    moves = frozenset(NAMES.get(kind, kind) for kind in MOVES)
    exact = frozenset(NAMES.get(kind, kind) for kind in EXACT)
    constant_sizes = True
    bias_apart = frozenset({torch.bfloat16})
    largest_window = 255
    largest_step = 63

    def __init__(
        self, fake_mode: FakeTensorMode | None, operators: Installed = EVERY_OPERATOR
    ) -> None:
        super().__init__(GE, fake_mode)
        self.operators = operators
        """What the installation has."""

    def has(self, *kinds: str) -> bool:
        """Whether the installation has all these operators."""
        return self.operators.kinds.issuperset(kinds)

    def _takes(self, kind: str, port: Port, dtype: torch.dtype) -> bool:
        listed = self.operators.dtypes.get((kind, port.name))
        return self.has(kind) and dtype in port.dtypes and (listed is None or dtype in listed)

    def own(self, kind: str, *operands: Operand | None, **attrs: Any) -> list[Value]:
        if not self.has(kind) and kind in self.dialect.prototypes:
            raise NoRule(f"the installed CANN has no {kind}")
        return super().own(kind, *operands, **attrs)

    def _check_dtypes(self, prototype: Prototype, named: Mapping[str, Any]) -> None:
        super()._check_dtypes(prototype, named)
        for port in prototype.inputs:
            operand = named.get(port.name)
            first = operand[0] if isinstance(operand, tuple) and operand else operand
            if isinstance(first, Value) and not self._takes(prototype.kind, port, first.dtype):
                name = str(first.dtype).removeprefix("torch.")
                raise NoRule(f"the installed CANN's {prototype.kind} does not take {name}")

    def stored(self, value: Value) -> torch.Tensor:
        """A blocked tensor is stored with its last blocks filled up."""
        fmt = value.node.formats.get(str(value.index), "ND")
        if fmt not in BLOCKED:
            return value.fake
        return self.fake(storage_dims(fmt, value.shape), value.dtype)
