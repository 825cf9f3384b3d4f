"""Recorded lists: from a program's calls to a case file, its reference data and a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from test_case_runs import run, unframed

from dicp.conformance.recorded.recorder import Recorder, recording, run_script
from dicp.conformance.recorded.reference_models import MODELS, recorded_model
from dicp.conformance.suite.case import function
from dicp.conformance.suite.files import CASE_FILES, read_case_file
from dicp.conformance.suite.reference import computed
from dicp.conformance.suite.runs import CaseUnit, Runner
from dicp.conformance.suite.sources import MODELS as FOLDER
from dicp.conformance.suite.sources import model_entries, model_names
from dicp.errors import RecordedScriptError

REQUIRED = (
    "resnet50 resnet101 mobilenet_v2 mobilenet_v3 seresnet50 shufflenet_v2 vgg16 efficientnet vit "
    "convnext swin_transformer densenet repvgg inceptionv3 faster_rcnn_r50 pointpillars yolov3 "
    "atss fcos mask_rcnn retinanet dyhead ssd300 detr solo cascade_rcnn centernet unet pspnet "
    "deeplabv3 deeplabv3plus upernet fcn tsn crnn hrnet dbnet yolov5 stgcn deeppose slowfast "
    "sar llama"
).split()
"""The models of the reference suite."""
PROGRAM = """
import sys
import torch

net = torch.nn.Linear(3, 2)
compiled = torch.compile(net, backend="no_such_backend_is_called")
for _ in range(2):
    loss = compiled(torch.ones(4, 3)).relu().sum()
    loss.backward()
print(sys.argv[1:], __name__)
"""


@pytest.mark.sweep
def test_a_program_is_recorded_and_its_list_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole way: record, gen_data, run_test; a script that compiles is recorded in eager."""
    script, listed = tmp_path / "train.py", tmp_path / "mine.json"
    script.write_text(PROGRAM.replace("no_such_backend_is_called", "eager"))
    before = list(sys.argv), list(sys.path)
    command = f"python3 {script} --steps 'a b'"
    status, said = run("record", "--script", command, "-o", str(listed))
    assert status == 0, said
    assert "['--steps', 'a b'] __main__" in said and "operators in" in said
    assert (sys.argv, sys.path) == before
    assert json.loads(listed.read_text())["about"]["script"] == command
    entries = model_entries(listed)
    assert "aten.addmm.default" in entries and "aten.threshold_backward.default" in entries
    assert [len(entry.cases) for entry in entries["aten.addmm.default"]] == [1], "each call once"
    data = ("--data", str(tmp_path / "data"), "--model_name", str(listed))
    status, said = run("--mode", "gen_data", "--fname", "aten.addmm.*", "aten.mm.*", *data)
    assert status == 0 and "2 cases" in said, said
    status, said = run(
        "--backend", "cpugraph", *data, "--test_result_path", str(tmp_path / "report.xlsx")
    )
    assert status == 0 and "2 passed, 0 failed" in said, said
    status, said = run("list", *data[2:])
    assert said.splitlines() == sorted(entries)


def test_what_a_recorder_writes(tmp_path: Path) -> None:
    """Shapes, strides, dtypes, scalars and lists of tensors, in the form of case files."""

    def program() -> None:
        x = torch.randn(4, 3).t()
        for _ in range(2):
            torch.cat([x, x.contiguous()], 1)
            torch.cat([x, x], 1)
        torch.add(x, x[:, :1], alpha=2)
        x[torch.arange(100).remainder(3), None]
        torch.nn.functional.embedding(torch.tensor([[0, 2]]), torch.rand(3, 2))
        x.sum(0, dtype=torch.float64).sqrt_()
        torch.full((2,), float("inf")).masked_fill(torch.tensor([True, False]), 0)
        torch.ones(2, 2).to_sparse()

    found = recording("mine", {}, program)
    path = tmp_path / "mine.json"
    path.write_text(found.text())
    cases = {entry.name: entry.cases for entry in read_case_file(path)}
    cat, other = cases["aten.cat.default"]
    assert [part.strides for part in other.kwargs["tensors"]] == [(1, 3), (1, 3)]
    assert [part.strides for part in cat.kwargs["tensors"]] == [(1, 3), (4, 1)]
    assert cat.kwargs["dim"] == 1
    (added,) = cases["aten.add.Tensor"]
    assert (added.kwargs["alpha"], added.kwargs["other"].strides) == (2, (1, 3))
    (looked_up,) = cases["aten.embedding.default"]
    assert looked_up.kwargs["indices"].value.tolist() == [[0, 2]]
    assert looked_up.kwargs["weight"].gen == "uniform(0, 1)"
    (picked,) = cases["aten.index.Tensor"]
    assert picked.kwargs["indices"][0].gen == "randint(0, 3)"
    (total,) = cases["aten.sum.dim_IntList"]
    assert total.kwargs["dtype"] is torch.float64
    (root,) = cases["aten.sqrt_.default"]
    assert root.inplace and root.dtype == "float64"
    (full,) = cases["aten.full.default"]
    assert full.kwargs["fill_value"] == float("inf")
    assert cases["aten.masked_fill.Scalar"][0].kwargs["mask"].gen == "mask"
    assert not any(operand.grad for case in (cat, added) for operand in case.operands)
    assert "aten.empty.memory_format" not in cases
    for one in (cat, added, picked, total, full):
        assert computed(one).truth is not None
        assert Runner(CaseUnit("", "run_test", "cpu", "", ())).outcome(computed(one)).result == (
            "passed"
        )


