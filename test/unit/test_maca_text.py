"""The text of generated MACA C++: golden files show every change of code generation.

`pytest test/unit/test_maca_text.py --update-golden` writes them anew.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.nn.functional as F
from recorder import MacaRecorder, portable, record
from support.nvidia import VARIANTS, compile_for_nvidia, kernels_of
from test_triton_text import GRAPHS, f32
from torch import Tensor

from dicp.config import Config
from dicp.errors import CompilerError
from dicp.vendor.maca.units import UNIT, header_texts, unit_text

GOLDEN = Path(__file__).parent / "golden" / "maca"
FAMILIES = (
    "broadcast", "softmax", "layer_norm", "column_sum", "argmax", "cumsum", "dropout", "embedding",
    "pad", "dynamic", "integers", "transpose", "long_softmax", "cross_row", "pooling",
)  # fmt: skip


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (32,), w, b)


def pooling(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 2, 1)


OWN = {
    "pooling": lambda: (pooling, [f32(2, 3, 9, 8, grad=True)], {}),
    "cross_row": lambda: (
        layer_norm,
        [f32(1024, 32, grad=True), f32(32, grad=True), f32(32, grad=True)],
        {},
    ),
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


def golden_kernels() -> dict[str, str]:
    """Name -> body of the kernels of every family."""
    texts = [path.read_text() for path in sorted(GOLDEN.glob("*.txt"))]
    found = [body for text in texts for body in kernels_of(text).values()]
    assert len(found) >= len(FAMILIES)
    return {f"kernel_{i}": body for i, body in enumerate(found)}


EACH_VARIANT = pytest.mark.parametrize("defines", VARIANTS, ids=["any", "narrow", "narrow-aligned"])


@EACH_VARIANT
def test_kernels_compile_for_nvidia(defines: tuple[str, ...]) -> None:
    """Through the compatibility header."""
    compile_for_nvidia(golden_kernels(), defines)


@EACH_VARIANT
def test_kernels_are_well_formed_for_waves_of_64(defines: tuple[str, ...], tmp_path: Path) -> None:
    """Through MACA's own header, with stand-ins for what mxcc declares."""
    text = unit_text(golden_kernels(), {})
    ends = "static_assert(D_WAVE == 64);\n"
    stub = (Path(__file__).parent / "maca_stub.h").read_text()
    declared = dict.fromkeys(("mc_runtime.h", "maca_fp16.h", "maca_bfloat16.h"), stub)
    for name, content in {**header_texts(), **declared, UNIT: text + ends}.items():
        (tmp_path / name).write_text(content)
    command = ["g++", "-x", "c++", "-std=c++17", "-fsyntax-only", "-w", "-I.", "-D__MACACC__"]
    done = subprocess.run([*command, *defines, UNIT], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_lanes_exchange_without_masks_and_not_by_xor() -> None:
    """MACA's masks have 64 bits, and its ports avoid exchanges by XOR."""
    texts = {**header_texts(), **golden_kernels()}
    del texts["compat.h"]
    assert any("d_lane_above" in text for text in texts.values())
    for name, text in texts.items():
        assert not re.search(r"shfl_xor|__shfl\w*_sync|0xffffffffu?\b.*shfl", text), name


def test_what_nvidia_does_not_take_is_an_error() -> None:
    with pytest.raises(CompilerError, match="no storage class"):
        compile_for_nvidia({"kernel": "undefined;"}, ())


def test_golden_files_all_belong_to_a_graph() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(FAMILIES)
