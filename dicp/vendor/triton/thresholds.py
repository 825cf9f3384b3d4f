"""The tuned constants of Triton kernels that the GPU room does not give.

Found on an NVIDIA H200; sizes of tiles, splits and launches stand in `dicp/gpu/thresholds.py`.
"""

from __future__ import annotations

STARTED_AHEAD = 4
"""Compile workers that are started before the kernels are known; more are started when needed."""
MAX_PROGRAMS = 3
"""Blocks per axis of a launch that the interpreter runs: several, but no more, to save time."""
MAX_BLOCK, MAX_TILE_ELEMENTS = 1 << 16, 1 << 20
"""Most elements of a block's axis in the interpreter, and of a tile that Triton takes."""
