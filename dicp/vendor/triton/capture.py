"""Captures a run as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
