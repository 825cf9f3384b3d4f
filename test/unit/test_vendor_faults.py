"""What a vendor's package does wrong is said in an error that names the call, never accepted."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from support.packages import NAMES, compiled, folder, target

from dicp.errors import FallbackWarning, RuleError, RunStatusError, SimulatorWarning

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore", category=SimulatorWarning)
__all__ = ["folder", "target"]


def with_rule(target: Any, op: Any, rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = target.rules.merged()
    rules.add(op, rule)
    monkeypatch.setattr(type(target), "rules", rules)


def broken(b: Any, x: Any) -> Any:
    return {}["no such key"]


def wide(b: Any, x: Any) -> Any:
    return b.cast(x, torch.float64)


FAULTS = {
    "raises": (broken, "raises KeyError: 'no such key'"),
    "nothing": (lambda b, x: None, r"returns None where eager gives float32\[2, 3\]"),
    "dtype": (wide, "float64"),
    "number": (lambda b, x: 4.0, r"returns float where eager gives float32\[2, 3\]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rule_s_fault_names_operator_operands_target_and_line(
    fault: str, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, problem = FAULTS[fault]
    with_rule(target, aten.relu.default, rule, monkeypatch)
    with pytest.raises(Exception, match=problem) as caught:
        compiled(target, lambda x: torch.relu(x) * 2)(torch.randn(2, 3))
    message = str(caught.value)
    assert "aten.relu.default" in message and "test_vendor_faults.py:" in message
    if fault == "dtype" and target.name == NAMES["graph"]:
        return  # the graph family compares what the operators infer
    assert repr(target.name) in message and "float32[2, 3]" in message
    assert "RuleError" in message or isinstance(caught.value, RuleError)


def test_a_rule_with_too_few_results_is_named(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_rule(target, aten.sort.default, lambda b, x, *rest: [x], monkeypatch)
    problem = r"aten.sort.default\(torch.float32\[5\]\) returns 1 results for 2 results"
    with pytest.raises(Exception, match=problem):
        compiled(target, lambda x: torch.sort(x)[0])(torch.randn(5))


def test_a_faulty_rule_can_be_passed_over(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the error says, by eager_ops; and where errors of compiling are not to be raised."""
    with_rule(target, aten.relu.default, broken, monkeypatch)
    x = torch.randn(2, 3)
    eager = compiled(target, torch.relu, eager_ops=["aten.relu.default"])(x)
    assert torch.equal(eager, torch.relu(x))
    torch.compiler.reset()
    with pytest.warns(FallbackWarning, match="the rule for aten.relu.default"):
        found = compiled(target, torch.relu, on_compile_error="eager")(x)
    assert torch.equal(found, torch.relu(x))


@pytest.mark.parametrize("status", [None, -1, 7, 1], ids=str)
def test_a_run_s_status_is_not_taken_for_success(
    status: Any, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop program's 1 means that its first kernel failed, whose error then has to be known."""
    simulator = importlib.import_module(f"{target.name}_dicp.simulator")
    place = simulator.Segment if target.name == NAMES["loop"] else simulator.Model
    monkeypatch.setattr(place, "run", lambda self, *given: status)
    with pytest.raises(RunStatusError, match=f"gave status {status}, not 0") as caught:
        compiled(target, lambda x: torch.relu(x) * 2)(torch.randn(2, 3))
    message = str(caught.value)
    named = "relu_mul" if target.name == NAMES["loop"] else "graph "
    assert repr(target.name) in message and named in message


@pytest.mark.parametrize("status", [None, 2])
def test_a_profiled_kernel_s_status_is_checked_too(
    status: Any, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if target.name != NAMES["loop"]:
        return
    simulator = importlib.import_module(f"{target.name}_dicp.simulator")
    monkeypatch.setattr(simulator.Segment, "run_one", lambda self, position: status)
    with pytest.raises(RunStatusError, match="not 0"), torch.profiler.profile():
        compiled(target, lambda x: torch.relu(x) * 2)(torch.randn(2, 3))
