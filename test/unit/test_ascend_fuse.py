"""Several GE operators become one, with sizes known and symbolic, and compute the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ascend_recorder import record
from ascend_simulated import check
from torch import Tensor

pytestmark = pytest.mark.sweep


def rand(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


def gate_by_halves(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]) * x[..., half:]


def gate_by_chunks(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return up * F.silu(gate)


def post_norm(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x + y, (16,), w, b)


def pre_norm(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return F.layer_norm(total, (16,), w, b) * 2, total + 1


def repeated(x: Tensor) -> Tensor:
    return x.repeat_interleave(3, 1) + 1


def repeated_heads(x: Tensor) -> Tensor:
    rows, width = x.shape
    return x[:, :, None].expand(rows, width, 4).reshape(rows, width * 4) * 2


def scaled_twice(x: Tensor) -> Tensor:
    return torch.exp(x * 0.5 / 4) + (x * 3) * 0.25


def scaled_by_one(x: Tensor) -> Tensor:
    return torch.exp(x * 1.0) / 1.0


NORM = [rand(3, 16), rand(3, 16), rand(16), rand(16)]
CASES: dict[str, tuple[Callable[..., Any], list[Tensor], dict[str, int]]] = {
    "gate_by_halves": (gate_by_halves, [rand(3, 16)],
                       {"SwiGlu": 1, "Swish": 0, "StridedSlice": 0}),
    "gate_by_chunks": (gate_by_chunks, [rand(3, 16)], {"SwiGlu": 1, "Swish": 0, "SplitVD": 0}),
    "post_norm": (post_norm, NORM, {"AddLayerNorm": 1, "LayerNormV4": 0, "Add": 0}),
    "pre_norm": (pre_norm, NORM, {"AddLayerNorm": 1, "LayerNormV4": 0, "Add": 1}),
    "repeated": (repeated, [rand(3, 16)],
                 {"RepeatInterleave": 1, "BroadcastTo": 0, "Reshape": 0}),
    "repeated_heads": (repeated_heads, [rand(3, 16)],
                       {"RepeatInterleave": 1, "BroadcastTo": 0, "Reshape": 0}),
    "scaled_twice": (scaled_twice, [rand(3, 16)], {"Mul": 2, "RealDiv": 0}),
    "scaled_by_one": (scaled_by_one, [rand(3, 16)], {"Mul": 0, "RealDiv": 0, "Exp": 1}),
}  # fmt: skip


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_several_become_one(name: str, symbolic: bool) -> None:
    fn, inputs, expected = CASES[name]
    for tensor in inputs:
        torch._dynamo.mark_static(tensor, tensor.dim() - 1)
    kinds = record(fn, *inputs, dynamic=symbolic).kinds()
    assert {kind: kinds[kind] for kind in expected} == expected
    check(fn, *inputs, dynamic=symbolic)


@pytest.mark.parametrize("name", CASES)
def test_in_half_precision(name: str) -> None:
    fn, inputs, _ = CASES[name]
    check(fn, *(x.bfloat16() for x in inputs))


@pytest.mark.parametrize("fn", [gate_by_halves, gate_by_chunks])
def test_the_gate_and_its_gradient(fn: Callable[..., Any]) -> None:
    inputs = [rand(3, 16, grad=True)]
    kinds = record(fn, *inputs).kinds()
    assert kinds["SwiGlu"] == 1
    assert fn is gate_by_halves or kinds == Counter({"SwiGlu": 1, "SwiGluGrad": 1})
    check(fn, *inputs)


def test_a_sum_is_given_where_somebody_reads_it() -> None:
    for fn, wanted in ((post_norm, False), (pre_norm, True)):
        (norm,) = (n for n in record(fn, *NORM).operators() if n.kind == "AddLayerNorm")
        assert norm.attrs["additional_output"] is wanted


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.silu(x[..., 8:]) * x[..., :8],
        lambda x: F.silu(x[..., :5]) * x[..., 5:10],
        lambda x: F.layer_norm(x + x[:1], (16,), x[0], x[1]),
        lambda x: F.layer_norm(x + 1, (16,), x[0], x[1]),
        lambda x: (x * 3e38) * 1e-38,
        lambda x: (x * 0.0) * 2,
    ],
    ids=["other_half", "parts", "broadcast_row", "number", "overflow", "zero"],
)
def test_what_only_looks_alike_stays(fn: Callable[..., Any]) -> None:
    kinds = record(fn, rand(3, 16)).kinds()
    assert not kinds["SwiGlu"] and not kinds["AddLayerNorm"]
    assert kinds["Mul"] != 1 or kinds["Swish"]
    check(fn, rand(3, 16))


def test_inexact_products_stay_apart() -> None:
    """The square of 1 + 2^-7 has no equal in bfloat16."""

    def fn(x: Tensor) -> Tensor:
        return (x * 1.0078125) * 1.0078125

    assert record(fn, rand(3, 16, dtype=torch.bfloat16)).kinds()["Mul"] == 2
    assert record(fn, rand(3, 16)).kinds()["Mul"] == 1


def test_a_scaled_query_scales_the_scores() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * 0.5, k, v, scale=0.25)

    inputs = [rand(1, 2, 4, 16, dtype=torch.bfloat16)] * 3
    target = record(fn, *inputs)
    (call,) = (n for n in target.operators() if n.kind == "PromptFlashAttention")
    assert call.attrs["scale_value"] == 0.125 and target.kinds()["Mul"] == 0
    check(fn, *inputs)


def near_misses(x: Tensor, y: Tensor, h: Tensor, c: Tensor) -> list[Tensor]:
    """Each differs at one place from what a rewrite looks for."""
    left, right = x[..., :8], x[..., 8:]
    first, second = h[..., :4], h[..., 4:]
    low = x.to(torch.float8_e4m3fn).to(x.dtype)
    return [
        F.silu(left) * F.silu(right), F.silu(left) * (right + 0.5), F.silu(left * 2) * right,
        F.silu(low[..., :8]) * low[..., 8:], torch.sigmoid(left) * right, F.silu(left) * y[..., 8:],
        h * c + torch.cat([second, first], -1) * c, h * c + torch.cat([-first, second], -1) * c,
        h * c - torch.cat([-second, first], -1) * c,
        h * c + torch.cat([-second, first], -1) * (h + 1),
        h * c + torch.cat([-second, first], -1) * (c + 1), first * 2 * 0.5, x * 0.1 * 10 + 1,
        (x * 3) / 3 - 1, (x * -1) * -1 + y, x * 1e-30 * 1e-30, F.rms_norm(x + y * 2, (16,), y[0]),
        F.rms_norm(low + y, (16,), y[0]), F.layer_norm(x - y, (16,), x[0], y[0]),
        x[:, None].expand(3, 2, 16).reshape(6, 16), x[:, :, None].expand(3, 16, 2).reshape(3, 32),
        x[:, None].expand(3, 2, 16).reshape(3, 32),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_near_misses_are_right(dtype: torch.dtype) -> None:
    inputs = [torch.randn(shape, dtype=dtype) for shape in ((3, 16), (3, 16), (2, 3, 4, 8))]
    check(near_misses, *inputs, torch.randn(2, 1, 4, 8, dtype=dtype))
