"""Capturing a run as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def record_on_device(
    run: Callable[[], list[Any]], device: torch.device
) -> tuple[Callable[[], None], list[Any]]:
    """The work that `run` puts on the stream, recorded but not done, and where results will lie.

    Raises RuntimeError where the driver does not record some of it.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        before = torch.cuda.current_stream()
        try:
            # A stream of this device: PyTorch's own choice is of the first that recorded.
            # Relaxed: a kernel may have to be loaded for the alignment of the recording's buffers.
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="relaxed"):
                outputs = run()
        except RuntimeError:
            # A recording that fails leaves the stream as it was in it, and the random state
            # waiting for its end.
            torch.cuda.set_stream(before)
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            raise
    return graph.replay, outputs
