"""Golden C++ of GE graphs, and what fusion and layouts do to the operators in them.

`pytest test/unit/test_ascend_codegen.py --update-golden` writes the golden texts anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ascend_recorder import record
from recorder import after, portable, prelude
from torch import Tensor, nn

from dicp.config import Config
from dicp.vendor.ascend import codegen

GOLDEN = Path(__file__).parent / "golden_ascend"
PRELUDE = prelude(
    codegen.FOLDER / "graph.cpp.jinja",
    name="", operators=0, blocked=True, constants=True, entry="", blocks=(), ends=(),
)  # fmt: skip


def f32(*shape: int, grad: bool = False) -> Tensor:
    return torch.ones(shape, requires_grad=grad)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def residual_block() -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in "ab")
            self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in "ab")

        def forward(self, x: Tensor) -> Tensor:
            out = torch.relu(self.norms[0](self.first(x)))
            return torch.relu(self.norms[1](self.second(out)) + x)

    return Block().eval()


def cache_update(cache: Tensor, new: Tensor) -> Tensor:
    before = cache.sum(-1)
    cache[:, 1:2] = new
    return before * cache.sum(-1)


GRAPHS: dict[str, Callable[[], tuple[Callable[..., Any], list[Any], dict[str, Any]]]] = {
    "broadcast": lambda: (
        lambda x, y: torch.relu(x * 2 + y).where(x > 0, y), [f32(4, 1, 8), f32(5, 1)], {}
    ),
    "softmax": lambda: (lambda x: x.softmax(-1), [f32(6, 40, grad=True)], {}),
    "layer_norm": lambda: (
        lambda x, w, b: F.layer_norm(x, (32,), w, b), [f32(4, 32), f32(32), f32(32)], {}
    ),
    "linear": lambda: (
        lambda x, w, b: F.gelu(F.linear(x, w, b)), [f32(2, 4, 8), f32(6, 8, grad=True), f32(6)], {}
    ),
    "attention": lambda: (attention, [f32(1, 2, 4, 8)] * 3, {}),
    "fused_attention": lambda: (
        lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True),
        [f32(1, 2, 4, 16).bfloat16().requires_grad_() for _ in "qkv"], {},
    ),
    "cache_update": lambda: (cache_update, [f32(2, 4, 3), f32(2, 1, 3)], {}),
    "split_cat": lambda: (
        lambda x: torch.cat([part * k for k, part in enumerate(x.split([2, 3], 1), 1)], 1),
        [f32(3, 5)], {},
    ),
    "embedding": lambda: (
        lambda i, w: F.embedding(i, w, padding_idx=0),
        [torch.zeros(4, 3, dtype=torch.int64), f32(10, 6, grad=True)], {},
    ),
    "dropout": lambda: (lambda x: F.dropout(x, 0.25) + 1, [f32(8, 8)], {}),
    "bf16": lambda: (lambda x: (x.bfloat16() * 1.7).sum(1), [f32(4, 16)], {}),
    "dynamic": lambda: (
        lambda x, y: (x.reshape(-1, x.shape[2]) + y).softmax(-1),
        [f32(2, 3, 7), f32(7)], {"dynamic": True},
    ),
    "residual_block": lambda: (torch.no_grad()(residual_block()), [f32(1, 16, 6, 6)], {}),
    "constants": lambda: (
        lambda x: torch.where(x > 0.1, float("inf"), x * 1e-3) + torch.tensor([1.5, -0.0, 2e38]),
        [f32(4, 3)], {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_golden_source(name: str, golden: Callable[[Path, str], None]) -> None:
    fn, inputs, options = GRAPHS[name]()
    target = record(fn, *inputs, **options)
    parts = [
        f"==== {report.kind}\n{program.text()}\n---- C++\n"
        + "\n".join(after(PRELUDE, t) for t in target.render(program, Config()).files.values())
        for report, program in zip(target.reports, target.programs, strict=True)
    ]
    text = portable("\n".join(parts))
    golden(GOLDEN / f"{name}.txt", text)


def test_golden_prelude(golden: Callable[[Path, str], None]) -> None:
    golden(GOLDEN / "prelude.txt", PRELUDE)


def test_golden_files_all_belong_to_a_graph() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == {*GRAPHS, "prelude"}


def test_no_header_of_operators_is_included() -> None:
    (source,) = record(lambda x: torch.relu(x).sum(0), f32(3, 4)).sources()
    included = set(re.findall(r'#include "(.*)"', source))
    assert included == {f"graph/{name}.h" for name in ("graph", "operator", "operator_factory",
                                                       "tensor")}  # fmt: skip


def test_results_that_no_input_leads_to_wait_for_one() -> None:
    (source,) = record(lambda x: (x + 1, torch.arange(3, device=x.device)), f32(3)).sources()
    assert re.search(r"range\d+\.AddControlInput\(input0\);", source)
    (source,) = record(lambda: torch.arange(3)).sources()
    assert 'Input("Data", "sizes0", 0, Desc({1}, ge::DT_INT64))' in source
    assert re.search(r"\.AddControlInput\(sizes0\);", source)


@pytest.mark.parametrize("symbolic", [False, True])
def test_transposes_become_flags_of_matrix_products(symbolic: bool) -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(F.linear(x, w))

    target = record(model, f32(6, 8, grad=True), f32(5, 8, grad=True), dynamic=symbolic)
    kinds = target.kinds()
    assert kinds["MatMulV2"] == 3 and kinds["Transpose"] == 0


def rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("width", [16, 80])
def test_rotary_embedding_is_one_operator(width: int, symbolic: bool) -> None:
    def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        torch._check(x.shape[-1] == width)
        return x * cos + rotated(x) * sin

    inputs = [f32(2, 4, 6, width), f32(1, 1, 6, width), f32(1, 1, 6, width)]
    for tensor in inputs:
        torch._dynamo.mark_static(tensor, 3)
    kinds = record(rotary, *inputs, dynamic=symbolic).kinds()
    assert kinds["RotaryMul"] == 1 and kinds["ConcatD"] == kinds["Neg"] == 0


@pytest.mark.parametrize("batches", [(3, 3), (1, 3), (3, 1)])
def test_rotary_embedding_of_one_element_by_a_batch_is_not(batches: tuple[int, int]) -> None:
    """The operator's result has the shape of x."""

    def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + rotated(x) * sin

    inputs = [f32(1, 4, 6, 16), *(f32(batch, 1, 6, 16) for batch in batches)]
    assert record(rotary, *inputs).kinds()["RotaryMul"] == 0


