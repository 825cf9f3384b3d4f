"""Recordings of modules: what each module of a model got and gave in a training step.

    FOLDER/recording.json                          the calls in their order
    FOLDER/iteration0/{weights_before, weights_after, parameter_grads, optimizer_before}
    FOLDER/iteration0/0003_encoder.norm/{input, output, grad_outputs, grad_inputs}

Every file is `<file>.safetensors` + `<file>.json`, as captures are. Where a process group runs,
each process writes into FOLDER/rank<k>.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import nn

from dicp.errors import CaptureFormatError, ToolWarning
from dicp.op_tools import storage
from dicp.op_tools.draws import GeneratorStates
from dicp.op_tools.frame import FRAME
from dicp.op_tools.gradients import Gradients, InputEdges, watch, watch_outputs
from dicp.op_tools.records import logger
from dicp.op_tools.reference import autocast_name
from dicp.torch_private import compiled_call, original_module, set_compiled_call

INDEX = "recording.json"
MAX_NODES = 1 << 22
"""Autograd nodes of one module: those of a whole model are followed too."""


@dataclass
class ModuleCall:
    """One call of a module; `number` is its place among the calls of its iteration."""

    iteration: int
    number: int
    path: str
    kind: str
    training: bool
    random: bool = False
    """Whether the call drew random numbers."""
    autocast: str = ""
    """The dtype that autocast computes in; empty where it is off."""

    @property
    def name(self) -> str:
        return self.path or "(model)"

    @property
    def folder(self) -> str:
        return f"iteration{self.iteration}/{self.number:04d}_{self.path or 'model'}"


class Sink(Protocol):
    """Where a recorder puts what it sees; `place` is a call's folder or an iteration's."""

    def save(self, place: str, file: str, value: Any, facts: Mapping[str, Any]) -> None: ...

    def finish(self, calls: list[ModuleCall]) -> None: ...


class FolderSink:
    """Writes a recording, in place of one in the folder; a folder that cannot be written ends it
    with one warning."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stopped = ""
        self._write_or_stop(folder, self._remove_former)

    def _remove_former(self) -> None:
        """Remove a recording that the folder holds: its gradients would be taken for new ones."""
        if (self.folder / INDEX).exists():
            (self.folder / INDEX).unlink()
            for place in self.folder.glob("iteration*"):
                shutil.rmtree(place)

    def save(self, place: str, file: str, value: Any, facts: Mapping[str, Any]) -> None:
        if not self.stopped:
            path = self.folder / place / file
            self._write_or_stop(path, lambda: storage.save(path, value, facts))

    def finish(self, calls: list[ModuleCall]) -> None:
        plain = {"format": storage.FORMAT, "torch": torch.__version__,
                 "calls": [asdict(call) for call in calls]}  # fmt: skip
        path = self.folder / INDEX
        if not self.stopped:
            self._write_or_stop(path, lambda: path.write_text(json.dumps(plain, indent=1)))
        if not self.stopped:
            logger().info(f"one_iter: {len(calls)} calls of modules saved to {self.folder}")

    def _write_or_stop(self, path: Path, write: Callable[[], Any]) -> None:
        try:
            write()
        except (OSError, RuntimeError) as error:
            self.stopped = f"{type(error).__name__}: {error}"
            text = f"one_iter stops recording, the program goes on: {path}: {self.stopped}"
            warnings.warn(ToolWarning(text), stacklevel=4)


