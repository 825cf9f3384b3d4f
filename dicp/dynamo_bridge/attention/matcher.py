"""Unfused attention, softmax(q k^T * scale + mask) v, replaced by one fused attention call.

Any mix of: batched products on 3-d or 4-d tensors; a scale by a number or by a one-element tensor;
one or two additive masks, or `where` with a fill of -inf (or the smallest finite number);
conversions around the softmax; the softmax as one operator or decomposed; keys and values repeated
for grouped heads; dropout of the probabilities, where the device's fused operators support it.
(For the same seed they draw other random numbers than eager, as every kernel of dicp does. With
`fallback_random` the attention stays unfused, and eager draws the numbers.)
In training the backward part reads the probabilities: see `training.py`.

The fused operator returns zero for a row with every key masked by -inf, as `_safe_softmax` does;
`_softmax` returns NaN. Unless the mask provably leaves no such row, a `where` on the rows' maxima
restores the NaN.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dicp.dynamo_bridge.analysis.constants import uniform_value
from dicp.dynamo_bridge.analysis.values import same_sizes, sizes_of, value_of
from dicp.dynamo_bridge.attention.forward import attention_on
from dicp.dynamo_bridge.attention.mask_values import HUGE
from dicp.dynamo_bridge.attention.replacement import (
    fill_of,
    fused,
    row_source,
    unflatten,
    ungrouped,
    with_fewer_heads,
)
from dicp.dynamo_bridge.fuse.engine import Pattern
from dicp.dynamo_bridge.fuse.terms import (
    ANY,
    As,
    LastDim,
    Match,
    Number,
    Peel,
    Term,
    Var,
    match_one,
    one_of,
    op,
    reshape_source,
    rounded_source,
    widened_source,
)
from dicp.dynamo_bridge.passes.base import PassContext
from dicp.dynamo_bridge.thresholds import LARGEST_SCALE
from dicp.fused_attention import FusedAttention
from dicp.torch_private import ATTENTION_FORWARD, expression_of

aten = torch.ops.aten


_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


@dataclass(frozen=True, eq=False)
class MatMul(Term):
    """A batched product of `left` and `right`; the batch may be flattened around `bmm`."""

    left: Term
    right: Term

    def match(self, value: Any, state: Match) -> Iterator[Match]:
        if not isinstance(value, fx.Node):
            return
        product = value
        if value.target is not aten.bmm.default:
            source = reshape_source(value)
            if source is None or source.target is not aten.bmm.default:
                return
            product = source
            state = state.visit(value)
        sizes, inner = sizes_of(value), sizes_of(product)
        if sizes is None or inner is None or sizes[-2:] != inner[-2:]:
            return
        left = unflatten(product.args[0], sizes[:-2])
        right = unflatten(product.args[1], sizes[:-2])
        if left is None or right is None:
            return
        state = state.visit(product)
        for node in (*left[1], *right[1]):
            state = state.visit(node)
        for first in match_one(self.left, left[0], state):
            yield from match_one(self.right, right[0], first)

    def roots(self) -> frozenset[Any]:
        return frozenset({aten.bmm.default, aten.view.default, aten._unsafe_view.default})


def _around(term: Term) -> Peel:
    """`term`, optionally widened to float32, its leading dimensions optionally reshaped."""
    return Peel(term, lambda node, root: widened_source(node) or row_source(node))


def _around_rounded(term: Term) -> Peel:
    """As `_around`; `term` may also be rounded to the result's dtype."""
    return Peel(term, lambda node, root: rounded_source(node, root) or row_source(node))


def _softmax(x: Term) -> Term:
    """Softmax over the last dimension: one operator, or exp(x - max) divided by its sum."""
    logits = As("logits", _around(x))
    row_max = op(aten.amax.default, Var("logits"), LastDim("logits"), True)
    shifted = op(aten.sub.Tensor, logits, row_max)
    exp_scores = As("exp_scores", op(aten.exp.default, shifted))
    total = op(aten.sum.dim_IntList, Var("exp_scores"), LastDim("exp_scores"), True)
    return one_of(
        op([aten._softmax.default, aten._safe_softmax.default], logits, LastDim("logits"),
           half_to_float=ANY),
        op(aten.div.Tensor, exp_scores, total),
    )  # fmt: skip


def decomposed(
    q: Term, kt: Term, v: Term, scale: Term, inverse: Term, bias: Term, second_bias: Term,
    mask: Term, inverted_mask: Term, fill: Number, scores: Term, dropout_p: Number,
) -> Term:  # fmt: skip
    # softmax(q kt * scale + bias + second_bias) v, softmax(where(mask, q kt * scale, fill)) v,
    # dropout(softmax(..)) v
    product = _around(MatMul(q, kt))
    mul, div = [aten.mul.Tensor, aten.mul.Scalar], [aten.div.Tensor, aten.div.Scalar]
    scaled = _around(one_of(op(mul, product, scale), op(div, product, inverse), product))
    masked = As("scores", one_of(
        op(aten.add.Tensor, scaled, bias),
        op(aten.add.Tensor, op(aten.add.Tensor, scaled, bias), second_bias),
        op(aten.where.self, mask, scaled, fill),
        op(aten.where.self, inverted_mask, fill, scaled),
        op(aten.masked_fill.Scalar, scaled, inverted_mask, fill),
        scaled,
    ))  # fmt: skip
    weights = _around_rounded(_softmax(masked))
    kept = op(operator.getitem, op(aten.native_dropout.default, weights, dropout_p, True), 0)
    return MatMul(one_of(weights, _around_rounded(kept)), v)


