"""The text of generated Triton kernels: golden files show every change of code generation.

`pytest test/unit/test_triton_text.py --update-golden` writes them anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorder import TritonRecorder, portable, record
from torch import Tensor

from dicp.config import Config
from dicp.gpu.split import split_reductions
from dicp.loop.ir import expr as ir
from dicp.loop.ir.graph import Compute, Graph
from dicp.loop.ir.index import domain
from dicp.loop.ir.ops import neutral_element
from dicp.vendor.triton.facts import GPU
from dicp.vendor.triton.render.spelling import conversion, literal, operator, start_value

GOLDEN = Path(__file__).parent / "golden" / "triton"


def f32(*shape: int, grad: bool = False) -> Tensor:
    return torch.ones(shape, requires_grad=grad)


GRAPHS: dict[str, Callable[[], tuple[Callable[..., Any], list[Any], dict[str, Any]]]] = {
    "broadcast": lambda: (
        lambda x, y: torch.relu(x * 2 + y).where(x > 0, y), [f32(4, 1, 8), f32(5, 1)], {}
    ),
    "softmax": lambda: (lambda x: x.softmax(-1), [f32(6, 40, grad=True)], {}),
    "long_softmax": lambda: (lambda x: x.softmax(-1), [f32(64, 20000)], {}),
    "layer_norm": lambda: (
        lambda x, w, b: F.layer_norm(x, (32,), w, b), [f32(4, 32), f32(32), f32(32)], {}
    ),
    "long_layer_norm": lambda: (lambda x: F.layer_norm(x, (20000,)), [f32(150, 20000)], {}),
    "column_sum": lambda: (lambda x: x.sum(0), [f32(1000, 48)], {}),
    "argmax": lambda: (lambda x: x.argmax(-1), [f32(4, 9000)], {}),
    "cumsum": lambda: (lambda x: x.cumsum(-1), [f32(4, 9000)], {}),
    "transpose": lambda: (lambda x: x.transpose(1, 2).contiguous() * 2, [f32(2, 48, 64)], {}),
    "dropout": lambda: (lambda x: F.dropout(x, 0.25) + 1, [f32(8, 8)], {}),
    "embedding": lambda: (
        lambda i, w: F.embedding(i, w, padding_idx=0),
        [torch.zeros(4, 3, dtype=torch.int64), f32(10, 6, grad=True)], {},
    ),
    "pad": lambda: (lambda x: F.pad(x.bfloat16(), (1, 2), value=0.5), [f32(4, 16)], {}),
    "dynamic": lambda: (
        lambda x, y: (x.reshape(-1, x.shape[2]) + y).softmax(-1),
        [f32(2, 3, 7), f32(7)], {"dynamic": True},
    ),
    "integers": lambda: (
        lambda x, i: x[i] // 3 + i % 2,
        [torch.ones(5, dtype=torch.int32), torch.ones(4, dtype=torch.int64)], {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_golden_text(name: str, golden: Callable[[Path, str], None]) -> None:
    fn, inputs, options = GRAPHS[name]()
    target = record(fn, *inputs, target=TritonRecorder(), **options)
    parts = []
    for report, program in zip(target.reports, target.programs, strict=True):
        launches = [
            f"{s['kernel']}: {s['launch']['axes']} warps {s['launch']['warps']}"
            for s in program.serialized["steps"] if "kernel" in s
        ]  # fmt: skip
        source = target.render(program, Config()).files["kernels.py"]
        parts.append(f"==== {report.kind}\n" + "\n".join([*launches, "", source]))
    text = portable("\n".join(parts))
    golden(GOLDEN / f"{name}.txt", text)


def test_golden_files_all_belong_to_a_graph() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(GRAPHS)


# ---- pieces of text ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (0.1, torch.float64, "tl.full([], 0.1, tl.float64)"),
        (3, torch.bfloat16, "tl.full([], 3.0, tl.float32)"),
        (-0.0, torch.float32, "(tl.full([], 0.0, tl.float32) * -1.0)"),
        (-math.inf, torch.float32, "tl.full([], float('-inf'), tl.float32)"),
        (math.nan, torch.float64, "tl.full([], float('nan'), tl.float64)"),
        (True, torch.bool, "tl.full([], True, tl.int1)"),
        (-(2**63), torch.int64, "tl.full([], -9223372036854775808, tl.int64)"),
    ],
)
def test_literals_keep_value_and_type(value: Any, dtype: torch.dtype, text: str) -> None:
    assert literal(value, dtype) == text


def test_conversions_round_where_pytorch_does() -> None:
    assert conversion("x", torch.float32, torch.bfloat16, rounded=True) == "d.round_bf16(x)"
    assert conversion("x", torch.float32, torch.bfloat16, rounded=False) == "x"
    assert conversion("x", torch.bfloat16, torch.float32, rounded=True) == "x"
    assert conversion("x", torch.float32, torch.bool, rounded=True) == "x != 0"
    wrapped = "x.to(tl.int64).to(tl.uint8)"
    assert conversion("x", torch.float32, torch.uint8, rounded=True) == wrapped


def test_operators_by_operand_type() -> None:
    def text(op: str, operand: torch.dtype) -> str:
        return operator(op, operand, operand, ["a", "b"])

    assert text("add", torch.float32) == "a + b"
    assert text("maximum", torch.float32) == "d.maximum(a, b)"
    assert text("maximum", torch.bool) == "a | b"
    assert text("gt", torch.bool) == "a & ~b"
    assert text("gt", torch.uint8) == "a > b"


def test_reductions_start_from_their_neutral_element() -> None:
    assert start_value("max", torch.float32) == "float('-inf')"
    assert start_value("min", torch.int8) == "127"
    assert start_value("max", torch.int64) == str(-(2**63))
    assert start_value("sum", torch.float64) == "0.0"
    assert start_value("all", torch.bool) == "True"
    assert type(neutral_element("sum", torch.float32)) is float


# ---- split reductions ----------------------------------------------------------------------------


def kernel_texts(fn: Callable[..., Any], *inputs: Tensor) -> list[str]:
    (program,) = record(fn, *inputs, target=TritonRecorder()).programs
    return [report.text for report in program.kernels()]


def test_a_long_sweep_with_few_results_is_split() -> None:
    first, second = kernel_texts(lambda x: (x * x).sum(), f32(1024, 512))
    assert "parallel v0:64" in first and "mul(" in first
    assert "reduction v0:64" in second and "_parts" in second


def test_columns_are_split_where_they_are_few() -> None:
    first, second = kernel_texts(lambda x: x.sum(0), f32(16384, 256))
    assert "kernel outer_reduction" in first and "v1:256" in first and "parallel v0:128" in first
    assert "reduction v1:128" in second


def test_sizes_without_a_divisor_are_split_with_a_shorter_last_part() -> None:
    first, second = kernel_texts(lambda x: (x * x).amax(), f32(100_003))
    assert "parallel v0:12" in first and "v1:8334" in first and "mul(" in first and "lt(" in first
    assert "reduction v0:12" in second


@pytest.mark.parametrize("written", [False, True])
def test_what_is_read_before_it_is_overwritten_stays_a_result_of_its_own(written: bool) -> None:
    size = 100_003
    source = ir.Ref("x", (size,), torch.float32, (1,), "input")
    twice = ir.Ref("y", (size,), torch.float32, (1,), "temp")
    total = ir.Ref("s", (1,), torch.float32, (1,), "output")
    place = domain((size,))
    graph = Graph([source])
    graph.nodes.append(Compute(twice, (size,), ir.load(source, place) * 2))
    if written:
        again = ir.Ref("x2", (size,), torch.float32, (1,), "alias", base=source)
        graph.nodes.append(Compute(again, (size,), ir.const(0.0, torch.float32)))
    body = ir.load(twice, place)
    graph.nodes.append(Compute(total, (size,), body, "reduce", (0,), "sum"))
    split_reductions(graph, {}, GPU)
    first, _ = graph.nodes[-2:]
    assert first.reads() == ([twice] if written else [source])


def test_sweeps_with_many_results_or_few_elements_stay_whole() -> None:
    assert len(kernel_texts(lambda x: x.sum(1), f32(4096, 512))) == 1
    assert len(kernel_texts(lambda x: x.sum(), f32(64, 64))) == 1
    assert len(kernel_texts(lambda x: x.argmax(), f32(1024, 512))) == 1
