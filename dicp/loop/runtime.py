"""Running a loop program: bind sizes, plan memory, launch kernels and library calls.

For each set of sizes a `_Bound` plan is made once: every stride, offset and argument list in it is
a plain number, so that a run only fills in addresses and walks the steps.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from dicp.errors import IndexOutOfBoundsError, InputMismatchError, IntegerDivisionByZeroError
from dicp.loop.memory import Lifetime, plan
from dicp.plain import (
    callable_of,
    decode_argument,
    decode_constant,
    evaluate_size,
    resolve_operator,
)
from dicp.torch_private import (
    disable_current_modes,
    empty_strided_cpu,
    profiling,
    reinterpret_tensor,
)

MAX_BOUND_PLANS = 64

FREED_AT_ONCE = 1 << 20
"""Bytes that nobody reads any more at which consecutive kernels are cut in two to free them.

What is allocated after the cut can lie where they were. A cut costs a few microseconds.
"""


RunStep = Callable[[list[Any]], None]


class Launch(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_void_p),
        ("slots", ctypes.POINTER(ctypes.c_int32)),
        ("count", ctypes.c_int64),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
    ]


class Segment(Protocol):
    """Consecutive kernels, bound to the addresses in a table.

    Both return 0, or one more than the position of the kernel that reported an error.
    """

    def run(self) -> int: ...

    def run_one(self, position: int) -> int: ...


class Machine(Protocol):
    """What a device brings: its kernels, ready to be launched."""

    def segment(
        self,
        launches: Sequence[Mapping[str, Any]],
        symbols: Mapping[str, int],
        table: Any,
        status: Any,
    ) -> Segment:
        """`launches` as one step; addresses are read from `table` at every run."""


@dataclass(frozen=True)
class Native:
    """The host: kernel entry points by name, and the function that runs a segment."""

    functions: Mapping[str, int]
    run_segment: Callable[..., int]

    def segment(
        self,
        launches: Sequence[Mapping[str, Any]],
        symbols: Mapping[str, int],
        table: Any,
        status: Any,
    ) -> Segment:
        array = (Launch * len(launches))()
        keep: list[Any] = []
        for entry, step in zip(array, launches, strict=True):
            slots = (ctypes.c_int32 * len(step["args"]))(*step["args"])
            sizes = (ctypes.c_int64 * max(len(step["symbols"]), 1))(
                *(evaluate_size(s, symbols) for s in step["symbols"])
            )
            keep += [slots, sizes]
            entry.function = self.functions[step["kernel"]]
            entry.slots = ctypes.cast(slots, ctypes.POINTER(ctypes.c_int32))
            entry.sizes = ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64))
            entry.count = len(step["args"])
        return _HostSegment(self.run_segment, array, table, status, keep)


class _HostSegment:
    """One native call for all kernels of a segment; plain addresses are its cheapest arguments."""

    def __init__(self, run: Any, array: Any, table: Any, status: Any, keep: list[Any]) -> None:
        at, fixed = ctypes.addressof, (ctypes.addressof(table), ctypes.addressof(status))
        self.run: Callable[[], int] = partial(run, at(array), len(array), *fixed)
        self._one = lambda k: run(at(array[k]), 1, *fixed)
        self._keep = [*keep, array, table, status]

    def run_one(self, position: int) -> int:
        return int(self._one(position))


class WorkspacePool:
    """Blocks of memory lent to one running graph at a time and used again by the next."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, size: int) -> torch.Tensor:
        for k in range(len(self._free) - 1, -1, -1):
            try:
                block = self._free.pop(k)
            except IndexError:
                continue
            if block.numel() >= size:
                return block
        return torch.empty(size + 64, dtype=torch.uint8)

    def give(self, block: torch.Tensor) -> None:
        if len(self._free) < 4:
            self._free.append(block)


class Pool(Protocol):
    """Lends blocks of the device's memory."""

    def take(self, size: int) -> torch.Tensor: ...

    def give(self, block: torch.Tensor) -> None: ...