@pytest.mark.parametrize("symbolic", [False, True])
def test_residual_sum_and_norm_are_one_operator(symbolic: bool) -> None:
    def block(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        return F.rms_norm(total, (16,), weight, 1e-5), total * 2

    inputs = [f32(3, 16), f32(3, 16), f32(16)]
    for tensor in inputs:
        torch._dynamo.mark_static(tensor, tensor.dim() - 1)
    kinds = record(block, *inputs, dynamic=symbolic).kinds()
    assert kinds["AddRmsNorm"] == 1 and kinds["RmsNorm"] == kinds["Add"] == 0


def test_swish_gate_over_halves_is_one_operator() -> None:
    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    kinds = record(gated, f32(3, 16)).kinds()
    assert kinds["SwiGlu"] == 1 and kinds["Swish"] == kinds["SplitVD"] == 0


def test_inverse_transposes_cancel() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.exp(x.permute(0, 2, 1, 3).permute(0, 2, 1, 3)).permute(3, 0, 1, 2)

    target = record(model, f32(2, 3, 4, 5))
    assert target.kinds()["Transpose"] <= 1


def test_moving_dimensions_of_size_one_is_no_transpose() -> None:
    target = record(lambda x: x.permute(1, 0, 2).contiguous() + 1, f32(4, 1, 5))
    assert target.kinds()["Transpose"] == 0


def test_residual_block_converts_images_at_its_border_alone() -> None:
    with torch.no_grad():
        target = record(residual_block(), f32(1, 16, 6, 6))
    images = [
        n.attrs["src_format"]
        for p in target.programs for g in p.graphs for n in g.operators
        if n.kind == "TransData" and "FRACTAL_Z" not in n.attrs.values()
    ]  # fmt: skip
    assert sorted(images) == ["NC1HWC0", "NCHW"]
    assert target.kinds()["Transpose"] == 0


def test_without_layout_there_are_no_conversions() -> None:
    with torch.no_grad():
        target = record(residual_block(), f32(1, 16, 6, 6), layout=False)
    assert target.kinds()["TransData"] == 0


def test_eager_calls_cut_a_graph_once() -> None:
    def model(x: Tensor) -> Tensor:
        y, z = torch.relu(x + 1), torch.exp(x)
        return torch.special.bessel_j0(y) + torch.special.bessel_j0(z) + (y * z).sum()

    target = record(model, f32(4, 4))
    steps = [next(iter(step)) for p in target.programs for step in p.serialized["steps"]]
    assert steps.count("graph") == 2 and steps.count("call") == 2
