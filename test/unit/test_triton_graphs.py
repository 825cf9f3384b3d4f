"""Recorded runs: what is copied, what keeps its memory, when a program is launched as usual.

The stand-in for a CUDA graph runs the program again for every replay, into the same results.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from recorder import TritonRecorder, record
from torch import Tensor

from dicp.errors import FallbackWarning
from dicp.gpu.graph_capture import CapturedProgram, capture_obstacle
from dicp.gpu.thresholds import MAX_CAPTURES
from dicp.loop.runtime.executable import LoopExecutable
from dicp.loop.runtime.host_memory import HostMemory
from dicp.torch_private import record_on_device
from dicp.vendor.triton.simulator import Simulator


def memory_of(tensor: Tensor) -> Tensor:
    """The memory from a tensor's first element to its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.as_strided((1 + sum((n - 1) * step for n, step in steps),), (1,))


class Replays:
    """Records by running; a replay runs again and copies into the recorded results."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def __call__(
        self, run: Callable[[], list[Any]], device: torch.device
    ) -> tuple[Callable[[], None], list[Any]]:
        assert device == torch.device("cpu")
        self.recorded += 1
        if self.refusal:
            raise RuntimeError(self.refusal)
        first: list[Any] = []

        def replay() -> None:
            self.replayed += 1
            for old, new in zip(first, run(), strict=True):
                memory_of(old).copy_(memory_of(new))

        # Recording does no work: what lies in the results before a replay must not matter.
        kept = [t.clone() for t in self.protected]
        first += [torch.full_like(memory_of(t), 7).as_strided(t.shape, t.stride()) for t in run()]
        for tensor, before in zip(self.protected, kept, strict=True):
            tensor.copy_(before)
        return replay, first

    protected: list[Tensor] = []
    refusal = ""


def graphed(
    fn: Callable[..., Any], *inputs: Tensor, static: tuple[int, ...] = (), dynamic: bool = False
) -> tuple[CapturedProgram, Replays]:
    target = record(fn, *inputs, dynamic=dynamic, target=TritonRecorder())
    program = target.programs[0]
    replays = Replays()
    runtime = Simulator(program.kernel_texts, program.serialized["buffers"])
    run = LoopExecutable(program.serialized, runtime, HostMemory())
    return CapturedProgram(program.serialized, run, static, record=replays), replays


def test_inputs_are_copied_and_results_are_the_callers_own() -> None:
    run, replays = graphed(lambda x: torch.relu(x) + 1, torch.ones(4, 8))
    results = []
    for k in range(5):
        (y,) = run([torch.full((4, 8), float(k))])
        results.append(y)
    assert replays.recorded == 1 and replays.replayed == 3
    assert [float(y[0, 0]) for y in results] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_parameters_keep_their_memory_and_follow_it() -> None:
    weight = torch.ones(8)
    run, replays = graphed(lambda x, w: x * w, torch.ones(4, 8), weight, static=(1,))
    for _ in range(3):
        run([torch.ones(4, 8), weight])
    weight.fill_(3)
    assert float(run([torch.ones(4, 8), weight])[0][0, 0]) == 3
    assert replays.recorded == 1
    other = torch.full((8,), 5.0)
    assert float(run([torch.ones(4, 8), other])[0][0, 0]) == 5
    assert replays.recorded == 2


def test_parameters_that_never_stay_are_given_up_with_the_reason() -> None:
    run, replays = graphed(lambda x, w: x * w, torch.ones(4, 8), torch.ones(8), static=(1,))
    kept = [torch.full((8,), float(k)) for k in range(MAX_CAPTURES + 4)]
    with pytest.warns(FallbackWarning, match="lie elsewhere on every call"):
        for k, w in enumerate(kept):
            assert float(run([torch.ones(4, 8), w])[0][0, 0]) == k
    assert replays.recorded == MAX_CAPTURES and run.reason


def test_what_is_written_in_place_is_the_callers_memory() -> None:
    def count(x: Tensor, total: Tensor) -> Tensor:
        total.add_(x.sum())
        return x * 2

    total = torch.zeros(())
    run, replays = graphed(count, torch.ones(4), torch.zeros(()))
    (written,) = run.fixed
    replays.protected = [total]
    for _ in range(5):
        given = [torch.ones(4), torch.ones(4)]
        given[written] = total
        run(given)
    assert float(total) == 20 and replays.recorded == 1


def test_a_result_that_is_an_input_is_that_input() -> None:
    x = torch.ones(4, requires_grad=True)
    run, _ = graphed(lambda x: x.exp() * x, x)
    plain = run.program["outputs"]
    slots = [o["ref"] for o in plain]
    assert run.program["inputs"][0] in slots  # saved for backward
    at = slots.index(run.program["inputs"][0])
    for k in range(4):
        given = torch.full((4,), float(k))
        assert run([given])[at].data_ptr() == given.data_ptr()


def test_sizes_that_change_are_not_recorded() -> None:
    with pytest.warns(FallbackWarning, match="its sizes may change"):
        run, replays = graphed(lambda x: x + 1, torch.ones(4, 8), dynamic=True)
    for n in (3, 4, 5, 6):
        assert run([n, 8, torch.ones(n, 8)])[0].shape == (n, 8)
    assert replays.recorded == 0


def test_eager_operators_are_not_recorded() -> None:
    with pytest.warns(FallbackWarning, match=r"nonzero|eager"):
        run, _ = graphed(lambda x: torch.linalg.svdvals(x + 1), torch.ones(4, 8))
    assert "runs eagerly" in run.reason


def test_overlapping_inputs_are_not_recorded() -> None:
    run, replays = graphed(lambda x: x + 1, torch.ones(8).expand(4, 8))
    with pytest.warns(FallbackWarning, match="share memory"):
        for _ in range(4):
            run([torch.ones(8).expand(4, 8)])
    assert replays.recorded == 0


def test_inputs_with_gaps_are_copied_as_they_lie() -> None:
    run, replays = graphed(lambda x: x + 1, torch.ones(4, 16)[:, :8])
    for k in range(5):
        (y,) = run([torch.full((4, 16), float(k))[:, :8]])
        assert float(y[3, 7]) == k + 1
    assert replays.recorded == 1 and replays.replayed == 3


def columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """Results with gaps between their rows, and with rows in the same memory."""
    y = x + 1
    return y[:, 1:], y[0].expand(3, 8)


def test_results_are_laid_out_as_in_runs_that_are_not_recorded() -> None:
    run, replays = graphed(columns, torch.ones(4, 8))
    for k in range(4):
        apart, expanded = run([torch.full((4, 8), float(k))])
        assert apart.stride() == (8, 1) and expanded.stride() == (0, 1)
        assert apart.unique().tolist() == expanded.unique().tolist() == [k + 1]
    assert replays.replayed == 2


def test_what_the_driver_does_not_record_is_launched_with_the_reason() -> None:
    run, replays = graphed(lambda x: torch.relu(x) + 1, torch.ones(4, 8))
    replays.refusal = "operation not permitted when stream is capturing\nmore of it"
    with pytest.warns(FallbackWarning, match="captured: operation not permitted.*capturing$"):
        results = [run([torch.full((4, 8), float(k))])[0] for k in range(5)]
    assert [float(y[0, 0]) for y in results] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert replays.recorded == 1


def test_operators_that_read_from_the_device_are_not_recorded() -> None:
    with pytest.warns(FallbackWarning, match=r"aten\.histc.* waits for the device"):
        graphed(lambda x: torch.histc(x + 1, bins=4), torch.ones(32))


# ---- PyTorch's own recording ---------------------------------------------------------------


class Framework:
    """What a recording asks of PyTorch on a device, written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[Any] = []
        self.refuses = False
        framework = self

        class Graph:
            def capture_begin(self, *pool: Any, capture_error_mode: str, **newer: Any) -> None:
                framework.events.append(("begin", capture_error_mode))

            def capture_end(self) -> None:
                framework.events.append("end")
                if framework.refuses:
                    raise RuntimeError("capture was invalidated")

            def replay(self) -> None:
                framework.events.append("replay")

        class Random:
            def clone_state(self) -> str:
                return "fresh"

            def graphsafe_set_state(self, state: str) -> None:
                framework.events.append(("random", state))

        @contextlib.contextmanager
        def inside(name: str, value: Any) -> Iterator[None]:
            framework.events.append((name, value))
            yield

        for name, value in {
            "CUDAGraph": Graph, "Stream": lambda: "side stream", "synchronize": lambda: None,
            "empty_cache": lambda: None, "current_stream": lambda: "the caller's stream",
            "current_device": lambda: 1, "default_generators": (None, Random()),
            "device": lambda device: inside("device", device),
            "stream": lambda stream: inside("stream", stream),
            "set_stream": lambda stream: framework.events.append(("back to", stream)),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)


