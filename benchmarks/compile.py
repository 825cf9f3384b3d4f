"""`compile`: seconds to the first result of a model in a new process.

cold: every disk cache empty. warm: again, with the cold process's caches. The front end alone
(Dynamo and AOTAutograd), which every backend needs, is measured beside each backend.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import child
from benchmarks.backends import EAGER, FRONT_END, parse
from benchmarks.models import find
from benchmarks.options import Options, mode_of
from benchmarks.report import Progress, Report, Row


def measure(model: str, backend: str, train: bool, dtype: str, device: str) -> dict[str, Any]:
    """The first and the second call of a step, in seconds; imports and weights are ready."""
    from benchmarks.workload import Workload

    work = Workload.prepare(find((model,))[0], train, getattr(torch, dtype), device)
    work.step(parse(EAGER))()  # libraries that start on first use
    start = time.perf_counter()
    step = work.step(parse(backend))
    step()
    first = time.perf_counter()
    step()
    return {
        "first": first - start,
        "second": time.perf_counter() - first,
        "stages": stages(backend),
    }


def stages(backend: str) -> list[dict[str, Any]]:
    """Stage times per graph of a backend that reports them; empty for others."""
    import torch._dynamo

    found = torch._dynamo.lookup_backend(parse(backend).name) if backend != EAGER else None
    reports = getattr(found, "reports", ())
    return [{"kind": r.kind, "cache": r.cache, "stages": dict(r.stages)} for r in reports]


def cold_and_warm(
    task: str, arguments: dict[str, Any], repeat: int
) -> dict[str, list[dict[str, Any]]]:
    """Results of the task with empty caches, and again with filled ones, `repeat` times each."""
    found: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as folder:
            environment = child.cache_environment(Path(folder))
            for state in found:
                found[state].append(child.run(task, arguments, environment))
    return found


def middle(results: Sequence[dict[str, Any]], key: str) -> float:
    return median(result[key] for result in results)


def run(options: Options, report: Report, progress: Progress) -> None:
    """Every model and backend, and the front end alone if it is not among them."""
    report.unit, report.group_by = "s", "caches"
    report.note = (__doc__ or "").partition("\n\n")[2]
    backends = [b for b in dict.fromkeys([*options.backends, FRONT_END]) if b != EAGER]
    cases = [(*case, b) for case in options.cases(find(options.names)) for b in backends]
    rows: dict[tuple[str, str, bool, str], Row] = {}
    for model, dtype, train, backend in progress.over(cases, lambda c: f"{c[0].name} {c[3]}"):
        mode = mode_of(train)
        for state in ("cold", "warm"):
            if (model.name, dtype, train, state) not in rows:
                row = Row(model.name, {"caches": state, "mode": mode, "dtype": dtype}, detail={})
                rows[model.name, dtype, train, state] = row
                report.rows.append(row)
        arguments = options.case(model.name, backend, train, dtype)
        try:
            found = cold_and_warm("first", arguments, 1 if options.quick else 3)
        except child.ChildFailed as error:
            for state in ("cold", "warm"):
                rows[model.name, dtype, train, state].failures[backend] = str(error)
            continue
        for state, results in found.items():
            row = rows[model.name, dtype, train, state]
            row.values[backend] = middle(results, "first")
            seconds = [result["first"] for result in results]
            if len(seconds) > 1:
                row.spreads[backend] = max(seconds) - min(seconds)
            row.detail[backend] = results
