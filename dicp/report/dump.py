"""Reading a dump folder: the records that `dicp.dynamo_bridge.recording` describes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dicp.dynamo_bridge.recording import BREAKS, FORMAT, PROGRAM, REPORT, TIMES
from dicp.errors import ReportSourceError

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Program:
    """One program of a graph, and the times of its steps; `times` is empty where none were asked
    for or the graph never ran."""

    record: Record
    times: Record


@dataclass(frozen=True)
class Graph:
    """One compiled graph: its report and its programs."""

    report: Record
    programs: Sequence[Program]


@dataclass(frozen=True)
class Dump:
    """A dump's graphs in the order they were compiled, and the graph breaks of all processes."""

    graphs: Sequence[Graph]
    breaks: Sequence[Record]
    lines: Mapping[str, str]
    """`file:line` -> the text of the line."""

    @property
    def measured(self) -> list[Program]:
        """The programs whose steps were timed."""
        return [p for g in self.graphs for p in g.programs if p.times.get("seconds")]


def read_dump(folder: Path, source: Path | None = None) -> Dump:
    """Read a dump; `source` is the script that wrote it.

    Raises ReportSourceError for a folder without a dump, and for a script that compiled nothing.
    """
    lines: dict[str, str] = {}
    breaks: list[Record] = []
    for file in sorted(folder.glob(BREAKS.format(pid="*"))):
        record = _read(file)
        breaks += record["breaks"]
        lines |= record["lines"]
    graphs = [graph for each in sorted(folder.iterdir()) if each.is_dir()
              for graph in _graphs(each)]  # fmt: skip
    if not graphs:
        raise ReportSourceError(source or folder, _nothing(folder, source, breaks))
    for graph in graphs:
        lines |= graph.report["lines"]
        for program in graph.programs:
            lines |= program.record.get("lines", {})
    return Dump(sorted(graphs, key=lambda graph: graph.report["created"]), breaks, lines)


def _graphs(folder: Path) -> Iterator[Graph]:
    """The graph whose folder this is, if it is one."""
    report = next(folder.glob(f"*_{REPORT}"), None)
    if report is None:
        return
    programs: list[Program] = []
    for file in sorted(folder.glob("*.json")):
        name = file.name.partition("_")[2]
        if name == PROGRAM:
            programs.append(Program(_read(file), {}))
        elif name == TIMES:  # numbered right after its program
            programs[-1] = Program(programs[-1].record, _read(file))
    yield Graph(_read(report), programs)


def _read(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(file.read_text("utf-8"))
        found = record["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReportSourceError(file, f"it cannot be read: {type(error).__name__}") from error
    if found != FORMAT:
        problem = f"its records have format {found}, and this dicp reads {FORMAT}: dump again"
        raise ReportSourceError(file, problem)
    return dict(record)


def _nothing(folder: Path, source: Path | None, breaks: Sequence[Record]) -> str:
    """Why there is no graph."""
    if source is None:
        if any(folder.glob("*/*_report.txt")):
            return "it was dumped by an older dicp, which wrote no records for tools: dump again"
        return "it holds no compiled graph"
    text = "it ran and compiled no graph by a backend of dicp"
    reasons = [f"{each['place']}: {each['reason'].splitlines()[0]}" for each in breaks[:3]]
    return text + (f"; Dynamo left to Python: {'; '.join(reasons)}" if reasons else "")
