"""Details of the tools' page that no other file holds, each by its requirement."""

from __future__ import annotations

import csv
import errno
import math
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.forked import COMPILER, server

from dicp import op_tools
from dicp.errors import ToolVariableError, ToolWarning
from dicp.op_tools import storage, verdict
from dicp.op_tools.overflow import Statistics


def test_an_exception_inside_stops_the_tool_and_keeps_its_records() -> None:
    """OT-2"""
    tool = op_tools.OpAutoCompare(quiet=True)
    with pytest.raises(ZeroDivisionError), tool:
        torch.add(torch.ones(2), 1)
        raise ZeroDivisionError
    assert not tool.running and len(tool.results) == 2
    assert len(list(Path("op_tools_results/op_autocompare_result").iterdir())) == 1
    with pytest.raises(RuntimeError, match="must match"), op_tools.OpCapture(quiet=True) as capture:
        torch.add(torch.ones(2), torch.ones(3))  # the operator's own error reaches the program
    assert [path.name for path in capture.saved if path.parts[-5] == "torch.add"] == ["input"]


def test_conditions_of_a_tool(capsys: pytest.CaptureFixture[str]) -> None:
    """OT-2, OT-20"""
    half = op_tools.OpObserve(["torch.add"], condition=lambda a, b: a.dtype == torch.float16)
    with half:
        torch.add(torch.ones(2), 1)
        torch.add(torch.ones(2).half(), 1)
    text = capsys.readouterr().out
    assert "skip OpObserveHook on torch.add\n" in text and text.count("torch.add outputs") == 1


@pytest.fixture
def vendor_library() -> Iterator[torch.library.Library]:
    library = torch.library.Library("npu", "DEF")
    library.define("npu_fusion_attention(Tensor q, float scale) -> Tensor")
    library.impl("npu_fusion_attention", lambda q, scale: q * scale, "CPU")
    yield library
    library._destroy()


