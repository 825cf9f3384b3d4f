"""The text of generated MACA C++: golden files show every change of code generation.

`pytest test/unit/test_maca_text.py --update-golden` writes them anew.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.nn.functional as F
from recorder import MacaRecorder, portable, record
from test_triton_text import GRAPHS, f32
from torch import Tensor

from dicp.config import Config
from dicp.vendor.maca.units import UNIT, header_texts, unit_text

GOLDEN = Path(__file__).parent / "golden" / "maca"
FAMILIES = (
    "broadcast", "softmax", "layer_norm", "column_sum", "argmax", "cumsum", "dropout", "embedding",
    "pad", "dynamic", "integers", "transpose", "long_softmax", "cross_row",
)  # fmt: skip


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (32,), w, b)


OWN = {
    "cross_row": lambda: (
        layer_norm,
        [f32(1024, 32, grad=True), f32(32, grad=True), f32(32, grad=True)],
        {},
    )
}


@pytest.mark.parametrize("name", FAMILIES)
def test_golden_text(name: str, golden: Callable[[Path, str], None]) -> None:
    fn, inputs, options = {**GRAPHS, **OWN}[name]()
    target = record(fn, *inputs, target=MacaRecorder(), **options)
    config = Config.from_env({}, target.options)
    parts = [
        f"==== {report.kind}\n{target.render(program, config).files['kernels.maca']}"
        for report, program in zip(target.reports, target.programs, strict=True)
    ]
    golden(GOLDEN / f"{name}.txt", portable("\n".join(parts)))


def kernels_of(text: str) -> list[str]:
    return re.findall(r"#define KERNEL \w+\n(.*?)\n#undef KERNEL", text, re.DOTALL)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("defines", [(), ("-DD_NARROW", "-DD_ALIGNED")], ids=["wide", "narrow"])
def test_kernels_compile_with_nvcc(defines: tuple[str, ...], tmp_path: Path) -> None:
    """One kernel per family, for waves of 32, through the compatibility header."""
    found = [k for path in sorted(GOLDEN.glob("*.txt")) for k in kernels_of(path.read_text())]
    assert len(found) >= len(FAMILIES)
    unit = unit_text({f"kernel_{number}": body for number, body in enumerate(found)}, {})
    for name, text in {**header_texts(), UNIT: unit}.items():
        (tmp_path / name).write_text(text)
    command = ["nvcc", "-x", "cu", "-arch=sm_90", "-std=c++17", "-cubin", *defines, UNIT]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_golden_files_all_belong_to_a_graph() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(FAMILIES)