def is_attention(match: Match, context: PassContext) -> bool:
    """3-d or 4-d operands of one supported dtype, equal head sizes, masks that fit the scores."""
    values = [value_of(match[name]) for name in ("q", "kt", "v")]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return False
    q, kt, v = values
    if v.dtype not in _DTYPES or (q.dtype != v.dtype and context.kind == "joint"):
        return False  # `operands` may find inference's queries and keys before they were widened
    if any(value.dim() not in (3, 4) for value in values):
        return False
    if expression_of(q.shape[-1]) != expression_of(v.shape[-1]):
        return False
    if any(expression_of(size) == 0 for value in values for size in value.shape):
        return False
    attention = context.facts.attention.get(values[0].device.type)
    return (
        attention is not None
        and _mask_fits(match, attention)
        and _dropout_is_supported(match, context)
        and all(_is_scale(match.bound.get(name)) for name in ("scale", "inverse"))
    )


def _dropout_is_supported(match: Match, context: PassContext) -> bool:
    """Whether there is no dropout, or the fused operators support it."""
    dropout_p = match.bound.get("dropout_p")
    if dropout_p is None:
        return True
    able = attention_on(context, match["q"]).dropout and not context.config.fallback_random
    return bool(able and 0 < dropout_p < 1)


def _mask_fits(match: Match, attention: FusedAttention) -> bool:
    bound = match.bound
    names = ("bias", "second_bias", "mask", "inverted_mask")
    masks = [bound[name] for name in names if name in bound]
    if not all(_broadcasts(mask, match) for mask in masks):
        return False
    dtype = value_of(bound["q"]).dtype
    if "second_bias" in bound:  # in float16 the sum of two masks may be infinite where no score is
        return attention.adds_masks and dtype != torch.float16
    if "bias" in bound:
        return True
    if not masks:
        return True
    fill = fill_of(match)
    return fill is not None and (fill == -math.inf or (fill <= HUGE and dtype != torch.float16))


def _broadcasts(mask: fx.Node, match: Match) -> bool:
    """Whether `mask` broadcasts to the scores; an additive one must be float, any other boolean."""
    bound, value = match.bound, value_of(mask)
    scores, sizes = sizes_of(bound["scores"]), sizes_of(mask)
    root = sizes_of(match.nodes[0])
    if not isinstance(value, torch.Tensor) or scores is None or sizes is None or root is None:
        return False
    if len(sizes) > len(scores) or (len(sizes) > 2 and scores[:-2] != root[:-2]):
        return False
    fits = all(a in (1, b) for a, b in zip(reversed(sizes), reversed(scores), strict=False))
    added = "bias" in bound
    return fits and (value.dtype.is_floating_point if added else value.dtype == torch.bool)


def _is_scale(scale: Any) -> bool:
    """No scale, a positive number of moderate size, or a tensor of one element.

    (Fused operators take the maximum of a row before they scale the scores. A `where` with a fill
    becomes an additive mask, which gives the same result for finite scores only.)
    """
    number = uniform_value(scale)
    if scale is None or number is not None:
        return number is None or 1 / LARGEST_SCALE < number < LARGEST_SCALE
    sizes = sizes_of(scale)
    return sizes is not None and all(size == 1 for size in sizes) and len(sizes) <= 1


_SOFTMAX = frozenset({aten._softmax.default, aten._safe_softmax.default, aten.exp.default})


def repeated_heads(q: Term, k: Term, v: Term) -> Term:
    # attention(q, repeat(k), repeat(v)): the fused operator takes the heads before the repetition
    return op(ATTENTION_FORWARD, q, k, v, dropout_p=ANY, is_causal=ANY, attn_mask=ANY, scale=ANY)


def _is_repeated(match: Match, context: PassContext) -> bool:
    k, v = match["k"], match["v"]
    narrow = [ungrouped(k), ungrouped(v)]
    if any(x is None for x in narrow) or len(k.users) > 1 or len(v.users) > 1:
        return False
    return same_sizes(*narrow) and all(
        (sizes_of(x) or ())[:1] == (sizes_of(match["q"]) or ())[:1] for x in narrow
    )


FAMILY = "attention"
DECOMPOSED = Pattern(FAMILY, "decomposed", decomposed, fused, is_attention,
                      (_SOFTMAX, frozenset({aten.bmm.default})))  # fmt: skip

PATTERNS = (
    DECOMPOSED,
    Pattern(FAMILY, "repeated heads", repeated_heads, with_fewer_heads, _is_repeated,
            (frozenset({ATTENTION_FORWARD}),)),
)  # fmt: skip
