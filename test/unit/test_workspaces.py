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
    return sum(block.untyped_storage().nbytes() for block in (*pool._free, *pool._large))


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


def test_a_large_block_is_kept_from_its_second_request_on_until_idle() -> None:
    pool, size = HostMemory(), MAX_KEPT + 1
    pool.give(pool.take(size))
    assert not held(pool) and pool._releaser is None, "one large block is given back at once"
    block = pool.take(size)
    pool.give(block)
    assert held(pool) == size and pool._releaser is not None
    assert pool.take(100) is not block, "a small request takes no large block"
    assert pool.release_idle() and held(pool) == size, "it was taken in the period before"
    assert pool.take(size) is block
    pool.give(block)
    assert pool.release_idle() and held(pool) == size
    assert not pool.release_idle() and not held(pool)
    assert not block.untyped_storage().nbytes()


def test_a_block_far_larger_than_what_runs_take_is_released() -> None:
    pool, size = HostMemory(), MAX_KEPT + 1
    for _ in range(2):
        pool.give(pool.take(3 * size))
    assert pool.release_idle() and held(pool) == 3 * size
    pool.give(pool.take(size))
    assert not pool.release_idle() and not held(pool)


def test_large_blocks_are_bounded() -> None:
    pool, size = HostMemory(bound=3 * MAX_KEPT), MAX_KEPT + 1
    for _ in range(2):
        for block in [pool.take(size) for _ in range(4)]:
            pool.give(block)
    assert held(pool) == 2 * size


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.usefixtures("own_objects")
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
