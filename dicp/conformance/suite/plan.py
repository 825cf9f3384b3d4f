"""`gen_data` and `run_test` as a whole: which operators, in which processes, and what is said."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from dicp.conformance.configuration import Configuration, Skip
from dicp.conformance.names import OperatorNames
from dicp.conformance.processes import run
from dicp.conformance.rows import FAILURES, Row
from dicp.conformance.suite.reference import is_current, stored
from dicp.conformance.suite.runs import CaseUnit
from dicp.conformance.suite.sources import (
    UnknownOperatorError,
    chosen,
    made_from,
    making_command,
    model_entries,
    operator_names,
)
from dicp.errors import ConformanceConfigError, ReferenceDataError

GROUP: Final = 20
"""Operators in one process."""
UNIT_SECONDS: Final = 24 * 3600.0


@dataclass(frozen=True)
class Processes:
    """How many processes run at a time, and after how many seconds a case hangs."""

    jobs: int = 1
    case_seconds: float = 120.0

    def run(self, units: Sequence[CaseUnit], report: Callable[[Row], object]) -> None:
        run(units, report, self.jobs, self.case_seconds, UNIT_SECONDS)


@dataclass
class Generated:
    """What `gen_data` made: cases, bytes, operators that were there, cases left out by reason."""

    cases: int = 0
    bytes: int = 0
    current: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    failed: list[Row] = field(default_factory=list)


def generate(
    patterns: Sequence[str], unit: CaseUnit, processes: Processes, report: Callable[[Row], object]
) -> Generated:
    """Make the reference data of operators that have none yet; `unit` says where and how.

    Raises UnknownOperatorError.
    """
    known = sorted(model_entries(Path(unit.model))) if unit.model else None
    names = chosen(patterns, known, unit.cases)
    source = unit.samples, unit.device, unit.cases, unit.model
    wanted = [
        name for name in names if not is_current(Path(unit.data), name, made_from(name, *source))
    ]
    result = Generated(current=len(names) - len(wanted))

    def add(row: Row) -> None:
        report(row)
        if row.result in FAILURES:
            result.failed.append(row)
            return
        result.cases += row.details["cases"]
        result.bytes += row.details["bytes"]
        result.left_out.update(row.details["left_out"])

    processes.run(_units(replace(unit, task="gen_data"), wanted), add)
    return result


@dataclass
class Compared:
    """The results of `run_test`, a row for each case, and the skips that no case needed."""

    rows: list[Row] = field(default_factory=list)
    unused: list[Skip] = field(default_factory=list)

    @property
    def failures(self) -> list[Row]:
        return [row for row in self.rows if row.result in FAILURES]


def compare(
    patterns: Sequence[str], unit: CaseUnit, processes: Processes, report: Callable[[Row], object]
) -> Compared:
    """Run the stored cases of operators; `unit` says on what.

    Raises UnknownOperatorError, ReferenceDataError and ConformanceConfigError.
    """
    settings = Configuration.read(Path(unit.config) if unit.config else None)
    names = stored_operators(patterns, unit)
    _check_operators(settings, names)
    result = Compared()

    def add(row: Row) -> None:
        result.rows.append(row)
        report(row)

    processes.run(_units(replace(unit, task="run_test"), names), add)
    used = {row.details.get("skip_line") for row in result.rows}
    result.unused = [skip for skip in settings.of_cases() if skip.line not in used]
    return result


def stored_operators(patterns: Sequence[str], unit: CaseUnit) -> list[str]:
    """The operators that match and have reference data.

    Raises UnknownOperatorError and ReferenceDataError.
    """
    return _with_data(patterns, Path(unit.data), unit.model)


def _with_data(patterns: Sequence[str], folder: Path, model: str) -> list[str]:
    """The operators with data that match. Raises ReferenceDataError if a pattern has none."""
    known = stored(folder)
    try:
        names = chosen(patterns, known)
    except UnknownOperatorError:
        there = sorted(model_entries(Path(model))) if model else operator_names()
        names = chosen(patterns, there)  # says so if there is no such operator
        known = []
    if not names or not known:
        command = making_command(folder, patterns, {"model": model})
        raise ReferenceDataError(folder, "it holds no data of these operators", command)
    return names


def _check_operators(settings: Configuration, known: Sequence[str]) -> None:
    """Raises ConformanceConfigError for an expression that matches no operator there is."""
    try:
        settings.check_operators(OperatorNames(known))
    except ConformanceConfigError:
        settings.check_operators(OperatorNames(operator_names()))


def _units(unit: CaseUnit, names: Sequence[str]) -> list[CaseUnit]:
    return [
        replace(unit, file=f"{unit.task} {k // GROUP}", operators=tuple(names[k : k + GROUP]))
        for k in range(0, len(names), GROUP)
    ]


def logger() -> logging.Logger:
    """Writes lines to stdout as the public DIOPI suite does."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s - %(name)s - %(levelname)s - %(message)s"))
    found = logging.Logger("DIOPI-Test")
    found.addHandler(handler)
    return found


def log_row(log: logging.Logger, row: Row, debug_level: int) -> None:
    """The line of one case, and at higher levels what a failing case is."""
    name = f"diopi_functions.{row.cls}"
    if row.result == "passed" and "ms" in row.details:
        log.info(
            "Run %s succeed: %.4f ms, eager %.4f ms, %.0f%% of copy bandwidth",
            name,
            row.details["ms"],
            row.details["eager_ms"],
            100 * row.details["copy_share"],
        )
    elif row.result == "passed":
        log.info("Run %s succeed", name)
    elif row.result == "skipped":
        log.info("Run %s skipped: %s (case %s)", name, row.reason, row.test)
    else:
        log.error("Run %s failed: %s (case %s)", name, row.reason, row.test)
        if debug_level:
            log.error("%s", row.details.get("case", f"{row.cls} {row.test}"))
        if "values" in row.details:
            log.error("%s", row.details["values"])
