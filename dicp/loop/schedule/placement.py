"""Where each buffer of a program lives, for one set of sizes: integers only, no tensors yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dicp.loop.schedule.memory import Lifetime, plan
from dicp.loop.thresholds import FREED_AT_ONCE
from dicp.serialize import evaluate_size

Step = Mapping[str, Any]
"""A kernel launch or a library call, serialized."""


@dataclass(frozen=True)
class Buffer:
    name: str
    role: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    base: int | None

    @property
    def extent(self) -> int:
        """Elements of memory from the first to the last used, both included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((s - 1) * t for s, t in zip(self.shape, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        return self.extent * self.dtype.itemsize


@dataclass
class StepGroup:
    """Consecutive kernels that run in one native call, or one library call."""

    fresh: list[int] = field(default_factory=list)
    """Buffers allocated before it runs."""
    dead: list[int] = field(default_factory=list)
    """Buffers not used after it."""
    launches: list[Step] = field(default_factory=list)
    call: Step | None = None


class Placement:
    """The buffers of a program and their owners: the caller, workspace, an allocation or a call."""

    def __init__(self, program: Mapping[str, Any], symbols: Mapping[str, int]) -> None:
        self.steps: list[Step] = program["steps"]
        self.buffers = [
            Buffer(
                b["name"],
                b["role"],
                getattr(torch, b["dtype"]),
                tuple(evaluate_size(s, symbols) for s in b["shape"]),
                tuple(evaluate_size(s, symbols) for s in b["strides"]),
                evaluate_size(b["offset"], symbols),
                b["base"],
            )
            for b in program["buffers"]
        ]
        self.inputs = [(k, slot) for k, slot in enumerate(program["inputs"]) if slot is not None]
        self.results = [o["ref"] for o in program["outputs"] if is_ref(o)]
        self.calls = [step for step in self.steps if "call" in step]
        self.launches = [step for step in self.steps if "kernel" in step]
        self.launched = {slot for step in self.launches for slot in step["args"]}
        """Buffers that kernels read and write by address."""
        by_kernels = {self.root(slot) for slot in self.launched}
        self.kernel_inputs = [k for k, slot in self.inputs if slot in by_kernels]
        """Positions of the inputs that kernels address, themselves or through views."""
        self.addressed = by_kernels | {b.base for b in self.buffers if b.base is not None}
        """Buffers that kernels or views address: their sizes must be those compiled for."""
        self.from_call = {s for c in self.calls if not c["into"] for s in c["outs"]}
        self.first_use, self.last_use = self._uses()
        self._own()
        self.aliases = self._alias_offsets()
        self.allocated_as = self._allocated_as()
        self.allocated_views = frozenset(self.allocated_as.values())

    # ---- views ----------------------------------------------------------------------------------

    def chain(self, slot: int) -> Iterator[int]:
        """`slot`, its base, and so on up to the root."""
        at: int | None = slot
        while at is not None:
            yield at
            at = self.buffers[at].base

    def root(self, slot: int) -> int:
        return list(self.chain(slot))[-1]

    def offset(self, slot: int) -> int:
        """Elements from the start of its root; every view has the dtype of its root."""
        met = [self.buffers[s] for s in self.chain(slot)]
        return sum(b.offset for b in met if b.base is not None)

    def through_call(self, slot: int) -> bool:
        """Whether `slot` is a view of something a library call returned."""
        return any(s in self.from_call for s in self.chain(slot))

    def _alias_offsets(self) -> dict[int, list[tuple[int, int]]]:
        """Buffer -> its views that kernels take as arguments, each with its offset in bytes."""
        found: dict[int, list[tuple[int, int]]] = {}
        for slot in self.launched:
            offset = 0
            for at in self.chain(slot):
                if at != slot:
                    found.setdefault(at, []).append((slot, offset))
                offset += self.buffers[at].offset * self.buffers[at].dtype.itemsize
        return found

    def _allocated_as(self) -> dict[int, int]:
        """Allocation -> a view of all of it, where results and calls use that view alone.

        It is allocated as that view, which saves creating one tensor at every run.
        """
        taken: dict[int, set[int]] = {}
        for slot in [*self.results, *(s for call in self.calls for s in _refs_of(call))]:
            taken.setdefault(self.root(slot), set()).add(slot)
        found = {}
        for slot in self.fresh:
            views = taken.get(slot, set())
            if len(views) == 1 and slot not in views:
                (view,) = views
                seen, whole = self.buffers[view], self.buffers[slot]
                if (seen.dtype, seen.extent, self.offset(view)) == (whole.dtype, whole.extent, 0):
                    found[slot] = view
        return found

    # ---- owners ---------------------------------------------------------------------------------

    def _uses(self) -> tuple[dict[int, int], dict[int, int]]:
        """The steps at which each root is first and last used."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for k, step in enumerate(self.steps):
            for slot in step["args"] if "kernel" in step else _refs_of(step):
                root = self.root(slot)
                first.setdefault(root, k)
                last[root] = k
        return first, last

    def _own(self) -> None:
        """Split the program's own buffers into allocations and workspace.

        Results and arguments of eager calls may outlive a run: each is an allocation of its own.
        """
        returned = set(map(self.root, self.results))
        eager = [call for call in self.calls if call["kind"] == "eager"]
        pinned = {self.root(s) for c in eager for s in refs((c["args"], c["kwargs"]))}
        owned = [
            slot for slot, b in enumerate(self.buffers)
            if b.role == "temp" and b.base is None and slot not in self.from_call
        ]  # fmt: skip
        self.fresh = [s for s in owned if s in returned or s in pinned]
        fresh = set(self.fresh)
        self.workspace = plan(
            [
                Lifetime(s, self.buffers[s].nbytes, self.first_use[s], self.last_use[s])
                for s in owned if s not in fresh and s in self.first_use
            ]
        )  # fmt: skip

    # ---- order ----------------------------------------------------------------------------------

    def step_groups(self) -> list[StepGroup]:
        """The steps in groups: consecutive kernels, or one library call.

        Memory is allocated before the group that first uses it, and freed after the last.
        """
        needed: dict[int, list[int]] = {}
        for slot in self.fresh:
            needed.setdefault(self.first_use.get(slot, 0), []).append(slot)
        dying = self._last_readers()
        groups = [StepGroup(needed.get(0, []))]
        for k, step in enumerate(self.steps):
            fresh, dead = needed.get(k, []) if k else [], dying.get(k, [])
            last = groups[-1]
            if "call" in step:
                groups.append(StepGroup(fresh, dead, call=step))
                continue
            if last.call or sum(self.buffers[s].nbytes for s in last.dead) >= FREED_AT_ONCE:
                last = StepGroup()
                groups.append(last)
            last.fresh = last.fresh + fresh
            last.dead = last.dead + dead
            if any(self.buffers[s].extent for s in step["writes"]):
                last.launches.append(step)
        return groups

    def _last_readers(self) -> dict[int, list[int]]:
        """Step -> inputs, call results and allocations last used by it, except run results."""
        kept = set(map(self.root, self.results))
        movable = {slot for _, slot in self.inputs} | self.from_call | set(self.fresh)
        dying: dict[int, list[int]] = {}
        for slot in movable:
            last = self.last_use.get(self.root(slot))
            if last is not None and self.root(slot) not in kept:
                dying.setdefault(last, []).append(slot)
        return dying


def is_ref(plain: Any) -> bool:
    """Whether a serialized argument is a buffer."""
    return isinstance(plain, dict) and "ref" in plain


def refs(plain: Any) -> list[int]:
    """The buffers that a serialized argument refers to."""
    if is_ref(plain):
        return [plain["ref"]]
    if isinstance(plain, dict):
        return [s for v in plain.values() for s in refs(v)]
    if isinstance(plain, (list, tuple)):
        return [s for v in plain for s in refs(v)]
    return []


def _refs_of(call: Step) -> list[int]:
    return [*refs((call["args"], call["kwargs"])), *call["outs"]]
