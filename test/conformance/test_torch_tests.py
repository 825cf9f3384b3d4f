"""`python -m dicp.conformance torch-tests`: results, crashes, the configuration, the reports."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dicp.conformance.__main__ import app
from dicp.conformance.configuration import Configuration
from dicp.conformance.names import OPERATOR_DATABASE, OperatorNames, TestName
from dicp.conformance.rows import Row, differences, read_rows
from dicp.errors import ConformanceConfigError, DicpError, ResultsFileError, TestFileError

HERE = Path(__file__).parent
WRONG_KERNEL = """
from dicp.device import dispatcher

run = dispatcher.Dispatcher.run

def wrong(self, op, args, kwargs):
    result = run(self, op, args, kwargs)
    return result.add_(1e-3) if op.__name__ == "neg.out" else result

dispatcher.Dispatcher.run = wrong
dispatcher.Dispatcher._plan = lambda *_: None  # no call takes another path
"""
"""Imported by each process as it starts: `neg` of the device is wrong."""


def run(out: Path, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["torch-tests", "--out", str(out), *arguments])
    if isinstance(done.exception, DicpError):
        raise done.exception
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("option", "problem"),
    [("--device", "at start of device string: nowhere"), ("--backend", "Invalid backend")],
)
def test_a_device_or_backend_that_is_not_there_fails_at_once(
    option: str, problem: str, tmp_path: Path
) -> None:
    status, output = run(tmp_path / "out", option, "nowhere")
    assert status == 2 and option in output and not (tmp_path / "out").exists()
    assert problem in " ".join(output.replace("│", " ").split())


def results(out: Path) -> dict[str, tuple[str, str]]:
    """Result and reason of each test."""
    with (out / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["file", "class", "test", "result", "reason", "seconds"]
    return {row["test"]: (row["result"], row["reason"]) for row in rows}


def configured(folder: Path, text: str) -> str:
    path = folder / "chip.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.sweep
def test_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong kernel, a failure, a hang and a crash are found; a test after a hang runs."""
    (tmp_path / "sitecustomize.py").write_text(WRONG_KERNEL)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{HERE.parents[1]}")
    monkeypatch.setenv("TORCH_SOURCE_PATH", str(HERE / "tree"))
    config = configured(tmp_path, """
dtypes = ["float32"]
samples = 2
[[only]]
operator = "neg|sgn|zeros_like"
test = "test_(forward|out|gradients).*"
[[only]]
file = "device_generic.py"
[[skip]]
test = "test_unsupported.*"
reason = "the chip cannot"
[[skip]]
test = "test_of_another_time"
reason = "none"
[[tolerance]]
test = "test_near.*"
atol = 0.01
rtol = 0.0
""")  # fmt: skip
    status, said = run(
        tmp_path, "--device", "dipu", "--config", config, "--tests", "device_generic.py",
        "--test-seconds", "15", "--jobs", "2",
    )  # fmt: skip
    found = results(tmp_path)
    kinds = {test: result for test, (result, _) in found.items()}
    assert kinds == {
        "test_forward[neg-float32]": "failed",
        "test_gradients[neg-float32]": "failed",
        "test_out[neg-float32]": "failed",
        "test_forward[sgn-float32]": "passed",
        "test_forward[zeros_like-float32]": "passed",
        "test_gradients[sgn-float32]": "passed",
        "test_out[sgn-float32]": "passed",
        "test_z_aborts_dipu": "crashed",
        "test_y_hangs_dipu": "crashed",
        "test_near_dipu": "passed",
        "test_skipped_dipu": "skipped",
        "test_sum_dipu_float32": "passed",
        "test_sum_dipu_int64": "passed",
        "test_unsupported_dipu": "skipped",
        "test_values_neg_dipu_float32": "failed",
        "test_wrong_dipu": "failed",
    }
    assert "error" in found["test_forward[neg-float32]"][1]
    assert "SIGABRT" in found["test_z_aborts_dipu"][1]
    assert "in test_z_aborts" in found["test_z_aborts_dipu"][1]
    assert found["test_y_hangs_dipu"][1].startswith("it hangs: no end within 15 s")
    assert found["test_unsupported_dipu"][1] == "the chip cannot"
    assert status == 1 and "a skip matches no test: line 12: test = 'test_of_another_time'" in said
    summary = (tmp_path / "summary.md").read_text()
    assert "| op_db | 4 | 3 | 0 | 0 | 57.1% |" in summary
    assert "| device_generic.py | 3 | 2 | 2 | 2 | 42.9% |" in summary
    assert "| neg | 0 | 4 | 0 | 0 | 0.0% |" in summary


