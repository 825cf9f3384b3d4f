"""Reading the results of the operator tools: what they write under `op_tools_results`."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dicp.op_tools.autocompare import RESULTS as COMPARISONS
from dicp.op_tools.bisect import RESULTS as BISECTIONS
from dicp.op_tools.capture import CAPTURES
from dicp.op_tools.one_iter import RESULTS as MODULES
from dicp.op_tools.process_monitor import RESULTS as MONITOR
from dicp.op_tools.results import FOLDER as RESULTS_FOLDER
from dicp.op_tools.timing import RESULTS as TIMINGS

FOLDER = str(RESULTS_FOLDER)
_SLOWEST = 100
_ESTIMATE = " (estimate)"

Row = Mapping[str, str]


@dataclass(frozen=True)
class Timing:
    """All calls of one operator or kernel, in milliseconds."""

    name: str
    calls: int
    forward: float
    backward: float
    estimated: bool


@dataclass(frozen=True)
class ToolResults:
    """What the tools found; all empty where there are no results.

    failures: rows of comparisons that failed. timings: the slowest, longest first.
    captures: operator -> number of calls captured. monitor: file -> rows. bisections: what each
    found. modules: rows of one_iter with a wrong value or a note, of `module_values` in all.
    said: lines that tools printed while a script ran. unread: files that could not be read.
    """

    folder: str = ""
    compared: int = 0
    failures: Sequence[Row] = ()
    timings: Sequence[Timing] = ()
    captures: Mapping[str, int] = field(default_factory=dict)
    monitor: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    bisections: Sequence[Row] = ()
    modules: Sequence[Row] = ()
    module_values: int = 0
    said: Sequence[str] = ()
    unread: Sequence[str] = ()

    @property
    def any(self) -> bool:
        found = self.timings, self.captures, self.monitor, self.bisections, self.said
        return bool(self.compared or self.module_values or any(found))


def read_results(folder: Path, since: float = 0.0, said: Sequence[str] = ()) -> ToolResults:
    """Read a folder of results: files that were changed at or after `since`, seconds since the
    epoch. Files that are damaged are named in `unread`."""
    unread: list[str] = []

    def rows(kind: str) -> Iterator[Row]:
        for file in _files(folder / kind, since):
            yield from _rows(file, unread)

    comparisons = list(rows(COMPARISONS))
    failures = [row for row in comparisons if row.get("allclose") != "True"]
    monitor = {file.name: list(_rows(file, unread)) for file in _files(folder / MONITOR, since)}
    modules = list(rows(MODULES))
    return ToolResults(
        str(folder), len(comparisons), failures, _timings(rows(TIMINGS)),
        _captures(folder / CAPTURES, since), monitor, list(rows(BISECTIONS)),
        [row for row in modules if row.get("verdict") != "ok"], len(modules), list(said), unread,
    )  # fmt: skip


def _files(folder: Path, since: float) -> list[Path]:
    # The clock of a file system may lag behind the process's by a tick.
    return [f for f in sorted(folder.glob("*.csv")) if f.stat().st_mtime >= since - 1]


def _rows(file: Path, unread: list[str]) -> Iterator[Row]:
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                yield {str(k): str(v) for k, v in row.items() if k is not None}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        unread.append(f"{file}: {type(error).__name__}")


def _timings(rows: Iterator[Row]) -> list[Timing]:
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        times = (_number(row.get("forward_elasped")), _number(row.get("backward_elasped")))
        found.setdefault(row.get("name", ""), []).append(times)
    timings = [
        Timing(
            name.removesuffix(_ESTIMATE), len(times), sum(t[0] for t in times),
            sum(t[1] for t in times), name.endswith(_ESTIMATE),
        )
        for name, times in found.items()
    ]  # fmt: skip
    return sorted(timings, key=lambda t: -(t.forward + t.backward))[:_SLOWEST]


def _number(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0


def _captures(folder: Path, since: float) -> dict[str, int]:
    """Operator -> captured calls: OPERATOR/PID/ID/TIME/input.json."""
    counts = Counter(
        file.parents[3].name for file in folder.glob("*/*/*/*/input.json")
        if file.stat().st_mtime >= since - 1
    )  # fmt: skip
    return dict(counts.most_common())
