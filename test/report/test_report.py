"""What a report is made of: records of a dump, times, rooflines, results of tools; its errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic import write_dump
from torch import Tensor
from typer.testing import CliRunner

from dicp import Backend
from dicp.cli import app
from dicp.errors import ReportOutputError, ReportScriptError, ReportSourceError
from dicp.report import write_report
from dicp.report.dump import Program, read_dump
from dicp.report.memory import memory_over_run
from dicp.report.page import page_of
from dicp.report.roofline import Roofline
from dicp.report.tool_results import ToolResults, read_results
from dicp.report.view import edges_between, view_of
from dicp.target import find_target


def dumped(
    fn: Callable[..., Any], *inputs: Any, folder: Path, target: str = "cpu", **options: Any
) -> Any:
    """The result of a compiled function whose dump, with times, goes to `folder`."""
    torch._dynamo.reset()
    given = {"dump": folder, "dump_times": True, "cache": False, **options}
    return torch.compile(fn, backend=Backend(target, **given))(*inputs)


def softmax_of_sum(x: Tensor, y: Tensor) -> Tensor:
    return torch.softmax(x + y, -1).sort()[0] * 2


# ---- records -------------------------------------------------------------------------------------


def test_steps_tensors_and_edges_of_a_loop_program(tmp_path: Path) -> None:
    x = torch.randn(64, 128)
    dumped(softmax_of_sum, x, x, folder=tmp_path)
    (graph,) = read_dump(tmp_path).graphs
    (program,) = graph.programs
    steps, tensors = program.record["steps"], program.record["tensors"]
    assert [step["kind"] for step in steps] == ["kernel", "library", "kernel"]
    first = steps[0]
    size = 64 * 128 * 4
    assert [tensors[a["tensor"]]["place"] for a in first["reads"]] == ["caller"]
    assert [a["nbytes"] for a in (*first["reads"], *first["writes"])] == [size, size]
    assert first["flops"] == 2 * 64 * 128, "an addition and a softmax"
    lines = program.record["lines"]
    assert "return torch.softmax(x + y, -1).sort()[0] * 2" in lines.values()
    assert "for (" in program.record["sources"][first["name"]]
    ends = [(a, b, n) for a, b, n, _ in edges_between(steps)]
    assert (0, 1, size) in ends and (1, 2, size) in ends


def test_products_count_as_pytorch_counts_them(tmp_path: Path) -> None:
    dumped(lambda a, b: a @ b, torch.randn(8, 16), torch.randn(16, 4), folder=tmp_path)
    (graph,) = read_dump(tmp_path).graphs
    assert [s["flops"] for s in graph.programs[0].record["steps"]] == [2 * 8 * 16 * 4]


@pytest.fixture
def fresh_target(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that has not warned yet, whatever the process ran before."""
    fresh = type(find_target(target))()
    monkeypatch.setattr("dicp.dynamo_bridge.backend.load_target", lambda name: fresh)


@pytest.mark.usefixtures("fresh_target")
@pytest.mark.parametrize("target", ["ascend", "tops"])
def test_graph_operators_are_the_steps_and_are_not_timed(target: str, tmp_path: Path) -> None:
    x = torch.randn(8, 16)
    with pytest.warns(Warning, match="simulator"):
        dumped(lambda x: torch.relu(x + 1) @ x.t(), x, folder=tmp_path, target=target)
    (graph,) = read_dump(tmp_path).graphs
    (program,) = graph.programs
    steps = program.record["steps"]
    assert {step["kind"] for step in steps} == {"operator"} and len(steps) >= 3
    assert all(step["text"] and step["group"] for step in steps)
    assert "simulator" in program.times["obstacle"] and "seconds" not in program.times
    assert len(edges_between(steps)) >= 2
    view = view_of(read_dump(tmp_path), Roofline(obstacle="none"), ToolResults())
    assert all(box["seconds"] is None for box in view["graphs"][0]["boxes"])


@pytest.mark.usefixtures("fresh_target")
@pytest.mark.parametrize(("target", "warning"), [("triton", "interpreter"), ("maca", "emulation")])
def test_a_simulated_gpu_is_not_timed(target: str, warning: str, tmp_path: Path) -> None:
    x = torch.randn(8, 16)
    with pytest.warns(Warning, match=warning):
        dumped(lambda x: torch.relu(x) * 2, x, folder=tmp_path, target=target)
    (graph,) = read_dump(tmp_path).graphs
    assert [s["kind"] for s in graph.programs[0].record["steps"]] == ["kernel"]
    assert "simulator" in graph.programs[0].times["obstacle"]


def test_symbolic_sizes_are_those_of_the_first_call(tmp_path: Path) -> None:
    x = torch.randn(6, 16)
    torch._dynamo.mark_dynamic(x, 0)
    dumped(lambda x: torch.softmax(x, -1) + 1, x, folder=tmp_path)
    (graph,) = read_dump(tmp_path).graphs
    record = graph.programs[0].record
    assert 6 in record["sizes"].values()
    assert record["steps"][0]["writes"][0]["nbytes"] == 6 * 16 * 4