def test_a_backend(tmp_path: Path) -> None:
    """Operators compiled by cpugraph; the second run tells what changed since the first."""
    config = configured(tmp_path, """
dtypes = ["float32", "int64"]
samples = 2
[[only]]
operator = "sgn"
test = "test_(forward|inplace).*"
[[only]]
operator = "nonzero"
test = "test_forward.*"
""")  # fmt: skip
    (tmp_path / "results.csv").write_text(
        "file,class,test,result,reason,seconds\n"
        "op_db,TestOperators,test_forward[sgn-int64],failed,,1.0\n"
    )
    status, said = run(tmp_path, "--backend", "cpugraph", "--config", config)
    found = {test: result for test, (result, _) in results(tmp_path).items()}
    assert status == 0, said
    assert found == {
        "test_forward[nonzero-float32]": "skipped",
        "test_forward[nonzero-int64]": "skipped",
        "test_forward[sgn-float32]": "passed",
        "test_forward[sgn-int64]": "passed",
        "test_inplace[sgn-float32]": "passed",
        "test_inplace[sgn-int64]": "passed",
    }
    reason = results(tmp_path)["test_forward[nonzero-int64]"][1]
    assert reason == "no graph reaches the backend: Dynamo leaves the operator to eager"
    summary = (tmp_path / "summary.md").read_text()
    assert "- `op_db` `TestOperators` `test_forward[sgn-int64]`: failed -> passed" in summary


@pytest.mark.parametrize(
    "text, line, problem",
    [
        ('samples = 2\n[[skip]]\noperator = "add"\n', 2, "a skip without a reason"),
        ('[[skip]]\ntest = "x"\nreason = " "\n', 1, "a skip without a reason"),
        ('[[skip]]\nreason = "x"\n', 1, "it selects no tests"),
        ('dtypes = ["float31"]\n', 1, "unknown dtype 'float31'; did you mean 'float32'?"),
        ('[[only]]\n\ndtype = "flaot32"\n', 3, "unknown dtype 'flaot32'"),
        ('[[only]]\noperator = "("\n', 2, "no expression"),
        ('[[only]]\nopertor = "add"\n', 2, "unknown entry 'opertor'; did you mean 'operator'?"),
        ('\nsmaples = 3\n', 2, "unknown entry 'smaples'; did you mean 'samples'?"),
        ("samples = -1\n", 1, "is not a count"),
        ('[[tolerance]]\ntest = "x"\natol = "0"\n', 3, "atol = '0' is no float"),
        ('[[tolerance]]\ntest = "x"\nrtol = nan\n', 3, "rtol = nan is no number from 0 on"),
        ("\nsamples = = 3\n", 2, "Invalid value"),
    ],
)  # fmt: skip
def test_a_wrong_configuration_is_refused(
    tmp_path: Path, text: str, line: int, problem: str
) -> None:
    path = Path(configured(tmp_path, text))
    with pytest.raises(ConformanceConfigError) as error:
        Configuration.read(path)
    assert error.value.line == line and problem in error.value.problem
    assert str(error.value).startswith(f"{path}:{line}: ")


def test_an_unknown_operator_or_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path, '[[skip]]\nreason = "x"\noperator = "nn.functional.rellu"\n')
    with pytest.raises(ConformanceConfigError, match="chip.toml:1: .*'nn.functional.relu'"):
        run(tmp_path, "--config", config)
    monkeypatch.delenv("TORCH_SOURCE_PATH", raising=False)
    with pytest.raises(TestFileError, match="TORCH_SOURCE_PATH names no source tree"):
        run(tmp_path, "--tests", "device_generic.py")
    monkeypatch.setenv("TORCH_SOURCE_PATH", str(HERE / "tree"))
    with pytest.raises(TestFileError, match="tree/test has no such file"):
        run(tmp_path, "--tests", "device_genric.py")


def test_a_damaged_table_of_the_last_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text("file,class\na,b\n")
    with pytest.raises(ResultsFileError, match="torch-tests` writes them"):
        read_rows(tmp_path / "results.csv")


@pytest.mark.parametrize(
    "file, test, operator, dtype",
    [
        (OPERATOR_DATABASE, "test_out[linalg.svd-float32]", "linalg.svd", "float32"),
        (OPERATOR_DATABASE, "test_dtypes[add]", "add", ""),
        ("test_ops.py", "test_out_linalg_svd_privateuse1_complex64", "linalg.svd", "complex64"),
        ("test_ops.py", "test_out_add_dipu_float32", "add", "float32"),
        ("test_torch.py", "test_copy_dipu_int8", "", "int8"),
    ],
)
def test_names(file: str, test: str, operator: str, dtype: str) -> None:
    names = OperatorNames(["add", "linalg.svd", "svd"])
    name = TestName(file, "TestX", test)
    assert (names.operator(name), names.dtype(name)) == (operator, dtype)


def test_differences() -> None:
    before = [
        Row("f", "C", "a", "passed"),
        Row("f", "C", "b", "passed"),
        Row("f", "C", "c", "failed"),
    ]
    after = [
        Row("f", "C", "a", "passed"),
        Row("f", "C", "b", "crashed"),
        Row("f", "C", "d", "passed"),
    ]
    assert list(differences(after, before)) == [
        "- `f` `C` `b`: passed -> crashed",
        "- `f` `C` `d`: absent -> passed",
        "- `f` `C` `c`: failed -> absent",
    ]
