"""DICP_DUMP: one folder per graph, each file readable on its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from dicp import Backend


def fn(x: Tensor) -> Tensor:
    return torch.softmax(x + 1 + 0, -1)


def names(folder: Path) -> list[str]:
    return [path.name.partition("_")[2] for path in sorted(folder.iterdir())]


def test_every_stage_is_written(tmp_path: Path) -> None:
    torch.compile(fn, backend=Backend("cpu", dump=tmp_path))(torch.rand(3, 4))
    (folder,) = tmp_path.iterdir()
    assert folder.name.endswith("_inference")
    found = names(folder)
    assert found[0] == "aten.txt" and found[-1] == "report.txt"
    assert {"program.txt", "kernels.cpp"} <= set(found)
    graph = (folder / "00_aten.txt").read_text()
    assert "aten._softmax.default" in graph and "float32[3, 4]" in graph
    (program,) = folder.glob("*program.txt")
    assert "kernel inner_reduction" in program.read_text()
    (report,) = folder.glob("*report.txt")
    assert "inference graph" in report.read_text()


def test_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DICP_DUMP", str(tmp_path))
    torch.compile(fn, backend="cpugraph")(torch.rand(3, 4))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = torch.compile(fn, backend=Backend("cpu", dump=tmp_path / "file" / "dump"))
    with pytest.raises(BackendCompilerFailed, match=r"file/dump' cannot be written: Not a direct"):
        run(torch.rand(3, 4))


def test_forward_and_backward_have_folders_of_their_own(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    compiler = Backend("cpu", dump=tmp_path, cache=False)
    torch.compile(model, backend=compiler)(torch.rand(2, 4)).sum().backward()
    kinds = sorted(path.name.rpartition("_")[2] for path in tmp_path.iterdir())
    assert kinds == ["backward", "forward"]


def test_the_whole_log_of_a_failed_compiler_is_written(tmp_path: Path) -> None:
    compiler = tmp_path / "cxx"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo failing 1.0 && exit\n'
        "for k in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do\n"
        '  echo "x.cpp:$k:1: error: e$k"; echo "note n$k"\ndone\nexit 1\n'
    )
    compiler.chmod(0o755)
    backend = Backend("cpu", dump=tmp_path / "dump", cache=False, cxx=str(compiler))
    with pytest.raises(BackendCompilerFailed, match="error: e1"):
        torch.compile(fn, backend=backend)(torch.rand(3, 4))
    (log,) = (tmp_path / "dump").rglob("*compiler_log.txt")
    lines = log.read_text().splitlines()
    assert "compiled from:" in lines and lines.count("x.cpp:20:1: error: e20") == 1
    assert [f"note n{k}" for k in range(1, 21)] == [x for x in lines if x.startswith("note")]


def test_nothing_is_written_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.compile(fn, backend=Backend("cpu"))(torch.rand(3, 4))
    assert list(tmp_path.iterdir()) == []


def test_the_front_end_is_timed_too(capfd: pytest.CaptureFixture[str]) -> None:
    compiler = Backend("cpu", timings=True, cache=False)
    torch.compile(fn, backend=compiler)(torch.rand(3, 4))
    (report,) = compiler.reports
    assert list(report.stages)[:2] == ["dynamo", "aotautograd"]
    assert all(seconds > 0 for seconds in list(report.stages.values())[:2])
    assert "front end: dynamo" in capfd.readouterr().err


def test_timings_go_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    torch.compile(fn, backend=Backend("cpu", timings=True, cache=False))(torch.rand(3, 4))
    line = capfd.readouterr().err
    assert line.startswith("dicp: inference graph") and "lower" in line and "build" in line
