"""The fusion families: each spelling fires, static and symbolic, and keeps the numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from support.graphs import apply, capture, rewrite
from torch import Tensor, nn

from dicp.compare import Rule, check_tensor
from dicp.dynamo_bridge.attention.training import TRAINING_ATTENTION
from dicp.dynamo_bridge.backend import Backend
from dicp.dynamo_bridge.fuse.families import FAMILIES, FUSE
from dicp.dynamo_bridge.passes.canonicalize import CANONICALIZE
from dicp.fused_attention import ANY_ATTENTION

pytestmark = pytest.mark.sweep

aten = torch.ops.aten
PASSES = [CANONICALIZE, FUSE, CANONICALIZE]
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
symbolic = pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])


def fused(fn: Any, *args: Any, dynamic: bool | None = False, **options: Any) -> Any:
    (graph,) = capture(fn, *args, dynamic=dynamic, **options)
    counts, _ = rewrite(graph, PASSES, fusions=FAMILIES)
    return counts


def fused_with_exact_masks(fn: Any, *args: Any, dynamic: bool) -> Any:
    """The counts alone: PyTorch's own operator takes no mask of booleans."""
    (graph,) = capture(fn, *args, dynamic=dynamic)
    attention = replace(ANY_ATTENTION, exact_masks=True)
    apply(graph, PASSES, fusions=FAMILIES, attention={"cpu": attention})
    return graph.counts()


def qkv(heads: int = 4, kv: int | None = None, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = [(3, heads, 18, 8), (3, kv or heads, 18, 8), (3, kv or heads, 18, 8)]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(8), -1) @ v


def transposed_inputs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.3, dim=-1, dtype=torch.float32)
    return torch.matmul(out.to(q.dtype), v).transpose(1, 2).contiguous().flatten(2)


def unscaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul((q * 0.25 @ k.mT).softmax(-1), v)


def three_dims(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) * 0.5, -1), v)


def spelled_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * 0.5
    powers = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (powers / powers.sum(-1, keepdim=True)) @ v


