"""Memory of results: the next run takes it if nobody holds it by then; idle memory goes back."""

from __future__ import annotations

import gc
import os
import resource
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dicp import Backend
from dicp.loop.runtime import host_memory
from dicp.loop.runtime.host_memory import HostMemory
from dicp.loop.schedule.placement import Buffer
from dicp.loop.thresholds import MIN_REUSED
from dicp.target import find_target

SHAPE = 128, 256
NBYTES = 4 * 128 * 256


def buffer(shape: tuple[int, ...] = SHAPE) -> Buffer:
    strides = shape[1], 1
    return Buffer("out", "output", torch.float32, shape, strides, 0, None)


def warm(memory: HostMemory) -> Callable[[], Tensor]:
    """The allocation of a result whose memory is kept."""
    allocate = memory.result(buffer())
    allocate()
    allocate()
    return allocate


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x,
    "view": lambda x: x[3:5],
    "detached": lambda x: x.detach(),
    "storage": lambda x: x.untyped_storage(),
    "array": lambda x: x.numpy(),
    "array of a view": lambda x: x[1].numpy(),
    "capsule": lambda x: torch.utils.dlpack.to_dlpack(x),
    "saved for backward": lambda x: x * torch.ones(SHAPE, requires_grad=True),
    "parameter": lambda x: torch.nn.Parameter(x),
}


@pytest.mark.usefixtures("own_objects")
@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_is_reused_once_the_caller_has_dropped_it(holder: str) -> None:
    allocate = warm(HostMemory())
    result = allocate()
    address = result.data_ptr()
    held = HOLDERS[holder](result)
    del result
    gc.collect()
    others = [allocate() for _ in range(3)]
    assert address not in [x.data_ptr() for x in others], f"the caller holds a {holder}"
    del held, others
    gc.collect()
    addresses = {allocate().data_ptr() for _ in range(5)}
    assert len(addresses) == 1, "nobody holds any"


def test_a_result_held_during_the_next_run_alternates_between_two_blocks() -> None:
    allocate, addresses, result = warm(HostMemory()), [], None
    for _ in range(8):
        result = allocate()
        addresses.append(result.data_ptr())
    assert len(set(addresses[1:])) == 2


@pytest.mark.parametrize("change", ["resize", "free", "share"])
def test_memory_that_the_caller_changed_is_not_reused(change: str) -> None:
    allocate = warm(HostMemory())
    result = allocate()
    if change == "share":
        result.share_memory_()
    else:
        result.untyped_storage().resize_(0 if change == "free" else 2 * NBYTES)
    del result
    for _ in range(3):
        result = allocate()
        assert result.untyped_storage().nbytes() == NBYTES and not result.is_shared()
        result.fill_(1)


def test_a_reused_result_is_as_new() -> None:
    """It has its own version counter, and is an inference tensor only in inference mode."""
    memory = HostMemory()
    with torch.inference_mode():
        allocate = warm(memory)
        address = allocate().data_ptr()
        assert allocate().is_inference()
    plain = allocate()
    assert plain.data_ptr() == address
    assert not plain.is_inference() and not plain.requires_grad and plain._version == 0
    assert (plain.shape, plain.stride(), plain.storage_offset()) == (SHAPE, (256, 1), 0)
    plain.requires_grad_()
    torch.autograd.backward((plain * plain).sum())
    plain.detach().add_(1)
    del plain
    again = allocate()
    assert again.data_ptr() == address
    assert again._version == 0 and again.grad is None and not again.requires_grad
    with torch.inference_mode():
        del again
        assert allocate().is_inference()


def test_what_is_kept_is_bounded() -> None:
    memory = HostMemory(bound=3 * NBYTES)
    allocations = [warm(memory) for _ in range(5)]
    assert memory.kept == 3 * NBYTES
    held = [allocate() for allocate in allocations for _ in range(4)]
    assert memory.kept == 3 * NBYTES and len({x.data_ptr() for x in held}) == 20
    small = HostMemory(bound=NBYTES - 1)
    warm(small)
    assert small.kept == 0


