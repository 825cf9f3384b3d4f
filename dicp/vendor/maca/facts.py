"""Hardware facts of MetaX's GPUs, by which blocks are chosen."""

from __future__ import annotations

import torch

from dicp.gpu.facts import DeviceFacts

GPU = DeviceFacts(
    lanes=64,
    multiprocessors=104,
    programs_per_multiprocessor=4,
    prefetch_bytes=32 * 1024,
    atomic_dtypes=frozenset({torch.float32, torch.float64, torch.int32, torch.int64}),
)
"""A C500 has 104 multiprocessors; a block has at most 64 KiB of shared memory."""

DTYPES = frozenset(
    {
        torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.uint8,
        torch.int8, torch.int16, torch.int32, torch.int64,
    }
)  # fmt: skip
