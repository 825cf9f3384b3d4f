"""The installed pytest plugin: its options from any folder, and its silence in other projects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENTRY = "[pytest11]\ndicp.pytest_plugin = dicp.pytest_plugin\n"
METADATA = "Metadata-Version: 2.1\nName: dicp-plugin-test\nVersion: 0.0\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an installed distribution that has the plugin's entry point, nothing else."""
    installed = tmp_path / "site" / "dicp_plugin_test-0.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "entry_points.txt").write_text(ENTRY)
    (installed / "METADATA").write_text(METADATA)
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(folder / "site")])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
         *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_a_list_runs_from_any_folder(folder: Path) -> None:
    (folder / "lists").mkdir()
    listed = f"{os.path.relpath(ROOT, folder / 'lists')}/test/op/test_scan.py"
    (folder / "lists" / "static.ini").write_text(f"[pytest]\ntestpaths = {listed}\n")
    found = run(
        folder, "-c", "lists/static.ini", "--backend", "cpugraph",
        "--dynamic", "false", "-k", "cumprod and not ints", "--results", "found.json",
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    results = json.loads((folder / "found.json").read_text())
    (outcome,) = results["tests"].values()
    assert outcome == "passed" and results["eager"] == {}


OTHER_CONFTEST = """
import pytest

def pytest_addoption(parser):
    parser.addoption("--device", default="theirs", choices=("theirs", "other"))
    parser.addoption("--backend", action="store_true")

@pytest.fixture
def dynamic():
    return "their fixture"
"""
OTHER_TEST = """
import sys

def test_other(dynamic, request):
    assert dynamic == "their fixture"
    assert request.config.getoption("--device") == "other"
    assert request.config.getoption("--backend") is True
    assert request.config.getoption("--dicp-device") == "cpu"
    loaded = {name for name in sys.modules if name.partition(".")[0] in ("torch", "dicp")}
    assert loaded == {"dicp", "dicp.version", "dicp.pytest_plugin"}
"""


def test_projects_with_options_of_these_names_are_left_alone(folder: Path) -> None:
    (folder / "conftest.py").write_text(OTHER_CONFTEST)
    (folder / "test_other.py").write_text(OTHER_TEST)
    found = run(folder, "--device", "other", "--backend")
    assert found.returncode == 0, found.stdout + found.stderr


def test_operator_cases_are_part_of_the_package() -> None:
    from dicp.testing.coverage import OP_TESTS, all_cases

    assert OP_TESTS.samefile(ROOT / "test" / "op")
    assert len(all_cases()) > 200
