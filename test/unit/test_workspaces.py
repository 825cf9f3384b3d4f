"""Memory that a run works in: kept from run to run up to a bound, and given back beyond it."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dicp import Backend
from dicp.loop.runtime.host_memory import HostMemory
from dicp.loop.thresholds import MAX_KEPT
from dicp.target import find_target


@pytest.fixture(autouse=True)
def fresh_target() -> Iterator[None]:
    find_target.cache_clear()
    yield
    find_target.cache_clear()


def held(pool: HostMemory) -> int:
    return sum(block.untyped_storage().nbytes() for block in pool._free)


def test_a_pool_keeps_no_more_than_its_bound() -> None:
    pool, part = HostMemory(), MAX_KEPT // 4
    small = pool.take(part)
    pool.give(small)
    assert pool.take(part // 2) is small, "what is kept is taken again"
    blocks = [small, *(pool.take(part) for _ in range(5)), pool.take(MAX_KEPT)]
    for block in blocks:
        pool.give(block)
    assert 0 < held(pool) <= MAX_KEPT
    released = [b for b in blocks if not b.untyped_storage().nbytes()]
    assert len(released) == len(blocks) - len(pool._free) >= 3
    large = HostMemory()
    large.give(large.take(MAX_KEPT + 1))
    assert not held(large), "one large block is given back at once"


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_after_a_large_call(tmp_path: Path) -> None:
    """It is what it was before, whether anything is called afterwards or not."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        hidden = torch.nn.functional.gelu(x @ w)
        return (torch.softmax(hidden @ w.t() @ w, 0) @ w.t()).sum(0)

    run = torch.compile(fn, backend=Backend("cpu", cache_dir=tmp_path), dynamic=True)
    w = torch.randn(8, 512) / 8

    def call(rows: int) -> None:
        run(torch.randn(rows, 8), w)

    for rows in (64, 80, 64):
        call(rows)
    gc.collect()
    before = resident()
    call(50_000)  # 100 MiB for each tensor of hidden values
    gc.collect()
    after = resident()
    assert after - before < MAX_KEPT + (48 << 20), f"{(after - before) >> 20} MiB more"
    for _ in range(2):
        call(64)
    assert resident() - before < MAX_KEPT + (48 << 20)


def test_steps_of_random_sizes_keep_memory_flat(tmp_path: Path) -> None:
    def fn(x: Tensor) -> Tensor:
        return (torch.softmax(x @ x.t(), 0) @ x).sum(0)

    rng = random.Random(3)
    run = torch.compile(fn, backend=Backend("cpu", cache_dir=tmp_path), dynamic=True)
    sizes = [rng.randrange(2, 400) for _ in range(300)]
    for rows in (400, 2, *sizes[:150]):
        run(torch.randn(rows, 16))
    before = resident()
    for rows in sizes[150:]:
        run(torch.randn(rows, 16))
    assert resident() - before < 16 << 20
