"""Functions of fewer digits where results have 16 bits, and quotients by numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorder import TritonRecorder, record
from torch import Tensor

from dicp.compare import Rule, assert_matches
from dicp.dynamo_bridge.backend import Backend

pytestmark = pytest.mark.sweep

REDUCED_FLOATS = [torch.bfloat16, torch.float16]


def compiled(fn: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, backend=Backend("triton", cache_dir=folder), dynamic=False)


def gelu_gradient(x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(torch.ones_like(x), x)


def true_gelu(x: Tensor) -> Tensor:
    """In double precision; the operator's own formula gives 0 below -8.3."""
    return x * torch.erfc(x * -math.sqrt(0.5)) / 2


def true_gradient(x: Tensor) -> Tensor:
    density = (-x.square() / 2).exp() / math.sqrt(2 * math.pi)
    return torch.erfc(x * -math.sqrt(0.5)) / 2 + torch.where(x.abs() < 40, x, 0) * density


@pytest.mark.parametrize("dtype", REDUCED_FLOATS, ids=str)
@pytest.mark.parametrize("fn, true", [(F.gelu, true_gelu), (gelu_gradient, true_gradient)])
def test_gelu_of_every_number(fn: Any, true: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    got, eager = compiled(fn, tmp_path)(x), fn(x)
    real = true(x.double())
    assert_matches(got, eager, real, rule=Rule(elementwise=True))
    plain = x.isfinite() & (x > -5.5) & (real.abs() > 1e-3)
    eps = torch.finfo(dtype).eps
    assert ((got.double() - real).abs() / real.abs())[plain].max() < 0.6 * eps


@pytest.mark.parametrize("dtype", REDUCED_FLOATS, ids=str)
@pytest.mark.parametrize("fn", [torch.softmax, torch.log_softmax, torch.logsumexp])
@pytest.mark.parametrize("width", [300, 10000])
def test_rows_of_16_bits(fn: Any, dtype: torch.dtype, width: int, tmp_path: Path) -> None:
    x = (torch.randn(8, width, generator=torch.Generator().manual_seed(0)) * 8).to(dtype)
    x[1, 5], x[2, ::2], x[3, 9] = math.nan, -math.inf, math.inf
    got, eager = compiled(fn, tmp_path)(x, -1), fn(x, -1)
    assert_matches(got, eager, fn(x.double(), -1))
    assert torch.equal(got.isnan(), eager.isnan())


def summed_up(x: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), torch.arange(len(x)))


SHORT = {
    "gelu": (F.gelu, torch.bfloat16, "normal_cdf_short"),
    "gelu in 32 bits": (F.gelu, torch.float32, "normal_cdf"),
    "widened": (lambda x: F.gelu(x.float()), torch.bfloat16, "normal_cdf"),
    "not rounded between": (lambda x: F.gelu(x).float() + 1, torch.bfloat16, "normal_cdf"),
    "one of two": (lambda x: (F.gelu(w := x.float()).to(x.dtype), w), torch.bfloat16,
                   "normal_cdf_short"),
    "softmax": (lambda x: x.softmax(-1), torch.float16, "exp_short"),
    "long rows": (lambda x: x.softmax(-1), torch.bfloat16, "fall_short"),
    "long rows of 32 bits": (lambda x: x.softmax(-1), torch.float32, "fall"),
    "softmax in 32 bits": (lambda x: x.softmax(-1), torch.float32, "exp"),
    "softmax widened": (lambda x: x.softmax(-1, dtype=torch.float32), torch.bfloat16, "exp"),
    "loss of 16 bits": (summed_up, torch.bfloat16, "exp_short"),
    "loss of 32 bits": (summed_up, torch.float32, "exp"),
    "not below one": (torch.exp, torch.bfloat16, "exp"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHORT)
def test_what_is_rounded_soon_is_short(name: str) -> None:
    fn, dtype, function = SHORT[name]
    x = torch.ones(128, 10000 if "long" in name else 256, dtype=dtype)
    (program,) = record(fn, x, target=TritonRecorder()).programs
    text = "".join(program.kernel_texts.values())
    assert f"d.{function}(" in text
    assert ("_short(" in text) == function.endswith("short")


@pytest.mark.parametrize("divisor", [0.9, 3.0, 10.0, 1e-9, 7e11, 0.125, 4096.0])
def test_quotients_by_numbers_are_exact(divisor: float, tmp_path: Path) -> None:
    low, high = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    random = torch.randn(20000, generator=torch.Generator().manual_seed(1)).mul(8).exp()
    ends = torch.tensor([0.0, low, high, high * 0.95, 1.5, math.inf, math.nan])
    x = torch.cat([random, -random, ends, -ends])
    got, wanted = compiled(lambda t: t / divisor, tmp_path)(x), x / divisor
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-45, equal_nan=True)
    numbers = ~wanted.isnan()
    assert torch.equal(got[numbers].signbit(), wanted[numbers].signbit())
