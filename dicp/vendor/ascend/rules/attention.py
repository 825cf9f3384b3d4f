"""Attention: GE's fused operators where they take it, else products and a softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from dicp.dtypes import REDUCED_FLOATS
from dicp.graphop.program import Node, Value
from dicp.graphop.rules.attention import without_keys
from dicp.rules import NoRule, RuleTable
from dicp.torch_private import ATTENTION_BACKWARD, ATTENTION_FORWARD
from dicp.vendor.ascend.rules.core import Ge
from dicp.vendor.ascend.semantics.attention import COPIES

RULES = RuleTable()
rule = RULES.register

TRAINING, TRAINING_GRAD = "FlashAttentionScore", "FlashAttentionScoreGrad"
PROMPT, DECODING = "PromptFlashAttention", "IncreFlashAttention"
EVERY_TOKEN = 2147483647
"""How far a query sees where nothing limits it."""
MAX_HEADS, WIDEST_HEAD, HEAD_STEP = 256, 512, 16
HIGH_PRECISION = 0
LARGEST = torch.finfo(torch.float32).max
ABSORBS = {torch.float32: -(2.0**27), torch.float64: -(2.0**56)}
"""A row's largest score below this is that of a mask that absorbs the scores."""


@rule(ATTENTION_FORWARD)
def attention(
    g: Ge, q: Value, k: Value, v: Value, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Value | None = None, scale: float | None = None,
) -> tuple[Value, Value | None]:  # fmt: skip
    """The attention and the logarithm of the sums of exponentials, rows by heads."""
    if dropout_p:
        raise NoRule("attention with dropout")
    factor = 1.0 / math.sqrt(int(q.shape[-1])) if scale is None else float(scale)
    kind = _fused(g, q, k)
    hidden = _hidden(g, q, k, is_causal, attn_mask) if _fits(g, kind, q, k, v) else None
    if hidden is not None and kind == TRAINING:
        out, logsum = _training(g, q, k, v, factor, hidden)
        return out, g.cast(logsum, g.meta[1].dtype)
    if hidden is not None and not hidden.per_head:
        return _inference(g, kind, q, k, v, factor, hidden), None
    scores = _scores(g, q, k, is_causal, attn_mask, factor)
    weights, total, shift = _probabilities(g, scores)
    out = _product(g, g.cast(weights, q.dtype), _for_heads(g, v, q))
    logsum = g.squeeze(g.add(g.op("Log", total), shift), [3])
    return out, g.cast(logsum, g.meta[1].dtype)


@rule(ATTENTION_BACKWARD)
def attention_backward(
    g: Ge, dy: Value, q: Value, k: Value, v: Value, out: Value, logsum: Value, dropout_p: float,
    is_causal: bool, *, attn_mask: Value | None = None, scale: float | None = None,
) -> tuple[Value, Value, Value]:  # fmt: skip
    """Gradients of q, k and v."""
    if dropout_p:
        raise NoRule("attention with dropout")
    factor = 1.0 / math.sqrt(int(q.shape[-1])) if scale is None else float(scale)
    fits = _fits(g, TRAINING_GRAD, q, k, v)
    hidden = _hidden(g, q, k, is_causal, attn_mask) if fits else None
    if hidden is not None:
        return _training_backward(g, dy, q, k, v, out, logsum, factor, hidden)
    scores = _scores(g, q, k, is_causal, attn_mask, factor)
    weights, total, shift = _probabilities(g, scores)
    if is_causal and attn_mask is None:  # in eager, rows of NaN give other keys no weight, too
        above = above_diagonal(g, q.shape[2], k.shape[2])
        weights = g.where(above, 0.0, weights, weights.dtype)
    if attn_mask is not None and not _replaces(attn_mask):
        dy = g.mul(g.wide(dy), _counts(g, total, shift))
    visible = attn_mask if attn_mask is not None and _replaces(attn_mask) else None
    return _gradients(g, dy, q, k, v, factor, weights, visible)


# ---- what the fused operators take ---------------------------------------------------------------


def _fused(g: Ge, q: Value, k: Value) -> str:
    """The operator for forward: of training, for one query on a cache, for a prompt."""
    if g.is_read(1):
        return TRAINING
    return DECODING if g.same(q.shape[2], 1) and not g.same(k.shape[2], 1) else PROMPT


