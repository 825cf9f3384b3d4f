"""The limits of kernels in C-family languages. They hold on every machine that the tests ran on."""

from __future__ import annotations

LINE_BYTES = 64
"""Bytes of a cache line: a non-temporal store of whole lines does not read them first."""
STACK_BYTES = 1 << 16
"""The most one kernel's arrays take of a thread's stack, which may be as small as 512 KiB."""
