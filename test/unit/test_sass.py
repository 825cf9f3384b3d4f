"""Machine instructions of kernels written thread by thread, beside those of Triton's kernels."""

from __future__ import annotations

import pytest

from benchmarks.sass import FUNCTIONS, compared

MAX_INSTRUCTIONS = 1.2
"""Of Triton's instructions for an element."""


@pytest.mark.sweep
@pytest.mark.parametrize("name", FUNCTIONS)
def test_threads_execute_hardly_more_instructions_than_tiles(name: str) -> None:
    tiles, threads = compared(name)
    assert 1 < threads.instructions <= MAX_INSTRUCTIONS * tiles.instructions
    assert 2 <= threads.bytes <= tiles.bytes