def _fits(g: Ge, kind: str, q: Value, k: Value, v: Value) -> bool:
    """16 bits, whole heads of a width that they tile. CANN 7.0's fused operators are experimental;
    they take no booleans as masks, and what their masks of 16 bits mean is not documented."""
    if not (g.takes(kind, "query", q.dtype) and g.takes(kind, "atten_mask", torch.bool)):
        return False
    some = not any(g.same(size, 0) for x in (q, k) for size in x.shape)
    like = g.same_shape(k.shape[1::2], v.shape[1::2])  # of the rest, PyTorch demands it
    return are_tiled(q, k) and some and like


def are_tiled(q: Value | torch.Tensor, k: Value | torch.Tensor) -> bool:
    """Whether the fused operators have tiles for the dtype, heads and head size."""
    heads, groups, width = q.shape[1], k.shape[1], q.shape[3]
    if q.dtype not in REDUCED_FLOATS or not all(isinstance(s, int) for s in (heads, groups, width)):
        return False
    sizes = heads <= MAX_HEADS and heads % groups == 0 and width <= WIDEST_HEAD
    return bool(sizes and width % HEAD_STEP == 0)


@dataclass(frozen=True, eq=False)
class Hidden:
    """The keys that queries do not see. `mask` is true for those, of the scores' sizes, and false
    throughout a row that sees none: `blind` is true for such rows. `after` is how many rows on a
    query may look. `spoiled` is true for rows that are NaN since the mask is added to a score of
    NaN or +inf, which the fused operators replace."""

    mask: Value | None = None
    blind: Value | None = None
    after: int = EVERY_TOKEN
    spoiled: Value | None = None

    @property
    def per_head(self) -> bool:
        return self.mask is not None and self.mask.ndim == 4 and self.mask.shape[1] != 1


def _hidden(g: Ge, q: Value, k: Value, is_causal: bool, mask: Value | None) -> Hidden | None:
    """The mask as the fused operators take it; None for one that adds to the scores, or replaces
    them by a finite number."""
    rows, columns = q.shape[2], k.shape[2]
    spoiled = None if mask is None or _replaces(mask) else _has_nonfinite_score(g, q, k)
    if mask is not None and mask.dtype == torch.uint8:
        return None
    if is_causal:
        after = 0 if g.same(rows, columns) else EVERY_TOKEN
        return Hidden(above_diagonal(g, rows, columns), None, after, spoiled)
    if mask is None:
        return Hidden()
    drop = _left_out(g, mask)
    if drop is None:
        return None

    def made() -> Hidden:
        whole = g.broadcast(drop, [*drop.shape[:-2], rows, columns])
        blind = g.op("ReduceAll", whole, g.ints([whole.ndim - 1]), keep_dims=True)
        return Hidden(g.op("LogicalAnd", whole, g.op("LogicalNot", blind)), blind)

    hidden: Hidden = g.once(("hidden", mask, g.ints([rows, columns])), made)
    return replace(hidden, spoiled=spoiled)


def _has_nonfinite_score(g: Ge, q: Value, k: Value) -> Value:
    """Whether a row has a score of NaN or +inf: one of its products with a number of some key is.
    The largest of these is that with the largest or with the smallest number in the column."""

    def made() -> Value:
        ends = [g.reduce(f"Reduce{end}", g.wide(k), [2], True) for end in ("Max", "Min")]
        products = [g.mul(g.wide(q), _for_heads(g, end, q)) for end in ends]
        largest = g.reduce("ReduceMax", g.op("Maximum", *products), [3], True)
        return g.op("LogicalNot", g.op("Less", largest, g.number(math.inf, largest.dtype)))

    spoiled: Value = g.once(("spoiled", q, k), made)
    return spoiled


