"""Hardware facts of the NVIDIA GPUs that tile sizes are chosen for."""

from __future__ import annotations

import torch

from dicp.gpu.facts import DeviceFacts

GPU = DeviceFacts(
    lanes=32,
    multiprocessors=128,
    programs_per_multiprocessor=4,
    prefetch_bytes=80 * 1024,
    atomic_dtypes=frozenset({torch.float32, torch.float64, torch.int32, torch.int64}),
)
"""An A100 has 108 multiprocessors, an H100 132 with 228 KiB of shared memory each (CUDA programming
guide, table of technical specifications)."""
