"""`python -m dicp.conformance gguf`: the form of case files, their errors, what a run prints."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Value
from typer.testing import CliRunner

from dicp.conformance.__main__ import app
from dicp.conformance.per_operator import gguf_commands, gguf_format
from dicp.conformance.per_operator.cases import Case, Operand, Operator
from dicp.conformance.per_operator.gguf_cases import read_cases, write_cases
from dicp.conformance.per_operator.runs import Run
from dicp.conformance.per_operator.table import BY_FORMULA, OPERATORS
from dicp.errors import DicpError, GgufFileError, MissingPackageError
from dicp.vendor.tops.semantics import SEMANTICS

TINY = Case((Operand((5, 4)),))


def command(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["gguf", *map(str, arguments)])
    if isinstance(done.exception, DicpError):
        raise done.exception
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def use(monkeypatch: pytest.MonkeyPatch, name: str, *cases: Case, **others: Any) -> Operator:
    operator = Operator(OPERATORS[name].fn, cases, **others)
    monkeypatch.setitem(OPERATORS, name, operator)
    return operator


def script_runner() -> ModuleType:
    """test/infiniop/runner.py, the command line of the per-operator scripts."""
    path = Path(__file__).parents[1] / "infiniop" / "runner.py"
    spec = importlib.util.spec_from_file_location("runner", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_file_has_the_public_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the package alone reads it."""
    transposed = Case((Operand((3, 4), (1, 5)), Operand((3, 4), (0, 1))))
    use(monkeypatch, "add", transposed, Case((Operand((2,)),) * 2, over=1), outputs=("c",))
    path = tmp_path / "add.gguf"
    code, printed = command("write", "add", "--dtype", "bf16", "-o", path)
    assert code == 0 and "2 cases of add in bf16" in printed
    reader = gguf.GGUFReader(path)
    found = {k: (f.types, f.contents()) for k, f in reader.fields.items() if k[0] in "gt"}
    integers = [Value.ARRAY, Value.INT32]
    assert found == {
        "general.architecture": ([Value.STRING], "infiniop-test"),
        "test_count": ([Value.UINT64], 2),
        "test.0.op_name": ([Value.STRING], "add"),
        "test.0.a.strides": (integers, [5, 1]),
        "test.0.b.strides": (integers, [1, 0]),
        "test.0.b.shape": (integers, [3, 4]),
        "test.0.c.shape": (integers, [3, 4]),
        "test.0.c.strides": (integers, [3, 1]),
        "test.1.op_name": ([Value.STRING], "add"),
        "test.1.over": ([Value.STRING], "b"),
        "test.1.c.shape": (integers, [2]),
        "test.1.c.strides": (integers, [1]),
    }
    assert reader.fields["GGUF.version"].contents() == 3
    tensors = {t.name: (t.tensor_type, t.shape.tolist()) for t in reader.tensors}
    assert tensors == {
        "test.0.a": (Type.BF16, [4, 3]),
        "test.0.b": (Type.BF16, [4, 1]),
        "test.0.c": (Type.BF16, [0, 0]),
        "test.0.ans": (Type.F64, [4, 3]),
        "test.1.a": (Type.BF16, [2]),
        "test.1.b": (Type.BF16, [2]),
        "test.1.c": (Type.BF16, [0]),
        "test.1.ans": (Type.F64, [2]),
    }
    a, b, ans = (next(t.data for t in reader.tensors if t.name == f"test.0.{name}")
                 for name in ("a", "b", "ans"))  # fmt: skip
    wide = [
        (np.asarray(x).view(np.uint16).astype(np.uint32) << 16).view(np.float32) for x in (a, b)
    ]
    assert np.array_equal(wide[0].astype(np.float64) + wide[1].astype(np.float64), ans)


