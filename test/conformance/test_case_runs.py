"""`gen_data` and `run_test` as commands: wrong results, crashes, hangs, skips, the reports."""

from __future__ import annotations

import csv
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from dicp.conformance.__main__ import app
from dicp.conformance.arguments import as_commands
from dicp.conformance.configuration import Configuration, found_in
from dicp.conformance.rows import Row
from dicp.conformance.suite.case import Case, Operand
from dicp.conformance.suite.convert import converted
from dicp.conformance.suite.convert_cases import converted_cases
from dicp.conformance.suite.files import read_case_file
from dicp.conformance.suite.generated import StoredCases
from dicp.conformance.suite.history import kept
from dicp.conformance.suite.plan import log_row, logger
from dicp.conformance.suite.reference import OperatorData, computed, write
from dicp.conformance.suite.reports import cells
from dicp.conformance.suite.runs import CaseUnit, Runner
from dicp.conformance.suite.sources import cases_of, chosen, model_file
from dicp.errors import (
    ConformanceConfigError,
    DicpError,
    OldDeviceConfigError,
    ReferenceDataError,
    ResultsFileError,
)  # fmt: skip

ROOT = Path(__file__).parents[2]
BROKEN = """
import os, time
from dicp.device import dispatcher

run = dispatcher.Dispatcher.run

def broken(self, op, args, kwargs):
    name = op.__name__
    if name.startswith("exp2"):
        os.abort()
    if name.startswith("erf"):
        time.sleep(600)
    result = run(self, op, args, kwargs)
    if name.startswith("neg"):
        result[1, 2] += 0.5
    return result

dispatcher.Dispatcher.run = broken
dispatcher.Dispatcher._plan = lambda *_: None  # no call takes another path
"""
"""Imported by each process as it starts: `neg` of the device is wrong at (1, 2), `exp2` ends the
process, `erf` hangs."""


