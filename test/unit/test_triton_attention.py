"""Attention on GPUs, as far as fake tensors of a GPU tell: what is fused, what is called, and how.

Without a GPU PyTorch itself never chooses a fused operator, so the choice is given here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from dicp.config import Config
from dicp.dynamo_bridge.analysis.inference import Inference
from dicp.dynamo_bridge.attention.training import TRAINING_ATTENTION
from dicp.dynamo_bridge.fuse.families import FUSE
from dicp.dynamo_bridge.passes.base import PassContext, run_passes
from dicp.dynamo_bridge.passes.canonicalize import CANONICALIZE
from dicp.dynamo_bridge.passes.redundancy import merge_equal_nodes
from dicp.gpu.graph_capture import capture_obstacle
from dicp.target import LowerContext
from dicp.vendor.triton import TritonTarget

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
CUDNN = aten._scaled_dot_product_cudnn_attention.default


def decomposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(32), -1) @ v


def with_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) * 0.5 + mask, -1) @ v


def flash(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """As PyTorch does for 16-bit heads whose size is no multiple of 8."""
    size = q.shape[-1]
    q, k, v = (F.pad(x, (0, -size % 8)) for x in (q, k, v))
    out = FLASH(q, k, v, 0.0, options["is_causal"], scale=options["scale"])[0]
    return aten.slice.Tensor(out, -1, 0, size)


def efficient(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    mask = options["attn_mask"]
    mask = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
    return EFFICIENT(q, k, v, mask, False, scale=options["scale"])[0]


def traced(
    fn: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype, rows_change: bool = False
) -> Any:
    """`fn`'s graph on fake tensors of a GPU."""
    with FakeTensorMode(shape_env=ShapeEnv()) as fake:
        if rows_change:
            free = StatelessSymbolicContext([DimDynamic.DYNAMIC] * 2 + [DimDynamic.STATIC])
            first = fake.from_tensor(torch.empty(shapes[0]), symbolic_context=free)
            shapes = (first.shape,) * len(shapes)
        inputs = [torch.empty(shape, device="cuda:0", dtype=dtype) for shape in shapes]
        return make_fx(fn)(*inputs)


def fused(gm: Any) -> list[Any]:
    context = PassContext(TritonTarget.facts, Config(), "inference", Inference.of(gm))
    run_passes(gm, (CANONICALIZE, FUSE, CANONICALIZE), context)
    return [n.target for n in gm.graph.nodes if n.op == "call_function"]


HEADS = [(2, 4, 64, 32)] * 3


def test_the_operator_is_the_one_that_the_framework_chooses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for choice, op in ((flash, FLASH), (efficient, EFFICIENT)):
        gm = traced(decomposed, *HEADS, dtype=torch.bfloat16)
        monkeypatch.setattr(F, "scaled_dot_product_attention", choice)
        targets = fused(gm)
        assert op in targets and aten.bmm.default not in targets
        (call,) = gm.graph.find_nodes(op="call_function", target=op)
        assert call.kwargs["scale"] == pytest.approx(1 / math.sqrt(32))


def test_what_the_framework_pads_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = traced(decomposed, *[(2, 4, 64, 36)] * 3, dtype=torch.float16)
    monkeypatch.setattr(F, "scaled_dot_product_attention", flash)
    targets = fused(gm)
    assert targets.count(aten.constant_pad_nd.default) == 3 and FLASH in targets
    assert gm.graph.output_node().args[0].meta["val"].shape == (2, 4, 64, 36)


def test_a_mask_goes_along_in_the_type_of_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = traced(with_mask, *HEADS, (2, 1, 64, 64), dtype=torch.bfloat16)
    monkeypatch.setattr(F, "scaled_dot_product_attention", efficient)
    assert EFFICIENT in fused(gm)
    (call,) = gm.graph.find_nodes(op="call_function", target=EFFICIENT)
    assert call.args[3].meta["val"].shape == (2, 4, 64, 64)
    assert call.args[3].meta["val"].dtype == torch.bfloat16


