"""`coverage`: how a backend handles each operator, and in how many cases it failed."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final

from dicp.conformance.rows import FAILURES
from dicp.conformance.suite.reports import table_page
from dicp.dynamo_bridge.conversion import operator_table
from dicp.errors import ResultsFileError
from dicp.target import Target

COLUMNS: Final = ("operator", "decision", "cases", "failing", "reason")
DECISIONS: Final = ("compiled", "library", "view", "decomposed", "eager")
CSV: Final = "coverage.csv"
HTML: Final = "coverage.html"


@dataclass(frozen=True)
class Coverage:
    """One operator overload: the decision on it, and the cases whose graphs called it."""

    operator: str
    decision: str
    cases: int
    failing: int
    reason: str


def coverage_of(target: Target, report: Path | None) -> list[Coverage]:
    """Every operator that the target has a rule for or core ATen has, and those that cases met.

    report: what `run_test` wrote. Raises ResultsFileError.
    """
    cases, failing, met = _counts(report) if report is not None else (Counter(), Counter(), {})
    rows = {row.op: (row.decision, row.reason) for row in operator_table(target)}
    known = {**{op: (decision, "") for op, decision in met.items()}, **rows}
    return [
        Coverage(op, decision, cases[op], failing[op], reason)
        for op, (decision, reason) in sorted(known.items())
    ]


def _counts(report: Path) -> tuple[Counter[str], Counter[str], dict[str, str]]:
    """Cases and failing cases by operator overload, and the decision on each."""
    cases: Counter[str] = Counter()
    failing: Counter[str] = Counter()
    met: dict[str, str] = {}
    try:
        for case in json.loads(report.read_text("utf-8"))["cases"]:
            decisions: Mapping[str, str] = case["details"].get("decisions", {})
            cases.update(decisions.keys())
            if case["result"] in FAILURES:
                failing.update(decisions.keys())
            met |= decisions
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ResultsFileError(report, problem, "python -m dicp.conformance run_test") from None
    return cases, failing, met


def write_coverage(rows: Sequence[Coverage], folder: Path, title: str) -> list[Path]:
    """Write the table as CSV and HTML; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / CSV).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(map(astuple, rows))
    counts = Counter(row.decision for row in rows)
    page = table_page(title, COLUMNS, [list(astuple(row)) for row in rows], 1,
                      {decision: counts[decision] for decision in DECISIONS})  # fmt: skip
    (folder / HTML).write_text(page, "utf-8")
    return [folder / CSV, folder / HTML]