def test_results_of_the_forward_are_recorded_as_such(tmp_path: Path) -> None:
    """What a gradient of attention takes of the forward is computed, and not drawn."""

    def program() -> None:
        q, k, v = (torch.randn(1, heads, 5, 4, requires_grad=True) for heads in (4, 2, 2))
        for _ in range(2):
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            ).sum().backward()

    path = tmp_path / "mine.json"
    path.write_text(recording("mine", {}, program).text())
    name = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
    ((case,),) = (entry.cases for entry in model_entries(path)[name])
    assert case.saved is not None and case.saved.results == {"out": 0, "logsumexp": 1}
    assert not {"out", "logsumexp"} & set(case.kwargs)
    given = {key: case.drawn().arguments()[1][key] for key in ("query", "key", "value", "out")}
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(given[key] for key in ("query", "key", "value")), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(given["out"], expected)


def test_calls_without_a_form_are_counted() -> None:
    with Recorder() as recorder:
        sparse = torch.ones(2, 2).to_sparse()
        torch.add(sparse, sparse)
        torch.randn(2, generator=torch.Generator())
    assert any("layout torch.sparse_coo" in what for what in recorder.left_out)
    assert any("a value of type Generator" in what for what in recorder.left_out)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("python", "it names no script"),
        ("python -c 1", "it names no script"),
        ("python no_such.py", "there is no file 'no_such.py'"),
        ("python {ends}", "it exits with 3"),
        ("python 'x", "cannot be split into words: No closing quotation"),
    ],
)
def test_commands_that_cannot_be_recorded(tmp_path: Path, command: str, problem: str) -> None:
    (tmp_path / "ends.py").write_text("raise SystemExit(3)")
    with pytest.raises(RecordedScriptError, match=problem):
        run_script(command.format(ends=tmp_path / "ends.py"))


def test_modules_are_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    run_script("python -m json.tool --help")
    assert "usage: " in capsys.readouterr().out


def test_the_committed_lists_are_those_of_the_reference_models() -> None:
    assert set(REQUIRED) <= set(MODELS) == set(model_names())
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 1_500_000
    cases = 0
    for name in model_names():
        given = json.loads((FOLDER / f"{name}.json").read_text())
        assert given["about"]["model"] == MODELS[name].about
        for entries in model_entries(FOLDER / f"{name}.json").values():
            cases += sum(len(entry.cases) for entry in entries)
            assert all(callable(function(entry.call)) for entry in entries)
    assert cases > 4000
    assert FOLDER.parent == CASE_FILES.parent


def test_the_page_says_what_each_list_is_of() -> None:
    page = (FOLDER.parents[3] / "docs" / "conformance.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    told = {name: row[2] for row in rows if len(row) == 3 for name in row[1].split(", ")}
    assert {name: told.get(name) for name in MODELS} == {n: m.about for n, m in MODELS.items()}


def test_a_model_is_recorded_again_as_it_is_committed() -> None:
    text = recorded_model("repvgg").text()
    assert json.loads(text)["case"] == json.loads((FOLDER / "repvgg.json").read_text())["case"]


def test_the_list_of_models() -> None:
    status, said = run("--get_model_list")
    assert status == 0
    listed = dict(line.split(": ", 1) for line in said.splitlines())
    assert set(listed) == set(MODELS) and "aten.convolution.default" in listed["resnet50"]


def test_unknown_models_are_named() -> None:
    status, said = run("gen_data", "--model_name", "resnet5")
    assert status == 2 and "no model 'resnet5', nor a file of that name; the nearest is" in (
        unframed(said)
    )
    status, said = run("record", "--models", "resnet5")
    assert status == 2 and "the nearest is 'resnet50'" in unframed(said)
    status, said = run("record")
    assert status == 2 and "either --script or --models" in unframed(said)
