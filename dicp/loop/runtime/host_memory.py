"""Host memory that runs reuse: workspaces, and results that no tensor holds any more.

glibc returns the free end of its heap to the kernel, which clears every page again when the next
run writes it: 1.6 us for 4 KiB on a virtual machine, longer than most kernels need for as many
bytes. The same result of the next run takes the same memory here, if nothing holds it by then.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

import torch

from dicp.loop.runtime.device import is_kept, release, reused
from dicp.loop.schedule.placement import Buffer
from dicp.loop.thresholds import IDLE_SECONDS, KEPT_SHARE, MAX_KEPT, MIN_REUSED
from dicp.machine import memory_bytes
from dicp.torch_private import empty_strided_cpu, reinterpret_tensor, storage_use_count


class HostMemory:
    """Lends workspaces to runs, and reuses the memory of results.

    Results keep at most `bound` bytes, until no run has used them for IDLE_SECONDS. So do
    workspaces over MAX_KEPT bytes, from the second request of as many bytes on: the first may be
    the only one. Smaller workspaces keep at most MAX_KEPT bytes.
    """

    def __init__(self, bound: int | None = None) -> None:
        self.bound = memory_bytes() // KEPT_SHARE if bound is None else bound
        self.period = 0
        """How many times idle memory was released."""
        self.kept = 0
        """Bytes of all results' memory."""
        self._free: list[torch.Tensor] = []
        self._large: list[torch.Tensor] = []
        """Workspaces over MAX_KEPT bytes that no run uses."""
        self._most_taken = self._most_freed = 0
        """Bytes of the largest workspace that was taken in this period, and that was ever freed."""
        self._results: weakref.WeakSet[ReusedResult] = weakref.WeakSet()
        self._lock = threading.RLock()  # a result may be collected while the same thread holds it
        self._releaser: threading.Thread | None = None

    # ---- workspaces: each is lent to one run at a time ------------------------------------------

    def take(self, size: int) -> torch.Tensor:
        self._most_taken = max(self._most_taken, size)
        block = reused(self._large if size > MAX_KEPT else self._free, size)
        return torch.empty(size, dtype=torch.uint8) if block is None else block

    def give(self, block: torch.Tensor) -> None:
        size = block.numel()
        if size <= MAX_KEPT:
            kept, bound = self._free, MAX_KEPT
        else:
            kept, bound = self._large, self.bound if size <= self._most_freed else 0
        if not is_kept(block, kept, 4, bound):
            self._most_freed = max(self._most_freed, size)
            release(block)
            return
        kept.append(block)
        if kept is self._large:
            self._start_releaser()

    # ---- results --------------------------------------------------------------------------------

    def result(self, buffer: Buffer) -> Callable[[], torch.Tensor]:
        """A function that allocates `buffer` for each run of one plan."""
        fresh = partial(empty_strided_cpu, buffer.shape, buffer.strides, buffer.dtype)
        return ReusedResult(self, buffer, fresh) if buffer.nbytes >= MIN_REUSED else fresh

    def keep(self, result: ReusedResult, nbytes: int) -> bool:
        """Count `nbytes` more as kept by `result`, unless that exceeds the bound."""
        with self._lock:
            if self.kept + nbytes > self.bound:
                return False
            self.kept += nbytes
            self._results.add(result)
            self._start_releaser()
        return True

    def forget(self, nbytes: int) -> None:
        with self._lock:
            self.kept -= nbytes

    def release_idle(self) -> bool:
        """Release what no run has used for a whole period, and workspaces over twice the largest
        that a run took in it; whether anything is kept still."""
        with self._lock:
            self.period += 1
            for result in list(self._results):
                if result.used < self.period - 1:
                    result.release()
            still_used = []
            while (block := reused(self._large, 0)) is not None:
                if block.numel() <= 2 * self._most_taken:
                    still_used.append(block)
                else:
                    release(block)
            self._large += still_used
            self._most_taken = 0
            if not (self.kept or self._large):
                self._releaser = None
            return self._releaser is not None

    def _start_releaser(self) -> None:
        with self._lock:
            if self._releaser is None or not self._releaser.is_alive():  # a fork has no threads
                self._releaser = threading.Thread(
                    target=_release_periodically, args=(weakref.ref(self),), daemon=True
                )
                self._releaser.start()


class ReusedResult:
    """Allocates one result of a plan in the memory of an earlier run's, if nothing holds that.

    The result of a plan's first run is not kept: the plan may not run again. Two are kept where the
    caller holds one while the next run allocates another, as in `y = f(x)` in a loop.
    """

    MAX_KEPT = 2

    def __init__(
        self, memory: HostMemory, buffer: Buffer, fresh: Callable[[], torch.Tensor]
    ) -> None:
        self.memory, self.nbytes, self.fresh = memory, buffer.nbytes, fresh
        self.used = memory.period
        self._layout = (buffer.shape, buffer.strides, 0)
        self._first = True
        self._kept: list[_Kept] = []

    def __call__(self) -> torch.Tensor:
        self.used = self.memory.period
        for kept in self._kept:
            if kept.is_free():
                reused: torch.Tensor = reinterpret_tensor(kept.tensor, *self._layout)
                return reused
        fresh = self.fresh()
        if self._first:
            self._first = False
            return fresh
        self.release(keep=self.MAX_KEPT - 1)
        if self.memory.keep(self, self.nbytes):
            self._kept.append(_Kept(fresh))
            fresh = reinterpret_tensor(fresh, *self._layout)
        return fresh

    def release(self, keep: int = 0) -> None:
        """Drop all but the last `keep` tensors; who holds their memory still may go on."""
        with self.memory._lock:
            dropped = len(self._kept) - keep
            if dropped > 0:
                self._kept = self._kept[dropped:]
                self.memory.forget(dropped * self.nbytes)

    def __del__(self) -> None:
        self.release()


class _Kept:
    """A tensor and its storage, which callers share through other tensors."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.storage = tensor, tensor.untyped_storage()
        self._address, self._nbytes = self.storage.data_ptr(), self.storage.nbytes()
        self._alone = self._references()

    def _references(self) -> int:
        """References to the storage in C++ and in Python: a caller adds to one of the two."""
        return storage_use_count(self.storage) + sys.getrefcount(self.storage)

    def is_free(self) -> bool:
        """Whether no caller holds the memory, nor has resized the storage or shared it with another
        process, which moves it."""
        moved = (self.storage.data_ptr(), self.storage.nbytes()) != (self._address, self._nbytes)
        return not moved and self._references() == self._alone


def _release_periodically(memory: weakref.ref[HostMemory]) -> None:
    while True:
        time.sleep(IDLE_SECONDS)
        held = memory()
        if held is None or not held.release_idle():
            return
        del held
