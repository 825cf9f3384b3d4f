"""The case suite's parts: case files, generators, reference data, verdicts, the command line."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dicp.conformance.arguments import as_commands
from dicp.conformance.suite.case import (
    Case,
    Operand,
    Saved,
    function,
    given_operand,
    parameter_names,
)
from dicp.conformance.suite.codec import Decoder, Encoder
from dicp.conformance.suite.database import database
from dicp.conformance.suite.database_cases import database_cases
from dicp.conformance.suite.files import case_entries, read_case_file
from dicp.conformance.suite.judge import Judge
from dicp.conformance.suite.parameters import NOT_VARIED, reason, unvaried
from dicp.conformance.suite.reference import OperatorData, computed, is_current, stored, write
from dicp.conformance.suite.runs import CaseUnit, Outcome, Runner, channels_last
from dicp.conformance.suite.sources import UnknownOperatorError, cases_of, chosen, file_entries
from dicp.conformance.torch_tests.op_tests import OperatorCase, _with_copy_to_out
from dicp.errors import CaseError, CaseFileError, ReferenceDataError
from dicp.op_tools.cases import NotStorableError
from dicp.testing.evaluation import Results
from dicp.testing.sample import part

OPERATOR_PARTS = 24
MORE = ".more"
"""How the names end whose cases give parameters of the database's operators second values."""
ENTRY = '[[case]]\nname = "x"\ncall = "torch.add"\ndtypes = ["float32"]\n'
TWO = ENTRY + "[case.tensors.input]\nshape = [[2], [3]]\n[case.tensors.other]\nshape = [[1]]\n"


def cases(tmp_path: Path, text: str) -> tuple[Case, ...]:
    path = tmp_path / "chip.toml"
    path.write_text(text)
    read_case_file.cache_clear()
    return read_case_file(path)[0].cases


def drawn(spec: Operand) -> torch.Tensor:
    return spec.draw(torch.Generator().manual_seed(0))


def test_lists_zip_and_one_value_stands_for_all(tmp_path: Path) -> None:
    text = TWO.replace('["float32"]', '["float32", "int64"]')
    found = cases(tmp_path, text + "[case.parameters]\nalpha = [1, 2]\n")
    assert [case.key for case in found] == ["float32-0", "float32-1", "int64-0", "int64-1"]
    assert str(found[1]) == "torch.add(input=float32[3], other=float32[1], alpha=2)"
    assert found[3].operands[0].dtype == "int64"


