"""Autocompare, time, fallback, cast, observe and overflow check in eager code."""

from __future__ import annotations

import csv
import gc
import math
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from faults import last_of_equal
from torch.utils.checkpoint import checkpoint

from dicp import op_tools
from dicp.errors import OverflowFoundError, ToolVariableError
from dicp.op_tools import gradients, run_op_from_data, storage
from dicp.op_tools.autocompare import Record
from dicp.op_tools.held import Held, HeldInputs
from dicp.op_tools.records import CallId, CallSite
from dicp.op_tools.verdict import Comparison, compare, tolerance

RANDOM = "random operator: shape and dtype only"


def compared(tool: op_tools.OpAutoCompare) -> dict[str, Comparison]:
    return {c.name: c for record in tool.results for c in record.comparisons}


def test_autocompare_compares_inputs_outputs_and_gradients() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    y = torch.zeros(3, 4)
    index = torch.tensor([[0, 1, 2, 0]])
    with op_tools.OpAutoCompare(quiet=True) as tool:
        z = torch.sort(x, dim=1)[0]
        (z * 2).sum().backward()
        y.scatter_add_(0, index, torch.ones(1, 4))
        y.copy_(torch.ones(3, 4))
        x.detach().clone().requires_grad_().mul(2).relu_().sum().backward()
    found = compared(tool)
    assert {
        "torch.sort input", "torch.sort output[0]", "torch.sort output[1]", "torch.sort grad[0]",
        "torch.Tensor.scatter_add_ input[0]", "torch.Tensor.scatter_add_ output",
        "torch.Tensor.copy_ input[0]", "torch.Tensor.copy_ input[1]", "torch.Tensor.relu_ grad[0]",
    } <= found.keys()  # fmt: skip
    assert tool.failures == []
    assert found["torch.sort output[0]"].error_info == (
        "Inconsistent dtypes: torch.float32 torch.float64"
    )


def test_autocast_is_no_fault() -> None:
    """OT-13"""
    layer = torch.nn.Linear(8, 8)
    with op_tools.OpAutoCompare(quiet=True, rule="fp64") as tool:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.layer_norm(layer(torch.randn(4, 8)), (8,))
        y.float().sum().backward()
    assert compared(tool).keys() >= {"torch.nn.functional.linear output"}
    assert tool.failures == []


def test_gradients_under_autocast_have_the_tolerance_of_its_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OT-14: a float32 weight's gradient is computed in bfloat16, as the result is."""
    monkeypatch.setenv("AUTOCOMPARE_ERROR_TOLERANCE_BFLOAT16", "0.05,0.05")
    layer, x = torch.nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    with op_tools.OpAutoCompare(["torch.nn.functional.linear"], quiet=True) as tool:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x)
        y.float().sum().backward()
        layer(x).sum().backward()
    assert tool.failures == []
    forward, backward, *plain = (r.comparisons[-1].tolerance.atol for r in tool.results)
    assert (forward, backward, *plain) == (0.05, 0.05, 1e-5, 1e-5)


def test_operators_on_bits_and_on_memory_are_no_fault() -> None:
    """A value in float64 has other bits; memory that is made has no values yet."""
    x = torch.tensor([1.0, 2.0, -3.0])
    torch.full((5000,), 7.0)  # memory that is given again
    with op_tools.OpAutoCompare(quiet=True) as tool:
        x.view(torch.int32)
        x.bfloat16().view(torch.float16)
        x.view(dtype=torch.uint8)
        torch.empty(0).resize_(5000)
        torch.empty(0).set_(x.untyped_storage(), 0, (3,), (1,))
    assert tool.failures == [] and not any(r.note for r in tool.results)
    assert "torch.Tensor.view output" in compared(tool)
    assert x.untyped_storage().nbytes() == 12


def test_results_whose_shapes_are_inferred_wrongly_are_no_fault() -> None:
    """PyTorch infers statistics that native_batch_norm does not return in evaluation."""
    x, ones, zeros = torch.randn(4, 2), torch.ones(2), torch.zeros(2)
    with op_tools.OpAutoCompare(["torch.native_batch_norm"], quiet=True) as tool:
        torch.native_batch_norm(x, ones, zeros, zeros, ones, False, 0.1, 1e-5)
    assert len(tool.results) == 1 and tool.failures == []


def test_views_of_what_is_overwritten_are_overwritten_too() -> None:
    """The reference's inputs overlap in memory as the program's do."""
    x, y, z = torch.randn(4), torch.randn(3, 4), torch.randn(3, 4)
    with op_tools.OpAutoCompare(quiet=True) as tool:
        x.mul_(x.detach())
        torch.add(y[0], 1, out=y[0].view(4))
        torch._foreach_mul_([z[0], z[1]], [z[0].view(4), z[2]])
    assert tool.failures == [] and not any(r.note for r in tool.results)


