"""`tools`: the cost of the operator tools on a training step of BERT, eager, on the CPU.

Times are milliseconds of processor time of all threads, which other programs disturb little; the
sides alternate. imported: a step before dicp.op_tools is imported and after, no tool started.
capture: of every operator; `tool` is without the time in which files are written, which is listed
separately; the bound is 3 times the step. time: `tool` is the time that OpTimeMeasure reports for
the whole step, its own time subtracted; wall time. memory: MiB of a step's peak beyond the memory
in use between steps, with autocompare that holds 32 MiB of inputs, for models of more and more
layers: `added` must not grow with them.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any
from unittest import mock

import torch

from benchmarks import child
from benchmarks.memory import reset_peak, resident, status
from benchmarks.models import VOCABULARY, bert
from benchmarks.options import Options
from benchmarks.report import Progress, Report, Row

CAPTURE_BOUND = 3.0
LAYERS = (1, 2, 4)
MIB = float(1 << 20)
ROUNDS = 5
HELD = 32 << 20


def training_step(layers: int = 4) -> Callable[[], Any]:
    """A step of BERT with its optimizer."""
    torch.manual_seed(0)
    model = bert(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, VOCABULARY, (4, 128))

    def step() -> None:
        model(input_ids=tokens).last_hidden_state.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(what: str, layers: int = 4) -> dict[str, Any]:
    """One of the measurements, in this process."""
    step = training_step(layers)
    step()
    return {"imported": imported, "capture": capture, "time": times, "memory": memory}[what](step)


def spent(step: Callable[[], Any], clock: Callable[[], float] = time.process_time) -> float:
    """Seconds of one step."""
    start = clock()
    step()
    return clock() - start


def imported(step: Callable[[], Any]) -> dict[str, Any]:
    before = [spent(step) for _ in range(4 * ROUNDS)]
    importlib.import_module("dicp.op_tools")
    after = [spent(step) for _ in range(4 * ROUNDS)]
    hooks = len(torch.overrides._get_current_function_mode_stack())
    return {"eager": min(before), "tool": min(after), "hooks": hooks}


def capture(step: Callable[[], Any]) -> dict[str, Any]:
    from dicp.op_tools import OpCapture, storage

    writing: list[float] = []
    write = storage.write

    def clocked(*parts: Any) -> None:
        start = time.process_time()
        write(*parts)
        writing.append(time.process_time() - start)

    plain, whole, in_files, files = [], [], [], 0
    for _ in range(ROUNDS):
        plain.append(spent(step))
        writing.clear()
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(storage, "write", clocked):
            tool = OpCapture(folder=folder, quiet=True)
            with tool:
                whole.append(spent(step))
        in_files.append(sum(writing))
        files = len(tool.saved)
    rest = [a - b for a, b in zip(whole, in_files, strict=True)]
    return {"eager": median(plain), "tool": median(rest), "writing": median(in_files),
            "files": files}  # fmt: skip


def times(step: Callable[[], Any]) -> dict[str, Any]:
    from dicp.op_tools import OpTimeMeasure

    plain, measured, reported, calls, own = [], [], [], 0, 0.0
    for _ in range(ROUNDS):
        plain.append(spent(step, time.perf_counter))
        tool = OpTimeMeasure(quiet=True, folder=tempfile.mkdtemp())
        with tool:
            measured.append(spent(step, time.perf_counter))
        reported.append(sum(r.elapsed for r in tool.results) / 1e3)
        calls, own = len(tool.results), tool.overhead
    return {"eager": median(plain), "tool": median(reported), "with_tool": median(measured),
            "calls": calls, "own_ms_per_call": own}  # fmt: skip


def memory(step: Callable[[], Any]) -> dict[str, Any]:
    from dicp.op_tools import OpAutoCompare

    def peak(run: Callable[[], Any]) -> float:
        before = resident()
        reset_peak()
        run()
        return status("VmHWM") - before

    plain = min(peak(step) for _ in range(3))

    def compared() -> None:
        with OpAutoCompare(quiet=True, folder=tempfile.mkdtemp(), held_bytes=HELD):
            step()

    compared()
    found = min(peak(compared) for _ in range(2))
    return {"eager": plain, "tool": found, "added": found - plain}


def run(options: Options, report: Report, progress: Progress) -> None:
    """Every measurement in a process of its own."""
    report.unit, report.group_by = "ms, MiB", "measured"
    report.note = (__doc__ or "").partition("\n\n")[2]
    whats: list[tuple[str, int]] = [(w, 4) for w in ("imported", "capture", "time")]
    whats += [("memory", n) for n in LAYERS]
    for what, layers in progress.over(whats, lambda case: case[0]):
        row = Row(what, {"layers": str(layers)})
        report.rows.append(row)
        try:
            found = child.run("tools", {"what": what, "layers": layers})
        except child.ChildFailed as error:
            row.failures["tool"] = str(error)
            continue
        scale = 1 / MIB if what == "memory" else 1e3
        row.values = {name: found[name] * scale for name in ("eager", "tool")}
        for name in ("writing", "with_tool", "added"):
            if name in found:
                row.values[name] = found[name] * scale
        row.detail = found
        if what == "capture" and found["tool"] > CAPTURE_BOUND * found["eager"]:
            row.wrong["tool"] = f"above {CAPTURE_BOUND} times the step"
