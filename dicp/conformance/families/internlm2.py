"""InternLM2: a decoder whose queries, keys and values are one matrix product, group by group.

Source: "InternLM2 Technical Report", arXiv:2403.17297, section 2.2. The rows of `wqkv` are, for
each key-value head, those of its query heads, then the key's, then the value's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class InternLM2Config:
    """Sizes of the model; `kv_heads` divides `heads`, and `heads` divides `hidden_size`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.heads


class Attention(nn.Module):
    """Causal attention with grouped heads and rotary embedding."""

    def __init__(self, config: InternLM2Config) -> None:
        super().__init__()
        self.config = config
        rows = (config.heads + 2 * config.kv_heads) * config.head_size
        self.wqkv = nn.Linear(config.hidden_size, rows, bias=False)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        config, (batch, length, _) = self.config, x.shape
        group = config.heads // config.kv_heads
        packed = self.wqkv(x).view(batch, length, config.kv_heads, group + 2, config.head_size)
        q = packed[..., :group, :].reshape(batch, length, config.heads, config.head_size)
        q, k, v = (t.transpose(1, 2) for t in (q, packed[..., -2, :], packed[..., -1, :]))
        q, k = q * cos + _halves_rotated(q) * sin, k * cos + _halves_rotated(k) * sin
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed: Tensor = self.wo(out.transpose(1, 2).reshape(batch, length, config.hidden_size))
        return mixed


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: InternLM2Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """A decoder layer."""

    def __init__(self, config: InternLM2Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class InternLM2(nn.Module):
    """Token ids (batch, length) -> a mapping with `logits`, and with `labels` the `loss` too."""

    def __init__(self, config: InternLM2Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        config, x = self.config, self.tok_embeddings(input_ids)
        places = torch.arange(0, config.head_size, 2, dtype=x.dtype, device=x.device)
        angles = config.rope_theta ** (-places / config.head_size)
        positions = torch.arange(input_ids.shape[1], dtype=x.dtype, device=x.device)
        angles = torch.cat([torch.outer(positions, angles)] * 2, -1)
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.output(self.norm(x))
        if labels is None:
            return {"logits": logits}
        shifted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return {"logits": logits, "loss": F.cross_entropy(*shifted)}


def _halves_rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)
