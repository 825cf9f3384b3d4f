"""Compiled graphs in device memory: loaded at their first run, unloaded with their last
reference."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable


class LoadedGraph:
    """A compiled graph, loaded once on each device; unloaded with the last reference."""

    def __init__(self, unload: Callable[[int], None]) -> None:
        self._unload = unload
        self._handles: dict[int, int] = {}
        self._lock = threading.Lock()

    def handle_on(self, device: int, load: Callable[[], int]) -> int:
        """The graph's handle on a device, by `load` where it is not there yet."""
        with self._lock:
            if device not in self._handles:
                self._handles[device] = load()
                finalizer = weakref.finalize(self, self._unload, self._handles[device])
                finalizer.atexit = False
            return self._handles[device]
