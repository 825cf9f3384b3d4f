"""Matrix products and attention."""

from __future__ import annotations

import math
from typing import Any

import torch

from dicp.graphop.rules import RuleTable
from dicp.vendor.ascend.rules.core import HALVES, Ge, NoRule, Value

aten = torch.ops.aten
RULES = RuleTable()
rule = RULES.rule

EVERY_TOKEN = 2147483647
"""How far a query sees where nothing limits it."""


def product(g: Ge, x: Value, y: Value) -> Value:
    """x @ y for matrices or equally batched matrices, in the operands' type."""
    if not x.dtype.is_floating_point and x.dtype != torch.int32:
        # int32 would overflow where a wider type does not: multiply and add
        terms = g.op("Mul", g.unsqueeze(x, x.ndim), g.unsqueeze(y, y.ndim - 2))
        return g.reduce("ReduceSum", terms, [x.ndim - 1], False)
    kind = "MatMulV2" if x.ndim == 2 else "BatchMatMulV2"
    return g.op(kind, x, y)


@rule(aten.mm.default, aten.bmm.default)
def mm(g: Ge, x: Value, y: Value) -> Value:
    return product(g, x, y)


@rule(aten.mv.default)
def mv(g: Ge, x: Value, y: Value) -> Value:
    return g.reshape(product(g, x, g.unsqueeze(y, 1)), g.shape)


@rule(aten.dot.default, aten.vdot.default)
def dot(g: Ge, x: Value, y: Value) -> Value:
    return g.reshape(product(g, g.unsqueeze(x, 0), g.unsqueeze(y, 1)), [])


def _scaled_sum(g: Ge, bias: Value, result: Value, beta: Any, alpha: Any) -> Value:
    """beta bias + alpha result; a beta of 0 ignores the bias, NaN included."""
    dtype = g.dtype
    wide_bias, wide = (g.wide(v) if (alpha, beta) != (1, 1) else v for v in (bias, result))
    if alpha != 1:
        wide = g.mul(wide, alpha)
    if beta == 0:
        return g.cast(wide, dtype)
    if beta != 1:
        wide_bias = g.mul(wide_bias, beta)
    return g.cast(g.op("Add", g.cast(wide_bias, wide.dtype), wide), dtype)


