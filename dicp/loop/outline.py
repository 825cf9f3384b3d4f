"""The outline of a loop program: its kernels, calls, buffers and memory plan at known sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dicp.effects import is_mutating
from dicp.loop.schedule.placement import Placement, Step, refs
from dicp.outline import Access, MemoryOwner, Outline, OutlineStep, StepKind, Tensor
from dicp.serialize import resolve_operator
from dicp.torch_private import schema_of


def outline(program: Mapping[str, Any], sizes: Mapping[str, int]) -> Outline:
    """The outline of `LoopProgram.serialized` where its symbols have `sizes`.

    Raises NameError for a size that is known only at run time.
    """
    return _Outliner(Placement(program, sizes)).outline()


class _Outliner:
    def __init__(self, placement: Placement) -> None:
        self.place = placement
        roots = [slot for slot, buffer in enumerate(placement.buffers) if buffer.base is None]
        self.numbers = {slot: number for number, slot in enumerate(roots)}
        self.results = set(map(placement.root, placement.results))
        self.seen = {placement.root(slot) for _, slot in placement.inputs}

    def outline(self) -> Outline:
        steps = [self._step(k, step) for k, step in enumerate(self.place.steps)]
        tensors = [self._tensor(slot) for slot in self.numbers]
        return Outline(steps, tensors, self.place.workspace.total)

    def _tensor(self, slot: int) -> Tensor:
        place, buffer = self.place, self.place.buffers[slot]
        lasting = slot in self.results or buffer.role in ("input", "constant")
        end = len(place.steps)
        return Tensor(
            buffer.name,
            str(buffer.dtype).removeprefix("torch."),
            buffer.shape,
            buffer.nbytes,
            self._where(slot),
            -1 if buffer.role in ("input", "constant") else place.first_use.get(slot, 0),
            end if lasting else place.last_use.get(slot, 0),
            slot in self.results,
            place.workspace.offsets.get(slot),
        )

    def _where(self, slot: int) -> MemoryOwner:
        role = self.place.buffers[slot].role
        if role == "constant":
            return "constant"
        if role == "input":
            return "caller"
        if slot in self.place.workspace.offsets:
            return "workspace"
        return "call" if slot in self.place.from_call else "allocation"

    def _step(self, number: int, step: Step) -> OutlineStep:
        kind: StepKind
        if "kernel" in step:
            name, kind, writes = step["kernel"], "kernel", list(step["writes"])
            reads = [slot for slot in step["args"] if slot not in writes]
        else:
            call = step["call"]
            name = call if isinstance(call, str) else "subgraph"
            kind = "eager" if step["kind"] == "eager" else "library"
            reads = refs((step["args"], step["kwargs"]))
            writes = [*step["outs"], *_overwritten(step)]
        # What is written over is read too: kernels combine with it or update it in place.
        reads += [slot for slot in writes if self.place.root(slot) in self.seen]
        self.seen |= set(map(self.place.root, writes))
        origins = tuple(step["origins"])
        return OutlineStep(
            name, kind, number, self._accesses(reads), self._accesses(writes), origins
        )

    def _accesses(self, slots: Iterable[int]) -> tuple[Access, ...]:
        """The bytes of each tensor that these views show, at most all of it."""
        found: dict[int, int] = {}
        for slot in dict.fromkeys(slots):
            root = self.place.root(slot)
            found[root] = found.get(root, 0) + self.place.buffers[slot].nbytes
        whole = self.place.buffers
        return tuple(
            Access(self.numbers[root], min(nbytes, whole[root].nbytes))
            for root, nbytes in found.items()
        )


def _overwritten(call: Step) -> list[int]:
    """The tensors among a call's arguments that its operator writes to."""
    op = resolve_operator(call["call"]) if isinstance(call["call"], str) else None
    if op is None or not is_mutating(op):
        return []
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema_of(op).arguments]
    return [slot for arg, is_written in zip(call["args"], written, strict=False)
            if is_written for slot in refs(arg)]  # fmt: skip
