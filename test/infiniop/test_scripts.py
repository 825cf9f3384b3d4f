"""The scripts of this folder as tests, on the backend under test, and their command line."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runner import main
from support.forked import COMPILER, server

from dicp.conformance.per_operator.cases import Case, Operand, Operator
from dicp.conformance.per_operator.runs import DTYPES, Run
from dicp.conformance.per_operator.table import BY_FORMULA, OPERATORS

FOLDER = Path(__file__).parent
STUDIES = {"index_copy_inplace_duplicate_test", "pytorch_duplicate_index_randomness_test"}
NO_SCRIPTS = {"runner", "test_scripts"} | STUDIES


@pytest.mark.sweep
@pytest.mark.parametrize(
    "operator",
    [*OPERATORS.values(), *BY_FORMULA.values()],
    ids=[*OPERATORS, *(f"{name}-formula" for name in BY_FORMULA)],
)
def test_operator(operator: Operator, backend_name: str) -> None:
    for case in operator.cases:
        for dtype in operator.dtypes:
            outcome, _ = Run(operator, case, DTYPES[dtype]).verify(backend_name)
            assert not outcome.trouble, f"{dtype} {case}: {outcome.trouble}"


def test_every_operator_has_a_script() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} - NO_SCRIPTS == set(OPERATORS)


def test_a_script_runs_on_several_platforms_and_says_what_runs() -> None:
    command = ["relu.py", "--cpu", "--metax", "--dtypes", "f32", "--repeat", "2"]
    result = server(*COMPILER).run(command, cwd=FOLDER, check=True)
    lines = result.stdout.splitlines()
    for backend in ("cpugraph", "macagraph"):
        own = [line for line in lines if line.startswith(f"{backend} float32")]
        assert len(own) == len(OPERATORS["relu"].cases)
        assert all("passed" in line for line in own)
    assert torch.cuda.is_available() or "macagraph: no chip is at hand, its simulator runs" in lines


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--moore"], r"no target is for --moore; there are .*--cpu \(cpugraph\).*--metax"),
        ([], r"name a platform: .*--cpu \(cpugraph\)"),
        (["--cpu", "--dtypes", "f8"], "unknown dtypes f8; there are f16, bf16, f32, f64"),
    ],
)
def test_flags_that_no_target_takes(
    arguments: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main("relu.py", arguments)
    assert re.search(wanted, capsys.readouterr().err)


def test_a_profile_has_both_times(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--profile", "--num_prerun", "1", "--num_iterations", "2", "--dtypes", "f32"]
    assert main("kv_caching.py", ["--cpu", *few]) == 0
    (line, _) = capsys.readouterr().out.splitlines()
    assert all(word in line for word in ("torch", "dicp", " ms", "ratio", "GB/s"))


def test_a_script_of_gradients_checks_their_formula_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = ["--profile", "--num_prerun", "0", "--num_iterations", "1", "--dtypes", "f32"]
    assert main("maxpool_backward.py", ["--backend", "eager", *few]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["by formula" in line for line in lines] == [False, False, True, True, False]


def test_a_wrong_element_is_found_with_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case((Operand((5, 7)),))
    monkeypatch.setitem(OPERATORS, "relu", Operator(torch.relu, (case,), ("f32",)))

    def spoilt(self: Run, backend: str) -> object:
        def fn(x: torch.Tensor) -> torch.Tensor:
            out = torch.relu(x)
            out[3, 2] += 0.01
            return out

        return fn

    monkeypatch.setattr(Run, "compile", spoilt)
    assert main("relu.py", ["--cpu", "--debug"]) == 1
    printed = capsys.readouterr().out
    assert "result 0 at (3, 2)" in printed and "1 elements differ" in printed
    assert "operand 0: tensor(" in printed


def test_results_may_be_written_over_either_operand() -> None:
    for over in (0, 1):
        case = Case((Operand((4, 3)), Operand((4, 3))), over=over)
        run = Run(OPERATORS["sub"], case, torch.float32)
        assert not run.verify("eager")[0].trouble
        other = replace(run, case=replace(case, over=1 - over))
        wrong = run.check(other.operator.written(other.case), (1e-6, 1e-5))
        assert wrong.trouble
