"""A program prepared for one set of sizes.

All strides, offsets and constant arguments are evaluated once, so that a run only fills in
addresses and executes the steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, NoReturn

import torch

from dicp.effects import drawn_within
from dicp.errors import InputMismatchError, ResultMismatchError, TargetFailureError
from dicp.loop.runtime.checks import (
    check_inputs,
    check_layouts,
    check_sizes,
    laid_out_as,
    raise_kernel_error,
)
from dicp.loop.runtime.device import DeviceRuntime, Native, Pool, Segment
from dicp.loop.runtime.profiled import ProfiledSteps
from dicp.loop.schedule.memory import ALIGNMENT
from dicp.loop.schedule.placement import Placement, Step, is_ref, refs
from dicp.rule_errors import definition_of, described, raise_run_failure
from dicp.serialize import (
    callable_of,
    decode_argument,
    evaluate,
    flat,
    resolve_operator,
    sizes_are_promised,
)
from dicp.torch_private import profiling, reinterpret_tensor

Environment = list[Any]
"""The tensors of a run, indexed by buffer."""


View = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset in elements."""


@dataclass(frozen=True)
class NativeCall:
    """A plan that is one native call: what another caller needs to make it without Python.

    run: address of `int64 run(launches, count, table, status)`, 0 or one more than the launch that
        failed.
    table: the addresses of constants; those of inputs and outputs are filled in at every call.
    inputs: slot and position of each input that a kernel reads.
    outputs: slot, shape, strides and dtype of each tensor to allocate.
    results: positions among `outputs`, and the shape, strides and offset of a view, or None.
    workspace: bytes of memory that the run needs beside them, and slot and offset of its parts.
    aliases: slot, slot of its base, and offset in bytes.
    keep: what must live as long as the addresses.
    """

    run: int
    launches: int
    count: int
    table: Sequence[int]
    inputs: Sequence[tuple[int, int]]
    outputs: Sequence[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]]
    results: Sequence[tuple[int, View | None]]
    workspace: tuple[int, Sequence[tuple[int, int]]]
    aliases: Sequence[tuple[int, int, int]]
    keep: Any


RunStep = Callable[[Environment], None]
Getter = Callable[[Environment], Any]
Runner = Callable[[Step, Callable[[], None]], None]
"""Runs a kernel or a call, given as its second argument."""


