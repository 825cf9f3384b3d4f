"""The scripts that run lists and models: the pytest command that they start, and their errors."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

TEST = Path(__file__).resolve().parents[1]
MODEL = TEST / "model" / "run_test_model.sh"
VENDORS = sorted(folder.name.removesuffix("_scripts") for folder in TEST.glob("*_scripts"))
PRINTS = '#!/usr/bin/env bash\necho "$PWD" "$@"\n'
"""A Python that prints its arguments."""


@pytest.fixture
def started(tmp_path: Path) -> Path:
    """A folder to start from, whose bin/python prints its arguments."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(PRINTS)
    python.chmod(0o700)
    return tmp_path


def run(started: Path, script: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    surroundings = {"PATH": f"{started / 'bin'}:{os.environ['PATH']}", **env}
    return subprocess.run(
        [str(script), *args], cwd=started, env=surroundings, capture_output=True, text=True
    )


@pytest.mark.parametrize("kind", ["ops", "models"])
@pytest.mark.parametrize("vendor", VENDORS)
def test_lists_run_from_any_folder(vendor: str, kind: str, started: Path) -> None:
    folder = TEST / f"{vendor}_scripts"
    for script in (folder / f"run_test_{kind}.sh", folder / kind / f"run_test_{kind}.sh"):
        done = run(started, script, "all", "-x")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [
            f"{TEST.parent} -m pytest -c {folder / kind / form}.ini "
            f"--backend {vendor}graph --dynamic {dynamic} -x"
            for form, dynamic in (("static", "false"), ("dynamic", "true"))
        ]  # fmt: skip
        wrong = run(started, script, "maybe")
        assert wrong.returncode == 2 and "true|false|all" in wrong.stderr


@pytest.mark.parametrize("kind", ["ops", "models"])
@pytest.mark.parametrize("vendor", VENDORS)
def test_lists_for_static_and_dynamic_shapes_name_every_file(vendor: str, kind: str) -> None:
    folder = TEST / f"{vendor}_scripts" / kind
    files = sorted(file.name for file in (TEST / kind.removesuffix("s")).glob("test_*.py"))
    static, dynamic = (
        re.findall(r"test_\w+\.py", (folder / f"{form}.ini").read_text())
        for form in ("static", "dynamic")
    )
    assert static == dynamic == files


def test_a_list_takes_backend_and_shapes_from_the_environment(started: Path) -> None:
    script = TEST / "cpu_scripts" / "ops" / "run_test_ops.sh"
    done = run(started, script, BACKEND="inductor", DYNAMIC="true")
    assert done.stdout.endswith("--backend inductor --dynamic true\n")


@pytest.mark.parametrize("name", ["resnet50", "test_resnet50", "test_resnet50.py"])
def test_a_model_by_its_names(name: str, started: Path) -> None:
    done = run(started, MODEL, name, "topsgraph", "false", "-x")
    shown, command = done.stdout.splitlines()
    assert "'pytest'" in shown and "'topsgraph'" in shown
    test = MODEL.with_name("test_vision.py")
    assert command.endswith(f"{test} -k resnet50 --backend topsgraph --dynamic false -x")


def test_weights_are_random_unless_required(started: Path) -> None:
    args = ("llama", "cpugraph", "all")
    assert "random weights; for real ones set LLAMA_MODEL_DIR" in run(started, MODEL, *args).stdout
    missing = run(started, MODEL, *args, "--require-weights")
    assert missing.returncode == 1 and "LLAMA_MODEL_DIR is not defined!" in missing.stderr
    assert "config.json" in missing.stderr
    assert "params.json" in missing.stderr
    given = run(started, MODEL, *args, "--require-weights", "-x", LLAMA_MODEL_DIR="/weights")
    assert given.returncode == 0 and given.stdout.endswith("--dynamic both -x\n")
    tuning = run(started, MODEL, "llama_finetune", *args[1:], "--require-weights")
    assert tuning.returncode == 1 and "LLAMA_FINETUNE_DIR is not defined!" in tuning.stderr
    assert "base_model/" in tuning.stderr and "alpaca_data.json" in tuning.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("nosuch", "cpugraph", "all"), "known ones: llama llama_finetune resnet50"),
        (("llama", "cpugraph", "maybe"), "usage: run_test_model.sh MODEL BACKEND true|false|all"),
        ((), "usage: run_test_model.sh"),
    ],
)
def test_wrong_arguments_of_the_model_script(
    args: tuple[str, ...], message: str, started: Path
) -> None:
    done = run(started, MODEL, *args)
    assert done.returncode == 2 and message in done.stderr and not done.stdout