def causal_where(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    size = q.shape[2]
    allowed = torch.ones(size, size, dtype=torch.bool).tril()
    return (q @ k.mT * 0.5).masked_fill(~allowed, float("-inf")).softmax(-1) @ v


def causal_added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    size = q.shape[2]
    rows = torch.arange(size)
    allowed = rows[None, :] <= rows[:, None]
    bias = torch.where(allowed, 0.0, torch.finfo(q.dtype).min)[None, None]
    return (q @ k.mT * 0.5 + bias).softmax(-1) @ v


@symbolic
@pytest.mark.parametrize(
    "fn", [plain, transposed_inputs, unscaled, three_dims, spelled_out, causal_where, causal_added]
)
def test_attention_spellings(fn: Any, symbolic: bool) -> None:
    fuse = fused_with_exact_masks if fn is causal_where and symbolic else fused
    counts = fuse(fn, *qkv(), dynamic=symbolic)
    assert counts[ATTENTION] == 1
    assert not counts["aten.bmm.default"] and not counts["aten._softmax.default"]


@pytest.mark.parametrize("fn", [causal_where, causal_added])
def test_attention_causal_is_recognised(fn: Any) -> None:
    counts = fused(fn, *qkv())
    masks = ("aten.tril.default", "aten.le.Tensor", "aten.arange.start_step")
    assert counts[ATTENTION] == 1 and not any(counts[name] for name in masks), counts


@pytest.mark.parametrize("fn", [causal_where, causal_added])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_mask_that_becomes_the_causal_flag_keeps_its_effect(fn: Any, number: float) -> None:
    """An added mask leaves NaN in all rows that have a score of NaN or +inf."""
    q, k, v = qkv()
    k[1, :, -1, 2] = number
    assert fused(fn, q, k, v)[ATTENTION] == 1


def test_gradients_of_a_mask_that_becomes_the_causal_flag() -> None:
    """NaN of a row reaches all keys, also those that PyTorch's operator skips for it."""
    q, k, v = (torch.randn(1, 3, 600, 8, requires_grad=True) for _ in "qkv")
    with torch.no_grad():
        q[0, 1, 5, 2] = math.nan
        k[0, 2, -1, 2] = math.nan
    kept = [aten._softmax_backward_data.default]
    joint, *_ = capture(causal_added, q, k, v, train=True, keep=kept)
    before = [joint.run(dtype) for dtype in (torch.float32, torch.float64)]
    apply(joint, [TRAINING_ATTENTION, CANONICALIZE], fusions=FAMILIES)
    assert joint.counts()[ATTENTION] == 1
    results = (torch.utils._pytree.tree_leaves(x) for x in (before[0], joint.run(), before[1]))
    for eager, mine, real in zip(*results, strict=True):
        assert not check_tensor(mine, eager, real, Rule(strides=False))


@symbolic
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_attention_dtypes(dtype: torch.dtype, symbolic: bool) -> None:
    counts = fused(transposed_inputs if dtype == torch.bfloat16 else plain, *qkv(dtype=dtype),
                   dynamic=symbolic)  # fmt: skip
    assert counts[ATTENTION] == 1


@symbolic
@pytest.mark.parametrize("shape", [(18, 18), (3, 1, 1, 18), (4, 18, 18), (3, 4, 18, 18)])
def test_attention_additive_mask(shape: tuple[int, ...], symbolic: bool) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (mask + q @ k.mT * 0.5).softmax(-1) @ v

    assert fused(fn, *qkv(), torch.randn(shape), dynamic=symbolic)[ATTENTION] == 1


@symbolic
@pytest.mark.parametrize("fill", [float("-inf"), torch.finfo(torch.float32).min])
def test_attention_boolean_mask_keeps_nan_rows(fill: float, symbolic: bool) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return torch.where(keep, q @ k.mT, fill).softmax(-1) @ v

    keep = torch.rand(3, 1, 18, 18) > 0.3
    keep[:, :, 3] = False
    assert fused_with_exact_masks(fn, *qkv(), keep, dynamic=symbolic)[ATTENTION] == 1
    unfused = fused(fn, *qkv(), keep, dynamic=symbolic)
    assert not unfused[ATTENTION], "it would add the mask to scores that the mask replaces"


def test_attention_of_strides_that_allow_no_view() -> None:
    """The batch is split anew behind the attention, and q has the strides of no such view."""

    def fn(x: Tensor, v: Tensor) -> Tensor:
        return F.instance_norm(F.softmax(x @ x.transpose(2, 0), -1) @ v)

    x, v = torch.randn(2, 2, 2, 2), torch.randn(2, 2, 2)
    compiled = torch.compile(fn, backend="cpugraph", dynamic=False)
    torch.testing.assert_close(compiled(x, v), fn(x, v))


@pytest.mark.parametrize("part", [lambda y: y.chunk(3, 2)[0], lambda y: y[:, :, 1:3]])
def test_a_returned_view_keeps_the_strides_of_what_it_was_a_view_of(part: Any) -> None:
    """A fused norm is row-major where its parts followed the channels-last input."""

    def fn(x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        y = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + 0.5)
        return part(torch.clamp_min(y, y))

    x = torch.randn(6, 4, 6, 6).to(memory_format=torch.channels_last)
    got = torch.compile(fn, backend="cpugraph", dynamic=False)(x)
    torch.testing.assert_close(got, fn(x), check_stride=True)


@symbolic
def test_attention_grouped_heads_are_not_repeated(symbolic: bool) -> None:
    def repeat(x: Tensor) -> Tensor:
        b, h, s, d = x.shape
        return x[:, :, None].expand(b, h, 2, s, d).reshape(b, h * 2, s, d)

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ repeat(k).transpose(2, 3) * 0.5).softmax(-1) @ repeat(v)

    args = qkv(4, 2)
    if symbolic:
        for x in args:
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 2)
    counts = fused(fn, *args, dynamic=None if symbolic else False)
    assert counts[ATTENTION] == 1 and not counts["aten.expand.default"]


def test_fused_attention_reads_grouped_heads_directly() -> None:
    def repeat(x: Tensor) -> Tensor:
        b, h, s, d = x.shape
        return x[:, :, None].expand(b, h, 2, s, d).reshape(b, h * 2, s, d)

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, repeat(k), repeat(v), is_causal=True)

    counts = fused(fn, *qkv(4, 2), keep=[aten._scaled_dot_product_flash_attention_for_cpu.default])
    assert counts == {ATTENTION: 1, "<built-in function getitem>": 1}


def other_dim(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -2) @ v


def probabilities_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = torch.softmax(q @ k.mT, -1)
    return p @ v, p


