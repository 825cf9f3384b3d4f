"""`memory`: peak memory, one fresh process per model and backend.

step: the peak of a step in steady state beyond the memory in use between steps. kept: what stays
resident after it, beyond the model and its batch (compiler, code, workspaces). process: the peak of
the whole process beyond the model and its batch, compilation included; every disk cache is empty
when it starts.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import child
from benchmarks.backends import EAGER, parse
from benchmarks.models import find
from benchmarks.options import Options, mode_of
from benchmarks.report import Progress, Report, Row

STEPS = 5
"""Steps whose median is taken: where the allocator finds room differs from step to step."""

KINDS = ("step", "kept", "process")
MIB = float(1 << 20)


def measure(model: str, backend: str, train: bool, dtype: str, device: str) -> dict[str, float]:
    """The three peaks in bytes."""
    from benchmarks.workload import Workload

    work = Workload.prepare(find((model,))[0], train, getattr(torch, dtype), device)
    step = work.step(parse(backend))
    return on_device(step, work.net) if device != "cpu" else on_host(step, work.net)


def on_host(step: Callable[[], Any], net: torch.nn.Module) -> dict[str, float]:
    # Weights and batch are resident; gradients are not, since a step frees them first.
    baseline = resident()
    for _ in range(3):
        step()
    peaks, whole = [], float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
    for _ in range(STEPS):
        net.zero_grad(set_to_none=True)
        before = resident()
        reset_peak()
        step()
        peak = status("VmHWM")
        peaks.append(peak - before)
        whole = max(whole, peak)
    net.zero_grad(set_to_none=True)
    return {
        "step": median(peaks),
        "kept": max(0.0, resident() - baseline),
        "process": whole - baseline,
    }


def on_device(step: Callable[[], Any], net: torch.nn.Module) -> dict[str, float]:
    baseline = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step()
    whole = torch.cuda.max_memory_allocated()
    net.zero_grad(set_to_none=True)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated()
    net.zero_grad(set_to_none=True)
    return {
        "step": float(peak - before),
        "kept": float(torch.cuda.memory_allocated() - baseline),
        "process": float(whole - baseline),
    }


def resident() -> float:
    """Bytes resident after garbage collection and after the allocator has returned free memory."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        pass  # not glibc: memory that the allocator keeps is counted
    return status("VmRSS")


def reset_peak() -> None:
    """Make Linux forget the highest resident size so far."""
    Path("/proc/self/clear_refs").write_text("5")


def status(key: str) -> float:
    """A size in bytes from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return float(int(line.split()[1]) << 10)
    raise LookupError(key)


def measured_cold(arguments: dict[str, Any]) -> dict[str, float]:
    """The peaks of a process that has to compile."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, float] = child.run(
            "memory", arguments, child.cache_environment(Path(folder))
        )
        return found


def run(options: Options, report: Report, progress: Progress) -> None:
    """Every model and backend, eager included."""
    report.unit, report.group_by = "MiB", "peak"
    report.note = (__doc__ or "").partition("\n\n")[2]
    backends = list(dict.fromkeys([EAGER, *options.backends]))
    cases = options.cases(find(options.names))
    for model, dtype, train in progress.over(cases, lambda case: case[0].name):
        facts = {"mode": mode_of(train), "dtype": dtype}
        rows = {kind: Row(model.name, {"peak": kind, **facts}) for kind in KINDS}
        report.rows.extend(rows.values())
        for backend in backends:
            arguments = options.case(model.name, backend, train, dtype)
            try:
                found = measured_cold(arguments)
            except child.ChildFailed as error:
                for row in rows.values():
                    row.failures[backend] = str(error)
                continue
            for kind, row in rows.items():
                row.values[backend] = found[kind] / MIB
