"""The operators: what they compute, and their cases."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dicp.conformance.per_operator.cases import Case, Operand, Operator, output_gradient

INT = torch.int64


def of(*shapes: tuple[int, ...], **keywords: Any) -> Case:
    """A case of contiguous operands."""
    return Case(tuple(map(Operand, shapes)), keywords)


def integers(shape: tuple[int, ...], below: int, unique: bool = False) -> Operand:
    return Operand(shape, None, INT, below, unique)


PAIRS = (
    of((13, 4), (13, 4)),
    of((16, 5632), (16, 5632)),
    Case((Operand((13, 4), (10, 1)), Operand((13, 4), (10, 1)))),
    Case((Operand((13, 4), (1, 13)), Operand((13, 4)))),
    Case((Operand((13, 4), (0, 1)), Operand((13, 4)))),
    Case((Operand((13, 4, 4), (20, 4, 1)), Operand((13, 4, 4), (0, 4, 1)))),
    Case((Operand((13, 4)), Operand((13, 4))), over=0),
    Case((Operand((16, 56)), Operand((16, 56))), over=1),
)
ALONE = tuple(
    Case(case.operands[:1], over=case.over) for case in PAIRS if case.over != 1
)  # fmt: skip
ROWS = (of((3, 5)), of((32, 512)), Case((Operand((4, 20, 64), (1920, 96, 1)),)))


def clip(x: Tensor, min_val: float = -0.5, max_val: float = 0.5) -> Tensor:
    return x.clamp(min_val, max_val)


def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    return F.leaky_relu(x, negative_slope)


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    return a * F.silu(b)


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def causal_softmax(x: Tensor) -> Tensor:
    rows, columns = x.shape[-2:]
    seen = torch.ones(rows, columns, dtype=torch.bool, device=x.device).tril(columns - rows)
    return x.masked_fill(~seen, -math.inf).softmax(-1)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-5)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True)


def cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target)


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b)


def conv(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.conv2d(x, w, b)


def gemm(a: Tensor, b: Tensor, c: Tensor, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    return alpha * (a @ b) + beta * c


def rope(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def rearrange(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous()


def index_copy(x: Tensor, index: Tensor, source: Tensor) -> Tensor:
    return x.index_copy(0, index, source)


def scatter(x: Tensor, index: Tensor, source: Tensor) -> Tensor:
    return x.scatter(1, index, source)


def equal(a: Tensor, b: Tensor) -> Tensor:
    return (a == b).all()


def random_sample(logits: Tensor, drawn: Tensor, temperature: float = 0.8, k: int = 8) -> Tensor:
    """The token whose share of the `k` largest probabilities holds the number `drawn`."""
    largest, tokens = (logits / temperature).topk(k)
    shares = largest.double().softmax(-1).cumsum(-1)
    return tokens[(shares < drawn.double().abs() * 0.999).sum()]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor) -> Tensor:
    """q: (heads, width); keys, values: (block, place, heads, width); blocks: the sequence's."""
    k, v = (cache[blocks].flatten(0, 1).transpose(0, 1) for cache in (keys, values))
    return F.scaled_dot_product_attention(q[:, None], k, v)[:, 0]


def kv_caching(cache: Tensor, fresh: Tensor, at: int = 3) -> Tensor:
    return cache.slice_scatter(fresh, 1, at, at + fresh.shape[1])


def topk_softmax(x: Tensor, k: int = 2) -> tuple[Tensor, Tensor]:
    values, places = x.softmax(-1).topk(k)
    return values / values.sum(-1, keepdim=True), places


def fused_moe(x: Tensor, gates: Tensor, up: Tensor, down: Tensor) -> Tensor:
    shares = (x @ gates).softmax(-1)
    hidden = F.silu(torch.einsum("td,edh->teh", x, up))
    return (torch.einsum("teh,ehd->ted", hidden, down) * shares[..., None]).sum(1)


def quantized_matmul(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return x @ (weight.to(x.dtype) * scale.abs())


def max_pool(input: Tensor) -> Tensor:
    return F.max_pool2d(input, 3, 2, 1)


def saved_by_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, 1e-5)
    return x, weight, bias, mean, rstd, output_gradient(y)


def layer_norm_gradients(
    input: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, grad_output: Tensor
) -> tuple[Tensor, ...]:
    size = input.shape[-1:]
    return torch.ops.aten.native_layer_norm_backward(
        grad_output, input, size, mean, rstd, weight, bias, [True] * 3
    )


def saved_by_batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    y, mean, invstd = torch.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
    return x, weight, mean, invstd, output_gradient(y)


def batch_norm_gradients(
    input: Tensor, weight: Tensor, save_mean: Tensor, save_invstd: Tensor, grad_output: Tensor
) -> tuple[Tensor, ...]:
    return torch.ops.aten.native_batch_norm_backward(
        grad_output, input, weight, None, None, save_mean, save_invstd, True, 1e-5, [True] * 3
    )


def saved_by_max_pool(x: Tensor) -> tuple[Tensor, ...]:
    y, indices = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    return x, indices, output_gradient(y)


def max_pool_gradient(input: Tensor, indices: Tensor, grad_output: Tensor) -> Tensor:
    return torch.ops.aten.max_pool2d_with_indices_backward(
        grad_output, input, [3, 3], [2, 2], [1, 1], [1, 1], False, indices
    )


