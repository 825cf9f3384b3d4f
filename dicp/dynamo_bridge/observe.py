"""Observation of a compilation: reports, stage times, and the dump of every stage."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from dicp.config import Config
from dicp.dynamo_bridge.recording import (
    FORMAT,
    PROGRAM,
    REPORT,
    TIMES,
    program_record,
    source_lines,
    write_record,
    write_text,
)
from dicp.dynamo_bridge.timed import TimedExecutable
from dicp.errors import CompilerError, DumpFolderError, GraphRejectedError
from dicp.origin import origin_of
from dicp.private_files import reason_of
from dicp.target import Executable, KernelReport, NodeReport, Program, Source, Target, is_number
from dicp.torch_private import GraphBreak, OpOverload, frame_seconds


@dataclass
class GraphReport:
    """How one graph was compiled: stage times in seconds, every operator, every kernel."""

    kind: str
    name: str = ""
    stages: dict[str, float] = field(default_factory=dict)
    nodes: Sequence[NodeReport] = ()
    kernels: Sequence[KernelReport] = ()
    cache: str = "cold"
    notes: list[str] = field(default_factory=list)
    """Decisions on the graph as a whole."""
    created: float = field(default_factory=time.time)
    record: Path | None = None
    """The file of this report in the dump; None until it is written."""

    @property
    def counts(self) -> dict[str, int]:
        """The number of operators by decision; `fused` counts those that share a kernel."""
        found: Counter[str] = Counter(node.decision for node in self.nodes)
        fused = sum(len(k.sources) for k in self.kernels if len(k.sources) > 1)
        kinds = ("compiled", "library", "view", "eager")
        return {**{k: found.get(k, 0) for k in kinds}, "fused": fused}

    def as_record(self) -> dict[str, Any]:
        """The report as JSON values, for a dump."""
        nodes = [
            {"node": n.name, "op": n.op, "line": n.user_line, "decision": n.decision,
             "reason": n.reason}
            for n in self.nodes
        ]  # fmt: skip
        return {
            "format": FORMAT, "kind": self.kind, "name": self.name, "cache": self.cache,
            "created": self.created, "pid": os.getpid(), "stages": self.stages, "nodes": nodes,
            "lines": source_lines(n.user_line for n in self.nodes),
        }  # fmt: skip

    def drop_programs(self) -> None:
        """Drop the kernels' programs, but keep their names and operators."""
        self.kernels = [KernelReport(kernel.name, kernel.origins) for kernel in self.kernels]

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {k}" for k, n in self.counts.items())
        lines = [f"{self.kind} graph {self.name} ({self.cache}): {counts}"]
        lines.append("  " + ", ".join(f"{k} {s * 1e3:.1f} ms" for k, s in self.stages.items()))
        lines += [f"  {note}" for note in self.notes]
        for node in self.nodes:
            if node.reason:
                place = f" at {node.user_line}" if node.user_line else ""
                lines.append(f"  {node.decision}: {node.op} ({node.name}){place}: {node.reason}")
        for kernel in self.kernels:
            lines += [f"  {kernel.name}", *(f"    {row}" for row in kernel.text.splitlines())]
        return "\n".join(lines)


RNN_ADVICE = (
    "set rnn=True (DICP_RNN=1 in the environment, or options={'rnn': True}) to have nn.LSTM, "
    "nn.GRU and nn.RNN traced and compiled"
)


def breaks_text(breaks: Sequence[GraphBreak]) -> str:
    """Lines on what Dynamo left to Python: where, why, and the option that avoids it, if any."""
    lines = []
    for found in breaks:
        reason = [line.strip() for line in found.reason.splitlines() if line.strip()]
        why = reason[0] if reason else "no reason given"
        if len(reason) > 1 and reason[1].startswith("Explanation: "):
            why += f": {reason[1].removeprefix('Explanation: ')}"
        kind = "skipped by Dynamo" if found.skipped else "graph break"
        lines.append(f"{kind} at {found.place}: {why}")
        if found.is_recurrent:
            lines.append(f"  {RNN_ADVICE}")
    return "".join(f"{line}\n" for line in lines)


def eager_nodes(
    gm: fx.GraphModule, reason: str = "the code could not be built"
) -> list[NodeReport]:
    """The report on a graph that runs operator by operator; what Python computes of numbers is no
    operator."""
    calls = ("call_function", "call_method", "call_module")
    return [
        NodeReport(origin_of(node), "eager", reason)
        for node in gm.graph.nodes
        if node.op in calls
        and (isinstance(node.target, OpOverload) or not is_number(node.meta.get("val")))
    ]


