"""The installed pytest plugin: its options from any folder, and its silence in other projects."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.forked import COMPILER, server

from dicp.testing.backends import name_of
from dicp.testing.fixtures import TRACE_LOG

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


def run(
    folder: Path, *arguments: str, imported: Sequence[str] = COMPILER
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(folder / "site")])
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    return server(*imported).run(command, cwd=folder, env={**os.environ, "PYTHONPATH": path})


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


def cases(found: subprocess.CompletedProcess[str]) -> set[str]:
    """The cases of a run that collects only, by name."""
    return set(re.findall(r"::test_op\w*\[(?:static-)?([\w.]+?)(?:-static)?\]", found.stdout))


def test_cases_are_chosen_by_name_and_by_the_operators_that_they_reach(folder: Path) -> None:
    files = [str(ROOT / "test" / "op" / f"test_{name}.py") for name in ("normalization", "pooling")]
    options = ("--collect-only", "--dynamic", "false")
    found = run(folder, *files, *options, "--op", "native_group_norm", "--op", ".*_avg_pool2d")
    chosen = cases(found)
    assert found.returncode == 0 and {"group_norm", "adaptive_avg_pool2d"} <= chosen, found.stdout
    assert all("group_norm" in name or "avg_pool" in name for name in chosen), chosen
    none = run(folder, *files, *options, "--op", "native_grup_norm")
    assert none.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--op native_grup_norm matches no case. Near names: " in none.stderr + none.stdout
    assert "native_group_norm" in none.stderr + none.stdout


def test_a_list_with_one_file_per_operator_gets_the_cases_of_the_operators(folder: Path) -> None:
    ops = ROOT / "test" / "op"
    (folder / "static.ini").write_text(
        "[pytest]\npython_files = test__softmax.py test_scan.py\n"
        f"testpaths = {ops / 'test_reduction.py'} {ops / 'test_scan.py'}\n"
    )
    found = run(folder, "-c", "static.ini", "--collect-only", "--dynamic", "false")
    chosen = cases(found)
    assert found.returncode == 0 and {"softmax", "cumsum"} <= chosen, found.stdout + found.stderr
    assert "mean" not in chosen


@pytest.mark.parametrize("shapes", ["true", "false"])
def test_a_test_in_the_form_of_an_earlier_suite_runs(folder: Path, shapes: str) -> None:
    file = str(ROOT / "test" / "op" / "test__unsafe_view.py")
    found = run(folder, file, "--backend", "cpugraph", "--dynamic", shapes)
    assert found.returncode == 0 and "6 passed" in found.stdout, found.stdout


def test_no_compilation_is_traced_for_the_handlers_of_pytest() -> None:
    """PyTorch prints every graph for a handler of its trace, and pytest has some for all loggers
    that do not propagate."""
    assert not logging.getLogger(TRACE_LOG).handlers


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
    found = run(folder, "--device", "other", "--backend", imported=())
    assert found.returncode == 0, found.stdout + found.stderr


def test_operator_cases_are_part_of_the_package() -> None:
    from dicp.testing.coverage import OP_TESTS, all_cases

    assert OP_TESTS.samefile(ROOT / "test" / "op")
    assert len(all_cases()) > 200


def test_the_backend_of_another_device_finds_its_target() -> None:
    assert name_of("", "cpu") == "cpugraph" and name_of("", "dipu") == "dicp"
    assert name_of("topsgraph", "dipu") == "topsgraph"
