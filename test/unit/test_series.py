"""Rows of measurements: what fails, hangs or crashes is named, and the rest is measured."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as main
from benchmarks import chart, gpu, gpu_products, series
from benchmarks.features import names
from benchmarks.gpu_goals import GOALS, goal_rows
from benchmarks.options import Options
from benchmarks.report import Report, Row
from dicp.gpu.measured import read

TASK = "measured_task:task"


def measured(items: Sequence[str], limit: float = 20, seconds: float = 120) -> list[Any]:
    return list(
        series.run(
            TASK, items, {"extra": 1}, deadline=time.monotonic() + seconds, limit=limit,
            environment={"PYTHONPATH": str(Path(__file__).parent)},
        )
    )  # fmt: skip


def test_results_and_failures_come_in_order() -> None:
    (first, second, third) = measured(["one", "fail", "three"])
    assert first == ("one", 4, "") and third == ("three", 6, "")
    assert second[1] is None and second[2].startswith(
        "ValueError: no such number (measured_task.py:"
    )


def test_after_a_crash_the_next_item_is_measured() -> None:
    (first, second, third) = measured(["one", "crash", "three"])
    assert first[1] == 4 and third[1] == 6
    assert second[0] == "crash" and second[2].startswith("ended with -6")


def test_an_item_that_hangs_is_given_up() -> None:
    began = time.monotonic()
    (first, second) = measured(["hang", "three"], limit=6)
    assert first[0] == "hang" and "not done after" in first[2] and second[1] == 6
    assert time.monotonic() - began < 60


def test_nothing_is_begun_after_the_deadline() -> None:
    assert measured(["one"], seconds=0) == []
    found = measured(["hang", "one"], limit=60, seconds=2)
    assert [item for item, _, _ in found] == ["hang"]


@pytest.mark.parametrize(
    ("command", "option", "value", "message"),
    [
        ("models", "--backends", "eager,cpugrap", "no backend 'cpugrap'; known: "),
        ("models", "--backends", "cpugraph:freeze", "expected option=value, got 'freeze'"),
        ("models", "--dtype", "float31", "'float31' is no dtype"),
        ("models", "--layers", "1,x", "'x' is not a whole number above 0"),
        ("models", "--models", "resnet5", "unknown models ['resnet5']; known: "),
        ("kernels", "--kernels", "softmx", "unknown kernels ['softmx']; known: "),
        ("gpu", "--sections", "featurs", "unknown sections ['featurs']; known: "),
    ],
)
def test_a_wrong_option_is_named(
    command: str, option: str, value: str, message: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main.main([command, option, value, "--out", str(tmp_path)])
    assert ended.value.code == 2 and message in capsys.readouterr().err


class Quiet:
    """A progress without a screen."""

    class console:  # noqa: N801 - the name of what it stands for
        print = staticmethod(lambda text: None)


def options(folder: Path, *sections: str) -> Options:
    return Options(
        command="gpu", backends=("eager", "cpugraph"), names=sections, dtypes=(), modes=(False,),
        device="cpu", quick=True, layers=(), out=folder,
    )  # fmt: skip


def test_a_section_that_fails_leaves_the_others_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(state: gpu.Run) -> None:
        raise RuntimeError("no device")

    def works(state: gpu.Run) -> None:
        state.add(gpu.Row("it", {"section": "works"}, {"cpugraph": 1.0}))

    monkeypatch.setattr(gpu, "SECTIONS", {"broken": (5, broken), "works": (5, works)})
    report = Report(options(tmp_path), "", {})
    gpu.run(report.options, report, Quiet())  # type: ignore[arg-type]
    assert "no device" in report.rows[0].failures["cpugraph"]
    assert report.rows[1].values == {"cpugraph": 1.0}
    assert (tmp_path / "gpu-cpu.json").exists() and report.table().row_count >= 2


def test_products_are_measured_into_a_table_of_a_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_products, "items", lambda full: ["float32 nn 32x32x16"])
    report = Report(options(tmp_path / "new", "products"), "", {})
    gpu.run(report.options, report, Quiet())  # type: ignore[arg-type]
    row = report.rows[0]
    assert not row.failures and row.values["eager"] and row.values["cpugraph"], row
    (kept,) = read(tmp_path / "new" / "products.json").values()
    assert kept.problem.shape == (1, 32, 32, 16)


@pytest.mark.sweep
def test_kernels_are_timed_beside_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "KERNELS", ("swiglu",))
    report = Report(options(tmp_path, "kernels"), "", {})
    gpu.run(report.options, report, Quiet())  # type: ignore[arg-type]
    row, *goals = report.rows
    assert {g.facts["section"] for g in goals} == {"goals"} and len(goals) == len(GOALS)
    assert set(row.values) == {"eager", "cpugraph"} and row.floors["copy"] and not row.failures, row
    assert row.detail["bytes"] == 3 * 2 * 65536


def test_what_was_not_begun_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, section = gpu.SECTIONS["kernels"]
    monkeypatch.setattr(gpu, "SECTIONS", {"kernels": (0, section)})
    monkeypatch.setattr(gpu, "KERNELS", ("swiglu", "gelu"))
    report = Report(options(tmp_path, "kernels"), "", {})
    gpu.run(report.options, report, Quiet())  # type: ignore[arg-type]
    kernels = [row for row in report.rows if row.facts["section"] == "kernels"]
    assert [row.name for row in kernels] == ["swiglu", "gelu"]
    assert all("not begun" in row.failures["cpugraph"] for row in kernels)


def test_what_a_section_leaves_over_is_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[float] = []

    def quick(state: gpu.Run) -> None:
        left.append(state.deadline - time.monotonic())

    monkeypatch.setattr(gpu, "SECTIONS", {"first": (50, quick), "second": (70, quick)})
    report = Report(options(tmp_path), "", {})
    gpu.run(report.options, report, Quiet())  # type: ignore[arg-type]
    assert 45 < left[0] <= 50 and 110 < left[1] <= 120


def test_the_sections_end_within_ten_minutes() -> None:
    assert sum(seconds for seconds, _ in gpu.SECTIONS.values()) <= 580
    assert sum(seconds for seconds, _ in gpu.NAMED.values()) <= 580


def test_what_an_item_says_is_printed_as_it_is(tmp_path: Path) -> None:
    row = Row("it", {"section": "one"}, failures={"eager": "no [/one] and [red]", "inductor": ""})
    row.wrong["eager"] = "off by [/2]"
    report = Report(options(tmp_path), "", {}, rows=[row])
    text = next(p for p in report.write(tmp_path) if p.suffix == ".txt").read_text()
    assert "no [/one] and [red]" in text and "off by [/2]" in text


def test_a_process_that_is_ended_leaves_what_it_measured_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Report(options(tmp_path), "", {}, rows=[Row("it", {"section": "one"}, {"eager": 1.0})])
    path = report.write_data(tmp_path)

    def ended(self: Path, text: str) -> int:
        with self.open("w") as file:
            file.write(text[:5])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", ended)
    with pytest.raises(KeyboardInterrupt):
        report.write_data(tmp_path)
    assert json.loads(path.read_text())["rows"][0]["values"] == {"eager": 1.0}


def test_a_table_needs_no_drawings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chart, "plt", None)
    rows = [Row("it", {"section": "one"}, {"eager": 2.0, "inductor": 1.0})]
    written = main.written(Report(options(tmp_path), "", {}, rows=rows), tmp_path)
    assert [path.suffix for path in written] == [".json", ".txt"]


def test_goals_are_compared_with_what_was_measured() -> None:
    def row(section: str, copy: float | None = None, **values: float) -> gpu.Row:
        floors = {} if copy is None else {"copy": copy}
        return gpu.Row("it", {"section": section}, values, floors=floors)

    rows = [
        row("kernels", 9.5, inductor=11.0, tritongraph=10.0),
        row("models, training", eager=20.0, inductor=10.0, tritongraph=5.0),
        row("models, inference", eager=20.0, inductor=9.0, tritongraph=10.0),
        row("cold compile", inductor=10.0, tritongraph=4.0),
        row("warm compile", inductor=10.0, tritongraph=8.0),
    ]
    rows[2].wrong["tritongraph"] = "by far"
    said = {r.name: r.facts["result"] for r in goal_rows(rows, ["tritongraph"])}
    assert said["kernels: mean share of the copy's rate"] == "wanted 0.9: reached with 0.95"
    assert said["models: mean speed to Inductor's"] == (
        "wanted 1: reached with 1.34; 1 wrong or failed"
    )
    assert said["models: worst speed to Inductor's"].startswith("wanted 0.95: missed with 0.9;")
    assert said["cold compile: Inductor's time to ours"] == "wanted 2: reached with 2.5"
    assert said["warm start: Inductor's time to ours"] == "wanted 1.43: missed with 1.25"
    assert said["memory: Inductor's peak to ours"] == "wanted 1: not measured"


@pytest.mark.sweep
def test_tests_are_counted_also_when_they_are_stopped(tmp_path: Path) -> None:
    log = tmp_path / "log"
    counts, failed = gpu.tested(["test/op/test__unsafe_view.py"], "cpugraph", "cpu", 200, log)
    assert counts.endswith("passed, 0 failed") and int(counts.split()[0]) > 3 and not failed
    counts, _ = gpu.tested(["test/op"], "cpugraph", "cpu", 0, log)  # far more than it has time for
    assert "stopped after" in counts


def test_a_gpu_is_tried_with_more() -> None:
    assert set(names("cpu")) < set(names("cuda")) and "recorded_mutation" in names("cuda")


def test_a_folder_of_results_that_cannot_be_made_is_told_before_the_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        main.main(["kernels", "--out", str(tmp_path / "file")])
    assert ended.value.code == 2
    assert "Give the path of a folder." in capsys.readouterr().err