def hides_later_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = torch.ones(64, 64, dtype=torch.bool, device=q.device).tril()
    mask = torch.where(keep, 0.0, float("-inf")).to(q.dtype)
    return with_mask(q, k, v, mask)


def test_a_causal_mask_made_on_the_gpu_is_seen_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = traced(hides_later_keys, *HEADS, dtype=torch.bfloat16)
    monkeypatch.setattr(F, "scaled_dot_product_attention", flash)
    targets = fused(gm)
    assert FLASH in targets and aten.bmm.default not in targets
    (call,) = gm.graph.find_nodes(op="call_function", target=FLASH)
    assert call.args[4] is True
    assert aten.le.Tensor not in targets and aten.tril.default not in targets
    assert targets.count(aten.where.self) == 1  # of rows with a score that the mask leaves NaN


def test_without_a_fused_operator_the_graph_stays() -> None:
    gm = traced(decomposed, *HEADS, dtype=torch.bfloat16)
    assert fused(gm).count(aten.bmm.default) == 2  # nobody is here to say that flash would do


# ---- training ------------------------------------------------------------------------------------


def joint(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *mask: Tensor) -> tuple[Tensor, ...]:
    """Forward and backward as automatic differentiation writes them."""
    kt = k.transpose(1, 2)
    scores = torch.bmm(q, kt) * 0.25
    scores = scores + mask[0] if mask else scores
    weights = aten._softmax.default(scores, -1, False)
    out = torch.bmm(weights, v)
    dv = torch.bmm(weights.transpose(1, 2), grad)
    back = torch.bmm(grad, v.transpose(1, 2))
    back = aten._softmax_backward_data.default(back, weights, -1, q.dtype) * 0.25
    dq, dk = torch.bmm(back, kt.transpose(1, 2)), torch.bmm(q.transpose(1, 2), back)
    return out, dq, dk.transpose(1, 2), dv


