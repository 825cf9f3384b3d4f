"""`gpu`: operator tests, kernels and models on a GPU, in one table within ten minutes.

correctness rows: the tests' own result, on tensors of the GPU; times are in µs.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks import kernels, steps
from benchmarks.options import Options
from benchmarks.report import Progress, Report, Row

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 600.0
"""Seconds for everything."""
TESTS_SHARE = 0.3
TESTS = ("pointwise", "reduction", "normalization", "shape", "indexing", "scan", "random")
KERNELS = ("softmax", "layer_norm", "layer_norm_backward", "rms_norm", "residual_norm", "adam",
           "sum_columns", "transpose")  # fmt: skip
MODELS = ("llama", "vit", "t5")


def run(options: Options, report: Report, progress: Progress) -> None:
    """Tests first, then kernels, then models, as far as the time goes."""
    end = time.monotonic() + LIMIT
    under_test = [name for name in options.backends if name.endswith("graph")]
    for backend in under_test:
        for name in progress.over(TESTS, lambda name: f"tests of {name}"):
            left = LIMIT * TESTS_SHARE - (time.monotonic() - (end - LIMIT))
            report.rows.append(tested(name, backend, options.device, left / len(under_test)))
    for name in progress.over(KERNELS, lambda name: name):
        if time.monotonic() < end - LIMIT / 3:
            kernels.run(replace(options, names=(name,), quick=True), report, progress)
    measured = len(report.rows)
    for name in progress.over(MODELS, lambda name: name):
        if time.monotonic() < end - 60:
            modes = (False, True)
            steps.run(replace(options, names=(name,), quick=True, modes=modes), report, progress)
    for row in report.rows[measured:]:
        row.values = {k: v * 1e3 for k, v in row.values.items()}
        row.spreads = {k: v * 1e3 for k, v in row.spreads.items()}
        row.floor = row.floor * 1e3 if row.floor else None
    report.unit, report.floor_name, report.group_by = "µs", "limit", "size"
    report.note = (__doc__ or "").partition("\n\n")[2]


def tested(name: str, backend: str, device: str, seconds: float) -> Row:
    """The static operator tests of one file on the device."""
    row = Row(f"tests of {name}", {"size": "correctness"})
    command = [
        sys.executable, "-m", "pytest", f"test/op/test_{name}.py", "--backend", backend,
        "--device", device, "--dynamic", "false", "-q", "-n", "4",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=max(seconds, 20)
        )
    except subprocess.TimeoutExpired:
        row.failures[backend] = f"not done after {seconds:.0f} s"
        return row
    last = (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
    row.facts["result"] = last
    if done.returncode:
        failed = re.findall(r"^FAILED \S+::(\S+)", done.stdout, re.MULTILINE)
        row.wrong[backend] = ", ".join(failed[:12]) or done.stderr[-300:]
    return row