def scale_not_scalar(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * q[:, :, :, :1], -1) @ v


def other_head_size(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -1) @ v[..., :4]


def small_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.where(q[..., :1] > 0, q @ k.mT, -1e4).softmax(-1) @ v


@pytest.mark.parametrize(
    "fn", [other_dim, probabilities_returned, scale_not_scalar, other_head_size, small_fill]
)
def test_attention_guards(fn: Any) -> None:
    assert not fused(fn, *qkv())[ATTENTION]


def hides_future(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    drop = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-2, -1) * 0.25).masked_fill(drop, float("-inf"))
    return torch.softmax(scores, -1) @ v


def in_three_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.softmax(torch.bmm(q, k.transpose(1, 2)) * 0.25, -1).bmm(v)


def with_position_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) + bias, -1) @ v


def trained(fn: Any, *args: Tensor, dynamic: bool = False) -> list[str]:
    """The products and attentions of forward and backward, with the gradients compared.

    `dynamic`: batch and rows are symbolic.
    """
    backend = Backend("cpu", cache=False)
    torch._dynamo.reset()
    for x in args if dynamic else ():
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 2)
    leaves = [x for x in args if x.requires_grad]
    out = torch.compile(fn, backend=backend, dynamic=None if dynamic else False)(*args)
    weights = torch.randn_like(out)
    got = torch.autograd.grad((out * weights).sum(), leaves)
    expected = torch.autograd.grad((fn(*args) * weights).sum(), leaves)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    return [n.op for r in backend.reports for n in r.nodes if "mm" in n.op or "attention" in n.op]


@pytest.mark.parametrize(
    ("fn", "symbolic"),
    [(plain, False), (plain, True), (in_three_dimensions, False), (in_three_dimensions, True),
     (hides_future, False)],
)  # fmt: skip
def test_attention_in_training_is_one_pair_of_operators(fn: Any, symbolic: bool) -> None:
    args = [x.requires_grad_() for x in qkv()]
    forward, backward = trained(fn, *args, dynamic=symbolic)
    assert (forward, backward) == (ATTENTION, ATTENTION.replace("_for_cpu", "_for_cpu_backward"))


def test_a_row_without_keys_is_not_a_number_in_training_either() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    bias = torch.zeros(q.shape[-2], k.shape[-2])
    bias[1] = float("-inf")
    assert len(trained(with_position_bias, q, k, v, bias)) == 2


@pytest.mark.parametrize("fill", [float("-inf"), torch.finfo(torch.float32).min])
@pytest.mark.parametrize("given", [False, True])
def test_no_gradient_flows_through_scores_that_are_replaced(given: bool, fill: float) -> None:
    """Not even in a row of which all are: the fused operator would not know."""
    q, k, v = (x.requires_grad_() for x in qkv())

    def fn(q: Tensor, k: Tensor, v: Tensor, *hidden: Tensor) -> Tensor:
        rows, columns = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        drop = hidden[0] if hidden else (columns > rows) | (rows == 1)
        scores = (q @ k.transpose(-2, -1)).masked_fill(drop, fill)
        return torch.softmax(scores, -1) @ v

    drop = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    drop[1] = True
    found = trained(fn, q, k, v, *([drop] if given else []))
    assert not any("attention" in op for op in found)


