"""Run one measurement in a process of its own: a crash or a leak ends there.

The parent calls `run`; the process is `python -m benchmarks.child TASK OUTPUT ARGUMENTS-AS-JSON`
with TASK a name in TASKS. Its result is JSON in OUTPUT.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TASKS = {
    "step": "benchmarks.steps",
    "kernel": "benchmarks.kernels",
    "first": "benchmarks.compile",
    "memory": "benchmarks.memory",
    "layers": "benchmarks.scaling",
    "tools": "benchmarks.tools",
}
ROOT = Path(__file__).resolve().parent.parent


class ChildFailed(RuntimeError):
    """A measurement that crashed or timed out; the message ends with its last output."""


def run(
    task: str,
    arguments: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    timeout: float = 1200,
) -> Any:
    """The result of a task in a fresh process; raises ChildFailed."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.child", task, str(output)]
        try:
            done = subprocess.run(
                [*command, json.dumps(dict(arguments))],
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"{task} took longer than {timeout:.0f} s") from None
        if done.returncode or not output.exists():
            last = [line for line in done.stderr.splitlines() if line.strip()][-12:]
            raise ChildFailed(f"{task} ended with {done.returncode}:\n" + "\n".join(last))
        return json.loads(output.read_text())


def cache_environment(folder: Path) -> dict[str, str]:
    """Variables that point every compiler's disk cache into one folder."""
    return {
        "DICP_CACHE_DIR": str(folder / "dicp"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }


def main() -> None:
    task, output, arguments = sys.argv[1:]
    module = importlib.import_module(TASKS[task])
    Path(output).write_text(json.dumps(module.measure(**json.loads(arguments))))


if __name__ == "__main__":
    main()