def attention_of(dropout_p: float, backward: bool) -> dict[str, Any]:
    """A program that calls attention, as far as a recording looks at it."""
    name = "aten::_scaled_dot_product_efficient_attention"
    before: list[Any] = [{"ref": k} for k in range(9)] if backward else [{"ref": 0}] * 4 + [True]
    call = f"{name}_backward.default" if backward else f"{name}.default"
    step = {"call": call, "kind": "library", "origins": [], "args": [*before, dropout_p],
            "kwargs": {"scale": 0.5}}  # fmt: skip
    return {"symbols": {}, "steps": [step]}


@pytest.mark.parametrize("backward", [False, True])
def test_attention_that_drops_probabilities_is_not_recorded(backward: bool) -> None:
    assert not capture_obstacle(attention_of(0.0, backward))
    assert "random state" in capture_obstacle(attention_of(0.1, backward))


def test_each_stream_has_a_recording_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    run, replays = graphed(lambda x: x + 1, torch.ones(4, 8))
    for stream in (0, 0, 0, 5, 0, 5):
        monkeypatch.setattr(CapturedProgram, "_stream", lambda self, stream=stream: stream)
        (y,) = run([torch.ones(4, 8)])
        assert bool((y == 2).all())
    assert (replays.recorded, replays.replayed) == (2, 4)


