"""OpCapture: the real inputs, outputs and gradients of operators, saved to replay them."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dicp.errors import ToolVariableError, ToolWarning
from dicp.op_tools import storage, trees
from dicp.op_tools.collectives import outputs_of
from dicp.op_tools.draws import Draws
from dicp.op_tools.frame import Call, Feature, Proceed
from dicp.op_tools.gradients import Gradients, InputEdges, watch
from dicp.op_tools.names import reads_memory
from dicp.op_tools.records import logger
from dicp.op_tools.reference import autocast_name
from dicp.op_tools.results import FOLDER
from dicp.op_tools.tables import labelled_arguments, labelled_result

CAPTURES = "op_capture_results"


def argument_rows(call: Call) -> list[tuple[str, Any]]:
    return list(labelled_arguments(call.args, call.kwargs, f"{call.name} inputs"))


def result_rows(name: str, result: Any) -> list[tuple[str, Any]]:
    return list(labelled_result(result, f"{name} outputs"))


def gradient_rows(name: str, found: Gradients, side: str = "") -> list[tuple[str, Any]]:
    """Rows of incoming and outgoing gradients, named after their outputs and inputs.

    side: "(cpu)" for those of a reference.
    """
    incoming = (
        [(f"{name} grad_output{side}", found.outputs[found.recorded[0]])]
        if len(found.recorded) == 1
        else [(f"{name} grad_outputs{side} [0][{k}]", g) for k, g in enumerate(found.outputs)]
    )
    given = f"{name} grad_inputs{side}"
    if len(found.inputs) == 1:
        return [*incoming, (given, found.inputs[0])]
    return [*incoming, *((f"{given}[{k}]", g) for k, g in enumerate(found.inputs))]


class OpCapture(Feature):
    """Saves inputs, outputs and gradients of operators; prints their arguments.

    folder: where `op_capture_results` is made. max_bytes: stop capturing beyond this many bytes of
    tensors in all. every, first: per operator, capture every n-th call and at most the first n.
    A folder that cannot be written ends the capture with one warning; the program goes on.
    """

    feature = "op_capture"
    hook = "OpCaptureHook"
    variable = "CAPTURE"

    def __init__(
        self,
        ops: Sequence[str] | None = None,
        *,
        folder: str | Path = FOLDER,
        max_bytes: int | None = None,
        every: int = 1,
        first: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(ops, **options)
        for name, number, least in (
            ("every", every, 1), ("first", first, 0), ("max_bytes", max_bytes, 0)
        ):  # fmt: skip
            if number is not None and not (isinstance(number, int) and number >= least):
                raise ToolVariableError(name, str(number), f"a whole number, {least} or more")
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self.every = every
        self.first = first
        self.saved: list[Path] = []
        self._bytes = 0
        self._calls: Counter[str] = Counter()
        self._stopped = ""

    def around(self, call: Call, proceed: Proceed) -> Any:
        if not self._is_due(call.name):
            return proceed(call)
        folder = self._folder_of(call)
        facts = self._facts(call)
        rows = argument_rows(call)
        given = {"args": call.args, "kwargs": call.kwargs}
        self.save(folder / "input", given, facts, whole=reads_memory(call.name))
        edges = InputEdges.of(call.args, call.kwargs, call.name)
        draws = Draws.of(call.operator, call.args, call.kwargs)
        result = proceed(call)
        if draws.has_drawn(call.name):
            facts |= draws.states.as_facts()
            self._add_facts(folder / "input", facts)
        outputs = outputs_of(call, result)
        self.save(folder / "output", outputs, facts)
        self.say_arguments(call, [*rows, *result_rows(call.name, outputs)])
        watch(edges, result, lambda found: self._gradients(call, folder, facts, found))
        return result

    def finish(self) -> None:
        counts = f"{len(self.saved)} files of {sum(self._calls.values())} calls"
        logger().info("; ".join(filter(None, (f"op_capture: {counts}", self._stopped))))

    def _gradients(
        self, call: Call, folder: Path, facts: Mapping[str, Any], found: Gradients
    ) -> None:
        self.save(folder / "grad_outputs", found.outputs, facts)
        self.save(folder / "grad_inputs", found.inputs, facts)
        self.say_arguments(call, gradient_rows(call.name, found), "backward")

    def _is_due(self, name: str) -> bool:
        with self._lock:
            number = self._calls[name]
            if self._stopped or (self.first is not None and number >= self.first * self.every):
                return False
            self._calls[name] += 1
            return number % self.every == 0

    def _folder_of(self, call: Call) -> Path:
        base = self.folder / CAPTURES / call.name / str(os.getpid())
        return base / str(call.id.number) / call.id.time

    def _facts(self, call: Call) -> dict[str, Any]:
        return {
            "operator": call.name,
            "forward_id": str(call.id),
            "source": str(call.call_site),
            "pid": os.getpid(),
            "autocast": autocast_name(call.args, call.kwargs),
        }

    def save(self, path: Path, value: Any, facts: Mapping[str, Any], whole: bool = False) -> None:
        """Save a value, unless the capture has ended; `whole` as in `storage.save`."""
        if self._stopped:
            return
        size = sum(t.numel() * t.element_size() for t in trees.tensors(value))
        with self._lock:
            if self.max_bytes is not None and self._bytes + size > self.max_bytes:
                self._stopped = f"max_bytes={self.max_bytes} is reached"
                self.say(f"op_capture: {self._stopped}; nothing more is captured")
                return
            self._bytes += size
        with self._stopping(path):
            storage.save(path, value, facts, whole)
            self.saved.append(path)
            self.say(f"{path} saved")

    def _add_facts(self, path: Path, facts: Mapping[str, Any]) -> None:
        if not self._stopped:
            with self._stopping(path):
                storage.add_facts(path, facts)

    def write(self, path: Path, text: str) -> None:
        """Write a text file beside what was saved."""
        if not self._stopped:
            with self._stopping(path):
                path.write_text(text)
                self.say(f"{path} saved")

    @contextlib.contextmanager
    def _stopping(self, path: Path) -> Iterator[None]:
        """Within, a path that cannot be written ends the capture."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            with self._lock:
                if self._stopped:
                    return
                self._stopped = f"{type(error).__name__}: {error}"
            text = f"op_capture stops, the program goes on: {path}: {self._stopped}"
            warnings.warn(ToolWarning(text), stacklevel=4)
