"""Attention masks that are constants become the causal flag; chosen ones are saved as booleans."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from recorder import Recorder, record
from support.graphs import capture
from torch import Tensor, fx

from dicp.dynamo_bridge.attention.mask_values import is_roundable, numbers_of


def qkv(columns: int = 6, grad: bool = True) -> list[Tensor]:
    return [torch.randn(1, 2, n, 8, requires_grad=grad) for n in (6, columns, columns)]


def lower_triangle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None]
    return F.scaled_dot_product_attention(q, k, v, mask)


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    gap = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
    return F.scaled_dot_product_attention(q, k, v, gap.abs() < 3)


def attention_of(gm: fx.GraphModule) -> fx.Node:
    (node,) = (n for n in gm.graph.nodes if "dot_product" in str(n.target))
    return node


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("exact", [False, True], ids=["alone", "beside_the_mask"])
def test_a_constant_lower_triangle_is_a_flag(exact: bool, grad: bool) -> None:
    target = Recorder()
    attention = dataclasses.replace(target.facts.attention["cpu"], exact_masks=exact)
    target.facts = dataclasses.replace(target.facts, attention={"cpu": attention})
    nodes = [
        attention_of(gm) for gm in record(lower_triangle, *qkv(grad=grad), target=target)._graphs
    ]
    assert len(nodes) == (2 if grad else 1)
    for node in nodes:
        assert node.args[-1] is True and ("attn_mask" in node.kwargs) == exact


@pytest.mark.parametrize("fn", [window, lower_triangle])
def test_other_constants_stay_masks(fn: object) -> None:
    columns = 6 if fn is window else 9
    for gm in record(fn, *qkv(columns))._graphs:  # type: ignore[arg-type]
        assert "attn_mask" in attention_of(gm).kwargs


@pytest.mark.parametrize("fuse", [False, True])
def test_forward_saves_the_booleans(fuse: bool) -> None:
    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask)

    target = Recorder()
    target.facts = dataclasses.replace(target.facts, recomputes_operands=False)
    mask = torch.rand(6, 6) > 0.2
    backward = record(masked, *qkv(), mask, fuse=fuse, target=target)._graphs[1]
    saved = [n.meta["val"] for n in backward.graph.nodes if n.op == "placeholder"]
    assert any(value.dtype == torch.bool for value in saved) == fuse
    chosen = attention_of(backward).kwargs["attn_mask"]
    assert isinstance(chosen, fx.Node) and (chosen.op == "placeholder") != fuse


@pytest.mark.parametrize(
    ("test", "factor", "kept"),
    [
        (torch.int64, -0.0137, ()),  # distances between positions: rounded, they differ
        (torch.int64, 1.0, ()),
        (torch.int64, -1e4, (torch.bfloat16,)),  # seven times -1e4 is more than float16 holds
        (torch.bool, -1e4, (torch.bfloat16, torch.float16)),
        (torch.bool, -0.5, (torch.bfloat16, torch.float16)),
        (torch.bool, torch.finfo(torch.float32).min, (torch.bfloat16,)),
    ],
)
@pytest.mark.parametrize("inverted", [False, True])
def test_masks_of_integers_are_not_taken_for_zeros_and_ones(
    test: torch.dtype, factor: float, kept: tuple[torch.dtype, ...], inverted: bool
) -> None:
    def mask(x: Tensor) -> Tensor:
        x = x.to(torch.int64)[None].float()
        return (1 - x) * factor if inverted else x * factor

    (graph,) = capture(mask, torch.ones(6, 6, dtype=test))
    (bias,) = graph.gm.graph.output_node().all_input_nodes
    for dtype in (torch.bfloat16, torch.float16):
        assert is_roundable(bias, dtype) == (dtype in kept)
    assert (numbers_of(bias) is None) == (test != torch.bool)
