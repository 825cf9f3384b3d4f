"""Measurements of the `gpu` command in processes of their own: kernels, models, first results."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from benchmarks import gpu_models, kernels
from benchmarks.backends import EAGER, parse
from benchmarks.measure import alternate
from benchmarks.workload import Workload
from dicp.report.rates import timed

DTYPE = "bfloat16"


def kernel(name: str, backends: list[str], device: str, full: bool, seconds: float) -> Any:
    """One memory-bound kernel beside a copy of as many bytes."""
    found = kernels.find((name,))[0]
    elements = kernels.SIZES[device if full else "cpu"]["large" if full else "small"]
    return kernels.measure_size(found, elements, backends, DTYPE, device, seconds)


def model(item: str, backends: list[str], device: str, full: bool, seconds: float) -> Any:
    """Time and peak memory of a step of "name mode" on every backend, and whether it is right."""
    work, memory = _workload(item, device, full), {}

    def visit(label: str, step: Any) -> None:
        memory[label] = _peak(step, device)  # before the next backend allocates memory

    steps, found, failures = work.steps(backends, visit)
    samples = alternate(steps, seconds, device)
    return {
        "samples": {label: asdict(sample) for label, sample in samples.items()},
        "memory": memory,
        "wrong": {label: error["worst"] for label, error in found.items() if not error["ok"]},
        "failures": failures,
    }


def first(item: str, backend: str, device: str, full: bool) -> float:
    """Seconds to the first result of "name mode"; imports and weights are ready."""
    work = _workload(item, device, full)
    work.step(parse(EAGER))()
    return timed(lambda: work.step(parse(backend))(), torch.device(device))


def _workload(item: str, device: str, full: bool) -> Workload:
    name, _, mode = item.partition(" ")
    found = gpu_models.find(name, full)
    return Workload.prepare(found, mode == "training", getattr(torch, DTYPE), device)


def _peak(step: Any, device: str) -> int:
    """The peak of the bytes that PyTorch's allocator has handed out during a step."""
    if device != "cuda":
        return 0
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
