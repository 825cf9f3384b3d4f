"""Numbers that tensors are multiplied by: several become one, and attention takes them as its own.

In floating point alone, and where the product is exact in the tensor's type or the type is float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dicp.graphop.builder import Builder
from dicp.graphop.operators import holds
from dicp.graphop.program import Node, Value
from dicp.vendor.ascend.fuse.moves import both_ways
from dicp.vendor.ascend.rules.core import Ge


def scaled(value: Value) -> tuple[Value, float] | None:
    """A tensor and the number it is multiplied by, if the value is that."""
    node = value.node
    if node.kind not in ("Mul", "RealDiv") or not value.dtype.is_floating_point:
        return None
    sides = both_ways(node)
    for tensor, factor in sides if node.kind == "Mul" else sides[:1]:
        number = _number(factor)
        if number is None or tensor.ndim != value.ndim or number == 0:
            continue
        number = number if node.kind == "Mul" else 1 / number
        exact = node.kind == "Mul" or math.frexp(number)[0] == 0.5  # a power of two
        if exact and math.isfinite(number):
            return tensor, number
    return None


def _number(value: Value) -> float | None:
    if value.node.kind != "const" or value.ndim:
        return None
    return float(value.node.attrs["numbers"][0])


def twice(g: Builder, node: Node) -> Sequence[Value] | None:
    # (x a) b = x (a b);  x 1 = x
    assert isinstance(g, Ge)
    outer = scaled(node.outputs[0])
    if outer is None:
        return None
    inner = scaled(outer[0])
    x, factor = (inner[0], inner[1] * outer[1]) if inner is not None else outer
    if factor == 1.0:
        return [x]
    if inner is None or not _keeps(x.dtype, factor, inner[1], outer[1]):
        return None
    return [g.mul(x, factor)]


def _keeps(dtype: torch.dtype, product: float, *factors: float) -> bool:
    """Whether the product stands for the factors, whatever they are multiplied with."""
    info = torch.finfo(dtype)
    normal = all(info.tiny < abs(f) < info.max for f in (product, *factors))
    return normal and (dtype not in (torch.float16, torch.bfloat16) or holds(dtype, product))


_SCALED = {"PromptFlashAttention": ("query", "key"), "IncreFlashAttention": ("query",)}
"""Ports whose scale is the scores', in inference: forward and backward must scale alike."""


def attention_scale(g: Builder, node: Node) -> Sequence[Value] | None:
    # attention(q a, k; scale) = attention(q, k; a scale)
    inputs: dict[str, Any] = dict(node.inputs)
    factor = node.attrs["scale_value"]
    for port in _SCALED.get(node.kind, ()):
        found = scaled(inputs[port])
        if found is not None:
            inputs[port], factor = found[0], factor * found[1]
    if factor == node.attrs["scale_value"]:
        return None
    operands = [inputs.get(port.name) for port in g.dialect.prototypes[node.kind].inputs]
    return g.ops(node.kind, *operands, **{**node.attrs, "scale_value": factor})
