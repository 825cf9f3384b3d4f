"""Devices: their streams, the recording of work on them, and PrivateUse1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

HOST: Final = "cpu"
"""PyTorch's device type of host memory."""
privateuse1_name = torch._C._get_privateuse1_backend_name
register_device_module = torch._register_device_module


def actual_device_type(kind: str) -> str:
    """The device type behind a name: a registered device may answer to the name of another."""
    module = getattr(torch, privateuse1_name(), None)
    return str(getattr(module, "answers_to", {}).get(kind, kind))


def current_stream(device: int) -> int:
    """The handle of a GPU's current stream, without creating a Python object for it."""
    return int(torch._C._cuda_getCurrentRawStream(device))  # type: ignore[attr-defined]


def queued_work(tensors: list[torch.Tensor]) -> Any:
    """A `Work` of what the current stream has to do before it reaches the results `tensors`.

    Waiting makes the current stream of that time wait. For kernels of `torch.ops.c10d`.
    """
    future = torch.futures.Future(devices=[tensors[0].device])
    future.set_result(tensors)
    return torch._C._distributed_c10d._create_work_from_future(future).boxed()


def capturing() -> bool:
    """Whether the GPU's current stream is being captured into a graph, to be replayed later."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def record_on_device(
    run: Callable[[], list[Any]], device: torch.device
) -> tuple[Callable[[], None], list[Any]]:
    """Records the work that `run` puts on the stream, without executing it.

    Returns the replay function and the results, which replays fill. Raises RuntimeError if the
    driver cannot record some of the work.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        before = torch.cuda.current_stream()
        try:
            # A stream of this device: PyTorch's default stream is of the first that recorded.
            # Relaxed: a kernel may have to be loaded for the alignment of the recording's buffers.
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="relaxed"):
                outputs = run()
        except RuntimeError:
            # A failed recording leaves its stream current and the random generator waiting for
            # the end of the recording.
            torch.cuda.set_stream(before)
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            raise
    return graph.replay, outputs