def test_every_field_of_a_case(tmp_path: Path) -> None:
    text = """
[[case]]
name = "x"
call = "torch.add"
dtypes = ["float32", "bfloat16"]
tags = ["detection", "resnet50"]
tolerance = { bfloat16 = [1e-2, 2e-2] }
inplace = true
random = true
no_reference = true
saved = { call = "torch.neg", given = ["input"], results = { other = 0 } }
[case.tensors.0]
shape = [[2, 3]]
strides = [[0, 2]]
dtype = "int32"
gen = "randint(3, 4)"
[case.tensors.input]
value = [[[1.5, -2.0]]]
grad = true
[case.tensors.parts]
stack = true
shape = [[[2], [3, 4]]]
grad = true
[case.parameters]
flag = [{ none = true }]
dtype = [{ dtype = "float64" }]
part = [{ slice = [0, 4, 2] }]
"""
    single, half = cases(tmp_path, text)
    assert (single.tolerance, half.tolerance) == (None, (1e-2, 2e-2))
    assert single.inplace and single.random and not single.reference
    assert single.tags == ("detection", "resnet50")
    assert single.saved == Saved("torch.neg", ("input",), {"other": 0})
    (first,) = single.args
    assert first == Operand((2, 3), "int32", (0, 2), "randint(3, 4)")
    assert drawn(first).stride() == (0, 2) and drawn(first).eq(3).all()
    assert single.kwargs["input"].value.tolist() == [[1.5, -2.0]] and single.kwargs["input"].grad
    parts = single.kwargs["parts"]
    assert [part.shape for part in parts] == [(2,), (3, 4)] and all(part.grad for part in parts)
    assert not any(single.flags)  # no gradients of what is written
    assert single.kwargs["flag"] is None and single.kwargs["dtype"] is torch.float64
    assert single.kwargs["part"] == slice(0, 4, 2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (ENTRY + '[case.tensors.a]\nshape = [[2], [3]]\n[case.parameters]\nk = [1, 2, 3]\n',
         "a.shape has 2 values, k has 3"),
        (ENTRY + "[case.parameters]\nk = 1\n", "k = 1 is no list of values"),
        (ENTRY + "[case.tensors.a]\nshape = [[2]]\nstrides = [[1, 1]]\n", "do not fit shape"),
        (ENTRY + "[case.tensors.a]\nshape = [[-2]]\n", "[-2] is no list of sizes"),
        (ENTRY + "[case.tensors.a]\ngen = 'randn'\n", "neither shape nor value"),
        (ENTRY + "[case.tensors.a]\nshape = [[2]]\ngen = 'rand'\n", "Did you mean 'randn'?"),
        (ENTRY + "[case.tensors.a]\nshape = [[2]]\ngen = 'uniform(__import__)'\n",
         "unknown generator"),
        (ENTRY + "[case.tensors.a]\nshap = [[2]]\n", "unknown field 'shap'. Did you mean 'shape'?"),
        (ENTRY.replace("float32", "flaot32"), "unknown dtype 'flaot32'. Did you mean 'float32'?"),
        (ENTRY.replace('call = "torch.add"', ""), "call is missing"),
        ("case = 3 =", "it cannot be read"),
        ("case = 3", "case = 3 has another type"),
        ("case = [3]", "3 is no table of fields"),
        (ENTRY + 'inplace = "false"\n', "inplace = 'false' has another type"),
        (ENTRY + "tolerance = { float32 = [1e-3] }\n", "tolerance [0.001] is no pair of numbers"),
        (ENTRY + "tolerance = { float32 = [nan, 0] }\n", "tolerance [nan, 0] is no pair"),
        (ENTRY + 'saved = { call = "torch.neg" }\n', "KeyError: 'given'"),
        (ENTRY + "[case.tensors.a]\nshape = []\n", "a.shape has no values"),
        (ENTRY + "[case.tensors.1]\nshape = [[2]]\n", "positions 1 do not count from 0"),
        (ENTRY + "[case.tensors.a]\nvalue = [[[1], [2, 3]]]\n", "expected sequence of length 1"),
    ],
)  # fmt: skip
def test_a_wrong_case_file_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(CaseFileError) as error:
        cases(tmp_path, text)
    assert problem in str(error.value) and str(tmp_path / "chip.toml") in str(error.value)


@pytest.mark.parametrize(
    "call",
    ["os.system", "torch.no_such", "torch", "builtins.eval", "", "torch.load", "torch.hub.load",
     "torch.from_file", "torch.compile", "torch.import_ir_module", "torch.ops.load_library",
     "dicp.cache.Cache", "torch.optim.adam.torch.load", "torch.ops.aten.from_file",
     "torch.ops.aten.from_file.default", "torch.ops.aten.add.overloads",
     "torch.ops.aten.add.Tensor.name"],
)  # fmt: skip
def test_a_call_is_a_function_of_known_packages(call: str) -> None:
    with pytest.raises(CaseError, match="unknown call"):
        function(call)


def test_a_call_may_be_in_a_module_that_its_package_hides() -> None:
    assert function("torch.optim.adam.adam").__name__ == "adam"
    assert function("torch.Tensor.add_") is torch.Tensor.add_


