"""The text of generated MACA C++: golden files show every change of code generation.

`pytest test/unit/test_maca_text.py --update-golden` writes them anew.
"""

from __future__ import annotations

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


@pytest.mark.parametrize("defines", VARIANTS, ids=["any", "narrow", "narrow-aligned"])
def test_kernels_compile_for_nvidia(defines: tuple[str, ...]) -> None:
    """Those of every family, through the compatibility header."""
    texts = [path.read_text() for path in sorted(GOLDEN.glob("*.txt"))]
    found = [body for text in texts for body in kernels_of(text).values()]
    assert len(found) >= len(FAMILIES)
    compile_for_nvidia({f"kernel_{i}": body for i, body in enumerate(found)}, defines)


def test_what_nvidia_does_not_take_is_an_error() -> None:
    with pytest.raises(CompilerError, match="no storage class"):
        compile_for_nvidia({"kernel": "undefined;"}, ())


def test_golden_files_all_belong_to_a_graph() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(FAMILIES)