class FrontEnd:
    """Measures PyTorch's share of a compilation up to `finish`: Dynamo, then AOTAutograd."""

    def __init__(self) -> None:
        self._dynamo = frame_seconds()
        self._start = time.perf_counter()

    def finish(self, reports: Sequence[GraphReport], config: Config) -> None:
        """Add both times to the first of `reports`, those of the graphs compiled meanwhile."""
        spent = time.perf_counter() - self._start
        ours = sum(sum(report.stages.values()) for report in reports)
        stages = {"dynamo": self._dynamo, "aotautograd": max(spent - ours, 0.0)}
        if reports:
            reports[0].stages = {**stages, **reports[0].stages}
            if reports[0].record is not None:
                write_record(reports[0].record, reports[0].as_record())
        if config.timings:
            sys.stderr.write(f"dicp: front end: {_milliseconds(stages)}\n")


def _milliseconds(stages: Mapping[str, float]) -> str:
    return ", ".join(f"{k} {s * 1e3:.1f}" for k, s in stages.items())


class Observer:
    """Fills one report and writes the dump folder where the config asks for it."""

    def __init__(self, config: Config, report: GraphReport) -> None:
        self.config = config
        self.report = report
        self._folder = self._make_folder() if config.dump is not None else None
        self._step = 0

    def _make_folder(self) -> Path:
        assert self.config.dump is not None
        base = Path(self.config.dump)
        name = re.sub(r"[^\w.-]", "_", f"{self.report.name}_{self.report.kind}")
        folder, number = base / name, 1
        while True:  # other processes may create the same folder
            try:
                folder.mkdir(parents=True)
                return folder
            except FileExistsError:
                number += 1
                folder = base / f"{name}_{number}"
            except OSError as error:
                raise DumpFolderError(base, reason_of(error)) from error

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        except (CompilerError, GraphRejectedError) as error:
            if self._folder is not None:
                whole = error.diagnostics if isinstance(error, CompilerError) else ""
                self._write("compiler_log.txt", f"{error}\n\n{whole}".rstrip() + "\n")
            raise
        spent = time.perf_counter() - start
        self.report.stages[name] = self.report.stages.get(name, 0.0) + spent

    def after_pass(self, name: str, gm: fx.GraphModule, seconds: float, changed: bool) -> None:
        self.report.stages[name] = self.report.stages.get(name, 0.0) + seconds
        if changed:
            self.graph(name, gm)

    def graph(self, name: str, gm: fx.GraphModule) -> None:
        if self._folder is not None:
            self._write(f"{name}.txt", graph_text(gm))

    def program(self, target: Target, program: Program, source: Source, gm: fx.GraphModule) -> None:
        if self._folder is not None:
            self._write("program.txt", program.text())
            for name, text in source.files.items():
                self._write(name, text)
            record = program_record(target, program, source, gm, self.config)
            write_record(self._next(PROGRAM), record)

    def timed(
        self, run: Executable, target: Target, program: Program, gm: fx.GraphModule
    ) -> Executable:
        """`run`, whose steps are timed at the first run where the config asks for it."""
        if self._folder is None or not self.config.dump_times:
            return run
        # As many programs as times: a graph may be compiled in parts.
        return TimedExecutable(run, gm, self._next(TIMES), target.untimed(program, self.config))

    def _next(self, name: str) -> Path:
        assert self._folder is not None
        self._step += 1
        return self._folder / f"{self._step - 1:02d}_{name}"

    def _write(self, name: str, text: str) -> None:
        write_text(self._next(name), text)

    def finish(self) -> None:
        if self._folder is not None:
            self.report.record = self._next(REPORT)
            write_record(self.report.record, self.report.as_record())
            self._write("report.txt", f"{self.report}\n")
        if self.config.timings:
            total = sum(self.report.stages.values())
            parts = _milliseconds(self.report.stages)
            sys.stderr.write(
                f"dicp: {self.report.kind} graph {self.report.name} ({self.report.cache}) "
                f"{total * 1e3:.1f} ms: {parts}\n"
            )


def graph_text(gm: fx.GraphModule) -> str:
    """One line per node: name, dtype and shape, operator, arguments."""
    lines = []
    for node in gm.graph.nodes:
        shape = val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            shape = f"{str(val.dtype).removeprefix('torch.')}{list(val.shape)}"
        args = ", ".join([*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())])
        target = node.target if node.op != "output" else "output"
        lines.append(f"{node.name}: {shape} = {target}({args})")
    return "\n".join(lines) + "\n"