def test_generators() -> None:
    square = (6, 6)
    assert drawn(Operand((2000,), "float32", None, "uniform(2, 3)")).aminmax() == pytest.approx(
        (2.0, 3.0), abs=0.01
    )
    assert set(drawn(Operand((99,), "int64", None, "randint(-1, 2)")).tolist()) == {-1, 0, 1}
    assert drawn(Operand((99,), "float16", None, "positive")).min() > 0
    assert drawn(Operand((999,), "bool", None, "mask(0.25)")).double().mean() == pytest.approx(
        0.25, abs=0.06
    )
    sym = drawn(Operand(square, "float64", None, "sym"))
    assert torch.equal(sym, sym.mT)
    assert torch.linalg.eigvalsh(drawn(Operand(square, "float64", None, "spd"))).min() > 0
    assert drawn(Operand((3, 5), "int64", None, "perm")).sort(-1).values.eq(torch.arange(5)).all()
    assert drawn(Operand((4,), "complex64")).imag.abs().min() > 0
    x1, y1, x2, y2 = drawn(Operand((50, 4), "float32", None, "boxes(8)")).unbind(-1)
    assert (x1 < x2).all() and (y1 < y2).all() and max(x2.max(), y2.max()) < 8
    regions = drawn(Operand((50, 5), "float32", None, "regions(8, 3)"))
    assert set(regions[:, 0].tolist()) == {0.0, 1.0, 2.0}
    gapped = drawn(Operand((2, 3), "float32", (10, 2)))
    assert gapped.stride() == (10, 2) and gapped.unique().numel() == 6


def test_saved_arguments_are_results_of_the_forward_call() -> None:
    entries = {entry.name: entry for entry in case_entries()}
    case = entries["max_pool2d_backward"].cases[0].drawn()
    grad, x, indices = (case.kwargs[name].value for name in ("grad_output", "self", "indices"))
    _, expected = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
    assert torch.equal(indices, expected)
    assert computed(case).eager.outputs[0].count_nonzero() == grad.count_nonzero()


def test_values_and_their_tensors_survive_json() -> None:
    values = {
        "plain": [1, 2.5, "x", True, None, (3, [4])], "bad": [float("inf"), 1 + 2j],
        "torch": [torch.float16, torch.channels_last, torch.strided, slice(1, None, 2), ...],
        "tensors": [torch.randn(3, 4).t(), torch.ones(2, 1).expand(2, 3), torch.tensor(5),
                    torch.randn(2, dtype=torch.complex64).conj(), torch.zeros(0, 3)],
    }  # fmt: skip
    encoder = Encoder("0")
    form = json.loads(json.dumps(encoder.encode(values)))
    back = Decoder(encoder.tensors).decode(form)
    assert {k: v for k, v in back.items() if k != "tensors"} == {
        k: v for k, v in values.items() if k != "tensors"
    }
    for mine, theirs in zip(back["tensors"], values["tensors"], strict=True):
        assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype
        assert theirs.numel() == 0 or mine.stride() == theirs.stride()
    for odd in (object(), torch.eye(2).to_sparse()):
        with pytest.raises(NotStorableError):
            encoder.encode(odd)


ADD = Case(
    "add", "float32-0", "torch.add", "float32",
    (Operand((4, 6), "float32", (6, 1), grad=True), Operand((6,), "float32")), {"alpha": 2},
)  # fmt: skip


def test_reference_data_hold_what_eager_and_float64_give(tmp_path: Path) -> None:
    inplace = replace(ADD, key="in", call="torch.Tensor.add_", inplace=True)
    wrong = replace(ADD, key="wrong", args=())
    written = write(tmp_path, "add", [ADD, inplace, wrong], "cpu", {"samples": 1})
    assert written.cases == 2 and list(written.left_out.values()) == [1]
    assert stored(tmp_path) == ["add"]
    assert is_current(tmp_path, "add", {"samples": 1}) and not is_current(tmp_path, "add", {})
    first, second = OperatorData.read(tmp_path, "add").references()
    (x, y), words = first.case.arguments()
    assert torch.equal(first.eager.outputs[0], torch.add(x, y, **words))
    assert first.truth is not None and first.truth.outputs[0].dtype is torch.float64
    assert torch.equal(first.truth.outputs[0], torch.add(x.double(), y.double(), alpha=2))
    assert first.eager.grads[0].shape == (4, 6) and first.eager.grads[1] is None
    (x, y), words = second.case.arguments()
    assert torch.equal(second.eager.inputs[0], torch.add(x, y, **words))
    assert torch.equal(second.eager.inputs[1], y)
    from safetensors.torch import load_file

    assert load_file(tmp_path / "add.safetensors")