def _left_out(g: Ge, mask: Value) -> Value | None:
    """Where a mask hides keys and does nothing else: booleans, or 0 and -inf chosen by booleans."""
    if mask.dtype == torch.bool:
        return g.once(("not", mask), lambda: g.op("LogicalNot", mask))
    node, moves = mask.node, []
    while node.kind in ("Cast", "Identity", "Reshape", "BroadcastTo"):
        moves.append(node.outputs[0])
        (source, *_) = node.operands()
        node = source.node
    if node.kind != "SelectV2":
        return None
    condition, then, other = node.operands()
    choice = (_uniform(then), _uniform(other))
    if choice not in ((0.0, -math.inf), (-math.inf, 0.0)):
        return None

    def made() -> Value:
        drop = g.broadcast(condition, node.outputs[0].shape)
        drop = drop if choice[0] else g.op("LogicalNot", drop)
        for step in reversed(moves):
            same = drop.ndim == step.ndim and step.node.kind == "BroadcastTo"
            drop = g.broadcast(drop, step.shape) if same else g.reshape(drop, step.shape)
        return drop

    drop: Value = g.once(("left out", mask), made)
    return drop


def _uniform(value: Value) -> float | None:
    """The number that fills a value, if one does."""
    node: Node = value.node
    while node.kind in ("Identity", "Cast", "BroadcastTo", "Reshape", "Fill"):
        operands = node.operands()
        node = operands[1 if node.kind == "Fill" else 0].node
    if node.kind != "const" or len(node.attrs["numbers"]) != 1:
        return None
    return float(node.attrs["numbers"][0])


# ---- the fused operators -------------------------------------------------------------------------


def _inference(
    g: Ge, kind: str, q: Value, k: Value, v: Value, factor: float, hidden: Hidden
) -> Value:
    attrs: dict[str, Any] = {
        "num_heads": int(q.shape[1]), "scale_value": factor, "input_layout": "BNSD",
        "num_key_value_heads": int(k.shape[1]),
    }  # fmt: skip
    if kind == DECODING:
        out = g.op(kind, q, (k,), (v,), None, hidden.mask, **attrs)
    else:
        reach = {"pre_tokens": EVERY_TOKEN, "next_tokens": hidden.after}
        out = g.op(kind, q, k, v, None, hidden.mask, **attrs, **reach)
    return _with_hidden_rows(g, out, hidden, 0.0)


def _with_hidden_rows(g: Ge, rows: Value, hidden: Hidden, of_blind: float) -> Value:
    """A result of fused attention, where a row that sees no key has the value `of_blind`."""
    if hidden.blind is not None:
        rows = g.where(hidden.blind, of_blind, rows, rows.dtype)
    return rows if hidden.spoiled is None else g.where(hidden.spoiled, math.nan, rows, rows.dtype)


def _training_attrs(q: Value, factor: float, hidden: Hidden) -> dict[str, Any]:
    return {
        "scale_value": factor, "pre_tockens": EVERY_TOKEN, "next_tockens": hidden.after,
        "head_num": int(q.shape[1]), "input_layout": "BNSD", "inner_precise": HIGH_PRECISION,
    }  # fmt: skip


def _training(
    g: Ge, q: Value, k: Value, v: Value, factor: float, hidden: Hidden
) -> tuple[Value, Value]:
    attrs = _training_attrs(q, factor, hidden)
    largest, total, _, out = g.ops(TRAINING, q, k, v, None, None, None, hidden.mask, **attrs)
    first = [g.slice(statistic, 3, 0, 1) for statistic in (largest, total)]
    none = without_keys(g, first[0])
    blind = none if hidden.blind is None else g.op("LogicalOr", none, hidden.blind)
    hidden = replace(hidden, blind=blind)
    logsum = _with_hidden_rows(g, g.add(g.op("Log", first[1]), first[0]), hidden, -math.inf)
    return _with_hidden_rows(g, out, hidden, 0.0), g.squeeze(logsum, [3])


def _training_backward(
    g: Ge, dy: Value, q: Value, k: Value, v: Value, out: Value, logsum: Value, factor: float,
    hidden: Hidden,
) -> tuple[Value, Value, Value]:  # fmt: skip
    """exp(s - max) / sum = exp(s - logsum) / 1; a logsum without bound makes a row's weights 0."""
    logsum = g.unsqueeze(g.cast(logsum, torch.float32), 3)
    logsum = g.where(without_keys(g, logsum), LARGEST, logsum, logsum.dtype)
    shape = [*q.shape[:3], COPIES]
    largest, total = g.broadcast(logsum, shape), g.full(shape, 1, torch.float32)
    dq, dk, dv, _ = g.ops(
        TRAINING_GRAD, q, k, v, dy, None, None, None, hidden.mask, largest, total,
        None, out, **_training_attrs(q, factor, hidden),
    )  # fmt: skip
    return dq, dk, dv


