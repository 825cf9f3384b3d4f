"""The machine and the versions that a result was taken on."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("dicp", "torch", "transformers", "diffusers", "openvino", "triton", "numpy")


def describe(device: str) -> dict[str, str]:
    """Processor or accelerator, cores, memory, system, package versions, load and date."""
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "threads": str(torch.get_num_threads()),
        "memory": f"{_memory() / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "load before": f"{os.getloadavg()[0]:.2f}",
    }
    if device == "cuda" and torch.cuda.is_available():
        facts["accelerator"] = torch.cuda.get_device_name()
    return facts | {name: found for name in PACKAGES if (found := _version(name))}


def _memory() -> int:
    """Bytes of main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