def test_operators_of_vendors_have_their_names(
    vendor_library: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """OT-4"""
    name = "npu.npu_fusion_attention"
    with op_tools.apply_feature(name, "autocompare"), op_tools.OpCapture([name]):
        torch.ops.npu.npu_fusion_attention(torch.ones(3), 0.5)
    text = capsys.readouterr().out
    assert f"apply OpAutoCompareHook on {name}\n" in text and f"{name} inputs[1]" in text
    from dicp.op_tools.run_op_from_data import main

    folder = f"op_tools_results/op_capture_results/{name}"
    assert main([folder, "--acc_check", "--run_times", "1"]) == 0


def test_the_reference_of_one_operator_has_its_own_dtypes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """OT-7"""
    monkeypatch.setenv("LINEAR_OP_DTYPE_CAST_DICT", "torch.bfloat16->torch.float32")
    x = torch.ones(2, 2).bfloat16()
    with op_tools.OpAutoCompare():
        F.linear(x, x)
        torch.add(x, x)
    text = capsys.readouterr().out
    assert "cpu_dtype_cast_info(from:to): {torch.bfloat16: torch.float32}" in text
    assert "cpu_dtype_cast_info(from:to): {torch.bfloat16: torch.float64}" in text


def test_bad_text_of_one_operators_dtypes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of errors"""
    monkeypatch.setenv("ADD_OP_DTYPE_CAST_DICT", "torch.float32-torch.float64")
    says = "ADD_OP_DTYPE_CAST_DICT is 'torch.float32-torch.float64'; expected rules such as"
    with op_tools.OpAutoCompare(quiet=True), pytest.raises(ToolVariableError, match=says):
        torch.add(torch.ones(1), 1)


def test_short_lines_of_every_tool(capsys: pytest.CaptureFixture[str]) -> None:
    """OT-10"""
    tools = (op_tools.OpCapture, op_tools.OpObserve, op_tools.OpOverflowCheck)
    x = torch.ones(3, requires_grad=True)
    for tool in tools:
        with tool(["torch.mul"], style="line"):
            torch.mul(x, 2.0).sum().backward()
    lines = capsys.readouterr().out.splitlines()
    assert not any(line.startswith(("+", "|")) for line in lines)
    given = "torch.mul inputs[0] torch.float32[3], inputs[1] 2.0, outputs torch.float32[3]"
    assert f"OpObserveHook: {given}" in lines and f"OpCaptureHook: {given}" in lines
    back = "torch.mul backward grad_output torch.float32[3], grad_inputs torch.float32[3]"
    assert f"OpObserveHook: {back}" in lines
    assert "OpOverflowCheckHook: torch.mul backward inf_or_nan: False" in lines


def test_rows_with_a_reference(capsys: pytest.CaptureFixture[str]) -> None:
    """OT-10"""
    x, w = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    with op_tools.OpAutoCompare(["torch.nn.functional.linear"], verbose=True):
        F.linear(x, w).sum().backward()
    text = capsys.readouterr().out
    for row in (
        "inputs[0]",
        "inputs[1]",
        "outputs",
        "inputs(cpu)[0]",
        "outputs(cpu)",
        "grad_output",
        "grad_inputs[1]",
        "grad_output(cpu)",
        "grad_inputs(cpu)[1]",
    ):
        assert re.search(rf"\| +torch\.nn\.functional\.linear {re.escape(row)} +\|", text), row


def test_gradients_of_several_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    """OT-10; an output that nothing reads has no gradient."""
    x = torch.randn(3, 4, requires_grad=True)
    with op_tools.OpObserve(), op_tools.OpAutoCompare(quiet=True) as tool:
        torch.split(x, 2)[0].sum().backward()
        torch.sort(x)[0].sum().backward()
    assert tool.failures == [] and x.grad is not None and x.grad[2].tolist() == [1] * 4
    text = capsys.readouterr().out
    split = "torch.functional.split"
    for row in (
        f"{split} outputs [0][1]",
        f"{split} grad_outputs [0][0]",
        f"{split} grad_outputs [0][1]",
        "torch.sort outputs [0][1]",
        "torch.sort grad_output",
        "torch.sort grad_inputs",
    ):
        assert re.search(rf"\| +{re.escape(row)} +\|", text), row


def test_records_are_written_at_exit() -> None:
    """OT-11"""
    Path("program.py").write_text(
        "import torch\nfrom dicp import op_tools\n"
        "op_tools.OpTimeMeasure(quiet=True).start()\ntorch.add(torch.ones(2), 1)\n"
    )
    done = server(*COMPILER).run(["program.py"], check=True)
    (file,) = Path("op_tools_results/op_time_measure_result").iterdir()
    assert f"op elasped info saved to {file}" in done.stdout
    assert "torch.add" in {row[0] for row in csv.reader(file.open())}


def test_a_full_disk_ends_the_capture_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """OT-12 and the table of errors"""

    def full(contents: object, path: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage, "save_file", full)
    with pytest.warns(ToolWarning, match="No space left") as caught, op_tools.OpCapture(quiet=True):
        for _ in range(3):
            assert torch.add(torch.ones(2), 1).tolist() == [2, 2]
    assert len(caught) == 1


def test_an_error_of_the_files_own_library_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """OT-12: safetensors reports a full disk by an error that is no OSError."""
    from safetensors import SafetensorError

    def full(contents: object, path: object) -> None:
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(storage, "save_file", full)
    with pytest.warns(ToolWarning, match="No space left"), op_tools.OpCapture(quiet=True):
        torch.add(torch.ones(2), 1)


def test_gradients_are_columns_of_the_times() -> None:
    """OT-16"""
    x = torch.randn(2, 3, requires_grad=True)
    with op_tools.OpTimeMeasure(["torch.Tensor.mul"], quiet=True):
        (x * 2).sum().backward()
    (file,) = Path("op_tools_results/op_time_measure_result").iterdir()
    head, row = csv.reader(file.open())
    found = dict(zip(head, row, strict=True))
    assert found["input"] == found["output"] == found["grad_outputs"] == "float32[2, 3]"
    assert found["grad_inputs"] == "float32[2, 3]" and float(found["backward_elasped"]) > 0


def test_backward_is_timed_through_all_nodes_of_a_call() -> None:
    """A product of three dimensions ends in a view, whose own backward takes no time."""
    x, w = torch.randn(8, 32, 256, requires_grad=True), torch.randn(512, 256, requires_grad=True)
    with op_tools.OpTimeMeasure(["torch.nn.functional.linear"], quiet=True) as tool:
        F.linear(x, w).sum().backward()
    (record,) = tool.results
    assert record.forward and record.backward and record.backward > record.forward / 4
    assert record.grad_inputs == "float32[8, 32, 256] float32[512, 256]"
    assert record.grad_outputs == "float32[8, 32, 512]"


def test_a_device_without_a_dtype(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """OT-19"""
    to = torch.Tensor.to

    def narrow(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        if torch.float64 in args:
            raise RuntimeError("this device has no double")
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", narrow)
    x = torch.ones(2, 2).bfloat16()
    cast = op_tools.OpDtypeCast(rules="torch.bfloat16->torch.double")
    text = "Warning: Device do not support double dtype now, dtype cast repalce with float."
    with pytest.warns(ToolWarning, match=re.escape(text)) as caught, cast:
        assert F.linear(x, x).dtype == torch.bfloat16
        F.linear(x, x)
    assert len(caught) == 1, "once"
    printed = capsys.readouterr().out
    assert printed.count(text) == 1 and "torch.bfloat16 -> torch.float32" in printed


def test_inputs_that_an_operator_overwrites_are_written_back() -> None:
    """OT-19: the running statistics of batch_norm, and weights that embedding scales down, are
    updated on the program's own tensors. test/device does so with `fallback`."""
    x = torch.randn(8, 4).bfloat16()
    wanted, got = (torch.zeros(2, 4).bfloat16() for _ in range(2))
    w = torch.full((4, 2), 3.0).bfloat16()
    tables = [w.clone().requires_grad_(), w.clone().requires_grad_()]
    F.batch_norm(x, wanted[0], wanted[1], training=True)
    F.embedding(torch.tensor([1]), tables[0], max_norm=1.0)
    with op_tools.OpDtypeCast(quiet=True):
        F.batch_norm(x, got[0], got[1], training=True)
        F.embedding(torch.tensor([1]), tables[1], max_norm=1.0)
    assert wanted.abs().sum() > 0 and tables[0][1, 0] < 1
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(tables[1], tables[0])


def test_statistics_of_more_than_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """OT-22, OT-23"""
    x = torch.randn(1000, dtype=torch.float64) * 3 + 5
    x[7], x[600:602], x[900:903] = float("inf"), -float("inf"), float("nan")
    whole = Statistics.of("x", x)
    monkeypatch.setattr(verdict, "_CHUNK", 64)
    pieces = Statistics.of("x", x)
    good = x[x.isfinite()]
    wanted = (good.min(), good.max(), good.mean(), good.std(correction=0), good.abs().sum(),
              good.norm(), good.abs().max())  # fmt: skip
    for found in (whole, pieces):
        assert found.bad and found.counted == "1 inf, 2 -inf, 3 nan of 1000 values"
        assert found.numbers == pytest.approx([float(w) for w in wanted])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("piece", [64, 1 << 20])
def test_errors_are_those_of_each_element(
    dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Infinities and NaN that agree are no errors, others are infinite ones."""
    monkeypatch.setattr(verdict, "_CHUNK", piece)
    b = torch.randn(200, dtype=dtype)
    a = b + torch.where(torch.rand(200) < 0.5, 0.0, 1e-3)
    places = torch.tensor([3, 4, 5])
    special = [[x.index_fill(0, places, v) for x in (a, b)] for v in (math.nan, math.inf)]
    for got, wanted in ((a, b), (b, b), *special):
        kept = got.isfinite()
        error = (got - wanted)[kept].to(torch.complex128).abs()
        size = wanted[kept].to(torch.complex128).abs()
        found = verdict.compare("torch.add", "output", got, wanted)
        allowed = found.tolerance
        assert found.max_abs == pytest.approx(float(error.max()), rel=1e-5)
        assert found.max_relative == pytest.approx(float((error / size).max()), rel=1e-5)
        largest = float((error / (allowed.atol + allowed.rtol * size)).max())
        assert found.ratio == pytest.approx(largest, rel=1e-5)
        assert found.cosine == pytest.approx(1.0, abs=1e-5)
    for other in (math.nan, math.inf):
        found = verdict.compare("torch.add", "output", a.index_fill(0, places, other), b)
        assert found.max_abs == found.ratio == math.inf and not found.allclose


def test_the_hosts_own_call_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU the call is eager's own: the fp64 rule takes the errors that are known."""
    counted = []
    errors = verdict._errors
    monkeypatch.setattr(verdict, "_errors", lambda *each: counted.append(each) or errors(*each))
    with op_tools.OpAutoCompare(["torch.sin"], quiet=True, rule="fp64") as tool:
        torch.sin(torch.rand(4))
    assert len(counted) == 2 and not tool.failures  # the input and the output


def test_a_tool_that_is_not_started_leaves_no_trace() -> None:
    before = torch.overrides._get_current_function_mode_stack()
    plain = torch.distributed.all_reduce if torch.distributed.is_available() else None
    tools = [op_tools.OpCapture(), op_tools.OpAutoCompare(), op_tools.OpTimeMeasure()]
    assert torch.overrides._get_current_function_mode_stack() == before == []
    with tools[0], tools[1]:
        pass
    assert torch.overrides._get_current_function_mode_stack() == []
    assert plain is None or torch.distributed.all_reduce is plain


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("layer_norm", "torch.nn.functional.layer_norm"),
        ("torch.nn.functional.layernorm", "torch.nn.functional.layer_norm"),
    ],
)
def test_a_misspelled_name_that_matches_nothing_is_said(
    name: str, near: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OP_AUTOCOMPARE_LIST", f"torch.relu,{name}")
    message = f"autocompare: operator name '{name}' leads to no function. Near names: .*{near}"
    with pytest.warns(ToolWarning, match=message), op_tools.OpAutoCompare(quiet=True):
        F.layer_norm(torch.ones(2, 2), (2,))
    tool = op_tools.OpAutoCompare(["torch.relu", "torch.n.*"], quiet=True)
    with warnings.catch_warnings(action="error"), tool:
        torch.sin(torch.ones(2))  # names of operators that did not run are right ones


def test_operators_to_look_at_are_given_by_names() -> None:
    for wrong in (3, [torch.relu]):
        with pytest.raises(ToolVariableError, match="^exclude is .*; expected names or regular"):
            op_tools.OpObserve(exclude=wrong)  # type: ignore[arg-type]