def test_gradients_that_the_program_changes_are_no_fault() -> None:
    """A hook of the program on a result changes what the operator's backward gets."""
    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    with op_tools.OpAutoCompare(["torch.mul"], quiet=True) as tool:
        y = torch.mul(x, w)
        y.register_hook(lambda gradient: gradient.clamp(-1, 1))
        (y * 3).sum().backward()
    assert [r.kind for r in tool.results] == ["forward", "backward"] and tool.failures == []


def test_what_is_written_to_a_view_has_the_gradients_of_its_own_call() -> None:
    """Its node stands behind those that made the whole tensor, which used the same input."""
    x, w = torch.randn(256, 256, requires_grad=True), torch.randn(256, requires_grad=True)
    compare = op_tools.OpAutoCompare(["torch.Tensor.add_"], quiet=True)
    with compare, op_tools.OpTimeMeasure(quiet=True) as timer:
        h = torch.mul(x, w)
        for _ in range(20):
            h = h @ x / 256
        h[0].add_(w)
        h.sum().backward()
    assert compare.failures == []
    times = {r.name: r.backward or 0.0 for r in timer.results}
    assert times["torch.Tensor.add_"] < sum(
        r.backward for r in timer.results if r.name == "torch.Tensor.matmul"
    )


def test_gradients_of_assignments_to_elements_are_compared() -> None:
    x, v = torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    with op_tools.OpAutoCompare(quiet=True) as tool, op_tools.OpCapture(quiet=True):
        y, z = x * 1, torch.zeros(4, 3)
        y[1] = v
        y[torch.tensor([0, 2]), 1] = v[:2]
        z[:, 0] = x[:, 1]
        z[y > 0] = 3.0
        (y * y + z * y).sum().backward()
    assert tool.failures == [] and not any(r.note for r in tool.results)
    records = [r for r in tool.results if r.operator == "torch.Tensor.__setitem__"]
    assert [r.kind for r in records].count("backward") == 4
    grads = {c.name[-7:] for r in records if r.kind == "backward" for c in r.comparisons}
    assert grads == {"grad[0]", "grad[1]", "grad[2]"}
    assert run_op_from_data.main(["op_tools_results", "--acc_check"]) == 0


def test_gradients_of_writes_to_views_are_compared() -> None:
    x, v = torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    w = torch.randn(4, 3)
    timer = op_tools.OpTimeMeasure(quiet=True)
    with op_tools.OpAutoCompare(quiet=True) as tool, op_tools.OpCapture(quiet=True), timer:
        y, z = x * 1, torch.zeros(4, 3)
        y[0].mul_(2)
        y[:, 1] += v.sum()
        part = y[1]
        part.mul_(v)
        part.add_(part)
        z[2].copy_(v)
        y[2:].t()[2].addcmul_(x[2:, 0], x[2:, 1])
        torch.clamp_(y[3], -1, 1)
        rows = y[1:]
        rows[0] = v
        torch._foreach_mul_([y[2], y[3]], 3.0)
        torch.view_as_real(torch.complex(x, x))[0].mul_(2)
        (y * w + z * w).sum().backward()
    assert tool.failures == [] and not any(r.note for r in tool.results)
    backward = [r for r in tool.results if r.kind == "backward"]
    names = Counter(r.operator.rpartition(".")[2] for r in backward)
    written = {"mul_": 2, "add_": 2, "copy_": 1, "addcmul_": 1, "clamp_": 1, "__setitem__": 2}
    assert {name: names[name] for name in written} == written
    shapes = {(r.name, r.grad_outputs, r.grad_inputs) for r in timer.results if r.backward}
    assert ("torch.Tensor.mul_", "float32[3]", "float32[3]") in shapes
    files = Path("op_tools_results").rglob("torch.Tensor.mul_/*/*/*/grad_inputs.json")
    first = min(files, key=lambda path: int(path.parts[-3]))
    outputs, inputs = (
        storage.load(first.with_name(name)).value for name in ("grad_outputs", "grad_inputs")
    )
    assert torch.equal(outputs[0], w[0]) and torch.equal(inputs[0], 2 * w[0])
    assert run_op_from_data.main(["op_tools_results", "--acc_check"]) == 0


