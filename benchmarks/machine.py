"""The machine and the versions that a result was taken on."""

from __future__ import annotations

import os
import platform
import re
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import torch

from dicp.machine import memory_bytes, processor, processor_fact

HOST = torch.device("cpu")
PACKAGES = ("dicp", "torch", "transformers", "diffusers", "openvino", "triton", "numpy")


def describe(device: str) -> dict[str, str]:
    """Processor or accelerator, cores, memory, system, package versions, load and date."""
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processor": processor(HOST),
        "cores": str(len(os.sched_getaffinity(0))),
        "threads": str(torch.get_num_threads()),
        "memory": f"{memory_bytes() / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "load before": f"{os.getloadavg()[0]:.2f}",
    }
    if device == "cuda" and torch.cuda.is_available():
        facts["accelerator"] = torch.cuda.get_device_name()
    return facts | {name: found for name in PACKAGES if (found := _version(name))}


def kind(device: str) -> str:
    """The processor or accelerator in a folder's name, as
    `amd-epyc-family-26-model-2-2-cores-avx512_bf16`.

    Virtual machines of several generations have one name: family, model and matrix instructions
    tell these apart.
    """
    if device == "cuda" and torch.cuda.is_available():
        return _slug(torch.cuda.get_device_name())
    found = next((f for f in _MATRIX_FEATURES if f in processor_fact("flags").split()), "")
    facts = (("family", "cpu family"), ("model", "model"))
    numbers = [f"{name} {number}" for name, fact in facts if (number := processor_fact(fact))]
    cores = f"{len(os.sched_getaffinity(0))} cores"
    return _slug(" ".join((processor(HOST), *numbers, cores, found)))


_MATRIX_FEATURES = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9_]+", "-", text.lower()).strip("-")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
