"""Attention becomes GE's fused operators where they take it, and stays right where they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ascend_recorder import record
from ascend_simulated import check
from torch import Tensor

from dicp.errors import PrototypeError, SemanticsError
from dicp.rules import NoRule
from dicp.vendor.ascend.rules.core import Ge
from dicp.vendor.ascend.semantics import SEMANTICS

pytestmark = pytest.mark.sweep

sdpa = F.scaled_dot_product_attention

FUSED = ("FlashAttentionScore", "FlashAttentionScoreGrad", "PromptFlashAttention",
         "IncreFlashAttention")  # fmt: skip


def heads(
    *shape: int, grad: bool = False, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed + len(shape) * sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


def qkv(rows: int = 6, columns: int = 9, grad: bool = False, **options: Any) -> list[Tensor]:
    sizes = [(2, 4, rows, 16), (2, 4, columns, 16), (2, 4, columns, 16)]
    return [heads(*size, grad=grad, seed=k, **options) for k, size in enumerate(sizes)]


def fused(fn: Any, *inputs: Any, **options: Any) -> list[str]:
    kinds = record(fn, *inputs, **options).kinds()
    return [kind for kind in FUSED for _ in range(kinds[kind])]


TRAINING = ["FlashAttentionScore", "FlashAttentionScoreGrad"]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, is_causal=True)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k[:, :2], v[:, :2], enable_gqa=True)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return sdpa(q, k, v, mask)


def padding() -> Tensor:
    """The second batch sees five keys."""
    return torch.tensor([[True] * 9, [True] * 5 + [False] * 4])[:, None, None]


def blind_rows() -> Tensor:
    return torch.arange(6)[:, None].expand(6, 9) > 1


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_plain_attention_is_fused(dtype: torch.dtype, grad: bool) -> None:
    expected = TRAINING if grad else ["PromptFlashAttention"]
    assert fused(sdpa, *qkv(grad=grad, dtype=dtype)) == expected
    check(sdpa, *qkv(grad=grad, dtype=dtype))


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("columns", [6, 9])
def test_causal_attention_carries_its_mask(columns: int, grad: bool) -> None:
    inputs = qkv(columns=columns, grad=grad)
    target = record(causal, *inputs)
    calls = [n for n in target.operators() if n.kind in FUSED]
    assert len(calls) == (2 if grad else 1)
    for call in calls:
        assert "atten_mask" in call.inputs
        reach = {call.attrs.get(name) for name in ("next_tokens", "next_tockens")} - {None}
        assert reach == {0 if columns == 6 else 2147483647}
    check(causal, *inputs)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("mask", [padding, blind_rows])
def test_boolean_masks_go_to_the_fused_operator(mask: Any, grad: bool) -> None:
    inputs = [*qkv(grad=grad), mask()]
    assert fused(masked, *inputs) == (TRAINING if grad else ["PromptFlashAttention"])
    check(masked, *inputs)


def test_masks_are_saved_for_backward_as_booleans() -> None:
    target = record(masked, *qkv(grad=True), padding())
    backward = target.programs[1].graphs[0]
    dtypes = [n.outputs[0].dtype for n in backward.inputs]
    assert torch.bool in dtypes
    assert [tuple(n.outputs[0].shape) for n in backward.inputs].count((2, 1, 1, 9)) == 1


def test_a_mask_per_head() -> None:
    mask = torch.rand(2, 4, 6, 9, generator=torch.Generator().manual_seed(3)) > 0.3
    assert fused(masked, *qkv(grad=True), mask) == TRAINING
    assert fused(masked, *qkv(), mask) == []
    for grad in (False, True):
        check(masked, *qkv(grad=grad), mask)


def test_grouped_heads() -> None:
    target = record(grouped, *qkv())
    (call,) = (n for n in target.operators() if n.kind in FUSED)
    assert (call.attrs["num_heads"], call.attrs["num_key_value_heads"]) == (4, 2)
    for grad in (False, True):
        check(grouped, *qkv(grad=grad))


def test_one_query_on_a_cache() -> None:
    assert fused(sdpa, *qkv(rows=1)) == ["IncreFlashAttention"]
    assert fused(masked, *qkv(rows=1), padding()) == ["IncreFlashAttention"]
    assert fused(sdpa, *qkv(rows=1, columns=1)) == ["PromptFlashAttention"]
    check(masked, *qkv(rows=1), padding())


def test_attention_decomposed_is_fused() -> None:
    def decomposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)).float() * 0.25
        return scores.softmax(-1).to(q.dtype) @ v

    # The operator for training tells which rows have no score: they are NaN here, else 0.
    assert fused(decomposed, *qkv()) == ["FlashAttentionScore"]
    check(decomposed, *qkv())


@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        (sdpa, lambda g: qkv(grad=g, dtype=torch.float32)),
        (sdpa, lambda g: [heads(2, 4, 6, 20, grad=g) for _ in "qkv"]),
        (masked, lambda g: [*qkv(grad=g), heads(6, 9, dtype=torch.float32)]),
    ],
    ids=["float32", "odd_width", "added_mask"],
)
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_what_the_fused_operators_do_not_take_is_decomposed(
    fn: Any, inputs: Any, grad: bool
) -> None:
    given = inputs(grad)
    kinds = record(fn, *given).kinds()
    assert kinds["BatchMatMulV2"] >= 2 and not any(kinds[kind] for kind in FUSED)
    check(fn, *given)


def test_symbolic_rows() -> None:
    inputs = qkv(columns=6, grad=True)
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 2)
        for dim in (0, 1, 3):
            torch._dynamo.mark_static(tensor, dim)
    assert fused(causal, *inputs, dynamic=True) == TRAINING
    check(causal, *inputs, dynamic=True)


def test_heads_stay_beside_their_width() -> None:
    """No transpose is left where linear layers make queries, keys and values."""

    def layer(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = F.linear(x, w).unflatten(-1, (3, 4, 16)).unbind(2)
        out = sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return out.transpose(1, 2).flatten(2)

    inputs = [heads(2, 6, 8), heads(192, 8)]
    target = record(layer, *inputs)
    (call,) = (n for n in target.operators() if n.kind in FUSED)
    assert call.attrs["input_layout"] == "BSH" and target.kinds()["Transpose"] == 0
    check(layer, *inputs)


def test_rotary_embedding_keeps_heads_beside_their_width() -> None:
    def layer(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = x.unflatten(-1, (4, 16)).transpose(1, 2)
        half = torch.cat([-q[..., 8:], q[..., :8]], -1)
        return sdpa(q * cos + half * sin, q, q).transpose(1, 2).flatten(2)

    shapes = ((2, 6, 64), (2, 1, 6, 16), (2, 1, 6, 16))
    inputs = [heads(*s, dtype=torch.float16) for s in shapes]  # RotaryMul takes no bfloat16
    kinds = record(layer, *inputs).kinds()
    assert kinds["RotaryMul"] == 1 and kinds["Transpose"] == 0
    check(layer, *inputs)


# ---- what the operators themselves demand --------------------------------------------------------


def leaf(g: Ge, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return g.full(list(shape), 1, dtype)


def test_violations_of_the_prototypes() -> None:
    g = Ge(None)
    q = leaf(g, 1, 2, 4, 16)
    attrs = {"head_num": 2, "input_layout": "BNSD"}
    with pytest.raises(PrototypeError, match="'head_num' is missing"):
        g.op("FlashAttentionScore", q, q, q, input_layout="BNSD")
    with pytest.raises(PrototypeError, match="no attribute 'sparse_mode'"):
        g.op("FlashAttentionScore", q, q, q, **attrs, sparse_mode=2)
    with pytest.raises(PrototypeError, match="takes a list of tensors"):
        g.op("IncreFlashAttention", q, q, q, num_heads=2)
    with pytest.raises(PrototypeError, match="input 'key' is float16, but 'query' is bfloat16"):
        g.op("PromptFlashAttention", q, g.cast(q, torch.float16), q, num_heads=2)
    with pytest.raises(NoRule, match="does not take float32"):
        wide = leaf(g, 1, 2, 4, 16, dtype=torch.float32)
        g.op("PromptFlashAttention", wide, wide, wide, num_heads=2)
    with pytest.raises(SemanticsError, match="the mask has the sizes of the scores"):
        none = (None, None, None)
        g.op("FlashAttentionScore", q, q, q, *none, leaf(g, 4, 1, dtype=torch.bool), **attrs)


def test_a_row_without_keys_has_no_result() -> None:
    """So a rule that leaves such rows to the operator fails its tests."""
    q = torch.ones(1, 1, 2, 16)
    mask = torch.tensor([[True, True], [False, True]])
    out = SEMANTICS["FlashAttentionScore"].function(
        q, q, q, None, None, None, mask, head_num=1, input_layout="BNSD"
    )[3]
    assert out[0, 0, 0].isnan().all() and out[0, 0, 1].isfinite().all()


@pytest.mark.parametrize("layout", ["BSND", "BSH"])
def test_layouts_give_the_same_numbers(layout: str) -> None:
    function = SEMANTICS["FlashAttentionScore"].function
    x = [t.float() for t in qkv()]
    shown = [t.transpose(1, 2) if layout == "BSND" else t.transpose(1, 2).flatten(2) for t in x]
    rest = (None, None, None, None)
    plain = function(*x, *rest, head_num=4, input_layout="BNSD")
    other = function(*shown, *rest, head_num=4, input_layout=layout)
    assert torch.equal(plain[0], other[0])
    assert torch.equal(plain[3].transpose(1, 2).flatten(), other[3].flatten())


def test_gradients_of_wholly_hidden_rows(dynamic: bool) -> None:
    """A row hidden by a large negative number has equal probabilities; the count is divided by
    once."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = torch.arange(q.shape[2])[:, None].expand(q.shape[2], k.shape[2]) % 3 == 1
        mask = torch.where(hidden, torch.finfo(torch.float32).min, 0.0).to(q.dtype)
        return ((q @ k.mT) * 0.25 + mask).softmax(-1) @ v

    check(fn, *qkv(grad=True, dtype=torch.float32), dynamic=dynamic)
