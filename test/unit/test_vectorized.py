"""Loops that must run in vector registers: the compiler is asked whether it vectorized them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorder import record
from torch import Tensor

from dicp.config import Config
from dicp.vendor.cpu import units
from dicp.vendor.cpu.toolchain import find_toolchain

N = 1000
Case = tuple[Callable[..., Any], list[Tensor]]


def f32(*shape: int) -> Tensor:
    return torch.ones(shape or (N,))


def flags() -> Tensor:
    return torch.ones(N, dtype=torch.bool)


def doubles(x: Tensor, y: Tensor) -> Tensor:
    """The functions of float64 that libmvec has or that are our own, in one loop."""
    found = x.exp() + x.log() + x.sin() + x.tan() + x.asin() + x.atan() + x.sinh() + x.tanh()
    found = found + x.erf() + x.erfc() + x.erfinv() + x.exp2() + x.expm1() + x.log1p() + x.log10()
    found = found + torch.atan2(x, y) + torch.hypot(x, y) + torch.pow(x, y) + torch.fmod(x, y)
    return found + torch.nextafter(x, y) + torch.sigmoid(y) + F.gelu(y) + x.digamma()


CASES: dict[str, Callable[[], Case]] = {
    "relu": lambda: (lambda x: F.relu(x) + 1, [f32()]),
    "clamp": lambda: (lambda x: x.clamp(-1, 1), [f32()]),
    "hardswish": lambda: (F.hardswish, [f32()]),
    "gelu": lambda: (F.gelu, [f32()]),
    "gelu_tanh": lambda: (lambda x: F.gelu(x, approximate="tanh"), [f32()]),
    "tanh": lambda: (torch.tanh, [f32()]),
    "sigmoid": lambda: (torch.sigmoid, [f32()]),
    "erfinv": lambda: (torch.erfinv, [f32()]),
    "float64": lambda: (doubles, [f32().double(), f32().double()]),
    "nextafter": lambda: (torch.nextafter, [f32(), f32()]),
    "lgamma": lambda: (torch.lgamma, [f32()]),
    "digamma": lambda: (torch.digamma, [f32()]),
    "fmax": lambda: (torch.fmax, [f32(), f32()]),
    "isnan": lambda: (lambda x: x.nan_to_num(), [f32()]),
    "masked": lambda: (lambda x, m: x.masked_fill(m, -1e9), [f32(), flags()]),
    "from_bool": lambda: (lambda x, m: x * m, [f32(), flags()]),
    "to_bool": lambda: (lambda x: x > 0, [f32()]),
    "to_bfloat16": lambda: (lambda x: x.bfloat16(), [f32()]),
    "from_bfloat16": lambda: (lambda x: x.float(), [f32().bfloat16()]),
    "to_float16": lambda: (lambda x: x.half(), [f32()]),
    "from_float16": lambda: (lambda x: x.float(), [f32().half()]),
    "float16": lambda: (lambda x, y: x + y * 2, [f32().half(), f32().half()]),
    "dropout": lambda: (lambda x: F.dropout(x, 0.1), [f32()]),
    "sum_of_rows": lambda: (lambda x: x.sum(1), [f32(8, N)]),
    "sum_of_columns": lambda: (lambda x: x.sum(0), [f32(N, 64)]),
    "max_of_rows": lambda: (lambda x: x.amax(1), [f32(8, N)]),
    "place_of_max": lambda: (lambda x: x.argmax(1), [f32(8, N)]),
    "sum_of_weights": lambda: (lambda x: x.log_softmax(1), [f32(8, 2 * N)]),
    "rows_prefetched": lambda: (lambda x: x.softmax(1), [f32(512, 1024)]),
    "sums_in_groups": lambda: (
        lambda x: F.batch_norm(x, None, None, training=True), [f32(20, 4, 16, 16)]
    ),
    "cumsum": lambda: (lambda x: x.relu().cumsum(1), [f32(8, N)]),
    "cumsum_of_columns": lambda: (lambda x: x.cumsum(0), [f32(50, 64)]),
    "short_rows": lambda: (lambda x: x.log_softmax(1), [f32(128, 21)]),
    "short_rows_selected": lambda: (
        lambda x, m: torch.where((x.exp() > 2) & m[:128, None], x - x.amax(1, True), 0),
        [f32(128, 21), flags()],
    ),
    "remainder": lambda: (torch.remainder, [f32(), f32()]),
    "floor_divide": lambda: (lambda x: x // 0.3, [f32()]),
    "roll": lambda: (lambda x: x.roll(70, 1), [f32(8, 200)]),
    "complex": lambda: (lambda x, y: x * y, [torch.ones(N, dtype=torch.complex64)] * 2),
    "max_pool": lambda: (lambda x: F.max_pool2d(F.relu(x), 3, 2, 1), [f32(1, 2, 64, 64)]),
    "gradient_of_windows": lambda: (
        torch.ops.aten._adaptive_avg_pool2d_backward, [f32(1, 3, 6, 5), f32(1, 3, 56, 56)]
    ),
    "windows_of_channels": lambda: (
        lambda x: F.adaptive_avg_pool2d(x, (6, 5)),
        [f32(1, 64, 56, 56).to(memory_format=torch.channels_last)],
    ),
    "gather": lambda: (lambda x, i: x.gather(1, i).exp(), [f32(8, N), torch.ones(8, N).long()]),
    "gather_float16": lambda: (
        lambda x, y, i: x.gather(1, i).exp() + y,
        [f32(8, N), f32(8, N).half(), torch.ones(8, N).long()],
    ),
    "gather_vector": lambda: (lambda x, i: x.gather(0, i).tanh(), [f32(), torch.ones(N).long()]),
    "cat": lambda: (lambda x, y: torch.cat([x, y], 1), [f32(8, 100), f32(8, 100)]),
    "rotate_half": lambda: (
        lambda x, y: x * y + torch.cat([-x[:, 50:], x[:, :50]], 1), [f32(8, 100), f32(8, 100)]
    ),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_vectorized(name: str, tmp_path: Path) -> None:
    toolchain = find_toolchain(Config())
    if "g++" not in Path(toolchain.compiler).name and "GCC" not in toolchain.version:
        pytest.skip("the report that is read here is that of g++")
    fn, inputs = CASES[name]()
    target = record(fn, *inputs)
    source = target.render(target.programs[0], Config()).files["kernels.cpp"]
    (tmp_path / "kernels.cpp").write_text(source)
    for name, text in units.header_texts().items():
        (tmp_path / name).write_text(text)
    result = subprocess.run(
        [toolchain.compiler, *toolchain.flags, "-fopt-info-vec-optimized", "-c", "kernels.cpp",
         "-o", "kernels.o"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    loops = [
        (start, line) for start, line in zip(source.splitlines(), source.splitlines()[1:],
                                             strict=False)
        if "omp simd" in start or "for simd" in start
    ]  # fmt: skip
    short = [line for _, line in loops if "v2 = 0; v2 < 1;" in line]  # the border of a window
    assert loops or "d_narrow<" in source or "d_widen<" in source  # copies of blocks are calls
    vectorized = re.findall(r"^kernels\.cpp:.*loop vectorized", result.stderr, re.MULTILINE)
    assert len(vectorized) >= len(loops) - len(short), source


def test_the_report_tells_them_apart(tmp_path: Path) -> None:
    """A loop that cannot be vectorized is not reported as one."""
    toolchain = find_toolchain(Config())
    text = "void f(int* a) { for (int i = 1; i < 999; ++i) a[i] = a[a[i - 1] & 7] + a[i - 1]; }\n"
    (tmp_path / "k.cpp").write_text(text)
    result = subprocess.run(
        [toolchain.compiler, *toolchain.flags, "-fopt-info-vec-optimized", "-c", "k.cpp", "-o",
         "k.o"], cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "loop vectorized" not in result.stderr
