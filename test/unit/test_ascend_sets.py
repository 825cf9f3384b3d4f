"""Attention in a simulator that has the operators of one header set alone.

With the set of 2023 it is composed of older operators: its numbers, gradients, masks and dropout
are held against fp64, and the simulator refuses whatever that set does not declare.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ascend_simulated import check, compiled
from stand_in import cann
from torch import Tensor

from dicp.errors import SimulatorWarning
from dicp.vendor.ascend.simulator import device
from dicp.vendor.ascend.simulator.compiler import Model

pytestmark = pytest.mark.sweep

sdpa = F.scaled_dot_product_attention
OPTIONS = {"runs_on": "auto", "fallback": "error"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cann")
    return cann.install(folder / "2023", "2023", folder)


@pytest.fixture(autouse=True)
def kinds(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """An installation of 2023 without a device; the kinds of operators that run."""
    found: set[str] = set()

    def compile(self: device.Simulator, text: str, options: dict[str, str] | None) -> Model:
        compiler = cann.HeaderCompiler(device.with_own_names(text, self.ports), options)
        compiler.declared = cann.operators("2023")
        model = compiler.compile()
        found.update(model.kinds)
        return model

    monkeypatch.setattr(device.Simulator, "compile", compile)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(root))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SimulatorWarning)
        yield found
    assert "BatchMatMulV2" in found and not any("Attention" in kind for kind in found)


def qkv(
    dtype: torch.dtype, grad: bool, rows: int = 6, columns: int = 9, width: int = 16
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows * columns)
    sizes = [(2, 4, rows, width), (2, 4, columns, width), (2, 4, columns, width)]
    drawn = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return [x.requires_grad_(grad) for x in drawn]


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return sdpa(q, k, v, mask)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of three rows one is hidden by the lowest number: its probabilities are equal."""
    hidden = torch.arange(q.shape[2])[:, None].expand(q.shape[2], k.shape[2]) % 3 == 1
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * 0.25
    mask = torch.where(hidden, torch.finfo(torch.float32).min, 0.0).to(scores.dtype)
    return (scores + mask).softmax(-1).to(q.dtype) @ v


BLIND = torch.arange(6)[:, None].expand(6, 9) > 1
"""The first two rows see no key."""
PADDING = torch.tensor([[True] * 9, [True] * 5 + [False] * 4])[:, None, None]
PER_HEAD = torch.rand(2, 4, 6, 9, generator=torch.Generator().manual_seed(3)) > 0.3
DISTANCES = -(torch.arange(6)[:, None] - torch.arange(9)).abs() * 0.5
FORMS: dict[str, tuple[Any, list[Any], dict[str, int]]] = {
    "plain": (sdpa, [], {}),
    "causal": (lambda q, k, v: sdpa(q, k, v, is_causal=True), [], {"columns": 6}),
    "causal over more keys": (lambda q, k, v: sdpa(q, k, v, is_causal=True), [], {}),
    "scaled": (lambda q, k, v: sdpa(q, k, v, scale=0.7), [], {}),
    "heads of a group": (lambda q, k, v: sdpa(q, k[:, :2], v[:, :2], enable_gqa=True), [], {}),
    "padding": (masked, [PADDING], {}),
    "a mask per head": (masked, [PER_HEAD], {}),
    "wholly hidden rows": (masked, [BLIND], {}),
    "rows hidden by the lowest number": (by_hand, [], {}),
    "one query": (masked, [PADDING], {"rows": 1}),
    "an odd width": (sdpa, [], {"width": 10}),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_attention_of_older_operators(form: str, dtype: torch.dtype, dynamic: bool) -> None:
    fn, more, sizes = FORMS[form]
    check(fn, *qkv(dtype, True, **sizes), *more, dynamic=dynamic, **OPTIONS)


def test_inference_in_float16(dynamic: bool) -> None:
    check(masked, *qkv(torch.float16, False), BLIND, dynamic=dynamic, **OPTIONS)


@pytest.mark.parametrize("hides", [False, True], ids=["distances", "wholly hidden rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_that_is_added(dtype: torch.dtype, hides: bool, dynamic: bool) -> None:
    mask = DISTANCES.to(dtype)
    if hides:
        mask = mask.masked_fill(~BLIND, -torch.inf)
    check(masked, *qkv(dtype, True), mask, dynamic=dynamic, **OPTIONS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout(dtype: torch.dtype, dynamic: bool) -> None:
    """Values of one unit each show which weights were kept; gradients follow from these."""
    dropout_p = 0.25
    q, k, _ = qkv(dtype, True, rows=32, columns=48)
    v = torch.eye(48, dtype=dtype).expand(2, 4, 48, 48).contiguous().requires_grad_()
    fn = compiled(lambda q, k, v: sdpa(q, k, v, dropout_p=dropout_p), dynamic=dynamic, **OPTIONS)
    out = fn(q, k, v)
    kept = (out != 0).double() / (1 - dropout_p)
    assert abs((out != 0).double().mean() - (1 - dropout_p)) < 0.02
    assert not torch.equal(out != 0, fn(q, k, v) != 0)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted = (exact[0] @ exact[1].mT / 4).softmax(-1) * kept @ exact[2]
    seed = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    got = torch.autograd.grad(out, [q, k, v], seed.to(dtype))
    gradients = torch.autograd.grad(wanted, exact, seed)
    for mine, real in zip([out, *got], [wanted, *gradients], strict=True):
        torch.testing.assert_close(
            mine.double(), real, rtol=0, atol=8 * torch.finfo(dtype).eps * real.abs().max().item()
        )