def test_in_place_forms_are_compared_before_and_after() -> None:
    """OT-13"""
    x = torch.tensor([[-1.0, 2.0]])
    with op_tools.OpAutoCompare(quiet=True) as tool:
        x.t().relu_()
        torch.add(x, 1, out=torch.empty(0))
        y = torch.randn(3, requires_grad=True) * 2
        F.relu(y, inplace=True).sum().backward()
    assert tool.failures == [] and {r.note for r in tool.results} == {"", RANDOM}
    found = compared(tool)
    relu = "torch.nn.functional.relu"
    assert {f"{relu} input(before)", f"{relu} input", f"{relu} grad[0]"} <= found.keys()
    assert found["torch.Tensor.relu_ input(before)"].allclose
    assert found["torch.Tensor.relu_ input"].allclose
    assert {"torch.add input(before) out", "torch.add input out"} <= found.keys()


def test_a_failed_in_place_call_is_saved_as_it_was_given() -> None:
    """OT-15"""
    library = torch.library.Library("aten", "IMPL")

    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x.clamp_(min=0) if x.dtype == torch.float64 else x.add_(1)

    library.impl("relu_", wrong, "CPU", allow_override=True)
    try:
        with op_tools.OpAutoCompare(quiet=True) as tool:
            torch.tensor([-1.0, 2.0]).relu_()
    finally:
        library._destroy()
    assert [record.operator for record in tool.failures] == ["torch.Tensor.relu_"]
    base = Path("op_tools_results/op_capture_results")
    for side, result in (("device", [0.0, 3.0]), ("cpu", [0.0, 2.0])):
        (given,) = base.rglob(f"{side}/input.json")
        assert storage.load(given.with_name("input")).value["args"][0].tolist() == [-1.0, 2.0]
        assert storage.load(given.with_name("output")).value.tolist() == result


def test_gradients_of_bf16_are_judged_with_bf16s_tolerance(
    capsys: pytest.CaptureFixture[str],
) -> None:
    x = torch.randn(8, 8, dtype=torch.bfloat16, requires_grad=True)
    with op_tools.OpAutoCompare() as tool:
        F.linear(x, x).sum().backward()
    found = compared(tool)["torch.nn.functional.linear grad[0]"]
    assert (found.tolerance.atol, found.tolerance.rtol) == (1e-3, 1e-3)
    text = capsys.readouterr().out
    assert "cpu_dtype_cast_info(from:to): {torch.bfloat16: torch.float64}" in text
    ids = re.findall(r"forward_id:(\S+)", text)
    assert ids and all(re.fullmatch(r"\d+/[\d-]+", i) for i in ids), "an id and no function's repr"


@pytest.fixture
def wrong_sin() -> object:
    library = torch.library.Library("aten", "IMPL")

    def wrong(x: torch.Tensor) -> torch.Tensor:
        right = torch.cos(x.double() - torch.pi / 2).to(x.dtype)
        return right if x.dtype == torch.float64 else right + 1e-3

    library.impl("sin", wrong, "CPU", allow_override=True)
    yield
    library._destroy()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shift", [0, 1])
def test_any_position_of_equal_elements_is_right(shift: int) -> None:
    """A device may return the last of equal elements where the CPU returns the first: no position
    of another element, though."""
    x = torch.tensor([[1.0, 2, 0, 2, 3, 2], [4, 0, 5, 1, 5, 5]], requires_grad=True)
    with last_of_equal(shift), op_tools.OpAutoCompare(quiet=True) as tool:
        values, places = torch.kthvalue(x, 4)
        (values * torch.tensor([2.0, 3.0])).sum().backward()
    assert places.tolist() == [5 - shift, 5 - shift]
    assert {record.kind for record in tool.failures} == (
        {"forward", "backward"} if shift else set()
    )
    assert "torch.kthvalue grad[0]" in compared(tool)


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_operator_is_named_and_saved(
    wrong_sin: object, capsys: pytest.CaptureFixture[str]
) -> None:
    x = torch.randn(5)
    with op_tools.OpAutoCompare() as tool:
        torch.cos(torch.sin(torch.tanh(x)))  # here
    (record,) = tool.failures
    assert record.operator == "torch.sin" and "# here" in str(record.call_site)
    assert record.ratio > 40
    text = capsys.readouterr().out
    assert "verdicts: tolerance False" in text and "torch.sin inputs(cpu)" in text
    assert "first failure: torch.sin " in text
    saved = next(Path("op_tools_results/op_capture_results/torch.sin").rglob("autocompare"))
    names = {str(p.relative_to(saved).parts[2:]) for p in saved.rglob("*.json")}
    assert names == {f"('{s}', '{f}.json')" for s in ("device", "cpu") for f in ("input", "output")}
    with op_tools.OpAutoCompare(style="line"):
        torch.sin(x)
    out = capsys.readouterr().out
    assert re.search(r"^OpAutoCompareHook: torch.sin allclose: False max_diff: 0\.00\d{7}$",
                     out, re.M)  # fmt: skip
    with op_tools.OpAutoCompare(quiet=True, ignore_index=0) as tool:
        torch.sin(x)
    assert tool.failures == []