# ---- unfused -------------------------------------------------------------------------------------


def _probabilities(g: Ge, scores: Value) -> tuple[Value, Value, Value]:
    """Softmax over keys, the sums it divides by and the maxima it subtracts; a row without any key
    has no probabilities but zeros."""
    largest = g.reduce("ReduceMax", scores, [3], True)
    hidden = without_keys(g, largest)
    shift = g.where(hidden, 0.0, largest, largest.dtype)
    weights = g.op("Exp", g.sub(scores, shift))
    total = g.reduce("ReduceSum", weights, [3], True)
    divisor = g.where(hidden, 1.0, total, total.dtype)
    return g.op("RealDiv", weights, divisor), total, shift


def _counts(g: Ge, total: Value, shift: Value) -> Value:
    """By what the graph has divided the gradient of each row: the number of its keys, where the
    mask absorbs their scores (dynamo_bridge/attention/training.py), else 1."""
    absorbs = g.op("Less", shift, g.number(ABSORBS[shift.dtype], shift.dtype))
    return g.where(absorbs, total, 1.0, total.dtype)


def _scores(g: Ge, q: Value, k: Value, is_causal: bool, mask: Value | None, factor: float) -> Value:
    """factor q k', masked, in float32 where it is narrower."""
    k = _for_heads(g, k, q)
    scaled = g.mul(g.wide(q), factor)
    scores = _product(g, scaled, g.transpose(g.wide(k), [0, 1, 3, 2]))
    if is_causal and mask is None:
        above = above_diagonal(g, q.shape[2], k.shape[2])
        scores = g.where(above, -math.inf, scores, scores.dtype)
    if mask is not None and _replaces(mask):
        other = -math.inf if mask.dtype == torch.bool else torch.finfo(scores.dtype).min
        scores = g.where(g.truth(mask), scores, other, scores.dtype)
    elif mask is not None:
        scores = g.add(scores, g.cast(mask, scores.dtype))
    return scores


def _replaces(mask: Value) -> bool:
    """Whether the mask tells where scores are visible: it replaces others, by -inf if it is of
    booleans, else by the lowest number."""
    return mask.dtype in (torch.bool, torch.uint8)


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

    def made() -> Value:
        column = g.reshape(g.arange(columns), [1, columns])
        return g.op("Greater", column, g.reshape(g.arange(rows), [rows, 1]))

    above: Value = g.once(("above", g.ints([rows, columns])), made)
    return above


def _product(g: Ge, x: Value, y: Value) -> Value:
    return g.op("BatchMatMulV2", x, y)


def _gradients(
    g: Ge, dy: Value, q: Value, k: Value, v: Value, factor: float, weights: Value,
    visible: Value | None,
) -> tuple[Value, Value, Value]:  # fmt: skip
    """ds = p (dy v' - sum(p dy v')), with the probabilities p, and 0 for scores that are replaced.

    Neither exp(s - logsum), which is off by the rounding error of a large `logsum`, nor
    sum(dy out), which is not that of the same products where one key has all of the weight.
    """
    wide_dy = g.wide(dy)
    dv = _product(g, g.transpose(weights, [0, 1, 3, 2]), wide_dy)
    values, keys = (g.wide(_for_heads(g, x, q)) for x in (v, k))
    dweights = _product(g, wide_dy, g.transpose(values, [0, 1, 3, 2]))
    inner = g.reduce("ReduceSum", g.mul(weights, dweights), [3], True)
    dscores = g.mul(weights, g.sub(dweights, inner))
    if visible is not None:
        dscores = g.where(g.truth(visible), dscores, 0.0, dscores.dtype)
    dq = g.mul(_product(g, dscores, keys), factor)
    dk = _product(g, g.transpose(dscores, [0, 1, 3, 2]), g.wide(q))
    dk = g.mul(dk, factor)
    dk, dv = _over_groups(g, dk, k), _over_groups(g, dv, v)
    return g.cast(dq, q.dtype), g.cast(dk, k.dtype), g.cast(dv, v.dtype)
