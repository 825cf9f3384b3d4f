"""Fused attention, computed in float32 and rounded once.

`atten_mask` is nonzero where a key is left out. The result of a row with every key left out is not
specified; here it is NaN, so that nothing comes to depend on it. Layouts: BNSD is (batch, heads,
rows, width), BSND has rows before heads, and BSH both of the last as one dimension.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dicp.graphop.interpreter import Semantics

LAYOUTS = ("BNSD", "BSND", "BSH")
COPIES = 8
"""How often maxima and sums stand in the statistics that forward hands to backward."""


def _by_heads(x: Tensor, layout: str, width: int) -> Tensor:
    """`x` as (batch, heads, rows, width)."""
    assert layout in LAYOUTS, layout
    if layout == "BNSD":
        return x
    split = x.unflatten(-1, (-1, width)) if layout == "BSH" else x
    return split.transpose(1, 2)


def _laid_out(x: Tensor, layout: str, dtype: torch.dtype) -> Tensor:
    """(batch, heads, rows, width) as the layout has it."""
    x = x.to(dtype)
    if layout == "BNSD":
        return x
    return x.transpose(1, 2).flatten(2) if layout == "BSH" else x.transpose(1, 2)


def _width(query: Tensor, layout: str, heads: int) -> int:
    width, rest = divmod(query.shape[-1], heads if layout == "BSH" else 1)
    assert rest == 0, "the width is the same for all heads"
    return width


def _grouped(x: Tensor, heads: int) -> Tensor:
    """Keys or values in float32, one head for each of the queries'."""
    groups, rest = divmod(heads, x.shape[1])
    assert rest == 0, "the queries' heads are a multiple of the keys'"
    return x.float().repeat_interleave(groups, 1)


class _Masks(NamedTuple):
    """What limits the keys a query sees."""

    given: Tensor | None
    before: int
    after: int

    def fill(self, scores: Tensor) -> Tensor:
        if self.given is None:  # the distances count only beside a mask
            return scores
        rows, columns = scores.shape[-2:]
        sizes = tuple(self.given.shape)
        assert sizes[-2:] == (rows, columns), "the mask has the sizes of the scores"
        assert len(sizes) == 2 or sizes[0] in (1, scores.shape[0]), "one mask for each batch"
        gap = torch.arange(columns)[None, :] - torch.arange(rows)[:, None]
        outside = (gap > self.after) | (gap < -self.before)
        return scores.masked_fill(self.given.bool() | outside, -math.inf)


class _Attention(NamedTuple):
    out: Tensor
    largest: Tensor
    total: Tensor


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, masks: _Masks, shift: Tensor | None = None
) -> _Attention:
    """softmax(scale q k' + shift) v, with the maximum and the sum of each row."""
    assert k.shape[:3] == v.shape[:3] and k.shape[0] == q.shape[0] and k.shape[3] == q.shape[3]
    keys, values = (_grouped(x, q.shape[1]) for x in (k, v))
    scores = q.float() @ keys.mT
    if shift is not None:
        scores = scores + shift.float()
    scores = masks.fill(scores * scale)
    largest = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    return _Attention((weights / total) @ values, largest, total)


