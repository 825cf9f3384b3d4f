"""Attention and its gradient, unfused, for vendors without a fused operator of their own.

PyTorch has no decomposition of the gradient, and its own of the forward operator does not return
the logarithms of sums that the gradient reads.
"""

from __future__ import annotations

import math

import torch

from dicp.graphop.operators import Ops
from dicp.graphop.program import Value
from dicp.rules import NoRule, RuleTable
from dicp.torch_private import ATTENTION_BACKWARD, ATTENTION_FORWARD

RULES = RuleTable()


def _scores(
    g: Ops, q: Value, k: Value, is_causal: bool, mask: Value | None, scale: float | None
) -> tuple[Value, float]:
    """scale q k^T + mask in at least float32, and the scale."""
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = g.mul(_product(g, g.wide(q), _transposed(g, g.wide(k))), factor)
    if is_causal:
        scores = g.where(_inside(g, scores), scores, -math.inf, scores.dtype)
    if mask is not None and mask.dtype == torch.bool:
        scores = g.where(mask, scores, -math.inf, scores.dtype)
    elif mask is not None:
        scores = g.op("Add", scores, g.cast(mask, scores.dtype))
    return scores, factor


def _inside(g: Ops, scores: Value) -> Value:
    """Whether the query sees the key under the causal flag."""
    return g.truth(g.op("Tril", g.full(scores.shape[-2:], 1, torch.int32), diagonal=0))


def _product(g: Ops, x: Value, y: Value) -> Value:
    return g.op("BatchMatMul", x, y)


def _transposed(g: Ops, x: Value) -> Value:
    return g.transpose(x, [0, 1, 3, 2])


def _probabilities(g: Ops, scores: Value) -> Value:
    """softmax(scores); rows without any key get 0."""
    row_max = g.reduce("ReduceMax", scores, [3], True)
    probabilities = g.op("Softmax", scores, axes=[3])
    return g.where(without_keys(g, row_max), 0.0, probabilities, scores.dtype)


def without_keys(g: Ops, row_max: Value) -> Value:
    """Whether every score of a row is -inf; a score of +inf makes its row NaN."""
    return g.op("Equal", row_max, g.const(-math.inf, row_max.dtype))


def _per_query(g: Ops, x: Value, q: Value) -> Value:
    """Keys or values repeated for each head of the queries that shares them."""
    n, heads, *rest = x.shape
    if g.same(heads, q.shape[1]):
        return x
    times = q.shape[1] // heads
    spread = g.broadcast(g.unsqueeze(x, 2), [n, heads, times, *rest])
    return g.reshape(spread, [n, heads * times, *rest])


def _shared(g: Ops, grad: Value, x: Value) -> Value:
    """The gradient of keys or values, summed over the heads that share them."""
    n, heads, *rest = x.shape
    if g.same(heads, grad.shape[1]):
        return grad
    return g.reduce("ReduceSum", g.reshape(grad, [n, heads, -1, *rest]), [2], False)


def _check(dropout_p: float) -> None:
    if dropout_p:
        raise NoRule("attention with dropout")


@RULES.register(ATTENTION_FORWARD)
def attention(
    g: Ops, q: Value, k: Value, v: Value, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Value | None = None, scale: float | None = None,
) -> tuple[Value, Value]:  # fmt: skip
    """softmax(scores) v, and the logarithms of the sums: log sum exp(scores - m) + m."""
    _check(dropout_p)
    k, v = (_per_query(g, t, q) for t in (k, v))
    scores, _ = _scores(g, q, k, is_causal, attn_mask, scale)
    row_max = g.reduce("ReduceMax", scores, [3], True)
    row_max = g.where(without_keys(g, row_max), 0.0, row_max, row_max.dtype)
    total = g.reduce("ReduceSum", g.op("Exp", g.op("Sub", scores, row_max)), [3], True)
    lse = g.op("Add", g.op("Log", total), row_max)
    out = _product(g, g.cast(_probabilities(g, scores), v.dtype), v)
    return out, g.cast(g.squeeze(lse, [3]), g.meta[1].dtype)


@RULES.register(ATTENTION_BACKWARD)
def attention_backward(
    g: Ops, dy: Value, q: Value, k: Value, v: Value, out: Value, lse: Value, dropout_p: float,
    is_causal: bool, *, attn_mask: Value | None = None, scale: float | None = None,
) -> tuple[Value, Value, Value]:  # fmt: skip
    """With p the softmax: ds = p (dy v^T - sum(p dy v^T)), dq = ds k, dk = ds^T q, dv = p^T dy."""
    _check(dropout_p)
    shared = (k, v)
    k, v = (_per_query(g, t, q) for t in shared)
    scores, factor = _scores(g, q, k, is_causal, attn_mask, scale)
    probabilities = _probabilities(g, scores)
    if is_causal:  # in eager, rows of NaN give other keys no weight, too
        probabilities = g.where(_inside(g, scores), probabilities, 0.0, scores.dtype)
    dy, q, k, v = (g.wide(t) for t in (dy, q, k, v))
    inner = _product(g, dy, _transposed(g, v))
    delta = g.reduce("ReduceSum", g.op("Mul", probabilities, inner), [3], True)
    grads = g.mul(g.op("Mul", probabilities, g.op("Sub", inner, delta)), factor)
    keys, values = (
        _product(g, _transposed(g, grads), q),
        _product(g, _transposed(g, probabilities), dy),
    )
    found = (_product(g, grads, k), _shared(g, keys, shared[0]), _shared(g, values, shared[1]))
    dq, dk, dv = (g.cast(t, m.dtype) for t, m in zip(found, g.meta, strict=True))
    return dq, dk, dv
