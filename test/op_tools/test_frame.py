"""The frame: activation, selection, names, stacks of features, ids, tables."""

from __future__ import annotations

import random
import re
import sys
import threading
import types
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import op_tools as public
from dicp import op_tools
from dicp.errors import OperatorNameError, ToolVariableError, UnknownFeatureError
from dicp.op_tools.names import name_of
from dicp.op_tools.tables import argument_table, labelled_arguments, labelled_result, table

TOOLS = [
    op_tools.OpCapture,
    op_tools.OpAutoCompare,
    op_tools.OpTimeMeasure,
    op_tools.OpFallback,
    op_tools.OpDtypeCast,
    op_tools.OpObserve,
    op_tools.OpOverflowCheck,
]
HOOKS = {
    "op_capture": "OpCaptureHook",
    "autocompare": "OpAutoCompareHook",
    "measure_op_time": "OpTimeMeasureHook",
    "fallback": "OpFallbackHook",
    "cast_dtype": "OpDtypeCastHook",
    "dump_op_args": "OpObserveHook",
    "overflow_check": "OpOverflowCheckHook",
}


def hooked(text: str, verb: str = "apply") -> list[str]:
    return re.findall(rf"^{verb} \w+Hook on (\S+)$", text, re.M)


def test_the_public_package_holds_the_same_objects() -> None:
    for name in op_tools.__all__:
        assert getattr(public, name) is getattr(op_tools, name)
    assert (Path(public.__file__).parent / "run_op_from_data.py").exists()


