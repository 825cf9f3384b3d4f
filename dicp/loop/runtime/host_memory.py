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

    Results keep at most `bound` bytes, until no run has used them for IDLE_SECONDS. Workspaces keep
    at most MAX_KEPT bytes; a block over that is freed after its run, as eager does.
    """

    def __init__(self, bound: int | None = None) -> None:
        self.bound = memory_bytes() // KEPT_SHARE if bound is None else bound
        self.period = 0
        """How many times idle memory was released."""
        self.kept = 0
        """Bytes of all results' memory."""
        self._free: list[torch.Tensor] = []
        self._results: weakref.WeakSet[ReusedResult] = weakref.WeakSet()
        self._lock = threading.RLock()  # a result may be collected while the same thread holds it
        self._releaser: threading.Thread | None = None

    # ---- workspaces: each is lent to one run at a time ------------------------------------------

    def take(self, size: int) -> torch.Tensor:
        block = reused(self._free, size)
        return torch.empty(size, dtype=torch.uint8) if block is None else block

    def give(self, block: torch.Tensor) -> None:
        if is_kept(block, self._free, 4, MAX_KEPT):
            self._free.append(block)
        else:
            release(block)

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
            if self._releaser is None or not self._releaser.is_alive():  # a fork has no threads
                self._releaser = threading.Thread(
                    target=_release_periodically, args=(weakref.ref(self),), daemon=True
                )
                self._releaser.start()
        return True

    def forget(self, nbytes: int) -> None:
        with self._lock:
            self.kept -= nbytes

    def release_idle(self) -> bool:
        """Release what no run has used for a whole period; whether anything is kept still."""
        with self._lock:
            self.period += 1
            for result in list(self._results):
                if result.used < self.period - 1:
                    result.release()
            if not self.kept:
                self._releaser = None
            return self.kept > 0


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