def test_attention_in_training_stays_where_others_read_what_is_inside() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    bias = torch.randn(q.shape[-2], k.shape[-2], requires_grad=True)
    assert not any("attention" in op for op in trained(with_position_bias, q, k, v, bias))

    def shown(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(q @ k.transpose(-2, -1), -1)
        return torch.cat((weights @ v, weights.mean(-1, keepdim=True)), -1)

    assert not any("attention" in op for op in trained(shown, q, k, v))

    def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(q @ k.transpose(-2, -1), -1)
        return (weights * torch.linspace(0, 2, weights.shape[-1])) @ v

    assert not any("attention" in op for op in trained(dropped, q, k, v))


def test_attention_is_not_computed_again_in_backward() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(plain, q * 2, k, v, use_reentrant=False).sin()

    forward, backward = trained(fn, *(x.requires_grad_() for x in qkv()))
    assert forward == ATTENTION and backward.endswith("_backward.default")


@symbolic
@pytest.mark.parametrize("rows", [2, 18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_rows_of_nan_stay_so(rows: int, dtype: torch.dtype, symbolic: bool) -> None:
    """Fused attention of the library takes rows of few keys that are all NaN, and in 16 bits rows
    with an infinite score, for hidden ones; one of -inf alone is hidden for the fused operators."""
    compiled = torch.compile(plain, backend=Backend("cpu", cache=False), dynamic=symbolic)
    for keys in (18, 2):
        q, k, v = qkv(dtype=dtype)
        q, k, v = q[..., :rows, :].abs(), k[..., :keys, :].clone(), v[..., :keys, :].clone()
        q[0, 0, 0] = math.nan
        k[1, :, -1, 0] = math.inf
        k[2, ..., 0] = -math.inf
        found = check_tensor(
            compiled(q, k, v), plain(q, k, v), plain(*(x.double() for x in (q, k, v))), Rule()
        )
        assert not found


@symbolic
def test_gradients_of_rows_of_nan_are_nan(symbolic: bool) -> None:
    q, k, v = qkv()
    q, k = q.abs(), k.clone()
    k[2, ..., 0] = -math.inf
    assert (
        trained(plain, *(x.requires_grad_() for x in (q, k, v)), dynamic=symbolic)[0] == ATTENTION
    )


@pytest.mark.parametrize("wanted", [0, 1])
def test_attention_in_training_of_which_one_gradient_is_wanted(wanted: int) -> None:
    args = list(qkv())
    args[wanted].requires_grad_()
    found = trained(plain, *args)
    assert found[0] == ATTENTION and len(found) == 2


def norm_mean(x: Tensor, w: Tensor, b: Tensor, eps: float = 1e-5) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return w * (x - mean) / torch.sqrt(variance + eps) + b


def norm_rsqrt(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    centered = x - mean
    variance = (centered * centered).mean(-1, keepdim=True)
    return b + (centered * torch.rsqrt(variance + 1e-5)) * w


def norm_var(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    variance = x.var(-1, keepdim=True, unbiased=False)
    return w * ((x - x.mean(-1, keepdim=True)) / (variance + 1e-6).sqrt()) + b


@symbolic
@pytest.mark.parametrize("fn", [norm_rsqrt, norm_var])
def test_layer_norm(fn: Any, symbolic: bool) -> None:
    args = torch.randn(3, 5, 16), torch.randn(16), torch.randn(16)
    assert fused(fn, *args, dynamic=symbolic)["aten.native_layer_norm.default"] == 1


def test_layer_norm_without_bias_or_weight() -> None:
    def fn(x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-5)

    assert fused(fn, torch.randn(3, 5, 16))["aten.native_layer_norm.default"] == 1


def test_layer_norm_guards() -> None:
    def other_dim(x: Tensor) -> Tensor:
        centered = x - x.mean(1, keepdim=True)
        return centered * torch.rsqrt(centered.pow(2).mean(1, keepdim=True) + 1e-5)

    def two_inputs(x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return centered * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)

    for fn in (other_dim, two_inputs):
        assert not fused(fn, torch.randn(3, 5, 16))["aten.native_layer_norm.default"]


class RMSNorm(nn.Module):
    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + 1e-6)
        return self.weight * hidden.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@symbolic
def test_rms_norm(dtype: torch.dtype, symbolic: bool) -> None:
    counts = fused(RMSNorm(16, dtype), torch.randn(3, 5, 16, dtype=dtype), dynamic=symbolic)
    assert counts["aten._fused_rms_norm.default"] == 1


GELUS = {
    "erf": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "erf, half last": lambda x: (x * (1 + torch.erf(x * 0.7071067811865476))) / 2,
    "erf, half in gate": lambda x: x * (0.5 * (torch.erf(x / 1.4142135623730951) + 1)),
    "tanh": lambda x: (
        0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))
    ),
    "tanh, fast": lambda x: (
        0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))
    ),
    "tanh, products": lambda x: (
        0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * (x * x * x))))
    ),
}


