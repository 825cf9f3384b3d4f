"""`gpu`: features, kernels, models, compile times and tests on a GPU, in one table.

python -m benchmarks gpu --device cuda --backends eager,inductor,tritongraph --out FOLDER

Every section has a share of ten minutes, plus the time that earlier sections did not use, and every
item a limit; an item that fails, hangs or crashes is named in the table and the next one begins.
Results are written to FOLDER after every item; the goals and whether they were reached come last.
`--sections kernels,models` runs some of them; `--sections products` runs only when it is named: see
`gpu_products`.

share of the copy: bytes that must be moved at the rate of a copy measured in turn, over the time.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape

from benchmarks import child, features, series
from benchmarks.backends import EAGER
from benchmarks.gpu_goals import goal_rows
from benchmarks.options import OptionError, Options
from benchmarks.report import Progress, Report, Row

KERNELS = (
    "softmax", "layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward",
    "cross_entropy", "cross_entropy_backward", "residual_norm", "adam", "swiglu", "gelu", "rotary",
    "softmax_backward", "sum_columns", "transpose",
)  # fmt: skip
MODELS = (
    "llama inference", "llama training", "bert training", "resnet50 training", "bert inference",
    "resnet50 inference", "unet inference", "vit training", "convnext inference", "unet training",
    "vit inference", "convnext training",
)  # fmt: skip
FIRST_RESULTS = ("llama training", "bert inference")
TEST_WORKERS = 8
WORKERS = dict.fromkeys(("DICP_COMPILE_JOBS", "TORCHINDUCTOR_COMPILE_THREADS"), "8")
"""Compile processes of each backend whose first results are compared."""


@dataclass
class Run:
    """One invocation: its options, the table, and the remaining time."""

    options: Options
    report: Report
    progress: Progress
    folder: Path
    deadline: float = 0.0

    @property
    def device(self) -> str:
        return self.options.device

    @property
    def full(self) -> bool:
        """Whether sizes fill a GPU; otherwise they are such that the harness can be tried."""
        return self.device == "cuda"

    @property
    def under_test(self) -> list[str]:
        return [b for b in self.options.backends if b.endswith("graph")]

    @property
    def compilers(self) -> list[str]:
        return [b for b in self.options.backends if b != EAGER]

    def add(self, row: Row) -> None:
        """Puts a row into the table, and the table on disk."""
        self.report.rows.append(row)
        self.report.write_data(self.folder)

    def items(
        self, function: str, items: tuple[str, ...] | list[str], arguments: Mapping[str, Any],
        limit: float, environment: Mapping[str, str] | None = None,
    ) -> Iterator[tuple[str, Any, str]]:  # fmt: skip
        found = series.run(
            function, items, arguments, deadline=self.deadline, limit=limit, environment=environment
        )
        left = dict.fromkeys(items)
        for item, result, trouble in found:
            left.pop(item, None)
            last = (trouble.splitlines() or ["done"])[-1]
            self.progress.console.print(escape(f"{item}: {last}"))
            yield item, result, trouble
        for item in left:
            yield item, None, "not begun: the section's time was over"


def run(options: Options, report: Report, progress: Progress) -> None:
    """Run the sections in order; one that fails does not stop the others."""
    report.unit, report.floors, report.group_by = "", ("copy",), "section"
    report.note = (__doc__ or "").rpartition("\n")[0].rpartition("\n")[2]
    state = Run(options, report, progress, options.out)
    state.folder.mkdir(parents=True, exist_ok=True)
    state.deadline = time.monotonic()
    known = {**SECTIONS, **NAMED}
    if wrong := sorted({*options.names} - {*known}):
        raise OptionError(f"unknown sections {wrong}; known: {', '.join(known)}")
    for name in options.names or SECTIONS:
        seconds, section = known[name]
        state.deadline += seconds  # unused time goes to the next section
        try:
            section(state)
        except Exception as error:  # earlier measurements must not be lost
            row = Row(name, {"section": name})
            row.failures = dict.fromkeys(options.backends, f"{type(error).__name__}: {error}")
            state.add(row)
    for row in goal_rows(report.rows, state.under_test):
        state.add(row)


# ---- the sections --------------------------------------------------------------------------------


def try_features(state: Run) -> None:
    for backend in state.under_test:
        arguments = {"backend": backend, "device": state.device}
        names = features.names(state.device)
        for item, result, trouble in state.items(
            "benchmarks.features:measure", names, arguments, 60
        ):
            row = Row(item, {"section": "features", "result": result or "failed"})
            if trouble:
                row.failures[backend] = trouble
            state.add(row)


def time_kernels(state: Run) -> None:
    arguments = _arguments(state, 0.15)
    for item, result, trouble in state.items("benchmarks.gpu_steps:kernel", KERNELS, arguments, 90):
        row = Row(item, {"section": "kernels", "unit": "µs"})
        if trouble:
            row.failures = dict.fromkeys(state.compilers, trouble)
        else:
            samples = result["samples"]
            row.floors["copy"] = copy = samples.pop("copy")["median"] * 1e6
            row.take_samples(samples, scale=1e6)
            row.wrong, row.failures = result["wrong"], result["failures"]
            row.detail = {"bytes": result["bytes"], "TB/s": result["bytes"] / copy / 1e6}
        state.add(row)


def time_models(state: Run) -> None:
    arguments = _arguments(state, 1.0)
    for item, result, trouble in state.items("benchmarks.gpu_steps:model", MODELS, arguments, 120):
        name, _, mode = item.partition(" ")
        row = Row(name, {"section": f"models, {mode}", "unit": "ms"})
        memory = Row(name, {"section": f"peak memory, {mode}", "unit": "GiB"})
        if trouble:
            row.failures = dict.fromkeys(state.compilers, trouble)
        else:
            row.take_samples(result["samples"], scale=1e3)
            row.wrong, row.failures = result["wrong"], result["failures"]
            memory.values = {b: used / 2**30 for b, used in result["memory"].items() if used}
        state.add(row)
        if memory.values:
            state.add(memory)


def time_first_results(state: Run) -> None:
    """Each backend in processes of its own: with empty caches, then with what the first left."""
    for item in FIRST_RESULTS:
        with tempfile.TemporaryDirectory() as folder:
            broken: dict[str, str] = {}
            for stage in ("cold", "warm"):
                row = Row(item, {"section": f"{stage} compile", "unit": "s"})
                row.failures = dict.fromkeys(broken, "no warm start after a failed cold one")
                for place, backend in enumerate(state.compilers):
                    if backend in broken:
                        continue
                    caches = {**child.cache_environment(Path(folder) / str(place)), **WORKERS}
                    waiting = len(state.compilers) - place
                    _first_result(state, row, backend, caches, waiting)
                broken = row.failures
                if row.values or row.failures:
                    state.add(row)


def _first_result(
    state: Run, row: Row, backend: str, caches: Mapping[str, str], waiting: int
) -> None:
    """Time for `backend`, such that those after it get as much."""
    arguments = {"backend": backend, "device": state.device, "full": state.full}
    limit = min(120, (state.deadline - time.monotonic()) / waiting)
    found = state.items("benchmarks.gpu_steps:first", [row.name], arguments, limit, caches)
    for _, result, trouble in found:
        if trouble:
            row.failures[backend] = trouble
        else:
            row.values[backend] = result


def time_products(state: Run) -> None:
    """The library against generated kernels; the winners are rows of a table in the folder."""
    from benchmarks import gpu_products  # it loads the compiler

    names, rows = gpu_products.items(state.full), []
    arguments = {"device": state.device}
    for item, result, trouble in state.items(
        "benchmarks.gpu_products:measure", names, arguments, 120
    ):
        row = Row(item, {"section": "products", "unit": "µs"})
        if trouble:
            row.failures = dict.fromkeys(state.under_test, trouble)
        else:
            found = result["row"]
            rows.append(found)
            gpu_products.keep(state.folder, rows)
            row.values[EAGER] = found["library"] * 1e6
            if found["kernel"] is not None:
                row.values.update(dict.fromkeys(state.under_test, found["kernel"] * 1e6))
            row.detail = {"chosen": result["chosen"]}
        state.add(row)


def run_tests(state: Run) -> None:
    """The operator and model tests, as far as time allows; the log stays in the folder."""
    seconds = state.deadline - time.monotonic()
    share = max(seconds / len(state.under_test), 10)
    for backend in state.under_test:
        log = state.folder / f"gpu-tests-{backend}.log"
        counts, failed = tested(["test/op", "test/model"], backend, state.device, share, log)
        row = Row("operators and models", {"section": "tests", "result": counts})
        if failed:
            row.wrong[backend] = f"{len(failed)} failed: {', '.join(failed[:15])}"
        state.add(row)


def tested(
    paths: list[str], backend: str, device: str, seconds: float, log: Path
) -> tuple[str, list[str]]:
    """How many tests passed and failed until they were done or out of time; which failed."""
    command = [
        sys.executable, "-m", "pytest", *paths, "--backend", backend, "--device", device,
        "--dynamic", "false", "-v", "-n", str(TEST_WORKERS if device == "cuda" else 2),
        "--continue-on-collection-errors", "-p", "no:cacheprovider",
    ]  # fmt: skip
    ending = ""
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=child.ROOT, stdout=output, stderr=subprocess.STDOUT,
            env={**os.environ, "DICP_COMPILE_JOBS": "2", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ending = f", stopped after {seconds:.0f} s"
    text = log.read_text()
    found = {kind: set(re.findall(rf"\b{kind} (test/\S+)", text)) for kind in ("PASSED", "FAILED")}
    broken = re.findall(r"^ERROR (test/\S+)", text, re.MULTILINE)
    failed = sorted({name.rpartition("/")[2] for name in (*found["FAILED"], *broken)})
    return f"{len(found['PASSED'])} passed, {len(failed)} failed{ending}", failed


def _arguments(state: Run, seconds: float) -> dict[str, Any]:
    return {
        "backends": list(state.options.backends),
        "device": state.device,
        "full": state.full,
        "seconds": seconds if state.full else 0.02,
    }


SECTIONS: dict[str, tuple[float, Callable[[Run], None]]] = {
    "features": (90, try_features),
    "kernels": (110, time_kernels),
    "models": (190, time_models),
    "compile": (100, time_first_results),
    "tests": (85, run_tests),
}
"""Section -> its seconds and its function; start and table need some of the ten minutes, too."""
NAMED: dict[str, tuple[float, Callable[[Run], None]]] = {"products": (540, time_products)}
"""Sections that run only when they are named."""
