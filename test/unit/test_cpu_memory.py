"""Memory that kernels take for themselves: little of a stack, an error where there is none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_routines import check
from torch import Tensor

from dicp.config import Config
from dicp.errors import HostMemoryError

SMALL_STACK = 256 << 10
"""Bytes; a thread of macOS has twice as many."""


def kept_rows(x: Tensor) -> Tensor:
    """Values that are too dear to compute twice: 16 rows are kept while sums are taken."""
    parts = [(x * k).sin() for k in range(1, 9)]
    total = sum((p * p for p in parts), start=x).sum(1, keepdim=True)
    return sum((p / (total + k) for k, p in enumerate(parts)), start=x)


def transposed(*xs: Tensor) -> Tensor:
    return sum((x.t() * k for k, x in enumerate(xs)), start=torch.zeros(()))


def columns(*xs: Tensor) -> list[Tensor]:
    return [y for x in xs for y in (x.sum(0), x.argmax(0))]


F64 = torch.float64
CASES: dict[str, tuple[Callable[..., object], Callable[[], list[Tensor]]]] = {
    "rows": (kept_rows, lambda: [torch.randn(4, 16000, dtype=F64)]),
    "transposed": (transposed, lambda: [torch.randn(70, 80, dtype=F64) for _ in range(20)]),
    "columns": (columns, lambda: [torch.randn(600, 2000) for _ in range(8)]),
}


@pytest.mark.parametrize("name", CASES)
def test_small_stacks(name: str) -> None:
    fn, make = CASES[name]
    compiled, inputs = torch.compile(fn, backend="cpugraph"), make()
    compiled(*inputs)
    found: list[object] = []
    before = threading.stack_size(SMALL_STACK)
    try:
        thread = threading.Thread(target=lambda: found.append(compiled(*inputs)))
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    torch.testing.assert_close(found[0], fn(*inputs), rtol=1e-4, atol=1e-4)


@pytest.fixture
def no_memory(tmp_path: Path) -> tuple[str, ...]:
    """Flags with which kernels find no memory."""
    header = tmp_path / "none.h"
    none = "void* no_room(unsigned long, unsigned long) { return nullptr; }"
    header.write_text(f'extern "C" inline {none}\n')
    return ("-include", str(header), "-Daligned_alloc=no_room")


def test_kernel_without_memory(no_memory: tuple[str, ...]) -> None:
    x = torch.randn(4, 16000, dtype=F64)
    options = {"cxx_flags": " ".join(no_memory)}
    compiled = torch.compile(kept_rows, backend="cpugraph", options=options)
    with pytest.raises(
        HostMemoryError, match=r"aten.sin.* and 54 more: .*out of memory.*\(\d+ bytes\)"
    ):
        compiled(x)


def test_routine_without_memory(tmp_path: Path, no_memory: tuple[str, ...]) -> None:
    config = Config(cache_dir=tmp_path, cxx_flags=no_memory)
    with pytest.raises(HostMemoryError, match=r"aten.mm.*out of memory"):
        check(tmp_path, torch.mm, torch.randn(48, 32), torch.randn(32, 64), config=config)
