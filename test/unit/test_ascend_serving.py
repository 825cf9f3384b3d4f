"""Which GE operator serves each operator of `torch.ops.lightllm`, in the numbers that it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ascend_recorder import record
from ascend_simulated import check

import dicp.serving  # noqa: F401  (registers torch.ops.lightllm)

ops = torch.ops.lightllm
LENGTHS = torch.tensor([3, 7])
BLOCKS = torch.tensor([[2, 0], [1, 3]])


def update(x: Any, src: Any) -> Any:
    return ops.copy_with_offset(x, src, 1, 3) + 1, x


def prompt(q: Any, k: Any, v: Any) -> Any:
    return ops.prompt_attention_inference(q, k, v, torch.full((1,), 9), 8, 16, 2)


def decode(q: Any, k: Any, v: Any) -> Any:
    return ops.flash_attention_inference(q, k, v, LENGTHS, 8, -1, -1, -1)


def paged(q: Any, k: Any, v: Any) -> Any:
    return ops.paged_attention(q, k, v, BLOCKS, LENGTHS)


def unfused(kind: str) -> dict[str, int]:
    return {"BatchMatMulV2": 2, kind: 0}


HALF, SINGLE = torch.float16, torch.float32
QUERIES, KEYS = (2, 8, 16), (2, 9, 2, 16)
SERVED: dict[str, tuple[Any, tuple[Any, ...], torch.dtype, dict[str, int]]] = {
    "copy_with_offset": (update, ((8, 4), (2, 4)), HALF, {"StridedSliceAssign": 1, "ConcatD": 0}),
    "rms_norm": (lambda x, w: ops.rms_norm(x, w, 1e-5), ((4, 64), (64,)), HALF, {"RmsNorm": 1}),
    "rotary_emb": (ops.rotary_emb, ((2, 4, 8), (2, 4), (2, 4)), HALF, {"Mul": 4, "ConcatD": 1}),
    "prompt": (prompt, ((1, 12, 8, 16), *[(1, 12, 2, 16)] * 2), HALF, {"PromptFlashAttention": 1}),
    "prompt_float32": (prompt, ((1, 12, 8, 16), *[(1, 12, 2, 16)] * 2), SINGLE,
                       unfused("PromptFlashAttention")),
    "decode": (decode, (QUERIES, KEYS, KEYS), HALF, {"IncreFlashAttention": 1}),
    "decode_float32": (decode, (QUERIES, KEYS, KEYS), SINGLE, unfused("IncreFlashAttention")),
    "paged": (paged, (QUERIES, (4, 4, 2, 16), (4, 4, 2, 16)), HALF,
              {"IncreFlashAttention": 1, "GatherV2": 2}),
}  # fmt: skip
"""Name -> function, sizes and dtype of its inputs, and how many of which GE operators it becomes.

GE's fused attention takes numbers of 16 bits, and its rotation wants angles for the whole width,
where `rotary_emb` has them for half of it.
"""


@pytest.mark.parametrize("name", SERVED)
def test_the_operator_that_serves(name: str) -> None:
    fn, shapes, dtype, expected = SERVED[name]
    generator = torch.Generator().manual_seed(len(name))
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    target = record(fn, *inputs)
    kinds = target.kinds()
    assert {kind: kinds[kind] for kind in expected} == expected, kinds
    assert not [n for p in target.programs for n in p.nodes if n.decision == "eager"]
    check(fn, *inputs)