def test_tolerances_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    half, ints = torch.ones(1).half(), torch.ones(1, dtype=torch.int64)
    defaults = {torch.float16: 1e-4, torch.bfloat16: 1e-3, torch.float32: 1e-5,
                torch.float64: 1e-8, torch.int64: 1e-3, torch.bool: 1e-3}  # fmt: skip
    for dtype, want in defaults.items():
        assert tolerance("torch.add", torch.ones(1).to(dtype)).rtol == want
    assert tolerance("torch.add", 2.0).atol == 1e-6 and tolerance("torch.add", None).atol == 0
    monkeypatch.setenv("AUTOCOMPARE_ERROR_TOLERANCE", "1,2")
    assert tolerance("torch.add", ints).rtol == 2
    monkeypatch.setenv("AUTOCOMPARE_ERROR_TOLERANCE_FLOAT16", "3,4")
    assert tolerance("torch.add", half).rtol == 4
    monkeypatch.setenv("ADD_AUTOCOMPARE_ERROR_TOLERANCE_FLOAT16", "5,6")
    assert tolerance("torch.add", half).rtol == 6
    assert tolerance("torch.sub", half).rtol == 4
    result = compare("torch.add", "torch.add grad[0]", half, half.double())
    assert result.tolerance.atol == 5, "the operator's, although the row's name has a suffix"
    monkeypatch.setenv("AUTOCOMPARE_ERROR_TOLERANCE_FLOAT16", "a")
    with pytest.raises(ToolVariableError, match=r"TOLERANCE_FLOAT16 is 'a'; expected two numbers"):
        tolerance("torch.sub", half)


def test_comparing_values() -> None:
    nan, inf = float("nan"), float("inf")

    def allclose(a: object, b: object) -> bool:
        return compare("o", "o", torch.tensor(a), torch.tensor(b)).allclose

    assert allclose([nan, inf, 1.0], [nan, inf, 1.0]) and allclose([], [])
    assert not allclose([nan], [1.0]) and not allclose([inf], [-inf]) and not allclose([1.0], [inf])
    shape = compare("o", "o", torch.ones(2), torch.ones(3))
    assert shape.error_info == "Inconsistent shape: (2,) (3,)" and not shape.allclose
    assert compare("o", "o", torch.ones(2), -torch.ones(2)).cosine == pytest.approx(-1)
    record = Record("o", CallId.new(), CallSite(), "forward", [
        Comparison("a", True, 1.0), Comparison("b", True, 0.25)])  # fmt: skip
    assert record.cosine == 0.25, "the lowest of all, not the highest"
    assert compare("o", "o", 2, 2).allclose and not compare("o", "o", 2, 3).allclose


def test_gradients_of_an_operator_with_buffers() -> None:
    """Running statistics have no gradient; the other inputs' gradients are compared."""
    x, norm = torch.randn(8, 3, requires_grad=True), torch.nn.BatchNorm1d(3)
    with op_tools.OpAutoCompare(["torch.nn.functional.batch_norm"], quiet=True) as tool:
        norm(x).square().sum().backward()
    backward = tool.results[-1]
    assert backward.kind == "backward" and not backward.note and tool.failures == []
    assert [c.name.rpartition("[")[2] for c in backward.comparisons] == ["0]", "3]", "4]"]


@pytest.mark.sweep
@pytest.mark.usefixtures("own_objects")
def test_inputs_that_wait_for_backward_are_bounded_in_memory() -> None:
    """OT-23, and issue: bounded by memory, not by the model."""
    layer, x = torch.nn.Linear(64, 64), torch.randn(32, 64)

    def step(tool: op_tools.OpAutoCompare) -> list[float]:
        with tool:
            y = x
            for _ in range(6):
                y = torch.tanh(layer(y).t()).t() + x
            waiting.append((tool._held.bytes, folders()))
            y.sum().backward()
        return [c.max_abs for record in tool.results for c in record.comparisons]

    def folders() -> int:
        return sum(
            len(list(f.iterdir())) for f in Path(tempfile.gettempdir()).glob("dicp-inputs-*")
        )

    waiting: list[tuple[int, int]] = []
    before = folders()
    in_memory = step(op_tools.OpAutoCompare(quiet=True))
    on_disk = step(tool := op_tools.OpAutoCompare(quiet=True, held_bytes=16384))
    assert on_disk == in_memory and tool.failures == []
    assert waiting[0][0] > 16384 >= waiting[1][0] and waiting[1][1] > before
    assert {r.kind for r in tool.results} == {"forward", "backward"}
    del tool
    gc.collect()
    assert folders() == before, "nothing stays on disk"