class LoopExecutable:
    """A loaded loop program: called with a list of inputs, returns a list of outputs."""

    def __init__(
        self,
        program: Mapping[str, Any],
        machine: Machine,
        pool: Pool,
        objects: Sequence[Any] = (),
    ) -> None:
        self.program = program
        self.machine = machine
        self.device = torch.device(program.get("device", "cpu"))
        self.pool = pool
        self.objects = objects
        with disable_current_modes():  # loading happens while the framework traces
            self.constants = {
                name: objects[c["object"]] if "object" in c else decode_constant(c)
                for name, c in program["constants"].items()
            }
        self._sources = list(program["symbols"].values())
        self._names = list(program["symbols"])
        self._plans: OrderedDict[tuple[int, ...], list[_Bound]] = OrderedDict()

    def __call__(self, inputs: list[Any]) -> list[Any]:
        key = self._sizes(inputs) if self._sources else ()
        idle = self._plans.get(key)
        if idle is None:
            idle = self._plans[key] = []
            if len(self._plans) > MAX_BOUND_PLANS:
                self._plans.popitem(last=False)
        try:
            bound = idle.pop()
        except IndexError:
            bound = self._bind(key, inputs)
        try:
            return bound.run(inputs)
        finally:
            idle.append(bound)

    def _sizes(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """The values of the program's symbols."""
        return tuple(
            inputs[s[0]] if len(s) == 1 else inputs[s[0]].shape[s[1]] for s in self._sources
        )

    def _bind(self, key: tuple[int, ...], inputs: Sequence[Any]) -> _Bound:
        """A plan of its own for each run under way: threads may share an executable."""
        bound = _Bound(self, dict(zip(self._names, key, strict=True)))
        bound.check(inputs)
        return bound


@dataclass
class _Buffer:
    name: str
    role: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    base: int | None

    @property
    def extent(self) -> int:
        """Elements of memory from the first to the last, both included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((s - 1) * t for s, t in zip(self.shape, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        return self.extent * self.dtype.itemsize


@dataclass
class _Piece:
    """Kernels that run in one native call, or a library call."""

    fresh: list[int] = field(default_factory=list)
    """Allocated before it."""
    dead: list[int] = field(default_factory=list)
    """Read by nobody after it."""
    launches: list[Mapping[str, Any]] = field(default_factory=list)
    call: Mapping[str, Any] | None = None


class _Bound:
    """A program for one set of sizes."""

    def __init__(self, executable: LoopExecutable, symbols: dict[str, int]) -> None:
        self.executable = executable
        program = executable.program
        self.symbols = symbols
        self.buffers = [
            _Buffer(
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
        self.table = (ctypes.c_void_p * max(len(self.buffers), 1))()
        self.status = (ctypes.c_int64 * 2)()
        self.device = executable.device
        self._dummy = torch.empty(64, dtype=torch.uint8, device=self.device)
        self.aliases = self._alias_offsets()
        self._classify(program)
        self._plan_workspace(program)
        self._block: torch.Tensor | None = None
        self.views: set[int] = set()
        """Views of the workspace that calls take."""
        self._lasting: list[Any] = [None] * len(self.buffers)
        """What is the same tensor at every run: constants, and the workspace until it moves."""
        self.constants = {
            slot: executable.constants[b.name]
            for slot, b in enumerate(self.buffers) if b.role == "constant"
        }  # fmt: skip
        for slot, tensor in self.constants.items():
            self._lasting[slot] = tensor
            if tensor.layout == torch.strided:
                self._place(slot, tensor.data_ptr())
        self.seeds = [s for s, b in enumerate(self.buffers) if b.role == "seed"]
        self._given = [
            (k, slot, bool(b.strides) or not b.shape)
            for k, slot in self.inputs for b in (self.buffers[slot],)
        ]  # fmt: skip
        self.outputs = [self._argument(o) for o in program["outputs"]]
        self.steps = self._compile_steps(program)

    def _allocation(self, buffer: _Buffer) -> Callable[[], torch.Tensor]:
        """Makes a tensor for `buffer`; the host's is the cheapest call there is for it."""
        if self.device.type == "cpu":
            return partial(empty_strided_cpu, buffer.shape, buffer.strides, buffer.dtype)
        return partial(torch.empty_strided, buffer.shape, buffer.strides, dtype=buffer.dtype,
                       device=self.device)  # fmt: skip

    def root(self, slot: int) -> int:
        while True:
            base = self.buffers[slot].base
            if base is None:
                return slot
            slot = base

    def _place(self, slot: int, address: int) -> None:
        """Record where a buffer lies, and with it every view of it."""
        self.table[slot] = address
        if slot in self.aliases:
            for alias, offset in self.aliases[slot]:
                self.table[alias] = address + offset

    # ---- once per set of sizes ----------------------------------------------------------------

    def _alias_offsets(self) -> dict[int, list[tuple[int, int]]]:
        """Buffer -> its views, each with its distance in bytes."""
        found: dict[int, list[tuple[int, int]]] = {}
        for slot, buffer in enumerate(self.buffers):
            base, offset = buffer.base, buffer.offset * buffer.dtype.itemsize
            while base is not None:
                found.setdefault(base, []).append((slot, offset))
                offset += self.buffers[base].offset * self.buffers[base].dtype.itemsize
                base = self.buffers[base].base
        return found

    def _classify(self, program: Mapping[str, Any]) -> None:
        """Who owns each buffer: the caller, the workspace, a fresh allocation, or a call."""
        returned = {self.root(o["ref"]) for o in program["outputs"] if _is_ref(o)}
        self.from_call: set[int] = set()
        pinned: set[int] = set()
        for step in program["steps"]:
            if "call" not in step:
                continue
            if not step["into"]:
                self.from_call |= set(step["outs"])
            if step["kind"] == "eager":
                pinned |= {self.root(s) for s in _refs((step["args"], step["kwargs"]))}
        owned = [
            slot for slot, b in enumerate(self.buffers)
            if b.role == "temp" and b.base is None and slot not in self.from_call
        ]  # fmt: skip
        self.fresh = [s for s in owned if s in returned or s in pinned]
        fresh = set(self.fresh)
        self.planned = [s for s in owned if s not in fresh]

    def _plan_workspace(self, program: Mapping[str, Any]) -> None:
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for k, step in enumerate(program["steps"]):
            used = step["args"] if "kernel" in step else [
                *_refs((step["args"], step["kwargs"])), *step["outs"]
            ]  # fmt: skip
            for slot in used:
                root = self.root(slot)
                first.setdefault(root, k)
                last[root] = k
        self.first_use, self.last_use = first, last
        lifetimes = [
            Lifetime(s, self.buffers[s].nbytes, first[s], last[s])
            for s in self.planned if s in first
        ]  # fmt: skip
        self.workspace = plan(lifetimes)

    def _compile_steps(self, program: Mapping[str, Any]) -> list[tuple[RunStep, list[int]]]:
        """What to do in order, and which tensors nobody reads after each step."""
        steps: list[tuple[RunStep, list[int]]] = []
        for piece in self._pieces(program):
            if piece.fresh:
                steps.append((self._allocate(piece.fresh), []))
            if piece.call is not None:
                steps.append((self._call(piece.call), piece.dead))
            elif piece.launches:
                steps.append((self._segment(piece.launches), piece.dead))
        return steps

    def _pieces(self, program: Mapping[str, Any]) -> list[_Piece]:
        """The program in pieces: a library call, or consecutive kernels.

        Memory is allocated before the piece that first needs it, and freed after the last.
        """
        needed: dict[int, list[int]] = {}
        for slot in self.fresh:
            needed.setdefault(self.first_use.get(slot, 0), []).append(slot)
        dying = self._last_readers(program)
        pieces = [_Piece(needed.get(0, []))]
        for k, step in enumerate(program["steps"]):
            fresh, dead = needed.get(k, []) if k else [], dying.get(k, [])
            last = pieces[-1]
            if "call" in step:
                pieces.append(_Piece(fresh, dead, call=step))
                continue
            if last.call or sum(self.buffers[s].nbytes for s in last.dead) >= FREED_AT_ONCE:
                last = _Piece()
                pieces.append(last)
            last.fresh = last.fresh + fresh
            last.dead = last.dead + dead
            if self._has_work(step):
                last.launches.append(step)
        return pieces

    def _allocate(self, slots: Sequence[int]) -> RunStep:
        dummy = self._dummy.data_ptr()
        wanted = [(slot, self._allocation(self.buffers[slot])) for slot in slots]

        def allocate(env: list[Any]) -> None:
            for slot, make in wanted:
                tensor = env[slot] = make()
                self._place(slot, tensor.data_ptr() or dummy)

        return allocate

    def _last_readers(self, program: Mapping[str, Any]) -> dict[int, list[int]]:
        """Step -> tensors of a run that are read there for the last time."""
        kept = {self.root(o["ref"]) for o in program["outputs"] if _is_ref(o)}
        movable = {slot for _, slot in self.inputs} | self.from_call | set(self.fresh)
        dying: dict[int, list[int]] = {}
        for slot in movable:
            last = self.last_use.get(self.root(slot))
            if last is not None and self.root(slot) not in kept:
                dying.setdefault(last, []).append(slot)
        return dying

    def _has_work(self, step: Mapping[str, Any]) -> bool:
        return any(self.buffers[s].extent for s in step["writes"])

    def _segment(self, launches: Sequence[Mapping[str, Any]]) -> RunStep:
        """Consecutive kernels behind one native call."""
        segment = self.executable.machine.segment(launches, self.symbols, self.table, self.status)
        run = segment.run

        def run_segment(env: list[Any]) -> None:
            if profiling():
                run_one_by_one()
                return
            stopped = run()
            if stopped:
                self._raise(launches[stopped - 1])

        def run_one_by_one() -> None:
            """Each kernel under its own profiler range, named by what it computes."""
            for k, step in enumerate(launches):
                with torch.profiler.record_function(_range_name(step)):
                    stopped = segment.run_one(k)
                if stopped:
                    self._raise(step)

        return run_segment

    def _raise(self, step: Mapping[str, Any]) -> None:
        code, site = self.status[0], self.status[1]
        self.status[0] = 0
        check, origin = step["sites"][site - 1]
        operator, _, line = (origin or "; ".join(step["origins"])).partition(" at ")
        detail = f"check {site} ({check}) of kernel {step['kernel']}"
        if code == 2:
            raise IntegerDivisionByZeroError(operator, line)
        raise IndexOutOfBoundsError(operator, line, detail)

    def _call(self, step: Mapping[str, Any]) -> RunStep:
        name = step["call"]
        op = self.executable.objects[name["object"]] if isinstance(name, dict) else (
            resolve_operator(name)
        )  # fmt: skip
        op = callable_of(op)
        args = self._arguments(step["args"])
        names = list(step["kwargs"])
        values = self._arguments(list(step["kwargs"].values()))
        outs = step["outs"]

        def named(env: list[Any]) -> dict[str, Any]:
            return dict(zip(names, values(env), strict=True)) if names else {}

        if step["into"]:
            target = self._tensor_getter(outs[0])

            def call_into(env: list[Any]) -> None:
                op(*args(env), out=target(env), **named(env))

            return call_into

        def call(env: list[Any]) -> None:
            result = op(*args(env), **named(env))
            if isinstance(result, torch.Tensor):
                self._receive(env, outs[0], result)
                return
            for slot, value in zip(outs, _flat(result), strict=False):
                self._receive(env, slot, value)

        return call

    def _arguments(self, plain: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
        """The arguments of a call; what never changes is worked out here, once."""
        getters = [self._argument(p) for p in plain]
        moving = [k for k, p in enumerate(plain) if _refs(p)]
        fixed = [None if k in moving else getter([]) for k, getter in enumerate(getters)]
        slots = [(k, plain[k]["ref"]) for k in moving if self._is_direct(plain[k])]
        others = [(k, getters[k]) for k in moving if not self._is_direct(plain[k])]

        def arguments(env: list[Any]) -> list[Any]:
            values = fixed.copy()
            for k, slot in slots:
                values[k] = env[slot]
            for k, getter in others:
                values[k] = getter(env)
            return values

        return arguments

    def _is_direct(self, plain: Any) -> bool:
        """Whether an argument is a tensor that the environment holds as it is."""
        return _is_ref(plain) and (
            self.buffers[plain["ref"]].base is None
            or plain["ref"] in self.from_call
            or plain["ref"] in self.views
        )

    def _receive(self, env: list[Any], slot: int, value: Any) -> None:
        buffer = self.buffers[slot]
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            if value.shape == buffer.shape and value.stride() != buffer.strides and value.numel():
                copy = torch.empty_strided(
                    buffer.shape, buffer.strides, dtype=value.dtype, device=value.device
                )
                value = copy.copy_(value)
            self._place(slot, value.data_ptr() or self._dummy.data_ptr())
        env[slot] = value

    def _argument(self, plain: Any) -> Callable[[list[Any]], Any]:
        if _is_ref(plain):
            return self._tensor_getter(plain["ref"])
        if not _refs(plain):
            value = decode_argument(
                plain,
                self._tensor_getter,
                lambda size: evaluate_size(size, self.symbols),
                self.executable.objects,
            )
            return lambda env: value
        inside = [self._argument(p) for p in (plain["tuple"] if isinstance(plain, dict) else plain)]
        kind = tuple if isinstance(plain, dict) else list
        return lambda env: kind(i(env) for i in inside)

    def _tensor_getter(self, slot: int) -> Callable[[list[Any]], torch.Tensor]:
        buffer = self.buffers[slot]
        if buffer.base is None or slot in self.from_call:
            return lambda env: env[slot]
        if self.root(slot) in self.workspace.offsets and not self._through_call(slot):
            self.views.add(slot)  # made when the workspace is
            return lambda env: env[slot]
        base = self._tensor_getter(buffer.base)
        shape, strides, offset = buffer.shape, buffer.strides, buffer.offset

        def alias(env: list[Any]) -> torch.Tensor:
            view: torch.Tensor = reinterpret_tensor(base(env), shape, strides, offset)
            return view

        return alias

    def _through_call(self, slot: int) -> bool:
        """Whether `slot` is a view of something a library call returned."""
        base: int | None = slot
        while base is not None:
            if base in self.from_call:
                return True
            base = self.buffers[base].base
        return False

    def check(self, inputs: Sequence[Any]) -> None:
        """Whether the inputs are laid out as the graph was compiled for.

        What only calls read may have another type: releases differ in the types that the
        framework foresees for what one of its operators saves for another.
        """
        launches = [s for s in self.executable.program["steps"] if "kernel" in s]
        generated = {self.root(slot) for step in launches for slot in step["args"]}
        for position, slot in self.inputs:
            tensor, buffer = inputs[position], self.buffers[slot]
            if tensor is None:  # an effect token
                continue
            if tensor.layout != torch.strided or not buffer.strides:
                continue
            strides_agree = all(
                s <= 1 or a == b
                for s, a, b in zip(buffer.shape, tensor.stride(), buffer.strides, strict=False)
            )
            if (
                tuple(tensor.shape) != buffer.shape
                or (tensor.dtype != buffer.dtype and slot in generated)
                or not (strides_agree or tensor.numel() == 0)
            ):
                raise InputMismatchError(
                    position,
                    f"{buffer.dtype}{list(buffer.shape)} strides {list(buffer.strides)}",
                    f"{tensor.dtype}{list(tensor.shape)} strides {list(tensor.stride())}",
                )

    # ---- every run ------------------------------------------------------------------------------

    def run(self, inputs: list[Any]) -> list[Any]:
        block = self._take_workspace()
        env = self._lasting.copy()
        dummy, device = self._dummy.data_ptr(), self.device
        for position, slot, addressed in self._given:
            tensor = env[slot] = inputs[position]
            if addressed and tensor is not None:
                self._place(slot, tensor.data_ptr() or dummy)
        inputs.clear()
        for slot in self.seeds:
            tensor = env[slot] = torch.randint(0, 2**62, (1,), dtype=torch.int64, device=device)
            self._place(slot, tensor.data_ptr())
        try:
            for step, dead in self.steps:
                step(env)
                for slot in dead:
                    env[slot] = None
            return [o(env) for o in self.outputs]
        finally:
            if block is not None:
                self.executable.pool.give(block)

    def _take_workspace(self) -> torch.Tensor | None:
        if not self.workspace.offsets:
            return None
        block = self.executable.pool.take(self.workspace.total or 1)
        if block is not self._block:
            self._move_workspace(block)
        return block

    def _move_workspace(self, block: torch.Tensor) -> None:
        self._block = block
        start = block.data_ptr()
        shift = -start % 64
        for slot, offset in self.workspace.offsets.items():
            b = self.buffers[slot]
            self._place(slot, start + shift + offset)
            if b.nbytes:
                piece = block[shift + offset : shift + offset + b.nbytes].view(b.dtype)
                self._lasting[slot] = piece.as_strided(b.shape, b.strides)
            else:
                self._lasting[slot] = torch.empty_strided(
                    b.shape, b.strides, dtype=b.dtype, device=self.device
                )
        for slot in self.views:
            self._lasting[slot] = self._view(slot)

    def _view(self, slot: int) -> torch.Tensor:
        """The part of the workspace that is seen as buffer `slot`."""
        buffer, whole = self.buffers[slot], self._lasting[self.root(slot)]
        offset, base = buffer.offset, buffer.base
        while base is not None:
            offset += self.buffers[base].offset
            base = self.buffers[base].base
        assert isinstance(whole, torch.Tensor)
        return whole.as_strided(buffer.shape, buffer.strides, whole.storage_offset() + offset)


def _flat(result: Any) -> list[Any]:
    """The results of a call, nested tuples taken apart."""
    if isinstance(result, (tuple, list)):
        return [leaf for item in result for leaf in _flat(item)]
    return [result]


def _range_name(step: Mapping[str, Any]) -> str:
    operators = dict.fromkeys(origin.partition(" ")[0] for origin in step["origins"])
    return f"dicp::{step['kernel'][:9]} {' '.join(operators)}"[:200]


def _is_ref(plain: Any) -> bool:
    return isinstance(plain, dict) and "ref" in plain


def _refs(plain: Any) -> list[int]:
    if _is_ref(plain):
        return [plain["ref"]]
    if isinstance(plain, dict):
        return [s for v in plain.values() for s in _refs(v)]
    if isinstance(plain, (list, tuple)):
        return [s for v in plain for s in _refs(v)]
    return []