@pytest.mark.parametrize("tool", TOOLS, ids=lambda t: t.feature)
def test_every_way_to_start_and_stop(tool: type, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(2)

    def seen() -> list[str]:
        return hooked(capsys.readouterr().out)

    made = tool(ops=["torch.add"])
    for stop in (made.stop, made.end):
        made.start()
        torch.add(x, 1)
        stop()
        torch.sub(x, 1)
        torch.add(x, 1)
        assert seen() == ["torch.add"]
    with made, made:  # nested in itself
        torch.add(x, 1)
    assert seen() == ["torch.add"]

    @tool(ops=["torch.add"])
    def step() -> torch.Tensor:
        return torch.add(x, 1)

    assert torch.equal(step(), x + 1) and step.__name__ == "step"
    assert seen() == ["torch.add"]
    made.stop()  # a stop without a start does nothing
    torch.add(x, 1)
    assert seen() == []


def test_apply_and_skip_lines_are_the_features_own(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(2)
    for feature, hook in HOOKS.items():
        with op_tools.apply_feature("torch.add", feature):
            torch.add(x, 1)
            torch.sub(x, 1)
        text = capsys.readouterr().out
        assert f"apply {hook} on torch.add\n" in text
        assert "torch.sub" not in text
    for tool in TOOLS:
        with tool(["torch.add"]):
            torch.sub(x, 1)
        assert f"skip {HOOKS[tool.feature]} on torch.sub\n" in capsys.readouterr().out


def test_lists_are_read_at_the_call_and_the_disable_list_wins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    x = torch.ones(2, 2)

    def run() -> list[str]:
        with op_tools.OpObserve():
            torch.add(x, 1)
            F.relu(x)
            F.gelu(x)
            x.size()
            str(x)
        return hooked(capsys.readouterr().out)

    every = ["torch.add", "torch.nn.functional.relu", "torch.nn.functional.gelu"]
    assert run() == every
    monkeypatch.setenv("OP_OBSERVE_LIST", "torch.nn.functional.*, torch.Tensor.size")
    assert run() == every[1:]
    monkeypatch.setenv("OP_OBSERVE_DISABLE_LIST", r"torch\.nn\.functional\.re.+")
    assert run() == every[2:]
    monkeypatch.setenv("OP_OBSERVE_LIST", "")
    assert run() == [every[0], every[2]]
    monkeypatch.delenv("OP_OBSERVE_DISABLE_LIST")
    monkeypatch.setenv("OP_OBSERVE_LIST", "add")  # matched in full
    assert run() == []


def test_arguments_replace_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OP_OBSERVE_LIST", "torch.sub")
    monkeypatch.setenv("OP_OBSERVE_DISABLE_LIST", "torch.add")
    with op_tools.OpObserve(["torch.add"], exclude=[]):
        torch.add(torch.ones(2), 1)
        torch.sub(torch.ones(2), 1)
    assert hooked(capsys.readouterr().out) == ["torch.add"]


def test_a_pattern_that_is_no_regular_expression_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OP_OBSERVE_LIST", "torch.(add")
    with (
        pytest.raises(ToolVariableError, match=r"OP_OBSERVE_LIST is 'torch.\(add'; expected names"),
        op_tools.OpObserve(),
    ):
        torch.add(torch.ones(2), 1)


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (lambda x: torch.add(x, x), "torch.add"),
        (lambda x: x + x, "torch.Tensor.add"),
        (lambda x: F.linear(x, x), "torch.nn.functional.linear"),
        (lambda x: torch.norm(x), "torch.functional.norm"),
        (lambda x: torch.nn.init.normal_(x), "torch.nn.init.normal_"),
        (lambda x: [0, 1, 2][torch.tensor(1)], "torch.Tensor.__index__"),
        (lambda x: torch.empty(3), "torch.empty"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_names_are_those_that_users_write(run, name, capsys) -> None:  # type: ignore[no-untyped-def]
    with op_tools.OpObserve():
        run(torch.ones(2, 2))
    assert name in hooked(capsys.readouterr().out)


def test_what_computes_nothing_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    with op_tools.OpObserve(), op_tools.OpAutoCompare():
        x.shape, x.grad, x.data_ptr(), x.numel(), x.size(), x.dim(), x.type()
        repr(x), f"{x}", torch.ones(2).requires_grad_()
        z = y.sum()
        z.backward(retain_graph=True)
        torch.autograd.backward(z, retain_graph=True)
        torch.autograd.grad(z, x)
        torch.empty(2)
    lines = capsys.readouterr().out.splitlines()
    seen = {line for line in lines if line.startswith(("apply", "skip"))}
    wanted = {"torch.ones", "torch.Tensor.sum"}
    assert seen == {f"apply {h} on {n}" for h in ("OpObserveHook", "OpAutoCompareHook")
                    for n in wanted} | {"apply OpObserveHook on torch.empty"}  # fmt: skip


def test_nested_calls_are_not_hooked_again(capsys: pytest.CaptureFixture[str]) -> None:
    with op_tools.OpObserve():
        F.cross_entropy(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    names = hooked(capsys.readouterr().out)
    assert names.count("torch.nn.functional.cross_entropy") == 1
    assert not [n for n in names if "log_softmax" in n or "nll_loss" in n]


def test_optimizers_initialisation_and_metrics_are_covered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with op_tools.OpObserve():
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(4, 3)).argmax(-1).eq(0).float().mean()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    names = set(hooked(capsys.readouterr().out))
    assert "torch.nn.init.kaiming_uniform_" in names
    assert {"torch.Tensor.argmax", "torch.Tensor.eq", "torch.nn.functional.linear"} <= names
    assert any("add" in n for n in names), "the optimizer's own"


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_optimizers_of_lists_of_tensors_are_covered(kind: str) -> None:
    """OT-5: the default of optimizers on accelerators."""

    def trained(*tools: op_tools.OpCapture) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(n)) for n in (3, 5)]
        optimizer = torch.optim.AdamW(weights, lr=0.1, **{kind: True})
        for _ in range(2):
            sum(w.square().sum() for w in weights).backward()
            for tool in tools:
                tool.start()
            optimizer.step()
            for tool in reversed(tools):
                tool.stop()
        return weights

    names = ["torch._foreach_.*", "torch._fused_.*"]
    compare, capture = op_tools.OpAutoCompare(names), op_tools.OpCapture(names, quiet=True)
    assert all(map(torch.equal, trained(compare, capture), trained()))
    wanted = {"foreach": "torch._foreach_addcdiv_", "fused": "torch._fused_adamw_"}[kind]
    assert compare.failures == [] and wanted in {r.operator for r in compare.results}
    compared = {c.name for r in compare.results for c in r.comparisons}
    assert {f"{wanted} input(before) [0][1]", f"{wanted} input [0][1]"} <= compared
    cast = op_tools.OpDtypeCast(names, rules="torch.float32->torch.float64", quiet=True)
    torch.testing.assert_close(trained(cast), trained())
    from dicp.op_tools.run_op_from_data import main

    assert main(["op_tools_results/op_capture_results", "--acc_check"]) == 0


def test_operators_may_be_given_as_one_text(capsys: pytest.CaptureFixture[str]) -> None:
    with op_tools.OpObserve("torch.add, torch.nn.functional.re.*", exclude="torch.div"):
        F.relu(torch.add(torch.ones(2), 1).mul(2))
    assert hooked(capsys.readouterr().out) == ["torch.add", "torch.nn.functional.relu"]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("OP_CAPTRUE_LIST", "OP_CAPTURE_LIST"),
        ("OP_FALLBACK_DISABLED_LIST", "OP_FALLBACK_DISABLE_LIST"),
        ("AUTOCOMPARE_ERROR_TOLERANCE_FLOAT3", "AUTOCOMPARE_ERROR_TOLERANCE_FLOAT32"),
        ("OP_TOOLS_MAX_CACHESIZE", "OP_TOOLS_MAX_CACHE_SIZE"),
        ("OP_MODEL_LIST", ""),
        ("ADD_OP_DTYPE_CAST_DICT", ""),
    ],
)
def test_a_misspelled_variable_is_named(
    wrong: str, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(wrong, "1")
    with warnings.catch_warnings(record=True) as caught, op_tools.OpObserve(quiet=True):
        pass
    message = f"{wrong} is no variable of the operator tools. Did you mean {right}?"
    assert [str(one.message) for one in caught] == ([message] if right else [])


def test_a_feature_on_pytorch_s_own_module_is_on_its_operators() -> None:
    load = torch.load
    for module in ("torch", torch):
        with op_tools.apply_feature(module, "cast_dtype", quiet=True) as handle:
            assert torch.load is load and "torch.add" in handle.features[0].ops


def test_features_stack_and_none_replaces_another(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    first = op_tools.apply_feature("torch.nn.functional.linear", "cast_dtype")
    second = op_tools.apply_feature("torch.nn.functional.linear", "fallback")
    y = F.linear(x, x)
    text = capsys.readouterr().out
    assert y.dtype == torch.bfloat16
    assert "torch.bfloat16 -> torch.float32" in text, "the cast's table"
    assert "torch.nn.functional.linear input(cpu)[0]" in text, "the fallback's table"
    first.remove()
    F.linear(x, x)
    text = capsys.readouterr().out
    assert "->" not in text and "input(cpu)[0]" in text
    second.remove()
    F.linear(x, x)
    assert capsys.readouterr().out == ""


def test_conditions_get_the_operators_own_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with op_tools.apply_feature(
        "torch.sub", "autocompare", condition_func=lambda a, *rest, **named: a.dim() == 2
    ):
        torch.sub(torch.ones(2), 1)
        assert capsys.readouterr().out == "skip OpAutoCompareHook on torch.sub\n"
        torch.sub(torch.ones(2, 2), 1)
        assert "apply OpAutoCompareHook on torch.sub\n" in capsys.readouterr().out


def test_conditions_pair_with_operators(capsys: pytest.CaptureFixture[str]) -> None:
    no, yes = (lambda *a, **k: False), (lambda *a, **k: True)
    with op_tools.apply_feature(["torch.add", torch.sub], "dump_op_args", [no, yes]):
        torch.add(torch.ones(2), 1)
        torch.sub(torch.ones(2), 1)
    assert hooked(capsys.readouterr().out) == ["torch.sub"]
    with pytest.raises(ToolVariableError, match="1 conditions for 2 operators"):
        op_tools.apply_feature(["torch.add", "torch.sub"], "dump_op_args", [no])


def test_a_condition_that_raises_is_reported_and_the_operator_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with op_tools.apply_feature("torch.add", "cast_dtype", lambda a, b: a.nothing):
        assert torch.add(torch.ones(2), 1).tolist() == [2, 2]
    text = capsys.readouterr().out
    assert (
        "the condition for cast_dtype on torch.add(torch.float32[2], 1) raises AttributeError"
        in (text)
    )


@pytest.fixture
def third_party(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("third_party_ops")

    def fused(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return torch.relu(x) * scale

    def other(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    for function in (fused, other):
        function.__module__ = module.__name__
        function.__qualname__ = function.__name__
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_third_party_functions_and_modules(
    third_party: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, x = third_party.fused, torch.randn(3)
    for ops in ("third_party_ops.fused", third_party.fused):
        handle = op_tools.apply_feature(ops, "autocompare")
        with op_tools.OpObserve():
            third_party.fused(x, scale=3.0)
        text = capsys.readouterr().out
        assert hooked(text) == ["third_party_ops.fused"] * 2, "torch's calls inside are nested"
        assert "third_party_ops.fused output" in text
        handle.remove()
        assert third_party.fused is plain
    with op_tools.apply_feature(third_party, "dump_op_args"):
        third_party.other(x)
        third_party.fused(x)
    assert hooked(capsys.readouterr().out) == ["third_party_ops.other", "third_party_ops.fused"]
    assert third_party.fused is plain


class Outputs(OrderedDict[str, Any]):
    """A result as models have it, whose values are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


@pytest.fixture
def with_mapping(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("third_party_maps")

    def wrong(given: dict[str, torch.Tensor]) -> Outputs:
        x = given["x"]
        return Outputs(out=x + 1 if x.dtype == torch.float64 else x + 2, bad=x / 0)

    wrong.__module__, wrong.__qualname__, module.wrong = module.__name__, "wrong", wrong
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.filterwarnings("ignore")
def test_values_in_mappings_are_looked_at(with_mapping: types.ModuleType) -> None:
    """Arguments and results of third-party functions, which keep their type."""
    given = {"x": torch.ones(2)}
    applied = [op_tools.apply_feature(with_mapping.wrong, f, quiet=True)
               for f in ("autocompare", "overflow_check")]  # fmt: skip
    with_mapping.wrong(given)
    for handle in applied:
        handle.remove()
    compare, check = (handle.features[0] for handle in applied)
    (record,) = compare.failures
    verdicts = {
        c.name.removeprefix("third_party_maps.wrong "): c.allclose for c in record.comparisons
    }
    assert verdicts["input['x']"] and not verdicts["output['out']"]
    assert check.first.tensor == "third_party_maps.wrong outputs['bad']"
    for feature in ("cast_dtype", "fallback"):
        with op_tools.apply_feature("third_party_maps.wrong", feature, quiet=True):
            result = with_mapping.wrong({"x": torch.ones(2).bfloat16()})
        assert type(result) is Outputs and result.out.dtype == torch.bfloat16


def test_the_programs_random_numbers_and_iterators_stay_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A third-party function is run more than once: for what it promises and for the reference."""
    module = types.ModuleType("third_party_draws")

    def noisy(x: torch.Tensor) -> torch.Tensor:
        shift = random.random() + float(np.random.rand()) + torch.rand(2, device="cpu")
        return x + shift.to(x.device)

    def scaled(tensors: Iterator[torch.Tensor]) -> torch.Tensor:
        return torch.stack([x.mul_(2) for x in tensors]).sum()

    for function in (noisy, scaled):
        function.__module__, function.__qualname__ = module.__name__, function.__name__
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def run() -> list[float]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        given = [torch.ones(2) for _ in range(3)]
        values = [module.noisy(given[0]), module.scaled(x for x in given), module.noisy(given[1])]
        return [v for value in values for v in value.flatten().tolist()] + given[2].tolist()

    want = run()
    for feature in HOOKS:
        with op_tools.apply_feature(module, feature, quiet=True) as handle:
            assert run() == want, feature
        failures = getattr(handle.features[0], "failures", [])
        assert [r.operator for r in failures] == [], feature


class Squared(torch.autograd.Function):
    """An autograd function: `apply` is an inherited class method."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return 2 * gradient * ctx.saved_tensors[0]

    @staticmethod
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_static_and_class_methods(capsys: pytest.CaptureFixture[str]) -> None:
    before, x = dict(vars(Squared)), torch.ones(2, requires_grad=True)
    names = [f"{__name__}.Squared.{method}" for method in ("apply", "twice")]
    with op_tools.apply_feature(names, "dump_op_args"):
        Squared.apply(x).sum().backward()
        Squared.twice(x)
        Squared().twice(x)
    assert x.grad is not None and x.grad.tolist() == [2, 2]
    text = capsys.readouterr().out
    assert hooked(text) == names and f"{names[0]} grad_inputs" in text
    assert dict(vars(Squared)) == before and Squared().twice(x).tolist() == [2, 2]


def test_third_party_functions_stay_in_a_compiled_graph(third_party: types.ModuleType) -> None:
    with op_tools.apply_feature("third_party_ops.fused", "dump_op_args", quiet=True):
        run = torch.compile(lambda x: third_party.fused(x) + 1, backend="eager", fullgraph=True)
        assert run(torch.ones(2)).tolist() == [3, 3]


def test_unknown_features_and_names_are_errors_that_help() -> None:
    with pytest.raises(UnknownFeatureError) as unknown:
        op_tools.apply_feature("torch.add", "autocompar")
    assert "'autocompare'" in str(unknown.value)
    assert all(feature in str(unknown.value) for feature in HOOKS)
    with pytest.raises(OperatorNameError, match=r"torch.nn.functional.linear"):
        op_tools.apply_feature("torch.nn.functional.linaer", "autocompare")
    with pytest.raises(OperatorNameError, match="leads to no function"):
        op_tools.apply_feature("no_such_package.at.all", "autocompare")
    with pytest.raises(OperatorNameError, match=r"Near names: torch.einsum"):
        op_tools.apply_feature("torch.einsumm", "autocompare")
    with pytest.raises(ToolVariableError, match=r"ops is '3'; expected names, functions or modul"):
        op_tools.apply_feature(3, "autocompare")  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"every": 0}, {"first": -1}, {"max_bytes": "1 GiB"}], ids=str)
def test_wrong_limits_of_a_capture(given: dict[str, Any]) -> None:
    with pytest.raises(ToolVariableError, match="a whole number"):
        op_tools.OpCapture(**given)


@pytest.mark.parametrize(
    ("chosen", "call", "name"),
    [
        ("torch.spmm", lambda x: torch.spmm(x, x), "torch.mm"),
        ("torch.mm", lambda x: torch.mm(x, x), "torch.mm"),
        ("torch.einsum", lambda x: torch.einsum("ij,jk", x, x), "torch.functional.einsum"),
        ("torch.functional.norm", torch.norm, "torch.functional.norm"),
        ("torch.norm", torch.norm, "torch.functional.norm"),
        ("torch.relu_", torch.relu_, "torch.nn.functional.relu_"),
    ],
)
def test_operators_are_chosen_by_the_names_that_users_write(
    chosen: str, call: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OT-4, OT-6. Some functions have two names in torch."""
    monkeypatch.setenv("OP_TIME_MEASURE_LIST", chosen)
    x = torch.rand(2, 2)
    with op_tools.OpTimeMeasure(quiet=True) as tool:
        call(x)
    assert [record.name for record in tool.results] == [name]


def test_ids_continue_across_tools_and_threads(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        with op_tools.OpObserve(["torch.add"]), op_tools.OpTimeMeasure(["torch.add"]):
            for _ in range(20):
                torch.add(torch.ones(2), 1)

    work()
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = re.findall(r"forward_id:(\d+)/\d{4}(?:-\d\d){5}", capsys.readouterr().out)
    assert len(found) == len(set(found)) == 80


def test_a_tool_that_threads_share_sees_the_calls_of_each() -> None:
    """OT-2, OT-23"""
    barrier = threading.Barrier(2)
    tool = op_tools.OpTimeMeasure(["torch.add"], quiet=True)
    left = []

    @tool
    def step() -> None:
        barrier.wait(20)
        with tool:
            torch.add(torch.ones(2), 1)
        torch.add(torch.ones(2), 1)
        barrier.wait(20)

    def work() -> None:
        step()
        left.extend(torch.overrides._get_current_function_mode_stack())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tool.results) == 4 and not tool.running and left == []


def test_a_feature_with_a_wrong_option_leaves_nothing_behind(third_party: types.ModuleType) -> None:
    plain = third_party.fused
    with pytest.raises(ToolVariableError, match="every is '0'"):
        op_tools.apply_feature(third_party.fused, "op_capture", every=0)
    assert third_party.fused is plain


def test_a_thread_without_tools_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with op_tools.OpObserve():
        thread = threading.Thread(target=lambda: torch.add(torch.ones(2), 1))
        thread.start()
        thread.join()
    assert hooked(capsys.readouterr().out) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tool", TOOLS, ids=lambda t: t.feature)
def test_tensors_without_values_run_as_without_tools(tool: type) -> None:
    """Meta tensors, the program's default device, function transforms, nested tensors."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    x = torch.ones(3, 2, requires_grad=True)
    with tool() as made:
        with torch.device("meta"):
            layer = torch.nn.BatchNorm1d(3, dtype=torch.bfloat16)
            assert layer(torch.zeros(2, 3, dtype=torch.bfloat16)).device.type == "meta"
        torch.nn.init.zeros_(layer.weight)
        for give in (nested, jagged):
            assert all(
                map(torch.equal, (give * 2).unbind(), (torch.ones(2) * 2, torch.ones(3) * 2))
            )
        wide = torch.vmap(lambda row: torch.sin(row.bfloat16()))(x.detach())
        slope = torch.func.grad(lambda y: torch.sin(y.bfloat16()).float().sum())(x.detach())
    assert torch.equal(wide, torch.sin(x.detach().bfloat16()))
    assert slope.shape == x.shape and not getattr(made, "failures", [])


def test_a_default_device_is_not_that_of_the_reference() -> None:
    x = torch.ones(4, 6)[:, ::2]
    with torch.device("meta"), op_tools.OpAutoCompare(quiet=True) as tool:
        torch.log(x - 1)
    assert tool.failures == [] and len(tool.results) == 2 and not any(r.note for r in tool.results)


def test_modes_of_the_program_survive(capsys: pytest.CaptureFixture[str]) -> None:
    tool = op_tools.OpObserve().start()
    device = torch.device("meta")
    device.__enter__()
    tool.stop()
    try:
        assert torch.ones(2).device.type == "meta"
    finally:
        device.__exit__(None, None, None)
    assert torch.ones(2).device.type == "cpu"
    assert (
        "torch.overrides" in sys.modules and not torch.overrides._get_current_function_mode_stack()
    )


def test_headings_name_the_users_line(capsys: pytest.CaptureFixture[str]) -> None:
    with op_tools.OpObserve():
        torch.add(torch.ones(2), 1)  # this very line
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("torch.add "))
    assert re.fullmatch(
        r"torch\.add    forward_id:\d+/[\d-]+    \S+test_frame\.py:\d+ \w+: "
        r"torch\.add\(torch\.ones\(2\), 1\)  # this very line",
        line,
    )


def test_the_whole_stack_on_demand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OP_TOOLS_PRINT_STACK", "1")
    with op_tools.OpObserve():
        torch.add(torch.ones(2), 1)
    text = capsys.readouterr().out
    assert "in test_the_whole_stack_on_demand" in text and "pytest" in text


def test_quiet_prints_the_summary_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with op_tools.OpAutoCompare(quiet=True):
        torch.add(torch.ones(2), 1)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("op autocompare result saved to ")
    assert second.startswith("autocompare: 2 operators, 2 records, 0 failures")


TABLE = """\
+--------------------+--------+---------------+-------+--------+--------+---------------+---------------+----------+-------+
|        name        | device |     dtype     | numel | shape  | stride | requires_grad |     layout    | data_ptr | value |
+--------------------+--------+---------------+-------+--------+--------+---------------+---------------+----------+-------+
|    op inputs[0]    |  meta  | torch.float32 |   6   | (2, 3) | (3, 1) |      True     | torch.strided |          |       |
|   op inputs [1][0] |        |               |       |        |        |               |               |          |   4   |
|   op inputs [1][1] |        |               |       |        |        |               |               |          |  None |
|  op inputs keepdim |        |               |       |        |        |               |               |          |  True |
|     op outputs     |  meta  |  torch.int64  |   2   |  (2,)  |  (1,)  |     False     | torch.strided |          |       |
+--------------------+--------+---------------+-------+--------+--------+---------------+---------------+----------+-------+"""  # noqa: E501


def test_tables_are_golden() -> None:
    x = torch.empty(2, 3, device="meta", requires_grad=True)
    rows = [
        *labelled_arguments((x, [4, None]), {"keepdim": True}, "op inputs"),
        *labelled_result(torch.empty(2, dtype=torch.int64, device="meta"), "op outputs"),
    ]
    squeezed = re.compile(r" +")
    got, wanted = argument_table(rows), TABLE
    assert [squeezed.sub(" ", line) for line in got.splitlines() if line[0] == "|"] == [
        squeezed.sub(" ", line) for line in wanted.splitlines() if line[0] == "|"
    ]
    assert set(got.splitlines()[0]) == {"+", "-"}
    assert table(("a", "bcd"), [(1, 2)]) == (
        "+---+-----+\n| a | bcd |\n+---+-----+\n| 1 |  2  |\n+---+-----+"
    )


def test_values_only_where_a_row_has_one() -> None:
    rows = list(labelled_result((torch.ones(2), torch.ones(3)), "op outputs"))
    assert [name for name, _ in rows] == ["op outputs [0][0]", "op outputs [0][1]"]
    assert "value" not in argument_table(rows)
    listed = argument_table(list(labelled_result([1.0, 2.0], "torch.Tensor.tolist outputs")))
    assert "torch.Tensor.tolist outputs [0][1]" in listed and "value" in listed


def test_nothing_is_written_to_the_environment() -> None:
    import os

    before = dict(os.environ)
    with op_tools.OpAutoCompare(quiet=True), op_tools.OpDtypeCast(quiet=True):
        torch.add(torch.ones(2), 1)
    assert dict(os.environ) == before


def test_property_getters_have_no_name() -> None:
    assert name_of(torch.Tensor.shape.__get__) == ""
    assert name_of(torch.Tensor.add) == "torch.Tensor.add"


def test_hooks_and_memory_of_a_tensor_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """OT-5: a tool that runs operators on other tensors leaves them alone."""
    x = torch.nn.Parameter(torch.ones(3).bfloat16())
    seen = []
    with op_tools.OpDtypeCast(quiet=True), op_tools.OpObserve():
        x.register_post_accumulate_grad_hook(seen.append)
        assert x.storage().dtype == torch.bfloat16
        assert torch.from_dlpack(x.detach()).data_ptr() == x.data_ptr()
        x.nelement()
    x.sum().backward()
    assert seen == [x]
    names = set(hooked(capsys.readouterr().out))
    assert names <= {"torch.Tensor.detach", "torch.from_dlpack"}, names