def as_flash(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return FLASH(q, k, v, 0.0, options["is_causal"], scale=options["scale"])[0]


def as_efficient(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    mask = options["attn_mask"]
    mask = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
    return EFFICIENT(q, k, v, mask, False, scale=options["scale"])[0]


def as_cudnn(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return CUDNN(q, k, v, options["attn_mask"], False, scale=options["scale"])[0]


def trained(gm: Any) -> list[Any]:
    context = PassContext(TritonTarget.facts, Config(), "joint", Inference.of(gm))
    run_passes(gm, (TRAINING_ATTENTION, CANONICALIZE), context, verify=True)
    return [n.target for n in gm.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("choice", [as_flash, as_efficient, as_cudnn])
@pytest.mark.parametrize("rows_change", [False, True])
def test_decomposed_attention_in_training_becomes_the_frameworks_pair(
    choice: Any, rows_change: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gm = traced(joint, *[(8, 64, 32)] * 4, dtype=torch.bfloat16, rows_change=rows_change)
    monkeypatch.setattr(F, "scaled_dot_product_attention", choice)
    targets = trained(gm)
    names = [t.overloadpacket.__name__ for t in targets if "attention" in str(t)]
    assert len(names) == 2 and names[1] == f"{names[0]}_backward"
    assert not {aten.bmm.default, aten._softmax.default} & set(targets)
    forward, backward = (n for n in gm.graph.nodes if "attention" in str(n.target))
    assert backward.args[1:4] == forward.args[:3] and backward.kwargs["scale"] == 0.25
    saved = [n for n in backward.all_input_nodes if n.args[0] is forward]
    assert saved and all(isinstance(n.meta["val"], Tensor) for n in saved)
    results = gm.graph.output_node().args[0]
    assert [str(r.meta["val"].shape) for r in results] == [str(results[0].meta["val"].shape)] * 4


def test_a_mask_goes_along_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = traced(joint, *[(8, 64, 32)] * 4, (64, 64), dtype=torch.bfloat16)
    monkeypatch.setattr(F, "scaled_dot_product_attention", as_efficient)
    targets = trained(gm)
    assert aten.bmm.default not in targets
    forward, backward = (n for n in gm.graph.nodes if "attention" in str(n.target))
    assert backward.args[4] is forward.args[3] and backward.args[10] == [True] * 3 + [False]
    # Nobody knows whether the mask hides all keys of a row: by -inf, it would be NaN, and what it
    # reaches; by a low number, keys share it.
    assert targets.count(aten.where.self) == 3


def shown(*inputs: Tensor) -> tuple[Tensor, ...]:
    """The probabilities are a result, too."""
    q, k = inputs[:2]
    weights = aten._softmax.default(torch.bmm(q, k.transpose(1, 2)) * 0.25, -1, False)
    return *joint(*inputs), weights


def masked_with_gradient(*inputs: Tensor) -> tuple[Tensor, ...]:
    q, k, v, grad, mask = inputs
    weights = aten._softmax.default(torch.bmm(q, k.transpose(1, 2)) * 0.25 + mask, -1, False)
    back = torch.bmm(grad, v.transpose(1, 2))
    back = aten._softmax_backward_data.default(back, weights, -1, q.dtype)
    return *joint(*inputs), back.sum(0)


@pytest.mark.parametrize(("fn", "extra"), [(shown, []), (masked_with_gradient, [(64, 64)])])
def test_what_others_read_stays_decomposed(
    fn: Any, extra: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gm = traced(fn, *[(8, 64, 32)] * 4, *extra, dtype=torch.bfloat16)
    merge_equal_nodes(gm.graph)
    monkeypatch.setattr(F, "scaled_dot_product_attention", as_efficient)
    before = [str(n.target) for n in gm.graph.nodes]
    context = PassContext(TritonTarget.facts, Config(), "joint", Inference.of(gm))
    assert not run_passes(gm, (TRAINING_ATTENTION,), context)
    assert [str(n.target) for n in gm.graph.nodes] == before


# ---- the calls -----------------------------------------------------------------------------------


def call_flash(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Any:
    out, lse, cum_q, cum_k, max_q, max_k, state, offset, _ = FLASH(q, k, v, 0.0, True)
    back = aten._scaled_dot_product_flash_attention_backward.default(
        grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, True, state, offset
    )
    return out * 2, *back


def call_efficient(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Any:
    out, lse, seed, offset = EFFICIENT(q, k, v, None, True)
    back = aten._scaled_dot_product_efficient_attention_backward.default(
        grad, q, k, v, None, out, lse, seed, offset, 0.0, [True, True, True, False]
    )
    return out * 2, *back[:3]


def call_cudnn(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Any:
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = CUDNN(q, k, v, None, True)
    back = aten._scaled_dot_product_cudnn_attention_backward.default(
        grad, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, False
    )
    return out * 2, *back


@pytest.mark.parametrize("fn", [call_flash, call_efficient, call_cudnn])
def test_overloads_of_forward_and_backward_are_called(fn: Any) -> None:
    gm = traced(fn, *HEADS, (2, 4, 64, 32), dtype=torch.bfloat16)
    expected = [r.meta["val"].stride() for r in gm.graph.output_node().args[0]]
    program = TritonTarget().lower(gm, LowerContext(Config(), "inference"))
    steps = program.serialized["steps"]
    names = [s["call"] for s in steps if "call" in s]
    assert len(names) == 2 and all("_scaled_dot_product_" in name for name in names)
    assert {n.decision for n in program.nodes if "attention" in n.op} == {"library"}
    assert program.serialized["device"] == "cuda:0" and not capture_obstacle(program.serialized)
    buffers, outputs = program.serialized["buffers"], program.serialized["outputs"]
    strides = [tuple(buffers[o["ref"]]["strides"]) for o in outputs]
    assert strides == [tuple(e) for e in expected]
