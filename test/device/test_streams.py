"""Streams, events and memory of the eager device, each test in a program of its own."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.sweep


QUEUES = """
import torch, torch_dipu
from torch_dipu import dipu

MB = 1 << 20
side, size = dipu.Stream(), 1 << 16
x = torch.zeros(size, device="dipu")
for _ in range(2):  # the first call of a form compiles it, in step with the host
    x.add_(1.0).mul_(2.0)
x.zero_()

def busy():
    dipu._sleep(60_000_000)

# work of a stream runs in its order
with dipu.stream(side):
    busy()
    for _ in range(3):
        x.add_(1.0).mul_(2.0)
assert not side.query()
dipu.synchronize()  # waits for every stream of the device
assert side.query() and x.cpu().unique().tolist() == [14.0]

# an event recorded again means its last record
event = dipu.Event()
event.record(side)
event.synchronize()
with dipu.stream(side):
    busy()
    x.zero_()
    event.record()
assert not event.query()
dipu.current_stream().wait_event(event)
x.add_(1.0)
assert x.cpu().unique().tolist() == [1.0]
with dipu.stream(side):
    busy()
    event.record()
event.synchronize()
assert event.query() and side.query()

# also on another stream, which gets there first; who waits for an earlier record goes on doing so
with dipu.stream(side):
    busy()
    x.add_(1.0)
    event.record()
dipu.current_stream().wait_event(event)
third = dipu.Stream()
event.record(third)
event.synchronize()
assert not side.query()
x.add_(1.0)
dipu.synchronize()
assert event.query() and x.cpu().unique().tolist() == [3.0]

# numbers and indices of the host are those at the time of the call
number, indices = torch.tensor(2.0), torch.tensor([0, 1])
for _ in range(2):
    x * number, x[indices]
x[:2] = 1.0
busy()
product, rows = x * number, x[indices]
number.fill_(7.0)
indices.fill_(2)
assert product.cpu().unique().tolist() == [2.0, 6.0] and rows.tolist() == [1.0, 1.0]
x.fill_(1.0)

# copies to the host wait for the work before them, to pinned memory in the queue
pinned = torch.empty(size).pin_memory()
busy()
x.add_(1.0)
pinned.copy_(x, non_blocking=True)
plain = x.to("cpu", non_blocking=True)
dipu.synchronize()
assert pinned.unique().tolist() == plain.unique().tolist() == [2.0]

# copies between devices wait for both
other = torch.zeros(size, device="dipu:1")
with dipu.device(1):
    for _ in range(2):
        other.add_(1.0)
    busy()
    other.add_(1.0)
other.copy_(x)
assert other.cpu().unique().tolist() == [2.0]
busy()
x.add_(1.0)
assert x.to("dipu:1").cpu().unique().tolist() == [3.0]

# memory that a stream still writes is not given to another one, nor back to the runtime
for emptied in (False, True):
    with dipu.stream(side):
        block = torch.zeros(size, device="dipu")
        busy()
        block.add_(1.0)
        del block
    if emptied:
        dipu.empty_cache()
    blocks = [torch.zeros(size, device="dipu") for _ in range(4)]
    dipu.synchronize()
    assert all(b.cpu().unique().tolist() == [0.0] for b in blocks)
    del blocks

# before memory runs out, unused blocks are given back, and blocks in use are waited for
dipu.empty_cache()
dipu.set_per_process_memory_fraction((dipu.memory_reserved() + 72 * MB) / dipu.mem_get_info()[1])
def bytes_of(n):
    return torch.empty(n * MB, dtype=torch.uint8, device="dipu")
block = bytes_of(40)
del block
block = bytes_of(50)
block.record_stream(side)
with dipu.stream(side):
    busy()
del block
block = bytes_of(50)
assert side.query(), "memory that a stream uses was given away"
try:
    bytes_of(50)
except torch.OutOfMemoryError:
    pass
else:
    raise AssertionError("more memory than the limit")
print("all well")
"""


@pytest.mark.parametrize("algorithm", ["BF", "BS", "RAW", "TORCH"])
def test_streams_and_memory(run: Any, algorithm: str) -> None:
    """Order of work, events, copies; memory waits for the streams that use it."""
    done = run(
        QUEUES,
        DIPU_DEVICE_MEMCACHING_ALGORITHM=algorithm, DIPU_MOCK_CUDA="false",
        DIPU_SIMULATED_DEVICES="2",
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "all well"


NEIGHBOURS = """
import torch_dipu
from torch_dipu import dipu
alloc, free = dipu.caching_allocator_alloc, dipu.caching_allocator_delete
PAGE = 4096
for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
    blocks = [alloc(PAGE) for _ in range(3)]
    kept = alloc(PAGE)
    assert blocks == [blocks[0] + k * PAGE for k in range(3)], blocks
    for k in order:
        free(blocks[k])
    joined = alloc(3 * PAGE)
    assert joined == blocks[0], order
    free(joined)
    free(kept)
print("all well")
"""


@pytest.mark.parametrize("algorithm", ["BF", "RAW"])
def test_freed_neighbours_are_one_block(run: Any, algorithm: str) -> None:
    """By best fit the pool joins them, by RAW the simulated chip itself."""
    done = run(NEIGHBOURS, DIPU_DEVICE_MEMCACHING_ALGORITHM=algorithm, DIPU_MOCK_CUDA="false")
    assert done.stdout.splitlines()[-1] == "all well"
