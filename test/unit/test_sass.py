"""Machine instructions of kernels written thread by thread, beside those of Triton's kernels."""

from __future__ import annotations

import pytest
import torch

from benchmarks.sass import FUNCTIONS, compared, programs_of, threads_listings, tiles_listings

MAX_INSTRUCTIONS = 1.2
"""Of Triton's instructions for an element."""


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
