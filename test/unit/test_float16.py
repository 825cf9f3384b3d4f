"""Conversions from and to float16, in vectors and one by one: their bits are NumPy's."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from recorder import record
from torch import Tensor

from dicp.config import Config

pytestmark = pytest.mark.sweep

FEATURES = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
COMPILERS = {
    "native": (), "without float16": ("g++", "-march=x86-64"), "avx2": ("g++", "-march=x86-64-v3"),
    "clang": ("clang++", "-march=native"), "clang with avx2": ("clang++", "-march=x86-64-v3"),
}  # fmt: skip
SIZES = (1 << 16, 50_001, 1000, 257, 60, 31, 16, 9, 5, 1)
"""In registers, in blocks with a rest, as a single block, and one by one."""


def options(name: str) -> dict[str, str]:
    """What makes torch.compile use one of COMPILERS; skips the test where this machine lacks it."""
    if not (chosen := COMPILERS[name]):
        return {}
    if not shutil.which(chosen[0]):
        pytest.skip(f"needs {chosen[0]}")
    if "avx2" not in FEATURES:
        pytest.skip("needs an x86-64 processor with AVX2")
    return {"cxx": chosen[0], "cxx_flags": chosen[1]}


def compiled(fn: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
    chosen = options(name)
    return torch.compile(fn, backend="cpugraph", fullgraph=True, dynamic=False, options=chosen)


@cache
def halves() -> Tensor:
    """Every float16, shuffled: sizes take different ones, and vectors have all kinds of numbers."""
    torch.manual_seed(0)
    return torch.randperm(1 << 16).to(torch.int32).to(torch.int16).view(torch.float16)


@cache
def floats() -> Tensor:
    """The floats halfway between neighbouring float16 numbers and those beside them, every exponent
    with the shortest and longest significands, and random bits."""
    low = torch.arange(0x7C00, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    high = torch.cat([low[1:], torch.tensor([65536.0])])
    middle = ((low + high) / 2).view(torch.int32)
    exponents = torch.arange(256, dtype=torch.int32)[:, None] << 23
    ends = torch.tensor(
        [0, 1, 2, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x3FFFFF, 0x400000, 0x7FFFFF]
    )
    parts = [middle - 1, middle, middle + 1, low.view(torch.int32), (exponents | ends).flatten()]
    torch.manual_seed(0)
    parts.append(torch.randint(0, 2**31, (1 << 18,)))
    bits = torch.cat([p.to(torch.int32) for p in parts])
    bits = torch.cat([bits, bits | torch.tensor(-(2**31), dtype=torch.int32)])
    return bits[torch.randperm(len(bits))].view(torch.float32)


def assert_same_bits(found: Tensor, given: Tensor, dtype: torch.dtype) -> None:
    """`found` has the bits of NumPy's conversion; of NaNs only that they are NaN, and the sign."""
    numpy = {torch.float16: "float16", torch.float32: "float32"}[dtype]
    with np.errstate(over="ignore"):
        exact = torch.from_numpy(given.numpy().astype(numpy))
    bits = torch.int16 if dtype == torch.float16 else torch.int32
    assert found.dtype == dtype
    assert torch.equal(found.isnan(), exact.isnan())
    assert torch.equal(found.signbit(), exact.signbit())
    wrong = (found.view(bits) != exact.view(bits)) & ~exact.isnan()
    assert not wrong.any(), (given[wrong][:5], found[wrong][:5], exact[wrong][:5])


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("size", SIZES)
def test_float16_to_float(compiler: str, size: int) -> None:
    x = halves()[:size]
    assert_same_bits(compiled(lambda x: x.float(), compiler)(x), x, torch.float32)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("size", [0, *SIZES])
def test_float_to_float16(compiler: str, size: int) -> None:
    x = floats()[: size or len(floats())]
    assert_same_bits(compiled(lambda x: x.half(), compiler)(x), x, torch.float16)


def test_rows_and_columns_in_float16() -> None:
    """Every kind of loop, of rows in registers, with a rest, short and transposed."""
    names: dict[str, Callable[[Tensor], Tensor]] = {
        "rows": lambda x: x * 2, "sums": lambda x: x.sum(1), "columns": lambda x: x.sum(0),
        "maxima": lambda x: x.amax(1), "transposed": lambda x: x.t().contiguous() * 2,
        "places": lambda x: x.argmax(1), "prefix sums": lambda x: x.cumsum(1),
        "prefix sums of columns": lambda x: x.cumsum(0), "weights": lambda x: x.softmax(1),
        "in_place": lambda x: x.clone().mul_(2).add_(1),
        "found places": lambda x: x.gather(0, x.argmax(0, keepdim=True)) * 2,
    }  # fmt: skip
    for shape in ((70, 64), (70, 1000), (70, 67), (300, 24), (3, 5000), (130, 9)):
        x = torch.randint(-3, 4, shape).half()
        x[:, -1] = torch.arange(5, 5 + shape[0]) % 7
        for name, fn in names.items():
            found, exact = compiled(fn, "native")(x), fn(x.double()).double()
            close = torch.allclose(found.double(), exact, rtol=1e-3, atol=1e-6)
            assert close, (name, shape)


def test_float16_is_converted_in_vectors() -> None:
    """Not by the integer arithmetic of single elements, which takes several times as long."""
    x = torch.ones(128, 1000, dtype=torch.float16)
    graphs: list[Callable[[Tensor], object]] = [
        lambda x: torch.relu(x * x + 1), lambda x: x.softmax(1), lambda x: x.sum(0),
        lambda x: x[:, :40].sum(1), lambda x: x.t() + 1, lambda x: torch.layer_norm(x, (1000,)),
        lambda x: x.cumsum(1), lambda x: x.argmax(1), lambda x: (x.float() * 2, x.amax(1)),
    ]  # fmt: skip
    for graph in graphs:
        target = record(graph, x)
        text = target.render(target.programs[0], Config()).files["kernels.cpp"]
        assert re.search(r"d_widen(<\d+>)?\(", text) and "d_from_f16(" not in text
        stores = [line for line in text.splitlines() if "d_to_f16(" in line]
        assert all("[v0] = d_to_f16(" in line for line in stores)  # results of rows
