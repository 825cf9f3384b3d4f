"""What a profiler sees of a program: kernels under the user's frames, with their workspace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from dicp.loop.schedule.placement import Placement, Step
from dicp.origin import in_user_frames, lines_of, profiled_name
from dicp.torch_private import profiled_range, report_memory

T = TypeVar("T")


class ProfiledSteps:
    """Runs a program's steps in ranges of the profiler.

    Workspace is one block, allocated once. The part that a kernel is the first to write is reported
    as allocated in the kernel's range, and as freed after the range of the last kernel that reads
    it.
    """

    def __init__(self, placement: Placement, addresses: Any, device: torch.device) -> None:
        self.placement, self.addresses, self.device = placement, addresses, device
        self._numbers = {id(step): k for k, step in enumerate(placement.steps)}
        self._made: defaultdict[int, list[int]] = defaultdict(list)
        self._freed: defaultdict[int, list[int]] = defaultdict(list)
        for slot in placement.workspace.offsets:
            self._made[placement.first_use[slot]].append(slot)
            self._freed[placement.last_use[slot]].append(slot)

    def run(self, step: Step, run: Callable[[], T]) -> T:
        """Run a step, a kernel or a library call, which has a range of its own in PyTorch."""
        number = self._numbers[id(step)]

        def with_memory() -> T:
            self._report(self._made[number], 1)
            return run()

        context = self._range(step) if "kernel" in step else nullcontext()
        result = in_user_frames(step["origins"], context, with_memory)
        self._report(self._freed[number], -1)
        return result

    def _report(self, slots: Sequence[int], sign: int) -> None:
        for slot in slots:
            nbytes = self.placement.buffers[slot].nbytes
            if nbytes:
                report_memory(self.addresses[slot] or 0, sign * nbytes, self.device)

    def _range(self, step: Step) -> AbstractContextManager[Any]:
        """A kernel's range: shapes of what it reads, its operators and the user's lines."""
        buffers = self.placement.buffers
        read = [buffers[slot] for slot in step["args"] if slot not in step["writes"]]
        inputs = [torch.empty_strided(b.shape, b.strides, dtype=b.dtype, device="meta")
                  for b in read]  # fmt: skip
        operators = [origin.op for origin in dict.fromkeys(step["origins"])]
        known = {"operators": ", ".join(operators), "source": lines_of(step["origins"])}
        return profiled_range(profiled_name(step["kernel"], step["origins"]), inputs, known)
