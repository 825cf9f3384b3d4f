"""Operators of a llama server as formulas, for cases: batches of tokens beside one cache."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate pairs of a head's elements: halves, or neighbours if `interleaved`.

    x: (token, head, width); cos, sin: (token, width / 2). Source: RoFormer, arXiv:2104.09864.
    """
    cos, sin = cos[:, None], sin[:, None]
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)


def token_attention(q: Tensor, k: Tensor, places: Tensor, scale: float) -> Tensor:
    """Scores of one new token of each request: (head, request, place).

    q: (request, head, width); k: the cache, (slot, head, width); places: (request, place), slots.
    """
    return torch.einsum("rhw,rphw->hrp", q, k[places]) * scale


def token_softmax_reduce_v(logics: Tensor, v: Tensor, places: Tensor, lengths: Tensor) -> Tensor:
    """Softmax over the first `lengths` places, and values weighted by it: (request, head, width).

    logics: as `token_attention` gives them; v: the cache, (slot, head, width).
    """
    unused = torch.arange(places.shape[1], device=places.device) >= lengths[:, None]
    weights = logics.masked_fill(unused, -torch.inf).softmax(-1)
    return torch.einsum("hrp,rphw->rhw", weights, v[places])


def apply_penalty(
    logits: Tensor, counts: Tensor, presence: Tensor, frequency: Tensor, temperature: float
) -> Tensor:
    """Logits lowered for tokens that occurred, then divided by the temperature.

    logits, counts: (request, token); presence, frequency: (request,), the penalties for having
    occurred and for each time.
    """
    penalty = (counts > 0) * presence[:, None] + counts * frequency[:, None]
    return (logits - penalty.to(logits.dtype)) / temperature