@pytest.mark.parametrize("file", ["add.safetensors", "add.json"])
def test_damaged_data_are_refused(tmp_path: Path, file: str) -> None:
    write(tmp_path, "add", [ADD], "cpu", {})
    path = tmp_path / file
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    with pytest.raises(ReferenceDataError, match=rf"add\..*gen_data --fname add --data {tmp_path}"):
        OperatorData.read(tmp_path, "add")
    assert not is_current(tmp_path, "add", {}), "gen_data makes them again"


def test_data_of_another_version_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "add", [ADD], "cpu", {})
    path = tmp_path / "add.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 7'))
    with pytest.raises(ReferenceDataError, match="has version 7, this release reads version 1"):
        OperatorData.read(tmp_path, "add")


def results(*outputs: Any) -> Results:
    return Results(list(outputs), [], [], set())


def test_one_wrong_element_fails_a_case() -> None:
    exact = torch.linspace(1, 2, 100_000, dtype=torch.float64)
    eager = exact.float()
    got = eager.clone()
    assert not Judge().verdict(results(got), results(eager), results(exact)).problem
    got[77] += 3.1e-3
    found = Judge((1e-5, 1e-5)).verdict(results(got), results(eager), results(exact))
    assert found.problem.startswith("max abs error 0.0031 at (77,) (atol 1e-05, rtol 1e-05)")
    assert found.index == (77,) and found.needed_atol == pytest.approx(3.1e-3, rel=0.01)


def test_an_element_fails_by_either_rule() -> None:
    exact = torch.tensor([1.0, 1000.0], dtype=torch.float64)
    eager = exact.float()
    loose, tight = Judge((1.0, 1.0)), Judge((1e-6, 1e-9))
    beyond_float64_rule = results(torch.tensor([1.0, 1001.0]))
    assert loose.verdict(beyond_float64_rule, results(eager), results(exact)).problem
    beyond_tolerance = results(torch.tensor([1.0, 1000.0005]))
    found = tight.verdict(beyond_tolerance, results(eager), results(exact)).problem
    assert "max abs error 0.00049 at (1,)" in found and "what is allowed" not in found


def test_what_cancels_in_float64_is_right() -> None:
    """The gradient of the weight in a layer norm of one element, by two formulas."""
    zero, rest = torch.zeros(1, dtype=torch.float64), torch.tensor([9.9e-16], dtype=torch.float64)
    assert not Judge().one(zero, rest, rest).problem
    assert Judge().one(zero, 1000 * rest, 1000 * rest).problem


def test_nan_equals_nan_and_whole_numbers_are_exact() -> None:
    odd = torch.tensor([float("nan"), float("inf"), 1.0])
    assert not Judge().verdict(results(odd), results(odd.clone()), None).problem
    assert Judge().verdict(results(odd.nan_to_num()), results(odd), None).problem
    whole = torch.tensor([2, 3])
    assert Judge((5.0, 5.0)).verdict(results(whole), results(whole + 1), None).problem
    assert Judge().verdict(results(whole.int()), results(whole), None).problem
    assert Judge().verdict(results(3), results(4), None).problem == "3, eager has 4"


def test_random_results_are_compared_by_their_distribution() -> None:
    gen = torch.Generator().manual_seed(0)
    a, b = (torch.randn(4000, generator=gen) for _ in range(2))
    judge = Judge(random=True)
    assert not judge.verdict(results(a), results(b), None).problem
    assert "another distribution" in judge.verdict(results(a * 1.5), results(b), None).problem
    assert judge.verdict(results(a[:5]), results(b), None).problem


EQUAL = torch.tensor(
    [[2.0, 1, 2, 1, 2, 3], [1, 1, 1, 1, 2, 2], [2, 1, 3, 3, 2, 1], [float("nan")] * 5 + [4]]
)
Function = Callable[..., Any]