def test_inputs_that_are_lost_on_disk_do_not_end_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **options: str(tmp_path))
    x = torch.randn(64, requires_grad=True)
    with op_tools.OpAutoCompare(["torch.sin"], quiet=True, held_bytes=16) as tool:
        y = torch.sin(x * 2)
        for file in tmp_path.glob("*.safetensors"):
            file.unlink()
        y.sum().backward()
    assert x.grad is not None and tool.failures == []
    assert "cannot be read" in tool.results[-1].note


@pytest.mark.usefixtures("own_objects")
def test_inputs_are_collected_while_others_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection may run in any allocation, also while the same thread changes the counts."""
    held = HeldInputs(100)

    def hold(size: int) -> Held:
        x = torch.ones(size)
        return held.hold((x,), {}, [x._version])

    unreachable = hold(10)
    unreachable.itself = unreachable  # type: ignore[attr-defined]
    del unreachable
    make = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **options: (gc.collect(), make(**options))[1])
    thread = threading.Thread(target=hold, args=(1000,), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and held.bytes == 0


def test_one_infinity_hides_no_other_error() -> None:
    """A half overflows in eager where float64 does not: its other elements are judged."""
    real = torch.tensor([1e5, 1.0, 2e3], dtype=torch.float64)
    eager, wrong = real.half(), real.half() * torch.tensor([1, 1, 3])
    assert compare("o", "o", real.half(), real, eager).fp64
    assert compare("o", "o", (real / 100).half(), real / 100, eager / 100).fp64, "fused"
    assert not compare("o", "o", wrong, real, eager).fp64
    assert not compare("o", "o", torch.tensor([torch.nan, 1, 2e3]).half(), real, eager).fp64
    assert not compare("o", "o", torch.tensor([1.0, 1, torch.inf]).half(), real, eager).fp64
    for a, b in ((1.0, math.inf), (-math.inf, math.inf), (math.inf, 1.0)):
        assert not compare("o", "o", a, b).allclose and compare("o", "o", b, b).allclose


class SwitchingLock:
    """Runs another thread after its first release."""

    def __init__(self, other: Callable[[], Any]) -> None:
        self.lock, self.others = threading.Lock(), [other]

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *_: Any) -> None:
        self.lock.release()
        if self.others:
            self.others.pop()()


def test_gradients_stay_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads of autograd reach the last two nodes of a call."""
    monkeypatch.setattr(gradients, "at_end_of_backward", lambda finish: None)
    reads, returned, read = threading.Event(), threading.Event(), []

    def done(found: gradients.Gradients) -> None:
        reads.set()
        returned.wait(20)
        read.extend(found.outputs)

    def reach_the_last() -> None:
        thread.start()
        reads.wait(20)

    lock: Any = SwitchingLock(reach_the_last)
    found = gradients.Gradients([torch.ones(2)], [], (0,), waiting=2, lock=lock)
    thread = threading.Thread(target=found.reached, args=(done,))
    found.reached(done)
    returned.set()
    thread.join()
    assert read[0] is not None and found.outputs == [None]


