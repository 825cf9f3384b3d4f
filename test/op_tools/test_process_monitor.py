"""The process monitor: rows of a process that runs, and an error for one that does not."""

from __future__ import annotations

import csv
import os
import re
from pathlib import Path

import pytest

from dicp.op_tools import process_monitor
from dicp.op_tools.process_monitor import main


def test_rows_of_a_process(capsys: pytest.CaptureFixture[str]) -> None:
    pid = str(os.getpid())
    assert main(["--pid", pid, "--interval", "0.01", "--label", "me", "--rows", "3"]) == 0
    path = Path(capsys.readouterr().out.removesuffix(" saved\n"))
    assert path.parent == Path("op_tools_results/process_monitor_result")
    assert re.fullmatch(rf"process_monitor_result_\w+_pid{pid}_me_[\d-]+\.csv", path.name)
    head, *rows = list(csv.reader(path.open()))
    assert head[:3] == ["runningtime(Seconds)", "time_str", "time(Seconds)"] and len(rows) == 3
    assert all(float(row[3]) > 10 for row in rows)


def test_rows_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """OT-7: one row waits for no other unless OP_TOOLS_MAX_CACHE_SIZE says so."""
    writes: list[int] = []
    monkeypatch.setattr(process_monitor, "append_csv", lambda path, columns, rows: writes.append(
        len(rows)))  # fmt: skip
    for size in ("", "3"):
        monkeypatch.setenv("OP_TOOLS_MAX_CACHE_SIZE", size)
        main(["--pid", str(os.getpid()), "--interval", "0.01", "--rows", "4"])
    assert writes == [1, 1, 1, 1, 3, 1]


def test_a_process_that_does_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--pid", "4194305"]) == 2
    assert "process 4194305 cannot be watched" in capsys.readouterr().err


@pytest.mark.parametrize("rows", ["0", "-1", "many"])
def test_rows_are_a_number_above_0(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--pid", str(os.getpid()), "--rows", rows])
    assert caught.value.code == 2
    assert f"'{rows}' is not a whole number above 0" in capsys.readouterr().err


def test_a_wrong_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OP_TOOLS_MAX_CACHE_SIZE", "many")
    assert main(["--pid", str(os.getpid()), "--rows", "1", "--interval", "0.01"]) == 2
    assert "OP_TOOLS_MAX_CACHE_SIZE is 'many'; expected a whole" in capsys.readouterr().err


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf", "soon"])
def test_an_interval_is_a_number_above_0(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--pid", str(os.getpid()), "--interval", interval, "--rows", "1"])
    assert caught.value.code == 2
    assert f"'{interval}' is not a number of seconds above 0" in capsys.readouterr().err


def test_ctrl_c_ends_the_watching(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(process_monitor.time, "sleep", interrupted)
    assert main(["--pid", str(os.getpid())]) == 0
    assert capsys.readouterr().out.endswith(" saved\n")