def test_scalars_and_saved_statistics_are_stored(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_cases(path, "gemm", torch.float32)
    reader = gguf.GGUFReader(path)
    alpha = reader.fields["test.1.alpha"]
    assert (alpha.types, alpha.contents()) == ([Value.FLOAT32], 0.5)
    write_cases(path, "maxpool_backward", torch.float16)
    names = {t.name: t.tensor_type for t in gguf.GGUFReader(path).tensors}
    assert names["test.0.indices"] == Type.I64
    write_cases(path, "batch_norm_backward", torch.float32)
    names = {t.name: t.tensor_type for t in gguf.GGUFReader(path).tensors}
    answers = {f"test.0.ans_grad_{name}" for name in ("input", "weight", "bias")}
    assert {"test.0.save_mean", "test.0.save_invstd", *answers} <= names.keys()


@pytest.mark.parametrize("name", BY_FORMULA)
def test_gradients_by_formula_are_those_of_autograd(name: str) -> None:
    by_formula, by_autograd = BY_FORMULA[name], OPERATORS[name]
    for case in by_formula.cases:
        results = []
        for operator in (by_formula, by_autograd):
            torch.manual_seed(0)
            run = Run(operator, case, torch.float64)
            results.append(run.eager(run.inputs()))
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Operands with gaps, zero strides and offsets; results without dimensions and of bool."""
    path = tmp_path / "x.gguf"
    for name in ("sub", "equal", "cross_entropy_loss_backward"):
        write_cases(path, name, torch.float32)
        for case, given in zip(read_cases(path), OPERATORS[name].cases, strict=True):
            torch.manual_seed(0)
            drawn = [operand.make(torch.float32, "cpu") for operand in given.operands]
            wanted = OPERATORS[name].operands(drawn, given.keywords)
            for mine, theirs in zip(case.inputs, wanted, strict=True):
                assert torch.equal(mine, theirs) and mine.stride() == theirs.stride()
            assert case.run.case.over == given.over
            assert [x.stride() for x in case.expected()] == list(case.strides)


def test_every_dtype_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    values = {str(d): torch.tensor([[1, 0, 1], [0, 0, 1]]).to(d) for d in gguf_format.TYPES}
    writer = gguf.GGUFWriter(None, "x")
    for name, x in values.items():
        gguf_format.add_tensor(writer, name, x)
    gguf_format.write(writer, path)
    read = gguf_format.read(path).tensors
    assert {name: x.dtype for name, x in read.items()} == {n: x.dtype for n, x in values.items()}
    assert all(torch.equal(read[name], x) for name, x in values.items())


def test_cases_run_and_print_their_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through `infiniop-test`; max-pool's gradient by its formula."""
    path = tmp_path / "x.gguf"
    write_cases(path, "maxpool_backward", torch.bfloat16)
    given = ["infiniop-test", str(path), "--cpu", "--warmup", "1", "--run", "3"]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit, match="0"):
        gguf_commands.main()
    lines = capsys.readouterr().out.splitlines()
    start = r"cpugraph case {} maxpool_backward bfloat16 \({}.*: passed, "
    ends = r"largest error \S+ \(0\.\d\d of the tolerance\), median \d+\.\d+ ms"
    for number, size in ((0, 2), (1, 1)):
        assert re.fullmatch(start.format(number, size) + ends, lines[number])
    assert lines[2:] == ["all passed"]


def test_a_wrong_simulator_is_found_as_by_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, "sigmoid", TINY, dtypes=("f32",))
    path = tmp_path / "x.gguf"
    write_cases(path, "sigmoid", torch.float32)

    def wrong(x: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(x)
        y[3, 2] += 0.01
        return y

    monkeypatch.setattr(SEMANTICS, "_table", dict(SEMANTICS._table))
    SEMANTICS.update({"Sigmoid": wrong})
    code, printed = command("run", path, "--tops", "--warmup", 0, "--run", 1)
    assert code == 1 and "topsgraph: no chip is at hand, its simulator runs" in printed
    assert "topsgraph case 0 sigmoid float32 (5, 4): failed: result 0 at (3, 2) is " in printed
    assert "1 failed" in printed
    assert script_runner().main("sigmoid.py", ["--tops"]) == 1
    own = re.search(r"result 0 at .*differ", capsys.readouterr().out)
    assert own is not None and own.group() in printed


def test_integers_are_compared_with_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, "topk_softmax", Case((Operand((2, 8)),)), outputs=("values", "indices"))
    path = tmp_path / "x.gguf"
    write_cases(path, "topk_softmax", torch.float32)
    (case,) = read_cases(path)
    case.answers[1][1, 0] += 1
    outcome = case.check(case.run.operator.fn, case.expected())
    assert "result 1 at (1, 0) is" in outcome.trouble


