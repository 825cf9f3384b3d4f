"""The device is registered once in a process: its tests run programs, several checks in each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run() -> Run:
    """`run(program, *arguments, ok=True, NAME=value)`: a Python program with its environment.

    They share the cache of the tests, since the native part takes most of a minute to compile.
    """

    def run_program(
        program: str | Path, *arguments: str, ok: bool = True, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "ignore", "-c", program]
        if isinstance(program, Path):
            command = [sys.executable, str(program)]
        given = [environment.pop("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join([str(ROOT), *filter(None, given)])
        variables = {**os.environ, "PYTHONPATH": path, **environment}
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=280, env=variables,
            cwd=ROOT,
        )  # fmt: skip
        assert not ok or done.returncode == 0, done.stdout + done.stderr
        return done

    return run_program