def outcome_of(
    monkeypatch: pytest.MonkeyPatch, device: Function, call: str, *args: Any,
    x: torch.Tensor = EQUAL, **kwargs: Any,
) -> Outcome:  # fmt: skip
    """That of a case whose first argument has equal elements, on a device that computes so."""
    case = Case(call, "", call, "float32", (given_operand(x, grad=True), *args), kwargs)
    reference = computed(case)
    monkeypatch.setattr("dicp.conformance.suite.runs.function", lambda name: device)
    return Runner(CaseUnit("", "run_test", "cpu", "", ())).outcome(reference)


def from_the_end(operator: Function, dim: int) -> Function:
    """The operator with the last of equal elements' positions where eager has the first."""

    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        results = operator(x.flip(dim), *args, **kwargs)
        *others, positions = [results] if isinstance(results, torch.Tensor) else results
        return [*others, x.shape[dim] - 1 - positions]

    return run


def set_to(operator: Function, place: tuple[int, int], position: int) -> Function:
    """The operator with another position at a place of its last result."""

    def run(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        results = operator(*args, **kwargs)
        *others, positions = [results] if isinstance(results, torch.Tensor) else results
        positions = positions.clone()
        positions[place] = position
        return [*others, positions]

    return run


@pytest.mark.parametrize(
    ("call", "args", "dim"),
    [
        ("torch.sort", (0,), 0), ("torch.ops.aten.sort.default", (), -1),
        ("torch.argsort", (1, True), 1), ("torch.topk", (4,), -1),
        ("torch.ops.aten.topk.default", (2, 0), 0), ("torch.kthvalue", (3,), -1),
        ("torch.kthvalue", (3, 0, True), 0), ("torch.median", (1,), 1),
        ("torch.nanmedian", (0, True), 0), ("torch.mode", (0,), 0),
    ],
)  # fmt: skip
def test_any_position_of_equal_elements_is_right(
    monkeypatch: pytest.MonkeyPatch, call: str, args: tuple[Any, ...], dim: int
) -> None:
    x = EQUAL[:3] if call == "torch.mode" else EQUAL  # the mode of NaN has no definition
    device = from_the_end(function(call), dim)
    found, eager = device(x, *args)[-1], function(call)(x, *args)
    assert not torch.equal(found, eager if isinstance(eager, torch.Tensor) else eager[1])
    outcome = outcome_of(monkeypatch, device, call, *args, x=x)
    assert outcome.result == "passed", outcome.reason


@pytest.mark.parametrize(
    ("call", "args", "kwargs"),
    [
        ("torch.sort", (), {"dim": 1, "stable": True}),
        ("torch.argsort", (), {"dim": 1, "stable": True}),
        ("torch.max", (1,), {}), ("torch.argmax", (1,), {}),
    ],
)  # fmt: skip
def test_positions_are_exact_where_the_order_of_equal_elements_is_promised(
    monkeypatch: pytest.MonkeyPatch, call: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert outcome_of(monkeypatch, function(call), call, *args, **kwargs).result == "passed"
    device = from_the_end(function(call), 1)
    assert outcome_of(monkeypatch, device, call, *args, **kwargs).result == "failed"


@pytest.mark.parametrize(
    ("call", "args", "position", "element"),
    [
        ("torch.sort", (), 4, "another"), ("torch.topk", (2,), 0, "another"),
        ("torch.kthvalue", (3, 1, True), 4, "another"), ("torch.topk", (2,), 6, "none"),
        ("torch.topk", (2,), -2, "none"), ("torch.sort", (), 0, "repeated"),
        ("torch.argsort", (), 0, "repeated"), ("torch.topk", (2,), 5, "repeated"),
    ],
)  # fmt: skip
def test_a_wrong_or_repeated_position_is_found(
    monkeypatch: pytest.MonkeyPatch, call: str, args: tuple[Any, ...], position: int, element: str
) -> None:
    place = (1, 0 if "kthvalue" in call else 1)
    results = function(call)(EQUAL, *args)
    eager = results if isinstance(results, torch.Tensor) else results[1]
    assert (position in eager[1]) == (element == "repeated" or call == "torch.sort")
    outcome = outcome_of(monkeypatch, set_to(function(call), place, position), call, *args)
    assert outcome.result == "failed" and f"at {place}" in outcome.reason, outcome.reason


def test_a_gradient_goes_to_the_position_that_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    others = from_the_end(torch.topk, 1)

    def run(x: torch.Tensor, k: int) -> list[torch.Tensor]:
        return [torch.topk(x, k)[0], others(x, k)[1]]

    outcome = outcome_of(monkeypatch, run, "torch.topk", 2)
    assert outcome.result == "failed" and "gradient 0" in outcome.reason


def test_the_tests_of_the_database_accept_any_position_of_equal_elements() -> None:
    operator = database()["topk"]
    sample = next(iter(operator.sample_inputs("cpu", torch.float32)))
    out = (torch.empty(4, 2), torch.empty(4, 2, dtype=torch.int64))
    plain = type(sample)(EQUAL.clone().requires_grad_(), args=(2,))
    into = type(sample)(EQUAL, args=(2,), kwargs={"out": out})
    case = OperatorCase(operator, torch.float32, "cpu", None, 1)
    others = from_the_end(torch.topk, 1)
    wrong = set_to(others, (0, 0), 0)
    assert case.problems(others, plain, gradients=True, reference=torch.topk) == []
    assert case.problems(wrong, plain, gradients=True, reference=torch.topk)
    for device, faults in ((others, 0), (wrong, 2)):
        written = case.problems(_with_copy_to_out(device), into, reference=torch.topk)
        assert len(written or ()) == faults, written


def test_layouts_and_narrow_integers(tmp_path: Path) -> None:
    image = torch.randn(2, 3, 4, 5)
    assert channels_last(image).stride() == image.to(memory_format=torch.channels_last).stride()
    assert channels_last(image[0]).stride() == (20, 1, 4)
    index = Case("gather", "k", "torch.gather", "float32",
                 (Operand((4, 3, 5), "float32"), 1, Operand((4, 2, 5), "int64", None,
                                                           "randint(0, 3)")))  # fmt: skip
    total = Case("sum", "k", "torch.sum", "int64", (Operand((4, 3), "int64", None, "randint"),))
    unit = CaseUnit("", "run_test", "cpu", "", (), nhwc_min_dim=3, four_bytes=True)
    seen: list[Any] = []

    class Watched(Runner):
        def _results(self, case: Case, group: list[Any]) -> Any:
            seen.extend(v for v in group[0] if isinstance(v, torch.Tensor))
            return super()._results(case, group)

    assert Watched(unit).outcome(computed(total)).result == "passed"
    assert Watched(unit).outcome(computed(index)).result == "passed"
    assert [value.dtype for value in seen] == [torch.int32, torch.float32, torch.int32]
    assert seen[1].stride() == (15, 1, 3)
    left_out = Runner(replace(unit, filter_dtype=("float32",))).outcome(computed(index))
    assert (left_out.result, left_out.reason) == ("skipped", "--filter_dtype float32")


def test_names_and_patterns() -> None:
    known = ["add", "mul", "mul_sum", "nn.functional.relu"]
    assert chosen(["all_ops"], known) == known
    assert chosen(["mul.*", "add"], known) == ["add", "mul", "mul_sum"]
    assert chosen(["nn.*relu", "mul?sum"], known) == ["mul_sum", "nn.functional.relu"]
    with pytest.raises(UnknownOperatorError, match="'mull'; the nearest is 'mul'"):
        chosen(["mull"], known)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--mode gen_data --fname add mul.* --data d",
         "gen_data --fname add --fname mul.* --data d"),
        ("--mode=test --filter_dtype float64 int64 --nhwc",
         "run_test --filter_dtype float64 --filter_dtype int64 --nhwc"),
        ("--fname add", "run_test --fname add"),
        ("gen_data --fname add", "gen_data --fname add"),
        ("torch-tests --device dipu", "torch-tests --device dipu"),
        ("", "--help"),
    ],
)  # fmt: skip
def test_both_forms_of_the_command_line(given: str, expected: str) -> None:
    assert as_commands(given.split(), ["gen_data", "run_test", "torch-tests"]) == expected.split()


