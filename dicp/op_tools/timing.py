"""OpTimeMeasure: forward and backward time per operator, with device synchronization."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dicp.machine import stopwatch
from dicp.op_tools import trees
from dicp.op_tools.collectives import outputs_of, wait_for
from dicp.op_tools.frame import FRAME, Call, Proceed
from dicp.op_tools.gradients import InputEdges, Place, makers_of, nodes_of
from dicp.op_tools.records import CallId, CallSite, logger
from dicp.op_tools.results import FeatureWithRecords, Rows
from dicp.op_tools.tables import table

RESULTS = "op_time_measure_result"
COLUMNS = ("name", "forward_id", "forward_elasped", "backward_elasped", "unit")
_UNIT = "ms"


def device_of(value: Any) -> torch.device:
    """The first device besides the CPU among the tensors, else the CPU."""
    devices = (t.device for t in trees.tensors(value))
    return next((d for d in devices if d.type not in ("cpu", "meta")), torch.device("cpu"))


@dataclass
class Timing:
    """The time of one call, in milliseconds; None where it did not run."""

    name: str
    id: CallId
    call_site: CallSite
    forward: float | None
    backward: float | None = None
    inputs: str = ""
    outputs: str = ""
    grad_inputs: str = ""
    grad_outputs: str = ""
    estimated: bool = False
    """Whether the time is a share of a kernel's, by the bytes its operators move."""

    @property
    def elapsed(self) -> float:
        return (self.forward or 0.0) + (self.backward or 0.0)


class OpTimeMeasure(FeatureWithRecords[Timing]):
    """Measures each operator, forward and backward.

    The time that the tool itself needs per call is measured at the start and subtracted.
    """

    feature = "measure_op_time"
    hook = "OpTimeMeasureHook"
    variable = "TIME_MEASURE"
    result_folder = RESULTS
    file_name = "op_elasped_info"
    described = "op elasped info"
    columns = (*COLUMNS, "input", "output", "grad_inputs", "grad_outputs")
    printed_columns = COLUMNS
    most_waiting = 5000

    def __init__(self, ops: Sequence[str] | None = None, **options: Any) -> None:
        super().__init__(ops, **options)
        self.overhead = _overhead()

    def around(self, call: Call, proceed: Proceed) -> Any:
        edges = InputEdges.of(call.args, call.kwargs, call.name)
        device = device_of((call.args, call.kwargs))
        end = stopwatch(device)
        result = proceed(call)
        wait_for(call, result)
        spent = max(end() - self.overhead, 0.0)
        record = Timing(
            call.name, call.id, call.call_site, spent,
            inputs=_described((call.args, call.kwargs)),
            outputs=_described(outputs_of(call, result)),
        )  # fmt: skip
        self.keep(record)
        self._say_time(record, "forward", spent)
        self._watch(record, edges, result, device)
        return result

    def _watch(self, record: Timing, edges: InputEdges, result: Any, device: torch.device) -> None:
        """Measure the call's own nodes of the autograd graph in backward, from hook to hook."""
        nodes = nodes_of(edges, result)
        first, results = next(iter(makers_of(edges, result)), (None, []))
        waiting = len(nodes)
        given: dict[int, str] = {}

        def ended(spent: float) -> None:
            nonlocal waiting
            record.backward = (record.backward or 0.0) + max(spent - self.overhead, 0.0)
            waiting -= 1
            if waiting:
                return
            record.grad_inputs = " ".join(shape for _, shape in sorted(given.items()))
            self._say_time(record, "backward", record.backward)
            self.complete(record, replace(record, forward=None))

        for node, places in nodes:
            arriving = results if node is first else []
            self._time_node(node, arriving, places, record, given, device, ended)

    def _say_time(self, record: Timing, kind: str, spent: float) -> None:
        shown = f"{spent:.8f}"
        if self.style == "line":
            self.say(f"SyncExecuteTimer: {record.name} {kind} elasped {shown} {_UNIT}")
        else:
            columns = ("name", "forward_id", f"{kind}_elasped", "unit")
            self.say(table(columns, [(record.name, record.id, shown, _UNIT)]))

    def _time_node(
        self, node: Any, arriving: Sequence[Place], places: Sequence[Place], record: Timing,
        given: dict[int, str], device: torch.device, ended: Callable[[float], None],
    ) -> None:  # fmt: skip
        """arriving: for the node that gets the gradient of the call's first result."""
        running: list[Callable[[], float]] = []

        def before(grad_outputs: Any) -> None:
            with FRAME.unhooked():
                running.append(stopwatch(device))

        def after(grad_inputs: Any, grad_outputs: Any) -> None:
            spent = running.pop()() if running else 0.0
            with FRAME.unhooked():
                if arriving:
                    record.grad_outputs = _described([p.gradient(grad_outputs) for p in arriving])
                given.update((p.target, _described([p.gradient(grad_inputs)])) for p in places)
                ended(spent)

        node.register_prehook(before)
        node.register_hook(after)

    def rows(self, record: Timing) -> Rows:
        name = f"{record.name} (estimate)" if record.estimated else record.name
        times = ("" if t is None else f"{t:.8f}" for t in (record.forward, record.backward))
        shapes = (record.inputs, record.outputs, record.grad_inputs, record.grad_outputs)
        return [(name, record.id, *times, _UNIT, *shapes)]

    def finish(self) -> None:
        logger().info(self.summary())

    def summary(self) -> str:
        """Calls, total and mean milliseconds and share, by operator and by operator and shapes."""
        parts = [f"times in ms; the tool's own {self.overhead:.8f} ms per call are subtracted"]
        for title, key in (
            ("operator", lambda r: (r.name,)),
            ("operator and shapes", lambda r: (r.name, r.inputs)),
        ):
            groups: dict[tuple[str, ...], list[float]] = defaultdict(list)
            for record in self.results:
                if record.estimated:
                    continue
                groups[key(record)].append(record.elapsed)
            total = sum(map(sum, groups.values())) or 1.0
            rows = [
                (" ".join(name), len(times), f"{sum(times):.8f}", f"{sum(times) / len(times):.8f}",
                 f"{sum(times) / total:.1%}")
                for name, times in sorted(groups.items(), key=lambda item: -sum(item[1]))
            ]  # fmt: skip
            parts.append(table((title, "calls", "total", "mean", "share"), rows))
        return "\n".join(parts)


def _described(value: Any) -> str:
    return " ".join(
        f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in trees.tensors(value)
    )


def _overhead() -> float:
    """Milliseconds between starting and ending a stopwatch on the CPU: the least of a few."""
    return min(stopwatch(torch.device("cpu"))() for _ in range(20))
