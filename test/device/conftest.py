"""The device is registered once in a process: its tests run programs, several checks in each."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.forked import COMPILER, server

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run() -> Run:
    """`run(program, *arguments, ok=True, imported=COMPILER, NAME=value)`: a Python program.

    They share the cache of the tests, since the native part takes most of a minute to compile.
    """

    def run_program(
        program: str | Path,
        *arguments: str,
        ok: bool = True,
        imported: Sequence[str] = COMPILER,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        command = [program] if isinstance(program, Path) else ["-W", "ignore", "-c", program]
        given = [environment.pop("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join([str(ROOT), *filter(None, given)])
        variables = {**os.environ, "PYTHONPATH": path, **environment}
        return server(*imported).run(
            [*command, *arguments], env=variables, cwd=ROOT, check=ok, teardown=True
        )

    return run_program