def test_positional_arguments_have_the_names_of_parameters() -> None:
    x = Operand((2, 3), "float32")
    total = Case("sum", "k", "torch.sum", "float32", (x, 1), {"keepdim": True})
    assert total.named == {"self": x, "dim": 1, "keepdim": True}
    pool = Case("pool", "k", "torch.nn.functional.avg_pool2d", "float32", (x, 3))
    assert pool.named["kernel_size"] == 3
    dropout = Case("dropout", "k", "op_db:nn.functional.dropout", "float32", (x, 0.2))
    assert dropout.named["p"] == 0.2


def test_a_given_tensor_is_an_operand() -> None:
    operand = given_operand(torch.randn(3, 2).t(), grad=True)
    assert (operand.shape, operand.strides, operand.grad) == ((2, 3), (1, 2), True)


@pytest.mark.parametrize("name", sorted(name for name in file_entries() if not name.endswith(MORE)))
def test_every_parameter_takes_two_values(name: str) -> None:
    entries = file_entries()[name]
    found = list(cases_of(name, 0))
    assert len({case.key for case in found}) == len(found)
    given = {
        parameter: {str(case.kwargs.get(parameter)) for case in found}
        for parameter in parameter_names(entries[0].call)
        if parameter not in ("self", "input", "args", "kwargs") and parameter not in NOT_VARIED
    }
    assert [parameter for parameter, values in given.items() if len(values) < 2] == []
    assert len({tuple(operand.shape for operand in case.operands) for case in found}) > 1


