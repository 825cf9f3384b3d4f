"""The device's rows in `torch.profiler`: times of kernels, each with the launch it belongs to.

The native part records both as ranges of the host: `LaunchKernel_mul` where a kernel is put into a
queue, `mul (simulated dipu:0)` where the queue runs it. In a profile of the device, the latter
become rows of the device, in the table and in the chrome trace.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dicp.device.hosted import DEVICE_TYPE
from dicp.device.module import DipuModule
from dicp.torch_private import DEVICE_ROW, hook_profiler

LAUNCH = "LaunchKernel_"
_KERNEL = re.compile(rf"(.+) \((simulated )?{DEVICE_TYPE}:(\d+)\)")
_FIRST_PROCESS = 1_000_000
"""The number of device 0 among a trace's processes, which are rows of the viewer."""


def register(module: DipuModule, forced: bool) -> None:
    """Let profilers report the device.

    Profiles of a kind of device that means this one are of this one; if `forced`, so are those that
    name none.
    """

    def profiled_type(kind: str | None) -> str | None:
        if kind is None:
            return DEVICE_TYPE if forced else None
        return module.answers_to.get(kind, kind)

    hook_profiler(profiled_type, mark_kernels, move_kernels)


def mark_kernels(events: list[Any], device: str | None) -> None:
    """Make the ranges of kernels rows of the device, and give each launch its kernel's time."""
    if device != DEVICE_TYPE:
        return
    by_start = sorted(events, key=lambda event: event.time_range.start)
    launches = _Launches((event.name, event) for event in by_start)
    for event in by_start:
        found = _KERNEL.fullmatch(event.name)
        if found is None:
            continue
        event.device_type, event.device_index = DEVICE_ROW, int(found[3])
        event.is_user_annotation = False
        launch = launches.next_of(found[1])
        if launch is not None:
            launch.append_kernel(event.name, event.device_index, event.time_range.elapsed_us())


def move_kernels(path: str) -> None:
    """Move the kernels of a chrome trace to rows of the device, with arrows from their launches."""
    text = Path(path).read_text()
    if f"{DEVICE_TYPE}:" not in text:
        return
    trace = json.loads(text)
    found = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    found.sort(key=lambda event: event["ts"])
    launches = _Launches((event["name"], event) for event in found)
    added: dict[Any, Any] = {}
    for number, event in enumerate(found):
        match = _KERNEL.fullmatch(event["name"])
        if match is None:
            continue
        name, simulated, index = match.groups()
        event["pid"], event["cat"] = _FIRST_PROCESS + int(index), "kernel"
        known = event.setdefault("args", {})
        known |= {"device": int(index), "simulated": bool(simulated)}
        label = {"name": f"{simulated or ''}{DEVICE_TYPE}:{index}"}
        added[index] = {"ph": "M", "name": "process_name", "pid": event["pid"], "args": label}
        launch = launches.next_of(name)
        if launch is None:
            continue
        known["queued us"] = round(event["ts"] - launch["ts"], 3)
        arrow = {"cat": "ac2g", "name": "ac2g", "id": number}
        added[number, "s"] = _arrow_end("s", launch, arrow)
        added[number, "f"] = _arrow_end("f", event, arrow) | {"bp": "e"}
    trace["traceEvents"] += added.values()
    Path(path).write_text(json.dumps(trace))


def _arrow_end(phase: str, event: dict[str, Any], arrow: dict[str, Any]) -> dict[str, Any]:
    return {"ph": phase, "pid": event["pid"], "tid": event["tid"], "ts": event["ts"], **arrow}


class _Launches:
    """The launches of a profile in order; a queue runs the kernels of a name in the same order."""

    def __init__(self, events: Iterable[tuple[str, Any]]) -> None:
        self._of: dict[str, deque[Any]] = defaultdict(deque)
        for name, event in events:
            if name.startswith(LAUNCH):
                self._of[name.removeprefix(LAUNCH)].append(event)

    def next_of(self, name: str) -> Any:
        """The launch of the next kernel called `name`; None for one put there by other means."""
        return self._of[name].popleft() if self._of[name] else None
