"""`models`: the time of a step, all backends in turn in one process per model."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from benchmarks import child
from benchmarks.measure import Rates, alternate
from benchmarks.models import find
from benchmarks.options import Options, mode_of
from benchmarks.report import Progress, Report, Row

NOTE = """limit: library FLOPs at the best rate measured, plus unavoidable bytes. library: what the
step's products, convolutions and attention take one by one, each at its own shape by the fastest
library, with nothing between them."""


def measure(
    model: str, backends: list[str], train: bool, dtype: str, device: str, seconds: float
) -> dict[str, Any]:
    """One model on every backend, in this process."""
    from benchmarks.workload import Workload

    kind = getattr(torch, dtype)
    work = Workload.prepare(find((model,))[0], train, kind, device)
    steps, found, failures = work.steps(backends, lambda label, step: None)
    samples = alternate(steps, seconds, device)
    costs, rates = work.costs(), Rates.measure(kind, device)
    return {
        "samples": {label: asdict(sample) for label, sample in samples.items()},
        "errors": found,
        "failures": failures,
        "costs": costs,
        "rates": asdict(rates),
        "limit": rates.limit(costs, costs["bytes"]),
        "library": work.library_seconds(),
    }


def run(options: Options, report: Report, progress: Progress) -> None:
    """Every model, dtype and mode that the options name."""
    report.unit, report.floors = "ms", ("limit", "library")
    report.note = NOTE
    cases = options.cases(find(options.names))
    for model, dtype, train in progress.over(cases, lambda case: case[0].name):
        row = Row(model.name, {"kind": model.kind, "mode": mode_of(train), "dtype": dtype})
        report.rows.append(row)
        try:
            result = child.run(
                "step",
                {
                    "model": model.name,
                    "backends": list(options.backends),
                    "train": train,
                    "dtype": dtype,
                    "device": options.device,
                    "seconds": 1.0 if options.quick else 4.0,
                },
            )
        except child.ChildFailed as error:
            row.failures = dict.fromkeys(options.backends, str(error))
            continue
        row.take_samples(result["samples"], scale=1e3)
        row.wrong = {k: e["worst"] for k, e in result["errors"].items() if not e["ok"]}
        row.failures = result["failures"]
        row.floors = {name: result[name] * 1e3 for name in report.floors}
        row.detail = {key: result[key] for key in ("errors", "costs", "rates")}