@rule(aten.addmm.default)
def addmm(g: Ge, bias: Value, x: Value, y: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    row = bias.ndim == 1 and g.same(bias.shape[0], y.shape[1])
    if alpha == beta == 1 and row and x.dtype.is_floating_point:
        return g.op("MatMulV2", x, y, bias)
    return _scaled_sum(g, bias, product(g, x, y), beta, alpha)


@rule(aten.baddbmm.default)
def baddbmm(g: Ge, bias: Value, x: Value, y: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return _scaled_sum(g, bias, product(g, x, y), beta, alpha)


@rule(aten.addmv.default)
def addmv(g: Ge, bias: Value, x: Value, y: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    result = g.squeeze(product(g, x, g.unsqueeze(y, 1)), [1])
    return _scaled_sum(g, bias, result, beta, alpha)


@rule(aten.addr.default)
def addr(g: Ge, bias: Value, x: Value, y: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    if g.dtype == torch.bool:
        raise NoRule("booleans")
    left, right = (g.cast(v, g.dtype) for v in (x, y))
    result = g.op("Mul", g.unsqueeze(left, 1), g.unsqueeze(right, 0))
    return _scaled_sum(g, g.cast(bias, g.dtype), result, beta, alpha)


@rule(aten.addbmm.default)
def addbmm(g: Ge, bias: Value, x: Value, y: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    result = g.cast(g.reduce("ReduceSum", g.wide(product(g, x, y)), [0], False), x.dtype)
    return _scaled_sum(g, bias, result, beta, alpha)


# ---- attention -----------------------------------------------------------------------------------


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_attention(
    g: Ge, q: Value, k: Value, v: Value, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Value | None = None, scale: float | None = None,
) -> tuple[Value, Value | None]:  # fmt: skip
    """The attention and the logarithm of the sums of exponentials, rows by heads."""
    if dropout_p:
        raise NoRule("dropout inside attention")
    if _is_prompt(g, q, k, is_causal, attn_mask):
        return _prompt_attention(g, q, k, v, is_causal, scale), None
    scores = _scores(g, q, k, is_causal, attn_mask, scale)
    weights, total, shift = _probabilities(g, scores, attn_mask is not None)
    out = product_batched(g, g.cast(weights, q.dtype), _for_heads(g, v, q))
    logsum = g.squeeze(g.add(g.op("Log", total), shift), [3])
    return out, g.cast(logsum, g.meta[1].dtype)


def _probabilities(g: Ge, scores: Value, masked: bool) -> tuple[Value, Value, Value]:
    """Softmax over keys, the sums it divides by and the maxima it subtracts; a row with every key
    masked has no probabilities but zeros."""
    largest = g.reduce("ReduceMax", scores, [3], True)
    shift = g.where(g.op("IsInf", largest), 0.0, largest, largest.dtype)
    weights = g.op("Exp", g.sub(scores, shift))
    total = g.reduce("ReduceSum", weights, [3], True)
    divisor = total
    if masked:
        none = g.op("Equal", total, g.number(0, total.dtype))
        divisor = g.where(none, 1.0, total, total.dtype)
    return g.op("RealDiv", weights, divisor), total, shift


def _is_prompt(g: Ge, q: Value, k: Value, is_causal: bool, mask: Value | None) -> bool:
    """Whether GE's fused attention takes it: 16 bits, whole heads, nothing saved for backward."""
    width = q.shape[-1]
    square = g.same(q.shape[2], k.shape[2])
    whole = isinstance(width, int) and width % 16 == 0 and isinstance(q.shape[1], int)
    return q.dtype in HALVES and whole and mask is None and not g.is_read(1) and (
        square or not is_causal
    )  # fmt: skip


def _prompt_attention(
    g: Ge, q: Value, k: Value, v: Value, is_causal: bool, scale: float | None
) -> Value:
    factor = 1.0 / math.sqrt(int(q.shape[-1])) if scale is None else scale
    return g.op(
        "PromptFlashAttention", q, k, v, num_heads=int(q.shape[1]), scale_value=float(factor),
        pre_tokens=EVERY_TOKEN, next_tokens=0 if is_causal else EVERY_TOKEN, input_layout="BNSD",
        num_key_value_heads=int(k.shape[1]),
    )  # fmt: skip


def _scores(
    g: Ge, q: Value, k: Value, is_causal: bool, mask: Value | None, scale: float | None
) -> Value:
    """scale q k', masked, in float32 where it is narrower."""
    factor = 1.0 / math.sqrt(int(q.shape[-1])) if scale is None else scale
    k = _for_heads(g, k, q)
    scaled = g.mul(g.wide(q), factor)
    scores = product_batched(g, scaled, g.transpose(g.wide(k), [0, 1, 3, 2]))
    if is_causal:
        above = above_diagonal(g, q.shape[2], k.shape[2])
        scores = g.where(above, -math.inf, scores, scores.dtype)
    if mask is not None and mask.dtype == torch.bool:
        scores = g.where(mask, scores, -math.inf, scores.dtype)
    elif mask is not None:
        scores = g.add(scores, g.cast(mask, scores.dtype))
    return scores


def _for_heads(g: Ge, x: Value, q: Value) -> Value:
    """Keys or values with a head for each head of the queries, those of a group alike."""
    if g.same(x.shape[1], q.shape[1]):
        return x
    batch, heads, rows, width = x.shape
    groups = q.shape[1] // heads
    spread = g.broadcast(g.unsqueeze(x, 2), [batch, heads, groups, rows, width])
    return g.reshape(spread, [batch, q.shape[1], rows, width])


def _over_groups(g: Ge, dx: Value, x: Value) -> Value:
    """The gradients of a group's heads added up: those of keys or values that they share."""
    if g.same(dx.shape[1], x.shape[1]):
        return dx
    batch, heads, rows, width = x.shape
    grouped = g.reshape(dx, [batch, heads, dx.shape[1] // heads, rows, width])
    return g.reduce("ReduceSum", grouped, [2], False)


def above_diagonal(g: Ge, rows: Any, columns: Any) -> Value:
    """Whether the column is beyond the row: keys that a causal query does not see."""
    column = g.reshape(g.arange(columns), [1, columns])
    row = g.reshape(g.arange(rows), [rows, 1])
    return g.op("Greater", column, row)


def product_batched(g: Ge, x: Value, y: Value) -> Value:
    return g.op("BatchMatMulV2", x, y)


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def flash_attention_backward(
    g: Ge, dy: Value, q: Value, k: Value, v: Value, out: Value, logsum: Value, dropout_p: float,
    is_causal: bool, *, attn_mask: Value | None = None, scale: float | None = None,
) -> tuple[Value, Value, Value]:  # fmt: skip
    """Gradients of q, k and v; the probabilities are made again, better than from `logsum`."""
    if dropout_p:
        raise NoRule("dropout inside attention")
    factor = 1.0 / math.sqrt(int(q.shape[-1])) if scale is None else scale
    scores = _scores(g, q, k, is_causal, attn_mask, scale)
    weights, _, _ = _probabilities(g, scores, attn_mask is not None)
    wide_dy = g.wide(dy)
    dv = product_batched(g, g.transpose(weights, [0, 1, 3, 2]), wide_dy)
    values, keys = (g.wide(_for_heads(g, x, q)) for x in (v, k))
    dweights = product_batched(g, wide_dy, g.transpose(values, [0, 1, 3, 2]))
    inner = g.reduce("ReduceSum", g.mul(wide_dy, g.wide(out)), [3], True)
    dscores = g.mul(weights, g.sub(dweights, inner))
    dq = g.mul(product_batched(g, dscores, keys), factor)
    dk = product_batched(g, g.transpose(dscores, [0, 1, 3, 2]), g.wide(q))
    dk = g.mul(dk, factor)
    dk, dv = _over_groups(g, dk, k), _over_groups(g, dv, v)
    return g.cast(dq, q.dtype), g.cast(dk, k.dtype), g.cast(dv, v.dtype)
