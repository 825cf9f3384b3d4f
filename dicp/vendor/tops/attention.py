"""Attention and its gradient, unfused: PyTorch has no decomposition of the gradient, and its own of
the forward operator leaves no logarithms of sums for it."""

from __future__ import annotations

import math
from typing import Any

import torch

from dicp.graphop.operators import Ops
from dicp.graphop.program import Value
from dicp.rules import NoRule, RuleTable

aten = torch.ops.aten
RULES = RuleTable()


def _scores(
    g: Ops, q: Value, k: Value, is_causal: bool, mask: Value | None, scale: float | None
) -> tuple[Value, float]:
    """scale q k^T + mask in at least float32, and the scale."""
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = g.mul(g.wide(_product(g, q, _turned(g, k))), factor)
    if is_causal:
        inside = g.op("Tril", g.full(scores.shape[-2:], 1, torch.int32), diagonal=0)
        scores = g.where(g.truth(inside), scores, -math.inf, scores.dtype)
    if mask is not None and mask.dtype == torch.bool:
        scores = g.where(mask, scores, -math.inf, scores.dtype)
    elif mask is not None:
        scores = g.op("Add", scores, g.cast(mask, scores.dtype))
    return scores, factor


def _product(g: Ops, x: Value, y: Value) -> Value:
    return g.op("BatchMatMul", x, y)


def _turned(g: Ops, x: Value) -> Value:
    return g.transpose(x, [0, 1, 3, 2])


def _weights(g: Ops, scores: Value, lse: Value) -> Value:
    """exp(scores - lse); rows without any key get 0."""
    whole = g.where(g.op("IsInf", lse), 0.0, lse, lse.dtype)
    return g.op("Exp", g.op("Sub", scores, whole))


def _check(dropout_p: float) -> None:
    if dropout_p:
        raise NoRule("attention with dropout")


@RULES.register(aten._scaled_dot_product_flash_attention_for_cpu.default)
def attention(
    g: Ops, q: Value, k: Value, v: Value, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Value | None = None, scale: float | None = None,
) -> tuple[Value, Value]:  # fmt: skip
    """softmax(scores) v, and the logarithms of the sums: log sum exp(scores - m) + m."""
    _check(dropout_p)
    scores, _ = _scores(g, q, k, is_causal, attn_mask, scale)
    top = g.reduce("ReduceMax", scores, [3], True)
    top = g.where(g.op("IsInf", top), 0.0, top, top.dtype)
    total = g.reduce("ReduceSum", g.op("Exp", g.op("Sub", scores, top)), [3], True)
    lse = g.op("Add", g.op("Log", total), top)
    out = _product(g, g.cast(_weights(g, scores, lse), v.dtype), v)
    return out, g.cast(g.squeeze(lse, [3]), g.meta[1].dtype)


@RULES.register(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def attention_backward(
    g: Ops, dy: Value, q: Value, k: Value, v: Value, out: Value, lse: Value, dropout_p: float,
    is_causal: bool, *, attn_mask: Value | None = None, scale: float | None = None,
) -> tuple[Value, Value, Value]:  # fmt: skip
    """With p the weights: ds = p (dy v^T - sum(dy out)), dq = ds k, dk = ds^T q, dv = p^T dy."""
    _check(dropout_p)
    scores, factor = _scores(g, q, k, is_causal, attn_mask, scale)
    weights = _weights(g, scores, g.unsqueeze(g.cast(lse, scores.dtype), 3))
    wide: Any = [g.wide(t) for t in (dy, q, k, v, out)]
    dy, q, k, v, out = wide
    delta = g.reduce("ReduceSum", g.op("Mul", dy, out), [3], True)
    inner = g.op("Sub", _product(g, dy, _turned(g, v)), delta)
    grads = g.mul(g.op("Mul", weights, inner), factor)
    found = (_product(g, grads, k), _product(g, _turned(g, grads), q),
             _product(g, _turned(g, weights), dy))  # fmt: skip
    dq, dk, dv = (g.cast(t, m.dtype) for t, m in zip(found, g.meta, strict=True))
    return dq, dk, dv
