"""Running programs: buffers, plans per size, aliasing, memory returned."""

from __future__ import annotations

import gc
import inspect
import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dicp.loop.runtime.host_memory import HostMemory
from dicp.loop.thresholds import MAX_PLANS
from dicp.target import find_target


def chain(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.relu(x @ w) + 1
    return x


def test_many_sizes_through_one_graph() -> None:
    compiled = torch.compile(chain, backend="cpugraph", dynamic=True)
    w = torch.rand(8, 8) / 8
    for n in [*range(2, MAX_PLANS + 8), 2, 3]:
        x = torch.rand(n, 8)
        torch.testing.assert_close(compiled(x, w), chain(x, w))


def test_results_do_not_live_in_the_workspace() -> None:
    compiled = torch.compile(chain, backend="cpugraph")
    w = torch.rand(8, 8) / 8
    inputs = [torch.rand(5, 8) for _ in range(3)]
    results = [compiled(x, w) for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        torch.testing.assert_close(result, chain(x, w))


def test_threads_run_one_graph_at_once() -> None:
    compiled = torch.compile(chain, backend="cpugraph")
    w = torch.rand(64, 64) / 64
    compiled(torch.rand(64, 64), w)
    failures: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(30):
            x = torch.rand(64, 64, generator=generator)
            if not torch.allclose(compiled(x, w), chain(x, w), rtol=1e-4):
                failures.append(f"thread {seed}")

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_an_error_leaves_the_graph_usable() -> None:
    def divide(x: Tensor, y: Tensor) -> Tensor:
        return (x // y) * 2

    compiled = torch.compile(divide, backend="cpugraph")
    x, y = torch.arange(1, 9), torch.arange(1, 9)
    for _ in range(3):
        try:
            compiled(x, y - 4)
        except ZeroDivisionError:
            pass
        torch.testing.assert_close(compiled(x, y), divide(x, y))


@pytest.mark.usefixtures("own_objects")
def test_inputs_and_results_are_released() -> None:
    compiled = torch.compile(lambda x: (x + 1).softmax(-1), backend="cpugraph")
    x = torch.rand(1000, 100)
    compiled(x)
    gc.collect()
    before = sum(isinstance(o, Tensor) for o in gc.get_objects())
    for _ in range(5):
        compiled(torch.rand(1000, 100))
    gc.collect()
    assert sum(isinstance(o, Tensor) for o in gc.get_objects()) <= before + 1


def held_at_most(run: Callable[[], object]) -> int:
    """The most bytes that what `run` allocates takes at one time, after two runs to warm up.

    Without the workspace, which is there by then.
    """
    run()
    run()
    with mock.patch("dicp.loop.runtime.profiled.report_memory"):
        with torch.profiler.profile(profile_memory=True) as profile:
            run()
    kineto = profile.profiler.kineto_results.events()
    events = [(e.start_ns(), e.nbytes()) for e in kineto if e.name() == "[memory]"]
    return max(itertools.accumulate(size for _, size in sorted(events)))


def test_gradients_take_the_place_of_what_was_saved_for_them() -> None:
    layers, size = 8, 512
    weights = [torch.rand(size, size, requires_grad=True) for _ in range(layers)]
    tensor = 4 * size * size

    def loss(x: Tensor, weights: list[Tensor]) -> Tensor:
        for w in weights:
            x = torch.cumsum(x, 0).tanh() * w
        return x.sum()

    compiled = torch.compile(loss, backend="cpugraph")
    x = torch.rand(size, size)

    def step() -> None:
        for w in weights:
            w.grad = None
        compiled(x, weights).backward()

    assert held_at_most(step) <= (layers + 4) * tensor


def test_plans_for_other_sizes_keep_no_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Tensor] = []

    class Watched(HostMemory):
        def take(self, size: int) -> Tensor:
            taken.append(super().take(size))
            return taken[-1]

    monkeypatch.setattr(find_target("cpu"), "host_pool", Watched())
    compiled = torch.compile(chain, backend="cpugraph", dynamic=True)
    w = torch.rand(64, 64) / 64
    for n in (*range(100, 800, 100), 150, 450):
        x = torch.rand(n, 64)
        torch.testing.assert_close(compiled(x, w), chain(x, w))
    held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in taken}
    assert len(held) > 3 and sum(held.values()) == max(held.values())


def test_a_block_may_begin_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has room for buffers that begin at whole cache lines."""

    class Odd(HostMemory):
        def take(self, size: int) -> Tensor:
            return torch.empty(size + 1, dtype=torch.uint8)[1:]

    monkeypatch.setattr(find_target("cpu"), "host_pool", Odd())
    x, w = torch.rand(100, 64), torch.rand(64, 64) / 64
    torch.testing.assert_close(torch.compile(chain, backend="cpugraph")(x, w), chain(x, w))


def test_workspaces_are_lent_and_returned() -> None:
    pool = HostMemory()
    first = pool.take(100)
    second = pool.take(100)
    assert first.data_ptr() != second.data_ptr()
    pool.give(first)
    assert pool.take(50).data_ptr() == first.data_ptr()
    assert pool.take(10**6).numel() >= 10**6


def test_profiler_names_each_kernel_by_its_operators(tmp_path: Path) -> None:
    x = torch.randn(16, 16)
    compiled = torch.compile(lambda x: torch.softmax(x * 2, -1).sum(0), backend="cpugraph")
    compiled(x)
    with torch.profiler.profile(record_shapes=True) as profile:
        compiled(x)
    events = profile.key_averages(group_by_input_shape=True)
    ranges = [event.key for event in events if event.key.startswith("dicp::")]
    assert any("softmax" in name for name in ranges), ranges
    assert any("sum" in name for name in ranges), ranges
    shapes = [event.input_shapes for event in events if "softmax" in event.key]
    assert shapes and all(each == [[16, 16]] for each in shapes), shapes
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (kernel,) = [event for event in trace if "softmax" in event.get("name", "")]
    assert "softmax" in kernel["args"]["operators"]
    assert "test_runtime.py" in kernel["args"]["source"], kernel


class Scores(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x * 2, -1)


class Average(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = Scores()

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x).sum(0) @ x


def test_profiler_shows_the_users_frames_and_the_workspace_of_each_kernel() -> None:
    x = torch.randn(16, 16)
    compiled = torch.compile(Average(), backend="cpugraph")
    compiled(x)
    verbose = torch._C._profiler._ExperimentalConfig(verbose=True)
    options: dict[str, Any] = {"with_stack": True, "experimental_config": verbose}
    with torch.profiler.profile(profile_memory=True, **options) as profile:
        compiled(x)
    ranges = {e.name.split("_")[0]: e for e in profile.events() if e.name.startswith("dicp::")}
    softmax, total = ranges["dicp::mul"], ranges["dicp::sum"]

    def line(module: type, frame: str) -> str:
        place = inspect.getsourcelines(module.forward)[1] + 1  # type: ignore[attr-defined]
        return f"test_runtime.py({place}): {frame}"

    assert softmax.stack[0].endswith(line(Scores, "forward"))
    assert softmax.stack[1].endswith(line(Average, "forward"))
    assert total.stack[0].endswith(line(Average, "forward"))
    assert "test_profiler_shows" in " ".join(total.stack), "and go on to the caller"
    by_stack = profile.key_averages(group_by_stack_n=5)
    assert any(e.key == softmax.name and e.stack[:1] == softmax.stack[:1] for e in by_stack)
    assert (softmax.cpu_memory_usage, total.cpu_memory_usage) == (16 * 16 * 4, 16 * 4)
    assert sum(e.cpu_memory_usage for e in profile.events() if not e.cpu_parent) == 0, "not freed"
