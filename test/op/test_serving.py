"""The operators of language-model serving: cache updates, rotary embedding, attention."""

from __future__ import annotations

from typing import Any

import torch

import dicp.serving  # noqa: F401  (registers torch.ops.lightllm)
from dicp.testing import T, op

ops = torch.ops.lightllm
F32, BOTH = (torch.float32,), (torch.float32, torch.float16)
ONE = ("contiguous",)


def serve(name: str, fn: Any, *specs: Any, **options: Any) -> Any:
    options.setdefault("dtypes", BOTH)
    return op(name, fn, *specs, layouts=ONE, strides=False, grad=False, **options)


def updated(x: Any, src: Any) -> Any:
    cache = torch.cat((x, x[:2])) * 1
    out = ops.copy_with_offset(cache, src, 1, 1 + src.shape[0])
    return out + 1, cache


def prompt(heads: int, shared: int, dim: int, count: int) -> Any:
    def fn(q: Any, k: Any, v: Any) -> Any:
        tokens = torch.full((1,), count, device=q.device)
        return ops.prompt_attention_inference(q, k, v, tokens, heads, dim, shared)

    return fn


def decoded(*lens: int, most: int = -1) -> Any:
    def fn(q: Any, k: Any, v: Any) -> Any:
        tokens = torch.tensor(lens, device=q.device)
        return ops.flash_attention_inference(q, k, v, tokens, most, -1, -1, -1)

    return fn


def paged(q: Any, k: Any, v: Any) -> Any:
    table = torch.tensor([[2, 0], [1, 3]], device=q.device)
    return ops.paged_attention(q, k, v, table, torch.tensor([5, 7], device=q.device))


def block(x: Any, w: Any, cache: Any, cos: Any, sin: Any) -> Any:
    """A step of a serving loop: norm, rotary embedding, cache update, attention."""
    y = ops.rms_norm(x, w, 1e-6)
    q = ops.rotary_emb(y, cos, sin)
    keys = ops.copy_with_offset(cache * 1, q, 4, 5)
    return ops.flash_attention_inference(q, keys, keys, torch.tensor([5], device=x.device), 9)


CASES = [
    serve("copy_with_offset", updated, (6, 8, 16), (6, 8, 16), dtypes=F32, fixed=(8, 16)),
    serve("copy_with_offset_wide", updated, (6, 16, 32), (6, 16, 32), dtypes=F32, fixed=(16, 32)),
    serve("rotary_emb", ops.rotary_emb, (2, 32, 64), (2, 32), (2, 32), fixed=(32, 64)),
    serve("rotary_emb_wide", ops.rotary_emb, (2, 32, 128), (2, 64), (2, 64), fixed=(32, 64, 128)),
    serve("rms_norm", lambda x, w: ops.rms_norm(x, w, 1e-5), (4, 64), (64,), fixed=(64,)),
    serve("prompt", prompt(16, 16, 32, 32), *[(1, 32, 16, 32)] * 3, fixed=(1, 16, 32)),
    serve("prompt_wide", prompt(16, 16, 64, 32), *[(1, 32, 16, 64)] * 3, fixed=(1, 16, 32, 64)),
    serve("prompt_padded", prompt(16, 16, 32, 20), *[(1, 32, 16, 32)] * 3, fixed=(1, 16, 32)),
    serve("prompt_grouped", prompt(8, 2, 16, 12), (1, 12, 8, 16), *[(1, 12, 2, 16)] * 2,
          fixed=(1, 8, 2, 16)),
    serve("decode", decoded(9), (1, 8, 16), (9, 8, 16), (9, 8, 16), fixed=(1, 8, 16)),
    serve("decode_wide", decoded(9), (1, 8, 32), (9, 8, 32), (9, 8, 32), fixed=(1, 8, 32)),
    serve("decode_shared_cache", decoded(3, 7, most=8), (2, 8, 16), (9, 8, 16), (9, 8, 16),
          fixed=(2, 8, 16)),
    serve("decode_grouped", decoded(4, 9), (2, 8, 16), (2, 9, 2, 16), (2, 9, 2, 16),
          fixed=(2, 8, 16)),
    serve("decode_lens", lambda q, k, v: ops.flash_attention_inference(q, k, v, [5, 6], 9),
          (2, 8, 16), (9, 8, 16), (9, 8, 16), fixed=(2, 8, 16, 9)),
    serve("paged", paged, (2, 8, 16), (4, 4, 2, 16), (4, 4, 2, 16), fixed=(2, 4, 8, 16)),
    serve("serving_block", block, (1, 8, 32), (32,), (9, 8, 32), T((1, 16)), T((1, 16)),
          dtypes=F32, fixed=(1, 8, 9, 16, 32)),
]  # fmt: skip


def test_op(case: Any, check_op: Any) -> None:
    check_op(case)