def test_threads_replay_one_after_the_other() -> None:
    run, replays = graphed(lambda x: x + 1, torch.ones(4, 8))
    for _ in range(3):
        run([torch.ones(4, 8)])
    recording = run._captures[0]
    replay, waiting = recording.replay, threading.Barrier(2)

    def slow() -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            waiting.wait(0.3)  # another replay at the same time would let it through
        replay()

    run._captures[0] = replace(recording, replay=slow)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda k: run([torch.full((4, 8), float(k))])[0], range(2)))
    assert waiting.broken
    assert [y.unique().tolist() for y in found] == [[1.0], [2.0]]


def test_a_recording_is_made_on_a_stream_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    framework, device = Framework(monkeypatch), torch.device("cuda:1")

    def run() -> list[Any]:
        framework.events.append("run")
        return ["result"]

    replay, outputs = record_on_device(run, device)
    replay()
    assert outputs == ["result"] and framework.events == [
        ("device", device), ("stream", "side stream"), ("begin", "relaxed"), "run", "end", "replay",
    ]  # fmt: skip


def test_a_recording_that_fails_leaves_stream_and_random_state_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    framework = Framework(monkeypatch)
    framework.refuses = True
    with pytest.raises(RuntimeError, match="invalidated"):
        record_on_device(list, torch.device("cuda:1"))
    assert framework.events[-2:] == [("back to", "the caller's stream"), ("random", "fresh")]