class Recorder:
    """Records the calls of a model's modules while it is entered, `iters` steps of the optimizer.

    Without an optimizer, each call of the model is an iteration. A compiled module is recorded as
    one: what lies inside it is its graph's.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, sink: Sink, iters: int = 1
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.sink = sink
        self.iters = iters
        self.calls: list[ModuleCall] = []
        self._iteration = 0
        self._numbers = 0
        self._seen_model = False
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        for path, module in recorded_modules(self.model):
            self._undo.append(_around_calls(module, self._begins(path, module)))
        if self.optimizer is not None:
            before = self.optimizer.register_step_pre_hook(lambda *_: self._before_step())
            after = self.optimizer.register_step_post_hook(lambda *_: self._next())
            self._undo += [before.remove, after.remove]
        self._weights("weights_before")
        return self

    def __exit__(self, *raised: object) -> None:
        while self._undo:
            self._undo.pop()()
        if self.active and self._numbers:
            self._weights("weights_after")
        self.sink.finish(self.calls)
        self._iteration = self.iters

    @property
    def active(self) -> bool:
        return self._iteration < self.iters

    # ---- the step -------------------------------------------------------------------------------

    def _place(self) -> str:
        return f"iteration{self._iteration}"

    def _weights(self, file: str) -> None:
        if not self.active:
            return
        with FRAME.unhooked(), torch.no_grad():
            self.sink.save(self._place(), file, original_module(self.model).state_dict(), {})

    def _before_step(self) -> None:
        if not self.active or self.optimizer is None:
            return
        named = dict(original_module(self.model).named_parameters())
        with FRAME.unhooked(), torch.no_grad():
            grads = {name: p.grad for name, p in named.items()}
            self.sink.save(self._place(), "parameter_grads", grads, {})
            self.sink.save(self._place(), "optimizer_before", self.optimizer.state_dict(), {})

    def _next(self) -> None:
        """The step is over: the next iteration begins with the weights that it left."""
        self._weights("weights_after")
        self._iteration += 1
        self._numbers, self._seen_model = 0, False
        self._weights("weights_before")

    # ---- modules --------------------------------------------------------------------------------

    def _begins(self, path: str, module: nn.Module) -> Callable[[Any, Any], Any]:
        """What is done before a call of the module; it returns what is done after it."""

        def begin(args: Any, kwargs: Any) -> Callable[[Any], None] | None:
            if torch.compiler.is_compiling() or not self.active:
                return None
            if not path and self.optimizer is None and self._seen_model:
                self._next()
                if not self.active:
                    return None
            self._seen_model |= not path
            kind = type(original_module(module)).__name__
            autocast = autocast_name((args, list(module.parameters())), kwargs)
            call = ModuleCall(
                self._iteration, self._numbers, path, kind, module.training, autocast=autocast
            )
            self._numbers += 1
            self.calls.append(call)
            states = GeneratorStates.of(args, kwargs, list(module.parameters()))
            facts = {"operator": kind, "module": path, **states.as_facts()}
            with FRAME.unhooked(), torch.no_grad():
                self.sink.save(call.folder, "input", {"args": args, "kwargs": kwargs}, facts)
            edges = InputEdges.of(args, kwargs)

            def end(result: Any) -> None:
                call.random = states.drawn()
                self._ends(call, edges, result, facts)

            return end

        return begin

    def _ends(self, call: ModuleCall, edges: InputEdges, result: Any, facts: Any) -> None:
        def gradients(found: Gradients) -> None:
            self.sink.save(call.folder, "grad_outputs", found.outputs, facts)
            if found.inputs:
                self.sink.save(call.folder, "grad_inputs", found.inputs, facts)

        with FRAME.unhooked():
            with torch.no_grad():
                self.sink.save(call.folder, "output", result, facts)
            if watch(edges, result, gradients, MAX_NODES) is None:
                watch_outputs(result, gradients)


def is_compiled(module: nn.Module) -> bool:
    return original_module(module) is not module or compiled_call(module) is not None


def recorded_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Path and module, without what lies inside compiled modules."""
    todo: list[tuple[str, nn.Module]] = [("", model)]
    seen: set[int] = set()
    while todo:
        path, module = todo.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        if not is_compiled(module):
            children = [(f"{path}.{n}".lstrip("."), m) for n, m in module.named_children()]
            todo += reversed(children)


def _around_calls(module: nn.Module, begin: Callable[[Any, Any], Any]) -> Callable[[], None]:
    """Let `begin`, and what it returns, run around each call; returns what undoes it.

    Inputs are seen before the program's own hooks, outputs after them. Hooks of a module that
    compiles itself would be traced into its graph: its compiled call is wrapped.
    """
    compiled = compiled_call(module)
    if compiled is not None:

        def run(*args: Any, **kwargs: Any) -> Any:
            end = begin(args, kwargs)
            result = compiled(*args, **kwargs)
            if end is not None:
                end(result)
            return result

        set_compiled_call(module, run)
        return lambda: set_compiled_call(module, compiled)
    running: list[Any] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        running.append(begin(args, kwargs))

    def after(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        end = running.pop() if running else None
        if end is not None:
            end(result)

    handles = [
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


# ---- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recording:
    """A recording on disk."""

    folder: Path
    calls: tuple[ModuleCall, ...]

    @classmethod
    def read(cls, folder: str | Path) -> Recording:
        """Raises CaptureFormatError."""
        path = Path(folder) / INDEX
        try:
            plain = json.loads(path.read_text())
            return cls(Path(folder), tuple(ModuleCall(**call) for call in plain["calls"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise CaptureFormatError(path, reason, by="one_iter.record") from error

    def has(self, place: str, file: str) -> bool:
        return (self.folder / place / f"{file}.json").exists()

    def load(self, place: str, file: str) -> storage.Saved:
        """A saved value, its tensors on the CPU. Raises CaptureFormatError."""
        try:
            return storage.load(self.folder / place / file, "cpu")
        except CaptureFormatError as error:
            raise CaptureFormatError(error.path, error.reason, by="one_iter.record") from error
