"""Operators of 16-bit floats in float32, for a host whose library lacks kernels for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from dicp import explain
from dicp.config import Config
from dicp.dynamo_bridge.compile_fx import compile_fx
from dicp.target import LowerContext
from dicp.vendor.cpu import CpuTarget, library
from dicp.vendor.cpu.routines import product

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)
OPERATORS = {*library.CONVOLUTIONS, *library.PRODUCTS}


class WithoutKernels(CpuTarget):
    """The host as if oneDNN had no kernels for 16-bit floats; it records the calls it lowers."""

    facts = replace(CpuTarget.facts, in_float32=dict.fromkeys(OPERATORS, frozenset(HALVES)))

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, torch.dtype]] = []

    def lower(self, gm: fx.GraphModule, context: LowerContext) -> Any:
        for node in gm.graph.nodes:
            if node.target in OPERATORS:
                self.calls.append((node.target, node.args[0].meta["val"].dtype))
        return super().lower(gm, context)


@pytest.fixture
def compiled(tmp_path: Path) -> Iterator[Callable[..., tuple[Any, WithoutKernels]]]:
    def compiler(function: Callable[..., Any], dynamic: bool = False) -> Any:
        target = WithoutKernels()

        def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return compile_fx(gm, inputs, target, Config(cache_dir=tmp_path), lambda report: None)

        torch._dynamo.reset()
        return torch.compile(function, backend=backend, dynamic=dynamic), target

    yield compiler
    torch._dynamo.reset()


def convolved(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1, stride=2, groups=w.shape[1] == 1 and x.shape[1] or 1)


def transposed(x: Tensor, w: Tensor) -> Tensor:
    return F.conv_transpose2d(x, w, stride=2)


def attended(x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


CASES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "conv2d": (convolved, ((2, 6, 9, 11), (5, 6, 3, 3))),
    "depthwise": (convolved, ((2, 6, 9, 11), (6, 1, 3, 3))),
    "conv1d": (F.conv1d, ((2, 6, 19), (5, 6, 3), (5,))),
    "conv3d": (F.conv3d, ((2, 3, 5, 6, 7), (4, 3, 2, 2, 2))),
    "transposed": (transposed, ((2, 6, 5, 7), (6, 4, 3, 3))),
    "linear": (F.linear, ((2, 9, 12), (5, 12), (5,))),
    "mm": (torch.mm, ((4, 12), (12, 7))),
    "addmm": (torch.addmm, ((4, 7), (4, 12), (12, 7))),
    "bmm": (torch.bmm, ((3, 4, 12), (3, 12, 7))),
    "attention": (attended, ((2, 3, 8, 16), (8, 8))),
}


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_rounded_once(
    compiled: Callable[..., Any], name: str, dtype: torch.dtype, symbolic: bool
) -> None:
    """Those of float32, rounded: half a unit in the last place from float64's."""
    function, shapes = CASES[name]
    given = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in given]
    if name == "attention":  # a mask has no gradient in the fused operator
        given[1], exact[1] = given[1].detach(), exact[1].detach()
    fn, target = compiled(function, symbolic)
    out, reference = fn(*given), function(*exact)
    cotangent = torch.randn(out.shape).to(dtype)
    wanted = [x for x in given if x.requires_grad]
    grads = torch.autograd.grad(out, wanted, cotangent)
    doubled = [x for x in exact if x.requires_grad]
    references = torch.autograd.grad(reference, doubled, cotangent.double())
    assert out.dtype == dtype and all(g.dtype == dtype for g in grads)
    assert target.calls and {each for _, each in target.calls} == {torch.float32}, target.calls
    for found, true in zip((out, *grads), (reference, *references), strict=True):
        error, eps = (found.double() - true).abs(), torch.finfo(dtype).eps
        if name == "attention":  # its gradients read rounded results, and are added up rounded
            assert error.norm() <= eps * true.norm()
        else:
            assert (error <= eps * (true.abs() / 2 + true.abs().max() * 1e-2)).all()


def test_few_rows_of_column_major_matrices_are_left_to_the_library(
    compiled: Callable[..., Any],
) -> None:
    w = torch.randn(7, 12).half()
    for rows, dtype in ((1, torch.float16), (2, torch.float16), (3, torch.float32)):
        fn, target = compiled(F.linear)
        x = torch.randn(rows, 12).half()
        torch.testing.assert_close(fn(x, w), F.linear(x, w), atol=1e-2, rtol=1e-2)
        assert target.calls == [(aten.mm.default, dtype)]


def test_other_dtypes_stay(compiled: Callable[..., Any]) -> None:
    for dtype in (torch.float32, torch.float64):
        fn, target = compiled(torch.mm)
        x, w = torch.randn(4, 5, dtype=dtype), torch.randn(5, 6, dtype=dtype)
        torch.testing.assert_close(fn(x, w), x @ w)
        assert target.calls == [(aten.mm.default, dtype)]


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("kernels", [True, False])
def test_products_in_bfloat16_are_ours_where_the_library_has_no_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernels: bool, rows: int
) -> None:
    """Of few rows, too, for which packing the other operand takes longer than oneDNN does."""
    monkeypatch.setattr(product, "has_kernels", lambda dtype: kernels)
    monkeypatch.setattr(product, "has_tiles", lambda: False)
    for function, shapes in (
        (torch.mm, ((rows, 1000), (1000, 1600))),
        (torch.bmm, ((2, rows, 10), (2, 10, 16))),
    ):
        torch._dynamo.reset()
        inputs = [torch.randn(shape).to(torch.bfloat16) for shape in shapes]
        text = str(explain(function, *inputs, backend="cpu", options={"cache_dir": tmp_path}))
        assert ("dicp_product_bf16" in text) is not kernels, text


def test_the_processor_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions where oneDNN has no kernels; products of float16 alone: bfloat16's are ours."""
    for lacking in ((), (torch.float16,), HALVES):
        monkeypatch.setattr(library, "has_kernels", lambda dtype, of=lacking: dtype not in of)
        monkeypatch.setattr(library, "has_feature", lambda name: True)
        found = library.in_float32()
        assert found[aten.convolution.default] == frozenset(lacking)
        assert found[aten.mm.default] == frozenset(lacking) - {torch.bfloat16}
    monkeypatch.setattr(library, "has_feature", lambda name: False)
    assert library.in_float32() == {}, "not measured there"
