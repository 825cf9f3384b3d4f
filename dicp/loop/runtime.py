"""Running a loop program: bind sizes, plan memory, launch kernels and library calls.

For each set of sizes a `_Bound` plan is made once: every stride, offset and argument list in it is
a plain number, so that a run only fills in addresses and walks the steps.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dicp.errors import IndexOutOfBoundsError, InputMismatchError, IntegerDivisionByZeroError
from dicp.loop.memory import Lifetime, plan
from dicp.loop.program import decode_constant, evaluate_size, resolve_operator
from dicp.torch_private import disable_current_modes, profiling

MAX_BOUND_PLANS = 64


RunStep = Callable[[list[Any]], None]


class Launch(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_void_p),
        ("slots", ctypes.POINTER(ctypes.c_int32)),
        ("count", ctypes.c_int64),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
    ]


@dataclass(frozen=True)
class Native:
    """What a device brings: kernel entry points by name, and the function that runs a segment."""

    functions: Mapping[str, int]
    run_segment: Callable[..., int]


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


class LoopExecutable:
    """A loaded loop program: called with a list of inputs, returns a list of outputs."""

    def __init__(
        self,
        program: Mapping[str, Any],
        native: Native,
        pool: WorkspacePool,
        objects: Sequence[Any] = (),
    ) -> None:
        self.program = program
        self.native = native
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
        key = tuple(
            inputs[s[0]] if len(s) == 1 else inputs[s[0]].shape[s[1]] for s in self._sources
        )
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
        self._dummy = torch.empty(64, dtype=torch.uint8)
        self.aliases = self._alias_offsets()
        self._classify(program)
        self._plan_workspace(program)
        self._block: torch.Tensor | None = None
        self._temps: dict[int, torch.Tensor] = {}
        self.constants = {
            slot: executable.constants[b.name]
            for slot, b in enumerate(self.buffers) if b.role == "constant"
        }  # fmt: skip
        for slot, tensor in self.constants.items():
            if tensor.layout == torch.strided:
                self._place(slot, tensor.data_ptr())
        self.seeds = [s for s, b in enumerate(self.buffers) if b.role == "seed"]
        self._addressed = [bool(b.strides) or not b.shape for b in self.buffers]
        self._allocations = [
            (s, self.buffers[s].shape, self.buffers[s].strides, self.buffers[s].dtype)
            for s in self.fresh
        ]
        self.outputs = [self._argument(o) for o in program["outputs"]]
        self.steps = self._compile_steps(program)

    def root(self, slot: int) -> int:
        while True:
            base = self.buffers[slot].base
            if base is None:
                return slot
            slot = base

    def _place(self, slot: int, address: int) -> None:
        """Record where a buffer lies, and with it every view of it."""
        self.table[slot] = address
        for alias, offset in self.aliases.get(slot, ()):
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
        self.last_use = last
        lifetimes = [
            Lifetime(s, self.buffers[s].nbytes, first[s], last[s])
            for s in self.planned if s in first
        ]  # fmt: skip
        self.workspace = plan(lifetimes)

    def _compile_steps(self, program: Mapping[str, Any]) -> list[tuple[RunStep, list[int]]]:
        """What to do in order, and which tensors nobody reads after each step."""
        dying = self._last_readers(program)
        steps: list[tuple[RunStep, list[int]]] = []
        segment: list[Mapping[str, Any]] = []
        dead: list[int] = []
        for k, step in enumerate(program["steps"]):
            if "kernel" in step:
                if self._has_work(step):
                    segment.append(step)
                dead += dying.get(k, [])
                continue
            if segment:
                steps.append((self._segment(segment), dead))
            steps.append((self._call(step), dying.get(k, [])))
            segment, dead = [], []
        if segment:
            steps.append((self._segment(segment), dead))
        return steps

    def _last_readers(self, program: Mapping[str, Any]) -> dict[int, list[int]]:
        """Step -> inputs and call results that are read there for the last time."""
        kept = {self.root(o["ref"]) for o in program["outputs"] if _is_ref(o)}
        movable = {slot for _, slot in self.inputs} | self.from_call
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
        array = (Launch * len(launches))()
        keep: list[Any] = [array]
        for entry, step in zip(array, launches, strict=True):
            slots = (ctypes.c_int32 * len(step["args"]))(*step["args"])
            sizes = (ctypes.c_int64 * max(len(step["symbols"]), 1))(
                *(self.symbols[s] for s in step["symbols"])
            )
            keep += [slots, sizes]
            entry.function = self.executable.native.functions[step["kernel"]]
            entry.slots = ctypes.cast(slots, ctypes.POINTER(ctypes.c_int32))
            entry.sizes = ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64))
            entry.count = len(step["args"])
        run, count = self.executable.native.run_segment, len(launches)
        table, status = self.table, self.status

        def run_segment(env: list[Any], _keep: Any = keep) -> None:
            if profiling():
                run_one_by_one()
                return
            stopped = run(array, count, table, status)
            if stopped:
                self._raise(launches[stopped - 1])

        def run_one_by_one() -> None:
            """Each kernel under its own profiler range, named by what it computes."""
            for k, step in enumerate(launches):
                with torch.profiler.record_function(_range_name(step)):
                    stopped = run(ctypes.pointer(array[k]), 1, table, status)
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
        args = [self._argument(a) for a in step["args"]]
        kwargs = {k: self._argument(v) for k, v in step["kwargs"].items()}
        outs = step["outs"]
        if step["into"]:
            target = self._tensor_getter(outs[0])

            def call_into(env: list[Any]) -> None:
                op(*(a(env) for a in args), out=target(env),
                   **{k: v(env) for k, v in kwargs.items()})  # fmt: skip

            return call_into

        def call(env: list[Any]) -> None:
            result = op(*(a(env) for a in args), **{k: v(env) for k, v in kwargs.items()})
            for slot, value in zip(outs, _flat(result), strict=False):
                self._receive(env, slot, value)

        return call

    def _receive(self, env: list[Any], slot: int, value: Any) -> None:
        buffer = self.buffers[slot]
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            if value.shape == buffer.shape and value.stride() != buffer.strides and value.numel():
                copy = torch.empty_strided(buffer.shape, buffer.strides, dtype=value.dtype)
                value = copy.copy_(value)
            self._place(slot, value.data_ptr() or self._dummy.data_ptr())
        env[slot] = value

    def _argument(self, plain: Any) -> Callable[[list[Any]], Any]:
        if isinstance(plain, dict):
            if "ref" in plain:
                return self._tensor_getter(plain["ref"])
            if "tuple" in plain:
                inside = self._argument(plain["tuple"])
                return lambda env: tuple(inside(env))
            value: Any
            if "size" in plain:
                value = evaluate_size(plain["size"], self.symbols)
            elif "torch" in plain:
                value = getattr(torch, plain["torch"])
            elif "device" in plain:
                value = torch.device(plain["device"])
            else:
                value = self.executable.objects[plain["object"]]
            return lambda env: value
        if isinstance(plain, list):
            items = [self._argument(p) for p in plain]
            if not _refs(plain):
                fixed = [i([]) for i in items]
                return lambda env: fixed
            return lambda env: [i(env) for i in items]
        return lambda env: plain

    def _tensor_getter(self, slot: int) -> Callable[[list[Any]], torch.Tensor]:
        buffer = self.buffers[slot]
        if buffer.base is None or slot in self.from_call:
            return lambda env: env[slot]
        base = self._tensor_getter(buffer.base)
        shape, strides, offset = buffer.shape, buffer.strides, buffer.offset

        def alias(env: list[Any]) -> torch.Tensor:
            source = base(env)
            return source.as_strided(shape, strides, source.storage_offset() + offset)

        return alias

    def check(self, inputs: Sequence[Any]) -> None:
        """Whether the inputs are laid out as the graph was compiled for."""
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
                or tensor.dtype != buffer.dtype
                or not (strides_agree or tensor.numel() == 0)
            ):
                raise InputMismatchError(
                    position,
                    f"{buffer.dtype}{list(buffer.shape)} strides {list(buffer.strides)}",
                    f"{tensor.dtype}{list(tensor.shape)} strides {list(tensor.stride())}",
                )

    # ---- every run ------------------------------------------------------------------------------

    def run(self, inputs: list[Any]) -> list[Any]:
        env: list[Any] = [None] * len(self.buffers)
        dummy = self._dummy.data_ptr()
        for position, slot in self.inputs:
            tensor = env[slot] = inputs[position]
            if self._addressed[slot] and tensor is not None:
                self._place(slot, tensor.data_ptr() or dummy)
        inputs.clear()
        for slot, tensor in self.constants.items():
            env[slot] = tensor
        for slot, shape, strides, dtype in self._allocations:
            tensor = env[slot] = torch.empty_strided(shape, strides, dtype=dtype)
            self._place(slot, tensor.data_ptr() or dummy)
        for slot in self.seeds:
            tensor = env[slot] = torch.randint(0, 2**62, (1,), dtype=torch.int64)
            self._place(slot, tensor.data_ptr())
        block = self._bind_workspace(env)
        try:
            for step, dead in self.steps:
                step(env)
                for slot in dead:
                    env[slot] = None
            return [o(env) for o in self.outputs]
        finally:
            if block is not None:
                self.executable.pool.give(block)

    def _bind_workspace(self, env: list[Any]) -> torch.Tensor | None:
        if not self.workspace.offsets:
            return None
        block = self.executable.pool.take(self.workspace.total or 1)
        if block is not self._block:
            self._move_workspace(block)
        for slot, tensor in self._temps.items():
            env[slot] = tensor
        return block

    def _move_workspace(self, block: torch.Tensor) -> None:
        self._block = block
        self._temps.clear()
        start = block.data_ptr()
        shift = -start % 64
        for slot, offset in self.workspace.offsets.items():
            b = self.buffers[slot]
            self._place(slot, start + shift + offset)
            if b.nbytes:
                piece = block[shift + offset : shift + offset + b.nbytes].view(b.dtype)
                self._temps[slot] = piece.as_strided(b.shape, b.strides)
            else:
                self._temps[slot] = torch.empty_strided(b.shape, b.strides, dtype=b.dtype)


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