def test_small_and_first_results_are_not_kept() -> None:
    memory = HostMemory()
    tiny = memory.result(buffer((1, MIN_REUSED // 4 - 1)))
    for _ in range(3):
        tiny()
    memory.result(buffer())()
    assert memory.kept == 0 and memory._releaser is None


def test_a_dropped_plan_gives_its_memory_back() -> None:
    memory = HostMemory()
    allocate = warm(memory)
    result = allocate()
    result.fill_(7)
    assert memory.kept == NBYTES
    del allocate
    assert memory.kept == 0
    warm(memory)()
    assert (result == 7).all(), "the caller's tensor keeps its memory"


def test_idle_memory_is_released() -> None:
    memory = HostMemory()
    busy, idle = warm(memory), warm(memory)
    assert memory.release_idle() and memory.kept == 2 * NBYTES, "both ran in the period before"
    busy()
    assert memory.release_idle() and memory.kept == NBYTES
    assert not memory.release_idle() and memory.kept == 0
    for allocate in (busy, idle):
        addresses = {allocate().data_ptr() for _ in range(4)}
        assert memory.kept and len(addresses) <= 2, "used again, it is kept again"


@pytest.fixture
def periods(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Once it is set, the periods after which idle memory is released take no time."""
    end = threading.Event()
    monkeypatch.setattr(host_memory, "time", SimpleNamespace(sleep=lambda _: end.wait(60)))
    yield end
    end.set()


def test_no_thread_waits_for_nothing(periods: threading.Event) -> None:
    memory = HostMemory()
    allocate = warm(memory)
    thread = memory._releaser
    assert thread is not None
    periods.set()
    thread.join(60)
    assert not thread.is_alive() and memory.kept == 0 and memory._releaser is None
    periods.clear()
    allocate()
    assert memory.kept and memory._releaser is not None


def test_the_thread_ends_with_its_memory(periods: threading.Event) -> None:
    memory = HostMemory()
    allocate = warm(memory)
    thread, gone = memory._releaser, weakref.ref(memory)
    assert thread is not None
    del memory, allocate
    periods.set()
    thread.join(60)
    assert not thread.is_alive() and gone() is None


def test_threads_have_memory_of_their_own() -> None:
    """Many threads allocate from one plan; none is given what another holds."""
    allocate, faults = warm(HostMemory()), []

    def work(number: int) -> None:
        for _ in range(300):
            mine = allocate()
            mine.fill_(number)
            time.sleep(0)
            if not (mine == number).all():
                faults.append(number)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_a_forked_child_releases_idle_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "IDLE_SECONDS", 0.05)
    memory = HostMemory()
    allocate = warm(memory)
    child = os.fork()
    if not child:
        kept = [allocate(), allocate(), allocate()]
        del kept
        end = time.monotonic() + 10
        while memory.kept and time.monotonic() < end:
            time.sleep(0.01)
        os._exit(memory.kept != 0)
    assert os.waitpid(child, 0)[1] == 0


Step = Callable[[], tuple[Tensor, Tensor]]


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Step]:
    """A compiled step with another input each time: its output and a gradient, 36 MiB each."""
    find_target.cache_clear()
    size = 3 << 10
    x, w = torch.randn(size, size), torch.randn(size, size, requires_grad=True)
    run = torch.compile(
        lambda x, w: (x * w).softmax(-1), backend=Backend("cpu", cache_dir=tmp_path)
    )

    def step() -> tuple[Tensor, Tensor]:
        out = run(x.add_(1), w)
        return out, torch.autograd.grad(out.sum(), w)[0]

    yield step
    find_target.cache_clear()


def test_held_results_are_not_overwritten(train: Step) -> None:
    held: list[tuple[Tensor, Tensor]] = []
    for number in range(9):
        found = train()
        if number % 3 == 2:
            held += [(t, t.detach().clone()) for t in found]
    assert len(held) == 6 and all(torch.equal(t, as_returned) for t, as_returned in held)


def test_a_training_step_takes_no_page_anew(train: Step) -> None:
    """But for the gradient of `sum`, which is PyTorch's: without reuse there are three tensors a
    step that the C library maps anew, whose pages the kernel clears."""
    for _ in range(4):
        train()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        train()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    assert faults < 10 * 1.5 * (36 << 20) / resource.getpagesize()
