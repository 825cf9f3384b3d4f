"""The operators of language-model serving, as `torch.ops.lightllm.*` and as `torch.ops.dicp.*`.

Importing this module registers them. Tracing takes them apart into ATen operators: attention
becomes the fused attention of the target, a cache update a write in place. They run eagerly, and
with fake tensors, by the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor


def copy_with_offset(x: Tensor, src: Tensor, start_dim: int, end_dim: int) -> Tensor:
    """`x[start_dim:end_dim] = src` in place; returns x. `src` has the rows from start to end."""
    x.narrow(0, start_dim, end_dim - start_dim).copy_(src)
    return x


def rotary_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The two parts of the last dimension rotated; x (seq, head, dim), cos and sin (seq, dim/2)."""
    first, second = x.chunk(2, -1)
    cos, sin = (t.reshape(x.shape[0], 1, x.shape[-1] // 2) for t in (cos, sin))
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x * x) + eps) * weight over the last dimension, which `weight` has."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def prompt_attention_inference(
    q: Tensor, k: Tensor, v: Tensor, seqlen: Tensor, num_head: int, head_dim: int,
    num_key_value_heads: int,
) -> Tensor:  # fmt: skip
    """Causal attention over one prompt, in the shape of `q`; heads may share keys and values.

    q, k and v (1, seq, heads, head_dim) or any view of that; `seqlen`, an integer tensor of one
    element, counts the tokens: rows after these are padding and give zeros.
    """
    heads = (num_head, num_key_value_heads, num_key_value_heads)
    queries, keys, values = (
        x.reshape(1, -1, n, head_dim).transpose(1, 2) for x, n in zip((q, k, v), heads, strict=True)
    )
    grouped = bool(num_head != num_key_value_heads)
    out = F.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, enable_gqa=grouped
    ).transpose(1, 2)
    rows = torch.arange(out.shape[1], device=q.device).reshape(1, -1, 1, 1)
    return torch.where(rows < seqlen.reshape(()), out, 0.0).reshape(q.shape)


def flash_attention_inference(
    q: Tensor, all_k: Tensor, all_v: Tensor, current_lens: Tensor | Sequence[int], max_len: int,
    kvhead: int = -1, head: int = -1, dim: int = -1,
) -> Tensor:  # fmt: skip
    """Attention of one new query per batch element over the first `current_lens[i]` cached rows.

    q (batch, head, dim); all_k and all_v (rows, kvhead, dim), shared by the batch, or (batch, rows,
    kvhead, dim). Rows from `max_len` on are not read; max_len, kvhead, head and dim may be -1, for
    the tensors' own.
    """
    batch = q.shape[0]
    heads, dims = (q.shape[1] if head < 0 else head), (q.shape[2] if dim < 0 else dim)
    shared = all_k.shape[-2] if kvhead < 0 else kvhead
    keys, values = (
        _first_rows(x, max_len).reshape(*((batch, -1) if x.dim() == 4 else (1, -1)), shared, dims)
        for x in (all_k, all_v)
    )
    if not isinstance(current_lens, Tensor):
        current_lens = torch.stack([torch.full((), n, device=q.device) for n in current_lens])
    out = _decoded(q.reshape(batch, heads, 1, dims), keys, values, current_lens)
    return out.reshape(q.shape)


def paged_attention(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, current_lens: Tensor
) -> Tensor:
    """As `flash_attention_inference`, on caches in blocks.

    q (batch, head, dim); caches (blocks, rows of a block, kvhead, dim); block_table (batch, most
    blocks), integer: which block holds the next rows of a batch element.
    """
    batch, table = q.shape[0], block_table.flatten()
    shape = (batch, block_table.shape[1] * key_cache.shape[1], *key_cache.shape[2:])
    keys, values = (x.index_select(0, table).reshape(shape) for x in (key_cache, value_cache))
    return _decoded(q.unsqueeze(2), keys, values, current_lens).reshape(q.shape)


def _first_rows(cache: Tensor, count: int) -> Tensor:
    return cache if count < 0 else cache[..., :count, :, :]


def _decoded(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """Attention of (batch, heads, 1, dim) over the first `lengths` rows of each cache."""
    batch, heads = q.shape[:2]
    keys, values = (x.expand(batch, *x.shape[1:]).transpose(1, 2) for x in (keys, values))
    rows = torch.arange(keys.shape[2], device=q.device)
    seen = (rows < lengths.reshape(-1, 1)).reshape(batch, 1, 1, -1)
    grouped = bool(keys.shape[1] != heads)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=grouped)


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "copy_with_offset(Tensor(a!) x, Tensor src, SymInt start_dim, SymInt end_dim) -> Tensor(a!)":
        copy_with_offset,
    "rotary_emb(Tensor x, Tensor cos, Tensor sin) -> Tensor": rotary_emb,
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor": rms_norm,
    "prompt_attention_inference(Tensor q, Tensor k, Tensor v, Tensor seqlen, SymInt num_head, "
    "SymInt head_dim, SymInt num_key_value_heads) -> Tensor": prompt_attention_inference,
    "flash_attention_inference(Tensor q, Tensor all_k, Tensor all_v, Tensor current_lens, "
    "SymInt max_len, SymInt kvhead=-1, SymInt head=-1, SymInt dim=-1) -> Tensor":
        flash_attention_inference,
    "flash_attention_inference.lens(Tensor q, Tensor all_k, Tensor all_v, SymInt[] current_lens, "
    "SymInt max_len, SymInt kvhead=-1, SymInt head=-1, SymInt dim=-1) -> Tensor":
        flash_attention_inference,
    "paged_attention(Tensor q, Tensor key_cache, Tensor value_cache, Tensor block_table, "
    "Tensor current_lens) -> Tensor": paged_attention,
}  # fmt: skip
"""Schema -> function; a function of ATen operators is its own fake form and lowering."""


def _registered() -> tuple[torch.library.Library, ...]:
    libraries = tuple(torch.library.Library(space, "FRAGMENT") for space in ("lightllm", "dicp"))
    for library in libraries:
        for schema, function in OPERATORS.items():
            library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
            library.impl(schema.split("(")[0], function, "CompositeImplicitAutograd")
    return libraries


_LIBRARIES = _registered()
