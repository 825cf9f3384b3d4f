"""What `pip wheel` packs: every file of the packages, those behind links to the tests included."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("dicp", "ditorch", "op_tools", "torch_dipu")


def _files(root: Path) -> set[str]:
    """The files under the packages in `root`, without compiled Python."""
    found = set()
    for package in PACKAGES:
        for folder, _, names in os.walk(root / package, followlinks=True):
            if "__pycache__" not in folder:
                found |= {str((Path(folder) / name).relative_to(root)) for name in names}
    return found


def test_wheel_has_every_file(tmp_path: Path) -> None:
    """Templates, C++ sources, tables, scripts, and the operator and model tests."""
    build = ["egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib", str(tmp_path)]
    program = f"from setuptools import setup; setup(script_args={build!r})"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True)
    expected = _files(ROOT)
    assert "dicp/testing/operators/test_scan.py" in expected
    assert _files(tmp_path) == expected