@symbolic
@pytest.mark.parametrize("name", GELUS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu(name: str, dtype: torch.dtype, symbolic: bool) -> None:
    counts = fused(GELUS[name], torch.randn(7, 5, dtype=dtype), dynamic=symbolic)
    assert counts == {"aten.gelu.default": 1}


@symbolic
def test_int8(symbolic: bool) -> None:
    """Bytes shifted into unsigned ones and back, as torchao writes them, for few rows."""

    def shifted(a: Tensor, b: Tensor) -> Tensor:
        product = torch._int_mm((a.to(torch.int32) + 128).to(torch.uint8), b)
        return product - 128 * b.sum(0, keepdim=True, dtype=torch.int32)

    for rows, fast, added in ((1, False, 0), (2, False, 1), (2, True, 0)):
        a = torch.randint(-128, 128, (rows, 40), dtype=torch.int8)
        b = torch.randint(-128, 128, (24, 40), dtype=torch.int8).t()
        (graph,) = capture(shifted, a, b, dynamic=symbolic)
        counts, _ = rewrite(graph, PASSES, fusions=FAMILIES, fast_signed_int8=fast)
        assert counts["aten._int_mm.default"] == 1
        assert counts["aten.sum.dim_IntList"] == counts["aten.sub.Tensor"] == added


def test_gelu_guards() -> None:
    def other_constant(x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.erf(x / 1.5))

    def gate_used_elsewhere(x: Tensor) -> tuple[Tensor, Tensor]:
        gate = torch.erf(x / math.sqrt(2.0))
        return x * 0.5 * (1.0 + gate), gate

    for fn in (other_constant, gate_used_elsewhere):
        assert not fused(fn, torch.randn(7, 5))["aten.gelu.default"]


ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "decomposed gelu": GELUS["erf"],
}


@symbolic
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_linear(name: str, bias: bool, symbolic: bool) -> None:
    module = nn.Linear(8, 12, bias=bias)
    counts = fused(lambda x: ACTIVATIONS[name](module(x)), torch.randn(3, 5, 8), dynamic=symbolic)
    assert counts["dicp.linear.default"] == 1
    assert set(counts) <= {"dicp.linear.default", "aten.view.default", "<built-in function mul>"}


def test_linear_with_added_bias() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return x @ w + b

    args = torch.randn(3, 5, 8), torch.randn(8, 12), torch.randn(12)
    assert fused(fn, *args)["dicp.linear.default"] == 1
    residual = torch.randn(3, 5, 12)
    assert not fused(fn, *args[:2], residual)["dicp.linear.default"]


@symbolic
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy(dtype: torch.dtype, symbolic: bool) -> None:
    def fn(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x, target)

    target = torch.randint(0, 50, (12,))
    target[3] = -100
    args = torch.randn(12, 50, dtype=dtype) * 100, target
    counts = fused(fn, *args, dynamic=symbolic)
    assert not counts["aten._log_softmax.default"] and counts["aten.amax.default"] == 1


def test_cross_entropy_keeps_a_log_softmax_used_elsewhere() -> None:
    def fn(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.log_softmax(x, -1)
        return F.nll_loss(logits, target), logits

    counts = fused(fn, torch.randn(12, 50), torch.randint(0, 50, (12,)))
    assert counts["aten._log_softmax.default"] == 1


@symbolic
@pytest.mark.parametrize("bias", [True, False])
def test_conv_bn(bias: bool, symbolic: bool) -> None:
    module = nn.Sequential(nn.Conv2d(3, 6, 3, bias=bias), nn.BatchNorm2d(6)).eval()
    nn.init.uniform_(module[1].running_mean)
    nn.init.uniform_(module[1].weight)
    counts = fused(module, torch.randn(2, 3, 16, 16), dynamic=symbolic)
    assert counts["aten.convolution.default"] == 1
    assert not counts["aten._native_batch_norm_legit_no_training.default"]


def test_conv_bn_is_left_where_the_weight_is_the_larger() -> None:
    module = nn.Sequential(nn.Conv2d(16, 64, 3), nn.BatchNorm2d(64)).eval()
    counts = fused(module, torch.randn(1, 16, 5, 5))
    assert counts["aten._native_batch_norm_legit_no_training.default"] == 1


def test_sources_are_joined() -> None:
    (graph,) = capture(GELUS["erf"], torch.randn(7, 5))
    rewrite(graph, PASSES, fusions=FAMILIES)
    (node,) = (n for n in graph.gm.graph.nodes if n.op == "call_function")
    assert len(node.meta["dicp_sources"]) == 5
    assert "test_fuse.py" in node.meta["stack_trace"]


def test_nothing_fires_that_the_target_does_not_want() -> None:
    (graph,) = capture(plain, *qkv())
    _, changed = rewrite(graph, [FUSE], fusions=frozenset())
    assert not changed