@dataclass(frozen=True)
class LoadedProgram:
    """A program with everything that a run needs."""

    program: Mapping[str, Any]
    runtime: DeviceRuntime
    pool: Pool
    device: torch.device
    constants: Mapping[str, torch.Tensor]
    objects: Sequence[Any]
    target: str = ""
    """The target's name, for errors."""
    drawing: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Makes the context in which random numbers are drawn from the default generator."""


class ExecutionPlan:
    """A program prepared for one set of sizes; it executes one run at a time.

    Raises InputMismatchError unless `inputs` are laid out as the program was compiled for, and
    SizeMismatchError or IndexOutOfBoundsError for sizes that eager rejects.
    """

    def __init__(
        self, loaded: LoadedProgram, symbols: Mapping[str, int], inputs: Sequence[Any]
    ) -> None:
        self.loaded, self.symbols = loaded, symbols
        self.device = loaded.device
        self._pool = loaded.pool
        self.placement = Placement(loaded.program, symbols)
        self._workspace = self.placement.workspace
        self.buffers = self.placement.buffers
        check_inputs(self.placement, inputs)
        check_sizes(loaded.program["requirements"], symbols)
        check_layouts(self.placement, inputs)
        self.table = (ctypes.c_void_p * max(len(self.buffers), 1))()
        self.status = (ctypes.c_int64 * 4)()
        """Written by a kernel that fails: error code, check site, index and limit."""
        self._dummy = torch.empty(64, dtype=torch.uint8, device=self.device)
        self._no_memory = self._dummy.data_ptr()
        """The address passed for tensors without memory."""
        self._block: torch.Tensor | None = None
        self._views: set[int] = set()
        """Views of the workspace that calls take as arguments."""
        self._lasting: list[Any] = [None] * len(self.buffers)
        """Tensors that runs share: constants, and workspace tensors until the workspace moves."""
        self._place_constants()
        self._seeds = [s for s, b in enumerate(self.buffers) if b.role == "seed"]
        self._take_inputs = self._inputs(inputs)
        self._results = self._outputs(loaded.program["outputs"])
        self._segments: list[Segment] = []
        """What `run` of each segment needs to live."""
        self._steps = self._compile_steps()

    # ---- once per set of sizes ----------------------------------------------------------------

    def _place(self, slot: int, address: int) -> None:
        """Record the address of a buffer and of every view of it."""
        self.table[slot] = address
        for alias, offset in self.placement.aliases.get(slot, ()):
            self.table[alias] = address + offset

    def _place_constants(self) -> None:
        for slot, buffer in enumerate(self.buffers):
            if buffer.role != "constant":
                continue
            tensor = self._lasting[slot] = self.loaded.constants[buffer.name]
            if tensor.layout == torch.strided:
                self._place(slot, tensor.data_ptr())

    def _inputs(self, given: Sequence[Any]) -> Callable[[Environment, Sequence[Any]], None]:
        """A function that puts a run's inputs into its environment, their addresses into the table.

        Which inputs have no address (effect tokens, sparse tensors, objects that are no tensors)
        is the same at every run.
        """
        table, no_memory = self.table, self._no_memory
        slots = [slot for _, slot in self.placement.inputs]
        positions = [position for position, _ in self.placement.inputs]
        if not slots:
            return lambda env, inputs: None
        first, end = slots[0], slots[-1] + 1
        assert slots == list(range(first, end)), "inputs are numbered before all else"
        views = [
            (alias, slot - first, offset)
            for slot in slots for alias, offset in self.placement.aliases.get(slot, ())
        ]  # fmt: skip
        lost = [k for k in positions if not _is_strided(given[k])]
        by_kernels = self.placement.kernel_inputs

        def address(position: int, tensor: Any) -> int:
            if position in lost:
                return no_memory
            found: int = tensor.data_ptr()
            if not found and tensor.numel() and position in by_kernels:
                raise InputMismatchError(position, "a tensor with memory", "one without storage")
            return found or no_memory

        picked = positions != list(range(len(given)))

        def take(env: Environment, inputs: Sequence[Any]) -> None:
            tensors = [inputs[k] for k in positions] if picked else inputs
            env[first:end] = tensors
            found: list[Any] = (
                list(map(address, positions, tensors)) if lost
                else [tensor.data_ptr() for tensor in tensors]
            )  # fmt: skip
            if 0 in found:
                found = list(map(address, positions, tensors))
            table[first:end] = found
            for alias, at, offset in views:
                table[alias] = found[at] + offset

        return take

    def _outputs(self, plain: Sequence[Any]) -> Callable[[Environment], list[Any]]:
        """A function that collects the results of a run."""
        getters = [self._argument(o) for o in plain]
        if plain and all(map(self._is_direct, plain)):
            first, *others = (o["ref"] for o in plain)
            if not others:
                return lambda env: [env[first]]
            pick = itemgetter(first, *others)
            return lambda env: list(pick(env))
        return lambda env: [getter(env) for getter in getters]

    def _compile_steps(self, runner: Runner | None = None) -> list[tuple[RunStep, list[int]]]:
        """The steps in order, each with the tensors to drop after it; one by one with a runner."""
        steps: list[tuple[RunStep, list[int]]] = []
        for group in self.placement.step_groups():
            dead = [self._holder(slot) for slot in group.dead]
            if group.fresh:
                steps.append((self._allocate(group.fresh), []))
            if group.call is not None:
                call = self._call(group.call)
                steps.append((_by(runner, call, group.call) if runner else call, dead))
            elif group.launches:
                steps.append((self._segment(group.launches, runner), dead))
        return steps

    def _holder(self, slot: int) -> int:
        """The index in the environment of an allocation's tensor."""
        return self.placement.allocated_as.get(slot, slot)

    def _allocate(self, slots: Sequence[int]) -> RunStep:
        table, no_memory = self.table, self._no_memory
        wanted = [
            (
                self._holder(slot), slot, self._pool.result(self.buffers[self._holder(slot)]),
                self.placement.aliases.get(slot, ()),
            )
            for slot in slots
        ]  # fmt: skip

        def allocate(env: Environment) -> None:
            for holder, slot, make, aliases in wanted:
                tensor = env[holder] = make()
                address = table[slot] = tensor.data_ptr() or no_memory
                for alias, offset in aliases:
                    table[alias] = address + offset

        return allocate

    def _segment(self, launches: Sequence[Step], runner: Runner | None) -> RunStep:
        """Consecutive kernels behind one native call, or one by one with a runner."""
        segment = self._loaded_segment(launches)
        if runner is None:
            self._segments.append(segment)
            return self._checked(segment.run, launches)
        single = [
            self._checked(partial(segment.run_one, k), [step]) for k, step in enumerate(launches)
        ]

        def one_by_one(env: Environment) -> None:
            for step, run in zip(launches, single, strict=True):
                runner(step, partial(run, env))

        return one_by_one

    def _loaded_segment(self, launches: Sequence[Step]) -> Segment:
        make = self.loaded.runtime.segment
        try:
            segment = make(launches, self.symbols, self.table, self.status)
        except Exception as error:
            self._raise_failure(launches, make, error)
        if not isinstance(segment, Segment):
            problem = f"returns {described(segment)}, which lacks the methods run and run_one"
            raise TargetFailureError(self.loaded.target, "segment", problem, definition_of(make))
        return segment

    def _checked(self, run: Callable[[], int], launches: Sequence[Step]) -> RunStep:
        """A function that runs kernels by `run` and raises the error that one of them reports."""

        def checked(env: Environment) -> None:
            try:
                stopped = run()
            except Exception as error:
                self._raise_failure(launches, run, error)
            if stopped != 0:
                self._raise(launches, stopped)

        return checked

    @cached_property
    def _profiled_steps(self) -> list[tuple[RunStep, list[int]]]:
        return self._compile_steps(ProfiledSteps(self.placement, self.table, self.device).run)

    def _raise(self, launches: Sequence[Step], stopped: object) -> NoReturn:
        status = tuple(self.status)
        self.status[0] = 0
        raise_kernel_error(launches, stopped, status, self.loaded.target)

    def _raise_failure(
        self, launches: Sequence[Step], function: Callable[..., Any], error: Exception
    ) -> NoReturn:
        names = ", ".join(step["kernel"] for step in launches)
        sources = [str(origin) for step in launches for origin in step["origins"]]
        raise_run_failure(error, function, self.loaded.target, names, sources)

    def _call(self, step: Step) -> RunStep:
        name = step["call"]
        op = self.loaded.objects[name["object"]] if isinstance(name, dict) else (
            resolve_operator(name)
        )  # fmt: skip
        op = drawn_within(self.loaded.drawing, callable_of(op))
        args = self._arguments(step["args"])
        names = list(step["kwargs"])
        values = self._arguments(list(step["kwargs"].values()))
        outs = step["outs"]

        def named(env: Environment) -> dict[str, Any]:
            return dict(zip(names, values(env), strict=True)) if names else {}

        if step["into"]:
            target = self._tensor_getter(outs[0])

            def call_into(env: Environment) -> None:
                op(*args(env), out=target(env), **named(env))

            return call_into

        def call(env: Environment) -> None:
            result = op(*args(env), **named(env))
            if isinstance(result, torch.Tensor):
                self._receive(env, outs[0], result, step)
                return
            for slot, value in zip(outs, flat(result), strict=False):
                self._receive(env, slot, value, step)

        return call

    def _arguments(self, plain: Sequence[Any]) -> Getter:
        """A function that returns a call's arguments; constant ones are evaluated here, once."""
        getters = [self._argument(p) for p in plain]
        moving = [k for k, p in enumerate(plain) if refs(p)]
        fixed = [None if k in moving else getter([]) for k, getter in enumerate(getters)]
        slots = [(k, plain[k]["ref"]) for k in moving if self._is_direct(plain[k])]
        others = [(k, getters[k]) for k in moving if not self._is_direct(plain[k])]

        def arguments(env: Environment) -> list[Any]:
            values = fixed.copy()
            for k, slot in slots:
                values[k] = env[slot]
            for k, getter in others:
                values[k] = getter(env)
            return values

        return arguments

    def _is_direct(self, plain: Any) -> bool:
        """Whether an argument is a tensor that the environment holds as it is."""
        return is_ref(plain) and self._is_held(plain["ref"])

    def _is_held(self, slot: int) -> bool:
        place = self.placement
        held = slot in place.from_call or slot in place.allocated_views or slot in self._views
        return self.buffers[slot].base is None or held

    def _receive(self, env: Environment, slot: int, value: Any, step: Step) -> None:
        buffer = self.buffers[slot]
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            if value.dtype != buffer.dtype and slot in self.placement.addressed:
                value = value.to(buffer.dtype)  # PyTorch's inference does not know all of eager's
            if value.shape != buffer.shape:
                # A result of unknown sizes has shape () in the program.
                read = slot in self.placement.addressed
                if buffer.shape and (read or sizes_are_promised(step["call"])):
                    raise ResultMismatchError(
                        str(step["call"]).rstrip("."), buffer.shape, value.shape
                    )
            elif not laid_out_as(value, buffer.strides):
                copy = torch.empty_strided(
                    buffer.shape, buffer.strides, dtype=value.dtype, device=value.device
                )
                value = copy.copy_(value)
            self._place(slot, value.data_ptr() or self._no_memory)
        env[slot] = value

    def _argument(self, plain: Any) -> Getter:
        if is_ref(plain):
            return self._tensor_getter(plain["ref"])
        if not refs(plain):
            value = decode_argument(
                plain,
                self._tensor_getter,
                lambda number: evaluate(number, self.symbols),
                self.loaded.objects,
            )
            return lambda env: value
        inside = [self._argument(p) for p in (plain["tuple"] if isinstance(plain, dict) else plain)]
        kind = tuple if isinstance(plain, dict) else list
        return lambda env: kind(i(env) for i in inside)

    def _tensor_getter(self, slot: int) -> Getter:
        buffer, place = self.buffers[slot], self.placement
        in_workspace = place.root(slot) in self._workspace.offsets
        if buffer.base is not None and in_workspace and not place.through_call(slot):
            self._views.add(slot)  # created in `_move_workspace`
        if buffer.base is None or self._is_held(slot):
            return itemgetter(slot)
        base = self._tensor_getter(buffer.base)
        shape, strides, offset = buffer.shape, buffer.strides, buffer.offset

        def alias(env: Environment) -> torch.Tensor:
            view: torch.Tensor = reinterpret_tensor(base(env), shape, strides, offset)
            return view

        return alias

    def native_call(self) -> NativeCall | None:
        """The plan as one native call; None if it has library calls or random seeds."""
        place, runtime = self.placement, self.loaded.runtime
        groups = place.step_groups()
        launches = [group.launches for group in groups if group.launches]
        simple = len(launches) == 1 and not any(group.call for group in groups)
        if not simple or self._seeds or not isinstance(runtime, Native):
            return None
        fresh = [slot for group in groups for slot in group.fresh]
        holders = [self._holder(slot) for slot in fresh]
        results = [self._native_result(r, fresh) for r in self.loaded.program["outputs"]]
        known = [result for result in results if result is not None]
        if len(known) < len(results):
            return None
        segment = runtime.segment(launches[0], self.symbols, self.table, self.status)
        address, count = segment.launches
        made = [self.buffers[holder] for holder in holders]
        read = {place.root(slot) for slot in place.launched}
        given = {slot: position for position, slot in place.inputs if slot in read}
        parts = self._workspace.offsets
        moving = [slot for slot in (*given, *fresh, *parts) if slot in place.aliases]
        return NativeCall(
            runtime.entry,
            address,
            count,
            [entry or self._no_memory for entry in self.table],
            list(given.items()),
            [(s, b.shape, b.strides, b.dtype) for s, b in zip(fresh, made, strict=True)],
            known,
            (self._workspace.total if parts else 0, list(parts.items())),
            [(alias, slot, offset) for slot in moving for alias, offset in place.aliases[slot]],
            (self, segment),
        )

    def _native_result(self, plain: Any, fresh: Sequence[int]) -> tuple[int, View | None] | None:
        """Which of the allocated tensors a result is, or is a view of; None if it is neither."""
        if not is_ref(plain):
            return None
        slot = plain["ref"]
        holders = [self._holder(one) for one in fresh]
        if slot in holders:
            return holders.index(slot), None
        root, buffer = self.placement.root(slot), self.buffers[slot]
        if root not in fresh or root not in holders:
            return None
        return fresh.index(root), (buffer.shape, buffer.strides, self.placement.offset(slot))

    # ---- every run ------------------------------------------------------------------------------

    def run(self, inputs: list[Any]) -> list[Any]:
        return self._run(inputs, self._profiled_steps if profiling() else self._steps)

    def watched(
        self, watch: Callable[[int], AbstractContextManager[Any]]
    ) -> Callable[[list[Any]], list[Any]]:
        """As `run`, with the program's k-th step, a kernel or a call, in the context `watch(k)`."""
        numbers = {id(step): k for k, step in enumerate(self.placement.steps)}

        def within(step: Step, run: Callable[[], None]) -> None:
            with watch(numbers[id(step)]):
                run()

        return partial(self._run, steps=self._compile_steps(within))

    def _run(self, inputs: list[Any], steps: Sequence[tuple[RunStep, Sequence[int]]]) -> list[Any]:
        block = self._take_workspace() if self._workspace.offsets else None
        env = self._lasting.copy()
        self._take_inputs(env, inputs)
        inputs.clear()
        for slot in self._seeds:
            with self.loaded.drawing():
                seed = torch.randint(0, 2**62, (1,), dtype=torch.int64, device=self.device)
            self._place(slot, seed.data_ptr())
            env[slot] = seed
        try:
            for step, dead in steps:
                step(env)
                for slot in dead:
                    env[slot] = None
            return self._results(env)
        finally:
            if block is not None:
                self._pool.give(block)

    def _take_workspace(self) -> torch.Tensor:
        block = self._pool.take(self._workspace.total + ALIGNMENT)
        if block is not self._block:
            self._move_workspace(block)
        return block

    def _move_workspace(self, block: torch.Tensor) -> None:
        self._block = block
        start = block.data_ptr()
        shift = -start % ALIGNMENT
        for slot, offset in self._workspace.offsets.items():
            b = self.buffers[slot]
            self._place(slot, start + shift + offset)
            if b.nbytes:
                own = block[shift + offset : shift + offset + b.nbytes].view(b.dtype)
                self._lasting[slot] = own.as_strided(b.shape, b.strides)
            else:
                self._lasting[slot] = torch.empty_strided(
                    b.shape, b.strides, dtype=b.dtype, device=self.device
                )
        for slot in self._views:
            self._lasting[slot] = self._view(slot)

    def _view(self, slot: int) -> torch.Tensor:
        """The view of the workspace that is buffer `slot`."""
        buffer, whole = self.buffers[slot], self._lasting[self.placement.root(slot)]
        assert isinstance(whole, torch.Tensor)
        offset = whole.storage_offset() + self.placement.offset(slot)
        return whole.as_strided(buffer.shape, buffer.strides, offset)


def _is_strided(value: Any) -> bool:
    """Whether an input has memory that an address and strides describe."""
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _by(runner: Runner, call: RunStep, step: Step) -> RunStep:
    return lambda env: runner(step, partial(call, env))
