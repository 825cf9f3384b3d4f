"""HLIR's operators behind the vocabulary: how the builder makes what rules ask for.

HLIR broadcasts nothing, works on sizes and axes that stand in attributes, and wants images NHWC and
filters HWIO. Whatever has no form here runs eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dicp.graphop.builder import Dialect
from dicp.graphop.operators import Operand, Ops
from dicp.graphop.program import Value
from dicp.graphop.prototype import ResultType
from dicp.torch_private import FakeTensorMode
from dicp.vendor.tops.prototypes import ELEMENTWISE, PROTOTYPES
from dicp.vendor.tops.semantics import SEMANTICS

HLIR = Dialect("HLIR", PROTOTYPES, SEMANTICS)

MOVES = frozenset({
    "BroadcastInDim", "Concatenate", "Gather", "Reshape", "Reverse", "Select", "Slice",
    "Transpose",
})  # fmt: skip
EXACT = frozenset({
    "Abs", "ArgMax", "ArgMin", "Compare", "Max", "Min", "ReduceMax", "ReduceMin", "TopK",
})  # fmt: skip


class Hlir(Ops):
    """Builds HLIR operators."""

    moves = MOVES
    exact = EXACT
    bears_any_index = True  # gathers clamp, scatters drop what is out of bounds

    def __init__(self, fake_mode: FakeTensorMode | None) -> None:
        super().__init__(HLIR, fake_mode)

    # ---- HLIR's own operators -------------------------------------------------------------------

    def hlir(self, kind: str, *operands: Operand, **attrs: Any) -> Value:
        """An operator of HLIR; elementwise operands are broadcast to a common shape."""
        if kind in ELEMENTWISE and len(operands) > 1:
            operands = tuple(self.alike(operands))
        return self.own(kind, *operands, **attrs)[0]

    def alike(self, values: Sequence[Value]) -> list[Value]:
        """The values broadcast to their common shape."""
        rank = max(v.ndim for v in values)
        shape: list[Any] = [1] * rank
        for value in values:
            for axis, size in enumerate(value.shape, start=rank - value.ndim):
                if self.same(shape[axis], 1):
                    shape[axis] = size
        return [self.broadcast(v, shape) for v in values]

    def seed(self) -> Value:
        """A random number that the host draws anew for every run: int64, shape (1,)."""
        return self._leaf("seed", self.fake((1,), torch.int64), None)

    def iota(self, shape: Sequence[Any], dimension: int) -> Value:
        return self.hlir("Iota", dimension=dimension, type=ResultType(torch.int64, tuple(shape)))

    def compare(self, x: Value, y: Operand, direction: str) -> Value:
        """Whether `x` stands in this relation to `y`, a number or a value."""
        return self.hlir("Compare", x, self.as_type(y, x.dtype), direction=direction)

    # ---- what rules call ------------------------------------------------------------------------

    def cast(self, x: Value, dtype: torch.dtype) -> Value:
        if x.dtype == dtype:
            return x
        if dtype == torch.bool:
            return self.compare(x, 0, "NE")
        return self.hlir("Convert", x, type=ResultType(dtype, x.shape))

    def transpose(self, x: Value, order: Sequence[int]) -> Value:
        if list(order) == list(range(x.ndim)):
            return x
        return self.once(
            ("transpose", x, tuple(order)),
            lambda: self.hlir("Transpose", x, perm=[int(d) for d in order]),
        )  # type: ignore[no-any-return]

    def reshape(self, x: Value, shape: Sequence[Any]) -> Value:
        if any(isinstance(size, int) and size < 0 for size in shape):
            with self.inferring():
                shape = x.fake.reshape(tuple(shape)).shape
        if self.same_shape(x.shape, shape):
            return x
        return self.hlir("Reshape", x, type=ResultType(x.dtype, tuple(shape)))

    def broadcast(self, x: Value, shape: Sequence[Any]) -> Value:
        if self.same_shape(x.shape, shape):
            return x
        first = len(shape) - x.ndim
        dims = list(range(first, len(shape)))
        kind = ResultType(x.dtype, tuple(shape))
        return self.hlir("BroadcastInDim", x, dims=dims, type=kind)

    def slice(self, x: Value, axis: int, start: Any, end: Any, step: int = 1) -> Value:
        first: list[Any] = [0] * x.ndim
        last, steps = list(x.shape), [1] * x.ndim
        first[axis], last[axis], steps[axis] = start, end, step
        return self.hlir("Slice", x, start=first, limit=last, stride=steps)

    def concat(self, parts: Sequence[Value], axis: int) -> Value:
        return parts[0] if len(parts) == 1 else self.hlir("Concatenate", tuple(parts), axis=axis)

    def unpack(self, x: Value, axis: int, count: int) -> list[Value]:
        return [self.squeeze(self.slice(x, axis, k, k + 1), [axis]) for k in range(count)]

    def full(self, shape: Sequence[Any], value: Operand, dtype: torch.dtype) -> Value:
        return self.broadcast(self.as_type(value, dtype), shape)

    def arange(self, size: Any, dtype: torch.dtype = torch.int64) -> Value:
        return self.cast(self.iota([size], 0), dtype)
