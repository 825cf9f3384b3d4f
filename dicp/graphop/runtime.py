"""Running a graph-operator program: bind sizes, launch graphs, call eager operators, build views.

For each set of sizes the program's numbers are computed once and cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dicp.effects import drawn_within
from dicp.errors import (
    IndexOutOfBoundsError,
    InputLayoutError,
    InputMismatchError,
    IntegerDivisionByZeroError,
    ResultMismatchError,
)
from dicp.graphop.strides import inverse
from dicp.graphop.thresholds import MAX_PLANS
from dicp.origin import in_user_frames, lines_of
from dicp.serialize import (
    bound_sizes,
    decode_argument,
    decode_constant,
    evaluate,
    evaluate_size,
    flat,
    resolve_operator,
    restrided,
    sizes_are_promised,
)
from dicp.torch_private import HOST, disable_current_modes, profiled_range, profiling

Launch = Callable[
    [str, Sequence[torch.Tensor], Sequence[torch.Tensor], Mapping[str, int] | None], None
]
"""Runs a built graph on row-major inputs, into row-major outputs; with the symbols' values, the
graph compiled for these sizes alone."""

Env = list[Any]
Step = Callable[[Env], None]
Watch = Callable[[int], AbstractContextManager[Any]]
"""Returns the context for a step, by its position among the steps that run every time."""


class GraphExecutable:
    """A loaded program: called with a list of inputs, returns a list of outputs."""

    def __init__(
        self, program: Mapping[str, Any], launch: Launch, objects: Sequence[Any] = ()
    ) -> None:
        self.program = program
        self.launch = launch
        self.objects = objects
        self.constants = {
            int(slot): objects[c["object"]] if "object" in c else decode_constant(c)
            for slot, c in program["constants"].items()
        }
        self._names = list(program["symbols"])
        self._sources = list(program["symbols"].values())
        self._plans: OrderedDict[tuple[int, ...], _Plan] = OrderedDict()
        self.left_once = [r["slot"] for step in program["once"] for r in step["results"]]
        self.kept: dict[int, torch.Tensor] = {}
        """The results of the graphs that run once, by slot."""
        self.drawing: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Makes the context in which random numbers are drawn from the default generator."""

    def draw_within(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Let runs draw random numbers within such a context."""
        self.drawing = context

    def __call__(self, inputs: list[Any]) -> list[Any]:
        key = bound_sizes(self._sources, inputs)
        plan = self._plans.get(key)
        if plan is None:
            plan = _Plan(self, dict(zip(self._names, key, strict=True)))
            plan.check(inputs)
            self._plans[key] = plan
            if len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)
        return plan.run(inputs)

    def watched(self, inputs: Sequence[Any], watch: Watch) -> Callable[[list[Any]], list[Any]]:
        """A function that runs the program on inputs of these sizes, its k-th step within
        `watch(k)`."""
        plan = _Plan(self, dict(zip(self._names, bound_sizes(self._sources, inputs), strict=True)))
        plan.check(inputs)
        plan.watch(watch)
        return plan.run


@dataclass(frozen=True)
class _ResultPlan:
    """How one result of a graph is received: row-major in `order`, over an input or in memory of
    its own."""

    slot: int
    shape: tuple[int, ...]
    padded: tuple[int, ...]
    """The sizes of the graph's own result: those of the shape bucket."""
    dtype: torch.dtype
    order: tuple[int, ...]
    into_input: bool

    def buffer(self, env: Env, device: torch.device) -> torch.Tensor:
        if self.into_input:
            place = env[self.slot].permute(self.order)
            if place.is_contiguous():
                return place  # type: ignore[no-any-return]
        return torch.empty(self.padded, dtype=self.dtype, device=device)

    def store(self, env: Env, tensor: torch.Tensor) -> None:
        if not self.into_input:
            if self.padded != self.shape:
                part = tensor[tuple(slice(size) for size in self.shape)]
                tensor = torch.empty(self.shape, dtype=self.dtype, device=part.device).copy_(part)
            plain = self.order == tuple(range(len(self.order)))
            env[self.slot] = tensor if plain else tensor.permute(inverse(self.order))
            return
        place = env[self.slot].permute(self.order)
        if place.data_ptr() != tensor.data_ptr():
            place.copy_(tensor)


class _Plan:
    """A program for one set of sizes."""

    def __init__(self, executable: GraphExecutable, symbols: dict[str, int]) -> None:
        self.executable = executable
        self.symbols = symbols
        program = executable.program
        self.slots: list[dict[str, Any]] = program["slots"]
        self.inputs = [(k, slot) for k, slot in enumerate(program["inputs"]) if slot is not None]
        self.outputs = [self._argument(output) for output in program["outputs"]]
        steps = [*program["once"], *program["steps"]]
        graphs = [step for step in steps if "graph" in step]
        calls = [step for step in steps if "call" in step]
        elsewhere = {slot for step in steps if "call" not in step for slot in _slots_of(step)}
        self.eager_only = {slot for step in calls for slot in _slots_of(step)} - elsewhere
        self.compiled = {i["slot"] for step in graphs for i in step["inputs"] if "slot" in i}
        self.read = _slots_read(program)
        dying = self._last_uses(program)
        self.once = [self._step(step) for step in program["once"]]
        self.steps = [
            (self._step(step), dying.get(k, [])) for k, step in enumerate(program["steps"])
        ]

    def size(self, size: Any) -> int:
        return evaluate_size(size, self.symbols)

    def _shape(self, slot: int, field: str = "shape") -> tuple[int, ...]:
        return tuple(self.size(s) for s in self.slots[slot][field])

    def _last_uses(self, program: Mapping[str, Any]) -> dict[int, list[int]]:
        last: dict[int, int] = {}
        for k, step in enumerate(program["steps"]):
            for slot in _slots_of(step):
                last[slot] = k
        kept = set(_slots_of(program["outputs"])) | set(self.executable.constants)
        kept |= set(self.executable.left_once)
        dying: dict[int, list[int]] = {}
        for slot, k in last.items():
            if slot not in kept:
                dying.setdefault(k, []).append(slot)
        return dying

    # ---- once per set of sizes ------------------------------------------------------------------

    def _step(self, step: Mapping[str, Any]) -> Step:
        if "graph" in step:
            return self._graph(step)
        if "call" in step:
            return self._call(step)
        if "restride" in step:
            return self._restride(step["restride"], step["into"])
        return self._view(step) if "view" in step else self._check_indices(step)

    def _graph(self, step: Mapping[str, Any]) -> Step:
        padded = self._rounded() if "buckets" in step else None
        takes_sizes = padded is None or self.executable.program["static_sizes"]
        wanted = [plain for plain in step["inputs"] if takes_sizes or "sizes" not in plain]
        own = torch.device(step["device"])
        getters = [self._graph_input(plain, padded, own) for plain in wanted]
        written = step["written"]
        results = [
            _ResultPlan(
                r["slot"],
                tuple(self.size(s) for s in r["shape"]),
                tuple(evaluate_size(s, padded or self.symbols) for s in r["shape"]),
                getattr(torch, r["dtype"]),
                tuple(r["order"]),
                r.get("into_input", False),
            )
            for r in step["results"]
        ]
        launch, name = self.executable.launch, step["graph"]

        def run(env: Env) -> None:
            given = [get(env) for get in getters]
            inputs = [tensor.contiguous() for tensor in given]
            device = next((t.device for t in inputs if t.device.type != HOST), own)
            outputs = [result.buffer(env, device) for result in results]
            launch(name, inputs, outputs, padded)
            for k in written:
                if inputs[k] is not given[k]:  # its strides are not those it was compiled for
                    given[k].copy_(inputs[k])
            for result, tensor in zip(results, outputs, strict=True):
                result.store(env, tensor)

        origins = step["origins"]

        def profiled(env: Env) -> None:
            if not profiling():
                return run(env)
            given = [tensor for get in getters if isinstance(tensor := get(env), torch.Tensor)]
            operators = ", ".join(dict.fromkeys(origin.op for origin in origins))
            known = {"operators": operators, "source": lines_of(origins)}
            in_user_frames(
                origins, profiled_range(f"dicp::{name}", given, known), partial(run, env)
            )

        return profiled

    def _rounded(self) -> dict[str, int] | None:
        """The symbols' values rounded up to shape buckets. Where one is beyond all buckets: None,
        or the values themselves if graphs are compiled for fixed sizes alone."""
        buckets = self.executable.program["buckets"]
        rounded = {
            name: next((size for size in buckets if size >= number), 0) if number > 0 else 0
            for name, number in self.symbols.items()
        }
        if all(rounded.values()):
            return rounded
        return self.symbols if self.executable.program["static_sizes"] else None

    def _graph_input(
        self, plain: Mapping[str, Any], buckets: Mapping[str, int] | None, own: torch.device
    ) -> Callable[[Env], torch.Tensor]:
        """`own`: the device of the graph's results, whose generator draws its seeds."""
        if "seed" in plain:
            seed = getattr(torch, plain["seed"])
            draw = drawn_within(self.executable.drawing, partial(torch.randint, device=own))
            return lambda env: draw(0, 2**62, (1,)).view(seed)
        if "sizes" in plain:
            sizes = plain["sizes"]
            numbers: Any = (
                [evaluate(s, self.symbols) for s in sizes]
                if isinstance(sizes, list)
                else evaluate(sizes, self.symbols)
            )
            wide = torch.float64 if isinstance(numbers, float) else torch.int64
            with disable_current_modes():  # eager wraps integers around
                tensor = torch.tensor(numbers, dtype=wide).to(getattr(torch, plain["dtype"]))
            return lambda env: tensor
        slot, order = plain["slot"], plain["order"]
        if buckets is not None:
            whole = self.slots[slot]["shape"]
            shape = tuple(evaluate_size(whole[d], buckets) for d in order)
            return lambda env: padded(env[slot].permute(order), shape)
        if order == sorted(order):
            return lambda env: env[slot]
        return lambda env: env[slot].permute(order)

    def _call(self, step: Mapping[str, Any]) -> Step:
        name = step["call"]
        objects = self.executable.objects
        op = objects[name["object"]] if isinstance(name, Mapping) else resolve_operator(name)
        op = drawn_within(self.executable.drawing, op)
        args = self._argument(step["args"])
        kwargs = {k: self._argument(v) for k, v in step["kwargs"].items()}
        outs = step["outs"]

        def call(env: Env) -> None:
            result = op(*args(env), **{k: v(env) for k, v in kwargs.items()})
            for slot, value in zip(outs, flat(result), strict=False):
                env[slot] = self._received(slot, value, step)

        return call

    def _received(self, slot: int, value: Any, step: Mapping[str, Any]) -> Any:
        """The result of an eager call, with the strides that later steps were compiled for."""
        row = self.slots[slot]
        if not isinstance(value, torch.Tensor) or "strides" not in row:
            return value
        if slot not in self.read:  # PyTorch's inference may be wrong about a result without use
            return value
        if value.layout != torch.strided:
            return value
        dtype = getattr(torch, row["dtype"])
        if value.dtype != dtype and slot in self.compiled:
            value = value.to(dtype)  # PyTorch's inference does not know all of eager's
        if value.shape != self._shape(slot):
            if slot not in self.compiled and not sizes_are_promised(step["call"]):
                return value  # it does not know all sizes either
            raise ResultMismatchError(str(step["call"]).rstrip("."), self._shape(slot), value.shape)
        strides = self._shape(slot, "strides")
        if value.stride() == strides or not value.numel():
            return value
        return restrided(value, value.shape, strides)

    def _restride(self, source: int, into: int) -> Step:
        shape, strides = self._shape(into), self._shape(into, "strides")

        def restride(env: Env) -> None:
            env[into] = restrided(env[source], shape, strides)

        return restride

    def _view(self, step: Mapping[str, Any]) -> Step:
        source, into = step["view"], step["into"]
        shape, strides = self._shape(into), self._shape(into, "strides")
        dtype, offset = getattr(torch, self.slots[into]["dtype"]), self.size(step["offset"])

        def view(env: Env) -> None:
            tensor = env[source]
            start = (tensor.storage_offset() * tensor.itemsize + offset) // dtype.itemsize
            if tensor.dtype != dtype:
                tensor = tensor.new_empty(0, dtype=dtype).set_(tensor.untyped_storage())
            env[into] = tensor.as_strided(shape, strides, start)

        return view

    def _check_indices(self, step: Mapping[str, Any]) -> Step:
        """Raises IndexOutOfBoundsError for indices into an empty dimension; so does the step, for
        any out of range."""
        source, rows = step["check"], []
        for row in step["rows"]:
            size, origin = self.size(row["size"]), row["origin"]
            if not self.size(row["count"]):
                continue
            if not size:
                raise IndexOutOfBoundsError(origin.op, origin.user_line, None, 0)
            rows.append((row["number"], -size if row["wraps"] else 0, size, row))

        def check(env: Env) -> None:
            ends = env[source].tolist()
            for number, least, size, row in rows:
                wrong = [end for end in ends[2 * number :][:2] if not least <= end < size]
                if wrong:
                    origin, wraps = row["origin"], row["wraps"]
                    if row["divides"]:
                        raise IntegerDivisionByZeroError(origin.op, origin.user_line)
                    raise IndexOutOfBoundsError(origin.op, origin.user_line, wrong[0], size, wraps)

        return check

    def _argument(self, plain: Any) -> Callable[[Env], Any]:
        objects = self.executable.objects

        def get(env: Env) -> Any:
            return decode_argument(
                plain, lambda slot: env[slot], lambda t: evaluate(t, self.symbols), objects
            )

        return get

    def check(self, inputs: Sequence[Any]) -> None:
        """Whether the inputs are what the graph was compiled for."""
        for position, slot in self.inputs:
            tensor, row = inputs[position], self.slots[slot]
            if slot in self.compiled and tensor.layout != torch.strided:
                raise InputLayoutError(position, tensor.layout)
            if tensor is None or "strides" not in row or tensor.layout != torch.strided:
                continue
            dtype = getattr(torch, row["dtype"])
            # An operand of eager calls alone may come from a call whose inferred layout was wrong.
            differs = tensor.dtype != dtype and slot in self.compiled
            resized = tuple(tensor.shape) != self._shape(slot) and slot not in self.eager_only
            if differs or resized:
                raise InputMismatchError(
                    position,
                    f"{dtype}{list(self._shape(slot))}",
                    f"{tensor.dtype}{list(tensor.shape)}",
                )

    # ---- every run ------------------------------------------------------------------------------

    def run(self, inputs: list[Any]) -> list[Any]:
        env: Env = [None] * len(self.slots)
        for slot, tensor in self.executable.constants.items():
            env[slot] = tensor
        for position, slot in self.inputs:
            env[slot] = inputs[position]
            if slot in self.compiled and not env[slot].data_ptr() and env[slot].numel():
                raise InputMismatchError(position, "a tensor with memory", "one without storage")
        inputs.clear()
        self._run_once(env)
        for step, dead in self.steps:
            step(env)
            for slot in dead:
                env[slot] = None
        return [output(env) for output in self.outputs]

    def watch(self, watch: Watch) -> None:
        """Have every later run of this plan execute each step in a context that `watch` makes."""
        first = len(self.once)
        self.steps = [
            (_watched(step, number, watch), dead)
            for number, (step, dead) in enumerate(self.steps, first)
        ]

    def _run_once(self, env: Env) -> None:
        """Values that never change between runs: computed in the first run, reused in the
        others."""
        executable = self.executable
        if len(executable.kept) < len(executable.left_once):
            for step in self.once:
                step(env)
            executable.kept = {slot: env[slot] for slot in executable.left_once}
        for slot, tensor in executable.kept.items():
            env[slot] = tensor


def padded(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """`tensor` at the start of a tensor of zeros."""
    if tuple(tensor.shape) == tuple(shape):
        return tensor
    whole = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    whole[tuple(slice(size) for size in tensor.shape)] = tensor
    return whole


def _watched(run: Step, number: int, watch: Watch) -> Step:
    def run_watched(env: Env) -> None:
        with watch(number):
            run(env)

    return run_watched


def _slots_read(program: Mapping[str, Any]) -> set[int]:
    """Every slot that a step reads or the program returns."""
    steps = (*program["once"], *program["steps"])
    read = (
        [v for k, v in step.items() if k not in ("outs", "into", "results", "slot")]
        for step in steps
    )
    shown = {step["view"] for step in steps if "view" in step}
    shown |= {step["restride"] for step in steps if "restride" in step}
    shown |= {step["check"] for step in steps if "check" in step}
    return shown | set(_slots_of(list(read))) | set(_slots_of(program["outputs"]))


def _slots_of(plain: Any) -> list[int]:
    """Every slot a step reads or writes."""
    if isinstance(plain, Mapping):
        own = [plain[k] for k in ("ref", "slot", "view", "into", "restride", "check") if k in plain]
        inner = [v for k, v in plain.items() if isinstance(v, (Mapping, list))]
        outs = plain["outs"] if "outs" in plain else []
        return [*own, *outs, *(s for v in inner for s in _slots_of(v))]
    if isinstance(plain, list):
        return [s for item in plain for s in _slots_of(item)]
    return []
