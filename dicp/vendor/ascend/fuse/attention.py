"""Fused attention on tensors whose heads stand beside their width, as linear layers make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dicp.graphop.builder import Builder
from dicp.graphop.program import Node, Operand, Value
from dicp.vendor.ascend.fuse.moves import HEADS_BACK, order_of, reshaped, source_of
from dicp.vendor.ascend.rules.core import Ge

KINDS = (
    "FlashAttentionScore", "FlashAttentionScoreGrad", "PromptFlashAttention", "IncreFlashAttention",
)  # fmt: skip

_BY_HEADS = ("query", "key", "value", "dy", "attention_in", "attention_out", "dq", "dk", "dv")
"""Ports with heads, in the layout that the attribute says."""


def heads_last(g: Builder, node: Node) -> Sequence[Value] | None:
    # attention(transpose(q), transpose(k), transpose(v)) = transpose(attention(q, k, v; "BSH"))
    assert isinstance(g, Ge)
    if node.attrs["input_layout"] != "BNSD":
        return None
    inputs: dict[str, Operand] = dict(node.inputs)
    for port in _BY_HEADS:
        if port not in inputs:
            continue
        operand = inputs[port]
        values = [operand] if isinstance(operand, Value) else list(operand)
        flat = [_flat(g, value) for value in values]
        if any(value is None for value in flat):
            return None
        made = tuple(value for value in flat if value is not None)
        inputs[port] = made[0] if isinstance(operand, Value) else made
    prototype = g.dialect.prototypes[node.kind]
    operands = [inputs.get(port.name) for port in prototype.inputs]
    outputs = g.ops(node.kind, *operands, **{**node.attrs, "input_layout": "BSH"})
    return [
        _by_heads(g, new, old.shape) if port.name in _BY_HEADS else new
        for port, new, old in zip(prototype.outputs, outputs, node.outputs, strict=True)
    ]


def _flat(g: Ge, value: Value) -> Value | None:
    """(batch, heads, rows, width) as (batch, rows, heads x width), if no number has to move."""
    batch, heads, rows, width = value.shape
    if order_of(value) == HEADS_BACK:
        value = source_of(value)
    elif not g.same(heads, 1) and not g.same(rows, 1):
        return None
    return reshaped(g, value, [batch, rows, heads * width])


def _by_heads(g: Ge, value: Value, shape: Sequence[Any]) -> Value:
    batch, heads, rows, width = shape
    return g.transpose(g.reshape(value, [batch, rows, heads, width]), HEADS_BACK)
