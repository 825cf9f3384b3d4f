"""`flex_attention`: masks and changes of scores that the user writes, as functions of positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from dicp.compare import Rule, check_tensor

DOCUMENTS = torch.tensor([0] * 70 + [1] * 30 + [2] * 200)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
PER_DISTANCE = torch.linspace(-2, 2, 401)

MASKS: dict[str, Callable[..., Any]] = {
    "all": lambda b, h, i, j: i == i,
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i >= j) & (i - j < 20),
    "keys_after": lambda b, h, i, j: j >= i + 3,  # the last queries see no key
    "documents": lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j],
    "by_head": lambda b, h, i, j: (i + j) % (h + 2) == 0,
    "none": lambda b, h, i, j: i < 0,
}
SCORES: dict[str, Callable[..., Any]] = {
    "distance": lambda score, b, h, i, j: score + SLOPES[h] * (j - i),
    "table": lambda score, b, h, i, j: score + PER_DISTANCE[i - j + 200],
    "soft_cap": lambda score, b, h, i, j: 2 * torch.tanh(score / 2),
    "hidden": lambda score, b, h, i, j: torch.where(j % 3 == 1, score, -math.inf),
}
SIZES = {
    "square": ((2, 4, 150, 16), (2, 4, 150, 16)),
    "more_keys": ((2, 4, 50, 16), (2, 4, 150, 16)),
    "grouped": ((2, 4, 150, 16), (2, 2, 150, 16)),
    "one_batch_of_keys": ((2, 4, 150, 16), (1, 4, 150, 16)),
}


def attention(mask: str, scores: str | None, sizes: str) -> Callable[..., Tensor]:
    (batch, heads, rows, _), (_, groups, keys, _) = SIZES[sizes]
    block_mask = create_block_mask(MASKS[mask], batch, heads, rows, keys, device="cpu")
    options = {"score_mod": None if scores is None else SCORES[scores],
               "block_mask": block_mask, "enable_gqa": heads != groups}  # fmt: skip
    return lambda q, k, v: flex_attention(q, k, v, **options)


def operands(sizes: str, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    of_queries, of_keys = SIZES[sizes]
    return [torch.randn(size).to(dtype) for size in (of_queries, of_keys, of_keys)]


def check(fn: Callable[..., Tensor], tensors: list[Tensor], backend: str, **options: Any) -> None:
    with torch.no_grad():
        exact = fn(*(x.double() for x in tensors))
        got = torch.compile(fn, backend=backend, fullgraph=True, **options)(*tensors)
        assert not check_tensor(got, fn(*tensors), exact, Rule())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str, dtype: torch.dtype, backend_name: str) -> None:
    check(attention(mask, None, "square"), operands("square", dtype), backend_name)


@pytest.mark.parametrize("scores", SCORES)
def test_changed_scores(scores: str, backend_name: str) -> None:
    check(attention("causal", scores, "square"), operands("square", torch.float32), backend_name)


@pytest.mark.parametrize("sizes", list(SIZES)[1:])
@pytest.mark.parametrize("mask", ["window", "documents"])
def test_sizes(sizes: str, mask: str, backend_name: str, dynamic: bool) -> None:
    tensors = operands(sizes, torch.float32)
    check(attention(mask, None, sizes), tensors, backend_name, dynamic=dynamic)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("number", [math.nan, math.inf, 3e38])
def test_hidden_numbers(place: int, number: float, backend_name: str) -> None:
    """Queries, keys or values that are not finite, which some queries see."""
    tensors = operands("square", torch.float32)
    tensors[place][:, 1, 70] = number
    check(attention("window", None, "square"), tensors, backend_name)


def test_log_sum_exp(backend_name: str) -> None:
    mask = create_block_mask(MASKS["keys_after"], None, None, 150, 150, device="cpu")

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, more = flex_attention(q, k, v, block_mask=mask, return_aux=AuxRequest(lse=True))
        return torch.cat([out, more.lse[..., None]], -1)

    check(fn, operands("square", torch.float32), backend_name)


def test_inside_a_checkpoint(backend_name: str) -> None:
    attend = attention("window", None, "square")

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(attend, q, k, v, use_reentrant=False)

    check(fn, operands("square", torch.float32), backend_name)


def in_float(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of 16-bit floats whose scores are in float32, and whose keys have heads inside."""
    scores = q.float() @ k.float().permute(0, 2, 3, 1) / 4
    return torch.softmax(scores, -1).to(v.dtype) @ v


def test_widened_keys_of_another_layout(backend_name: str) -> None:
    q, k, v = operands("square", torch.bfloat16)
    check(in_float, [q, k.transpose(1, 2).contiguous(), v], backend_name)