def test_random_operators_and_those_without_a_cpu_form(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(64)
    with op_tools.OpAutoCompare() as tool:
        F.dropout(x, 0.5)
        torch.nn.init.normal_(x)
        x.resize_(0)
    assert tool.failures == []
    notes = {r.operator: r.note for r in tool.results}
    assert notes["torch.nn.functional.dropout"] == "random operator: shape and dtype only"
    assert notes["torch.nn.init.normal_"] == "random operator: shape and dtype only"

    def no_reference(x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("no kernel for Double")
        return x + 1

    module = type(op_tools)("third_party_f64")
    no_reference.__module__, no_reference.__qualname__ = "third_party_f64", "no_reference"
    module.no_reference = no_reference
    import sys

    sys.modules["third_party_f64"] = module
    y = torch.ones(2)
    with op_tools.apply_feature("third_party_f64.no_reference", "autocompare"):
        assert module.no_reference(y).tolist() == [2, 2], "the program goes on"
    assert "no CPU form: no kernel for Double" in capsys.readouterr().out


def test_what_draws_is_told_from_the_generators() -> None:
    """Composite operators draw inside; attention is compared unless it has dropout."""
    q = torch.randn(1, 2, 4, 4)
    attention = F.scaled_dot_product_attention
    with op_tools.OpAutoCompare(quiet=True) as tool:
        F.gumbel_softmax(q)
        torch.rand(2, generator=torch.Generator())
        attention(q, q, q, dropout_p=0.5)
        attention(q, q, q)
        F.dropout(q, 0.5, training=False)
    assert tool.failures == []
    assert [r.note for r in tool.results if r.operator != "torch.randn"] == [RANDOM] * 3 + [""] * 2


def test_one_csv_with_one_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OP_TOOLS_MAX_CACHE_SIZE", "2")
    x = torch.ones(2)
    with op_tools.OpAutoCompare(quiet=True), op_tools.OpTimeMeasure(quiet=True):
        for _ in range(7):
            torch.add(x, 1)
    for folder, first in (
        ("op_autocompare_result", "forward_id"),
        ("op_time_measure_result", "name"),
    ):
        (file,) = Path("op_tools_results", folder).iterdir()
        rows = list(csv.reader(file.open()))
        assert [row[0] for row in rows].count(first) == 1 and len(rows) > 7
    assert rows[0] == ["name", "forward_id", "forward_elasped", "backward_elasped", "unit",
                       "input", "output", "grad_inputs", "grad_outputs"]  # fmt: skip
    assert re.fullmatch(r"op_elasped_info_pid\d+_[\d-]+\.csv", file.name)
    monkeypatch.setenv("OP_TOOLS_MAX_CACHE_SIZE", "many")
    with (
        pytest.raises(ToolVariableError, match="OP_TOOLS_MAX_CACHE_SIZE is 'many'"),
        op_tools.OpTimeMeasure(quiet=True),
    ):
        torch.add(x, 1)


def test_a_backward_after_its_call_is_saved_is_a_row_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OP_TOOLS_MAX_CACHE_SIZE", "2")
    x = torch.ones(2, requires_grad=True)
    with op_tools.OpTimeMeasure(["torch.add", "torch.Tensor.sum"], quiet=True) as tool:
        torch.add(torch.add(torch.add(x, 1), 1), 1).sum().backward()
    (file,) = Path("op_tools_results", "op_time_measure_result").iterdir()
    rows = list(csv.DictReader(file.open()))
    assert len(tool.results) == 4 and all(record.backward for record in tool.results)
    for times in ("forward_elasped", "backward_elasped"):
        assert len({row["forward_id"] for row in rows if row[times]}) == 4, times


def test_silent_tools_write_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OP_TOOLS_MAX_CACHE_SIZE", "2")
    with op_tools.OpAutoCompare().silently() as tool:
        for _ in range(7):
            torch.add(torch.ones(2), 1)
    tool.flush()
    assert len(tool.results) >= 7
    assert not Path("op_tools_results").exists() and not caplog.records


def test_time_forward_and_backward(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with op_tools.OpTimeMeasure(["torch.Tensor.matmul"]) as tool:
        (x @ x).sum().backward()
    (record,) = tool.results
    assert record.forward > 0 and record.backward > 0
    text = capsys.readouterr().out
    assert re.search(r"\| +name +\| +forward_id +\| forward_elasped \| unit \|", text)
    assert re.search(r"\| torch.Tensor.matmul \| [\d/-]+ +\| +\d+\.\d{8} +\| +ms +\|", text)
    assert "backward_elasped | unit |" in text and "own 0.0" in text and "share" in text
    with op_tools.OpTimeMeasure(["torch.div"], style="line"):
        torch.div(x, 2)
    out = capsys.readouterr().out
    assert re.search(r"^SyncExecuteTimer: torch.div forward elasped \d+\.\d{8} ms$", out, re.M)


def test_fallback_keeps_dtype_graph_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(3, 4, dtype=torch.float16, requires_grad=True)
    out = torch.empty(3, 4)
    z = torch.zeros(3)
    with op_tools.OpFallback():
        y = torch.nn.functional.gelu(x)
        torch.add(torch.ones(3, 4), 1, out=out)
        alias = z.add_(2)
    assert y.dtype == torch.float16 and y.requires_grad
    y.sum().backward()
    assert x.grad is not None and out.unique().tolist() == [2]
    assert alias is z and z.tolist() == [2, 2, 2]
    text = capsys.readouterr().out
    assert "dtype_convert_back_dict:{}" in text
    for name in ("input(device)", "input(cpu)", "output(device)", "output(cpu)"):
        assert f"torch.nn.functional.gelu {name}" in text


def test_fallback_widens_what_the_cpu_does_not_take(capsys: pytest.CaptureFixture[str]) -> None:
    def picky(x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float16:
            raise RuntimeError("\"picky\" not implemented for 'Half'")
        return x * 2

    import sys

    module = type(op_tools)("third_party_half")
    picky.__module__, picky.__qualname__, module.picky = "third_party_half", "picky", picky
    sys.modules["third_party_half"] = module
    x = torch.ones(3).half().requires_grad_()
    with op_tools.apply_feature("third_party_half.picky", "fallback"):
        y = module.picky(x)
    assert y.dtype == torch.float16 and y.requires_grad and y.tolist() == [2, 2, 2]
    assert "dtype_convert_back_dict:{torch.float32: torch.float16}" in capsys.readouterr().out


def test_cast_rules_are_read_at_each_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    x = torch.randn(4, 4, dtype=torch.bfloat16)
    inside = []

    def run(dtype: torch.dtype = torch.bfloat16) -> str:
        with op_tools.OpDtypeCast() as _, op_tools.OpObserve():
            y = F.linear(x.to(dtype), x.to(dtype))
            x.view(16)
        inside.append(y.dtype)
        assert y.dtype == dtype
        return capsys.readouterr().out

    text = run()
    assert re.search(
        r"\| torch.nn.functional.linear \| +input\[0\] +\| torch.bfloat16 -> torch.float32 \| "
        r"\{torch.float16: torch.float32, torch.bfloat16: torch.float32\} \|", text)  # fmt: skip
    assert "torch.float32 -> torch.bfloat16" in text
    assert "OpDtypeCastHook on torch.Tensor.view" not in text
    monkeypatch.setenv("OP_DTYPE_CAST_DICT", "torch.bfloat16->torch.double, half->float")
    assert "torch.bfloat16 -> torch.float64" in run()
    assert "torch.float16 -> torch.float32" in run(torch.float16)
    assert "->" not in run(torch.float64)
    monkeypatch.setenv("OP_DTYPE_CAST_DICT", "bfloat16=float")
    with pytest.raises(ToolVariableError, match="OP_DTYPE_CAST_DICT is 'bfloat16=float'"):
        run()


def test_cast_results_have_the_dtype_that_the_inputs_promote_to() -> None:
    rules = "torch.half->torch.double,torch.float->torch.bfloat16"
    with op_tools.OpDtypeCast(["torch.mul"], rules=rules, quiet=True):
        product = torch.mul(torch.ones(2).half(), torch.ones(2))
    assert product.dtype == torch.float32


def test_casts_hold_under_autocast_and_leave_its_dtypes() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(4, 256).bfloat16(), torch.randn(4, 256)
    wide = F.linear(x.float(), w).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.equal(F.linear(x, w), wide)
        with op_tools.OpDtypeCast(quiet=True):
            assert torch.equal(F.linear(x, w), wide)
            assert F.mse_loss(x, x.float()).dtype == torch.float32


def test_cast_in_place_writes_the_programs_tensor() -> None:
    x = torch.ones(3, dtype=torch.bfloat16)
    with op_tools.OpDtypeCast(quiet=True):
        y = x.mul_(3)
    assert y is x and x.dtype == torch.bfloat16 and x.tolist() == [3, 3, 3]


def test_cast_in_place_writes_the_programs_memory_once() -> None:
    """Another view of what is written is no input that the operator changed."""
    x, y = torch.full((3,), 3.0).bfloat16(), torch.full((3,), 3.0).bfloat16()
    with op_tools.OpDtypeCast(quiet=True):
        x.mul_(x.view(3))
        torch.add(y, 1, out=y.detach())
    assert x.tolist() == [9, 9, 9] and y.tolist() == [4, 4, 4]


@pytest.mark.parametrize("tool_runs", ["in backward", "in forward only"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_cast_holds_where_a_checkpoint_recomputes(
    reentrant: bool, tool_runs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    linear, start = torch.nn.Linear(64, 64).bfloat16(), torch.randn(40, 64).bfloat16()

    def gradient_of(step: Callable[..., Any]) -> torch.Tensor:
        x = start.clone().requires_grad_()
        torch.manual_seed(1)
        with op_tools.OpObserve(["torch.Tensor.sin"]), op_tools.OpDtypeCast(quiet=True):
            loss = step(lambda x: F.dropout(linear(x).sin(), 0.3), x).sum()
            if tool_runs == "in backward":
                loss.backward()
        if tool_runs != "in backward":
            loss.backward()
        assert x.grad is not None
        return x.grad

    wanted = gradient_of(lambda function, x: function(x))
    shown = capsys.readouterr().out.count("torch.Tensor.sin")
    found = gradient_of(lambda function, x: checkpoint(function, x, use_reentrant=reentrant))
    assert 0 < capsys.readouterr().out.count("torch.Tensor.sin") <= shown
    assert torch.equal(wanted, found)


@pytest.mark.parametrize("reentrant", [False, True])
def test_fallback_holds_where_a_checkpoint_recomputes(
    reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    around = op_tools.OpFallback.around

    def counted(tool: Any, call: Any, proceed: Any) -> Any:
        ran.append(call.name)
        return around(tool, call, proceed)

    monkeypatch.setattr(op_tools.OpFallback, "around", counted)
    x = torch.ones(3, requires_grad=True)
    with op_tools.OpFallback(["torch.exp", "torch.cos"], quiet=True):
        y = checkpoint(lambda x: torch.cos(torch.exp(x)), x, use_reentrant=reentrant).sum()
        assert ran == ["torch.exp", "torch.cos"]
        y.backward()
    assert ran == ["torch.exp", "torch.cos"] * 2


def test_cast_leaves_views_alone() -> None:
    x, z = torch.ones(4).bfloat16(), torch.ones(2, dtype=torch.complex64)
    rules = "torch.bfloat16->torch.float32,torch.complex64->torch.complex128"
    with op_tools.OpDtypeCast(quiet=True, rules=rules):
        torch.unsafe_split(x, 2)[0].zero_()
        torch.real(z).zero_()
        torch.conj(z).mul_(2j)
        assert z.cdouble().dtype == torch.complex128
    assert x.tolist() == [0, 0, 1, 1] and z.tolist() == [0, 0]


def test_overflow_names_the_first_offender(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.full((3,), 300.0).half()
    with op_tools.OpOverflowCheck(only_bad=True) as tool:
        torch.tanh(x)
        y = torch.mul(x, x)  # too large
        torch.add(y, 1)
    first = tool.first
    assert first is not None and first.operator == "torch.mul"
    assert "too large" in str(first.call_site)
    text = capsys.readouterr().out
    assert "torch.tanh outputs" not in text and "norm_inf" in text
    assert "first inf or nan in torch.mul outputs: torch.mul " in text
    assert "\ntorch.mul outputs: 3 inf of 3 values\n" in text
    assert text.endswith("# too large    3 inf of 3 values\n")
    with (
        pytest.raises(OverflowFoundError, match="torch.mul outputs holds inf or nan: 3 inf of 3 "),
        op_tools.OpOverflowCheck(raise_on_bad=True, quiet=True),
    ):
        torch.mul(x, x)
    with op_tools.OpOverflowCheck():
        torch.add(torch.tensor([3.0, 4.0]), 0)
    row = next(r for r in capsys.readouterr().out.splitlines() if "torch.add outputs" in r)
    cells = [c.strip() for c in row.strip("|").split("|")]
    assert cells[1:] == ["False", "3", "4", "3.5", "0.5", "7", "5", "4"]


def test_a_bf16_training_step_is_unchanged_under_all_tools(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Embedding(50, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 50)
        ).bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = torch.arange(20) % 50
        for _ in range(2):
            loss = F.cross_entropy(model(tokens), tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [loss, *model.parameters()]

    want = train()
    compare_tool = op_tools.OpAutoCompare(quiet=True, rule="fp64")
    with op_tools.OpCapture(quiet=True, first=2), compare_tool, op_tools.OpTimeMeasure(quiet=True):
        got = train()
    assert all(map(torch.equal, got, want))
    assert compare_tool.failures == [], [r.operator for r in compare_tool.failures]


def test_collectives_are_captured_and_timed() -> None:
    import torch.distributed as dist

    plain = dist.all_reduce
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = torch.ones(3)
        capture = op_tools.OpCapture(["torch.distributed.*"], quiet=True)
        with capture, op_tools.OpTimeMeasure(["torch.distributed.*"], quiet=True) as timer:
            dist.all_reduce(x, async_op=True).wait()
            dist.all_gather([torch.zeros(3)], x)
            dist.gather_object({"a": 1}, [None])
    finally:
        dist.destroy_process_group()
    operators = [f"torch.distributed.{n}" for n in ("all_reduce", "all_gather", "gather_object")]
    assert [r.name for r in timer.results] == operators
    assert [r.outputs for r in timer.results] == ["float32[3]", "float32[3]", ""]
    assert {path.name for path in capture.saved} == {"input", "output"}
    found = [storage.load(path).value for path in capture.saved if path.name == "output"]
    assert found[0].tolist() == [1, 1, 1] and found[1][0].tolist() == [1, 1, 1]
    assert found[2] == [{"a": 1}], "what a collective writes is its output"
    assert dist.all_reduce is plain, "nothing stays wrapped"