def test_every_parameter_of_the_database_takes_two_values() -> None:
    """One of OPERATOR_PARTS parts of the operators, another one every eight hours."""
    turn, parts = part(str(OPERATOR_PARTS))
    variants = defaultdict(list)
    for name, op in database().items():
        variants[op.name].append(name)
    dtypes = ("float32", "int64", "bool", "complex64")
    for name in sorted(variants)[turn::parts]:
        cases = [c for one in variants[name] for c in database_cases(one, 0, dtypes)]
        assert unvaried(name, cases) == [], f"{name}: cases/parameters.toml has second values"


def test_a_parameter_with_one_value_is_found() -> None:
    x = Operand((2, 3), "float32")
    cases = [Case("sum", "k", "torch.sum", "float32", (x, dim), {"dtype": None}) for dim in (0, 1)]
    assert unvaried("cumsum", [replace(case, call="torch.cumsum") for case in cases]) == ["dtype"]
    assert "keepdim" in unvaried("sum", cases) and "dtype" not in unvaried("sum", cases)
    assert reason("linalg.lu", "pivot") and not reason("linalg.qr", "pivot")


def test_names_of_case_files_are_not_of_the_database() -> None:
    """A name has one source, so that `--fname` need not import the database for files' names."""
    from dicp.torch_private import op_db  # takes seconds

    assert not {op.name for op in op_db} & set(file_entries())


def test_cases_of_the_database() -> None:
    found = {case.key: case for case in cases_of("add", 2)}
    case = found["float32-1"]
    assert (case.call, case.flags) == ("torch.add", [True, True])
    assert found["float32-inplace"].call == "torch.Tensor.add_" and "int64-1" in found
    assert found["int64-1"].flags == [False, False]
    assert computed(case).truth is not None
    (mish, *_) = cases_of("nn.functional.mish", 1)  # its variant in place is a partial function
    assert mish.call == "torch.nn.functional.mish"
    dropout = list(itertools.islice(cases_of("nn.functional.dropout", 3), 3))
    assert dropout[0].call == "op_db:nn.functional.dropout"
    assert any(computed(case).case.random for case in dropout)
    (inplace,) = (c for c in cases_of("nn.functional.hardsigmoid", 1) if c.key == "float16-inplace")
    assert inplace.call == "op_db:inplace:nn.functional.hardsigmoid" and computed(inplace).truth
    (svd, *_) = cases_of("linalg.svd", 1)
    assert svd.call == "torch.linalg.svd" and not any(svd.flags)  # signs may be chosen