def run(*arguments: str) -> tuple[int, str]:
    """Exit status and output of the command line."""
    commands = [str(command.name) for command in app.registered_commands]
    done = CliRunner().invoke(app, as_commands(arguments, commands))
    if isinstance(done.exception, DicpError):
        raise done.exception
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def unframed(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def unary(name: str, dtype: str = "float32") -> Case:
    return Case(name, f"{dtype}-0", f"torch.{name}", dtype, (Operand((2, 3), dtype),))


@pytest.mark.sweep
def test_a_device_with_broken_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong element is found with its index; a crash, a hang and damaged data are one failed case
    each."""
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    data = tmp_path / "data"
    for name in ("abs", "erf", "exp2", "neg", "sin"):
        write(data, name, [unary(name), unary(name, "float64")], "cpu", {})
    write(data, "floor", [unary("floor")], "cpu", {})
    (data / "floor.safetensors").write_bytes(b"damaged")
    (tmp_path / "device_config.toml").write_text(
        '[[skip]]\noperator = "neg"\ndtype = "float64"\nreason = "no <float64>"\n'
        '[[skip]]\noperator = "e.*"\ndtype = "float64"\nreason = "too slow"\n'
        '[[skip]]\noperator = "abs"\nshape = "ndim > 2"\nreason = "none has"\n'
    )
    status, said = run(
        "--mode", "run_test", "--device", "dipu", "--data", str(data), "--case_seconds", "30",
        "--impl_folder", str(tmp_path), "--html_report", "--failure_debug_level", "2",
        "--test_result_path", str(tmp_path / "out" / "report.xlsx"),
    )  # fmt: skip
    assert status == 1
    assert re.search(
        r"\d{4}-\d\d-\d\d [\d:]{8},\d{3} - DIOPI-Test - INFO - Run diopi_functions.abs succeed\n",
        said,
    )
    assert "Run diopi_functions.neg failed: max abs error 0.5 at (1, 2) (atol 1e-05, rtol" in said
    assert "torch.neg(float32[2, 3])" in said and "inputs: " in said
    assert "a skip matches no case: line 9: operator = 'abs', shape = 'ndim > 2'" in said
    with (tmp_path / "out" / "error_report.csv").open(newline="") as file:
        rows = {(row["operator"], row["case"]): row for row in csv.DictReader(file)}
    results = {f"{operator} {case}": row["result"] for (operator, case), row in rows.items()}
    assert results == {
        "abs float32-0": "passed", "abs float64-0": "passed",
        "erf float32-0": "crashed", "erf float64-0": "skipped",
        "exp2 float32-0": "crashed", "exp2 float64-0": "skipped",
        "floor ": "failed",
        "neg float32-0": "failed", "neg float64-0": "skipped",
        "sin float32-0": "passed", "sin float64-0": "passed",
    }  # fmt: skip
    wrong = rows["neg", "float32-0"]
    assert (wrong["index"], wrong["shapes"]) == ("(1, 2)", "[[2, 3]]")
    assert float(wrong["max_error"]) == pytest.approx(0.5, abs=1e-4)
    assert "SIGABRT" in rows["exp2", "float32-0"]["reason"]
    assert rows["erf", "float32-0"]["reason"].startswith("it hangs: no end within 30 s")
    assert "floor.safetensors: it is damaged" in rows["floor", ""]["reason"]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["counts"] == {"passed": 4, "failed": 2, "skipped": 3, "crashed": 2}
    suite = ElementTree.parse(tmp_path / "out" / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("11", "4", "3")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "no &lt;float64&gt;" in page and '<tr class="crashed"><td>exp2</td>' in page


def test_data_are_made_again_when_their_case_file_changes(tmp_path: Path) -> None:
    """Data that lost a file are made again, too."""
    text = '[[case]]\nname = "own"\ncall = "torch.{}"\ndtypes = ["float32"]\n'
    text += "[case.tensors.0]\nshape = [[2, 3]]\n"
    (tmp_path / "own.toml").write_text(text.format("relu"))
    made = ("gen_data", "--fname", "own", "--cases", str(tmp_path), "--data", str(tmp_path / "d"))
    for change, there in (
        (lambda: None, 0), (lambda: None, 1),
        (lambda: (tmp_path / "own.toml").write_text(text.format("neg")), 0),
        (lambda: (tmp_path / "d" / "own.safetensors").unlink(), 0),
    ):  # fmt: skip
        change()
        status, said = run(*made)
        assert status == 0 and f"{1 - there} cases, " in said, said
        assert f"{there} operators were there" in said
    assert json.loads((tmp_path / "d" / "own.json").read_text())["cases"][0]["call"] == "torch.neg"
    (tmp_path / "d" / "own.safetensors").unlink()
    with pytest.raises(ReferenceDataError) as error:
        OperatorData.read(tmp_path / "d", "own")
    assert error.value.command.endswith(" ".join(map(shlex.quote, made))), error.value.command


def test_the_command_that_makes_data_names_a_recorded_list_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "my net.json").write_text(
        '{"case": [{"name": "own", "call": "torch.relu", "dtypes": ["float32"],'
        ' "tensors": {"0": {"shape": [[2, 3]]}}}]}'
    )
    given = ("--model_name", str(tmp_path / "my net.json"), "--data", str(tmp_path / "d"))
    with pytest.raises(ReferenceDataError) as error:
        run("run_test", *given)
    words = shlex.split(error.value.command)[3:]
    assert run(*words)[0] == 0 and (tmp_path / "d" / "my net" / "own.json").exists()


def test_a_backend_from_case_file_to_report(tmp_path: Path) -> None:
    """The whole way: data are made, kept by a second run, and compared on a backend."""
    data = ("--data", str(tmp_path / "data"))
    status, said = run("--mode", "gen_data", "--fname", "token_attention", *data)
    assert status == 0 and re.search(r"6 cases, \d+ bytes in .*; 0 operators were there", said)
    status, said = run("gen_data", "--fname", "token_attention", *data)
    assert status == 0 and "0 cases, 0 bytes" in said and "1 operators were there" in said
    status, said = run(
        "--backend", "cpugraph", "--fname", "token_.*", *data, "--filter_dtype", "float16",
        "--profile", "--num_iterations", "1", "--use_db", "--db_path", str(tmp_path / "runs.db"),
        "--test_result_path", str(tmp_path / "report.xlsx"),
    )  # fmt: skip
    assert status == 0, said
    assert "4 passed, 0 failed, 2 skipped, 0 crashed" in said and "runs.db" in said
    assert said.count("% of copy bandwidth") == 4 and (tmp_path / "runs.db").exists()
    report = json.loads((tmp_path / "report.json").read_text())
    decided = [case["details"].get("decisions") for case in report["cases"]]
    assert {"compiled", "library"} & set(decided[0].values())
    report["cases"][0]["result"] = "failed"
    (tmp_path / "report.json").write_text(json.dumps(report))
    status, said = run(
        "coverage", "--report", str(tmp_path / "report.json"), "--out", str(tmp_path)
    )
    assert status == 0 and re.search(r"\d+ compiled, .* \d+ eager, [1-9]\d* failing", said)
    with (tmp_path / "coverage.csv").open(newline="") as file:
        rows = {row["operator"]: row for row in csv.DictReader(file)}
    for operator, decision in decided[0].items():
        row = rows[operator]
        assert row["failing"] == "1" and int(row["cases"]) >= 1, row
        assert row["decision"] == decision or row["decision"] == "decomposed"
    assert rows["aten.nonzero.default"]["decision"] == "eager"
    assert "nonzero" in (tmp_path / "coverage.html").read_text()


def test_a_skip_whose_case_passes_fails_under_strict(tmp_path: Path) -> None:
    config = tmp_path / "device_config.toml"
    config.write_text('[[skip]]\noperator = ".*"\nreason = "as it was"\n')
    right = computed(unary("neg"))
    wrong = replace(right, case=replace(right.case, call="torch.exp"))
    unit = CaseUnit("", "run_test", "cpu", "", (), config=str(config))
    lenient, strict = Runner(unit), Runner(replace(unit, strict=True))
    assert lenient.outcome(right).result == "skipped"
    assert strict.outcome(right).reason == "it passes, and is skipped: as it was"
    assert strict.outcome(right).result == "failed"
    assert (strict.outcome(wrong).result, strict.outcome(wrong).reason) == ("skipped", "as it was")


def test_a_skip_of_a_case_that_ends_its_process_is_used_under_strict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nfrom dicp.conformance.suite.runs import Runner\n"
        "Runner._run = lambda *_: os.abort()\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    data = tmp_path / "data"
    write(data, "neg", [unary("neg"), unary("neg", "float64")], "cpu", {})
    (tmp_path / "device_config.toml").write_text(
        '[[skip]]\noperator = "neg"\ndtype = "float64"\nreason = "it ends the process"\n'
    )
    status, said = run(
        "run_test", "--device", "cpu", "--data", str(data), "--impl_folder", str(tmp_path),
        "--strict", "--test_result_path", str(tmp_path / "report.xlsx"),
    )  # fmt: skip
    assert status == 1 and "0 passed, 0 failed, 1 skipped, 1 crashed" in said, said
    assert "neg skipped: it ends the process (case float64-0)" in said
    assert "a skip matches no case" not in said


def test_an_error_of_the_device_is_a_failed_case() -> None:
    reference = computed(unary("neg"))
    broken = replace(reference, case=replace(reference.case, call="torch.chunk"))
    found = Runner(CaseUnit("", "run_test", "cpu", "", ())).outcome(broken)
    assert found.result == "failed" and "here is an error: TypeError" in found.reason


def test_a_case_without_gradients_is_computed_as_in_inference() -> None:
    """The fourth result of this operator is what its gradient reads; graphs of inference, which run
    without gradients, have none."""
    runner = Runner(CaseUnit("", "run_test", "cpu", "", (), backend="cpugraph"))
    layers = cases_of("aten.mkldnn_rnn_layer.default", 0, model=str(model_file("crnn")))
    for found in [runner.outcome(computed(case)) for case in layers]:
        assert found.result == "passed", found.reason


@pytest.mark.parametrize("model", ["bert", "llama3-8b", "qwen2"])
def test_an_operand_named_out_reaches_the_backend(model: str) -> None:
    """With and without a mask, and with grouped heads: rows with one visible key, whose gradient
    is 0 if `out` is what attention gives."""
    runner = Runner(CaseUnit("", "run_test", "cpu", "", (), backend="cpugraph"))
    name = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
    (case,) = cases_of(name, 0, model=str(model_file(model)))
    found = runner.outcome(computed(case))
    assert (found.result, found.reason) == ("passed", "")


def test_what_is_missing_or_unknown_is_named(tmp_path: Path) -> None:
    data = ("--data", str(tmp_path))
    with pytest.raises(ReferenceDataError, match="gen_data --fname rotary_embedding --data .*"):
        run("run_test", "--fname", "rotary_embedding", *data)
    status, said = run("run_test", "--fname", "rotary_embeding", *data)
    assert status == 2 and "the nearest is 'rotary_embedding'" in unframed(said)
    status, said = run("--filter_dtype", "flaot32")
    assert status == 2 and "Did you mean 'float32'?" in unframed(said)


def test_coverage_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("[]")
    with pytest.raises(ResultsFileError, match="run_test` writes them"):
        run("coverage", "--report", str(path))
    status, said = run("coverage", "--backend", "eager")
    assert status == 2 and "cpugraph" in unframed(said)


def configured(tmp_path: Path, text: str) -> Configuration:
    path = tmp_path / "device_config.toml"
    path.write_text(text)
    return Configuration.read(path)


def test_skips_and_tolerances_of_cases(tmp_path: Path) -> None:
    settings = configured(tmp_path, """
[[skip]]
operator = "cumsum"
parameter = { dim = [0, -2] }
reason = "by dim"
[[skip]]
operator = "cumsum"
shape = "dim(-1) >= 7"
reason = "by size"
[[skip]]
operator = "cumsum"
shape = "[5, 4, 3]"
reason = "by shape"
[[skip]]
dtype = "complex.*"
reason = "no complex numbers"
[[tolerance]]
operator = "cumsum"
dtype = "float32"
atol = 0.5
""")  # fmt: skip

    def case(shape: tuple[int, ...], dim: int, dtype: str = "float32") -> Case:
        return Case("cumsum", "k", "torch.cumsum", dtype, (Operand(shape, dtype),), {"dim": dim})

    def reason(*arguments: object) -> str:
        skip = settings.skip_of(case(*arguments))  # type: ignore[arg-type]
        return skip.reason if skip else ""

    assert reason((2, 3), 0) == "by dim" and reason((2, 3), 1) == ""
    assert reason((2, 7), 1) == "by size" and reason((7, 2), 1) == ""
    assert reason((5, 4, 3), 1) == "by shape" and reason((), 1) == ""
    assert reason((2, 3), 1, "complex64") == "no complex numbers"
    assert settings.case_tolerance(case((2,), 0)) == (0.5, 0.0)
    assert settings.case_tolerance(case((2,), 0, "float64")) is None


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ('[[skip]]\noperator = "add"\nshape = "rank > 4"\nreason = "x"\n', 3, "no predicate"),
        ('[[skip]]\nparameter = { dim = 0 }\nreason = "x"\n', 1, "no list of values"),
        ('[[skip]]\nshape = "ndim > 4"\n', 1, "a skip without a reason"),
    ],
)
def test_a_wrong_skip_is_refused(tmp_path: Path, text: str, line: int, problem: str) -> None:
    with pytest.raises(ConformanceConfigError) as error:
        configured(tmp_path, text)
    assert error.value.line == line and problem in error.value.problem


OLD = """
import os
from conformance.utils import Skip
os.abort()
device_configs = {
    'batch_norm': dict(name=["batch_norm"], atol=1e-2, rtol_half=float("5e-2")),
    'relu': dict(skip_all=True),
    'cumsum': dict(
        para=dict(dim=[Skip(-1), 0]),
        tensor_para=dict(args=[
            {"ins": ["input"], "dtype": [Skip(np.float64), Skip(Dtype.int64)],
             "shape": [Skip((2, 0)), Skip(())]},
        ]),
    ),
}
"""


def test_an_old_configuration_is_refused_and_converted(tmp_path: Path) -> None:
    old = tmp_path / "device_configs.py"
    old.write_text(OLD)
    with pytest.raises(OldDeviceConfigError, match=f"convert-config {old} -o .*config.toml"):
        found_in(tmp_path)
    new = tmp_path / "device_config.toml"
    assert run("convert-config", str(old), "-o", str(new))[0] == 0
    found = Configuration.read(found_in(tmp_path))
    assert [(t.operator, t.dtype, t.atol, t.rtol) for t in found.tolerances] == [
        (r"(.*\.)?(batch_norm)", "", 0.01, 0.0),
        (r"(.*\.)?(batch_norm)", "float16|bfloat16", 0.0, 0.05),
    ]
    assert [(s.operator[8:-1], dict(s.parameter), s.dtype, s.shape) for s in found.skips] == [
        ("relu", {}, "", ""),
        ("cumsum", {"dim": [-1]}, "", ""),
        ("cumsum", {}, "float64", ""),
        ("cumsum", {}, "int64", ""),
        ("cumsum", {}, "", "[2, 0]"),
        ("cumsum", {}, "", "[]"),
    ]
    assert found.skips[1].reason == "converted from device_configs.py, cumsum, line 9"


OLD_CASES = """
import numpy as np
raise SystemExit
diopi_configs = {
    "batch_norm": dict(
        name=["batch_norm"], atol=1e-3, rtol=1e-4, atol_half=1e-1, saved_args=dict(output=0),
        para=dict(training=[False, True], momentum=[0.1, -0.15], weight=[None, None]),
        tensor_para=dict(args=[
            {"ins": ["input"], "requires_grad": [True], "shape": ((2, 8, 32), (2, 3)),
             "dtype": [np.float32, np.float16], "gen_fn": "Genfunc.randn"},
            {"ins": ["running_mean", "running_var"], "shape": ((8,), (3,)),
             "gen_fn": dict(fn="Genfunc.uniform", start=0.5, end=2), "dtype": [np.float32]},
        ]),
    ),
    "cat": dict(
        name=["cat"], interface=["torch"], is_inplace=True, para=dict(dim=[0, 1]),
        tensor_para=dict(args=[{"ins": ["x1", "x2"], "shape": ((3,), (2, 5)),
                                "stride": ((2,), (1, 2)), "gen_fn": Genfunc.sym_mat}],
                         seq_name="tensors"),
    ),
}
"""


def test_case_files_in_python_are_converted(tmp_path: Path) -> None:
    old, new = tmp_path / "diopi_configs.py", tmp_path / "cases" / "chip.toml"
    old.write_text(OLD_CASES)
    new.parent.mkdir()
    assert run("convert-cases", str(old), "-o", str(new))[0] == 0
    norm, cat = read_case_file(new)
    single, second, half, _ = norm.cases
    assert (norm.call, cat.call) == ("torch.nn.functional.batch_norm", "torch.cat")
    assert (single.tolerance, half.tolerance) == ((1e-3, 1e-4), (0.1, 0.0))
    assert single.flags == [True, False, False] and half.operands[0].dtype == "float16"
    assert half.operands[1] == Operand((8,), "float32", None, "uniform(0.5, 2)")
    assert second.kwargs["momentum"] == -0.15 and second.kwargs["weight"] is None
    assert cat.cases[0].inplace and cat.cases[1].kwargs["dim"] == 1
    assert cat.cases[1].kwargs["tensors"] == [Operand((2, 5), "float32", (1, 2), "sym")] * 2
    assert chosen(["batch_norm"], folder=str(new.parent)) == ["batch_norm"]
    assert [c.key for c in cases_of("cat", 1, str(new.parent))] == ["float32-0", "float32-1"]


@pytest.mark.parametrize("text", ["gen_policy='gen_tensor_list'", "device=[1]"])
def test_fields_without_a_form_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "diopi_configs.py"
    args = f"[dict(ins=['x'], shape=((2,),), {text})]"
    path.write_text(f"diopi_configs = dict(a=dict(name=['a'], tensor_para=dict(args={args})))")
    with pytest.raises(ConformanceConfigError, match=f"a: .*{text.partition('=')[0]}.* no form"):
        converted_cases(path)


def test_an_old_configuration_that_computes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "device_configs.py"
    path.write_text("device_configs = {\n'relu': dict(atol=__import__('os').getpid())}\n")
    with pytest.raises(ConformanceConfigError, match="py:2: .*more than data"):
        converted(path)


def test_a_profile_times_cases_that_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dicp.conformance.suite.runs.COPIED_BYTES", 1 << 16)
    unit = CaseUnit("", "run_test", "cpu", "", (), profile=3)
    case = Case("neg", "k", "torch.neg_", "float32", (Operand((1 << 20,), "float32"),))
    runner = Runner(unit)
    found = runner.outcome(computed(replace(case, inplace=True)))
    assert found.result == "passed"
    took, eager, share = (found.details[name] for name in ("ms", "eager_ms", "copy_share"))
    assert took > 1e-3 and eager > 1e-3, "four megabytes take longer"
    assert share == pytest.approx((2 << 22) / (took / 1e3) / runner.bandwidth)
    row = Row("", "neg", "k", "passed", "", 0.1, found.details)
    assert f"{took:.3g}" in cells(row)
    log_row(logger(), row, 0)
    said = capsys.readouterr().out
    assert re.search(r"neg succeed: [\d.]+ ms, eager [\d.]+ ms, \d+% of copy bandwidth", said)
    assert "ms" not in Runner(replace(unit, profile=0)).outcome(computed(case)).details


def test_results_are_kept_and_compared_with_the_last_run(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "runs.db"
    first = [Row("run_test 0", "abs", "k", "passed"), Row("run_test 0", "sin", "k", "passed")]
    assert kept(path, "on a", first) is None
    assert kept(path, "on b", first) is None, "of another device"
    wrong = [Row("run_test 1", "sin", "k", "failed", "max abs error 1", 0.1, {"max_error": 1.0})]
    assert kept(path, "on a", wrong) == ["- `` `sin` `k`: passed -> failed"]
    assert kept(path, "on a", wrong) == []
    (tmp_path / "x.db").write_text("no database, but long enough to be read as the head of one")
    with pytest.raises(ResultsFileError, match=r"not a database.*run_test --use_db"):
        kept(tmp_path / "x.db", "on a", first)
    status, said = run("run_test", "--use_db", "--db_path", "postgres://host/x")
    assert status == 2 and "is no SQLite file: sqlite:///PATH" in unframed(said)


def test_cases_as_files_of_pytest(tmp_path: Path) -> None:
    data, files = str(tmp_path / "data"), tmp_path / "gencases"
    for name in ("cos", "sin"):
        write(tmp_path / "data", name, [unary(name)], "cpu", {})
    status, said = run(
        "--mode", "gen_case", "--device", "cpu", "--data", data, "--case_output_dir", str(files)
    )
    assert status == 0 and said == f"2 files in {files}\n"
    written = files / "test_cos.py"
    written.write_text(written.read_text().replace("operator='cos'", "operator='none'"))
    quiet = "-q -p no:cacheprovider -p no:xdist"
    status, said = run("run_test", "--test_cases_path", str(files / "test_sin.py"),
                       "--pytest_args", f"{quiet} -k float32")  # fmt: skip
    assert status == 0 and "1 passed" in said
    status, said = run("run_test", "--test_cases_path", str(files), "--pytest_args", quiet)
    assert status == 2 and "gen_data --fname none" in said
    status, said = run("run_test", "--test_cases_path", str(tmp_path / "none"))
    assert status == 2 and "`gen_case` writes it" in unframed(said)
    status, said = run("run_test", "--test_cases_path", str(files), "--pytest_args", "'")
    assert status == 2 and "No closing quotation" in unframed(said)
    wrong = computed(unary("cos"))
    failing = StoredCases("cos", data, "", "cpu")
    vars(failing)["_references"] = {"k": replace(wrong, case=replace(wrong.case, call="torch.exp"))}
    with pytest.raises(pytest.fail.Exception, match="max abs error"):
        failing.check("k")
    (tmp_path / "device_config.toml").write_text('[[skip]]\noperator = "sin"\nreason = "slow"\n')
    skipped = StoredCases("sin", data, "", "cpu", str(tmp_path / "device_config.toml"))
    with pytest.raises(pytest.skip.Exception, match="slow"):
        skipped.check("float32-0")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("gen_data --fname add --device nosuch", "nosuch"),
        ("gen_data --fname add --cases none", "there is no folder 'none'"),
        ("run_test --fname add --impl_folder none", "there is no folder 'none'"),
        ("run_test --fname add --case_seconds -1", "-1 is not a number of seconds above 0"),
        ("models --backends cpugraph --seconds nan", "nan is not a number of seconds above 0"),
    ],
)
def test_options_that_nothing_could_use_are_refused(arguments: str, problem: str) -> None:
    status, said = run(*arguments.split())
    assert status == 2 and problem in unframed(said)
