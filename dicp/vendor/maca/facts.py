"""Hardware facts of MetaX's GPUs, by which blocks are chosen."""

from __future__ import annotations

from dataclasses import replace

import torch

from dicp.gpu.facts import DeviceFacts

GPU = DeviceFacts(
    lanes=64,
    multiprocessors=104,
    programs_per_multiprocessor=4,
    prefetch_bytes=32 * 1024,
    atomic_dtypes=frozenset({torch.float32, torch.float64, torch.int32, torch.int64}),
)
"""What blocks are chosen for on a C500. The 64 lanes are documented; the other numbers are assumed
until a chip is measured, and change speed alone."""

MIN_WAVE = 32
"""Lanes of the smallest wave that kernels run with; launches count threads in these."""


def facts_for(nvidia: int) -> DeviceFacts:
    """The facts by which blocks are chosen; `nvidia`: kernels run on such a GPU (`maca_nvidia`)."""
    return replace(GPU, lanes=MIN_WAVE) if nvidia else GPU


DTYPES = frozenset(
    {
        torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.uint8,
        torch.int8, torch.int16, torch.int32, torch.int64,
    }
)  # fmt: skip
