"""mode="reduce-overhead": a program is captured once as a device graph and replayed.

Parameters and tensors written in place keep their memory: the capture holds their addresses.
Other inputs are copied into the capture's own buffers, and results are copied out, so that the
next replay does not overwrite what the caller holds. Where replay would be incorrect, the program
is launched as usual, with one warning that states the reason.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dicp.errors import FallbackWarning
from dicp.gpu.launch import index_of, location_of
from dicp.gpu.library import FUSED_ATTENTION
from dicp.gpu.thresholds import MAX_CAPTURES, ORDINARY_RUNS
from dicp.loop.schedule.placement import is_ref
from dicp.serialize import resolve_operator
from dicp.target import Executable
from dicp.torch_private import HOST, current_stream, schema_of

MODES = frozenset({"reduce-overhead", "max-autotune"})
CAPTURABLE = tuple(f"aten::{name}." for name in FUSED_ATTENTION)
"""Eager operators that can be captured, since they do all their work on the stream."""
WAITING = tuple(
    f"aten::{name}."
    for name in (
        "histc", "mode", "masked_scatter_backward", "_ctc_loss", "_ctc_loss_backward",
        "_embedding_bag_backward", "_embedding_bag_dense_backward",
    )
)  # fmt: skip
"""Library operators that cannot be captured: their host code reads from the device."""


@dataclass(frozen=True)
class Capture:
    """A captured run: `replay` computes `outputs` from `buffers` and the memory at `addresses`."""

    addresses: tuple[int, ...]
    """The capture's key: the addresses of inputs that are not copied, then the stream, since
    replays on two streams may overlap."""
    buffers: Mapping[int, torch.Tensor]
    replay: Callable[[], None]
    outputs: Sequence[Any]


Capturer = Callable[[Callable[[], list[Any]], torch.device], tuple[Callable[[], None], list[Any]]]


def capture_obstacle(program: Mapping[str, Any]) -> str:
    """The reason why the program cannot be captured; empty if it can."""
    if program["symbols"]:
        return "its sizes may change"
    for step in program["steps"]:
        if "call" not in step:
            continue
        call = step["call"] if isinstance(step["call"], str) else ""
        name = step["origins"][0] if step["origins"] else "an operator"
        if call.startswith(WAITING):
            return f"{name} waits for the device"
        if step["kind"] == "eager" and not call.startswith(CAPTURABLE):
            return f"{name} runs eagerly"
        if call.startswith(CAPTURABLE) and _dropout_p(step):
            return f"{name} applies dropout: its random state is on the device only in a capture"
    return ""


def _dropout_p(step: Mapping[str, Any]) -> float:
    """The dropout probability of an attention call; above 0 the call cannot be captured.

    Unless forward and backward are both captured, one would read on the device the seed and offset
    that the other left on the host (PyTorch, "Seed and Offset Device" in attention.cu).
    """
    names = [argument.name for argument in schema_of(resolve_operator(step["call"])).arguments]
    given = {**dict(zip(names, step["args"], strict=False)), **step["kwargs"]}
    return float(given.get("dropout_p") or 0.0)


class CapturedProgram:
    """A program that is captured at its third call and replayed from then on."""

    def __init__(
        self,
        program: Mapping[str, Any],
        run: Executable,
        static_inputs: Sequence[int],
        record: Capturer,
        captured: Executable | None = None,
    ) -> None:
        self.program = program
        self.run = run
        self.captured = captured or run
        """The executable to record: its workspaces are not lent to other runs."""
        self.record = record
        self.device = torch.device(program["device"])
        self.reason = capture_obstacle(program)
        self.fixed = sorted({*static_inputs, *_written_inputs(program)} & set(_tensors(program)))
        self.aliased = [_aliased_input(program, output) for output in program["outputs"]]
        self._captures: list[Capture] = []
        self._calls = 0
        self._lock = threading.Lock()
        """Held from copying inputs in to copying results out: threads may share a stream."""
        if self.reason:
            self._give_up(self.reason)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        if self.reason:
            return self.run(inputs)
        if self._calls < ORDINARY_RUNS:
            self._calls += 1
            if not all(isinstance(inputs[k], torch.Tensor) for k in _tensors(self.program)):
                self._give_up("an input is no tensor")
            return self.run(inputs)
        with self._lock:
            return self._from_capture(inputs)

    def watched(self, inputs: Sequence[Any], watch: Any) -> Executable:
        """A function that runs the program uncaptured, its k-th step within `watch(k)`."""
        return self.run.watched(inputs, watch)  # type: ignore[attr-defined, no-any-return]

    def _from_capture(self, inputs: list[Any]) -> list[Any]:
        addresses = (*(inputs[k].data_ptr() for k in self.fixed), self._stream())
        known = next((r for r in self._captures if r.addresses == addresses), None)
        if known is None:
            obstacle = self._obstacle(inputs)
            if obstacle:
                self._give_up(obstacle)
                return self.run(inputs)
            try:
                known = self._captured(addresses, inputs)
            except RuntimeError as error:
                reason, *_ = str(error).splitlines() or [type(error).__name__]
                self._give_up(f"it cannot be captured: {reason}")
                return self.run(inputs)
        return self._replayed(known, inputs)

    def _stream(self) -> int:
        if self.device.type == HOST:
            return 0
        return current_stream(index_of(self.device))

    def _obstacle(self, inputs: Sequence[Any]) -> str:
        """The reason why a run with these inputs cannot be captured; empty if it can."""
        if len(self._captures) >= MAX_CAPTURES:
            return "parameters or tensors written in place lie elsewhere on every call"
        for position in _tensors(self.program):
            if position not in self.fixed and _overlaps(inputs[position]):
                return f"elements of input {position} share memory"
        return ""

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self._captures.clear()
        message = f"a graph is launched kernel by kernel, not as one device graph: {reason}"
        warnings.warn(FallbackWarning(message), stacklevel=3)

    def _captured(self, addresses: tuple[int, ...], inputs: Sequence[Any]) -> Capture:
        copied = [k for k in _tensors(self.program) if k not in self.fixed]
        buffers = {k: _copy(inputs[k]) for k in copied}
        arguments = [buffers.get(k, value) for k, value in enumerate(inputs)]
        replay, outputs = self.record(lambda: self.captured(list(arguments)), self.device)
        capture = Capture(addresses, buffers, replay, outputs)
        self._captures.append(capture)
        return capture

    def _replayed(self, capture: Capture, inputs: list[Any]) -> list[Any]:
        for position, buffer in capture.buffers.items():
            buffer.copy_(inputs[position])
        capture.replay()
        results = [
            _result(value, aliased, inputs)
            for value, aliased in zip(capture.outputs, self.aliased, strict=True)
        ]
        inputs.clear()
        return results


def _aliased_input(program: Mapping[str, Any], output: Any) -> tuple[int, int] | None:
    """The position of the input whose memory an output shows, and the bytes before it there."""
    location = location_of(program["buffers"], output["ref"]) if is_ref(output) else None
    if location is None or program["buffers"][location.root]["role"] != "input":
        return None
    return program["inputs"].index(location.root), location.offset or 0


def _result(value: Any, aliased: tuple[int, int] | None, inputs: Sequence[Any]) -> Any:
    """The result to return: a copy, or a view of the input if the output aliases an input."""
    if not isinstance(value, torch.Tensor):
        return value
    if aliased is None:
        return _copy(value)
    source, offset = inputs[aliased[0]], aliased[1] // value.element_size()
    return source.as_strided(value.shape, value.stride(), source.storage_offset() + offset)


def _tensors(program: Mapping[str, Any]) -> list[int]:
    """Positions of inputs that are tensors."""
    return [k for k, slot in enumerate(program["inputs"]) if slot is not None]


def _written_inputs(program: Mapping[str, Any]) -> set[int]:
    """Positions of inputs that a kernel stores into."""
    slots = {slot for step in program["steps"] for slot in step.get("writes", ())}
    roots = {location_of(program["buffers"], slot).root for slot in slots}
    return {k for k, slot in enumerate(program["inputs"]) if slot in roots}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, gaps and overlaps included: the program was compiled for those
    of its inputs, and the program of the gradients for those of results that are saved."""
    if _overlaps(tensor):
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        whole = tensor.as_strided((1 + sum((n - 1) * step for n, step in steps),), (1,))
        return whole.clone().as_strided(tensor.shape, tensor.stride())
    copy = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return copy.copy_(tensor)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, so that PyTorch copies no tensor into such a layout."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < extent:
            return True
        extent += (size - 1) * stride
    return False