def flash_attention_score(
    query: Tensor, key: Tensor, value: Tensor, real_shift: Tensor | None, drop_mask: None,
    padding_mask: None, atten_mask: Tensor | None, head_num: int, input_layout: str,
    scale_value: float = 1.0, keep_prob: float = 1.0, pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647, inner_precise: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Maxima and sums (batch, heads, rows, 8), an unused result, and the attention."""
    assert drop_mask is None and padding_mask is None and keep_prob == 1.0
    width = _width(query, input_layout, head_num)
    q, k, v = (_by_heads(x, input_layout, width) for x in (query, key, value))
    assert q.shape[1] == head_num
    masks = _Masks(atten_mask, pre_tockens, next_tockens)
    result = _attend(q, k, v, scale_value, masks, real_shift)
    statistics = [s.expand(*s.shape[:-1], COPIES) for s in (result.largest, result.total)]
    out = _laid_out(result.out, input_layout, query.dtype)
    return statistics[0], statistics[1], query.new_empty(0), out


def flash_attention_score_grad(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, pse_shift: Tensor | None,
    drop_mask: None, padding_mask: None, atten_mask: Tensor | None, softmax_max: Tensor,
    softmax_sum: Tensor, softmax_in: None, attention_in: Tensor, head_num: int, input_layout: str,
    scale_value: float = 1.0, keep_prob: float = 1.0, pre_tockens: int = 65536,
    next_tockens: int = 65536, inner_precise: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of queries, keys, values; and of the shift, which is not computed."""
    assert drop_mask is None and padding_mask is None and softmax_in is None and keep_prob == 1.0
    assert pse_shift is None
    width = _width(query, input_layout, head_num)
    q, k, v, grad, out = (
        _by_heads(x, input_layout, width) for x in (query, key, value, dy, attention_in)
    )
    assert softmax_max.shape == (*q.shape[:3], COPIES) == softmax_sum.shape
    keys, values = (_grouped(x, q.shape[1]) for x in (k, v))
    scores = _Masks(atten_mask, pre_tockens, next_tockens).fill(q.float() @ keys.mT * scale_value)
    weights = torch.exp(scores - softmax_max[..., :1]) / softmax_sum[..., :1]
    inner = (grad.float() * out.float()).sum(-1, keepdim=True)
    dscores = weights * (grad.float() @ values.mT - inner) * scale_value
    dq = dscores @ keys
    dk, dv = dscores.mT @ q.float(), weights.mT @ grad.float()
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    shown = [_laid_out(x, input_layout, query.dtype) for x in (dq, dk, dv)]
    return shown[0], shown[1], shown[2], query.new_empty(0)


def prompt_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, padding_mask: None, atten_mask: Tensor | None,
    actual_seq_lengths: None, num_heads: int, scale_value: float = 1.0,
    pre_tokens: int = 214748647, next_tokens: int = 0, input_layout: str = "BSH",
    num_key_value_heads: int = 1,
) -> Tensor:  # fmt: skip
    assert padding_mask is None and actual_seq_lengths is None
    width = _width(query, input_layout, num_heads)
    q, k, v = (_by_heads(x, input_layout, width) for x in (query, key, value))
    assert q.shape[1] == num_heads and k.shape[1] == num_key_value_heads
    assert atten_mask is None or atten_mask.dim() == 2 or atten_mask.shape[-3] == 1
    masks = _Masks(atten_mask, pre_tokens, next_tokens)
    return _laid_out(_attend(q, k, v, scale_value, masks).out, input_layout, query.dtype)


def incre_flash_attention(
    query: Tensor, key: list[Tensor], value: list[Tensor], padding_mask: None,
    atten_mask: Tensor | None, actual_seq_lengths: None, num_heads: int, scale_value: float = 1.0,
    input_layout: str = "BSH", num_key_value_heads: int = 1,
) -> Tensor:  # fmt: skip
    """One query a batch on the keys and values so far."""
    every = 2**31 - 1
    out = prompt_flash_attention(
        query, key[0], value[0], padding_mask, atten_mask, actual_seq_lengths, num_heads,
        scale_value, every, every, input_layout, num_key_value_heads,
    )  # fmt: skip
    assert len(key) == len(value) == 1
    assert query.shape[1 if input_layout != "BNSD" else 2] == 1, "the query has one row"
    return out


def register(semantics: Semantics) -> None:
    semantics.update({
        "FlashAttentionScore": flash_attention_score,
        "FlashAttentionScoreGrad": flash_attention_score_grad,
        "PromptFlashAttention": prompt_flash_attention,
        "IncreFlashAttention": incre_flash_attention,
    })  # fmt: skip
