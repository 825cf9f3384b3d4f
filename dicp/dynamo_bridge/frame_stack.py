"""A chunk of CPython's frame stack that is large enough for a whole compilation.

CPython 3.11 and later keep the frames of Python functions in chunks of 16 KiB. A call that does not
fit into the current chunk maps a new one, and its return unmaps it (`push_chunk` and
`_PyThreadState_PopFrame` in Python/pystate.c). Compilation runs below some hundred frames of the
program, Dynamo and AOTAutograd; if these end near the end of a chunk, most calls of the compiler
map and unmap memory, which doubles its time. A frame larger than a chunk gets a chunk of its own,
of the next power of two, and the rest of that chunk holds the frames below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

_SLOTS: Final = 1 << 16
"""Pointers on the stack of one frame: 512 KiB, never written, in a chunk of 1 MiB."""


def in_own_chunk(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, with its frames and those of all it calls in one chunk."""
    return function(*args)


in_own_chunk.__code__ = in_own_chunk.__code__.replace(co_stacksize=_SLOTS)