NORMED = tuple(
    Case((shape, Operand((shape.shape[-1],)), Operand((shape.shape[-1],))))
    for shape in (Operand((8,)), Operand((16, 96)), Operand((4, 6, 32), (256, 40, 1)))
)
CHANNELS = (of((4, 6), (6,), (6,)), of((3, 8, 16), (8,), (8,)), of((2, 5, 6, 7), (5,), (5,)))
SCORES = (
    Case((Operand((32, 50)), integers((32,), 50))),
    Case((Operand((7, 200)), integers((7,), 200))),
)
PRODUCTS = (
    of((6, 64), (64, 8), (6, 8)), of((4, 32, 48), (4, 48, 16), (4, 32, 16), alpha=0.5, beta=2.0),
    Case((Operand((16, 24), (1, 16)), Operand((24, 12)), Operand((16, 12), (20, 1)))),
)  # fmt: skip
LINEAR = (of((7, 32), (16, 32), (16,)), of((2, 5, 64), (24, 64), (24,)))
HEADS = (
    of((2, 4, 16, 32), (2, 4, 16, 32), (2, 4, 16, 32)),
    of((1, 2, 33, 64), (1, 2, 33, 64), (1, 2, 33, 64)),
)
IMAGES = (of((2, 3, 8, 8)), of((1, 4, 9, 7)))
WEIGHTED = tuple(Case(case.operands[:2]) for case in NORMED)

OPERATORS: dict[str, Operator] = {
    "add": Operator(lambda a, b: torch.add(a, b), PAIRS, outputs=("c",)),
    "sub": Operator(lambda a, b: torch.sub(a, b), PAIRS, outputs=("c",)),
    "mul": Operator(lambda a, b: torch.mul(a, b), PAIRS, outputs=("c",)),
    "swiglu": Operator(swiglu, PAIRS, outputs=("c",)),
    "clip": Operator(clip, ALONE),
    "relu": Operator(lambda x: F.relu(x), ALONE),
    "leaky_relu": Operator(leaky_relu, ALONE),
    "gelu": Operator(lambda x: F.gelu(x), ALONE),
    "silu": Operator(lambda x: F.silu(x), ALONE),
    "sigmoid": Operator(lambda x: torch.sigmoid(x), ALONE),
    "silu_and_mul": Operator(silu_and_mul, (of((5, 8)), of((4, 7, 256)))),
    "softmax": Operator(lambda x: x.softmax(-1), ROWS),
    "logsoftmax": Operator(lambda x: x.log_softmax(-1), ROWS),
    "causal_softmax": Operator(causal_softmax, (of((4, 20, 20)), of((3, 7, 33)))),
    "rms_norm": Operator(rms_norm, WEIGHTED),
    "add_rms_norm": Operator(
        add_rms_norm,
        (of((16, 96), (16, 96), (96,)), of((2, 3, 64), (2, 3, 64), (64,))),
        outputs=("y", "total"),
    ),
    "layer_norm": Operator(layer_norm, NORMED),
    "layer_norm_backward": Operator(layer_norm, NORMED, gradients=(0, 1, 2)),
    "batch_norm": Operator(batch_norm, CHANNELS),
    "batch_norm_backward": Operator(batch_norm, CHANNELS, ("f32",), gradients=(0, 1, 2)),
    "cross_entropy_loss": Operator(cross_entropy, SCORES),
    "cross_entropy_loss_backward": Operator(cross_entropy, SCORES, gradients=(0,)),
    "gemm": Operator(gemm, PRODUCTS),
    "linear": Operator(linear, LINEAR),
    "linear_backward": Operator(linear, LINEAR, gradients=(0, 1, 2)),
    "conv": Operator(conv, (of((2, 3, 9, 9), (4, 3, 3, 3), (4,)),), ("f32",)),
    "maxpool_backward": Operator(max_pool, IMAGES, gradients=(0,)),
    "rearrange": Operator(rearrange, (of((3, 50)), of((2, 33, 70)))),
    "rope": Operator(rope, (of((7, 4, 64), (7, 1, 32), (7, 1, 32)),)),
    "index_copy_inplace": Operator(
        index_copy, (Case((Operand((9, 5)), integers((4,), 9, True), Operand((4, 5))), over=0),)
    ),
    "scatter": Operator(
        scatter, (Case((Operand((1, 12)), integers((1, 5), 12, True), Operand((1, 5)))),)
    ),
    "equal": Operator(equal, (of((4, 9), (4, 9)), Case((integers((3, 4), 1),) * 2))),
    "random_sample": Operator(random_sample, (of((512,), ()),), ("f32",)),
    "attention": Operator(attention, HEADS),
    "paged_attention": Operator(
        paged_attention,
        (Case((Operand((2, 16)), *[Operand((6, 4, 2, 16))] * 2, integers((3,), 6, True))),),
    ),
    "kv_caching": Operator(kv_caching, (of((2, 16, 8), (2, 4, 8)),)),
    "topk_softmax": Operator(topk_softmax, (of((6, 16)),), ("f32",), outputs=("values", "indices")),
    "fused_moe": Operator(fused_moe, (of((5, 16), (16, 4), (4, 16, 24), (4, 24, 16)),)),
    "quantized_matmul": Operator(
        quantized_matmul,
        (Case((Operand((5, 32)), Operand((32, 8), None, torch.int8, 100), Operand((8,)))),),
    ),
}

GRADIENTS = ("grad_input", "grad_weight", "grad_bias")
BY_FORMULA: dict[str, Operator] = {
    "layer_norm_backward": Operator(
        layer_norm_gradients, NORMED, prepare=saved_by_layer_norm, outputs=GRADIENTS
    ),
    "batch_norm_backward": Operator(
        batch_norm_gradients, CHANNELS, ("f32",), prepare=saved_by_batch_norm, outputs=GRADIENTS
    ),
    "maxpool_backward": Operator(
        max_pool_gradient, IMAGES, prepare=saved_by_max_pool, outputs=("grad_input",)
    ),
}
"""Gradients of `OPERATORS` by formula, from what the forward pass saves."""
