"""Times of a graph's kernels and calls, measured by running the graph several times."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from dicp.dynamo_bridge.recording import FORMAT, write_record
from dicp.dynamo_bridge.thresholds import MAX_TIMED_RUNS, MIN_TIMED_RUNS, TIMED_SECONDS
from dicp.effects import is_mutating, is_repeatable
from dicp.machine import StepClock, processor, running, stopwatch
from dicp.target import Executable
from dicp.torch_private import HOST


class TimedExecutable:
    """Runs a graph; before its first run, times its steps on the same inputs.

    The times go into the file `path`. Tensors that the graph overwrites are copied, and random
    generators left as they are, so that the program computes what it computes without this.
    obstacle: why the steps cannot be timed; empty if they can.
    """

    def __init__(self, run: Executable, gm: fx.GraphModule, path: Path, obstacle: str) -> None:
        self.run, self.path = run, path
        self.obstacle = obstacle or _obstacle(run, gm)
        self.overwritten = _overwritten_inputs(gm)
        self._lock = threading.Lock()
        self._done = False

    def __call__(self, inputs: list[Any]) -> list[Any]:
        with self._lock:
            if not self._done:
                self._done = True
                write_record(self.path, {"format": FORMAT, **self._times(inputs)})
        return self.run(inputs)

    def _times(self, inputs: Sequence[Any]) -> dict[str, Any]:
        if self.obstacle:
            return {"obstacle": self.obstacle}
        device = _device_of(inputs)
        try:
            with _restored_generators(device), torch.no_grad():
                return self._measured(inputs, device)
        except Exception as error:  # the run after this raises the program's own
            reason = (str(error).splitlines() or [""])[0]
            return {"obstacle": f"running it raises {type(error).__name__}: {reason}"}

    def _measured(self, inputs: Sequence[Any], device: torch.device) -> dict[str, Any]:
        arguments = [
            copied_as_laid_out(value)
            if k in self.overwritten and isinstance(value, torch.Tensor)
            else value
            for k, value in enumerate(inputs)
        ]
        clock = StepClock(device)
        watched = self.run.watched(arguments, clock.measure)  # type: ignore[attr-defined]
        taken: dict[int, list[float]] = {}
        whole: list[float] = []
        for _ in _timed_runs(lambda: watched(list(arguments))):
            clock.seconds()
            clock.delay()
            watched(list(arguments))
            for number, seconds in clock.seconds().items():
                taken.setdefault(number, []).append(seconds)
            end = stopwatch(device)
            self.run(list(arguments))
            whole.append(end() / 1e3)
        return {
            "obstacle": "", "device": str(device), "processor": processor(device),
            "threads": torch.get_num_threads(),
            "load": running(), "runs": len(whole),
            "whole": statistics.median(whole),
            "seconds": {str(k): [statistics.median(v), min(v)] for k, v in taken.items()},
        }  # fmt: skip


def _timed_runs(warm_up: Callable[[], Any]) -> Iterator[int]:
    """The numbers of the runs that fit into TIMED_SECONDS, after a warm-up run."""
    warm_up()
    start = time.perf_counter()
    for number in range(MAX_TIMED_RUNS):
        if number >= MIN_TIMED_RUNS and time.perf_counter() - start > TIMED_SECONDS:
            return
        yield number


def _obstacle(run: Executable, gm: fx.GraphModule) -> str:
    """Why a graph cannot be run several times, or not step by step; empty if it can."""
    if not hasattr(run, "watched"):
        return "this target's executable cannot be run step by step"
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    single = next((n for n in calls if not is_repeatable(n.target)), None)
    return f"{single.target} ({single.name}) may not be run twice" if single is not None else ""


def _overwritten_inputs(gm: fx.GraphModule) -> set[int]:
    """The positions of inputs that are arguments of an operator that writes."""
    positions = {node: k for k, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    writing = [n for n in gm.graph.nodes if n.op == "call_function" and is_mutating(n.target)]
    return {positions[read] for n in writing for read in n.all_input_nodes if read in positions}


def _device_of(inputs: Sequence[Any]) -> torch.device:
    devices = (value.device for value in inputs if isinstance(value, torch.Tensor))
    return next((d for d in devices if d.type not in (HOST, "meta")), torch.device(HOST))


@contextlib.contextmanager
def _restored_generators(device: torch.device) -> Iterator[None]:
    if device.type == HOST:
        with torch.random.fork_rng(devices=()):
            yield
    else:
        index = torch.get_device_module(device).current_device()
        with torch.random.fork_rng(devices=[index], device_type=device.type):
            yield


def copied_as_laid_out(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A tensor with the same sizes, strides and offset in a copy of the storage, on a device."""
    device = device or tensor.device
    bits = tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    if tensor.layout != torch.strided or bits:
        return tensor.to(device, copy=True)
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    storage = flat.to(device, copy=True).untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype, device=device)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
