"""Generated C++ under AddressSanitizer and UndefinedBehaviorSanitizer: `make sanitize` runs all
operators, this file a sample of them, good and bad inputs, with sizes that change.

Only generated code is instrumented; the sanitizer's allocator guards the ends of all tensors.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = (
    "-O1", "-g1", "-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize=vptr",
    "-fno-sanitize-recover=all",
)  # fmt: skip
SAMPLE = (
    "test/op/test_bounds.py",
    "test/op/test_pooling.py::test_op[max_pool2d_backward-dynamic]",
    "test/op/test_shape.py::test_op[reflection_pad1d-dynamic]",
    "test/op/test_indexing.py::test_op[scatter_add-dynamic]",
    "test/op/test_sort.py::test_op[topk_values-dynamic]",
    "test/op/test_upsample.py::test_op[grid_sample_border-dynamic]",
)


def _library(name: str) -> str:
    """The path of one of the compiler's libraries, "" where it has none."""
    command = ["g++", f"-print-file-name={name}"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    path = found.stdout.strip()
    return path if os.path.isabs(path) else ""


LIBRARIES = [_library(name) for name in ("libasan.so", "libubsan.so")]
needs_sanitizers = pytest.mark.skipif(not all(LIBRARIES), reason="g++ has no sanitizers")


def sanitized(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with the sanitizers loaded, whose generated code is instrumented."""
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(LIBRARIES), "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1", "OMP_NUM_THREADS": "1", "DICP_CXX": "g++",
        "DICP_CXX_FLAGS": " ".join(FLAGS), "DICP_CACHE_DIR": str(folder),
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=900, check=False,
    )  # fmt: skip


@pytest.mark.sweep
@needs_sanitizers
def test_sampled_operators_stay_in_bounds(tmp_path: Path) -> None:
    quiet = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--dynamic", "true")
    found = sanitized(tmp_path, "-m", "pytest", *quiet, *SAMPLE)
    assert found.returncode == 0, (found.stdout + found.stderr)[-6000:]


OUTSIDE = """
import torch
from dicp.dynamo_bridge.backend import Backend
backend = Backend("cpu", check_bounds=False)
torch.compile(lambda x, i: x[i], backend=backend)(torch.rand(4), torch.tensor([40000]))
"""


@needs_sanitizers
def test_a_read_out_of_bounds_is_found(tmp_path: Path) -> None:
    """Without the check of the index: the sanitizers do look at what is generated."""
    found = sanitized(tmp_path, "-c", OUTSIDE)
    assert found.returncode != 0
    assert "Sanitizer" in found.stderr