# ---- times ---------------------------------------------------------------------------------------


def test_every_step_is_timed_and_the_whole_run(tmp_path: Path) -> None:
    x = torch.randn(256, 512)
    dumped(softmax_of_sum, x, x, folder=tmp_path)
    (program,) = read_dump(tmp_path).measured
    times = program.times
    assert set(times["seconds"]) == {"0", "1", "2"} and times["runs"] >= 3
    assert all(median >= least > 0 for median, least in times["seconds"].values())
    assert times["whole"] > 0 and times["threads"] == torch.get_num_threads()


def test_measuring_changes_nothing_that_the_program_sees(tmp_path: Path) -> None:
    """In-place writes happen once, and random numbers are those without measuring."""

    def step(x: Tensor, total: Tensor) -> Tensor:
        total.add_(x)
        return torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)

    def run(folder: Path | None) -> tuple[Tensor, Tensor, Tensor]:
        torch._dynamo.reset()
        options = {} if folder is None else {"dump": folder, "dump_times": True}
        compiled = torch.compile(step, backend=Backend("cpu", cache=False, **options))
        whole = torch.zeros(8, 20)
        total = whole[:, 4:12]  # the copy must keep strides and offset
        torch.manual_seed(3)
        result = compiled(torch.ones(8, 8), total)
        return result, whole, torch.rand(3)

    for got, wanted in zip(run(tmp_path), run(None), strict=True):
        assert torch.equal(got, wanted)
    assert read_dump(tmp_path).measured


def test_a_graph_with_effects_runs_once(tmp_path: Path) -> None:
    calls = []

    @torch.library.custom_op("report_test::count", mutates_args=())
    def count(x: Tensor) -> Tensor:
        calls.append(1)
        return x.clone()

    count.register_fake(torch.empty_like)
    dumped(lambda x: count(x + 1) * 2, torch.ones(4), folder=tmp_path)
    assert len(calls) == 1
    (graph,) = read_dump(tmp_path).graphs
    assert "may not be run twice" in graph.programs[0].times["obstacle"]


def test_without_dump_times_nothing_is_measured(tmp_path: Path) -> None:
    dumped(torch.relu, torch.ones(4), folder=tmp_path, dump_times=False)
    (graph,) = read_dump(tmp_path).graphs
    assert graph.programs[0].times == {}
    view = view_of(read_dump(tmp_path), Roofline(obstacle="none"), ToolResults())
    assert view["graphs"][0]["untimed"] == "times were not asked for, or it did not run"


# ---- rooflines and memory ------------------------------------------------------------------------


ROOF = Roofline("cpu", "p", 1, 0.0, [(1 << 10, 1e-6), (1 << 20, 1e-4)], {"float32": 1e9})


def test_a_copy_of_as_many_bytes_takes_a_time_between_the_measured_ones() -> None:
    assert ROOF.copy_seconds(1 << 10) == 1e-6 == ROOF.copy_seconds(8)
    assert ROOF.copy_seconds(1 << 15) == pytest.approx(1e-5)  # half way, in logarithms
    assert ROOF.copy_seconds(1 << 22) == pytest.approx(4e-4)
    assert ROOF.limit(1 << 10, 10, "float32") == (1e-6, "bytes")
    assert ROOF.limit(1 << 10, 1e6, "float32") == (1e-3, "FLOPs")
    assert ROOF.limit(1 << 10, 1e6, "int64") == (1e-6, "bytes")
    assert ROOF.limit(1 << 10, None, "float32") == (1e-6, "bytes")


def test_the_machine_is_measured() -> None:
    from dicp.machine import processor

    times = {"device": "cpu", "threads": 1, "processor": processor(torch.device("cpu")),
             "load": 0.0, "seconds": {"0": [1, 1]}}  # fmt: skip
    found = Roofline.measure([Program({"tensors": [{"dtype": "float32"}]}, times)])
    assert found.obstacle == "" and found.bandwidth > 1e8 and found.rates["float32"] > 1e8
    seconds = [taken for _, taken in found.copies]
    assert all(taken > 0 for taken in seconds) and seconds[-1] > 100 * seconds[0]
    foreign = Program({"tensors": []}, times | {"processor": "another"})
    assert "the times were taken on another" in Roofline.measure([foreign]).obstacle
    assert Roofline.measure([]).obstacle == "no kernel was timed"


def test_memory_counts_each_tensor_while_it_is_alive() -> None:
    tensors = [
        {"place": "caller", "first": -1, "last": 3, "nbytes": 10},
        {"place": "workspace", "first": 0, "last": 1, "nbytes": 5},
        {"place": "workspace", "first": 1, "last": 2, "nbytes": 7},
    ]
    assert memory_over_run(tensors, 3) == {"caller": [10, 10, 10], "workspace": [5, 12, 7]}
    assert memory_over_run([], 2) == {}


