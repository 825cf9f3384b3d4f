"""The text of programs and of generated C++: golden files show every change of code generation.

`pytest test/unit/test_cpp.py --update-golden` writes them anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from recorder import portable, record
from torch import Tensor, nn

from dicp.codegen.types import conversion, literal, size_text
from dicp.config import Config
from dicp.loop.ir.expr import Ref, const
from dicp.loop.ir.index import ZERO, normal
from dicp.loop.ir.kernel import Kernel, Store
from dicp.loop.passes.split_loops import Range
from dicp.torch_private import NEWEST, release_of
from dicp.vendor.cpu import form as cpu_form
from dicp.vendor.cpu.form import HostForm, Points, Strip, Team
from dicp.vendor.cpu.render.kernel import WRITERS
from dicp.vendor.cpu.render.pointwise import PointsWriter

GOLDEN = Path(__file__).parent / "golden"


def adam_step(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    m.lerp_(g, 0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.addcdiv_(m, v.sqrt().add_(1e-8), value=-0.01)


def conv_bn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()).eval()


def f32(*shape: int, grad: bool = False) -> Tensor:
    return torch.ones(shape, requires_grad=grad)


GRAPHS: dict[str, Callable[[], tuple[Callable[..., Any], list[Any], dict[str, Any]]]] = {
    "broadcast": lambda: (
        lambda x, y: torch.relu(x * 2 + y).where(x > 0, y), [f32(4, 1, 8), f32(5, 1)], {}
    ),
    "softmax": lambda: (lambda x: x.softmax(-1), [f32(6, 40, grad=True)], {}),
    "short_rows": lambda: (lambda x: x.log_softmax(-1), [f32(100, 21)], {}),
    "cumsum_of_columns": lambda: (
        lambda x, rows: (x * rows).cumsum(0).flip(0) * rows, [f32(20, 48), f32(20, 1)], {}
    ),
    "roll": lambda: (lambda x: x.roll(3, 1), [f32(6, 40)], {}),
    "padded_windows": lambda: (
        lambda x: F.avg_pool2d(x, 3, 2, 1),
        [f32(2, 16, 12, 12).to(memory_format=torch.channels_last)], {},
    ),
    "interleaved": lambda: (lambda x: torch.stack([x.cos(), x.sin()], -1), [f32(100)], {}),
    "long_layer_norm": lambda: (lambda x: F.layer_norm(x, (256,)), [f32(4, 256)], {}),
    "layer_norm": lambda: (
        lambda x, w, b: F.layer_norm(x, (32,), w, b), [f32(4, 32), f32(32), f32(32)], {}
    ),
    "rows_prefetched": lambda: (lambda x: x.softmax(-1), [f32(512, 1024)], {}),
    "columns_apart": lambda: (lambda x, y: (x.t() * y).sum(0), [f32(24, 128), f32(128, 24)], {}),
    "places_apart": lambda: (lambda x: x[:, 3] * x[:, 5], [f32(64, 40)], {}),
    "column_sum": lambda: (lambda x: x.sum(0), [f32(100, 48)], {}),
    "full_reduction": lambda: (lambda x: (x * x).sum(), [f32(300, 400)], {}),
    "argmax": lambda: (lambda x: x.argmax(-1), [f32(4, 9)], {}),
    "argmax_long": lambda: (lambda x: x.max(-1), [f32(4, 600)], {}),
    "cumsum": lambda: (lambda x: x.relu().cumsum(-1) * 2, [f32(4, 300)], {}),
    "log_softmax_long": lambda: (lambda x: x.log_softmax(-1), [f32(4, 1100)], {}),
    "rows_by_index": lambda: (
        lambda x, i, y: x.index_add(0, i, y),
        [f32(300, 64), torch.zeros(600, dtype=torch.int64), f32(600, 64)], {},
    ),
    "cat": lambda: (lambda x, y: torch.cat([x, y + 1], 1), [f32(3, 4), f32(3, 5)], {}),
    "transpose": lambda: (lambda x: x.transpose(1, 2).contiguous() * 2, [f32(2, 40, 70)], {}),
    "dropout": lambda: (lambda x: F.dropout(x, 0.25) + 1, [f32(8, 8)], {}),
    "embedding": lambda: (
        lambda i, w: F.embedding(i, w, padding_idx=0),
        [torch.zeros(4, 3, dtype=torch.int64), f32(10, 6, grad=True)], {},
    ),
    "bf16": lambda: (lambda x: F.gelu(x.bfloat16()).sum(1), [f32(4, 16)], {}),
    "float16": lambda: (
        lambda x, y: (F.relu(x + 1), x.sum(0), y.softmax(1)),
        [f32(70, 96).half(), f32(4, 1000).half()], {},
    ),
    "dynamic": lambda: (
        lambda x, y: (x.reshape(-1, x.shape[2]) + y).softmax(-1),
        [f32(2, 3, 7), f32(7)], {"dynamic": True},
    ),
    "conv_bn": lambda: (torch.no_grad()(conv_bn()), [f32(1, 3, 6, 6)], {}),
    "adam": lambda: (adam_step, [f32(7, 3), f32(7, 3), f32(7, 3), f32(7, 3)], {}),
    "integers": lambda: (
        lambda x, i: x[i] // 3 + i % 2,
        [torch.ones(5, dtype=torch.int32), torch.ones(4, dtype=torch.int64)], {},
    ),
}  # fmt: skip


@pytest.mark.skipif(
    release_of(torch.__version__) != NEWEST,
    reason="the graphs that Dynamo and AOTAutograd give differ between releases",
)
@pytest.mark.parametrize("name", GRAPHS)
def test_golden_text(name: str, golden: Callable[[Path, str], None]) -> None:
    fn, inputs, options = GRAPHS[name]()
    target = record(fn, *inputs, **options)
    parts = []
    for report, program in zip(target.reports, target.programs, strict=True):
        source = target.render(program, Config()).files["kernels.cpp"]
        parts.append(f"==== {report.kind}\n{program.text()}\n---- C++\n{source}")
    text = portable("\n".join(parts))
    golden(GOLDEN / f"{name}.txt", text)


def test_golden_files_all_belong_to_a_graph() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(GRAPHS)


def test_golden_texts_name_no_machine() -> None:
    for path in GOLDEN.glob("*.txt"):
        text = path.read_text()
        assert "/home" not in text and "site-packages" not in text and ".py:" not in text, path


# ---- pieces of text ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (0.1, torch.float64, "0.1"),
        (0.1, torch.float32, "0.1f"),
        (3, torch.float32, "3.0f"),
        (-0.0, torch.float32, "(-0.0f)"),
        (1e300, torch.float64, "1e+300"),
        (math.inf, torch.float32, "(d_inff)"),
        (-math.inf, torch.bfloat16, "(-d_inff)"),
        (math.nan, torch.float64, "d_nan"),
        (True, torch.bool, "true"),
        (-(2**63), torch.int64, "INT64_MIN"),
        (2**63 - 1, torch.int64, "(int64_t)9223372036854775807"),
        (-5, torch.int8, "(int8_t)(-5)"),
        (200, torch.uint8, "(uint8_t)200"),
    ],
)
def test_literals_keep_every_digit(value: Any, dtype: torch.dtype, text: str) -> None:
    assert literal(value, dtype) == text


def test_conversions_round_where_pytorch_does() -> None:
    assert conversion("x", torch.float32, torch.bfloat16, rounded=True) == "d_round_bf16((float)x)"
    assert conversion("x", torch.bfloat16, torch.float32, rounded=True) == "(float)x"
    assert conversion("x", torch.float32, torch.bool, rounded=True) == "x != 0"
    assert conversion("x", torch.float32, torch.uint8, rounded=True) == "(uint8_t)d_to_int32(x)"


def test_symbolic_sizes_as_text() -> None:
    n, m = sympy.symbols("n m", integer=True, positive=True)
    assert size_text(normal(n * m + 3)) in ("((m * n) + 3)", "(3 + (m * n))")
    assert size_text(sympy.Max(n, m)) in ("(m > n ? m : n)", "(n > m ? n : m)")
    assert size_text(n**2) == "(n * n)"
    with pytest.raises(NotImplementedError, match="size expression"):
        size_text(sympy.sin(n))


def test_a_team_inside_which_threads_do_more_has_its_condition_outside_the_loop() -> None:
    """OpenMP has no `if` on `omp for`."""
    n = sympy.Symbol("n", integer=True, positive=True)
    team, strip = (
        Team(2, n, 100),
        Strip(Range(0, 4, ()), non_temporal=(Store(REF, ZERO, const(0, torch.float32)),)),
    )
    assert divided(Points(team)) == [
        "  #pragma omp parallel for collapse(2) schedule(static) if ((n0) >= 100)", "  loop",
    ]  # fmt: skip
    assert divided(Points(team, (strip,))) == [
        "  #pragma omp parallel if ((n0) >= 100)",
        "  {",
        "  #pragma omp for collapse(2) schedule(static) nowait",
        "  loop",
        "  d_store_fence();",
        "  }",
    ]


REF = Ref("t", (4,), torch.float32, (1,), "temp")


def divided(form: Points) -> list[str]:
    kernel = Kernel("pointwise", (), (), (), (), form=form)
    return PointsWriter(kernel, form)._divided(form.team, ["  loop"])


def test_every_form_has_a_writer() -> None:
    forms = {f for f in vars(cpu_form).values() if isinstance(f, type) and issubclass(f, HostForm)}
    assert set(WRITERS) == forms - {HostForm}
