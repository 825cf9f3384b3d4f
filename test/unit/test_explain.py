"""`dicp.explain`: every operator with its decision, every kernel with its sources."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.forked import COMPILER, server
from torch import Tensor, nn
from torch._decomp import decompositions
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import dicp
from dicp.dynamo_bridge.backend import cpugraph
from dicp.torch_private import GraphBreaks


def mixed(x: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(x.relu() @ x.T).exp() + 1


def test_every_operator_has_a_decision() -> None:
    explanation = dicp.explain(mixed, torch.rand(4, 4))
    assert len(explanation.reports) == 1
    nodes = {node.op: node for node in explanation.reports[0].nodes}
    assert nodes["aten.relu.default"].decision == "compiled"
    assert nodes["aten.mm.default"].decision == "library"
    eager = [node for node in nodes.values() if node.decision == "eager"]
    assert eager and all(node.reason for node in eager)
    assert explanation.counts["eager"] == len(eager)
    assert explanation.counts["fused"] >= 2


def test_text_shows_eager_operators_with_reason_and_line() -> None:
    text = str(dicp.explain(mixed, torch.rand(4, 4)))
    (line,) = [row for row in text.splitlines() if row.strip().startswith("eager:")]
    assert "linalg_eigh" in line and "no rule" in line
    assert "test_explain.py:" in line, "the user's line"
    assert "kernel" in text and "aten.relu.default" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flex_attention_with_a_mask_is_one_fused_operator(dtype: torch.dtype) -> None:
    mask = create_block_mask(lambda b, h, i, j: i - j < 9, None, None, 64, 64, device="cpu")
    q = torch.randn(1, 2, 64, 16, dtype=dtype)
    with torch.no_grad():
        explanation = dicp.explain(lambda q: flex_attention(q, q, q, block_mask=mask), q)
    decisions = {node.op: node.decision for node in explanation.reports[0].nodes}
    assert decisions["aten._scaled_dot_product_flash_attention_for_cpu.default"] == "library"
    assert explanation.counts["eager"] == 0 and "aten._safe_softmax.default" not in decisions


def test_backward_is_explained_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    explanation = dicp.explain(model, torch.rand(2, 4))
    assert [r.kind for r in explanation.reports] == ["forward", "backward"]
    assert all(p.grad is None for p in model.parameters()), "the model is left as it was"


def test_target_and_options_can_be_named() -> None:
    fused = dicp.explain(F.gelu, torch.rand(8), backend="cpu", dynamic=True)
    assert fused.reports[0].kernels


def test_explain_is_a_function_however_it_is_imported() -> None:
    lines = (
        "import dicp; dicp.explain; assert callable(dicp.explain)",
        "import dicp.explain; assert callable(dicp.explain)",
        "from dicp.explain import Explanation; from dicp import explain; assert callable(explain)",
    )
    for line in lines:
        server(*COMPILER).run(["-c", line], check=True)


def test_importing_the_package_costs_nothing() -> None:
    line = "import sys, dicp; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", line], check=True)


def broken(x: Tensor) -> Tensor:
    y = x.relu()
    if torch.equal(y, x):  # depends on data
        return y
    for step in range(2):
        y = y * step
        str(id(y))
    return y


def test_what_never_reached_the_backend_is_listed_with_line_and_reason() -> None:
    explanation = dicp.explain(broken, torch.randn(8), backend="cpu")
    places = {found.place.rsplit("/", 1)[1]: found for found in explanation.breaks}
    line = broken.__code__.co_firstlineno + 2
    assert "Data dependent operator" in places[f"test_explain.py:{line}"].reason
    assert f"test_explain.py:{line}: Data dependent operator: " in str(explanation)


@pytest.fixture
def recurrent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undoes what the option sets for the process."""
    name = "select_one_layer_lstm_function"
    monkeypatch.setattr(decompositions, name, getattr(decompositions, name))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=False):
        yield


def test_recurrent_modules_name_the_cure(recurrent: None) -> None:
    layer = nn.GRU(3, 4)

    def fn(x: Tensor) -> Tensor:
        return layer(x)[0] * 2

    text = str(dicp.explain(fn, torch.rand(2, 1, 3), backend="cpu"))
    (at,) = (row for row in text.splitlines() if row.startswith("graph break"))
    assert f"test_explain.py:{fn.__code__.co_firstlineno + 1}: Attempted to wrap RNN" in at
    assert "set rnn=True (DICP_RNN=1" in text


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_are_traced_if_asked_for(kind: Any, recurrent: None) -> None:
    torch.manual_seed(0)
    layer, x = kind(3, 4, num_layers=2), torch.randn(3, 2, 3)
    reports = cpugraph.reports
    reports.clear()
    options: dict[str, Any] = {"rnn": True, "cache": False}
    compiled = torch.compile(layer, backend="cpugraph", options=options)
    weights = list(layer.parameters())
    results = [
        (out, *torch.autograd.grad(out.square().sum(), weights))
        for out in (layer(x)[0], compiled(x)[0])
    ]
    torch.testing.assert_close(*results)
    assert [r.kind for r in reports] == ["forward", "backward"]
    assert all(r.counts["eager"] == 0 for r in reports)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]))
    torch.testing.assert_close(compiled(packed)[0].data, layer(packed)[0].data)


def test_the_exit_report_lists_graph_breaks() -> None:
    program = (
        "import torch\n"
        "layer = torch.nn.RNN(2, 2)\n"
        "torch.compile(layer, backend='cpugraph', options={'timings': True})(torch.rand(1, 1, 2))\n"
    )
    done = server(*COMPILER).run(["-c", program], check=True)
    assert "graph break at RNN(2, 2)" in done.stderr and "set rnn=True" in done.stderr


def test_a_failure_before_any_function_is_listed_without_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("fail_user_frame_filename", "co_filename", "fail_user_frame_lineno", "co_firstlineno")
    breaks = GraphBreaks()
    failed = SimpleNamespace(fail_reason="no such codec", **dict.fromkeys(names))
    monkeypatch.setattr(GraphBreaks, "_metrics", staticmethod(lambda: [failed]))
    assert [(b.reason, b.skipped) for b in breaks.found()] == [("no such codec", True)]