# ---- results of tools ----------------------------------------------------------------------------


def test_tool_results_are_read(tmp_path: Path) -> None:
    compared = tmp_path / "op_autocompare_result" / "a.csv"
    timed = tmp_path / "op_time_measure_result" / "t.csv"
    capture = tmp_path / "op_capture_results" / "torch.add" / "1" / "2" / "now" / "input.json"
    for file in (compared, timed, capture):
        file.parent.mkdir(parents=True)
    compared.write_text("forward_id,name,allclose\n1/a,add output,True\n2/a,sin output,False\n")
    timed.write_text(
        "name,forward_id,forward_elasped,backward_elasped,unit\n"
        "add,1,1.5,,ms\nadd,2,0.5,1.0,ms\nmul (estimate),3,9.0,,ms\n"
    )
    capture.write_text("{}")
    (tmp_path / "op_time_measure_result" / "bad.csv").write_bytes(b"\xff\xfe\x00,\x00")
    found = read_results(tmp_path)
    assert found.compared == 2 and [row["name"] for row in found.failures] == ["sin output"]
    mul, add = found.timings
    assert (mul.name, mul.estimated) == ("mul", True)
    assert (add.calls, add.forward, add.backward) == (2, 2.0, 1.0)
    assert found.captures == {"torch.add": 1}
    assert len(found.unread) == 1 and "bad.csv" in found.unread[0]
    assert not read_results(tmp_path, since=compared.stat().st_mtime + 100).any
    assert not read_results(tmp_path / "none").any


# ---- the page as text ----------------------------------------------------------------------------


def test_the_data_cannot_end_its_element(tmp_path: Path) -> None:
    view = view_of(read_dump(write_dump(tmp_path, 3)), Roofline(obstacle="x"), ToolResults())
    view["about"] = {"command": "</title><script>1</script>", "made": "", "versions": ""}
    page = page_of(view)
    start = page.index('id="data">') + len('id="data">')
    inside = page[start : page.index("</script>", start)]
    assert "<" not in inside and json.loads(inside)["about"] == view["about"]
    assert "<title>dicp report: &lt;/title&gt;" in page
    assert "sourceMappingURL" not in page and "http-equiv" in page


# ---- errors --------------------------------------------------------------------------------------


def test_errors(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ReportSourceError, match="holds no compiled graph"):
        write_report(empty, out)
    with pytest.raises(ReportSourceError, match="no such file or folder"):
        write_report(tmp_path / "none", out)
    older = tmp_path / "older" / "graph1_forward"
    older.mkdir(parents=True)
    (older / "03_report.txt").write_text("forward graph")
    with pytest.raises(ReportSourceError, match="older dicp"):
        write_report(older.parent, out)
    damaged = write_dump(tmp_path / "damaged", 3)
    next(damaged.rglob("*_program.json")).write_text('{"format": 1, ')
    with pytest.raises(ReportSourceError, match="cannot be read: JSONDecodeError"):
        write_report(damaged, out)
    next(damaged.rglob("*_program.json")).write_text('{"format": 99}')
    with pytest.raises(ReportSourceError, match="format 99"):
        write_report(damaged, out)
    assert not out.exists()


def test_a_script_that_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "bad.py"
    script.write_text("import sys\nprint('before')\nprint('why', file=sys.stderr)\nsys.exit(3)\n")
    with pytest.raises(ReportScriptError, match="exit status 3") as error:
        write_report(script, tmp_path / "page.html")
    assert "why" in str(error.value) and error.value.status == 3
    assert "before" in capfd.readouterr().out


def test_a_script_that_compiles_nothing(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("import torch\ntorch.ones(2)\n")
    with pytest.raises(ReportSourceError, match="compiled no graph by a backend of dicp"):
        write_report(script, tmp_path / "page.html")
    script.write_text(
        "import torch\nlstm = torch.nn.LSTM(2, 2)\n"
        "torch.compile(lstm, backend='cpugraph')(torch.ones(1, 1, 2))\n"
    )
    with pytest.raises(ReportSourceError, match="Dynamo left to Python: .*RNN, GRU, or LSTM"):
        write_report(script, tmp_path / "page.html")


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    dump = write_dump(tmp_path / "dump", 3)
    for out in (tmp_path, tmp_path / "none" / "page.html"):
        with pytest.raises(ReportOutputError, match="Give another file by --out"):
            write_report(dump, out)


def test_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    dump = write_dump(tmp_path / "dump", 3)
    done = CliRunner().invoke(app, ["report", "--out", str(out), str(dump)])
    assert done.exit_code == 0, done.output
    assert f"report written to {out}" in done.output.replace("\n", "")
    assert out.read_text().startswith("<!DOCTYPE html>")
    missing = CliRunner().invoke(app, ["report", str(tmp_path / "none")])
    assert isinstance(missing.exception, ReportSourceError)