def test_results_get_the_strides_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    foreign(path)
    (case,) = read_cases(path)
    expected = case.expected()
    assert (
        "has strides (2, 1), the file (5, 1)" in case.check(case.run.operator.fn, expected).trouble
    )
    placed = case.placed(expected)
    assert not placed.check(placed.run.operator.fn, expected).trouble


def foreign(path: Path, change: Callable[[Any], None] = lambda writer: None) -> None:
    """A file that others write: an output with gaps between its rows, scalars left out."""
    writer = gguf.GGUFWriter(None, "infiniop-test")
    writer.add_uint64("test_count", 1)
    writer.add_string("test.0.op_name", "mul")
    writer.add_array("test.0.c.shape", [3, 2])
    writer.add_array("test.0.c.strides", [1, 5])
    ones = np.ones((3, 2), np.float32)
    for name, x in (("a", ones), ("b", ones), ("c", ones[:0, :0])):
        writer.add_tensor(f"test.0.{name}", x)
    writer.add_tensor("test.0.ans", ones.astype(np.float64))
    change(writer)
    gguf_format.write(writer, path)


def rename(writer: Any) -> None:
    writer.kv_data[0]["test.0.op_name"].value = "mull"


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (rename, "case 0: unknown operator 'mull'; did you mean 'mul'?"),
        (lambda w: w.kv_data[0].pop("test.0.op_name"), "case 0: it has no op_name"),
        (lambda w: w.tensors[0].pop("test.0.b"), "case 0: tensor 'b' is missing"),
        (lambda w: w.tensors[0].pop("test.0.ans"), "case 0: tensor 'ans' is missing"),
        (lambda w: w.kv_data[0].pop("test.0.c.shape"), "case 0: c.shape is missing"),
        (lambda w: w.add_array("test.0.a.strides", [1]), "case 0: tensor 'a' has shape"),
        (lambda w: w.add_array("test.0.a.shape", [4, 2]), "case 0: tensor 'a' holds (3, 2)"),
        (lambda w: w.add_string("test.0.a.shape", "x"), "case 0: a.shape is 'x', not an array"),
        (lambda w: w.add_float32("test.0.d", 1), "case 0: d is nothing that the operator takes"),
        (lambda w: w.add_string("test.0.over", "c"), "case 0: over is 'c'; there are"),
        (lambda w: w.kv_data[0].pop("test_count"), "it holds no cases"),
    ],
)
def test_errors_name_the_case(tmp_path: Path, change: Callable[[Any], None], wanted: str) -> None:
    path = tmp_path / "x.gguf"
    foreign(path, change)
    with pytest.raises(GgufFileError, match=re.escape(f"{path}: {wanted}")):
        command("run", path, "--cpu")


@pytest.mark.parametrize(
    ("spoil", "wanted"),
    [
        (lambda data: data[:4] + b"\2" + data[5:], "it is GGUF version 2; version 3 is read"),
        (lambda data: data[:4] + b"\7" + data[5:], "file appears to be version 7"),
        (lambda data: b"x" + data[1:], "GGUF magic invalid"),
        (lambda data: data[:-20], "it ends within a tensor"),
        (lambda data: data[:100], "it cannot be read"),
        (lambda data: b"", "it cannot be read"),
    ],
)
def test_a_damaged_file(tmp_path: Path, spoil: Callable[[bytes], bytes], wanted: str) -> None:
    path = tmp_path / "x.gguf"
    foreign(path)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(GgufFileError, match=wanted):
        read_cases(path)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["write", "maxpol_backward", "-o", "x"], "did you mean 'maxpool_backward'"),
        (["write", "relu", "--dtype", "f8", "-o", "x"], "there are f16, bf16, f32, f64"),
        (["run", "x", "--moore"], "no target is for --moore; there are .*--metax"),
        (["run", "x", "--backend", "cpugraf"], "no backend 'cpugraf'"),
        (["run", "x"], "name one: .*--cpu"),
    ],
)
def test_arguments_that_mean_nothing(arguments: list[str], wanted: str) -> None:
    code, printed = command(*arguments)
    assert code == 2
    assert re.search(wanted, " ".join(re.sub("[│\n]", " ", printed).split()))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        MissingPackageError, match=r"pip install gguf, or pip install 'dicp\[gguf\]'"
    ):
        write_cases(tmp_path / "x.gguf", "relu", torch.float32)
