"""`dicp.explain`: every operator with its decision, every kernel with its sources."""

from __future__ import annotations

import subprocess
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dicp


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
        subprocess.run([sys.executable, "-c", line], check=True)


def test_importing_the_package_costs_nothing() -> None:
    line = "import sys, dicp; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", line], check=True)
