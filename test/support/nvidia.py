"""MACA C++ compiled for NVIDIA GPUs, on machines without one."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from dicp.vendor.maca.toolchain import Nvrtc
from dicp.vendor.maca.units import UNIT, header_texts, unit_text

ARCH = 90
VARIANTS = ((), ("-DD_NARROW",), ("-DD_NARROW", "-DD_ALIGNED"))
"""Assumptions of the launches' kernels: none, 32-bit indices, and aligned tensors, too."""


def kernels_of(text: str) -> dict[str, str]:
    """Name -> body of the kernels in a unit's text."""
    return dict(re.findall(r"#define KERNEL (\w+)\n(.*?)\n#undef KERNEL", text, re.DOTALL))


def compile_for_nvidia(bodies: Mapping[str, str], defines: tuple[str, ...]) -> None:
    """Kernel name -> body through the compatibility header, for waves of 32: by NVRTC, and by nvcc
    where it is installed."""
    unit = unit_text(bodies, {})
    assert Nvrtc(ARCH, defines).compile(unit, list(bodies))
    if shutil.which("nvcc") is None:
        return
    with TemporaryDirectory() as folder:
        for name, text in {**header_texts(), UNIT: unit}.items():
            (Path(folder) / name).write_text(text)
        flags = ["-x", "cu", f"-arch=sm_{ARCH}", "-std=c++17", "-cubin", *defines, UNIT]
        done = subprocess.run(["nvcc", *flags], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
