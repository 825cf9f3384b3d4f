"""Targets with few rules: what is decomposed and what runs eagerly fit together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.packages import compiled, folder, target

import dicp
from dicp.compare import assert_matches
from dicp.dynamo_bridge.backend import Backend
from dicp.dynamo_bridge.conversion import operator_row
from dicp.dynamo_bridge.own_decompositions import _attention
from dicp.errors import SimulatorWarning

__all__ = ["folder", "target"]
pytestmark = pytest.mark.filterwarnings("ignore", category=SimulatorWarning)
aten = torch.ops.aten
F32, BF16 = torch.float32, torch.bfloat16
LABELS = torch.tensor([1, 0, 3, 2])


def attention(x: Any, w: Any) -> Any:
    return F.scaled_dot_product_attention(x, x * 0.5, x + w.sum(), is_causal=True)


def batch_norm(x: Any, w: Any) -> Any:
    return F.batch_norm(x, torch.zeros(6, dtype=w.dtype), torch.ones(6, dtype=w.dtype), w, w, True)


def margin(x: Any, w: Any) -> Any:
    labels = torch.tensor([[3, 0, -1, 1], [1, -1, 0, 2], [-1, 1, 2, 3]])
    return F.multilabel_margin_loss(x * w, labels, reduction="none")


CASES = {
    "attention": (attention, (1, 2, 8, 16), (1,)),
    "layer_norm": (lambda x, w: F.layer_norm(x, (8,), w, w), (4, 8), (8,)),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w, w), (2, 6, 5), (6,)),
    "batch_norm": (batch_norm, (4, 6, 5), (6,)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (8,), w), (4, 8), (8,)),
    "max_pool": (lambda x, w: F.max_pool2d(x * w, 3, 2, 1), (1, 2, 7, 7), (1,)),
    "adaptive_max_pool": (lambda x, w: F.adaptive_max_pool2d(x * w, (4, 2)), (1, 2, 8, 8), (1,)),
    "log_sigmoid": (lambda x, w: F.logsigmoid(x * w), (9,), (1,)),
    "nll_loss": (lambda x, w: F.cross_entropy(x * w, LABELS, ignore_index=3), (4, 4), (1,)),
    "margin": (margin, (3, 4), (1,)),
    "weight_norm": (lambda x, w: torch._weight_norm(x, w, 0), (3, 4), (3, 1)),
    "embedding_bag": (lambda x, w: F.embedding_bag(LABELS, x * w, torch.tensor([0, 2]),
                                                   mode="max"), (4, 4), (1,)),
    "logsumexp": (lambda x, w: (x * w).logsumexp(-1), (4, 8), (1,)),
    "std_mean": (lambda x, w: sum(torch.std_mean(x * w, 1)), (4, 8), (1,)),
}  # fmt: skip


STATED = {
    aten.erf.default: torch.erf,
    aten.cumsum.default: lambda x: x.cumsum(0),
    aten.native_layer_norm.default: lambda x: F.layer_norm(x, (4,)),
    aten.addmm.default: lambda x: torch.addmm(x, x, x),
    aten.index_select.default: lambda x: x.index_select(0, LABELS),
}


@pytest.mark.parametrize("op", STATED, ids=str)
def test_the_table_of_operators_says_what_is_done(op: Any, target: Any) -> None:
    """A decomposition that ends in primitives without rules is refused: the operator is eager."""
    (report,) = dicp.explain(STATED[op], torch.randn(4, 4), backend=target.name).reports
    is_eager = any(node.op == str(op) and node.decision == "eager" for node in report.nodes)
    assert operator_row(op, target).decision == ("eager" if is_eager else "decomposed")


@pytest.mark.sweep
@pytest.mark.parametrize(("dtype", "weights"), [(F32, F32), (BF16, F32)], ids=["one", "mixed"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_where_one_of_a_pair_is_eager(
    name: str, dtype: torch.dtype, weights: torch.dtype, target: Any
) -> None:
    """A forward operator leaves for its gradient what that reads, whichever of them is compiled."""
    fn, shape, weight_shape = CASES[name]
    mixed = dtype != weights
    if mixed and not name.endswith("norm"):
        weights = dtype
    if mixed and name in ("margin", "weight_norm"):
        pytest.skip("eager has no kernel for bfloat16")
    x, w = torch.randn(shape, dtype=dtype), torch.rand(weight_shape, dtype=weights) + 0.5

    def results(function: Any, wide: bool = False) -> list[torch.Tensor]:
        leaves = [(t.double() if wide else t.clone()).requires_grad_() for t in (x, w)]
        out = function(*leaves)
        seed = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).reshape(out.shape)
        return [out, *torch.autograd.grad((out * seed.to(out.dtype)).sum(), leaves)]

    eager, exact = results(fn), results(fn, wide=True)
    for got, own, best in zip(results(compiled(target, fn)), eager, exact, strict=True):
        assert got.dtype == own.dtype
        assert_matches(got, own, best)


def test_symbolic_sizes_are_compiled_once(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that says it takes symbolic sizes gets one graph for all of them."""
    monkeypatch.setattr(type(target), "facts", replace(target.facts, symbolic_shapes=True))
    backend = Backend(target.name, cache=False)

    def fn(x: Any, y: Any) -> Any:
        return (torch.relu(x) * y).sum(-1).view(-1, 1).expand(x.shape) + x

    compiled = torch.compile(fn, backend=backend, dynamic=True)
    for rows in (4, 6, 10):
        x, y = torch.randn(rows, 8), torch.randn(8)
        torch.testing.assert_close(compiled(x, y), fn(x, y))
    (report,) = backend.reports
    assert not report.counts["eager"], report


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float64])
@pytest.mark.parametrize("given", ["plain", "causal", "mask", "scale", "shared heads", "strided"])
def test_decomposed_attention_leaves_what_eager_leaves(given: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 4, 6, 8, dtype=dtype) for _ in range(3))
    options: dict[str, Any] = {
        "causal": {"is_causal": True}, "scale": {"scale": 0.3},
        "mask": {"attn_mask": torch.randn(2, 1, 6, 6, dtype=dtype)},
    }.get(given, {})  # fmt: skip
    if given == "shared heads":
        k, v = k[:, :2], v[:, :2]
    if given == "strided":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    own = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **options)
    for found, expected in zip(_attention(q, k, v, **options), own, strict=True):
        assert found.dtype == expected.dtype and found.stride() == expected.stride()
        near = {"atol": 1e-2, "rtol": 1e-2} if dtype == BF16 else {}
        torch.testing.assert_close(found, expected, **near)
