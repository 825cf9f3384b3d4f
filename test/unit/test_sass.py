"""Machine instructions of kernels written thread by thread, beside those of Triton's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.sass import FUNCTIONS, compared, programs_of, threads_listings, tiles_listings

MAX_INSTRUCTIONS = 1.2
"""Of Triton's instructions for an element."""
OVERFLOWING: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + 1 > x,
    "sub": lambda x: x - 1 > x,
    "mul": lambda x: torch.div(x * 4, 4, rounding_mode="trunc") != x,
    "square": lambda x: x.square() < 0,
    "pow": lambda x: x**2 < 0,
    "neg": lambda x: (-x < 0) != (x > 0),
    "abs": lambda x: x.abs() < 0,
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", FUNCTIONS)
def test_threads_execute_hardly_more_instructions_than_tiles(name: str) -> None:
    tiles, threads = compared(name)
    assert 1 < threads.instructions <= MAX_INSTRUCTIONS * tiles.instructions
    assert 2 <= threads.bytes <= tiles.bytes


def test_products_are_rounded_before_they_are_added() -> None:
    """x * x - y * y of equal numbers is 0, not a rounding error whose square root may be NaN."""
    numbers = [torch.ones(64), torch.ones(64)]
    tiles, threads = programs_of(lambda x, y: x * x - y * y, numbers)
    for listings in (tiles_listings(tiles), threads_listings(threads)):
        (instructions,) = listings.values()
        assert "FMUL" in instructions and "FFMA" not in instructions


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", OVERFLOWING)
def test_integers_wrap_around(name: str, dtype: torch.dtype) -> None:
    """A compiler that takes overflow for impossible knows the result, and loads no number."""
    _, threads = programs_of(OVERFLOWING[name], [torch.ones(64, dtype=dtype)])
    (instructions,) = threads_listings(threads).values()
    assert any(i.startswith("LDG") for i in instructions)
